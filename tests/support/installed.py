"""Environments with the wheel of this checkout, for tests of the installed package."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from headrace_runner.settings import ROOT

_QUIET = ("--disable-pip-version-check", "--quiet", "--no-deps", "--no-index")
# What an installed package must not see of the checkout that tests it.
_OF_THE_CHECKOUT = ("PYTHONPATH", "PREDICTORS", "VIRTUAL_ENV")


def environment_of_a_user() -> dict[str, str]:
    """This process's environment without what names the checkout."""
    return {name: value for name, value in os.environ.items() if name not in _OF_THE_CHECKOUT}


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """Runs a command; returns what it prints, on standard error too."""
    done = subprocess.run(
        command, cwd=cwd, env=environment_of_a_user(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def built_wheel(folder: Path) -> Path:
    """The wheel of the checkout's files, built from a copy of those that git knows."""
    source = folder / "source"
    for name in run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).exists() and not name.startswith(("tests/", "bench/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    run(sys.executable, "-m", "pip", "wheel", *_QUIET, "--no-build-isolation", "-w", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def new_environment(folder: Path) -> Path:
    """Makes an environment without packages; returns the folder of its packages."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    return folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"


def install_wheel(wheel: Path, environment: Path) -> None:
    run(sys.executable, "-m", "pip", "--python", environment, "install", *_QUIET, wheel, cwd=environment)


def link_packages(packages: Path) -> None:
    """Has an environment use this one's packages, but for Headrace itself."""
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("headrace", "__editable__")) and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
