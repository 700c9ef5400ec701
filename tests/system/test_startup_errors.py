"""`make up` starts the services as users do: what keeps one from starting is visible, also if that is an import.

Most suites fork services from processes that have imported their modules (tests/support/forkserver.py). Errors of
models: tests/model/test_loading.py; of settings: tests/unit/test_runner_settings.py; of ports: test_runner_stack.py.
"""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager

from headrace_runner.settings import ROOT
from tests.support.free_ports import free_settings
from tests.waiting import until


@asynccontextmanager
async def up(folder, **variables):
    """The command in a new process, and the function that returns its output so far."""
    settings = free_settings(folder / "run")
    ports = {name: str(numbers[0]) for name, numbers in settings.ports().items()}
    with (folder / "output").open("w+") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace_runner", "up"),
            cwd=ROOT,
            env=os.environ | ports | {"RUN_FOLDER": str(folder / "run")} | variables,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            yield process, (folder / "output").read_text
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()


async def test_a_service_that_refuses_its_model_ends_the_command_with_its_line(tmp_path):
    async with up(tmp_path, MODELS="x=tests/unit") as (process, output):
        assert await process.wait() == 1
        assert "model x: tests/unit has no config.json" in output().splitlines()[-1]
        assert "Traceback" not in output()


async def test_a_service_that_cannot_import_is_reported_with_its_log(tmp_path):
    (tmp_path / "headrace_logger").mkdir()
    (tmp_path / "headrace_logger" / "__init__.py").write_text("import not_installed")
    async with up(tmp_path, PYTHONPATH=str(tmp_path)) as (_, output):
        log = tmp_path / "run" / "logs" / "logger.log"
        line = f"logger ended with exit code 1; starting it again in 0.2 s (see {log})"
        await until(lambda: line in output())
        assert "No module named 'not_installed'" in log.read_text()
