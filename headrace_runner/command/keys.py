"""`headrace key`: makes a key for a client, and adds its entry, which has only the key's digest, to the key file."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from headrace.clients import NAME_PATTERN
from headrace.errors import StartupError
from headrace.watched_file import replace_file
from headrace_runner.settings import HOME

FILE = HOME / "config" / "keys.yaml"


def add(file: Path, name: str, role: str, models: Sequence[str]) -> str:
    """Appends an entry and returns the key; raises StartupError with one line."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise StartupError(f"{name}: a client's name has 1 to 128 of A-Z a-z 0-9 . _ : @ | -")
    key = "hr-" + secrets.token_urlsafe(32)
    entry = f"- name: {name}\n  sha256: {hashlib.sha256(key.encode()).hexdigest()}\n  role: {role}\n"
    if models:
        entry += f"  models: [{', '.join(models)}]\n"
    try:
        before = file.read_text() if file.exists() else ""
        replace_file(file, before + ("\n" if before and not before.endswith("\n") else "") + entry)
    except OSError as error:
        raise StartupError(f"{file} cannot be written: {error.strerror}") from None
    return key
