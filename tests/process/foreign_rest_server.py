"""A server of only the protocol's V2 REST: HTTP/1.1 by hand, so that it can also break the protocol.

Models: `echo`, which returns its tensors in the requested form, and `ids`, which takes and returns token ids.
`script` holds the actions of the next calls of infer: return (status, headers, body), or raise `Broken`, which closes
the connection; an action gets the `Call`.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

LENGTH = "inference-header-content-length"
TENSORS = {
    "echo": {"inputs": [], "outputs": []},
    "ids": {
        "inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, -1]}],
        "outputs": [{"name": "output_ids", "datatype": "INT64", "shape": [1, -1]}],
    },
}


@dataclass
class Call:
    method: str
    path: str
    headers: dict
    body: bytes
    left: asyncio.Event = field(default_factory=asyncio.Event)  # The caller has closed its connection.

    @property
    def document(self):
        length = self.headers.get(LENGTH)
        return json.loads(self.body if length is None else self.body[: int(length)])


class Broken(Exception):  # noqa: N818
    """The connection breaks; the answer so far is sent."""

    def __init__(self, sent=b""):
        self.sent = sent


class ForeignRestServer:
    def __init__(self, *script, binary=True):
        self.script = deque(script)
        self.extensions = ["binary_tensor_data"] if binary else []
        self.ready = set(TENSORS)
        self.calls = []
        self.connections = 0
        self.probes = []

    async def answer(self, call):
        parts = call.path.split("/")[2:]
        if parts[:1] != ["models"]:
            return (200, {}, json.dumps({"name": "foreign", "version": "1", "extensions": self.extensions}).encode())
        name, method = parts[1], parts[-1] if len(parts) > 2 else ""
        if name not in self.ready:
            return 404, {}, json.dumps({"error": f"{name} is not here"}).encode()
        if method == "infer":
            self.calls.append(call)
            return await self.script.popleft()(call) if self.script else echo(call)
        self.probes.append(call)
        return 200, {}, json.dumps({"name": name, "versions": ["7"], "platform": "foreign", **TENSORS[name]}).encode()

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {
                    name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)
                }
                call = Call(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))
                watch = asyncio.create_task(self._watch(reader, call))
                try:
                    status, more, body = await self.answer(call)
                except Broken as broken:
                    writer.write(broken.sent)
                    break
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
                lines = [f"HTTP/1.1 {status} .", f"content-length: {len(body)}"]
                lines += [f"{name}: {value}" for name, value in more.items()]
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _watch(self, reader, call):
        if not await reader.read(1):
            call.left.set()


def echo(call):
    """The inputs as outputs, binary if requested."""
    document = call.document
    binary = document.get("parameters", {}).get("binary_data_output", False)
    length = call.headers.get(LENGTH)
    answer = {"model_name": "echo", "model_version": "7", "id": document.get("id"), "outputs": document["inputs"]}
    if not binary:
        return 200, {}, json.dumps(answer).encode()
    head = json.dumps(answer).encode()
    return 200, {LENGTH: str(len(head))}, head + call.body[int(length) :]


def says(status, body=b"", **headers):
    """The same answer to any call."""

    async def action(call):
        return status, {name.replace("_", "-"): value for name, value in headers.items()}, body

    return action


def breaks(sent=b""):
    async def action(call):
        raise Broken(sent)

    return action


async def never(call):
    """No answer, until the caller leaves."""
    await call.left.wait()
    raise Broken


@asynccontextmanager
async def foreign_rest_server(server, port=0):
    """Its address while it runs; connections are cut off at the end."""
    tasks = set()

    async def serve(reader, writer):
        tasks.add(asyncio.current_task())
        with suppress(asyncio.CancelledError):  # Otherwise asyncio's streams log it.
            await server.serve(reader, writer)

    listener = await asyncio.start_server(serve, "127.0.0.1", port, limit=2**17)
    try:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
