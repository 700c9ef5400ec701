"""`headrace replay`: logged streams run again are the same at the same weights, and every one differs at others."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest_asyncio

from headrace_logger.values import row, to_json
from headrace_protos import headrace_pb2_grpc
from headrace_protos.headrace_pb2 import ChatMessage, GenerateRequest, PayloadRecord
from headrace_runner.command.__main__ import parse
from headrace_runner.replay import options as replay_options
from headrace_runner.settings import ROOT
from tests.support.free_ports import free_settings
from tests.support.runner_stack import Stack
from tests.system.calls import channel, generate, headrace, infer, query, records, rest, text_request
from tests.waiting import until


def copy_with_other_weights(model: Path, folder: Path) -> Path:
    """Copies a model, with every weight negated, to a new folder; returns the folder."""
    copy = Path(shutil.copytree(model, folder))
    negate_weights(copy / "model.safetensors")
    return copy


def negate_weights(path: Path) -> None:
    """Flips the sign of each number in a safetensors file with only bfloat16."""
    contents = path.read_bytes()
    begin = 8 + int.from_bytes(contents[:8], "little")  # The header's length, and the header.
    path.write_bytes(contents[:begin] + (np.frombuffer(contents[begin:], "<u2") ^ 0x8000).tobytes())


MODEL = {"model": "storyteller"}
ONLY = "storyteller=models/storyteller"
TOKENS = 16
REFUSED = "no tokens (INVALID_ARGUMENT)"
PROMPTS = ("Once upon a time", "The little mill by the river", "One morning a fox", "It was raining, so the children")

Call = Callable[[str, int], Awaitable[object]]


def generated(**fields: Any) -> Call:
    """A call of `Generate`, with a prompt and request id by its number."""

    async def call(gateway: str, number: int) -> object:
        prompt = {} if "messages" in fields else {"prompt": PROMPTS[number % len(PROMPTS)]}
        own = {"request_id": f"r{number}", "max_tokens": TOKENS} | prompt | fields
        seed = {"seed": number} if fields.get("temperature", 1) and "seed" not in fields else {}
        return await generate(gateway, **MODEL, **own | seed)

    return call


def posted(path: str, **fields: Any) -> Call:
    async def call(gateway: str, number: int) -> object:
        answer = await rest(gateway, "POST", path, {**MODEL, "max_tokens": TOKENS, **fields})
        assert answer.status == 200, answer.body
        return answer

    return call


async def of_tensors(gateway: str, number: int) -> object:
    return await infer(gateway, text_request("storyteller", PROMPTS[0], max_tokens=TOKENS, seed=number))


async def without_a_seed(gateway: str, number: int) -> object:
    """The server chooses the seed, and the maximum of tokens from the context."""
    return await generate(gateway, **MODEL, prompt=PROMPTS[1], request_id=f"r{number}", stop=["."])


async def cancelled(gateway: str, number: int) -> object:
    """A paced answer whose caller leaves after its third message."""
    fields = {"request_id": f"r{number}", "seed": number, "pace": 10, "ignore_eos": True}
    request = GenerateRequest(**MODEL, prompt=PROMPTS[2], **fields)
    async with channel(gateway) as open_channel:
        call = headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request)
        for _ in range(3):
            await call.read()
        call.cancel()
    return None


CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]
# Every kind of stream, each with the number of its records.
KINDS: tuple[tuple[Call, int], ...] = (
    (generated(temperature=0), 1),
    (generated(temperature=0.8), 1),
    (generated(temperature=1.3, top_p=0.9, top_k=40, ignore_eos=True), 1),
    (generated(min_p=0.05, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5), 1),
    (generated(stop=[" the", " a "], temperature=0.9), 1),
    (generated(stop_token_ids=list(range(300, 340)), min_tokens=3), 1),
    (generated(logprobs=True, top_logprobs=3, chunk_tokens=4), 1),
    (generated(cache_salt="s", hedge=2, priority=-5, temperature=0.7), 1),
    (generated(messages=[ChatMessage(**CHAT[0])]), 1),
    (without_a_seed, 1),
    (of_tensors, 1),
    (cancelled, 1),
    (posted("/v1/chat/completions", messages=CHAT, n=2, seed=5, logprobs=True), 2),
    (posted("/v1/chat/completions", messages=CHAT, n=2, chat_template_kwargs={"unused": 1}), 2),
    (posted("/v1/completions", prompt=[5, 6, 7, 300], temperature=0.6), 1),
    (posted("/v1/completions", prompt=list(PROMPTS[:2]), n=2, logprobs=2), 4),
)


async def log_streams(gateway: str) -> None:
    """Runs a stream of every kind, eight at a time, until they are on record."""
    turn = asyncio.Semaphore(8)

    async def run(number: int, call: Call) -> None:
        async with turn:
            await call(gateway, number)

    await asyncio.gather(*(run(number, call) for number, (call, _) in enumerate(KINDS)))
    await records(gateway, sum(count for _, count in KINDS), model="storyteller")


async def whole_answers(gateway: str) -> list[PayloadRecord]:
    """The records of callers' answers of TOKENS tokens."""
    found = await query(gateway, page_size=1000, finish_reason="length")
    callers = [record for record in found if not record.request_id.startswith("replay-")]
    return [record for record in callers if record.usage.completion_tokens == TOKENS]


