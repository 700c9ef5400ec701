"""The packages have layers of components, and no module imports from a higher layer or in a cycle.

A component is a folder or a module; a module belongs to the component with the longest matching name. It may import
from components of lower layers and from its own; components of one layer do not import each other.
"""

import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.utils import canonicalize_name

from tests.support.import_graph import ROOT, imports, loaded_with, modules
from tests.support.requirements import PARTS, closure, requirements

HEADRACE = (
    ("headrace.endpoints", "headrace.json_schemas", "headrace.plugins"),
    ("headrace.errors", "headrace.processes", "headrace.structured_outputs"),
    (
        "headrace.clients",
        "headrace.deadline",
        "headrace.frames",
        "headrace.grammars",
        "headrace.sampling",
        "headrace.threads",
    ),
    ("headrace.validation",),
    ("headrace.models",),
    ("headrace.telemetry",),
    ("headrace.files", "headrace.settings"),
    ("headrace.rpc",),
    ("headrace.rpc.limits",),
    ("headrace.rpc.client", "headrace.rpc.server"),
    ("headrace.rpc.http2",),
    ("headrace.oip",),
    ("headrace.processor", "headrace.python_tensors"),
    ("headrace.payload.redaction",),
    (
        "headrace.payload.drops",
        "headrace.payload.frames",
        "headrace.payload.records",
        "headrace.payload.parts",
        "headrace.payload.rules",
    ),
    ("headrace.payload.outbox",),
    ("headrace.payload",),
)
PREDICTOR = (
    ("headrace_predictor.settings",),
    ("headrace_predictor.engine.interface",),
    ("headrace_predictor.engine.faults", "headrace_predictor.engine.state"),
    (
        "headrace_predictor.engine.cpu",
        "headrace_predictor.engine.gpu",
        "headrace_predictor.engine.grammar",
        "headrace_predictor.engine.scheduler",
    ),
    ("headrace_predictor.engine.adapters", "headrace_predictor.engine.sampling"),
    ("headrace_predictor.engine.load", "headrace_predictor.engine.runners"),
    ("headrace_predictor.engine",),
    ("headrace_predictor.models", "headrace_predictor.telemetry"),
    ("headrace_predictor.generation", "headrace_predictor.tensor_models"),
    ("headrace_predictor.engine_process",),
    ("headrace_predictor.repository",),
    ("headrace_predictor.servicer", "headrace_predictor.steps"),
    ("headrace_predictor.__main__",),
)
TRANSFORMER = (
    ("headrace_transformer.calls", "headrace_transformer.keys", "headrace_transformer.processes"),
    ("headrace_transformer.text.token_bytes",),
    ("headrace_transformer.predictors",),
    ("headrace_transformer.text",),
    ("headrace_transformer.models",),
    ("headrace_transformer.routing", "headrace_transformer.settings"),
    ("headrace_transformer.supervisor", "headrace_transformer.generation"),
    ("headrace_transformer.inference",),
    ("headrace_transformer.frontends.http",),
    ("headrace_transformer.frontends.passing",),
    ("headrace_transformer.frontends.grpc", "headrace_transformer.frontends.openai"),
    (
        "headrace_transformer.frontends.anthropic",
        "headrace_transformer.frontends.responses",
        "headrace_transformer.frontends.v2_rest",
    ),
    ("headrace_transformer.batches",),
    ("headrace_transformer.transformer",),
    ("headrace_transformer.__main__",),
)
LOGGER = (
    ("headrace_logger.settings", "headrace_logger.telemetry", "headrace_logger.read_limits", "headrace_logger.values"),
    ("headrace_logger.store",),
    ("headrace_logger.command", "headrace_logger.retention"),
    ("headrace_logger.backup", "headrace_logger.export"),
    ("headrace_logger.sinks",),
    ("headrace_logger.tails",),
    ("headrace_logger.gateway_calls", "headrace_logger.servicer"),
    ("headrace_logger.__main__",),
)
RUNNER = (("headrace_runner",), ("headrace_runner.replay", "headrace_runner.smoke"), ("headrace_runner.command",))
SERVICES = {"headrace_transformer": TRANSFORMER, "headrace_predictor": PREDICTOR, "headrace_logger": LOGGER}
LAYERS = {"headrace": HEADRACE, **SERVICES, "headrace_runner": RUNNER}

