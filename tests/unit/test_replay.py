"""`headrace replay`: which records can be replayed, with which request, and what counts as a difference."""

import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import StartupError
from headrace_logger.values import row, to_json
from headrace_protos import headrace_pb2 as pb
from headrace_runner.replay import records
from headrace_runner.replay.options import check_writable, found_lines, summary_lines, write_json
from headrace_runner.replay.records import LoggedStream, of_file, select
from headrace_runner.replay.replay import FailedError, Replay
from headrace_runner.replay.results import Answer, Difference, Results, compare, percentiles
from headrace_runner.terminal import Painter

PLAIN = Painter(coloured=False)
ID = "01900000-0000-7000-8000-000000000001"
SAMPLING = {"max_tokens": 20, "seed": 7, "temperature": 0.5, "min_tokens": 4, "pace": 9.0, "hedge": 2, "priority": -3}


def record(**changes: Any) -> pb.PayloadRecord:
    """An answer of four tokens that ended with "stop"."""
    values: dict[str, Any] = {
        "record_id": ID,
        "request_id": "mine",
        "model": "m",
        "protocol": "headrace.v1.TextGeneration/Generate",
        "prompt": "Once",
        "prompt_kind": "text",
        "prompt_ids": [5, 6],
        "parameters": json.dumps({"stop": ["END"]}),
        "sampling": json.dumps(SAMPLING),
        "chunks": [pb.PayloadChunk(text="a b", token_ids=[1, 2]), pb.PayloadChunk(text=" c d", token_ids=[3, 4])],
        "text": "a b c d",
        "finish_reason": "stop",
        "status": "OK",
        "usage": pb.Usage(prompt_tokens=2, completion_tokens=4),
        "ttft_ms": 10.0,
        "duration_ms": 50.0,
        "engine_ms": 5.0,
        "fingerprint": "f",
    }
    return pb.PayloadRecord(**{name: value for name, value in (values | changes).items() if value is not None})


def stream(**changes: Any) -> LoggedStream:
    selected = select(record(**changes))
    assert isinstance(selected, LoggedStream), selected
    return selected


def answer(*token_ids: int, text: str = "a b c d", finish_reason: str = "stop") -> Answer:
    return Answer(token_ids, text, finish_reason, 11.0, 55.0)


# ---------------------------------------------------------------- which records


def test_the_request_repeats_everything_that_decides_the_tokens_and_nothing_else() -> None:
    request = stream(served_model="other").request
    assert (request.model, request.request_id) == ("other", f"replay-{ID}")
    assert (list(request.prompt_ids), list(request.stop)) == ([5, 6], ["END"])
    assert (request.max_tokens, request.seed, request.temperature, request.min_tokens) == (20, 7, 0.5, 4)
    # Parameters that the record does not have are sent too: the other stack may have other defaults.
    assert all(request.HasField(name) for name in ("top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos"))
    assert not any(request.HasField(name) for name in ("pace", "hedge", "cache_salt", "prompt"))
    assert request.priority > 0, "the callers' own requests start first"


@pytest.mark.parametrize(("seed", "sent"), [(-1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (0, 0)])
def test_a_seed_is_sent_as_the_bits_that_the_sampler_uses(seed: int, sent: int) -> None:
    assert stream(sampling=json.dumps(SAMPLING | {"seed": seed, "top_k": -1})).request.seed == sent


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request_id": f"replay-{ID}"}, records.REPLAY),
        ({"sampling": "", "chunks": [], "engine_ms": None}, records.NOT_A_GENERATION),
        ({"incomplete": True}, records.INCOMPLETE),
        ({"ttft_ms": None, "chunks": [], "status": "CANCELLED"}, "no tokens (CANCELLED)"),
        ({"status": "ABORTED", "sampling": ""}, records.ABORTED),
        ({"chunks": [], "text": ""}, records.NO_ANSWER),
        ({"chunks": [pb.PayloadChunk(text="[redacted]")]}, records.NO_IDS),
        ({"chunks": [pb.PayloadChunk(text="a"), pb.PayloadChunk(text="b", token_ids=[4])]}, records.NO_IDS),
        ({"sampling": ""}, records.NO_SAMPLING),
        ({"prompt_ids": []}, records.NO_PROMPT),
        ({"fingerprint": ""}, records.NO_FINGERPRINT),
        ({"sampling": '{"max_tokens": 20, "seed": null}'}, records.OTHER_SAMPLING),
        ({"sampling": '{"max_tokens": 20, "seed": 1, "warp": 1}'}, records.OTHER_SAMPLING),
        ({"parameters": '"[redacted]"'}, records.OTHER_SAMPLING),
        ({"parameters": '{"stop": 7}'}, records.OTHER_SAMPLING),
    ],
)
def test_a_record_that_cannot_be_replayed_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    assert select(record(**changes)) == reason


