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