# Planning and reading requests: tested without the libraries that run models.
PURE = (
    "headrace.models.kinds",
    "headrace_predictor.engine.scheduler",
    "headrace_predictor.engine.state.blocks",
    "headrace_predictor.engine.state.sequence",
    "headrace_predictor.engine.load",
    "headrace_predictor.generation.requests",
    "headrace_predictor.servicer",
    "headrace_predictor.steps.server",
    "headrace_predictor.tensor_models.python_model",
    "headrace_transformer.frontends.openai.generation_requests",
    "headrace_transformer.generation.pipeline",
    "headrace_transformer.models.catalogue",
    "headrace_transformer.text.tokenizer",
)


def component_of(module, layers):
    """The index of the module's layer, and its component; None for a module without one."""
    fits = [
        (len(component), layer, component)
        for layer, components in enumerate(layers)
        for component in components
        if f"{module}.".startswith(f"{component}.")
    ]
    return max(fits)[1:] if fits else None


def forbidden_imports(package, layers):
    """(module, imported module) for each import of a higher layer or of another component of the same layer, and for
    each module without a component that imports or is imported; only empty `__init__` files need none."""
    for module in modules(package):
        own = component_of(module, layers)
        for found in imports(module):
            if not found.name.startswith(f"{package}."):
                continue
            other = component_of(found.name, layers)
            if own is None or other is None or other[0] > own[0] or (other[0] == own[0] and other[1] != own[1]):
                yield module, found.name


@pytest.mark.parametrize("package", LAYERS)
def test_no_module_imports_from_a_higher_layer(package):
    assert list(forbidden_imports(package, LAYERS[package])) == []


@pytest.mark.parametrize(
    ("package", "allowed"),
    [("headrace", set()), *((service, {"headrace"}) for service in SERVICES), ("headrace_runner", {"headrace"})],
)
def test_packages_import_only_allowed_packages(package, allowed):
    forbidden = {
        (module, found.name)
        for module in modules(package)
        for found in imports(module)
        if found.name.split(".")[0] in {*LAYERS, "tests", "bench", "loadtest"}
        and not f"{found.name}.".startswith(f"{package}.")
        and found.name.split(".")[0] not in allowed
    }
    assert forbidden == set()


@pytest.mark.parametrize("package", LAYERS)
def test_no_import_cycles(package):
    known = modules(package)
    done, path = set(), []

    def visit(module):
        assert module not in path, f"a circle: {' → '.join([*path[path.index(module) :], module])}"
        if module in done:
            return
        path.append(module)
        for found in imports(module):
            if found.name in known and found.name != module:
                visit(found.name)
        done.add(path.pop())

    for module in known:
        visit(module)


@pytest.mark.parametrize("package", [*SERVICES, "headrace_runner"])
def test_our_programs_alone_start_without_pydantics_plugins(package):
    assert "headrace.plugins" in {found.name for found in imports(package)}
    for module in ("headrace.errors", "headrace.processor", "headrace.python_tensors"):
        assert "headrace.plugins" not in loaded_with(module)


@pytest.mark.parametrize("module", PURE)
def test_pure_logic_loads_no_library_of_models(module):
    libraries = {"torch", "transformers", "safetensors", "numba"}
    assert not libraries & loaded_with(module)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_requires_what_it_loads(part):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = closure([*requirements("command"), *requirements(part), *(extras["postgres"] if part == "logger" else [])])
    entries = modules(f"headrace_{part}") if part != "command" else ["headrace_runner.command.__main__"]
    loaded = {name.split(".")[0] for entry in entries for name in loaded_with(entry)} - sys.stdlib_module_names
    distributions = packages_distributions()
    missing = {
        name
        for name in loaded - {*LAYERS, "headrace_protos", "triton"}  # torch for CUDA brings Triton.
        if not names & {canonicalize_name(found) for found in distributions.get(name, [name])}
    }
    assert missing == set()
    assert loaded
