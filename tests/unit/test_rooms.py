"""Rooms lie on floors, and imports lead down: no circle of folders, no arrow up.

A room is a folder or a module. Of the rooms that fit a module the longest name is its own. A room may import from the
rooms of lower floors, and from itself; rooms of one floor do not know of each other.
"""

import pytest

from tests.support.import_graph import imports, loaded_with, modules

MILLRACE = (
    ("millrace.errors", "millrace.service_links"),
    ("millrace.clients", "millrace.deadline", "millrace.sampling", "millrace.step_errors"),
    ("millrace.models",),
    ("millrace.telemetry",),
    ("millrace.settings", "millrace.watched_file"),
    ("millrace.rpc",),
    ("millrace.oip",),
    ("millrace.processor", "millrace.python_tensors"),
    ("millrace.payload.answer_redaction",),
    ("millrace.payload.redaction",),
    (
        "millrace.payload.drops",
        "millrace.payload.ids",
        "millrace.payload.parts",
        "millrace.payload.rules",
    ),
    ("millrace.payload.outbox",),
    ("millrace.payload",),
)
PREDICTOR = (
    ("services.predictor.counts", "services.predictor.settings"),
    ("services.predictor.engine.interface",),
    ("services.predictor.engine.faults", "services.predictor.engine.isolation", "services.predictor.engine.state"),
    (
        "services.predictor.engine.cpu",
        "services.predictor.engine.sampling",
        "services.predictor.engine.scheduler",
    ),
    ("services.predictor.engine.load", "services.predictor.engine.runners"),
    ("services.predictor.engine",),
    ("services.predictor.models", "services.predictor.telemetry"),
    ("services.predictor.generation", "services.predictor.tensor_models"),
    ("services.predictor.engine_process",),
    ("services.predictor.repository",),
    ("services.predictor.development", "services.predictor.servicer", "services.predictor.steps"),
    ("services.predictor.__main__",),
)
TRANSFORMER = (
    ("services.transformer.calls", "services.transformer.keys", "services.transformer.processes"),
    ("services.transformer.predictors",),
    ("services.transformer.text",),
    ("services.transformer.models",),
    ("services.transformer.routing", "services.transformer.settings"),
    ("services.transformer.supervisor", "services.transformer.generation"),
    ("services.transformer.inference",),
    ("services.transformer.frontends.http",),
    ("services.transformer.frontends.grpc", "services.transformer.frontends.openai"),
    ("services.transformer.frontends.v2_rest",),
    ("services.transformer.__main__",),
    ("services.transformer.worker",),
)
LOGGER = (
    ("services.logger.settings", "services.logger.telemetry"),
    ("services.logger.store",),
    ("services.logger.export", "services.logger.sinks"),
    ("services.logger.tails",),
    ("services.logger.gateway_calls", "services.logger.servicer"),
    ("services.logger.__main__",),
)
RUNNER = (("runner",), ("runner.smoke",), ("runner.command",))
PACKAGES = {"millrace", "services", "runner"}
SERVICES = {"services.transformer": TRANSFORMER, "services.predictor": PREDICTOR, "services.logger": LOGGER}
FLOORS = {"millrace": MILLRACE, **SERVICES, "runner": RUNNER}

# Planning and reading requests: tested without the libraries that run models.
PURE = (
    "millrace.models.kinds",
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


def room_of(module, floors):
    """The module's floor and room; None for a module without one."""
    fits = [
        (len(room), floor, room)
        for floor, rooms in enumerate(floors)
        for room in rooms
        if f"{module}.".startswith(f"{room}.")
    ]
    return max(fits)[1:] if fits else None


def arrows_up(package, floors):
    """(module, what it imports) where that lies higher, or beside it. A folder's own file may be empty, and then has
    no floor; whatever else has none is an arrow to nowhere."""
    for module in modules(package):
        own = room_of(module, floors)
        for found in imports(module):
            if not found.name.startswith(f"{package}."):
                continue
            other = room_of(found.name, floors)
            if own is None or other is None or other[0] > own[0] or (other[0] == own[0] and other[1] != own[1]):
                yield module, found.name


@pytest.mark.parametrize("package", FLOORS)
def test_imports_lead_down(package):
    assert list(arrows_up(package, FLOORS[package])) == []


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("millrace", set()),
        *((service, {"millrace"}) for service in SERVICES),
        ("runner", {"millrace"}),
    ],
)
def test_packages_keep_apart(package, allowed):
    strangers = {
        (module, found.name)
        for module in modules(package)
        for found in imports(module)
        if found.name.split(".")[0] in PACKAGES | {"tests", "bench", "loadtest"}
        and not f"{found.name}.".startswith(f"{package}.")
        and found.name.split(".")[0] not in allowed
    }
    assert strangers == set()


@pytest.mark.parametrize("package", FLOORS)
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
