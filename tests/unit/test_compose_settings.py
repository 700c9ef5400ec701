"""compose.yaml and `.env.example` name every setting, so that none is known to the code alone; its overlays fit.

A default is written in the code, in `.env.example` and in the compose files: here they are held equal.
"""

import re
from pathlib import Path

import pytest
import yaml

from headrace.settings import ServiceSettings
from headrace_logger.settings import LoggerSettings
from headrace_predictor.settings import PredictorSettings
from headrace_runner.settings import StackSettings
from headrace_transformer.settings import TransformerSettings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
OVERLAYS = sorted([*ROOT.glob("deploy/compose/*.yaml"), *ROOT.glob("services/*.yaml")])
OBSERVABILITY = yaml.safe_load((ROOT / "deploy/compose/observability.yaml").read_text())
SCRAPED = yaml.safe_load((ROOT / "deploy" / "observability" / "prometheus.yaml").read_text())["scrape_configs"]
EXAMPLE = (ROOT / ".env.example").read_text()
LINES = dict(re.findall(r"^([A-Z_]+)=(.*)$", EXAMPLE, re.MULTILINE))
# A setting of containers alone; `make up` reads the same line.
EMPTY_IN_EXAMPLE = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "GATEWAY_TLS"}
# Which file the images come from: the one variable whose value, not its default, decides.
PUBLISHED = "${HEADRACE_IMAGES:+.published}"
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
    texts = [text.replace(PUBLISHED, "") for text in texts]
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


# The server's socket needs a folder in memory too; vLLM compiles in memory, and has a thread for every core.
@pytest.mark.parametrize(
    ("overlay", "own"), [("observability", set()), ("postgres", {"tmpfs"}), ("vllm", {"tmpfs", "pids_limit"})]
)
def test_services_that_an_overlay_adds_are_hardened_limited_and_published_on_loopback_only(overlay, own):
    document = yaml.safe_load((ROOT / f"deploy/compose/{overlay}.yaml").read_text())
    services = document["services"]
    assert all(network["internal"] for network in document.get("networks", {}).values())
    hardened = {name: value for name, value in COMPOSE["x-hardened"].items() if name not in own}
    for name in services.keys() - COMPOSE["services"].keys():
        service = services[name]
        assert hardened.items() <= service.items()
        assert "mem_limit" in service
        assert re.search(r":v?\d+\.\d+(\.\d+)?$", LINES["VLLM_IMAGE"] if name == "vllm" else service["image"])
        assert all(port.startswith("127.0.0.1:${") for port in service.get("ports", ()))
        for source, _, *mode in (volume.split(":") for volume in service["volumes"]):
            if source.startswith("./"):
                assert mode == ["ro"]
                assert (ROOT / source).exists()


def test_every_service_has_the_same_opentelemetry_environment():
    environments = [
        {name: value for name, value in service["environment"].items() if name.startswith("OTEL_")}
        for name, service in COMPOSE["services"].items()
        if name in ("transformer", "predictor", "logger")
    ]
    assert environments == [COMPOSE["x-telemetry"]] * 3
    # Jaeger takes spans alone: the general variable would send it metrics too, which it refuses.
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in COMPOSE["x-telemetry"]
