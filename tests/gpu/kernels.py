"""The tests of the kernels by pytest, on the device that is there; on a CPU those of the path around them too."""

import os

import pytest

from tests.gpu.report import Report, part_options
from tests.gpu.run import ROOT


class _Outcomes:
    """A plugin of pytest that keeps what each test came to."""

    def __init__(self, report: Report) -> None:
        self.passed = self.run = self.skipped = 0
        self._report = report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:  # A file that cannot be read has no tests.
            self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped += 1
        elif report.failed or report.when == "call":
            self.run += 1
            self.passed += report.passed
            self._report.promise("tests of the kernels", self.passed, self.run)
        if report.failed:
            self._report.note(f"{report.nodeid} failed: {str(report.longreprtext).strip().splitlines()[-1][:160]}")


def main() -> None:
    options = part_options()
    report = Report(options.report)
    files = sorted(
        (ROOT / "tests" / "model").glob("test_gpu_*.py" if options.device == "cpu" else "test_gpu_kernels.py")
    )
    outcomes = _Outcomes(report)
    # A machine may have plugins of other versions, and libraries that warn of what ours do not.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = ("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider")
    arguments = ["-q", "-W", "default", "--continue-on-collection-errors", *plugins, *map(str, files)]
    code = pytest.main(arguments, plugins=[outcomes])
    report.promise("tests of the kernels", outcomes.passed, outcomes.run)
    report.figure("skipped tests", outcomes.skipped)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {code!r}")


if __name__ == "__main__":
    main()
