"""The gateway under test: its address, and what it says of its models and of requests.

Calls of HTTP with a short timeout, one connection each; not for the load itself. `GatewayError` where there is no
answer or a refusal.
"""

import http.client
import json
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from google.protobuf.json_format import ParseDict

from headrace.rpc.client import caller_key
from headrace_protos.inference_pb2 import ModelMetadataResponse

_TIMEOUT_S = 3.0


class GatewayError(Exception):
    """The gateway did not answer, or refused."""


@dataclass(frozen=True)
class Address:
    """`host:port`, and whether it speaks TLS."""

    target: str
    secure: bool

    @property
    def url(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.target}"

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.secure:
            return http.client.HTTPSConnection(self.target, timeout=timeout_s, context=ssl.create_default_context())
        return http.client.HTTPConnection(self.target, timeout=timeout_s)


class PredictorState(NamedTuple):
    """Sequences of one predictor that run and wait; over its models, the cache of the fullest, 0 to 1."""

    running: int
    waiting: int
    cache: float


def states_of(predictors: Iterable[Mapping[str, Any]]) -> dict[str, PredictorState]:
    """The ready ones of `GET /headrace/v1/predictors`, by name."""
    return {one["name"]: _state(one["models"]) for one in predictors if one["ready"]}


def _state(models: list[dict[str, Any]]) -> PredictorState:
    return PredictorState(
        sum(model["running"] for model in models),
        sum(model["waiting"] for model in models),
        max((1 - model["cache_free"] for model in models), default=0.0),
    )


def parse_address(host: str) -> Address:
    """Of http://host[:port] or https://host[:port]; raises ValueError for anything else."""
    url = urlsplit(host)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"host {host!r} is not http://host:port or https://host:port")
    secure = url.scheme == "https"
    name = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return Address(f"{name}:{url.port or (443 if secure else 80)}", secure)


def key_headers(key: str) -> dict[str, str]:
    """The headers of a call with this key, or with that of HEADRACE_KEY."""
    return {"authorization": f"Bearer {key}"} if key else caller_key.headers()


class Gateway:
    """Answers of the gateway that the load test needs around the load."""

    def __init__(self, address: Address, key: str = "", timeout_s: float = _TIMEOUT_S) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._headers = key_headers(key)

    def generation_models(self) -> list[str]:
        """Names of the models that take prompts, in the stack's order."""
        return [model["id"] for model in self._get("/v1/models")["data"] if model.get("kind") == "generation"]

    def models(self) -> list[str]:
        """Names of all models; those that take prompts are first."""
        names = self.generation_models()
        index = self._call("POST", "/v2/repository/index")
        return [*names, *(model["name"] for model in index if model["name"] not in names)]

    def model(self, name: str) -> ModelMetadataResponse:
        """What the gateway says of a model's inputs; -1 in a shape is an open dimension."""
        metadata = self._get(f"/v2/models/{quote(name, safe='')}")
        return ParseDict({"name": name, "inputs": metadata["inputs"]}, ModelMetadataResponse(), True)

    def records(self, **filters: str) -> list[dict[str, Any]]:
        """Records of the payload log, newest first."""
        lines = self._body("GET", f"/headrace/v1/payloads?{urlencode(filters)}").splitlines()
        return [json.loads(line) for line in lines if line.strip()]

    def predictors(self) -> dict[str, PredictorState]:
        """The load of each ready predictor by name, of the models that the key may use."""
        return states_of(self._get("/headrace/v1/predictors")["predictors"])

    def trace_page(self) -> str:
        """The address of a trace without its id; empty if the gateway has none."""
        page: str = self._get("/playground/settings.json").get("trace_page", "")
        return page if page.startswith(("http://", "https://")) else ""

    def kill_predictor_of(self, request_id: str) -> None:
        """Kills the predictor that generates for the request, where the stack is in development mode."""
        body = json.dumps({"request_id": request_id}).encode()
        self._body("POST", "/headrace/v1/development/kill", body, {"x-headrace-development": "true"})

    def _get(self, path: str) -> Any:
        return self._call("GET", path)

    def _call(self, method: str, path: str) -> Any:
        try:
            return json.loads(self._body(method, path))
        except ValueError:
            raise GatewayError(f"{method} {path} did not answer with JSON") from None

    def _body(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        connection = self.address.connect(self._timeout_s)
        try:
            content = {"content-type": "application/json"} if body else {}
            connection.request(method, path, body=body, headers={**self._headers, **content, **(headers or {})})
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise GatewayError(f"{self.address.url} did not answer: {error}") from None
        finally:
            connection.close()
        if response.status >= http.client.BAD_REQUEST:
            raise GatewayError(f"{method} {path}: {response.status} {data[:200].decode(errors='replace')}")
        return data
