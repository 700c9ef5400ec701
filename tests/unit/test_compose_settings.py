"""compose.yaml and `.env` name every setting, so that none is known to the code alone."""

import re
from pathlib import Path

import pytest
import yaml

from millrace.settings import ServiceSettings
from services.logger.settings import LoggerSettings
from services.predictor.settings import PredictorSettings
from services.transformer.settings import TransformerSettings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
OVERLAYS = sorted(ROOT.glob("compose.*.yaml"))


@pytest.mark.parametrize("settings", [TransformerSettings, PredictorSettings, LoggerSettings])
def test_a_container_can_be_told_every_setting(settings: type[ServiceSettings]) -> None:
    prefix = settings.model_config["env_prefix"]
    service = prefix.lower().rstrip("_")
    told = {name for name in COMPOSE["services"][service]["environment"] if name.startswith(prefix)}
    # The address to listen on is the image's; MODELS has no prefix.
    known = {f"{prefix}{name}".upper() for name in settings.model_fields} - {f"{prefix}HOST", f"{prefix}MODELS"}
    assert told == known


def test_every_variable_of_the_compose_files_is_a_line_of_env() -> None:
    env = (ROOT / ".env").read_text()
    lines = set(re.findall(r"^([A-Z_]+)=", env, re.MULTILINE))
    used = {
        name: default
        for path in (ROOT / "compose.yaml", *OVERLAYS)
        for name, default in re.findall(r"\$\{([A-Z_]+):?-([^}]*)\}", path.read_text())
    }
    assert used.keys() <= lines
    # Without .env (`--env-file` names another) the same stack comes up.
    for name, default in used.items():
        assert f"\n{name}={default}\n" in env


def test_every_line_of_env_is_explained() -> None:
    blocks = [block for block in re.split(r"\n\n+", (ROOT / ".env").read_text()) if "=" in block]
    assert all(block.startswith("#") for block in blocks)
