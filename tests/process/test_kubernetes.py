"""The manifests of deploy/ are Kubernetes', and keep the promises of compose.yaml.

The custom resources are in test_kubernetes_custom.py; KServe's own client reads its resources here.
"""

import json
import re
import subprocess

import kubernetes_validate
import pytest
import yaml
from pydantic import ByteSize, TypeAdapter

from headrace.settings import ServiceSettings, load
from headrace_logger.settings import LoggerSettings
from headrace_predictor.settings import PredictorSettings
from headrace_transformer.settings import TransformerSettings
from tests.support.kubernetes import (
    DEPLOY,
    KUBECTL,
    ROOT,
    config_map,
    containers,
    environment,
    of_kind,
    pod,
    render,
    with_components,
    without_variables,
    workloads,
)
from tests.system.own_clients import python_of

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl in PATH")

VERSIONS = ("1.27", kubernetes_validate.latest_version())  # The oldest that is supported, by deploy/kubernetes/base.
CUSTOM = {"PodMonitor", "ScaledObject", "HTTPRoute", "GRPCRoute", "InferenceService", "ServingRuntime"}
COMPONENTS = sorted(path.name for path in (DEPLOY / "components").iterdir())
SERVICES: dict[str, type[ServiceSettings]] = {
    "transformer": TransformerSettings,
    "predictor": PredictorSettings,
    "logger": LoggerSettings,
}
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "services/Dockerfile").read_text()
ENVOY = yaml.safe_load((ROOT / "envoy" / "envoy.yaml").read_text())
OTHERS = re.compile(r"OTEL_|HF_TOKEN$|GATEWAY_TRACE_PERCENT$|OMP_NUM_THREADS$")
FLUSH_S = 10  # Of the last records and spans, after a drain.
MAX_ANNOTATION = 262144  # Of a resource; `kubectl apply` writes all of it into one.


def size(text):
    """Compose's 1g, Kubernetes' 1Gi and pydantic's 1GiB are the same."""
    return int(TypeAdapter(ByteSize).validate_python(re.sub(r"(?i)([kmg])i?$", r"\1iB", str(text))))


@pytest.fixture(scope="module")
def base():
    return render(DEPLOY / "base")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """Every kustomization of the folder, each component with the base, and a combination of many."""
    found = {
        path.parent.relative_to(DEPLOY).as_posix(): render(path.parent) for path in DEPLOY.glob("overlays/*/*.yaml")
    }
    found["base"] = render(DEPLOY / "base")
    found["kserve"] = render(ROOT / "deploy" / "kserve")
    many = ("gpu", "hub", "observability", "scale", "tls")
    for name, some in [*((each, (each,)) for each in COMPONENTS), ("+".join(many), many)]:
        found[name] = with_components(tmp_path_factory.mktemp(name.replace("+", "-")), *some)
    return found


def test_every_document_is_valid(rendered):
    unique = {json.dumps(each, sort_keys=True): each for documents in rendered.values() for each in documents}
    validated = [each for each in unique.values() if each["kind"] not in CUSTOM]
    assert {each["kind"] for each in unique.values()} - {each["kind"] for each in validated} == CUSTOM
    for document in validated:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)


def test_the_gateway_has_every_file_of_its_folder_in_config_maps_that_kubectl_can_apply(base):
    folder = ROOT / "envoy"
    files = {path.name for path in folder.iterdir() if path.is_file()} - {"README.md", "kustomization.yaml"}
    pages = {path.name for path in (folder / "playground").iterdir()}
    for name, expected in (("envoy", files), ("playground", pages)):
        found = config_map(base, name)
        assert found.get("data", {}).keys() | found.get("binaryData", {}).keys() == expected
        assert len(json.dumps(found)) < MAX_ANNOTATION
    mounts = {each["name"]: each["mountPath"] for each in containers(base)["envoy"]["volumeMounts"]}
    assert (mounts["envoy"], mounts["playground"]) == ("/etc/envoy", "/etc/envoy/playground")


def test_services_accept_their_environment(rendered, monkeypatch):
    for documents in (each for name, each in rendered.items() if name != "kserve"):
        for name, settings in SERVICES.items():
            variables = environment(documents, containers(documents)[name])
            with monkeypatch.context() as patch:
                patch.setattr("os.environ", dict(variables))
                patch.setattr("sys.argv", ["service"])
                load(settings, name)
            assert {each for each in variables if each.startswith(name.upper())} <= known(settings)


