"""Attacks of one caller, at an address of its own, that take all of what callers share: see attacks.py."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from tests.fuzz.target import Target, attack
from tests.system.calls import text_request

_OTHER = "127.0.0.2"
_COMPLETIONS = "/v1/completions"
_AT_ONCE = 24


async def _stream(target: Target, fields: Mapping[str, Any]) -> str:
    """One completion, read to its end."""
    body = json.dumps({"model": "storyteller", "prompt": "Once", **fields}).encode()
    return await target.post(_COMPLETIONS, body, to_end=True, connection="close")


@attack
async def paced_streams(target: Target) -> None:
    """64 streams that ask for five tokens a second: twice as many as an engine has slots."""
    caller = replace(target, address=_OTHER)
    fields = {"max_tokens": 100, "ignore_eos": True, "pace": 5, "stream": True}
    await caller.repeat(64, lambda: _stream(caller, fields))


@attack
async def slow_grammars(target: Target) -> None:
    """24 forms at once, no two of them equal, of almost 64 KiB: the slowest to read, check and compile that are taken.

    Each takes an unloaded processor about 0.1 s in all, most of it in llguidance, which bounds it.
    """
    caller, numbers = replace(target, address=_OTHER), count()

    def schema() -> dict[str, Any]:
        number = next(numbers)
        kinds = [
            {
                "type": "object",
                "properties": {
                    f"f{number}_{kind}_{index}": {"type": "string", "pattern": f"^.*{index}.{{{index + 1}}}$"}
                    for index in range(20)
                },
            }
            for kind in range(40)
        ]
        return {"anyOf": kinds}

    await caller.repeat(_AT_ONCE, lambda: _stream(caller, {"max_tokens": 1, "structured_outputs": {"json": schema()}}))


@attack
async def forged_resume_ids(target: Target) -> None:
    """2,100 streams at once that go on from ids which nobody gave."""
    caller, numbers = replace(target, address=_OTHER), count()
    body = json.dumps({"model": "storyteller", "prompt": "Once", "stream": True}).encode()

    async def one() -> str:
        number = next(numbers)
        last = f"{number:054d}.{number % 100}.{number:08x}.{number % 200}.{number:016x}"
        return await caller.post(_COMPLETIONS, body, accept="text/event-stream", last_event_id=last)

    await caller.repeat(2_100, one)


@attack
async def unknown_responses(target: Target) -> None:
    """300 callers that ask for stored responses which nobody has, of the form of real ones."""
    caller, numbers = replace(target, address=_OTHER), count()

    async def one() -> str:
        return await caller.post(f"/v1/responses/resp_{next(numbers):048x}", b"", method="GET")

    await caller.repeat(300, one)


@attack
async def template_without_end(target: Target) -> None:
    """24 chats at once with a model whose template computes a number of 370 million digits."""
    caller = replace(target, address=_OTHER)
    body = json.dumps({"model": "powers", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}).encode()
    await caller.repeat(_AT_ONCE, lambda: caller.post("/v1/chat/completions", body))


@attack
async def tokens_at_the_predictor(target: Target) -> None:
    """Generations and tensors for the authority `predictor`, by which a caller could pass the transformer's counts."""
    caller = replace(target, address=_OTHER)
    text = text_request("storyteller", "Once", max_tokens=1000).SerializeToString()
    paths = [f"/inference.GRPCInferenceService/Model{kind}Infer" for kind in ("", "Stream")]
    paths += ["/headrace.v1.TextGeneration/Generate", "/headrace.v1.PredictorSteps/Run"]
    numbers = count()
    await caller.repeat(64, lambda: caller.grpc_post(paths[next(numbers) % len(paths)], text, host="predictor"))
