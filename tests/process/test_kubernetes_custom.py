"""Custom resources of the chart by the published definitions, and what docs/kubernetes.md has the reader write.

npm has the definitions as classes with types: TypeScript refuses an unknown field, and each class validates its values.
KServe's resources are read by KServe's own client in test_kubernetes.py.
"""

import json
import re
import subprocess

import pytest
import yaml

from tests.support.kubernetes import HELM, ROOT, containers, helm, of_kind, render

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()

MODULES = ROOT / ".tools" / "node_modules"
PACKAGES = {
    "gateway.networking.k8s.io": "gateway-api",
    "keda.sh": "keda",
    "monitoring.coreos.com": "prometheus-operator",
}
TSC = ("tsc", "--strict", "--module", "nodenext", "--target", "es2022", "--skipLibCheck")

pytestmark = pytest.mark.skipif(HELM is None, reason="needs helm: `make .venv-tools/helm/.installed`")


@pytest.fixture(scope="module")
def resources():
    documents = (*render("gateway-api", "keda", "observability"), *render("inference-pool"))
    return [each for each in documents if each["apiVersion"].partition("/")[0] in PACKAGES]


def errors(folder, resources):
    """What the compiler, or else the classes' own validation, says of some resources; empty if nothing."""
    lines = []
    for number, resource in enumerate(resources):
        fields = {name: value for name, value in resource.items() if name not in ("apiVersion", "kind")}
        package = PACKAGES[resource["apiVersion"].partition("/")[0]]
        module = f"@kubernetes-models/{package}/{resource['apiVersion']}"
        lines.append(f'import {{ {resource["kind"]} as Model{number} }} from "{module}";')
        lines.append(f"new Model{number}({json.dumps(fields)}).validate();")
    (folder / "node_modules").symlink_to(MODULES)
    (folder / "resources.mts").write_text("\n".join(lines))
    compiler = MODULES / ".bin" / TSC[0]
    for command in ((compiler, *TSC[1:], "resources.mts"), ("node", "resources.mjs")):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            return done.stdout + done.stderr
    return ""


@pytest.mark.skipif(not (MODULES / "@kubernetes-models").exists(), reason="`make .tools/.installed` with npm")
def test_custom_resources_are_those_of_their_definitions(resources, tmp_path):
    kinds = {"GRPCRoute", "HTTPRoute", "PodMonitor", "PrometheusRule", "ScaledObject"}
    assert {each["kind"] for each in resources} == kinds
    assert errors(tmp_path, resources) == ""


def block(language, word):
    (found,) = (each for each in re.findall(rf"```{language}\n(.*?)```", PAGE, re.S) if word in each)
    return found


def test_the_values_of_the_page_are_accepted(tmp_path):
    (tmp_path / "values.yaml").write_text(block("yaml", "prefix:"))
    documents = helm("--values", str(tmp_path / "values.yaml"))
    images = {each["image"] for each in containers(documents).values()}
    ours = {f"ghcr.io/example/headrace-{name}:0.1.0" for name in ("transformer", "predictor", "logger")}
    assert images - ours == {"envoyproxy/envoy:v1.40.0"}
    settings = of_kind(documents, "ConfigMap")["settings"]["data"]
    assert settings["TRANSFORMER_PAYLOAD_LOG"] == "metadata"
    assert settings.items() >= of_kind(render(), "ConfigMap")["settings"]["data"].items()


def test_the_alerts_are_those_of_the_folder():
    (rule,) = of_kind(render("observability"), "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "observability" / "alerts.yaml").read_text())
