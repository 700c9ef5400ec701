"""The models by the names that requests use: those of the catalogue, and the routes to them.

A route maps a name to one of its models: the one in the header `x-headrace-model`, otherwise one drawn by weight. If
that model cannot answer and no output has been sent, the first available fallback answers. The choice is stored in the
call (`CallContext.routed`), so a reload of the route file does not affect calls in flight.

Owned by the event loop.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from opentelemetry import metrics, trace

from headrace.errors import (
    HeadraceError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
)
from headrace.files import WatchedFile
from headrace.rpc.limits.admission import head_of_call
from headrace.rpc.server.call_context import IDEMPOTENCY_KEY, CallContext, ServedModel
from headrace.telemetry.identity import MODEL, as_metadata
from headrace_transformer.models.catalogue import Catalogue
from headrace_transformer.models.models import Model, ProcessedModel, TextModel
from headrace_transformer.predictors.discovery.replicas import READY, UNAVAILABLE, ModelState
from headrace_transformer.routing.routes import Route, Routes, Target, parse_routes

logger = logging.getLogger(__name__)

CHOSEN_MODEL = "x-headrace-model"  # In a request: the model to select from the route. In a response: which answered.
_SHOWN = 64  # Characters of a caller's text in an error.
# How long a request waits for an unavailable predictor if another model could answer.
_FALLBACK_WAIT_S = 1.0
# Predictor errors after which another model is tried. Not HopBrokenError: the request may have caused the crash.
_FAILED_THERE = (NotReadyError, NotFoundError, OverloadedError)


class Answering(NamedTuple):
    """The model that answers a request for `name`.

    Behind a route, `served` names it, `others` may answer if it cannot, and `wait_s` is how long a request waits for
    unavailable predictors before it begins, None for the default.
    """

    name: str
    model: Model
    served: str = ""
    others: Sequence[ServedModel] = ()
    wait_s: float | None = None


class Router:
    """`has_predictor(model)` returns whether a predictor could begin a generation now.

    Raises StartupError if the file is invalid.
    """

    def __init__(self, catalogue: Catalogue, file: Path | None, has_predictor: Callable[[str], bool]) -> None:
        self.catalogue = catalogue
        self._has_predictor = has_predictor
        self._file = None if file is None else WatchedFile(file, parse_routes)
        self._routes: Routes = {} if self._file is None else self._file.value
        meter = metrics.get_meter("headrace")
        self._routed = meter.create_counter("headrace.routed", "{call}", "Calls that a route sent to a model.")
        self._fallbacks = meter.create_counter(
            "headrace.fallbacks", "{request}", "Requests without output that fell back to another model."
        )

    async def follow(self) -> None:
        """Keeps the routes equal to their file, until cancelled."""
        if self._file is None:
            return
        loop = asyncio.get_running_loop()

        def changed(routes: Routes) -> None:
            loop.call_soon_threadsafe(self._take, routes)

        await self._file.watch(changed)

    def _take(self, routes: Routes) -> None:
        self._routes = routes
        self.catalogue.notify()

    # ------------------------------------------------------------------ the model of a call

    async def wait_for(self, name: str, version: str, call: CallContext) -> Answering:
        """As `resolve`, before an answer must have begun."""
        async with call.beginning.scope():
            return await self.resolve(name, version, call)

    async def resolve(
        self, name: str, version: str, call: CallContext, serves: Callable[[str], bool] | None = None
    ) -> Answering:
        """The model that answers a call, the same each time; waits and raises as `Catalogue.wait_for`.

        Of the models behind a route it is the first that `serves` accepts, without a fallback, if there is one. Keys
        are checked against the name in the request, not against the model that it is routed to.
        """
        call.client.check_model(name)
        routed, route = call.routed.get(name, ()), self._routes.get(name)
        if serves is not None and route is not None:
            routed = [served for served in route.targets if serves(served.model)][:1] or routed
        if routed:
            candidates = routed[:1]
        elif route is None:
            find = partial(self.catalogue.find, name, version)
            return Answering(name, await self.catalogue.found_in_time(find, call.deadline))
        else:
            candidates = _candidates(route, name, version, call)
        choose = partial(self._choose, name, candidates)
        served, model = await self.catalogue.found_in_time(choose, call.deadline)
        if not routed and name in call.routed:  # Another choice of the request was faster.
            return await self.resolve(name, version, call)
        if not routed:
            self._routed.add(1, {MODEL: model.name})
            routed = candidates[candidates.index(served) :]
        call.routed[name] = routed
        return self._answering(name, model, routed)

    def fall_back(self, failed: Answering, call: CallContext, error: HeadraceError) -> Answering:
        """The model that answers instead of one that failed before any output; raises `error` if there is none."""
        if isinstance(error, _FAILED_THERE) and error.hop is not None:
            for served, model in self._running(failed.others):
                if type(model) is type(failed.model):
                    self._fallbacks.add(1, {MODEL: model.name})
                    logger.warning("model %s: %s; %s answers instead", failed.model.name, error.message, model.name)
                    call.routed[failed.name] = failed.others[failed.others.index(served) :]
                    return self._answering(failed.name, model, call.routed[failed.name])
        raise error

    def answered(self, answering: Answering, fingerprint: str | None = None) -> None:
        """Records that a model has begun to answer, and the weights that did.

        The head of the answer, and the span, name the model that a route chose.
        """
        if answering.served:
            head_of_call().add((CHOSEN_MODEL, as_metadata(answering.served)))
            trace.get_current_span().set_attribute("gen_ai.response.model", answering.served)
        if fingerprint is not None:
            self.catalogue.answered_by(answering.model.name, fingerprint)

    def _answering(self, name: str, model: Model, routed: Sequence[ServedModel]) -> Answering:
        served, *others = routed
        return Answering(name, model, str(served), others, _FALLBACK_WAIT_S if self._running(others) else None)

    def _choose(self, name: str, candidates: Sequence[ServedModel]) -> tuple[ServedModel, Model]:
        """The first candidate that can start now, otherwise the first that is loaded.

        Raises NotReadyError if one is still loading, otherwise NotFoundError.
        """
        return (self._running(candidates) or self._known(name, candidates))[0]

    def _running(self, candidates: Sequence[ServedModel]) -> list[tuple[ServedModel, Model]]:
        """The candidates that could begin to answer now."""
        with suppress(NotFoundError, NotReadyError):
            return [
                (served, model)
                for served, model in self._known("", candidates)
                if not isinstance(model, TextModel) or self._has_predictor(model.name)
            ]
        return []

    def _known(self, name: str, candidates: Sequence[ServedModel]) -> list[tuple[ServedModel, Model]]:
        """The candidates that the predictors have loaded, at least one; raises as `_choose`."""
        known, not_ready = [], None
        for served in candidates:
            try:
                known.append((served, self.catalogue.find(*served)))
            except NotReadyError as error:
                not_ready = not_ready or error
            except NotFoundError:
                continue
        if not known:
            raise not_ready or NotFoundError(f"no model behind {name!r} is loaded")
        return known

    # ------------------------------------------------------------------ all models

    @property
    def states(self) -> dict[str, ModelState]:
        """Every name that callers can use, and the state of the model behind it."""
        states = self.catalogue.states
        return states | {name: _state_behind(route, states) for name, route in self._routes.items()}

    @property
    def names(self) -> list[str]:
        """The names of models that are loaded or loading."""
        return [name for name, state_of_model in self.states.items() if state_of_model.state != UNAVAILABLE]

    @property
    def direct_names(self) -> list[str]:
        """The models whose tensors the gateway may send straight to a predictor."""
        return [name for name in self.catalogue.direct_names if name not in self._routes]

    def find(self, name: str, version: str = "") -> Model:
        """The model, without a call; for a route, its first known model. Raises NotFoundError, NotReadyError."""
        route = self._routes.get(name)
        if route is None:
            return self.catalogue.find(name, version)
        by_weight = sorted(route.split, key=lambda target: -target.weight)
        return self._known(name, _of_version(name, version, _served(*by_weight, *route.fallback)))[0][1]

    def is_ready(self, name: str, version: str = "") -> bool:
        """Whether the model can be called now."""
        try:
            model = self.find(name, version)
        except HeadraceError:
            return False
        return self.catalogue.can_answer(model.processor.model if isinstance(model, ProcessedModel) else model.name)

    def may_reach(self, name: str, models: Container[str]) -> bool:
        """Whether the name may lead to one of the models."""
        route = self._routes.get(name)
        return name in models if route is None else any(target.model in models for target in route.targets)

    def lists(self, name: str) -> bool:
        """Whether the name is known; for other names each call asks the predictor."""
        return name in self._routes or self.catalogue.lists(name)


def _candidates(route: Route, name: str, version: str, call: CallContext) -> list[ServedModel]:
    """The models that may answer a call, in order: the one wanted, or one drawn by weight and those to fall back to."""
    if wanted := call.header(CHOSEN_MODEL):
        found = next((served for served in route.targets if wanted in (served.model, str(served))), None)
        if found is None:
            raise InvalidRequestError(f"{CHOSEN_MODEL}: {wanted[:_SHOWN]!r} is none of the models behind {name!r}")
        return _of_version(name, version, [found])
    drawn = [target for target in route.split if version in ("", target.version or version)]
    if weights := [target.weight for target in drawn if target.weight]:
        # A repeated request goes to the same model.
        key = call.header(IDEMPOTENCY_KEY)
        source = random.Random(f"{call.client.name}\0{key}") if key else random  # noqa: S311
        drawn = source.choices([target for target in drawn if target.weight], weights)
    return _of_version(name, version, _served(*drawn, *route.fallback))


def _served(*targets: Target) -> list[ServedModel]:
    return [target.served for target in targets]


def _of_version(name: str, version: str, models: Sequence[ServedModel]) -> list[ServedModel]:
    """The models, without repetition, that are of a version or take any; raises NotFoundError if there is none."""
    found = [ServedModel(served.model, served.version or version) for served in models]
    found = [served for served in dict.fromkeys(found) if version in ("", served.version)]
    if not found:
        raise NotFoundError(f"model {name!r} has no version {version!r}")
    return found


def _state_behind(route: Route, states: Mapping[str, ModelState]) -> ModelState:
    """That of the first of its models that is ready, else of the first."""
    found = [states.get(target.model, ModelState(UNAVAILABLE)) for target in (*route.split, *route.fallback)]
    return next((state_of_model for state_of_model in found if state_of_model.state == READY), found[0])
