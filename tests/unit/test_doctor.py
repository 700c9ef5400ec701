"""`headrace doctor` names what would keep a stack from starting; the programs that it runs are replaced here.

tests/process/test_doctor.py runs it.
"""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from headrace.errors import StartupError
from headrace_runner.command import doctor, models
from headrace_runner.run_folder import RunFolder
from headrace_runner.settings import StackSettings
from headrace_runner.terminal import Painter

MEMORY = "MemTotal:       8000000 kB\nMemAvailable:   3000000 kB\n"
INTEL = "flags\t\t: fpu sse avx2 avx512f avx512_vnni amx_tile\n"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def no_library_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("yaml",))


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StackSettings:
    monkeypatch.setenv("HOME", str(tmp_path))
    return StackSettings(run_folder=tmp_path / "run", models="m=model", predictors=1, device="cpu")


def outcome(name: str, settings: StackSettings) -> tuple[str, str]:
    """The kind of a check's line, and its text."""
    try:
        return "ok", doctor._CHECKS[name](settings)
    except doctor.Remark as remark:
        return "note", str(remark)
    except StartupError as error:
        return "FAIL", str(error)


@pytest.mark.parametrize(
    ("weights", "device", "expected"),
    [
        (500_000_000, "cpu", ("ok", "3.1 of 8.2 GB available, about 2.5 GB needed")),
        (0, "cpu", ("ok", "2.0 GB needed and the weights of model, which `headrace pull` fetches")),
        (2_000_000_000, "cpu", ("note", "about 4.0 GB needed: end other programs first")),
        (9_000_000_000, "cpu", ("FAIL", "about 11.0 GB needed: take a smaller model or fewer predictors")),
        (9_000_000_000, "cuda", ("note", "about 11.0 GB needed")),
    ],
)
def test_the_memory_is_compared_with_the_weights(
    monkeypatch: pytest.MonkeyPatch, settings: StackSettings, weights: int, device: str, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(doctor, "_text", lambda _: MEMORY)
    monkeypatch.setattr(models, "weights_here", lambda _: weights)
    kind, text = outcome("memory", settings.model_copy(update={"device": device}))
    assert kind == expected[0]
    assert expected[1] in text


def test_without_a_cache_the_models_that_are_here_are_served(
    monkeypatch: pytest.MonkeyPatch, settings: StackSettings
) -> None:
    monkeypatch.setattr(doctor, "cache_folder", lambda: Path("/proc/headrace"))
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != Path("/proc"))
    assert outcome("disk", settings)[0] == "note"


@pytest.mark.parametrize(
    ("free", "writable", "expected"),
    [
        (50_000_000_000, True, ("ok", "50.0 GB free for ")),
        (1_000_000_000, True, ("note", "RUN_FOLDER names another folder")),
        (50_000_000, True, ("FAIL", "is full or cannot be written: make room, or set RUN_FOLDER to another folder")),
        (50_000_000_000, False, ("FAIL", "is full or cannot be written")),
    ],
)
def test_the_disk_has_room(
    monkeypatch: pytest.MonkeyPatch, settings: StackSettings, free: int, writable: bool, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free))
    monkeypatch.setattr(os, "access", lambda *_: writable)
    kind, text = outcome("disk", settings)
    assert kind == expected[0]
    assert expected[1] in text


def test_the_processor_is_named_with_its_instructions(monkeypatch: pytest.MonkeyPatch, settings: StackSettings) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(doctor, "_text", lambda _: INTEL)
    assert outcome("processor", settings)[0] == "ok"
    assert outcome("processor", settings)[1].endswith("x86_64 with AVX2, AVX512, VNNI, AMX")
    monkeypatch.setattr(doctor, "_text", lambda _: INTEL.replace("avx512f", ""))
    assert outcome("processor", settings)[0] == "note"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(doctor, "_text", lambda _: "Features\t: fp asimd i8mm bf16\n")
    assert outcome("processor", settings)[1].endswith("aarch64 with NEON, int8, bf16")


@pytest.mark.parametrize(
    ("compose", "expected"),
    [
        ("2.29.1", ("ok", "compose 2.29.1")),
        ("2.20.3", ("note", "compose is 2.20.3, older than 2.24")),
        (None, ("note", "only `docker compose up` needs it")),
    ],
)
def test_docker_is_not_needed(
    monkeypatch: pytest.MonkeyPatch, settings: StackSettings, compose: str | None, expected: tuple[str, str]
) -> None:
    def output(*command: str) -> str:
        if compose is None:
            raise FileNotFoundError(2, "No such file", command[0])
        return compose if "compose" in command else "Docker version 28.2.2"

    monkeypatch.setattr(doctor, "_output", output)
    kind, text = outcome("docker", settings)
    assert kind == expected[0]
    assert expected[1] in text


def test_packages_and_cuda_are_asked_for(monkeypatch: pytest.MonkeyPatch, settings: StackSettings) -> None:
    monkeypatch.setattr(doctor, "_output", lambda *_: "2.13.0+cpu without CUDA")
    assert outcome("packages", settings) == ("ok", "torch 2.13.0+cpu without CUDA")
    on_gpu = settings.model_copy(update={"device": "cuda"})
    assert outcome("packages", on_gpu)[0] == "FAIL"
    monkeypatch.setattr(doctor, "_PACKAGES", ("headrace_of_nobody",))
    kind, text = outcome("packages", settings)
    assert (kind, text.split(":")[0]) == ("FAIL", "no headrace_of_nobody")


def test_a_python_that_is_too_new_is_refused(monkeypatch: pytest.MonkeyPatch, settings: StackSettings) -> None:
    assert outcome("python", settings)[0] == "ok"
    monkeypatch.setattr("sys.version_info", (3, 14, 0))
    assert outcome("python", settings)[0] == "FAIL"


def test_a_running_stack_is_no_fault(settings: StackSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFolder, "holder", lambda _: 17)
    assert outcome("ports", settings) == (
        "note",
        f"a stack is running in {settings.run_folder} (process 17); `make down` stops it",
    )


def test_a_wrong_setting_fails_and_the_rest_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GATEWAY_PROT", "1")
    monkeypatch.setattr(doctor, "_output", lambda *_, **__: "")
    assert doctor.examine(Painter(coloured=False)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAIL  settings   GATEWAY_PROT: unknown setting; did you mean GATEWAY_PORT?" in lines
    assert [line.split()[1] for line in lines] == ["python", "packages", "settings", "processor", "docker"]
