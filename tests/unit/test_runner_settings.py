"""A wrong setting of the runner is one line that names it."""

from ipaddress import IPv4Address
from pathlib import Path

import pytest

from headrace.errors import StartupError
from headrace_logger.settings import LoggerSettings
from headrace_predictor.settings import PredictorSettings
from headrace_runner import settings as stack_settings
from headrace_runner.services import plan
from headrace_runner.settings import StackSettings
from headrace_transformer.settings import TransformerSettings


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("GATEWAY_PROT", "8080", "GATEWAY_PROT: unknown setting; did you mean GATEWAY_PORT?"),
        ("GATEWAY_COLOUR", "red", "GATEWAY_COLOUR: unknown setting; docs/settings.md lists the known ones"),
        ("GATEWAY_PORT", "http", "GATEWAY_PORT=http: "),
        ("PORT_OFFSET", "-1", "PORT_OFFSET=-1: "),
        ("PORT_OFFSET", "60000", "GATEWAY_PORT=8080: is above 65535 with PORT_OFFSET"),
        ("GATEWAY_TRACE_PERCENT", "101", "GATEWAY_TRACE_PERCENT=101: "),
        ("GATEWAY_BIND", "localhost", "GATEWAY_BIND=localhost: "),
        ("GATEWAY_BIND", "0.0.0.0", "GATEWAY_BIND=0.0.0.0: everyone who reaches this address could "),
        ("GATEWAY_HOSTS", "a.example, b", "GATEWAY_HOSTS=a.example, b: must be * or a comma list of host names"),
        ("PREDICTORS", "0", "PREDICTORS=0: a stack without a local predictor needs PREDICTOR_ENDPOINTS"),
        ("PREDICTORS", "-1", "PREDICTORS=-1: "),
        ("PREDICTOR_ENDPOINTS", "gpu-1", "PREDICTOR_ENDPOINTS=gpu-1: 'gpu-1' is not host:port"),
        ("PREDICTOR_ENDPOINTS", "a:1,b:0", "PREDICTOR_ENDPOINTS=a:1,b:0: 'b:0' is not host:port"),
        ("PREDICTOR_ENDPOINTS", "a:65536", "PREDICTOR_ENDPOINTS=a:65536: 'a:65536' is not host:port"),
        ("PREDICTOR_ENDPOINTS", "10.0.0.300:9000", "PREDICTOR_ENDPOINTS=10.0.0.300:9000: '10.0.0.300:9000' is not"),
        ("PREDICTOR_ENDPOINTS", "http://a:1", "PREDICTOR_ENDPOINTS=http://a:1: 'http://a:1' is not host:port"),
        ("PREDICTOR_ENDPOINTS", "::1:9000", "PREDICTOR_ENDPOINTS=::1:9000: '::1:9000' is not host:port"),
        (
            "PREDICTOR_ENDPOINTS",
            "gpu:9000, GPU:9000",
            "PREDICTOR_ENDPOINTS=gpu:9000, GPU:9000: 'GPU:9000' is there twice",
        ),
        (
            "PREDICTOR_ENDPOINTS",
            "localhost:9000",
            "PREDICTORS=1: localhost:9000 of PREDICTOR_ENDPOINTS is the address of",
        ),
        ("DEVICE", "tpu", "DEVICE=tpu: "),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "jaeger", "OTEL_EXPORTER_OTLP_ENDPOINT=jaeger: is not http://host:port"),
    ],
)
def test_a_wrong_setting_is_refused_with_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError) as refused:
        stack_settings.load()
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_predictors_elsewhere_stand_beside_local_ones_or_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREDICTOR_ENDPOINTS", "GPU-1.example:9000, [2001:db8::1]:9000,")
    for predictors, local in ((0, []), (2, ["127.0.0.1:9000", "127.0.0.1:9010"])):
        monkeypatch.setenv("PREDICTORS", str(predictors))
        settings = stack_settings.load()
        assert settings.remote_predictors == (("gpu-1.example", 9000), ("2001:db8::1", 9000))
        processes = plan(settings, tmp_path / "envoy.yaml", {}, {})
        assert len(processes.predictors) == predictors
        replicas = processes.transformer.environment["TRANSFORMER_PREDICTOR_REPLICAS"]
        assert replicas.split(",") == [*local, "gpu-1.example:9000", "[2001:db8::1]:9000"]
        # A predictor refuses settings that it does not know.
        assert not any("PREDICTOR_ENDPOINTS" in process.environment for process in processes.predictors)