def test_a_callers_own_id_that_only_begins_like_one_of_a_replay_is_replayed() -> None:
    assert stream(request_id="replay-of-a-song").record.request_id == "replay-of-a-song"


def test_an_answer_that_was_cut_off_is_replayed_up_to_its_last_token() -> None:
    cut = stream(
        status="CANCELLED",
        finish_reason="",
        chunks=[pb.PayloadChunk(text="a b", token_ids=[1, 2])],
        usage=pb.Usage(prompt_tokens=2, completion_tokens=2),
        text="a b",
    )
    assert not cut.is_whole
    assert (cut.request.max_tokens, cut.request.min_tokens, list(cut.request.stop)) == (2, 2, [])


def test_texts_and_messages_are_sent_on_request_where_the_record_has_them() -> None:
    def prompt_of(**changes: Any) -> pb.GenerateRequest:
        selected = select(record(**changes), from_text=True)
        assert isinstance(selected, LoggedStream)
        return selected.request

    assert (prompt_of().prompt, len(prompt_of().prompt_ids)) == ("Once", 0)
    messages = json.dumps([{"role": "user", "content": "hi"}])
    [message] = prompt_of(prompt=messages, prompt_kind="messages").messages
    assert (message.role, message.content) == ("user", "hi")
    for changes in (
        {"prompt": "[5, 6]", "prompt_kind": "ids"},
        {"prompt": messages, "prompt_kind": "messages", "parameters": '{"chat_template_kwargs": {"a": 1}}'},
        {"prompt": messages, "prompt_kind": "messages", "parameters": '{"tools": []}'},
        {"prompt": messages.replace("}", ', "tool_calls": []}'), "prompt_kind": "messages"},
        {"prompt": "x" * 2**20 + "…"},
    ):
        assert list(prompt_of(**changes).prompt_ids) == [5, 6]


# ---------------------------------------------------------------- differences


@pytest.mark.parametrize(
    ("replayed", "kind", "position", "on_record", "now"),
    [
        (answer(1, 2, 9, 4, text="a b X d"), "token", 2, 3, 9),
        (answer(9, 2, 3, 4), "token", 0, 1, 9),
        (answer(1, 2, 3), "token", 3, 4, None),
        (answer(1, 2, 3, 4, 5), "token", 4, None, 5),
        (answer(1, 2, 3, 4, finish_reason="length"), "end", 4, "stop", "length"),
        (answer(1, 2, 3, 4, text="a b c e"), "text", 6, "d", "e"),
        (answer(), "token", 0, 1, None),
    ],
)
def test_the_first_difference_is_found(replayed: Answer, kind: str, position: int, on_record: Any, now: Any) -> None:
    found = compare(stream(), replayed)
    assert found is not None
    assert (found.kind, found.position, found.recorded, found.replayed) == (kind, position, on_record, now)


def test_an_answer_that_was_cut_off_must_be_the_beginning_of_its_replay() -> None:
    cut = stream(status="CANCELLED", finish_reason="", text="a b c")  # The text lags behind the tokens.
    assert compare(cut, answer(1, 2, 3, 4, finish_reason="length")) is None
    assert compare(cut, answer(1, 2, 3, 4, 5, text="a b c d e")) is None
    shorter = compare(cut, answer(1, 2, 3))
    assert shorter is not None
    assert (shorter.position, shorter.replayed) == (3, None)
    other = compare(cut, answer(1, 2, 3, 4, text="a X"))
    assert other is not None
    assert (other.kind, other.position) == ("text", 2)


def test_texts_are_compared_where_a_record_has_no_chunks() -> None:
    text_only = stream(chunks=[])
    assert text_only.token_ids == ()
    assert compare(text_only, answer(7, 7)) is None
    found = compare(text_only, answer(7, 7, text="a b"))
    assert found is not None
    assert (found.kind, found.position, found.recorded, found.replayed) == ("text", 3, " ", None)


def test_a_difference_shows_the_text_around_it() -> None:
    begin = "once upon a time there was a fox who lived by the river and "
    found = compare(stream(text=begin + "ran"), answer(1, 2, 3, 9, text=begin + "slept"))
    assert found is not None
    assert found.recorded_text == "…" + begin[-40:] + "ran"
    assert found.replayed_text == "…" + begin[-40:] + "slept"


# ---------------------------------------------------------------- results


def test_the_exit_code_is_that_of_a_gate() -> None:
    def code(*findings: Difference | FailedError | None) -> int:
        results = Results()
        for found in findings:
            if isinstance(found, FailedError):
                results.add_failure(stream(), found.status, "down")
            else:
                results.add(stream(), answer(), found)
        return results.exit_code

    difference, failure = Difference("token", 0, 1, 2, "", ""), FailedError("UNAVAILABLE", "down")
    assert (code(None), code(None, difference), code(None, failure), code(failure), code()) == (0, 1, 1, 1, 2)


