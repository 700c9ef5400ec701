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
    containers,
    render,
)

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl in PATH")

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


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
