"""compose.yaml and `.env.example` name every setting, so that none is known to the code alone; its overlays fit.

A default is written in the code, in `.env.example` and in the compose files: here they are held equal.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from headrace.models.sources import parse_models
from headrace.settings import ServiceSettings
from headrace_logger.settings import LoggerSettings
from headrace_predictor.settings import PredictorSettings
from headrace_runner.settings import StackSettings
from headrace_transformer.settings import TransformerSettings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
OVERLAYS = sorted(ROOT.glob("deploy/compose/*.yaml"))
OBSERVABILITY = yaml.safe_load((ROOT / "deploy/compose/observability.yaml").read_text())
SCRAPED = yaml.safe_load((ROOT / "deploy" / "observability" / "prometheus.yaml").read_text())["scrape_configs"]
EXAMPLE = (ROOT / ".env.example").read_text()
LINES = dict(re.findall(r"^([A-Z_]+)=(.*)$", EXAMPLE, re.MULTILINE))
# A setting of containers alone; `make up` reads the same line.
EMPTY_IN_EXAMPLE = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "GATEWAY_TLS"}
# deploy/compose/vllm.yaml serves another model, whose name is a variable too.
OF_VLLM = "chat=http://vllm:8000/v1#chat;tokenizer=${VLLM_MODEL:-Qwen/Qwen3-0.6B}"
# Rarely used settings of `make up`: docs/settings.md names them.
NOT_IN_EXAMPLE = {"OTEL_EXPORTER_OTLP_ENDPOINT", "ROLL_PATIENCE_S", "RUN_FOLDER"}


@pytest.mark.parametrize("settings", [TransformerSettings, PredictorSettings, LoggerSettings])
def test_every_setting_can_be_given_to_a_container(settings: type[ServiceSettings]) -> None:
    prefix = settings.model_config["env_prefix"]
    service = prefix.lower().rstrip("_")
    listed = {name for name in COMPOSE["services"][service]["environment"] if name.startswith(prefix)}
    # The image sets the listening address; sharing it concerns one machine only; MODELS has no prefix.
    others = {f"{prefix}HOST", f"{prefix}LISTEN", f"{prefix}MODELS"}
    known = {f"{prefix}{name}".upper() for name in settings.model_fields} - others
    assert listed == known


def test_every_variable_of_the_compose_files_has_the_default_of_the_example() -> None:
    texts = [path.read_text() for path in (ROOT / "compose.yaml", *OVERLAYS)]
    assert sum(text.count(OF_VLLM) for text in texts) == 1
    texts = [text.replace(f"${{MODELS:-{OF_VLLM}}}", "${VLLM_MODEL:-Qwen/Qwen3-0.6B}") for text in texts]
    used = [found for text in texts for found in re.findall(r"\$\{([A-Z_]+):?-([^}]*)\}", text)]
    assert len(used) > 20
    for name, default in used:
        assert LINES[name] == ("" if name in EMPTY_IN_EXAMPLE else default)
    # Each has a default, so that a fresh clone needs no .env.
    assert sum(len(re.findall(r"(?<!\$)\$\{?[A-Z_]", text)) for text in texts) == len(used)


def test_every_setting_of_the_runner_has_the_default_of_the_example() -> None:
    fields = {name.upper(): field for name, field in StackSettings.model_fields.items()}
    assert fields.keys() - LINES.keys() == NOT_IN_EXAMPLE
    for name in fields.keys() & LINES.keys():
        default = fields[name].default
        assert LINES[name] == (str(default).lower() if isinstance(default, bool) else str(default))


def test_every_line_of_the_example_is_read_by_the_runner_or_by_compose() -> None:
    read = "\n".join(path.read_text() for path in (ROOT / "compose.yaml", *OVERLAYS, ROOT / "Makefile"))
    known = {name.upper() for name in StackSettings.model_fields}
    assert [name for name in LINES if name not in known and name not in read] == []


def test_every_line_of_the_example_is_explained() -> None:
    blocks = [block for block in re.split(r"\n\n+", EXAMPLE) if re.search(r"^[A-Z_]+=", block, re.MULTILINE)]
    assert all(block.startswith("#") for block in blocks)


def test_files_of_the_user_are_not_part_of_the_repository() -> None:
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


def scraped_addresses() -> dict[str, tuple[str, int]]:
    """Job → the host and port of its page."""
    found = {}
    for job in SCRAPED:
        for by_name in job.get("dns_sd_configs", ()):
            (name,) = by_name["names"]
            found[job["job_name"]] = (name, by_name["port"])
        for fixed in job.get("static_configs", ()):
            (target,) = fixed["targets"]
            host, _, port = target.partition(":")
            found[job["job_name"]] = (host, int(port))
    return found


def test_prometheus_scrapes_each_service_at_its_page_over_a_shared_network():
    services = COMPOSE["services"]
    addresses = scraped_addresses()
    for job, (host, port) in addresses.items():
        assert host == job
        if job != "envoy":
            assert services[job]["environment"][f"{job.upper()}_METRICS_PORT"] == str(port)
        networks = {name.replace("${MODELS_NETWORK:-models}", "models") for name in services[job]["networks"]}
        assert networks & set(OBSERVABILITY["services"]["prometheus"]["networks"])
    assert addresses.keys() == {"predictor", "transformer", "logger", "envoy"}
    listeners = yaml.safe_load((ROOT / "envoy" / "envoy.yaml").read_text())["static_resources"]["listeners"]
    inner = next(listener for listener in listeners if listener["name"] == "inner")
    assert addresses["envoy"][1] == inner["address"]["socket_address"]["port_value"]


def test_services_of_the_overlay_are_hardened_limited_and_published_on_loopback_only():
    assert OBSERVABILITY["x-hardened"] == COMPOSE["x-hardened"]
    for service in OBSERVABILITY["services"].values():
        assert COMPOSE["x-hardened"].items() <= service.items()
        assert "mem_limit" in service
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert all(port.startswith("127.0.0.1:${") for port in service["ports"])
        for volume in service["volumes"]:
            source, target, *mode = volume.split(":")
            if source.startswith("./"):
                assert mode == ["ro"]
                assert (ROOT / source).exists()
            else:
                assert source in OBSERVABILITY["volumes"]
                assert target.startswith("/")


def test_the_database_of_the_overlay_is_hardened_and_reached_by_the_logger_alone():
    overlay = yaml.safe_load((ROOT / "deploy/compose/postgres.yaml").read_text())
    postgres = overlay["services"]["postgres"]
    # The server's socket needs a folder in memory too.
    assert {**COMPOSE["x-hardened"], "tmpfs": None}.items() <= {**postgres, "tmpfs": None}.items()
    assert set(COMPOSE["x-hardened"]["tmpfs"]) < set(postgres["tmpfs"])
    assert re.search(r":\d+\.\d+$", postgres["image"])
    assert "ports" not in postgres
    assert overlay["networks"] == {"database": {"internal": True}}
    assert [name for name, service in overlay["services"].items() if "database" in service["networks"]] == [
        "logger",
        "postgres",
    ]


def test_vllms_server_is_hardened_and_reached_by_the_transformer_without_a_published_port():
    overlay = yaml.safe_load((ROOT / "deploy/compose/vllm.yaml").read_text())
    vllm, transformer = overlay["services"]["vllm"], overlay["services"]["transformer"]
    # It compiles in memory, and has a thread for every core.
    changed = {"tmpfs": None, "pids_limit": None}
    assert {**COMPOSE["x-hardened"], **changed}.items() <= {**vllm, **changed}.items()
    assert "mem_limit" in vllm
    assert "ports" not in vllm
    assert re.search(r":v\d+\.\d+\.\d+$", LINES["VLLM_IMAGE"])
    assert vllm["networks"] == transformer["networks"] == ["outer"]
    assert "networks" not in overlay["services"]["predictor"]
    assert {volume.split(":")[0] for volume in vllm["volumes"]} == overlay["volumes"].keys()
    served = vllm["command"][vllm["command"].index("--served-model-name") + 1]
    models = OF_VLLM.replace("${VLLM_MODEL:-Qwen/Qwen3-0.6B}", LINES["VLLM_MODEL"])
    (engine,) = parse_models(models)
    assert (engine.name, engine.addresses) == ("chat", ("http://vllm:8000/v1",))
    assert (engine.served, engine.tokenizer) == (served, LINES["VLLM_MODEL"])
    assert {overlay["services"][name]["environment"]["MODELS"] for name in ("transformer", "predictor")} == {
        f"${{MODELS:-{OF_VLLM}}}"
    }


def test_no_page_of_metrics_is_published():
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert not [port for port in published if re.search(r":(91\d\d|8090|9901)$", port)]


def test_with_tls_only_the_port_with_tls_is_published_beyond_loopback():
    text = (ROOT / "deploy/compose/tls.yaml").read_text()
    override = yaml.safe_load(text.replace("!override", ""))["services"]["envoy"]
    assert "ports: !override" in text  # Else these would be added.
    published = dict(port.rsplit(":", 1)[::-1] for port in override["ports"])
    own = dict(port.rsplit(":", 1)[::-1] for port in COMPOSE["services"]["envoy"]["ports"])
    assert published.pop("8443").startswith("${GATEWAY_BIND:-127.0.0.1}:")
    assert published.keys() == own.keys()
    assert all(address.startswith("127.0.0.1:${") for address in published.values())
    (mount,) = override["volumes"]
    assert mount["target"] == override["environment"]["GATEWAY_TLS"]


def test_a_span_links_to_the_payload_record_at_the_gateways_port():
    (pattern,) = json.loads((ROOT / "deploy" / "observability" / "jaeger-ui.json").read_text())["linkPatterns"]
    assert pattern["url"].startswith(f"http://127.0.0.1:{LINES['GATEWAY_PORT']}/headrace/v1/payloads?request_id=")
    assert f"#{{{pattern['key']}}}" in pattern["url"]
    jaeger = COMPOSE["services"]["jaeger"]
    assert jaeger["command"] == ["--set=extensions.jaeger_query.ui.config_file=/etc/jaeger/ui.json"]
    assert jaeger["volumes"] == ["./deploy/observability/jaeger-ui.json:/etc/jaeger/ui.json:ro"]


def test_every_service_has_the_same_opentelemetry_environment():
    environments = [
        {name: value for name, value in service["environment"].items() if name.startswith("OTEL_")}
        for name, service in COMPOSE["services"].items()
        if name in ("transformer", "predictor", "logger")
    ]
    assert environments == [COMPOSE["x-telemetry"]] * 3
    # Jaeger takes spans alone: the general variable would send it metrics too, which it refuses.
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in COMPOSE["x-telemetry"]