def test_durations_are_those_of_whole_answers_without_a_pace() -> None:
    unpaced = json.dumps(SAMPLING | {"pace": 0})
    results = Results()
    for logged in (stream(), stream(sampling=unpaced), stream(sampling=unpaced, status="CANCELLED", finish_reason="")):
        results.add(logged, answer(1, 2, 3, 4), None)
    assert (len(results.duration), len(results.ttft)) == (1, 3)
    assert percentiles([float(value) for value in range(101)]) == {"p50": 50.0, "p95": 95.0}
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0}
    assert percentiles([]) == {"p50": None, "p95": None}


class ScriptedTarget:
    """Answers as the test says, by the request's prompt; counts the calls that are open at once."""

    def __init__(self) -> None:
        self.open = self.most_open = 0
        self._lock = threading.Lock()
        self._two_are_open = threading.Event()

    def fingerprint(self, model: str) -> str:
        return "g"

    def generate(self, request: pb.GenerateRequest) -> Answer:
        with self._lock:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            if self.open == 2:
                self._two_are_open.set()
        assert self._two_are_open.wait(20)
        with self._lock:
            self.open -= 1
        if request.prompt_ids[0] == 8:
            raise FailedError("UNAVAILABLE", "down")
        return answer(1, 2, 3, 9 if request.prompt_ids[0] == 9 else 4)


def replay(records: list[pb.PayloadRecord], **options: Any) -> tuple[Results, ScriptedTarget, list[str]]:
    target, lines = ScriptedTarget(), list[str]()
    run = Replay(
        target,  # type: ignore[arg-type]
        **{"concurrency": 2, "limit": 100, "from_text": False} | options,
        found=lambda logged, found: lines.extend(found_lines(logged, found, PLAIN)),
    )
    return run.run(records), target, lines


def test_every_record_is_counted_once_and_few_run_at_once() -> None:
    first = [record(prompt_ids=[number]) for number in (1, 8, 9, 2, 3)]
    results, target, lines = replay([*first, record(incomplete=True), record(request_id=f"replay-{ID}")])
    assert (results.same, len(results.different), len(results.failed)) == (3, 1, 1)
    assert results.not_comparable == {"incomplete record": 1, "a replay": 1}
    assert target.most_open == 2
    assert sorted(line.split()[0] for line in lines if not line.startswith(" ")) == ["different", "failed"]
    assert any("token 3: 4 on record, 9 now" in line for line in lines)
    text = "\n".join(summary_lines(results, PLAIN))
    assert "weights of m: f (5) on record, g now" in text
    assert "failed                1  UNAVAILABLE: 1" in text
    document = json.loads(json.dumps(results.as_dict()))
    assert (document["exit_code"], document["failed"], document["different"]) == (1, {"UNAVAILABLE": 1}, 1)
    assert document["differences"][0]["replay_request_id"] == f"replay-{ID}"


def test_the_limit_ends_a_run_and_is_reported() -> None:
    results, _, _ = replay([record()] * 5, limit=3)
    assert (results.same, results.limit_reached) == (3, True)
    assert not replay([record()] * 3, limit=3)[0].limit_reached


# ---------------------------------------------------------------- files


def read(path: Path, since: datetime | None = None, model: str | None = None) -> list[pb.PayloadRecord]:
    return [*of_file(path, since, model)]


def test_the_lines_of_an_export_and_of_rest_are_read(tmp_path: Path) -> None:
    full = record()
    full.time.FromDatetime(datetime(2026, 5, 4, tzinfo=UTC))
    full.chunks[0].logprobs.extend([float("nan"), -1.0])
    file = tmp_path / "log.jsonl"
    from google.protobuf.json_format import MessageToJson

    file.write_bytes(to_json(row(full)) + b"\n\n" + MessageToJson(full, indent=None).encode() + b"\n")
    full.chunks[0].ClearField("logprobs")  # Not read.
    exported, of_rest = read(file)
    assert select(exported) == select(of_rest) == select(full)
    assert read(file, model="other") == []
    assert read(file, since=datetime(2026, 5, 5, tzinfo=UTC)) == []


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"{", "line 1: not a record"),
        (b"[]", "line 1: not a record, which is a JSON object"),
        (b"{}", "line 1: not a record: it has no record_id"),
        (b'{"record_id": "a"}\n{"record_id": "b", "chunks": 7}', "line 2: not a record"),
        (b"\xff", "it is not UTF-8"),
    ],
)
def test_a_file_that_is_no_export_is_refused_in_one_line(tmp_path: Path, contents: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(contents)
    with pytest.raises(StartupError) as refused:
        read(tmp_path / "file")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "report.json"):
        with pytest.raises(StartupError, match="cannot be written"):
            check_writable(path)
    check_writable(tmp_path / "report.json")
    write_json(tmp_path / "report.json", {"a": "ü"})
    assert json.loads((tmp_path / "report.json").read_text()) == {"a": "ü"}
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
