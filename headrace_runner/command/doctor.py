"""`headrace doctor`: a line for each thing that a start needs, with what to do where it is wrong.

A check returns what is right, or raises: `StartupError` where a start would fail, `Remark` where it would not. Checks
change nothing and take seconds, because some run programs: torch, the services' settings, Envoy, Docker.
"""

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.errors import StartupError
from headrace.models.downloads import cache_folder
from headrace.models.sources import parse_own_models
from headrace_runner import settings as stack_settings
from headrace_runner.command import models
from headrace_runner.run_folder import RunFolder
from headrace_runner.settings import PROGRAM, StackSettings
from headrace_runner.terminal import GREEN, RED, YELLOW, Painter

_TIMEOUT_S = 60.0
_LEAST_BYTES, _FEW_BYTES = 100_000_000, 2_000_000_000  # On a disk.
_PACKAGES = ("envoy", "llguidance", "numba", "pyarrow", "sqlalchemy", "tokenizers", "torch", "transformers")
_TORCH = "import torch; print(torch.__version__, 'with' if torch.cuda.is_available() else 'without', 'CUDA')"
# The settings of a service, read by its own class, and its file of keys.
_SERVICE = """
import sys
from headrace.errors import StartupError
from headrace.settings import load
from headrace_{kind}.settings import {title}Settings
try:
    settings = load({title}Settings, "headrace_{kind}")
    if getattr(settings, "keys", None):
        from headrace_transformer.keys import KeyFile
        KeyFile(settings.keys, settings.key_digests)
except StartupError as error:
    sys.exit(str(error))
"""
# Instructions that the engine's products of matrices use, by the kernel's names of them.
_INSTRUCTIONS = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_vnni": "VNNI", "avx512_bf16": "bf16", "amx_tile": "AMX"}
_INSTRUCTIONS |= {"asimd": "NEON", "i8mm": "int8", "bf16": "bf16", "sve": "SVE"}


class Remark(Exception):  # noqa: N818
    """Nothing that the user has to mend, such as a stack that runs already; one line."""


def examine(paint: Painter) -> int:
    """Prints a line for each check; returns the exit code, 1 where a start would fail."""
    code, settings, refusal = 0, None, None
    try:
        settings = stack_settings.load()
    except StartupError as error:
        refusal = error
    for name, check in _CHECKS.items():
        if settings is None and name in _OF_SETTINGS:
            continue
        colour, word = GREEN, "ok"
        try:
            if refusal is not None and name == "settings":
                raise refusal
            text = check(settings or StackSettings.model_construct())
        except Remark as remark:
            colour, word, text = YELLOW, "note", str(remark)
        except (StartupError, ValueError, OSError, ImportError, subprocess.TimeoutExpired) as error:
            colour, word, text, code = RED, "FAIL", str(error), 1
        print(f"{paint(colour, f'{word:<4}')}  {name:<9}  {text}", flush=True)
    return code


def _python(_: StackSettings) -> str:
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise StartupError(f"{platform.python_version()}: install Headrace with Python 3.11, 3.12 or 3.13")
    return f"{platform.python_version()} in {sys.prefix}"


def _packages(settings: StackSettings) -> str:
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise StartupError(f"no {', '.join(missing)}: `pip install headrace` and `make up` install all")
    torch = _output(sys.executable, "-P", "-c", _TORCH)
    if settings.device == "cuda" and "with CUDA" not in torch:
        raise StartupError(f"torch {torch}, but DEVICE=cuda: set DEVICE=cpu, or install torch for CUDA")
    return f"torch {torch}"


def _settings(settings: StackSettings) -> str:
    from headrace_runner import envoy_config, services  # Needs Envoy's package, which is checked first.

    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        own = settings.model_copy(update={"run_folder": Path(folder)})
        config = own.run_folder / "envoy.yaml"
        plan = services.plan(own, config, {}, {})
        for spec in (plan.transformer, *plan.predictors[:1], plan.logger):
            kind = spec.name.partition("-")[0]
            code = _SERVICE.format(kind=kind, title=kind.title())
            _output(sys.executable, "-P", "-c", code, environment=spec.environment)
        envoy_config.write(own, config)
        _output(*plan.envoy.command, "--mode", "validate", environment=plan.envoy.environment)
    keys = settings.gateway_keys or "without keys every caller may use the models"
    return f"the services and Envoy accept them; {keys}"


