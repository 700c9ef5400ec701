"""The packages have layers of components, and no module imports from a higher layer or in a cycle.

A component is a folder or a module; a module belongs to the component with the longest matching name. It may import
from components of lower layers and from its own; components of one layer do not import each other.
"""

import pytest

from tests.support.import_graph import imports, loaded_with, modules

HEADRACE = (
    ("headrace.json_schemas",),
    ("headrace.descriptors", "headrace.errors", "headrace.service_links", "headrace.structured_outputs"),
    ("headrace.clients", "headrace.deadline", "headrace.grammars", "headrace.sampling", "headrace.step_errors"),
    ("headrace.models",),
    ("headrace.telemetry",),
    ("headrace.validation",),
    ("headrace.private_file", "headrace.settings", "headrace.watched_file"),
    ("headrace.rpc",),
    ("headrace.oip",),
    ("headrace.processor", "headrace.python_tensors"),
    ("headrace.payload.answer_redaction",),
    ("headrace.payload.redaction",),
    (
        "headrace.payload.drops",
        "headrace.payload.ids",
        "headrace.payload.parts",
        "headrace.payload.rules",
    ),
    ("headrace.payload.outbox",),
    ("headrace.payload",),
)
PREDICTOR = (
    ("services.predictor.counts", "services.predictor.settings"),
    ("services.predictor.engine.interface",),
    ("services.predictor.engine.faults", "services.predictor.engine.isolation", "services.predictor.engine.state"),
    (
        "services.predictor.engine.cpu",
        "services.predictor.engine.grammar",
        "services.predictor.engine.sampling",
        "services.predictor.engine.scheduler",
    ),
    ("services.predictor.engine.adapters",),
    ("services.predictor.engine.load", "services.predictor.engine.runners"),
    ("services.predictor.engine",),
    ("services.predictor.models", "services.predictor.telemetry"),
    ("services.predictor.generation", "services.predictor.tensor_models"),
    ("services.predictor.engine_process",),
    ("services.predictor.vllm_engine",),
    ("services.predictor.repository",),
    ("services.predictor.development", "services.predictor.servicer", "services.predictor.steps"),
    ("services.predictor.__main__",),
)
TRANSFORMER = (
    ("services.transformer.calls", "services.transformer.keys", "services.transformer.processes"),
    ("services.transformer.signing",),
    ("services.transformer.predictors",),
    ("services.transformer.text",),
    ("services.transformer.models",),
    ("services.transformer.routing", "services.transformer.settings"),
    ("services.transformer.supervisor", "services.transformer.generation"),
    ("services.transformer.inference",),
    ("services.transformer.frontends.http",),
    ("services.transformer.frontends.grpc", "services.transformer.frontends.openai"),
    (
        "services.transformer.frontends.anthropic",
        "services.transformer.frontends.responses",
        "services.transformer.frontends.v2_rest",
    ),
    ("services.transformer.batches",),
    ("services.transformer.__main__",),
    ("services.transformer.worker",),
)
LOGGER = (
    ("services.logger.settings", "services.logger.telemetry"),
    ("services.logger.store",),
    ("services.logger.command",),
    ("services.logger.backup", "services.logger.export"),
    ("services.logger.sinks",),
    ("services.logger.tails",),
    ("services.logger.shared_tails",),
    ("services.logger.gateway_calls", "services.logger.servicer"),
    ("services.logger.__main__",),
)
RUNNER = (("runner",), ("runner.replay", "runner.smoke"), ("runner.command",))
PACKAGES = {"headrace", "services", "runner"}
SERVICES = {"services.transformer": TRANSFORMER, "services.predictor": PREDICTOR, "services.logger": LOGGER}
LAYERS = {"headrace": HEADRACE, **SERVICES, "runner": RUNNER}

# Planning and reading requests: tested without the libraries that run models.
PURE = (
    "headrace.models.kinds",
    "services.predictor.engine.scheduler",
    "services.predictor.engine.state.blocks",
    "services.predictor.engine.state.sequence",
    "services.predictor.engine.load.queue_estimate",
    "services.predictor.engine.load.progress",
    "services.predictor.generation.requests",
    "services.predictor.servicer",
    "services.predictor.steps.servicer",
    "services.predictor.tensor_models.python_model",
    "services.transformer.frontends.openai.generation_requests",
    "services.transformer.generation.pipeline",
    "services.transformer.models.catalogue",
    "services.transformer.text.tokenizer",
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
    [
        ("headrace", set()),
        *((service, {"headrace"}) for service in SERVICES),
        ("runner", {"headrace"}),
    ],
)
def test_packages_import_only_allowed_packages(package, allowed):
    forbidden = {
        (module, found.name)
        for module in modules(package)
        for found in imports(module)
        if found.name.split(".")[0] in PACKAGES | {"tests", "bench", "loadtest"}
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
            if found.name in known and found.name != module and not found.for_types:
                visit(found.name)
        done.add(path.pop())

    for module in known:
        visit(module)


@pytest.mark.parametrize("module", PURE)
def test_pure_logic_loads_no_library_of_models(module):
    libraries = {"torch", "transformers", "safetensors", "numba"}
    assert not libraries & loaded_with(module)
