"""The configuration of every container by `docker inspect`, and the listening ports of this machine."""

import urllib.request

import psutil
import pytest

from tests.containers.stack import KERNELS, OWN_KERNELS, docker

SERVICES = ("envoy", "transformer", "predictor", "logger", "jaeger", "locust")
OURS = ("transformer", "predictor", "logger", "locust")
EVERYTHING = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, f"{sys.argv[1]}."):
    # Triton comes with torch for CUDA.
    if not module.name.endswith(("__main__", ".gpu.kernels", ".gpu.paged_attention")):
        importlib.import_module(module.name)
"""
USES = {
    "transformer": "from transformers import AutoTokenizer; AutoTokenizer.from_pretrained('models/storyteller')",
    "predictor": (
        "import numba, torch, headrace_predictor.engine.cpu.compiled; from transformers import AutoModelForCausalLM;"
        "AutoModelForCausalLM.from_pretrained('models/storyteller')(torch.tensor([[1, 2]]));"
        "assert numba.njit(parallel=True)(lambda x: x + 1)(torch.ones(3).numpy()).sum() == 6;"
        "assert numba.threading_layer() == 'omp'"  # torch's own threads.
    ),
    "logger": (
        "import io, psycopg, pyarrow as pa, pyarrow.parquet as pq; from pyarrow import fs;"
        "fs.S3FileSystem(anonymous=True, region='eu-west-1'); pq.write_table(pa.table({'a': [1]}), io.BytesIO())"
    ),
}


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_has_the_least_privileges(stack, service):
    facts = stack.container(service).facts
    host = facts["HostConfig"]
    assert facts["Config"]["User"] not in ("", "0", "root", "0:0")
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert not host["Privileged"]
    assert host["Memory"] > 0
    assert 0 < host["PidsLimit"] <= 1024
    assert list(host["Tmpfs"]) == ["/tmp"]
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert facts["Config"]["StopTimeout"] > 30
    assert facts["State"]["Health"]["Status"] == "healthy"


@pytest.mark.parametrize("service", ["transformer", "predictor", "logger"])
def test_the_health_check_uses_grpc(stack, service):
    config = stack.container(service).facts["Config"]
    assert config["Healthcheck"]["Test"][:4] == ["CMD", "python", "-m", "headrace.rpc.server.health_check"]
    # In exec form: no shell is between SIGTERM and the service.
    assert config["Entrypoint"] == ["python", "-m", f"headrace_{service}"]


@pytest.mark.parametrize("service", OURS)
def test_an_image_contains_no_compiler_no_cache_and_no_package_of_another_service(stack, service):
    container = stack.container(service)
    wanted = {"predictor": {"torch", "transformers"}, "transformer": {"transformers"}}.get(service, set())
    script = (
        "import importlib.util, os, shutil;"
        "print(*(m for m in ('torch', 'transformers', 'sqlalchemy', 'locust', 'pip') if importlib.util.find_spec(m)));"
        "print(*(c for c in ('gcc', 'cc', 'g++', 'make') if shutil.which(c)));"
        "print(*(p for p in ('/root/.cache', '/tmp/.cache', '/wheelhouse', '/run/secrets') if os.path.exists(p)))"
    )
    packages, compilers, caches = docker("exec", container.id, "python", "-c", script).splitlines()
    wanted |= {"logger": {"sqlalchemy"}, "locust": {"locust"}}.get(service, set())
    assert set(packages.split()) == wanted
    assert not compilers
    assert not caches


@pytest.mark.parametrize(
    ("service", "folder"),
    [
        ("logger", "/var/lib/headrace"),
        ("transformer", "/var/cache/headrace"),
        ("transformer", "/var/lib/routes"),
        ("predictor", "/var/cache/headrace"),
        ("predictor", "/var/lib/headrace"),
    ],
)
def test_a_service_can_write_only_to_its_volume(stack, service, folder):
    script = f"import os; print(*(os.access(path, os.W_OK) for path in ('{folder}', '/tmp', '/app', '/venv', '/etc')))"
    writable = docker("exec", stack.container(service).id, "python", "-c", script).split()
    assert writable == ["True", "True", "False", "False", "False"]


def test_the_predictor_keeps_the_kernels_that_it_compiles(stack):
    kept = docker("exec", stack.container("predictor").id, "find", KERNELS, "-name", f"{OWN_KERNELS}*.nbc")
    assert kept.splitlines()


def test_the_gateway_reads_the_transformers_list_of_models_and_cannot_write_it(stack):
    envoy = stack.container("envoy").id
    docker("exec", envoy, "cat", "/var/lib/routes/direct-models")  # It is empty: all bundled models take text.
    with pytest.raises(AssertionError, match="cannot touch"):
        docker("exec", envoy, "touch", "/var/lib/routes/direct-models")


def test_only_the_gateway_and_the_pages_are_published_and_on_loopback_only(stack):
    published = {}
    for service in SERVICES:
        for port, bindings in stack.container(service).facts["NetworkSettings"]["Ports"].items():
            for binding in bindings or ():
                assert binding["HostIp"] == "127.0.0.1", (service, port)
                published.setdefault(service, []).append(port)
    assert published == {"envoy": ["8080/tcp", "8081/tcp"], "jaeger": ["16686/tcp"], "locust": ["8089/tcp"]}
    pages = (stack.gateway, stack.management, stack.jaeger_page, stack.locust_page)
    ports = {page.rpartition(":")[2] for page in pages}
    listening = [c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening if str(address.port) in ports} == {"127.0.0.1"}


@pytest.mark.parametrize(("service", "port"), [("transformer", 9101), ("predictor", 9100), ("logger", 9102)])
def test_a_services_metrics_are_reachable_in_its_network(stack, service, port):
    for address in stack.container(service).addresses:
        with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=60) as page:
            assert "\nheadrace_event_loop_lag_seconds" in page.read().decode()


def networks_of(stack, service):
    names = stack.container(service).facts["NetworkSettings"]["Networks"]
    return {name.partition("_")[2] for name in names}


def test_logger_and_predictor_reach_neither_the_internet_nor_each_other(stack):
    assert networks_of(stack, "logger") == {"records"}
    assert networks_of(stack, "predictor") == {"models"}
    assert networks_of(stack, "transformer") == {"models", "records"}
    for network in ("records", "models"):
        assert docker("network", "inspect", "--format", "{{.Internal}}", f"headrace-test_{network}").strip() == "true"
    # There is no route, not even to this machine's default gateway.
    script = "print(sum(line.split()[1] == '00000000' for line in open('/proc/net/route')))"
    for service in ("logger", "predictor", "transformer"):
        assert docker("exec", stack.container(service).id, "python", "-c", script).strip() == "0"


@pytest.mark.parametrize("service", USES)
def test_no_module_of_a_service_needs_what_its_image_leaves_out(stack, service):
    container = stack.container(service).id
    docker("exec", container, "python", "-c", EVERYTHING, f"headrace_{service}")
    docker("exec", container, "python", "-W", "ignore", "-c", USES[service])


def test_the_images_are_small(stack):
    """Over their base image, which has 130 MB where it is the public one."""
    assert stack.sizes["transformer"] <= 240
    assert stack.sizes["predictor"] <= 1050
    assert stack.sizes["logger"] <= 200
