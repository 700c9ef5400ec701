"""Docker Compose accepts compose.yaml and its overlays, alone and together; Swarm what is made of them."""

import json
import re
import shutil
import subprocess
import sys
from itertools import combinations

import pytest

from tests.containers.stack import ROOT, ComposeStack, docker
from tests.support.full import FULL

OVERLAYS = tuple(
    f"deploy/compose/{name}.yaml" for name in ("gpu", "observability", "postgres", "tls", "vllm", "workers")
)
SWARM = "deploy/compose/swarm.yaml"
# Each alone, and all; with FULL=1 also each two.
COUNTS = (0, 1, 2, len(OVERLAYS)) if FULL else (0, 1, len(OVERLAYS))
SETS = [("compose.yaml", *some) for count in COUNTS for some in combinations(OVERLAYS, count)]


@pytest.fixture(scope="module")
def compose(engine, tmp_path_factory) -> ComposeStack:
    return ComposeStack(tmp_path_factory.mktemp("wheelhouse"))


def test_every_overlay_is_tested():
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("deploy/compose/*.yaml")} == {*OVERLAYS, SWARM}


@pytest.mark.parametrize("files", SETS, ids="+".join)
def test_compose_accepts_each_combination(compose, files):
    services = json.loads(compose.compose("config", "--format", "json", files=files))["services"]
    assert {"envoy", "transformer", "predictor", "logger", "jaeger", "locust"} <= services.keys()
    on_gpu = "deploy/compose/gpu.yaml" in files
    assert services["predictor"]["environment"]["PREDICTOR_DEVICE"] == ("cuda" if on_gpu else "auto")
    assert services["predictor"]["build"]["args"]["TORCH_INDEX"].endswith("cu130" if on_gpu else "cpu")
    devices = services["predictor"].get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    assert [device["capabilities"] for device in devices] == ([["gpu"]] if on_gpu else [])
    with_vllm = "deploy/compose/vllm.yaml" in files
    assert ("vllm" in services) == with_vllm
    at_vllm = "chat=http://vllm:8000/v1#chat;tokenizer=Qwen/Qwen3-0.6B"
    for name in ("transformer", "predictor"):
        assert (services[name]["environment"]["MODELS"] == at_vllm) == with_vllm
    assert set(services["predictor"]["networks"]) == {"models"}
    assert set(services["transformer"]["networks"]) == {"models", "records", *(["outer"] if with_vllm else [])}
    if with_vllm:
        assert services["vllm"]["command"] == ["--model", "Qwen/Qwen3-0.6B", "--served-model-name", "chat"]
        assert set(services["vllm"]["networks"]) == {"outer"}
        (device,) = services["vllm"]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert "ports" not in services["vllm"]
    with_metrics = "deploy/compose/observability.yaml" in files
    assert (
        services.keys() >= {"prometheus", "grafana"}
        if with_metrics
        else not {"prometheus", "grafana"} & services.keys()
    )
    with_postgres = "deploy/compose/postgres.yaml" in files
    assert ("postgres" in services) == with_postgres
    assert bool(services["logger"]["environment"]["LOGGER_DATABASE_URL"]) == with_postgres
    # The logger keeps the network of those that send to it.
    assert set(services["logger"]["networks"]) == {"records", *(["database"] if with_postgres else [])}
    published = {(port["host_ip"], port["target"]) for port in services["envoy"]["ports"]}
    with_tls = "deploy/compose/tls.yaml" in files
    assert published == {("127.0.0.1", port) for port in (8080, 8081, *([8443] if with_tls else []))}
    with_workers = "deploy/compose/workers.yaml" in files
    assert ("locust-worker" in services) == with_workers
    assert services["locust"]["command"][0] == ("--master" if with_workers else "--host")
    if with_workers:
        assert "ports" not in services["locust-worker"]


