"""Kubernetes' manifests as Helm and kustomize render them, and what their network policies allow."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "headrace"
NAMESPACE = "headrace"
HELM = shutil.which(ROOT / ".venv-tools" / "helm" / "bin" / "helm") or shutil.which("helm")
KUBECTL = shutil.which("kubectl")
# Each option of the chart, by a value that switches it on.
OPTIONS = {
    "gateway-api": "route.to=gateway",
    "gpu": "gpu.enabled=true",
    "hub": "hub.enabled=true",
    "inference-pool": "route.to=inference-pool",
    "keda": "autoscaling.by=keda",
    "observability": "observability.enabled=true",
    "postgres": "postgres.enabled=true",
    "scale": "autoscaling.by=metrics",
    "tls": "tls.enabled=true",
    "without-keys": "withoutKeys=true",
}


@cache
def render(*options: str, namespace: str = NAMESPACE) -> tuple[Document, ...]:
    """The chart's documents, with some options."""
    return helm(*(part for option in options for part in ("--set", OPTIONS[option])), namespace=namespace)


def helm(*arguments: str, namespace: str = NAMESPACE) -> tuple[Document, ...]:
    """The chart's documents, with arguments of `helm template`; AssertionError with what it refuses."""
    return _documents(str(HELM), "template", "headrace", str(CHART), "--namespace", namespace, *arguments)


def kustomize(folder: Path) -> tuple[Document, ...]:
    """The documents of a kustomization."""
    return _documents(str(KUBECTL), "kustomize", str(folder))


def _documents(*command: str) -> tuple[Document, ...]:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(each for each in yaml.safe_load_all(done.stdout) if each)


def without_variables(text: str) -> str:
    """Compose's ${NAME:-default} by its default."""
    return re.sub(r"\$\{[A-Z_]+:?-?([^}]*)\}", r"\1", text)


def of_kind(documents: tuple[Document, ...], *kinds: str) -> dict[str, Document]:
    """The documents of some kinds, by name."""
    return {document["metadata"]["name"]: document for document in documents if document["kind"] in kinds}


def workloads(documents: tuple[Document, ...]) -> dict[str, Document]:
    return of_kind(documents, "StatefulSet", "Deployment")


def pod(workload: Document) -> Document:
    """The specification of a workload's pods."""
    return dict(workload["spec"]["template"]["spec"])


def containers(documents: tuple[Document, ...]) -> dict[str, Document]:
    return {each["name"]: each for workload in workloads(documents).values() for each in pod(workload)["containers"]}


def labels(workload: Document) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


_OF_CLUSTER = {"LOGGER_DATABASE_URL": "postgresql://user@host/log", "TRANSFORMER_SIGNING_KEY": "7f" * 32}


def environment(documents: tuple[Document, ...], container: Document) -> dict[str, str]:
    """A container's variables; one with a value of the cluster has 1, or what it needs."""
    variables: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        if settings := source.get("configMapRef"):
            variables |= of_kind(documents, "ConfigMap")[settings["name"]]["data"]
    for each in container.get("env", ()):
        if key := each.get("valueFrom", {}).get("configMapKeyRef"):
            variables[each["name"]] = of_kind(documents, "ConfigMap")[key["name"]]["data"][key["key"]]
        else:
            variables[each["name"]] = each.get("value", _OF_CLUSTER.get(each["name"], "1"))
    return variables


def selects(selector: Document, chosen: dict[str, str]) -> bool:
    """Whether a label selector chooses a pod."""
    operators = {"In": lambda value, values: value in values, "NotIn": lambda value, values: value not in values}
    return all(chosen.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        operators[each["operator"]](chosen.get(each["key"]), each["values"])
        for each in selector.get("matchExpressions", ())
    )


def connections(documents: tuple[Document, ...]) -> Iterator[tuple[str, str, int]]:
    """Which pods may open connections to which, and to which of their ports: both ends' policies have to allow it."""
    policies = list(of_kind(documents, "NetworkPolicy").values())
    pods = {name: labels(workload) for name, workload in workloads(documents).items()}
    for source, source_labels in pods.items():
        for target, target_labels in pods.items():
            ports = {
                port["containerPort"]
                for each in pod(workloads(documents)[target])["containers"]
                for port in each["ports"]
            }
            for port in sorted(ports):
                leaves = _allows(policies, "Egress", source_labels, target_labels, port)
                if leaves and _allows(policies, "Ingress", target_labels, source_labels, port):
                    yield source, target, port


def _allows(policies: list[Document], way: str, own: dict[str, str], other: dict[str, str], port: int) -> bool:
    specs = [each["spec"] for each in policies if selects(each["spec"]["podSelector"], own)]
    specs = [spec for spec in specs if way in spec["policyTypes"]]
    rules = [rule for spec in specs for rule in spec.get(way.lower(), ())]
    peers = "to" if way == "Egress" else "from"
    return not specs or any(
        _has_peer(rule.get(peers, ()), other) and port in [each["port"] for each in rule.get("ports", [{"port": port}])]
        for rule in rules
    )


def _has_peer(peers: list[Document], other: dict[str, str]) -> bool:
    """Whether a rule's list, which means everyone if it is empty, has a pod of this namespace."""
    here = [peer for peer in peers if "namespaceSelector" not in peer and "ipBlock" not in peer]
    return not peers or any(selects(peer["podSelector"], other) for peer in here)