def known(settings):
    prefix = settings.model_config["env_prefix"]
    return {str(field.validation_alias or f"{prefix}{name}".upper()) for name, field in settings.model_fields.items()}


def test_every_variable_is_a_setting_of_a_container(rendered):
    names = set().union(*(known(settings) for settings in SERVICES.values()))
    gateway = "\n".join(
        path.read_text() for path in (ROOT / "envoy").iterdir() if path.suffix in (".sh", ".lua", ".yaml")
    )
    names |= set(re.findall(r'(?:getenv\("|list_of\("|\$\{?|%ENVIRONMENT\()([A-Z_]+)', gateway))
    for name, documents in rendered.items():
        for container in containers(documents).values() if name != "kserve" else ():
            unknown = environment(documents, container).keys() - names
            assert [each for each in unknown if not OTHERS.match(each)] == []


def test_the_wiring_is_that_of_compose(base):
    """Host names, ports and folders that compose fixes; the gateway drains longer, because an update waits for it.

    Batches need a folder that all transformers share, which only the user can name.
    """
    for name in ("envoy", *SERVICES):
        fixed = {
            key: value
            for key, value in COMPOSE["services"][name]["environment"].items()
            if value and "$" not in value and not key.startswith(("OTEL_", "TRANSFORMER_BATCHES")) and "KEY" not in key
        }
        own = environment(base, containers(base)[name])
        if name == "envoy":
            assert float(own.pop("DRAIN_S")) >= float(fixed.pop("DRAIN_S"))
        assert fixed.items() <= own.items()


def test_probes_ask_the_port_that_answers_them(rendered):
    for documents in rendered.values():
        for name, container in containers(documents).items():
            ports = {each["name"]: each["containerPort"] for each in container["ports"]}
            if name == "jaeger":
                continue
            ready, live, start = (container[f"{each}Probe"] for each in ("readiness", "liveness", "startup"))
            if name == "envoy":
                (listener,) = (each for each in ENVOY["static_resources"]["listeners"] if each["name"] == "ingress")
                assert ports["http"] == listener["address"]["socket_address"]["port_value"]
                # Answered by Envoy alone: a gateway without predictors stays in its Service.
                assert ready["httpGet"]["path"] == start["httpGet"]["path"] == "/"
                manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
                routes = [each for host in manager["route_config"]["virtual_hosts"] for each in host["routes"]]
                pages = [each for each in routes if each["match"].get("path") == "/"]
                assert pages
                assert all(each["direct_response"]["status"] == 200 for each in pages)
                assert str(ENVOY["admin"]["address"]["socket_address"]["port_value"]) in live["exec"]["command"][-1]
                continue
            own = environment(documents, container)
            # Ready is what compose's health check asks; alive is a process, whatever its models or other services do.
            assert ready["grpc"]["port"] == int(own[f"{name.upper()}_PORT"]) == ports["grpc"]
            assert ports["metrics"] == int(own[f"{name.upper()}_METRICS_PORT"])
            for probe in (live, start):
                assert probe["httpGet"] == {"path": "/metrics", "port": "metrics"}
            target = DOCKERFILE.split(f" AS {name}\n")[1].split("\nFROM ")[0]
            assert f'"headrace.rpc.server.health_check", "{ports["grpc"]}"' in target


def test_a_pod_has_longer_than_its_drains_to_end(rendered):
    for documents in rendered.values():
        for workload in workloads(documents).values():
            grace = pod(workload)["terminationGracePeriodSeconds"]
            assert grace >= float(COMPOSE["x-hardened"]["stop_grace_period"].removesuffix("s"))
            for container in pod(workload)["containers"]:
                name, own = container["name"], environment(documents, container)
                wait = float(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0])[-1])
                default = SERVICES[name].model_fields["drain_s"].default if name in SERVICES else 0
                drain = float(own.get("DRAIN_S" if name == "envoy" else f"{name.upper()}_DRAIN_S", default))
                assert grace >= wait + drain + FLUSH_S


