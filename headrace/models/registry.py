"""HTTP to one repository of a registry: Docker's token flow, redirects without credentials, errors in one line.

Source: https://distribution.github.io/distribution/spec/auth/token. Credentials are those of `docker login`, in
`config.json` of DOCKER_CONFIG or ~/.docker, without its helpers; without any the repository is read anonymously.
Registries on loopback speak HTTP, as Docker has it, all others HTTPS.
"""

import json
import os
import re
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib import request
from urllib.error import HTTPError
from urllib.parse import urlencode

from headrace.errors import StartupError

_DOCKER_HUB = "docker.io"
_DOCKER_HUB_API = "registry-1.docker.io"
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"  # In config.json.
_LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+)(:[0-9]+)?")
_TIMEOUT_S = 30.0  # Of connecting, and of each read.
_MAX_TOKEN_BYTES = 1 << 20
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


class Registry:
    """`location` is named in errors. For one thread at a time."""

    def __init__(self, location: str, host: str, repository: str) -> None:
        self.location = location
        self._host = host
        self._scheme = "http" if _LOOPBACK.fullmatch(host) else "https"
        if host == _DOCKER_HUB:
            host, repository = _DOCKER_HUB_API, repository if "/" in repository else f"library/{repository}"
        self._base = f"{self._scheme}://{host}/v2/{repository}/"
        self._authorization = ""
        self._opener = request.OpenerDirector()
        # Neither files nor FTP: addresses come from the registry.
        for handler in (
            request.ProxyHandler,
            request.HTTPHandler,
            request.HTTPSHandler,
            request.HTTPRedirectHandler,
            request.HTTPDefaultErrorHandler,
            request.HTTPErrorProcessor,
        ):
            self._opener.add_handler(handler())

    def open(self, path: str, headers: Mapping[str, str]) -> HTTPResponse:
        """The answer to a GET below the repository; raises ConnectionError, and StartupError for a refusal."""
        try:
            return self._send(self._base + path, headers, self._authorization)
        except HTTPError as error:
            if error.code != 401:
                raise self._failure(error) from None
            error.close()
            challenge = error.headers.get("WWW-Authenticate") or ""
        self._authorization = self._authorized(challenge)
        try:
            return self._send(self._base + path, headers, self._authorization)
        except HTTPError as error:
            raise self._failure(error) from None

    def read(self, response: HTTPResponse, size: int) -> bytes:
        """At most `size` bytes; fewer, or none, at the end. Raises ConnectionError."""
        try:
            return response.read(size)
        except (OSError, HTTPException) as error:
            raise ConnectionError(_reason(error)) from None

    def _send(self, url: str, headers: Mapping[str, str], authorization: str) -> HTTPResponse:
        wanted = request.Request(url, headers=dict(headers))  # noqa: S310
        if authorization:
            wanted.add_unredirected_header("Authorization", authorization)
        try:
            answer: Any = self._opener.open(wanted, timeout=_TIMEOUT_S)
        except HTTPError:
            raise
        except (OSError, HTTPException, ValueError) as error:
            raise ConnectionError(_reason(error)) from None
        if answer is None:
            raise ConnectionError(f"{url} has led to an address of another protocol")
        response: HTTPResponse = answer
        return response

    def _authorized(self, challenge: str) -> str:
        """The value of Authorization for a challenge."""
        credentials = _credentials(_DOCKER_HUB_KEY if self._host == _DOCKER_HUB else self._host)
        basic = f"Basic {credentials}" if credentials else ""
        asked = dict(_PARAMETER.findall(challenge))
        if not challenge.lower().startswith("bearer") or not asked.get("realm", "").startswith(f"{self._scheme}://"):
            return basic
        query = urlencode({name: asked[name] for name in ("service", "scope") if name in asked})
        try:
            with self._send(f"{asked['realm']}?{query}", {}, basic) as response:
                answer = json.loads(self.read(response, _MAX_TOKEN_BYTES))
            return f"Bearer {answer.get('token') or answer['access_token']}"
        except HTTPError as error:
            raise self._failure(error) from None
        except (ValueError, KeyError, AttributeError):
            raise StartupError(f"{self.location}: the registry's token cannot be read") from None

    def _failure(self, error: HTTPError) -> Exception:
        error.close()
        if error.code in (401, 403):
            return StartupError(f"{self.location} may not be read, or is not there; `docker login {self._host}` helps")
        if error.code == 404:
            return StartupError(f"{self.location} is not there")
        if error.code == 429 or error.code >= 500:
            return ConnectionError(f"the registry answers {error.code} {error.reason}")
        return StartupError(f"{self.location}: the registry answers {error.code} {error.reason}")


def _credentials(key: str) -> str:
    """Base64 of user and password, as config.json has it; empty without."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser()
    try:
        entry = json.loads((folder / "config.json").read_text()).get("auths", {}).get(key, {})
        return str(entry.get("auth", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error) or type(error).__name__
