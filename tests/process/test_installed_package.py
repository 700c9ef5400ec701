"""An installed package has the data files of a stack, and keeps its state in the user's folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from runner.settings import ROOT

SHOWN = """
import json
from runner import envoy_config, settings
loaded = settings.load()
print(json.dumps([str(settings.ROOT), str(loaded.run_folder), loaded.predictors, len(envoy_config.derive(loaded))]))
"""


def run(*command: str | Path, cwd: Path) -> str:
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PREDICTORS")}
    done = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the package and the packages of this environment."""
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
    others = {path for path in sys.path if path.endswith("site-packages")} | {sysconfig.get_path("purelib")}
    packages = environment / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (packages / "others.pth").write_text("\n".join(sorted(others)))
    return environment


def test_it_finds_its_configuration_and_keeps_state_in_the_current_folder(installed: Path, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PREDICTORS=3\n")
    root, run_folder, predictors, sections = json.loads(
        run(installed / "bin" / "python", "-P", "-c", SHOWN, cwd=tmp_path)
    )
    assert Path(root) == installed / "share" / "headrace"
    assert (Path(run_folder), predictors) == (tmp_path / ".run", 3)
    assert sections > 2
    folders = ("loadtest/knee", "loadtest/streams_tab", "loadtest/users")
    for path in ("models/storyteller", "models/normalizer", "envoy/playground", *folders):
        names = {file.name for file in (ROOT / path).iterdir() if file.is_file()}
        assert {file.name for file in (Path(root) / path).iterdir() if file.is_file()} == names
    assert (Path(root) / "loadtest" / "locustfile.py").exists()


def test_it_has_the_command(installed: Path, tmp_path: Path) -> None:
    page = run(installed / "bin" / "headrace", "--help", cwd=tmp_path)
    assert page.startswith("usage: headrace")
    assert run(installed / "bin" / "headrace", "down", cwd=tmp_path) == "no stack is running\n"
