"""The command `headrace` starts a stack with one model, calls and checks it, and shows its records and traces."""

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import pytest_asyncio

from headrace_runner.command.__main__ import main
from headrace_runner.settings import ROOT
from tests.support.free_ports import free_settings
from tests.waiting import until

TRACE_PAGE = "http://127.0.0.1:16686/trace/"


class Served:
    """A stack that `headrace serve` started, and the commands that talk to it."""

    def __init__(self, folder: Path) -> None:
        settings = free_settings(folder / "run")
        ports = {name: str(numbers[0]) for name, numbers in settings.ports().items()}
        own = {"RUN_FOLDER": str(folder / "run"), "DEVICE": "cpu", "GATEWAY_TRACE_PAGE": TRACE_PAGE}
        self.environment = os.environ | ports | own
        self.folder = folder
        self.gateway = settings.gateway
        self.lines: list[str] = []  # The output of `headrace serve`.

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace_runner.command", *arguments),
            cwd=self.folder,
            env=self.environment | {"PYTHONPATH": str(ROOT)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        """Exit code, output and errors of a command."""
        process = await self.start(*arguments)
        output, errors = await process.communicate(stdin.encode())
        return process.returncode or 0, output.decode(), errors.decode()

    def call(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        """The same within this process, for commands that do not start a program; this saves a second of imports."""
        code, output, errors = 0, io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
            patch.setattr(os, "environ", self.environment)
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            patch.chdir(self.folder)
            try:
                main(list(arguments))
            except SystemExit as end:
                code = int(end.code or 0)
        return code, output.getvalue(), errors.getvalue()

    def output(self, *arguments: str, stdin: str = "") -> str:
        """The output of a command, which must succeed."""
        code, output, errors = self.call(*arguments, stdin=stdin)
        assert (code, errors) == (0, "")
        return output


@pytest_asyncio.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """`headrace serve` with a folder's relative path, in another folder than the checkout."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "tale").symlink_to(ROOT / "models" / "storyteller")
    own = Served(folder)
    process = await own.start("serve", "./tale", "--name", "acme/teller", "GATEWAY_TRACE_PERCENT=100")
    assert process.stdout is not None
    try:
        while not own.lines or not own.lines[-1].startswith("logs "):
            line = (await process.stdout.readline()).decode()
            assert line, own.lines
            own.lines.append(line)
        yield own
    finally:
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 0


async def test_each_ready_service_is_a_line_and_four_lines_follow(served: Served) -> None:
    assert any(line.startswith("gateway") and served.gateway in line for line in served.lines)
    [ready] = [number for number, line in enumerate(served.lines) if line.startswith("ready in")]
    assert [line.split()[0] for line in served.lines[ready + 1 :]] == ["playground", "call", "check", "logs"]
    assert '"model": "acme/teller"' in served.lines[ready + 2]
    assert not any("grpcurl" in line or "metrics" in line for line in served.lines)


async def record_of(served: Served, text: str) -> dict[str, object]:
    """The record of a prompt, once it is written."""
    found = await until(lambda: served.output("log", "--json", "--contains", text, "--since", "1h"))
    return dict(json.loads(found.splitlines()[-1]))


async def test_a_prompt_is_answered_and_recorded(served: Served) -> None:
    code, answer, errors = await served.run("chat", "--max-tokens", "20", "--temperature", "0", "Tell me of a fox.")
    assert (code, errors) == (0, "")
    again = served.output("chat", "--max-tokens", "20", "--temperature", "0", stdin="Tell me of a fox.\n")
    assert answer == again
    assert len(answer.split()) > 5
    record = await record_of(served, "Tell me of a fox.")
    assert str(record["text"]).strip() == answer.strip()

    line = (served.output("log", "-n", "1", "--request-id", str(record["request_id"]))).split()
    assert line[2:5] == ["acme/teller", "OK", "length"]
    whole = served.output("log", str(record["record_id"]))
    assert f"request      {record['request_id']}\n" in whole
    for wanted in ("trace_id", "request_id", "record_id"):
        shown = served.output("trace", str(record[wanted]))
        assert f"spans {TRACE_PAGE}{record['trace_id']}\n" in shown
        assert "headrace.v1.TextGeneration/Generate: OK length" in shown


async def test_usage_is_shown(served: Served) -> None:
    served.output("chat", "--max-tokens", "3", "Tell me of a quiet heron.")
    await record_of(served, "Tell me of a quiet heron.")
    title, line = served.output("usage", "--since", "1h", "--model", "acme/teller").splitlines()
    assert title.split()[:3] == ["client", "model", "requests"]
    assert line.split()[:2] == ["-", "acme/teller"]
    [total] = map(json.loads, served.output("usage", "--group", "all", "--json").splitlines())
    assert int(total["requests"]) >= 1
    assert int(total["completion_tokens"]) >= 1


async def test_the_log_can_be_followed(served: Served) -> None:
    process = await served.start("log", "--follow", "-n", "1", "--contains", "a small owl", "--json")
    assert process.stdout is not None
    following = asyncio.create_task(process.stdout.readline())
    try:
        while not following.done():  # until the command has begun to follow.
            served.output("chat", "--max-tokens", "2", "Tell me of a small owl.")
            await asyncio.wait({following}, timeout=1)
        assert json.loads(following.result())["model"] == "acme/teller"
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert (process.returncode, errors) == (130, b"")


async def test_every_endpoint_is_checked(served: Served) -> None:
    code, output, _ = await served.run("smoke", "acme/teller")
    assert code == 0, output
    assert output.startswith("acme/teller: text generation, decoder, with chat template\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chat", "--model", "nothing", "x"), "NOT_FOUND: "),
        (("chat", "--max-tokens", "0", "x"), "INVALID_ARGUMENT: max_tokens"),
        (("trace", "nothing"), "no record of 'nothing'"),
        (("log", "--gateway", "127.0.0.1:9"), "no stack answers at 127.0.0.1:9; `headrace up`"),
        (("smoke", "--gateway", "127.0.0.1:9"), "no stack answers at 127.0.0.1:9; `headrace up`"),
        (("serve", "./nothing"), "'./nothing' is not a folder"),
    ],
)
def test_an_error_is_one_line(served: Served, arguments: tuple[str, ...], message: str) -> None:
    code, output, errors = served.call(*arguments)
    assert (code, output) == (1, "")
    assert errors.startswith(message)
    assert errors.count("\n") == 1
