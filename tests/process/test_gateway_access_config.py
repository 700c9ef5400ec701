"""TLS, tokens and the rate limit service are configured, or refused, in the same way by the container's entry
point and by the local runner."""

from __future__ import annotations

import re
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from headrace.errors import StartupError
from headrace_runner import envoy_config, gateway_access
from headrace_runner.command import certificates
from headrace_runner.settings import StackSettings
from tests.process.test_envoy_config import connection_manager, start, validate
from tests.support.tokens import AUDIENCE, ISSUER, SigningKey, publish

Config = dict[str, Any]
JWT = "envoy.filters.http.jwt_authn"
LIMITS = "envoy.filters.http.ratelimit"


@pytest.fixture
def access(tmp_path: Path) -> dict[str, str]:
    """Settings with all of these; names contain letters with a meaning in bash or YAML."""
    folder = tmp_path / "a & b: {c} $d #e"
    certificates.make(folder, ("models.example",), ask_clients=True)
    publish(folder / "jwks.json", SigningKey("one"))
    return {
        "GATEWAY_TLS": str(folder),
        "GATEWAY_JWKS": str(folder / "jwks.json"),
        "GATEWAY_JWT_ISSUER": f"{ISSUER}/a?b=c&d=#e",
        "GATEWAY_JWT_AUDIENCE": AUDIENCE,
        "GATEWAY_RATE_LIMIT_SERVICE": "limits.example:8081",
        "GATEWAY_RATE_LIMIT_REQUIRED": "true",
    }


def settings_of(tmp_path: Path, access: dict[str, str], **others: Any) -> StackSettings:
    return StackSettings(run_folder=tmp_path, **{name.lower(): value for name, value in access.items()}, **others)


def listeners(config: Config) -> dict[str, Config]:
    return {listener["name"]: listener for listener in config["static_resources"]["listeners"]}


def parts(config: Config) -> list[Any]:
    """The configuration that the settings add, with the paths of the container."""
    filters = [one for one in connection_manager(config, "ingress")["http_filters"] if one["name"] in (JWT, LIMITS)]
    clusters = [one for one in config["static_resources"]["clusters"] if one["name"] in ("jwks", "rate_limits")]
    own = [listeners(config).get(name, {}) for name in ("tls", "jwks")]
    sockets = [(chain.get("transport_socket")) for one in own for chain in one.get("filter_chains", ())]
    added = [config.get("node"), filters, clusters, sockets, listeners(config).get("jwks")]
    return list(yaml.safe_load(yaml.safe_dump(added).replace(f"{envoy_config.ENVOY_FOLDER}/", "/etc/envoy/")))


@pytest.mark.parametrize(
    "switched_on", [("GATEWAY_TLS",), ("GATEWAY_JWKS", "GATEWAY_JWT"), ("GATEWAY_RATE",), ("GATEWAY_",)]
)
def test_container_and_local_runner_have_the_same_configuration(
    tmp_path: Path, access: dict[str, str], switched_on: tuple[str, ...]
) -> None:
    access = {name: value for name, value in access.items() if name.startswith(switched_on)}
    assert start(tmp_path, **access).returncode == 0
    in_container = yaml.safe_load((tmp_path / "envoy.yaml").read_text())
    secrets = [tmp_path / name for name in gateway_access.SECRETS]
    written = [secret.read_text().rstrip("\n") for secret in secrets if secret.exists()]
    envoy_config.write(settings_of(tmp_path, access), tmp_path / "local.yaml")
    local = yaml.safe_load((tmp_path / "local.yaml").read_text())
    assert parts(in_container) == parts(local)
    assert written == [secret.read_text().rstrip("\n") for secret in secrets if secret.exists()]
    assert ("tls" in listeners(local)) == ("GATEWAY_TLS" in access)
    assert ("jwks" in listeners(local)) == ("GATEWAY_JWKS" in access)
    limits = [one["typed_config"] for one in parts(local)[1] if one["name"] == LIMITS]
    assert [limit["failure_mode_deny"] for limit in limits] == [True] * ("GATEWAY_RATE_LIMIT_SERVICE" in access)
    checked = validate("--config-path", str(tmp_path / "local.yaml"))
    assert checked.returncode == 0, checked.stderr
    assert "deprecated" not in checked.stderr.lower()
    assert "work-in-progress" not in checked.stderr


def test_without_the_settings_no_configuration_is_added(tmp_path: Path) -> None:
    assert start(tmp_path).returncode == 0
    for text in ((tmp_path / "envoy.yaml").read_text(), yaml.safe_dump(envoy_config.derive(StackSettings()))):
        assert parts(yaml.safe_load(text)) == [{"id": "gateway", "cluster": "headrace"}, [], [], [], None]


def test_the_port_with_tls_has_the_same_routes(tmp_path: Path, access: dict[str, str]) -> None:
    assert start(tmp_path, **access).returncode == 0
    managers = [
        connection_manager(yaml.safe_load((tmp_path / "envoy.yaml").read_text()), name)
        for name in ("ingress", "management", "tls")
    ]
    assert managers[0] == managers[1] == managers[2]
    filters = [one["name"] for one in managers[2]["http_filters"]]
    assert filters.index(JWT) < filters.index("envoy.filters.http.lua")


