"""`headrace usage`: the usage as a table."""

from __future__ import annotations

import json
from typing import Any, Literal

from google.protobuf.json_format import MessageToDict

from headrace_protos import headrace_pb2 as pb
from headrace_runner.command.gateway import TIMEOUT_S, Gateway
from headrace_runner.terminal import BOLD, Painter, one_line

_KEYS: tuple[Literal["client"], Literal["model"], Literal["day"]] = ("client", "model", "day")
_SUMS = ("requests", "failed_requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_TITLES = {
    "failed_requests": "failed",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "completion_tokens": "completion",
}
_NAME = 40  # Characters of a client or a model.


def usage(gateway: Gateway, query: dict[str, Any]) -> pb.UsageResponse:
    """Usage as the fields of UsageRequest ask; raises StartupError."""
    with gateway.errors():
        return gateway.log.Usage(pb.UsageRequest(**query), timeout=TIMEOUT_S)  # type: ignore[no-any-return]


def as_json(group: pb.UsageGroup) -> str:
    return json.dumps(MessageToDict(group, preserving_proto_field_name=True))


def as_table(response: pb.UsageResponse, paint: Painter) -> str:
    """A line for each group under a line of titles; names to the left, numbers to the right."""
    groups = response.groups
    if not groups:
        return "no requests"
    keys = [key for key in _KEYS if groups[0].HasField(key)]
    titles = [*keys, *(_TITLES.get(name, name) for name in _SUMS), "seconds"]
    rows = [[*(_name(group, key) for key in keys), *_numbers(group)] for group in groups]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        aligned = (
            cell.ljust(width) if index < len(keys) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([paint(BOLD, line(titles)), *map(line, rows)])


def _name(group: pb.UsageGroup, key: str) -> str:
    return one_line(getattr(group, key), _NAME) or "-"


def _numbers(group: pb.UsageGroup) -> list[str]:
    return [*(f"{getattr(group, name):,}" for name in _SUMS), f"{group.seconds:,.1f}"]
