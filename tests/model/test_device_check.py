"""The check of GPUs, tests/gpu, with its cheap parts on the CPU."""

import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest
from packaging.utils import canonicalize_name

from tests.gpu import exactness
from tests.gpu.report import Report
from tests.gpu.run import ROOT, Part, broken, goal_lines, part_table, run_part
from tests.gpu.wheels import GIVEN, lacking
from tests.support.forkserver import IMPORTS
from tests.support.requirements import closure

OUTCOMES = {"crash": "it ended with -6", "hang": "it was not done within 3 s", "break": ""}


@pytest.mark.parametrize("fate", OUTCOMES)
def test_a_part_that_fails_keeps_its_figures_and_fails_the_check(fate, tmp_path):
    result = run_part(Part("tests.model.failing_part", (fate,), 3), "cuda", os.environ, tmp_path, left_s=100)
    assert result["figures"] == {"found": 7.0}
    assert result.get("failed", "") == OUTCOMES[fate]
    assert broken({"part": result}) == [f"part: {OUTCOMES[fate] or 'what breaks (1 of 2)'}"]
    assert ("BROKEN" in part_table("part", result)) == (fate == "break")


def test_a_part_for_which_no_time_is_left_fails(tmp_path):
    result = run_part(Part("tests.model.failing_part", ("break",), 3), "cpu", os.environ, tmp_path, left_s=0)
    assert broken({"part": result}) == ["part: the time of all parts was over before it began"]


def test_a_comparison_that_is_no_promise_fails_nothing(tmp_path):
    report = Report(tmp_path / "report")
    report.promise("kept", 2, 2)
    report.promise("measured", 1, 2, binds=False)
    contents = json.loads((tmp_path / "report").read_text())
    assert broken({"part": contents}) == []
    assert "measured only" in part_table("part", contents)


def test_bars_are_of_figures_and_of_ratios_of_parts():
    lines = "\n".join(
        goal_lines(
            {
                "speed 4B": {"figures": {"tokens/s of 1": 100.0, "tokens/s of 64": 900.0}},
                "transformers 4B": {"figures": {"tokens/s of 64": 700.0}},
            }
        )
    )
    assert "9.0 at least 8: met" in lines
    assert "1.3 at least 1.5: MISSED" in lines
    assert lines.count("not measured") == 4


def test_exactness_is_compared_and_holds_in_fp32(tmp_path):
    report = Report(tmp_path / "report")
    exactness.measure("cpu", report, dtypes=["fp32"])
    promises = report.contents["promises"]
    assert len(promises) >= 4
    assert {promise["of"] for name, promise in promises.items() if "alone" in name} == {16}
    assert broken({"exactness": report.contents}) == []


@pytest.mark.full  # It imports everything once more; the check itself is above.
def test_the_wheels_have_all_that_services_and_check_load():
    """Imports all of it where no other distribution can be imported."""
    allowed = {*lacking("3.12"), *closure(GIVEN), "headrace", "pip", "triton"}
    refused = sorted(
        package
        for package, names in packages_distributions().items()
        if not allowed & {canonicalize_name(name) for name in names}
    )
    assert {"numba", "envoy", "pyarrow"} <= set(refused)
    modules = [f"tests.gpu.{name}" for name in ("machine", "kernels", "exactness", "speed", "stack")]
    modules += ["tests.conftest", "tests.model.conftest", "headrace_predictor.engine_process.worker"]
    modules += ["headrace_predictor.engine_process.worker"]
    modules += [name for kind in ("transformer", "predictor") for name in IMPORTS[kind] if ":" not in name]
    code = f"import sys\nsys.modules.update(dict.fromkeys({refused}))\nimport {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
