"""Permissions of every kind of key and token, over every protocol, at every port; and no secret is shown."""

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_urlsafe

import pytest
import pytest_asyncio

from headrace_runner.command.access import make_certificates
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.runner_stack import Stack
from tests.support.stacks import Stacks
from tests.support.tokens import AUDIENCE, ISSUER, SigningKey, publish
from tests.system.keyed_calls import (
    HTTP_STATUSES,
    NOT_FOUND,
    PERMISSION_DENIED,
    UNAUTHENTICATED,
    Calls,
    Needs,
    Port,
    by_grpc,
    by_rest,
    statuses,
)
from tests.system.keyed_stack import MODEL, MODELS, OK, Headers
from tests.waiting import until

KEYS = {name: "hr-" + token_urlsafe(32) for name in ("root", "alice", "bob", "stranger")}
ENTRIES = [
    {"name": "root", "key": KEYS["root"], "role": "admin"},
    {"name": "alice", "key": KEYS["alice"], "models": [MODEL]},
    {"name": "bob", "key": KEYS["bob"], "models": ["acme/normalizer"]},
]
SIGNER = SigningKey("signer")
UNAUTHENTICATED_EVERYWHERE = dict.fromkeys((Needs.KEY, Needs.MODEL, Needs.OWNER, Needs.ADMIN), UNAUTHENTICATED)
USER = {Needs.ADMIN: PERMISSION_DENIED}
# The secret of each caller, and the refusals by missing permission. The record is alice's.
CALLERS: dict[str, tuple[str, Mapping[Needs, str]]] = {
    "no key": ("", UNAUTHENTICATED_EVERYWHERE),
    "an unknown key": (KEYS["stranger"], UNAUTHENTICATED_EVERYWHERE),
    "an expired token": (SIGNER.token(exp=int(time.time()) - 3600), UNAUTHENTICATED_EVERYWHERE),
    "a token for another audience": (SIGNER.token(aud="another"), UNAUTHENTICATED_EVERYWHERE),
    "a user's key": (KEYS["alice"], USER),
    "a user's token": (SIGNER.token(sub="alice"), USER),
    "the key of another model": (KEYS["bob"], USER | {Needs.MODEL: PERMISSION_DENIED, Needs.OWNER: NOT_FOUND}),
    "an admin's key": (KEYS["root"], {}),
    "an admin's token": (SIGNER.token(sub="operator", headrace_role="admin"), {}),
}
SERVICES = {"envoy-ingress", "envoy-inner", "headrace-transformer", "headrace-predictor", "headrace-logger"}
EXPORTING = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRIC_EXPORT_INTERVAL": "300"}


@dataclass(frozen=True)
class Guarded:
    """A stack with keys, tokens and TLS, its exported telemetry, and the id of a record of alice's."""

    stack: Stack
    receiver: OtlpReceiver
    ports: Mapping[str, Port]
    record_id: str

    def secrets(self) -> dict[str, str]:
        """Each caller's key, or the signature of its token, and a line of the certificate's private key."""
        own = {caller: secret.rpartition(".")[2] for caller, (secret, _) in CALLERS.items() if secret}
        lines = (Path(self.stack.settings.gateway_tls) / "tls.key").read_text().splitlines()
        return own | {"the gateway": lines[1]}