@pytest.mark.parametrize(("images", "policy"), [("", "build"), ("registry.example.com/team/headrace-", "missing")])
def test_published_images_are_pulled_and_others_built(compose, monkeypatch, images, policy):
    monkeypatch.setitem(compose.environment, "HEADRACE_IMAGES", images)
    monkeypatch.setitem(compose.environment, "IMAGE_TAG", "1.2.3")
    for files, tag in ((("compose.yaml",), "1.2.3"), (("compose.yaml", "deploy/compose/gpu.yaml"), "1.2.3-cuda")):
        services = json.loads(compose.compose("config", "--format", "json", files=files))["services"]
        ours = {name: services[name] for name in ("transformer", "predictor", "logger", "locust")}
        assert {name: each["image"] for name, each in ours.items()} == {
            "transformer": f"{images or 'headrace-'}transformer:1.2.3",
            "predictor": f"{images or 'headrace-'}predictor:{tag}",
            "logger": f"{images or 'headrace-'}logger:1.2.3",
            "locust": f"{images or 'headrace-'}loadtest:1.2.3",
        }
        assert {each["pull_policy"] for each in ours.values()} == {policy}
        assert all(("build" in each) == (policy == "build") for each in ours.values())


@pytest.mark.parametrize("files", [files for files in SETS if "deploy/compose/workers.yaml" not in files], ids="+".join)
def test_swarm_accepts_each_combination_without_the_load_test(compose, tmp_path, monkeypatch, files):
    monkeypatch.setitem(compose.environment, "GATEWAY_BIND", "0.0.0.0")
    project = compose.compose("config", "--format", "json", files=(*files, SWARM))
    script = [sys.executable, ROOT / "deploy" / "swarm" / "stack.py"]
    converted = subprocess.run(script, input=project, capture_output=True, text=True, check=True, timeout=60).stdout
    (tmp_path / "stack.json").write_text(converted)
    accepted = docker("stack", "config", "--compose-file", str(tmp_path / "stack.json"))
    assert "mem_limit" not in accepted
    services = json.loads(converted)["services"]
    expected = json.loads(project)["services"]
    assert services.keys() == expected.keys()
    for name, service in services.items():
        limits = {"memory": expected[name]["mem_limit"], "pids": expected[name]["pids_limit"]}
        assert service["deploy"]["resources"]["limits"] == limits
    # With TLS the port without it stays on loopback, which Swarm has not.
    published = {(name, port["target"]) for name, service in services.items() for port in service["ports"]}
    assert published == {("envoy", 8443 if "deploy/compose/tls.yaml" in files else 8080)}


def test_offline_changes_only_the_collector_and_the_source_of_packages(compose):
    plain, offline = (
        json.loads(compose.compose("config", "--format", "json", files=files))
        for files in (("compose.yaml",), ("compose.yaml", "tests/containers/offline.yaml"))
    )
    for service in plain["services"].keys() - {"jaeger"}:
        for of_builds in ("secrets", "additional_contexts"):
            offline["services"][service].get("build", {}).pop(of_builds, None)
        assert offline["services"][service] == plain["services"][service]
    kept = plain["services"]["jaeger"].keys() - {"image", "command", "entrypoint", "volumes"}
    assert {key: offline["services"]["jaeger"][key] for key in kept} == {
        key: plain["services"]["jaeger"][key] for key in kept
    }
    for part in ("networks", "volumes"):
        assert offline[part] == plain[part]


def test_the_second_gateway_of_the_readme_works(engine, tmp_path):
    (tmp_path / "services").mkdir()
    for file in ("compose.yaml", "services/images.yaml"):
        shutil.copy(ROOT / file, tmp_path / file)
    (override,) = re.findall(
        r"```yaml\n(# compose\.override\.yaml.*?)```", (ROOT / "envoy/README.md").read_text(), re.S
    )
    (tmp_path / "compose.override.yaml").write_text(override)
    command = ("docker", "compose", "config", "--format", "json")
    output = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60).stdout
    first, second = (json.loads(output)["services"][name] for name in ("envoy", "envoy-2"))
    assert {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)} == {"ports", "networks"}
    assert [port["published"] for port in second["ports"]] == ["8088"]
    assert second["networks"].keys() == first["networks"].keys()
    assert second["networks"]["models"]["aliases"] == ["envoy"]
