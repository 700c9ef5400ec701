"""`headrace doctor` in this environment: it passes, and names a wrong setting of a service, of keys and of Envoy."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from socket import create_server

from headrace_runner.settings import StackSettings
from tests.support.free_ports import free_offset


def examined(*settings: str) -> tuple[int, dict[str, str]]:
    """The exit code, and each check's line."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace_runner.command", "doctor", f"PORT_OFFSET={free_offset()}", *settings],
        env=os.environ | {"DEVICE": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.returncode, {line.split()[1]: line for line in done.stdout.splitlines()}


def test_it_passes_where_a_stack_starts() -> None:
    code, lines = examined()
    assert code == 0, lines
    assert lines["packages"].startswith("ok    packages   torch 2.")
    assert lines["settings"].startswith("ok    settings   the services and Envoy accept them")
    assert len(lines) == 8


def test_a_model_that_services_refuse_as_absent_and_a_taken_port_are_named(tmp_path: Path) -> None:
    offset = free_offset()
    port = StackSettings(port_offset=offset).gateway_port
    with closing(create_server(("127.0.0.1", port))):
        code, lines = examined(f"PORT_OFFSET={offset}", f"RUN_FOLDER={tmp_path}", "MODELS=chat=./nonexistent")
    assert code == 1
    assert len(lines) == 8
    assert lines["settings"].startswith("FAIL")
    assert "MODELS=chat=./nonexistent: " in lines["settings"]
    assert lines["ports"] == f"FAIL  ports      port {port} is taken; set GATEWAY_PORT=… to another"
    assert lines["memory"].startswith("FAIL")
    assert "nonexistent" in lines["memory"]
