"""What the chart renders is Kubernetes', and keeps the promises of compose.yaml.

The custom resources are in test_kubernetes_custom.py; KServe's own client reads its resources here.
"""

import gzip
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
from tests.support.full import FULL
from tests.support.kubernetes import (
    CHART,
    HELM,
    KUBECTL,
    NAMESPACE,
    OPTIONS,
    ROOT,
    containers,
    environment,
    helm,
    kustomize,
    of_kind,
    pod,
    render,
    without_variables,
    workloads,
)
from tests.system.own_clients import python_of

pytestmark = pytest.mark.skipif(
    HELM is None or KUBECTL is None, reason="needs helm (`make .venv-tools/helm/.installed`) and kubectl"
)

VERSIONS = ("1.27", kubernetes_validate.latest_version())  # The oldest that the chart supports.
CUSTOM = {
    *("PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "GRPCRoute"),
    *("InferenceService", "ServingRuntime"),
}
SERVICES: dict[str, type[ServiceSettings]] = {
    "transformer": TransformerSettings,
    "predictor": PredictorSettings,
    "logger": LoggerSettings,
}
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
FLUSH_S = 10  # Of the last records and spans, after a drain.
MAX_ANNOTATION = 262144  # Of a resource; `kubectl apply` writes all of it into one.
MAX_SECRET = 1 << 20  # Helm keeps a release in one, compressed and in base64.


def size(text):
    """Compose's 1g, Kubernetes' 1Gi and pydantic's 1GiB are the same."""
    return int(TypeAdapter(ByteSize).validate_python(re.sub(r"(?i)([kmg])i?$", r"\1iB", str(text))))


@pytest.fixture(scope="module")
def base():
    return render()


@pytest.fixture(scope="module")
def rendered():
    """The chart by default, with options, and with many; KServe's resources."""
    many = ("gpu", "hub", "observability", "scale", "tls")
    one = [option for option in OPTIONS if FULL or option not in ("inference-pool", *many)]
    sets = {"base": (), **{option: (option,) for option in one}, "+".join(many): many}
    return {"kserve": kustomize(ROOT / "deploy" / "kserve"), **{name: render(*some) for name, some in sets.items()}}


def test_the_schema_has_every_value_and_refuses_others():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"].keys() - {"global"} == values.keys()
    for refused in (
        "gatway.replicas=3",
        "predictor.replica=3",
        "settings.PREDICTOR_MAX_RUNNING=8",
        "autoscaling.by=load",
        "logger.replicas=2",
        "gateway.pod.terminationGracePeriodSeconds=9",
        "route.host=*.example.com",
    ):
        with pytest.raises(AssertionError, match="values don't meet the specifications"):
            helm("--set", refused)
    for refused, message in (
        ("route.to=gateway,tls.enabled=true", "exclude each other"),
        ("autoscaling.by=metrics,autoscaling.min=5,autoscaling.max=2", "autoscaling.min is above"),
    ):
        with pytest.raises(AssertionError, match=message):
            helm("--set", refused)
    assert workloads(helm("--set", "logger.replicas=2,postgres.enabled=true"))["logger"]["spec"]["replicas"] == 2


def test_drains_secrets_and_tolerations_are_those_of_the_values():
    documents = helm(
        *("--set", "gateway.drain=1800,predictor.drain=300,secrets[0]=buckets,gpu.enabled=true"),
        *("--set", "predictor.pod.tolerations[0].key=models,predictor.pod.tolerations[0].operator=Exists"),
    )
    specs = {name: pod(each) for name, each in workloads(documents).items()}
    assert {name: spec["terminationGracePeriodSeconds"] for name, spec in specs.items()} == {
        "gateway": 1845,
        "predictor": 330,
        "logger": 45,
    }
    found = containers(documents)
    assert environment(documents, found["transformer"])["TRANSFORMER_DRAIN_S"] == "1800"
    assert environment(documents, found["predictor"])["PREDICTOR_DRAIN_S"] == "300"
    for name in SERVICES:
        assert {"secretRef": {"name": "buckets"}} in found[name]["envFrom"]
    assert [each["key"] for each in specs["predictor"]["tolerations"]] == ["nvidia.com/gpu", "models"]


def test_a_setting_of_the_user_wins_and_replaces_the_pods(base):
    changed = helm("--set-string", "settings.MODELS=chat=org/name,settings.PREDICTOR_MAX_RUNNING=8")
    assert environment(changed, containers(changed)["predictor"])["MODELS"] == "chat=org/name"
    assert environment(changed, containers(changed)["predictor"])["PREDICTOR_MAX_RUNNING"] == "8"
    for name, workload in workloads(base).items():
        before, after = (
            each["spec"]["template"]["metadata"]["annotations"] for each in (workload, workloads(changed)[name])
        )
        assert {key for key in before if before[key] != after[key]} == {"checksum/settings"}


def test_images_and_pods_are_those_of_the_values():
    documents = helm(
        *("--set", "images.prefix=registry.example.com/headrace-,images.pullSecrets[0].name=pull"),
        *("--set-string", "images.tag=2"),
        *(
            "--set",
            "predictor.pod.nodeSelector.pool=models,volumes[0].name=m,volumes[0].persistentVolumeClaim.claimName=m",
        ),
        *("--set", "volumeMounts[0].name=m,volumeMounts[0].mountPath=/app/models/mine,gpu.enabled=true"),
    )
    images = {name: each["image"] for name, each in containers(documents).items()}
    assert images.pop("envoy") == COMPOSE["services"]["envoy"]["image"]
    assert images == {
        name: f"registry.example.com/headrace-{name}:2{'-cuda' if name == 'predictor' else ''}" for name in SERVICES
    }
    specs = {name: pod(each) for name, each in workloads(documents).items()}
    assert all(spec["imagePullSecrets"] == [{"name": "pull"}] for spec in specs.values())
    assert [name for name, spec in specs.items() if "nodeSelector" in spec] == ["predictor"]
    assert specs["predictor"]["tolerations"]
    for name in ("transformer", "predictor"):
        assert {"name": "m", "mountPath": "/app/models/mine"} in containers(documents)[name]["volumeMounts"]


def test_a_release_fits_into_the_secret_in_which_helm_keeps_it(tmp_path):
    subprocess.run([str(HELM), "package", str(CHART), "--destination", str(tmp_path)], check=True, capture_output=True)
    (chart,) = tmp_path.iterdir()
    manifest = gzip.compress(json.dumps(render("observability")).encode())
    assert (chart.stat().st_size + len(manifest)) * 4 / 3 < MAX_SECRET / 2


def test_every_document_is_valid(rendered):
    unique = {json.dumps(each, sort_keys=True): each for documents in rendered.values() for each in documents}
    validated = [each for each in unique.values() if each["kind"] not in CUSTOM]
    assert {each["kind"] for each in unique.values()} - {each["kind"] for each in validated} == CUSTOM
    for document in validated:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)