def test_clients_need_a_certificate_if_there_is_an_authority(tmp_path: Path, access: dict[str, str]) -> None:
    required = []
    for _ in range(2):
        assert start(tmp_path, **access).returncode == 0
        config = yaml.safe_load((tmp_path / "envoy.yaml").read_text())
        socket = listeners(config)["tls"]["filter_chains"][0]["transport_socket"]["typed_config"]
        required.append(socket.get("require_client_certificate", False))
        assert ("validation_context_sds_secret_config" in socket["common_tls_context"]) == required[-1]
        assert parts(envoy_config.derive(settings_of(tmp_path, access))) == parts(config)
        (Path(access["GATEWAY_TLS"]) / "ca.crt").unlink(missing_ok=True)
    assert required == [True, False]


@pytest.mark.parametrize(
    ("bind", "plain", "with_tls"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.1.2.3", "127.1.2.3", "127.1.2.3"),
        ("0.0.0.0", "127.0.0.1", "0.0.0.0"),
        ("10.1.2.3", "127.0.0.1", "10.1.2.3"),
    ],
)
def test_the_port_without_tls_stays_on_loopback(
    tmp_path: Path, access: dict[str, str], bind: str, plain: str, with_tls: str
) -> None:
    settings = settings_of(tmp_path, access, gateway_insecure=True, gateway_bind=IPv4Address(bind))
    found = listeners(envoy_config.derive(settings))
    assert found["ingress"]["address"]["socket_address"]["address"] == plain
    assert found["tls"]["address"]["socket_address"]["address"] == with_tls
    assert found["management"]["address"]["socket_address"]["address"] == "127.0.0.1"
    assert settings.gateway == f"{plain}:8080"
    assert settings.ports()["GATEWAY_TLS_PORT"] == (8443,)
    assert "GATEWAY_TLS_PORT" not in StackSettings().ports()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"GATEWAY_TLS": "/nowhere"}, "GATEWAY_TLS=/nowhere: must be a folder with a tls.crt and a tls.key"),
        ({"GATEWAY_JWKS": "/nowhere.json"}, "GATEWAY_JWKS=/nowhere.json: must be a file with a JSON Web Key Set"),
        ({"GATEWAY_JWKS": "/etc/passwd"}, "GATEWAY_JWKS=/etc/passwd: must be a file with a JSON Web Key Set"),
        ({"GATEWAY_JWT_ISSUER": ""}, "GATEWAY_JWT_ISSUER=: GATEWAY_JWKS needs it"),
        ({"GATEWAY_JWT_AUDIENCE": ""}, "GATEWAY_JWT_AUDIENCE=: GATEWAY_JWKS needs it"),
    ],
)
def test_both_refuse_unusable_settings_in_one_line(
    tmp_path: Path, access: dict[str, str], change: dict[str, str], message: str
) -> None:
    refused = start(tmp_path, **access | change)
    assert refused.returncode == 78
    assert refused.stderr.startswith(message)
    assert "\n" not in refused.stderr.strip()
    with pytest.raises(StartupError, match=re.escape(message)) as error:
        envoy_config.derive(settings_of(tmp_path, access | change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["GATEWAY_TLS", "GATEWAY_JWKS", "GATEWAY_JWT_ISSUER", "GATEWAY_JWT_AUDIENCE"])
def test_both_refuse_letters_that_would_break_the_configuration(
    tmp_path: Path, access: dict[str, str], name: str
) -> None:
    for value in ('a"b', "a\\b", "a\nb"):
        refused = start(tmp_path, **access | {name: value})
        assert refused.returncode == 78, value
        with pytest.raises(ValueError, match=r"must have no quotation|must be a name or a URI"):
            settings_of(tmp_path, access | {name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("GATEWAY_RATE_LIMIT_SERVICE", ("limits", "limits:", ":8081", "limits:0", "limits:65536", "a b:1", 'a":1')),
        ("GATEWAY_RATE_LIMIT_REQUIRED", ("perhaps",)),
    ],
)
def test_both_refuse_wrong_settings_of_the_rate_limit_service(
    tmp_path: Path, access: dict[str, str], name: str, values: tuple[str, ...]
) -> None:
    for value in values:
        refused = start(tmp_path, **access | {name: value})
        assert refused.returncode == 78, value
        assert refused.stderr.startswith(f"{name}={value}: must be ")
        with pytest.raises(ValidationError):
            settings_of(tmp_path, access | {name: value})


@pytest.mark.parametrize(
    ("name", "content"), [("tls.crt", "broken"), ("tls.key", "broken"), ("ca.crt", "broken"), ("tls.key", None)]
)
def test_the_runner_checks_the_certificates_before_it_starts(
    tmp_path: Path, access: dict[str, str], name: str, content: str | None
) -> None:
    folder = Path(access["GATEWAY_TLS"])
    if content is None:  # A valid key, but of another certificate.
        certificates.make(tmp_path / "other", ())
        content = (tmp_path / "other" / name).read_text()
    (folder / name).write_text(content)
    with pytest.raises(StartupError, match="cannot be used: ") as error:
        envoy_config.derive(settings_of(tmp_path, access))
    assert "\n" not in str(error.value)