@pytest_asyncio.fixture(scope="module")
async def guarded(stacks: Stacks, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    folder = tmp_path_factory.mktemp("access")
    (folder / "keys.yaml").write_text(json.dumps(ENTRIES))
    publish(folder / "jwks.json", SIGNER)
    make_certificates(folder / "certificates", ())
    with OtlpReceiver() as receiver:
        exporting = EXPORTING | {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        settings = {
            "models": MODELS,
            "gateway_keys": str(folder / "keys.yaml"),
            "gateway_jwks": str(folder / "jwks.json"),
            "gateway_jwt_issuer": ISSUER,
            "gateway_jwt_audience": AUDIENCE,
            "gateway_tls": str(folder / "certificates"),
            "otel_exporter_otlp_endpoint": receiver.endpoint,
            "environment": dict.fromkeys(("transformer", "predictor", "logger"), exporting),
        }
        stack = await stacks.start(settings)
        known = stack.settings
        ports = {
            "public": Port(stack.gateway),
            "management": Port(f"127.0.0.1:{known.management_port}"),
            "public with TLS": Port(known.gateway_with_tls, folder / "certificates"),
        }
        try:
            yield Guarded(stack, receiver, ports, await record_of(ports["public"], bearer(KEYS["alice"])))
        finally:
            await stacks.stop(stack)


async def record_of(port: Port, headers: Headers) -> str:
    """The id of a record of a caller's request."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1}
    assert (await port.http("POST", "/v1/completions", body, headers)).status == 200
    path = f"/headrace/v1/payloads?model={MODEL}"
    answer = await until(lambda: port.http("GET", path, None, headers), holds=lambda answer: answer.body)
    return str(json.loads(answer.body.splitlines()[0])["record_id"])


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"} if secret else {}


def api_key(secret: str) -> dict[str, str]:
    return {"x-api-key": secret} if secret else {}


def expected(calls: Calls, caller: str) -> dict[str, str]:
    _, refused = CALLERS[caller]
    return {name: refused.get(call.needs, OK) for name, call in calls.items()}


# The gateway reads both headers by one function, and its other ports have the same function before their routes: a
# refused, an allowed and an admin's caller show that.
FEW = ("an unknown key", "a user's token", "an admin's key")


@pytest.mark.parametrize(
    ("port", "header", "caller"),
    [
        (port, header, caller)
        for port, header, callers in (
            ("public", bearer, CALLERS),
            ("public", api_key, FEW),
            ("management", bearer, FEW),
            ("public with TLS", bearer, FEW),
        )
        for caller in callers
    ],
)
async def test_each_call_of_each_caller_has_its_status(
    guarded: Guarded, port: str, header: Callable[[str], Headers], caller: str
) -> None:
    headers, at = header(CALLERS[caller][0]), guarded.ports[port]
    async with at.channel() as channel:
        calls = by_grpc(channel, headers, guarded.record_id)
        assert await statuses(calls) == expected(calls, caller)
    calls = by_rest(at, headers, guarded.record_id)
    assert await statuses(calls) == {name: HTTP_STATUSES[status] for name, status in expected(calls, caller).items()}


async def test_no_secret_is_shown_anywhere(guarded: Guarded) -> None:
    stack, receiver, public = guarded.stack, guarded.receiver, guarded.ports["public"]
    for secret, _ in CALLERS.values():
        for headers in (bearer(secret), api_key(secret)):
            await statuses(by_rest(public, headers, guarded.record_id))
            await public.http("POST", "/v1/completions", {"model": 1}, headers)
    # The inner gateway has spans only where a call passes it: the transformer's own probes do not.
    await until(lambda: {span.service for span in receiver.all_spans()} >= SERVICES - {"envoy-inner"})
    await until(lambda: any("alice" in point.attributes.values() for point in receiver.metric_points()))
    answer = await public.http("GET", "/headrace/v1/payloads?page_size=1000", None, bearer(KEYS["root"]))
    texts = {
        "payload log": answer.body.decode(),
        "spans": "\n".join(map(repr, receiver.all_spans())),
        "exported metrics": "\n".join(map(repr, receiver.metric_points())),
    }
    known = stack.settings
    metrics = (known.transformer_metrics_port, *known.predictor_metrics_ports, known.logger_metrics_port)
    pages = [f"{port}/metrics" for port in metrics]
    pages += [f"{known.gateway_admin_port}/{name}" for name in ("config_dump?include_eds", "stats", "clusters")]
    for page in (*pages, f"{known.gateway_inner_port}/stats/prometheus"):
        texts[page] = await asyncio.to_thread(read_page, f"http://127.0.0.1:{page}")
    for file in known.run_folder.rglob("*"):
        with suppress(FileNotFoundError):  # A service may remove one meanwhile.
            if file.is_file():
                texts[str(file)] = file.read_bytes().decode(errors="replace")
    assert '"client":"alice"' in texts["payload log"].replace(" ", "")
    secrets = guarded.secrets().items()
    shown = [(place, owner) for place, text in texts.items() for owner, secret in secrets if secret in text]
    assert shown == []


def read_page(page: str) -> str:
    with urllib.request.urlopen(page, timeout=60) as response:
        return str(response.read().decode())
