"""Server-sent events, as a client that can reconnect reads them."""

from typing import NamedTuple


class Event(NamedTuple):
    """`id` is that of the newest event that has one, "" for none."""

    id: str
    data: str


def read_events(body: bytes) -> list[Event]:
    """The whole events of a stream, which may be cut anywhere. Source: WHATWG's HTML, section 9.2.6."""
    events, last_id, data = [], "", []
    for line in body[: body.rfind(b"\n") + 1].decode().split("\n")[:-1]:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append(Event(last_id, "\n".join(data)))
            data = []
        elif name == "data":
            data.append(value)
        elif name == "id":
            last_id = value
    return events