def _ports(settings: StackSettings) -> str:
    from headrace_runner.stack import check_ports

    folder = RunFolder(settings.run_folder)
    if holder := folder.holder():
        raise Remark(f"a stack is running in {folder.path} (process {holder}); `{PROGRAM} down` stops it")
    check_ports(settings)
    numbers = [number for ports in settings.ports().values() for number in ports]
    return f"{len(numbers)} between {min(numbers)} and {max(numbers)} are free"


def _memory(settings: StackSettings) -> str:
    with contextlib.chdir(stack_settings.HOME):
        weights = {source.location: models.weights_here(source) for source in parse_own_models(settings.models)}
    needed = (sum(weights.values()) + models.RUNTIME_BYTES) * settings.predictors + models.RUNTIME_BYTES
    found = {name: int(size) * 1024 for name, size in re.findall(r"(\w+): +(\d+) kB", _text("/proc/meminfo"))}
    total, available = found["MemTotal"], found["MemAvailable"]
    text = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB available, about {needed / 1e9:.1f} GB needed"
    if unknown := [location for location, size in weights.items() if not size]:
        text += f" and the weights of {', '.join(unknown)}, which `headrace pull` fetches"
    if needed > total and settings.device != "cuda":
        raise StartupError(f"{text}: take a smaller model or fewer predictors")
    if needed > available:
        raise Remark(f"{text}: end other programs first")
    return text


def _disk(settings: StackSettings) -> str:
    texts = []
    remedies = {settings.run_folder: "RUN_FOLDER", cache_folder().parent: "HF_HOME, XDG_CACHE_HOME and NUMBA_CACHE_DIR"}
    for folder, setting in remedies.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK) or free < _LEAST_BYTES:
            kind = StartupError if folder == settings.run_folder else Remark  # Models that are here are served.
            raise kind(f"{there} is full or cannot be written: make room, or set {setting} to another folder")
        texts.append(f"{free / 1e9:.1f} GB free for {folder}")
        if free < _FEW_BYTES:
            raise Remark(f"{texts[-1]}: a model or a long payload log may fill it; {setting} names another folder")
    return ", ".join(texts)


def _processor(_: StackSettings) -> str:
    flags = re.findall(r"^(?:flags|Features)\s*:(.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    has = [name for flag, name in _INSTRUCTIONS.items() if flag in " ".join(flags[:1]).split()]
    text = f"{os.cpu_count()} cores, {platform.machine()} with {', '.join(has) or 'no instructions that are known'}"
    if platform.machine() == "x86_64" and "AVX512" not in has:
        raise Remark(f"{text}: without AVX512 models are slower; a virtual machine may hide it")
    return text


def _docker(_: StackSettings) -> str:
    try:
        compose = _output("docker", "compose", "version", "--short")
        if tuple(map(int, re.findall(r"\d+", compose)[:2])) < (2, 24):
            raise StartupError(f"compose is {compose}, older than 2.24")
        return f"{_output('docker', '--version')}, compose {compose}"
    except (StartupError, OSError) as error:
        raise Remark(f"only `docker compose up` needs it: {error}") from None


def _output(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints; raises StartupError with the last line of it where it fails."""
    done = subprocess.run(
        command, cwd=stack_settings.HOME, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    if done.returncode:
        raise StartupError((done.stdout + done.stderr).strip().rpartition("\n")[2] or f"{command[0]} failed")
    return done.stdout.strip()


def _text(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


_OF_SETTINGS = ("ports", "memory", "disk")
_ALL = (_python, _packages, _settings, _ports, _memory, _disk, _processor, _docker)
_CHECKS: dict[str, Callable[[StackSettings], str]] = {check.__name__.strip("_"): check for check in _ALL}
