"""Kubernetes' manifests as kustomize renders them, and what their network policies allow."""

from __future__ import annotations

import os
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
DEPLOY = ROOT / "deploy" / "kubernetes"
COMPONENT = "app.kubernetes.io/component"
KUBECTL = shutil.which("kubectl")


@cache
def render(folder: Path) -> tuple[Document, ...]:
    """The documents of a kustomization."""
    command = (str(KUBECTL), "kustomize", str(folder))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def with_components(folder: Path, *components: str) -> tuple[Document, ...]:
    """The base with components, by a kustomization that is written to `folder`."""
    base = os.path.relpath(DEPLOY, folder.resolve())
    kustomization = {
        "resources": [f"{base}/base"],
        "components": [f"{base}/components/{component}" for component in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return render(folder)


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


def config_map(documents: tuple[Document, ...], name: str) -> Document:
    """The generated ConfigMap whose name begins so."""
    maps = of_kind(documents, "ConfigMap")
    (found,) = (maps[each] for each in maps if each.rpartition("-")[0] == name)
    return found


_OF_CLUSTER = {"LOGGER_DATABASE_URL": "postgresql://user@host/log", "TRANSFORMER_SIGNING_KEY": "7f" * 32}


def environment(documents: tuple[Document, ...], container: Document) -> dict[str, str]:
    """A container's variables; one with a value of the cluster has 1, or what it needs."""
    variables: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        variables |= of_kind(documents, "ConfigMap")[source["configMapRef"]["name"]]["data"]
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
