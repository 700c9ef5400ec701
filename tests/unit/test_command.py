"""The command `headrace` reads its arguments, and shows records in plain text."""

import io
import re
from datetime import UTC, datetime
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.errors import StartupError
from headrace_protos import headrace_pb2 as pb
from headrace_runner.command import models, records, start
from headrace_runner.command.__main__ import parse
from headrace_runner.command.chat import Conversation
from headrace_runner.settings import ROOT, StackSettings
from headrace_runner.terminal import Painter, has_colours, one_line, printable

PLAIN = Painter(coloured=False)
COMMANDS = re.findall(r"^\| `headrace (\w+)", (ROOT / "docs" / "command.md").read_text(), re.MULTILINE)
NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)


def record(**fields: object) -> pb.PayloadRecord:
    base = {"record_id": "r", "request_id": "q", "model": "m", "status": "OK", "time": NOW, "duration_ms": 31.4}
    return pb.PayloadRecord(**{**base, **fields})


def test_every_command_has_a_help_page_and_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    def page(*command: str) -> str:
        with pytest.raises(SystemExit, check=lambda error: error.code == 0):
            parse([*command, "--help"])
        return capsys.readouterr().out

    for command in COMMANDS:
        assert page(command).startswith(f"usage: headrace {command}")
        assert all(len(line) <= 120 for line in page(command).splitlines())
    assert sorted(re.findall(r"^    (\w+) ", page(), re.MULTILINE)) == sorted(COMMANDS)


def test_settings_and_options_may_be_mixed() -> None:
    options = parse(["serve", "org/model", "--name", "chat", "DEVICE=cpu", "-v"])
    assert (options.model, options.name, options.settings, options.verbose) == (
        "org/model",
        "chat",
        ["DEVICE=cpu"],
        True,
    )
    options = parse(["log", "-f", "--contains", "fox", "--since", "2h", "-n", "5"])
    assert (options.follow, options.text_contains, options.number, options.id) == (True, "fox", 5, None)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["start"],
        ["log", "-n", "1001"],
        ["usage", "--since", "soon"],
        ["replay", "nowhere"],
        ["replay", "host:1", "--timeout", "-1"],
        ["trace", "x", "y"],
        ["up", "--all"],
    ],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, check=lambda error: error.code == 2):
        parse(arguments)
    assert "error: " in capsys.readouterr().err


def test_what_is_no_setting_is_refused() -> None:
    with pytest.raises(StartupError, match="'PREDICTORS' is not NAME=value"):
        start.run_runner("up", ["PREDICTORS"])
    with pytest.raises(StartupError, match=r"^PREDICTOR: unknown setting; did you mean PREDICTORS\?$"):
        start.run_runner("up", ["PREDICTOR=2"])


def test_a_folder_or_a_hub_id_is_served_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert start.models_setting("./my-model/", "") == f"my-model={tmp_path}/my-model"
    assert start.models_setting("my-model", "chat") == f"chat={tmp_path}/my-model"
    assert start.models_setting("org/Model-1.5@v2", "") == "org/Model-1.5=org/Model-1.5@v2"
    assert start.models_setting("gpt2", "") == "gpt2=gpt2"
    assert start.models_setting("chat=./my-model", "") == f"chat={tmp_path}/my-model"
    assert start.models_setting("a/b=org/Model@v2", "") == "a/b=org/Model@v2"
    assert start.models_setting("hf://org/Model@v2", "") == "org/Model=org/Model@v2"
    assert start.models_setting("s3://bucket/a/story/", "") == "story=s3://bucket/a/story"
    assert start.models_setting("oci://host:5000/a/story:v1", "") == "story=oci://host:5000/a/story:v1"
    assert start.with_absolute_folders("a=./my-model,b=org/name") == f"a={tmp_path}/my-model,b=org/name"
    assert start.with_absolute_folders("nonsense") == "nonsense"


@pytest.mark.parametrize(
    ("location", "name", "message"),
    [
        ("./nothing", "", "'./nothing' is not a folder"),
        ("s3://", "", "'s3://' is not s3://bucket/prefix"),
        ("gpt2", "a b", "give another with --name"),
        ("a b", "", "a b"),
    ],
)
def test_an_unusable_model_is_refused_in_one_line(location: str, name: str, message: str) -> None:
    with pytest.raises(StartupError) as refused:
        start.models_setting(location, name)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_times() -> None:
    assert records.since("90s", NOW) == datetime(2026, 5, 4, 11, 58, 30, tzinfo=UTC)
    assert records.since("7d", NOW) == datetime(2026, 4, 27, 12, tzinfo=UTC)
    assert records.since("2026-05-04T10:00:00+02:00") == datetime(2026, 5, 4, 8, tzinfo=UTC)


def test_a_line_of_the_log() -> None:
    chat = '[{"role": "system", "content": "be brief"}, {"role": "user", "content": "a\\u001b[2J\\nfox"}]'
    usage = pb.Usage(prompt_tokens=9, completion_tokens=4)
    line = records.as_line(record(prompt=chat, text="yes", finish_reason="stop", usage=usage, ttft_ms=7.0), PLAIN)
    assert line.split()[2:] == ["m", "OK", "stop", "9+4", "7/31", "ms", "q", "a\\x1b[2J", "fox", "→", "yes"]
    assert len(records.as_line(record(prompt="long " * 100), PLAIN, 100)) <= 100
    refused = records.as_line(record(status="INVALID_ARGUMENT"), Painter(coloured=True))
    assert "\033[31mINVALID_ARGUMENT" in refused


