"""The wheel, in an environment that has only what it requires: its data files, its command, its modules."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from headrace_runner.settings import ROOT
from tests.support.requirements import closure

SHOWN = """
import json
from headrace_runner import settings
loaded = settings.load()
print(json.dumps([str(settings.ROOT), str(loaded.run_folder), loaded.predictors]))
"""


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """Runs a command; returns what it prints, on standard error too."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PREDICTORS")}
    done = subprocess.run(
        command, cwd=cwd, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and copies of the distributions that it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    for name in run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "bench/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    quiet = ("--disable-pip-version-check", "--quiet", "--no-deps", "--no-index")
    run(sys.executable, "-m", "pip", "wheel", *quiet, "--no-build-isolation", "-w", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", environment, "install", *quiet, wheel, cwd=folder)
    packages = environment / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    metadata = next(packages.glob("headrace-*.dist-info")) / "METADATA"
    core = re.findall(r"^Requires-Dist: ([\w.-]+)[^;\n]*$", metadata.read_text(), re.MULTILINE)
    for name in closure(core):
        for file in distribution(name).files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file.locate(), packages / file)
    return environment


def test_it_finds_its_configuration_and_keeps_state_in_the_current_folder(installed: Path, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PREDICTORS=3\n")
    root, run_folder, predictors = json.loads(run(installed / "bin" / "python", "-P", "-c", SHOWN, cwd=tmp_path))
    assert Path(root) == installed / "share" / "headrace"
    assert (Path(run_folder), predictors) == (tmp_path / ".run", 3)
    folders = ("loadtest/knee", "loadtest/streams_tab", "loadtest/users")
    for path in ("models/storyteller", "models/normalizer", "envoy/playground", *folders):
        names = {file.name for file in (ROOT / path).iterdir() if file.is_file()}
        assert {file.name for file in (Path(root) / path).iterdir() if file.is_file()} == names
    for file in ("loadtest/locustfile.py", "envoy/envoy.yaml"):
        assert (Path(root) / file).exists()


def test_its_packages_for_other_code_have_types(installed: Path, tmp_path: Path) -> None:
    code = "import headrace, headrace_protos; print(*headrace.__path__, *headrace_protos.__path__)"
    for folder in map(Path, run(installed / "bin" / "python", "-P", "-c", code, cwd=tmp_path).split()):
        assert (folder / "py.typed").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "answer"),
    [
        (("--help",), 0, "usage: headrace"),
        (("chat", "--gateway", "127.0.0.1:1", "Hello"), 1, "no stack answers at 127.0.0.1:1"),
        (("log", "--gateway", "127.0.0.1:1"), 1, "no stack answers at 127.0.0.1:1"),
        (("usage", "--gateway", "127.0.0.1:1"), 1, "no stack answers at 127.0.0.1:1"),
        (("trace", "0" * 32, "--gateway", "127.0.0.1:1"), 1, "no stack answers at 127.0.0.1:1"),
        (("replay", "127.0.0.1:1"), 2, "127.0.0.1:1"),
        (("load", "--gateway", "127.0.0.1:1"), 1, "no stack answers at 127.0.0.1:1"),
        (("key", "alice", "--file", "keys.yaml"), 0, "entry of alice in keys.yaml"),
        (("smoke", "--gateway", "127.0.0.1:1"), 1, "no stack answers at 127.0.0.1:1"),
        (("models",), 0, "models in "),
        (("pull", "org/name"), 1, "org/name needs the package huggingface_hub: install the extra `transformer`"),
        (("pull", "oci://127.0.0.1:1/name"), 1, "oci://127.0.0.1:1/name cannot be reached"),
        (("pull", "s3://bucket/name"), 1, "s3://bucket/name needs the package s3fs"),
        (("certs",), 1, "certificates need the package trustme"),
        (("up",), 1, "Envoy is not installed"),
        (("serve", "org/model"), 1, "Envoy is not installed"),
        (("down",), 1, "Envoy is not installed"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_command_needs_no_extra_but_for_stacks(
    installed: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, answer: str
) -> None:
    text = run(installed / "bin" / "headrace", *arguments, cwd=tmp_path, code=code)
    assert answer in text
    assert "Traceback" not in text
