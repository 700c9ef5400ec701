"""What `make release` makes: the same bytes each time, valid SBOMs, digests; its files name one version."""

import hashlib
import json
import os
import re
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from headrace import __version__
from tests.support.full import FULL
from tests.support.kubernetes import CHART, HELM, ROOT

TOOLS = ROOT / ".venv-tools" / "release"
SHARE = "headrace_runner/share"  # What a stack reads, by links.
IMAGES = {"transformer", "predictor", "logger", "loadtest"}


def run(*command: str | Path, cwd: Path = ROOT, umask: int = -1, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        umask=umask,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    """The folders `dist` of two releases: of one commit, in different folders, with different umasks."""
    if not TOOLS.exists():
        pytest.skip("needs `make .venv-tools/release/.installed`")
    commit = run("git", "stash", "create").strip() or "HEAD"  # The working tree's tracked files.
    found = []
    for name, umask in (("one", 0o022), ("another-folder", 0o077)):
        folder = tmp_path_factory.mktemp("release") / name
        run("git", "clone", "--quiet", "--shared", "--no-checkout", ROOT, folder, umask=umask)
        run("git", "checkout", "--quiet", "--detach", commit, cwd=folder, umask=umask)
        for environment in (".venv", ".venv-tools"):
            (folder / environment).symlink_to(ROOT / environment)
        once = {} if FULL and not found else {"NO_VALIDATION": "1"}  # It takes most of the time; `make release` has it.
        output = run(folder / ".ci" / "release", cwd=folder, umask=umask, IMAGES="0", **once)
        assert ("SBOMs: valid" in output) == (not once)
        assert "a release would push:" in output
        found.append(folder / "dist")
    return found


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.timeout(600)
def test_two_releases_of_a_commit_are_the_same_bytes_and_their_sums_are_right(releases):
    first, second = map(digests, releases)
    assert first == second
    sums = dict(reversed(line.split("  ")) for line in (releases[0] / "SHA256SUMS").read_text().splitlines())
    assert sums == {name: digest for name, digest in first.items() if name != "SHA256SUMS"}
    assert sums.keys() == {
        *(f"headrace-{__version__}{end}" for end in ("-py3-none-any.whl", ".tar.gz", ".tgz", ".cdx.json")),
        *(f"headrace-{name}-{__version__}.cdx.json" for name in IMAGES),
    }


@pytest.mark.timeout(600)
def test_wheel_and_source_distribution_have_the_modules_and_the_chart_its_files(releases):
    dist = releases[0]
    with zipfile.ZipFile(dist / f"headrace-{__version__}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    with tarfile.open(dist / f"headrace-{__version__}.tar.gz") as sdist:
        sources = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"headrace/errors.py", "headrace_predictor/servicer.py", "headrace_runner/command/__main__.py"} <= names
    assert {
        "headrace/errors.py",
        "LICENSE",
        f"{SHARE}/envoy/envoy.yaml",
        f"{SHARE}/models/storyteller/config.json",
    } <= sources
    with tarfile.open(dist / f"headrace-{__version__}.tgz") as chart:
        assert all(each.isfile() or each.isdir() for each in chart.getmembers())
        charted = set(chart.getnames())
    assert {"headrace/Chart.yaml", "headrace/files/envoy/envoy.yaml", "headrace/files/alerts.yaml"} <= charted
    if HELM is not None:
        # The archive renders what the folder renders.
        command = [HELM, "template", "headrace", "--set", "observability.enabled=true"]
        assert run(*command, dist / f"headrace-{__version__}.tgz") == run(*command, CHART)


@pytest.mark.timeout(600)
def test_each_sbom_has_what_its_image_has(releases):
    boms = sorted(releases[0].glob("*.cdx.json"))
    versions = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    packages = {}
    for path in boms:
        components = json.loads(path.read_text())["components"]
        part = path.name.removeprefix("headrace-").split("-")[0]
        packages[part] = {each["name"]: each["version"] for each in components}
        assert sum(bool(each.get("licenses")) for each in components) > 0.9 * len(components)
    assert packages["predictor"]["torch"].partition("+")[0] == versions["torch"]
    assert [part for part in IMAGES if "torch" in packages[part]] == ["predictor"]
    for part, one in (
        ("transformer", "tokenizers"),
        ("logger", "pyarrow"),
        ("logger", "psycopg"),
        ("loadtest", "locust"),
    ):
        assert packages[part][one] == versions[one]


@pytest.mark.skipif(not TOOLS.exists(), reason="needs `make .venv-tools/release/.installed`")
def test_the_workflow_has_no_fault_that_its_linter_finds():
    run(TOOLS / "bin" / "zizmor", "--offline", "--no-progress", ROOT / ".github" / "workflows")  # Fails with findings.


def test_every_file_that_names_a_version_names_the_same():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
