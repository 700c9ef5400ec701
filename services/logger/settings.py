"""The logger's settings: `LOGGER_*`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from millrace.settings import Port, ServiceSettings


class LoggerSettings(ServiceSettings):
    """What the logger can be told."""

    model_config = SettingsConfigDict(env_prefix="LOGGER_", frozen=True, env_ignore_empty=True)

    port: Port = Field(9002, description="gRPC port.")
    database: Path = Field(Path(".run/payloads.sqlite3"), description="SQLite file; made if missing.")
