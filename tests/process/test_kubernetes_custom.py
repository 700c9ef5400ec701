"""Custom resources of deploy/kubernetes by the published definitions, which npm has as classes with types.

TypeScript refuses an unknown field, and each class validates its values. KServe's resources are read by KServe's own
client in test_kubernetes.py.
"""

import json
import subprocess

import pytest

from tests.support.kubernetes import KUBECTL, ROOT, with_components

MODULES = ROOT / ".tools" / "node_modules"
PACKAGES = {
    "gateway.networking.k8s.io": "gateway-api",
    "keda.sh": "keda",
    "monitoring.coreos.com": "prometheus-operator",
}
TSC = ("tsc", "--strict", "--module", "nodenext", "--target", "es2022", "--skipLibCheck")

pytestmark = [
    pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl in PATH"),
    pytest.mark.skipif(not (MODULES / "@kubernetes-models").exists(), reason="`make .tools/.installed` with npm"),
]


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


def test_custom_resources_are_those_of_their_definitions(resources, tmp_path):
    assert {each["kind"] for each in resources} == {"GRPCRoute", "HTTPRoute", "PodMonitor", "ScaledObject"}
    assert errors(tmp_path, resources) == ""