def test_every_pod_is_as_hardened_as_in_compose(rendered):
    hardened = COMPOSE["x-hardened"]
    (tmp,) = (re.fullmatch(r"/tmp:size=(\w+),mode=1777", each)[1] for each in hardened["tmpfs"])
    for name, documents in rendered.items():
        for workload in workloads(documents).values():
            spec = pod(workload)
            assert spec["enableServiceLinks"] is False
            assert spec["automountServiceAccountToken"] is False
            assert spec["securityContext"]["runAsNonRoot"]
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            volumes = {each["name"]: each for each in spec["volumes"]}
            for container in spec["containers"]:
                context = spec["securityContext"] | container["securityContext"]
                assert context["readOnlyRootFilesystem"] is hardened["read_only"]
                assert context["capabilities"] == {"drop": hardened["cap_drop"]}
                assert context["allowPrivilegeEscalation"] is False
                assert context["runAsUser"] == int(
                    COMPOSE["services"][container["name"]].get("user", "10001").split(":")[0]
                )
                (folder,) = (each["name"] for each in container["volumeMounts"] if each["mountPath"] == "/tmp")
                assert size(volumes[folder]["emptyDir"]["sizeLimit"]) == size(tmp)
                if container["name"] != "predictor" or "gpu" not in name:
                    limit = without_variables(COMPOSE["services"][container["name"]]["mem_limit"])
                    assert size(container["resources"]["limits"]["memory"]) == size(limit)


def test_without_keys_the_gateway_starts_only_with_the_component_for_it(rendered):
    for name, documents in rendered.items():
        if name == "kserve":
            continue
        own = environment(documents, containers(documents)["envoy"])
        assert own["GATEWAY_BIND"] == "0.0.0.0"  # Which closes management.
        assert bool(own["GATEWAY_KEYS"]) != (own.get("GATEWAY_INSECURE") == "true")
        assert (own.get("GATEWAY_INSECURE") == "true") == (name == "without-keys")
        assert own["GATEWAY_KEYS"] == environment(documents, containers(documents)["transformer"])["TRANSFORMER_KEYS"]
        hosts = own["GATEWAY_HOSTS"].split(",")
        (namespace,) = of_kind(documents, "Namespace")
        assert f"gateway.{namespace}.svc.cluster.local" in hosts
        for route in of_kind(documents, "HTTPRoute", "GRPCRoute").values():
            assert set(route["spec"]["hostnames"]) <= set(hosts)


def test_kserve_runs_the_services_with_settings_that_they_know(rendered):
    documents = rendered["kserve"]
    (runtime,) = of_kind(documents, "ServingRuntime").values()
    (service,) = of_kind(documents, "InferenceService").values()
    (headless,) = of_kind(documents, "Service").values()
    model, grace = service["spec"]["predictor"]["model"], {}
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    for name, spec, owner in (
        ("predictor", runtime["spec"], service["spec"]["predictor"]),
        ("transformer", service["spec"]["transformer"], service["spec"]["transformer"]),
    ):
        (container,) = spec["containers"]
        own = environment(documents, container)
        assert own.keys() - {"STORAGE_URI", "PROTOCOL"} <= known(SERVICES[name])
        grace[name] = owner["terminationGracePeriodSeconds"] - float(own[f"{name.upper()}_DRAIN_S"])
        assert owner["enableServiceLinks"] is False
        assert (
            container["readinessProbe"]["grpc"]["port"]
            == container["ports"][0]["containerPort"]
            == int(own[f"{name.upper()}_PORT"])
        )
        assert container["livenessProbe"]["httpGet"]["port"] == int(own[f"{name.upper()}_METRICS_PORT"])
        assert container["image"] == without_variables(COMPOSE["services"][name]["image"])
    assert min(grace.values()) >= FLUSH_S
    assert own["STORAGE_URI"] == model["storageUri"]
    assert own["PROTOCOL"] == model["protocolVersion"]
    assert own["MODELS"].split("=")[0] == service["metadata"]["name"]
    assert (
        own["TRANSFORMER_PREDICTOR_REPLICAS"]
        == f"{headless['metadata']['name']}:{headless['spec']['ports'][0]['port']}"
    )
    assert headless["spec"]["selector"]["serving.kserve.io/inferenceservice"] == service["metadata"]["name"]


def test_kserves_client_has_every_field_of_the_manifests(rendered):
    documents = rendered["kserve"]

    def read(*objects):
        command = [python_of(".venv-kserve"), str(ROOT / "tests" / "kserve" / "objects.py")]
        return subprocess.run(command, input=json.dumps(objects), capture_output=True, text=True, timeout=60)

    done = read(*documents)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["InferenceService", "Service", "ServingRuntime"]
    (service,) = of_kind(documents, "InferenceService").values()
    misspelt = json.loads(json.dumps(service))
    misspelt["spec"]["transformer"]["containers"][0]["readinessProbe"]["grcp"] = {}
    assert "V1Probe has no grcp" in read(misspelt).stderr