def test_the_gateway_has_every_file_of_its_folder_in_config_maps_that_kubectl_can_apply(base):
    folder = ROOT / "envoy"
    files = {path.name for path in folder.iterdir() if path.is_file()} - {"README.md"}
    pages = {path.name for path in (folder / "playground").iterdir()}
    for name, expected in (("envoy", files), ("playground", pages)):
        found = of_kind(base, "ConfigMap")[name]
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


def test_without_keys_the_gateway_starts_only_with_the_option_for_it(rendered):
    for name, documents in rendered.items():
        if name == "kserve":
            continue
        own = environment(documents, containers(documents)["envoy"])
        assert own["GATEWAY_BIND"] == "0.0.0.0"  # Which closes management.
        assert bool(own["GATEWAY_KEYS"]) != (own.get("GATEWAY_INSECURE") == "true")
        assert (own.get("GATEWAY_INSECURE") == "true") == (name == "without-keys")
        assert own["GATEWAY_KEYS"] == environment(documents, containers(documents)["transformer"])["TRANSFORMER_KEYS"]
        hosts = own["GATEWAY_HOSTS"].split(",")
        assert f"gateway.{NAMESPACE}.svc.cluster.local" in hosts
        for route in of_kind(documents, "HTTPRoute", "GRPCRoute").values():
            assert set(route["spec"]["hostnames"]) <= set(hosts)


def test_kserves_client_has_every_field_of_the_manifests(rendered):
    documents = rendered["kserve"]
    (service,) = of_kind(documents, "InferenceService").values()
    misspelt = json.loads(json.dumps(service))
    misspelt["spec"]["transformer"]["containers"][0]["readinessProbe"]["grcp"] = {}
    command = [python_of(".venv-kserve"), str(ROOT / "tests" / "kserve" / "objects.py")]
    objects = json.dumps([*documents, misspelt])  # Importing the client takes seconds: it is started once.
    done = subprocess.run(command, input=objects, capture_output=True, text=True)
    assert sorted(done.stdout.split()) == ["InferenceService", "Service", "ServingRuntime"]
    assert done.returncode != 0
    assert "V1Probe has no grcp" in done.stderr