def test_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREDICTORS", "3")
    monkeypatch.setenv("PREDICTOR_PORT", "9500")
    assert stack_settings.load().predictor_ports == (9500, 9510, 9520)


def test_an_offset_moves_every_port_and_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREDICTORS", "2")
    monkeypatch.setenv("LOGGER_METRICS_PORT", "0")
    usual = stack_settings.load()
    monkeypatch.setenv("PORT_OFFSET", "1000")
    moved = stack_settings.load()
    assert moved.ports() == {name: tuple(port + 1000 for port in ports) for name, ports in usual.ports().items()}
    assert (moved.gateway, moved.locust_port, moved.logger_metrics_port) == ("127.0.0.1:9080", 9089, 0)
    assert moved.run_folder == usual.run_folder.with_name(".run-1000")
    monkeypatch.setenv("RUN_FOLDER", "state")
    assert stack_settings.load().run_folder == stack_settings.HOME / "state"
    addresses = (moved.otel_exporter_otlp_endpoint, usual.otel_exporter_otlp_endpoint)
    assert addresses[0] == addresses[1]  # Of another program.


def test_an_address_of_all_interfaces_is_reached_on_loopback(tmp_path: Path) -> None:
    address = IPv4Address("0.0.0.0")
    settings = StackSettings(gateway_insecure=True, gateway_bind=address, gateway_port=8081, run_folder=tmp_path)
    assert settings.gateway == "127.0.0.1:8081"


SERVICES = (TransformerSettings, PredictorSettings, LoggerSettings)
ALL = [
    (kind.model_config["env_prefix"].lower().rstrip("_"), str(field.validation_alias or "").upper() or name)
    for kind in SERVICES
    for name, field in (
        (f"{kind.model_config['env_prefix']}{name}".upper(), field) for name, field in kind.model_fields.items()
    )
]


@pytest.mark.parametrize(("service", "name"), ALL)
def test_each_setting_of_a_service_reaches_it_or_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: str, name: str
) -> None:
    if name.lower() in StackSettings.model_fields:
        return  # The stack's own, with the same meaning.
    monkeypatch.setenv(name, "/elsewhere/7")
    reason = ""
    try:
        planned = plan(StackSettings(run_folder=tmp_path), tmp_path / "envoy.yaml", {}, {})
    except StartupError as refused:
        reason = str(refused)
    if reason:
        assert reason.startswith(f"{name}=/elsewhere/7: the stack sets it itself; ")
        instead = reason.partition("; set ")[2].removesuffix(" instead")
        assert instead == "" or instead.lower() in StackSettings.model_fields
    else:
        processes = {"transformer": planned.transformer, "predictor": planned.predictors[0], "logger": planned.logger}
        assert processes[service].environment[name] == "/elsewhere/7"


def test_a_folder_of_a_service_is_relative_to_that_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOGGER_DATABASE", "data/log.sqlite3")
    planned = plan(StackSettings(run_folder=tmp_path), tmp_path / "envoy.yaml", {}, {})
    assert planned.logger.environment["LOGGER_DATABASE"] == str(stack_settings.HOME / "data" / "log.sqlite3")
    assert planned.transformer.environment["TRANSFORMER_PAYLOAD_SPOOL"] == str(tmp_path / "spool")
