"""`headrace key`: makes a key for a client, and adds its entry, which has only the key's digest, to the key file."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.clients import NAME_PATTERN, Policy
from headrace.errors import StartupError
from headrace.files import load_yaml, replace_file
from headrace.validation import first_fault
from headrace_runner.settings import HOME

FILE = HOME / "config" / "keys.yaml"
LIMITS = tuple(name for name in Policy.model_fields if name not in ("role", "models"))


def add(file: Path, name: str, given: Mapping[str, Any]) -> str:
    """Appends an entry and returns the key; raises StartupError with one line.

    `given` are fields of the policy, as text or values. Without any, a further key of a client has the policy of the
    client's entry: the entries of a name must not differ in it.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise StartupError(f"{name}: a client's name has 1 to 128 of A-Z a-z 0-9 . _ : @ | -")
    policy = _policy(given)
    key = "hr-" + secrets.token_urlsafe(32)
    try:
        before = file.read_text() if file.exists() else ""
        for entry in load_yaml(before) or ():
            if entry["name"] == name:
                earlier = _policy({field: value for field, value in entry.items() if field in Policy.model_fields})
                if given and policy != earlier:
                    raise StartupError(f"{name} has a key with other limits in {file}: change them there")
                policy = earlier
        digest = hashlib.sha256(key.encode()).hexdigest()
        fields = {"name": name, "sha256": digest, "role": "user"} | policy.model_dump(mode="json", exclude_unset=True)
        entry = "\n  ".join(f"{field}: {json.dumps(value)}" for field, value in fields.items())
        replace_file(file, before + ("\n" if before and not before.endswith("\n") else "") + f"- {entry}\n")
    except OSError as error:
        raise StartupError(f"{file} cannot be written: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise StartupError(f"{file} is not a file of keys; docs/security.md has an example") from None
    return key


def _policy(fields: Mapping[str, Any]) -> Policy:
    try:
        return Policy(**fields)
    except ValidationError as error:
        place, message = first_fault(error)
        raise StartupError(f"{place[0]}={fields[str(place[0])]}: {message}") from None
