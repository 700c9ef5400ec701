"""What docs/kubernetes.md has the reader write and run: its kustomization, its alerts, its tables."""

import os
import re
import subprocess

import pytest
import yaml

from tests.support.kubernetes import (
    DEPLOY,
    KUBECTL,
    ROOT,
    config_map,
    connections,
    containers,
    of_kind,
    pod,
    render,
    workloads,
)

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl in PATH")

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def block(language, word):
    (found,) = (each for each in re.findall(rf"```{language}\n(.*?)```", PAGE, re.S) if word in each)
    return found


def rows(heading):
    """The cells of the first table below a heading."""
    section = PAGE.split(f"## {heading}\n")[1]
    return [line.strip("| ").split(" | ") for line in re.findall(r"^\|.*$", section.split("\n## ")[0], re.M)[2:]]


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


def test_the_tables_of_components_and_connections_are_complete():
    components = {path.name for path in (DEPLOY / "components").iterdir()}
    assert {row[0].strip("`") for row in rows("Components")} == components
    listed = set()
    for source, targets in rows("Network"):
        for target, ports in re.findall(r"(gateway|predictor|logger) ([\d, ]+)", targets):
            listed |= {(source, target, int(port)) for port in re.findall(r"\d+", ports)}
    assert listed - {("everywhere", "gateway", 8080)} == set(connections(render(DEPLOY / "base")))


def test_the_table_of_ends_has_the_drains():
    base = render(DEPLOY / "base")
    ends = dict(rows("Updates"))
    for name, container, variable in (
        ("gateway", "envoy", "DRAIN_S"),
        ("gateway", "transformer", "TRANSFORMER_DRAIN_S"),
        ("predictor", "predictor", "PREDICTOR_DRAIN_S"),
    ):
        (drain,) = (each["value"] for each in containers(base)[container]["env"] if each["name"] == variable)
        assert f"{drain} s" in ends[name]
    assert f"{containers(base)['envoy']['lifecycle']['preStop']['exec']['command'][1]} s" in ends["gateway"]
    assert f"waits {workloads(base)['gateway']['spec']['minReadySeconds']} s after each" in PAGE


def test_the_table_of_objects_has_the_replicas():
    base = render(DEPLOY / "base")
    for row in rows("What runs"):
        if row[0].startswith("StatefulSet"):
            name = row[0].split("`")[1]
            assert int(row[1]) == workloads(base)[name]["spec"]["replicas"]
            assert pod(workloads(base)[name])["containers"]
    services = {
        name for row in rows("What runs") if row[0].startswith("Service") for name in re.findall(r"`(\w+)`", row[0])
    }
    assert services == of_kind(base, "Service").keys()
