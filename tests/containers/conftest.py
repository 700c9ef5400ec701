"""One stack for all container tests, from a clean engine; a closing table of times and sizes.

Without an engine the tests are skipped with a message; with REQUIRE_ENGINE=1, as in CI, they fail.
"""

import os
import subprocess
from collections.abc import Generator, Iterator

import pytest

from tests.containers.stack import BASE_IMAGE, ComposeStack, size_mb

_TIMEOUT_S = 900  # The first test waits for the images.
_OURS = ("transformer", "predictor", "logger", "loadtest")

_stack: ComposeStack | None = None


@pytest.fixture(scope="session")
def engine() -> None:
    """Checks that a Docker engine with Compose answers."""
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            message = f"no Docker engine: `{' '.join(command)}` fails"
            if os.environ.get("REQUIRE_ENGINE") == "1":
                pytest.fail(message)
            pytest.skip(message)


@pytest.fixture(scope="session")
def built(engine: None, tmp_path_factory: pytest.TempPathFactory) -> ComposeStack:
    """The stack's images; no container runs."""
    global _stack
    _stack = stack = ComposeStack(tmp_path_factory.mktemp("wheelhouse"))
    stack.compose("down", "--volumes", "--remove-orphans")
    with stack.timed("build (only what the engine has cached is not new)"):
        stack.compose("build")
    for name in _OURS:
        stack.sizes[name] = size_mb(f"headrace-{name}:test") - size_mb(BASE_IMAGE)
    return stack


@pytest.fixture(scope="session")
def stack(built: ComposeStack) -> Iterator[ComposeStack]:
    """The stack, built and ready; tests may stop parts of it, and start them again."""
    try:
        with built.timed("kernels of this machine's other tests"):
            built.copy_kernels()
        with built.timed("up --wait, from nothing else"):
            built.compose("up", "--wait")
        yield built
    finally:
        built.compose("down", "--volumes", "--remove-orphans")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attaches the end of the containers' logs to a failed test."""
    report = yield
    if report.failed and _stack is not None:
        report.sections.append(("containers", _stack.logs()))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _stack is None:
        return
    terminalreporter.section("containers")
    for step, seconds in _stack.times:
        terminalreporter.write_line(f"{seconds:7.1f} s   {step}")
    for name, size in _stack.sizes.items():
        terminalreporter.write_line(f"{size:7.0f} MB  image {name}, over {BASE_IMAGE} ({size_mb(BASE_IMAGE):.0f} MB)")
