"""A stack with keys, its clients, and helpers of their tests."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from tests.support.runner_stack import Stack
from tests.support.stacks import Stacks
from tests.system.calls import STREAMS, begun_streams

_NAMES = "root alice grace later monthly narrow counted few changing"
KEYS = {name: "hr-" + secrets.token_urlsafe(32) for name in _NAMES.split()}
COUNTED = (1000, 50_000)  # Requests and tokens in a minute.
FEW = 2  # Requests in a minute.
ENTRIES: list[dict[str, Any]] = [
    {"name": "root", "key": KEYS["root"], "role": "admin"},
    {"name": "alice", "key": KEYS["alice"], "models": ["storyteller"]},
    {"name": "grace", "key": KEYS["grace"], "models": ["acme/normalizer"]},
    {"name": "monthly", "key": KEYS["monthly"], "tokens_per_month": 5},
    {"name": "narrow", "key": KEYS["narrow"], "streams": 1},
    {"name": "counted", "key": KEYS["counted"], "requests_per_minute": COUNTED[0], "tokens_per_minute": COUNTED[1]},
    {"name": "few", "key": KEYS["few"], "requests_per_minute": FEW},
    {"name": "changing", "key": KEYS["changing"], "requests_per_minute": 1000, "tokens_per_minute": 100_000},
]
MODEL = "storyteller"
MODELS = "storyteller=models/storyteller,acme/normalizer=models/normalizer"
OK = "OK"
LOST_STATUS, MOST_ATTEMPTS = "Internal error from Core", 100

Headers = Mapping[str, str]


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"} if name else {}


def write(path: Path, entries: list[dict[str, Any]]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(entries))
    new.replace(path)


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write(path, ENTRIES)
    return path


@pytest_asyncio.fixture(scope="module")
async def keyed(stacks: Stacks, key_file: Path) -> AsyncIterator[tuple[Stack, Path]]:
    """A stack with the clients of ENTRIES, and its key file, which a test may change and restores."""
    at_once = {"predictor": {"PREDICTOR_MAX_RUNNING": str(STREAMS)}}
    async with stacks.use(gateway_keys=str(key_file), models=MODELS, environment=at_once) as started:
        yield started, key_file


async def status_of(call: Callable[[], Awaitable[Any]]) -> str:
    """The gRPC status of a call.

    grpc.aio loses the status of a call that is refused before its client has sent the first message, and reports an
    error of its own instead. Such a call is repeated.
    """
    for _ in range(MOST_ATTEMPTS):
        try:
            await call()
        except grpc.aio.AioRpcError as error:
            if error.details() != LOST_STATUS:
                return error.code().name
        else:
            return OK
    return LOST_STATUS


async def last_of(responses: Any) -> Any:
    return [response async for response in responses][-1:]


async def streams_of(who: str, open_channel: grpc.aio.Channel, tokens: int) -> list[asyncio.Task[int]]:
    """A client's STREAMS calls of `Generate`; see `begun_streams`."""
    metadata = tuple(bearer(who).items())
    return await begun_streams(open_channel, metadata=metadata, model=MODEL, prompt="Once", max_tokens=tokens)


COMPLETION = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Once"]}
REST: dict[str, tuple[str, str, Any]] = {
    "completion": ("POST", "/v1/completions", COMPLETION),
    "events": ("POST", "/v1/completions", COMPLETION | {"stream": True}),
    "infer": ("POST", f"/v2/models/{MODEL}/infer", {"inputs": [TENSOR], "parameters": {"max_tokens": 2}}),
    "generate": ("POST", f"/v2/models/{MODEL}/generate", {"text_input": "Once", "max_tokens": 2}),
    "lines": ("POST", "/headrace/v1/generate", COMPLETION),
    "models": ("GET", "/v1/models", None),
    "predictors": ("GET", "/headrace/v1/predictors", None),
    "ready": ("GET", "/v2/health/ready", None),
    "playground": ("GET", "/", None),
    "load": ("POST", "/v2/repository/models/acme/normalizer/load", {}),
    "log settings": ("GET", "/v2/logging", None),
    "payloads": ("GET", "/headrace/v1/payloads?page_size=1", None),
}