async def replay(source: str, against: str, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON report."""
    out = folder / "report.json"
    options = parse(["replay", against, "--since", "1h", "--out", str(out), *arguments])
    code = await asyncio.to_thread(replay_options.replay, options, source)
    return code, json.loads(out.read_text())


@pytest_asyncio.fixture(scope="module")
async def source(stacks) -> AsyncIterator[Stack]:
    """A stack with streams of every kind on record, and a request that it has refused."""
    own = await stacks.start({"models": ONLY})
    await log_streams(own.gateway)
    refused = await rest(own.gateway, "POST", "/v1/completions", {**MODEL, "prompt": "a", "top_p": 2})
    assert refused.status == 400
    await records(own.gateway, status="INVALID_ARGUMENT")
    yield own
    await stacks.stop(own)


@pytest_asyncio.fixture(scope="module")
async def updated(stacks, tmp_path_factory) -> AsyncIterator[Stack]:
    """A stack whose model of the same name has other weights."""
    folder = copy_with_other_weights(ROOT / "models" / "storyteller", tmp_path_factory.mktemp("updated") / "model")
    async with stacks.use(models=f"storyteller={folder}") as own:
        yield own


async def test_the_same_weights_give_the_same_tokens_and_replays_are_not_replayed(source, tmp_path, capsys):
    logged = [record for record in await query(source.gateway, page_size=1000) if record.ttft_ms]
    code, report = await replay(source.gateway, source.gateway, tmp_path)
    output = capsys.readouterr().out
    assert (code, report["exit_code"], report["different"], report["failed"]) == (0, 0, 0, {}), output
    assert report["same"] == report["replayed"] == len(logged)
    assert report["not_comparable"][REFUSED] == 1
    assert report["ttft_ms"]["streams"] == len(logged)
    assert None not in report["duration_ms"]["replayed"].values()
    [(model, sides)] = report["fingerprints"].items()
    assert (model, list(sides["recorded"])) == ("storyteller", [sides["replayed"]])
    assert output.splitlines()[-1] == f"the same: {len(logged)} streams, token by token"

    ids = {f"replay-{record.record_id}" for record in logged}
    await until(
        lambda: query(source.gateway, page_size=1000),
        holds=lambda records: ids <= {record.request_id for record in records},
    )
    code, report = await replay(source.gateway, source.gateway, tmp_path, "--from-text")
    assert (code, report["same"], report["not_comparable"]["a replay"]) == (0, len(logged), len(logged))


async def test_every_stream_differs_at_other_weights(source, updated, tmp_path, capsys):
    code, report = await replay(source.gateway, updated.gateway, tmp_path)
    output = capsys.readouterr().out
    assert (code, report["same"], report["failed"]) == (1, 0, {}), output
    assert report["different"] == report["replayed"] >= len(KINDS)
    assert len({each["record_id"] for each in report["differences"]}) == report["different"]
    for each in report["differences"]:
        assert each["kind"] == "token"
        assert each["recorded"] != each["replayed"]
        assert each["record_id"] in output
    [sides] = report["fingerprints"].values()
    assert sides["replayed"] not in {"", *sides["recorded"]}
    assert "weights of storyteller: " in output


async def test_one_changed_token_of_an_export_is_found_at_its_position(source, tmp_path, capsys):
    logged = await whole_answers(source.gateway)
    changed = logged[0]
    expected = changed.chunks[-1].token_ids[-1]
    changed.chunks[-1].token_ids[-1] = expected + 1
    (tmp_path / "log.jsonl").write_bytes(b"".join(to_json(row(record)) + b"\n" for record in logged[:2]))
    code, report = await replay(source.gateway, source.gateway, tmp_path, "--from", str(tmp_path / "log.jsonl"))
    assert (code, report["same"], report["different"]) == (1, 1, 1)
    [found] = report["differences"]
    assert (found["record_id"], found["kind"], found["position"]) == (changed.record_id, "token", TOKENS - 1)
    assert (found["recorded"], found["replayed"]) == (expected + 1, expected)
    assert f"token {TOKENS - 1}: {expected + 1} on record, {expected} now" in capsys.readouterr().out


async def test_what_cannot_be_compared_is_one_line_and_exit_code_2(source, tmp_path):
    nowhere = free_settings(tmp_path).gateway
    away, unreadable, empty = await asyncio.gather(
        headrace("replay", nowhere, "--gateway", source.gateway),
        headrace("replay", source.gateway, "--gateway", nowhere),
        headrace("replay", source.gateway, "--gateway", source.gateway, "--model", "nobody"),
    )
    assert [done.returncode for done in (away, unreadable, empty)] == [2, 2, 2], (away, unreadable, empty)
    assert away.stderr.startswith(f"no stack answers at {nowhere}: UNAVAILABLE")
    assert unreadable.stderr.startswith("the payload log cannot be read: UNAVAILABLE")
    assert all(len(done.stderr.splitlines()) == 1 for done in (away, unreadable))
    assert empty.stdout.splitlines()[-1] == "nothing was compared"
