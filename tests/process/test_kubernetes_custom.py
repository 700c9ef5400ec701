"""Custom resources of deploy/kubernetes by the published definitions, and what docs/kubernetes.md has the reader write.

npm has the definitions as classes with types: TypeScript refuses an unknown field, and each class validates its values.
KServe's resources are read by KServe's own client in test_kubernetes.py.
"""

import json
import os
import re
import subprocess

import pytest
import yaml

from tests.support.kubernetes import DEPLOY, KUBECTL, ROOT, config_map, containers, render, with_components

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()

MODULES = ROOT / ".tools" / "node_modules"
PACKAGES = {
    "gateway.networking.k8s.io": "gateway-api",
    "keda.sh": "keda",
    "monitoring.coreos.com": "prometheus-operator",
}
TSC = ("tsc", "--strict", "--module", "nodenext", "--target", "es2022", "--skipLibCheck")

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl in PATH")


@pytest.fixture(scope="module")
def resources(tmp_path_factory):
    documents = with_components(
        tmp_path_factory.mktemp("custom"), "gateway-api", "keda", "observability", "inference-pool"
    )
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
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        if done.returncode:
            return done.stdout + done.stderr
    return ""


@pytest.mark.skipif(not (MODULES / "@kubernetes-models").exists(), reason="`make .tools/.installed` with npm")
def test_custom_resources_are_those_of_their_definitions(resources, tmp_path):
    assert {each["kind"] for each in resources} == {"GRPCRoute", "HTTPRoute", "PodMonitor", "ScaledObject"}
    assert errors(tmp_path, resources) == ""


def block(language, word):
    (found,) = (each for each in re.findall(rf"```{language}\n(.*?)```", PAGE, re.S) if word in each)
    return found


def test_the_kustomization_of_the_page_takes_images_of_the_registry_and_settings(tmp_path):
    text = block("yaml", "kind: Kustomization")
    assert "../deploy/kubernetes/base" in text
    # From another folder; kustomize takes relative paths alone.
    (tmp_path / "kustomization.yaml").write_text(
        text.replace("../deploy/kubernetes", os.path.relpath(DEPLOY, tmp_path.resolve()))
    )
    documents = render(tmp_path)
    images = {each["image"] for each in containers(documents).values()}
    ours = {f"registry.example.com/headrace-{name}:1" for name in ("transformer", "predictor", "logger")}
    assert images - ours == {"envoyproxy/envoy:v1.40.0"}
    settings = config_map(documents, "settings")["data"]
    assert settings["TRANSFORMER_PAYLOAD_LOG"] == "metadata"
    assert settings.items() >= config_map(render(DEPLOY / "base"), "settings")["data"].items()


def test_the_rule_of_the_page_has_the_alerts(tmp_path):
    command = block("sh", "PrometheusRule")
    assert command.rstrip().endswith("kubectl -n headrace apply -f -")
    command = command.replace("kubectl -n headrace apply -f -", "cat")
    output = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    rule = yaml.safe_load(output.stdout)
    assert rule["kind"] == "PrometheusRule"
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "observability" / "alerts.yaml").read_text())
