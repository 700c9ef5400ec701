"""Each private part of a library stands behind one module of ours, and its requirement has an upper bound."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.import_graph import ROOT
from tests.support.requirements import PARTS, requirements

SHIPPED = ("headrace", "headrace_runner", "services", "loadtest")
MODULES = {
    "._data_to_send": "headrace/rpc/http2/protocol.py",
    ".outbound_flow_control_window": "headrace/rpc/http2/protocol.py",
    "_create_aggregation": "headrace/telemetry/gathered.py",
    "llguidance._lib": "headrace/grammars.py",
    "torch._dynamo": "services/predictor/headrace_predictor/engine_process/host.py",
    "torch.cpu._": "services/predictor/headrace_predictor/engine/cpu/tiles.py",
}


@pytest.mark.parametrize("part", MODULES)
def test_one_module_uses_the_part(part):
    files = (file for folder in SHIPPED for file in (ROOT / folder).rglob("*.py"))
    assert [str(file.relative_to(ROOT)) for file in files if part in file.read_text()] == [MODULES[part]]


@pytest.mark.parametrize("name", ["h2", "llguidance", "opentelemetry-sdk", "torch", "transformers"])
def test_the_requirement_has_an_upper_bound(name):
    required = [one for part in PARTS for one in requirements(part)]
    found = [each for each in map(Requirement, required) if each.name == name]
    assert found
    assert all("<" in {specifier.operator for specifier in each.specifier} for each in found)


def test_the_stubs_run_with_the_lowest_versions_that_are_required():
    least = {each.name: each.specifier for each in map(Requirement, requirements("command"))}
    for stubs in (ROOT / "headrace_protos").glob("*_pb2_grpc.py"):
        (version,) = re.findall(r"^GRPC_GENERATED_VERSION = '([\d.]+)'$", stubs.read_text(), re.MULTILINE)
        assert Version(version) <= lowest(least["grpcio"]), stubs.name
    for stubs in (ROOT / "headrace_protos").glob("*_pb2.py"):
        (version,) = re.findall(r"ValidateProtobufRuntimeVersion\(\s*\S+,\s*(\d+,\s*\d+,\s*\d+),", stubs.read_text())
        assert Version(re.sub(r",\s*", ".", version)) <= lowest(least["protobuf"]), stubs.name


def lowest(bounds):
    (version,) = (each.version for each in bounds if each.operator == ">=")
    return Version(version)
