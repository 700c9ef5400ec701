"""deploy/swarm/stack.py converts compose's project to what Swarm reads; deploy/compose/swarm.yaml fits compose.yaml."""

import io
import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "deploy" / "swarm" / "stack.py")
CONVERT = runpy.run_path(SCRIPT)["stack_file"]
GATEWAY = {"host_ip": "0.0.0.0", "target": 8080, "published": "8080", "protocol": "tcp", "mode": "ingress"}
LOOPBACK = {**GATEWAY, "host_ip": "127.0.0.1", "target": 8081, "published": "8081"}


def converted(**service):
    """A service beside a gateway."""
    project = {"name": "headrace", "services": {"envoy": {"ports": [GATEWAY]}, "predictor": service}}
    return CONVERT(project)["services"]["predictor"]


def test_limits_and_replicas_become_those_of_deploy():
    service = converted(mem_limit="4294967296", pids_limit=256, scale=3, deploy={"endpoint_mode": "dnsrr"})
    limits = {"memory": "4294967296", "pids": 256}
    assert service["deploy"] == {"endpoint_mode": "dnsrr", "replicas": 3, "resources": {"limits": limits}}
    assert not service.keys() & {"mem_limit", "pids_limit", "scale"}


def test_folders_in_memory_become_mounts_because_swarm_ignores_them_otherwise():
    service = converted(tmpfs=["/tmp:size=64m,mode=1777", "/var/run"], shm_size="268435456")
    assert service["volumes"] == [
        {"type": "tmpfs", "target": "/tmp", "tmpfs": {"size": 64 << 20}},
        {"type": "tmpfs", "target": "/var/run", "tmpfs": {}},
        {"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": 256 << 20}},
    ]
    assert not service.keys() & {"tmpfs", "shm_size"}


def test_what_swarm_refuses_or_ignores_is_left_out_and_the_rest_is_kept():
    refused = {"build": {}, "depends_on": {}, "pull_policy": "build", "restart": "always", "security_opt": ["a"]}
    kept = {"image": "predictor:1", "cap_drop": ["ALL"], "read_only": True, "stop_grace_period": "45s"}
    mount = {"type": "bind", "source": "/a", "target": "/b", "bind": {"create_host_path": True}}
    service = converted(**refused, **kept, entrypoint=None, volumes=[mount], environment={"A": "", "B": None})
    assert service.pop("deploy") == {"resources": {"limits": {}}}
    assert service == {
        **kept,
        "environment": {"A": ""},
        "ports": [],
        "volumes": [{"type": "bind", "source": "/a", "target": "/b"}],
    }


def test_ports_are_published_by_the_node_itself_and_those_on_loopback_not_at_all():
    (port,) = converted(ports=[GATEWAY, LOOPBACK, {**LOOPBACK, "host_ip": "::1"}])["ports"]
    assert port == {"target": 8080, "published": 8080, "protocol": "tcp", "mode": "host"}


@pytest.mark.parametrize(
    ("ports", "reason"),
    [
        ([LOOPBACK], "set GATEWAY_BIND=0.0.0.0"),
        (
            [{**GATEWAY, "host_ip": "10.0.0.5"}],
            "envoy: Swarm publishes on every address of a node, not on 10.0.0.5 alone",
        ),
    ],
)
def test_ports_that_swarm_cannot_publish_are_refused(monkeypatch, capsys, ports, reason):
    project = json.dumps({"services": {"envoy": {"ports": ports}}})
    monkeypatch.setattr("sys.stdin", io.StringIO(project))
    with pytest.raises(SystemExit, match=reason):
        runpy.run_path(SCRIPT, run_name="__main__")
    assert capsys.readouterr().out == ""