def test_a_trace_shows_each_hop_and_where_its_spans_are() -> None:
    call = pb.GatewayCall(path="/v1/completions", http_status=503, response_flags="UF", duration_ms=2.0)
    failed = record(
        trace_id="ab" * 16, protocol="p/M", status="UNAVAILABLE", message="no replica", failed_hop="predictor",
        gateway=call, resumes=1, chunks=[pb.PayloadChunk(offset_ms=ms) for ms in (1, 3, 10)],
    )  # fmt: skip
    assert records.hops(failed) == {
        "gateway": "/v1/completions: 503, UF after 2.0 ms",
        "transformer": "p/M: UNAVAILABLE, 0+0 tokens, 31 ms in all",
        "chunks": "3, the longest pause 7.0 ms",
        "resumed": "1 times at another predictor",
        "error": "predictor: no replica",
    }
    assert f"spans http://jaeger/trace/{'ab' * 16}\n" in records.as_trace([failed], "http://jaeger/trace/", PLAIN)
    assert "GATEWAY_TRACE_PAGE" in records.as_trace([failed], "", PLAIN)


def test_a_conversation_is_remembered_where_the_model_has_a_template() -> None:
    talk = Conversation("m", True, "be brief", {"max_tokens": 3})
    talk.answered("a", "b")
    request = talk.request("c")
    assert [(m.role, m.content) for m in request.messages] == [
        ("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c"),
    ]  # fmt: skip
    assert (request.max_tokens, request.HasField("temperature")) == (3, False)
    talk.forget()
    assert len(talk.request("c").messages) == 2
    alone = Conversation("m", False)
    alone.answered("a", "b")
    assert (alone.request("c").prompt, len(alone.request("c").messages)) == ("c", 0)


def test_usage_is_a_table_of_its_groups() -> None:
    sums = {"failed_requests": 1, "prompt_tokens": 12345, "cached_tokens": 0, "completion_tokens": 67, "seconds": 8.25}
    response = pb.UsageResponse(
        groups=[
            pb.UsageGroup(client="", model="storyteller", requests=1000, **sums),
            pb.UsageGroup(client="ann\x1b", model="", requests=2, **sums),
        ]
    )
    assert records.usage_table(response, PLAIN).splitlines() == [
        "client   model        requests  failed  prompt  cached  completion  seconds",
        "-        storyteller     1,000       1  12,345       0          67      8.2",
        "ann\\x1b  -                   2       1  12,345       0          67      8.2",
    ]
    assert records.usage_table(pb.UsageResponse(), PLAIN) == "no requests"
    total = pb.UsageResponse(groups=[pb.UsageGroup(requests=3, **sums)])
    assert records.usage_table(total, PLAIN).splitlines()[0].split()[0] == "requests"


@pytest.mark.parametrize(
    ("arguments", "wanted", "unwanted"),
    [
        (["load"], {"--class-picker", "--web-port"}, {"--headless"}),
        (
            ["load", "--knee", "--", "--objective", "TTFT <= 1 s", "ChatUser"],
            {"--headless", "TTFT <= 1 s"},
            {"--check"},
        ),
        (["load", "--check", "--", "-u", "8"], {"--headless", "--check", "-u"}, {"--class-picker"}),
    ],
)
def test_load_has_three_ways(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], wanted: set[str], unwanted: set[str]
) -> None:
    became: list[str] = []
    monkeypatch.setattr(start, "_become", lambda *given: became.extend(given))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    options = parse(arguments)
    start.run_load("127.0.0.1:8080", StackSettings(), options.mode, options.locust)
    assert became[0] == "locust"
    assert wanted <= set(became)
    assert not unwanted & set(became)
    assert became[2].endswith("knee_locustfile.py") == (options.mode != "check")


def test_models_of_the_caches_are_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert models.as_table([], 1e9, PLAIN).startswith(f"no models in {tmp_path}/headrace/models and the hub's cache")
    bucket, hub = tmp_path / "headrace/models/s3-b-m", tmp_path / "hub/models--org--name/snapshots" / ("c" * 40)
    for folder in (bucket / "digest", hub):
        folder.mkdir(parents=True)
    (bucket / ".listing.json").write_text('{"location": "s3://b/m", "digest": "digest", "names": []}')
    writer = gguf.GGUFWriter(bucket / "digest" / "q4.gguf", "llama")
    writer.add_tensor("output.weight", np.zeros((1000, 500), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    tensors = b'{"a": {"dtype": "BF16", "shape": [500], "data_offsets": [0, 1000]}}'
    (hub / "model.safetensors").write_bytes(len(tensors).to_bytes(8, "little") + tensors + bytes(1000))
    (hub / "config.json").write_text("{}")
    table = models.as_table(models.cached_models(), 1e9, PLAIN).splitlines()
    assert [line.split() for line in table] == [
        ["model", "size", "weights", "memory", "tokens/s"],
        ["org/name@cccccccccccc", "0.0", "MB", "BF16", "1.0", "GB", "1,000,000"],
        ["s3://b/m", "2.0", "MB", "F32", "1.0", "GB", "500"],
        ["memory", "bandwidth", "1.0", "GB/s,", "all", "cores", "together"],
    ]


def test_the_bandwidth_of_the_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_PROBE_BYTES", 8 << 20)
    assert 1e7 < models.memory_bandwidth() < 1e13


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "coloured"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
    ],
)
def test_colours_are_for_terminals_only(stream: io.StringIO, environment: dict[str, str], coloured: bool) -> None:
    assert has_colours(stream, environment) is coloured


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[2Jb\n\u200bé") == "a\\x1b[2Jb\n\\u200bé"
    assert one_line("two\nlines \x9b31m", 80) == "two lines \\x9b31m"
    assert one_line("abcdef", 4) == "abc…"
