"""The models that the predictors serve, and what the transformer needs for each.

The catalogue follows the predictor's RepositoryIndex: a model that is loaded there appears here with the tokenizer of
its folder or hub id, and one that is unloaded disappears. A model that makes `output_ids` of `input_ids` and has a
readable tokenizer takes text; any other is relayed. For a server without an index the catalogue has the models of
`MODELS`, and relays requests for other names. Requests wait for a model that the predictor will have soon.

`ready`, which health reports by that name, states whether a generation would work now; ServerReady, ModelReady and REST
derive their answers from it. It is false while no predictor is ready, and finally once the process drains.

Owned by the event loop; files are read on separate threads.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, InvalidRequestError, NotFoundError, NotReadyError, StartupError
from headrace.models.sources import ModelSource, parse_location
from headrace.telemetry.rpc import suppress_tracing
from headrace.threads import run_in_daemon_thread
from headrace_transformer.models.models import (
    Model,
    PassedModel,
    ProcessedModel,
    RelayedModel,
    TextModel,
    engine_model,
    model_of,
)
from headrace_transformer.models.processors import RunningProcessor
from headrace_transformer.predictors.discovery.descriptions import PredictorModel
from headrace_transformer.predictors.discovery.replicas import LOADING, READY, UNAVAILABLE, ModelState, Replicas
from headrace_transformer.predictors.engines.pools import Engines
from headrace_transformer.predictors.oip.client import PredictorClient
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.text.model_text import AdapterBase, BaseNeededError, ModelText, read_text

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PROBE_INTERVAL_S = 1.0
_STARTING_INTERVAL_S = 0.1


class Catalogue:
    def __init__(
        self,
        sources: Sequence[ModelSource],
        predictor: PredictorClient,
        replicas: Replicas,
        pool: ThreadPoolExecutor,
        bodies: BodyProcesses,
        processors: Mapping[str, RunningProcessor] | None = None,
        engines: Engines | None = None,
    ) -> None:
        self._pools = {} if engines is None else engines.pools
        self._natures: dict[str, object] = {}  # What the engines of described models were.
        self._is_predictor_ready = False
        self._sources = {source.name: source for source in sources}
        self._predictor = predictor
        self._replicas = replicas
        self._pool = pool
        self._bodies = bodies
        self._processors = processors or {}
        self._texts: dict[str, ModelText] = {}
        self._unreadable: dict[str, str] = {}  # Why a served model takes no text, if its files are the cause.
        self._states: Mapping[str, ModelState] = {name: ModelState(LOADING) for name in self._sources}
        self._is_known = False  # Becomes true when the predictor has listed its models.
        self._is_complete = True  # False: the predictor has no index, and may serve other models too.
        self._models: dict[str, TextModel | RelayedModel | PassedModel] = {}
        self._described: set[str] = set()  # The models in `_models` whose description is current.
        self._describing: dict[str, asyncio.Task[None]] = {}
        self._troubles: dict[str, str] = {}  # The last logged error of a model that cannot be added.
        self._looking = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None  # There while `watch` runs, and so is `_report_ready`.
        self._report_ready: Callable[[bool], Awaitable[None]]
        self._first_ready = asyncio.Event()
        self.changed = asyncio.Event()  # Set, and replaced, whenever the result of `find` may change.
        self._draining = False
        self.ready = False

    @property
    def states(self) -> dict[str, ModelState]:
        """Every model that callers can name, and the state it is in."""
        processed = {name: self._state(running.model) for name, running in self._processors.items()}
        return {**self._states, **processed}

    @property
    def direct_names(self) -> list[str]:
        """The models whose tensors the gateway may send straight to a predictor."""
        relayed = {name: model for name, model in self._models.items() if isinstance(model, RelayedModel)}
        return [name for name, model in relayed.items() if model.is_direct and name not in self._processors]

    def load_all(self) -> None:
        """Reads the text side of every model that is configured, one by one; blocks; raises StartupError."""
        for source in self._sources.values():
            with suppress(BaseNeededError):  # The predictor's description of an adapter names its base.
                self._texts[source.name] = read_text(source, self._pool)

    def as_text(self, model: Model) -> TextModel:
        """The model, if it takes text; raises InvalidRequestError."""
        if not isinstance(model, TextModel):
            if isinstance(model, PassedModel):
                raise InvalidRequestError(
                    f"model {model.name!r} passes requests of OpenAI's API only: its tokenizer is not here"
                )
            reason = self._unreadable.get(model.name, "call it by ModelInfer")
            raise InvalidRequestError(f"model {model.name!r} takes tensors, not text; {reason}")
        return model

    def lists(self, name: str) -> bool:
        """Whether the predictor has listed the model; for other names each call asks the predictor."""
        return name in self.states

    def find(self, name: str, version: str = "") -> Model:
        """The model, of any kind; raises NotFoundError, or NotReadyError if it will be available."""
        if not name:
            raise NotFoundError("the request names no model")
        processor = self._processors.get(name)
        model: Model = self._called(name if processor is None else processor.model)
        if processor is not None:
            model = ProcessedModel(name, processor)
        if version and model.versions and version not in model.versions:
            raise NotFoundError(f"model {name!r} has no version {version!r}, only {', '.join(model.versions)}")
        return model

    async def found_in_time(self, find: Callable[[], T], deadline: Deadline) -> T:
        """The result of `find`, which is retried at each change while it raises NotReadyError, within the deadline."""
        with suppress(NotReadyError):
            return find()
        backoff = self._predictor.backoff(deadline)
        while True:
            try:
                return find()
            except NotReadyError as error:
                await backoff.wait_for(self.changed, error)

    def _called(self, name: str) -> TextModel | RelayedModel | PassedModel:
        state_of_model = self._state(name)
        if state_of_model.state == UNAVAILABLE:
            if not self._is_known:
                raise NotReadyError("no predictor has listed its models yet", hop="predictor")
            if not self._is_complete and name not in self._states:
                return RelayedModel(name)
            reason = state_of_model.reason
            raise NotFoundError(f"model {name!r} is not loaded: {reason}" if reason else f"no model {name!r}")
        if name not in self._models:
            state = "about to be ready" if state_of_model.state == READY else state_of_model.state.lower()
            raise NotReadyError(f"model {name!r} is {state}", hop="predictor")
        return self._models[name]

    def _state(self, name: str) -> ModelState:
        return self._states.get(name, ModelState(UNAVAILABLE))

    async def watch(self, report_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Follows the predictor until cancelled; keeps `ready` up to date, and reports each change of it."""
        suppress_tracing()
        self._report_ready = report_ready
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                await self._look()
                await asyncio.sleep(_PROBE_INTERVAL_S if self.ready else _STARTING_INTERVAL_S)

    async def drain(self, grace_s: float) -> None:
        """Sets `ready` to false for good: the process stops after `grace_s`."""
        self._draining = True
        self.ready = False

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once a generation has been possible, or when the time is up."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._first_ready.wait(), timeout_s)

    def answered_by(self, name: str, fingerprint: str) -> None:
        """Records the weights that answered a call; a model with new weights is described again."""
        known = self._models.get(name)
        if known is not None and known.fingerprint != fingerprint:
            self._described.discard(name)

    def why_unreadable(self, name: str) -> str | None:
        """Why a served model takes no text, if its files are the cause."""
        return self._unreadable.get(name)

    async def refresh(self, reloaded: str = "") -> None:
        """Updates the catalogue now and returns when it is complete; the model `reloaded` is described again."""
        if self._tasks is None:
            raise NotReadyError("starting")
        self._texts.pop(reloaded, None)
        self._described.discard(reloaded)
        await self._look()
        if describing := tuple(self._describing.values()):
            await asyncio.wait(describing)
            await self._look()

    async def _look(self) -> None:
        async with self._looking:
            # One look may have asked only a replica that hangs; the next asks those that have answered since.
            ready = (await self._follow() or (self.ready and await self._follow())) and not self._draining
            self.notify()
            if ready != self.ready:
                self.ready = ready
                await self._report_ready(ready)
            if ready:
                self._first_ready.set()

    @property
    def has_predictors(self) -> bool:
        """Whether predictors answer; where there are no engines, they are taken to."""
        return self._is_predictor_ready or not self._pools

    def can_answer(self, name: str) -> bool:
        """Whether who serves the model answers now: its engines, or a predictor."""
        pool = self._pools.get(name)
        return self.ready and (self.has_predictors if pool is None else bool(pool.ready))

    def notify(self) -> None:
        """Wakes waiting requests: a name may now lead to another model."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def _follow(self) -> bool:
        """Updates the models from the predictor; returns whether they can be called."""
        try:
            # In this order: what was ready before it was listed is listed as ready.
            is_ready = self._is_predictor_ready = await self._replicas.ready()
            states = await self._index()
            self._is_known = True
        except HeadraceError:
            # It may return with other models; until then calls get its errors.
            self._described.intersection_update(self._pools)
            if not self._pools:
                return False
            states = {name: state for name, state in self._states.items() if name not in self._pools}
            self._is_known = self._is_known or not self._sources
            is_ready = self._is_predictor_ready = False
        engines = {name: pool.state for name, pool in self._pools.items()}
        self._states = {**states, **engines}
        for name, pool in self._pools.items():
            if pool.ready and self._natures.setdefault(name, pool.nature) != pool.nature:
                self._natures[name] = pool.nature
                self._described.discard(name)
        is_ready = is_ready or any(state.state == READY for state in engines.values())
        for name in (*self._models, *self._describing):
            if self._state(name).state != READY:
                self._forget(name)
            if self._state(name).state == UNAVAILABLE:
                self._texts.pop(name, None)
        ready = [name for name, state_of_model in self._states.items() if state_of_model.state == READY]
        for name in ready:
            if name not in self._described and name not in self._describing and self._tasks is not None:
                self._describing[name] = self._tasks.create_task(self._describe(name), name=f"describe-{name}")
        # Other models stay ready while a new one is added; while predictors are away, engines answer for themselves.
        expected = [name for name in ready if self.has_predictors or name in self._pools]
        if not (self.ready or self._described.issuperset(expected)):
            return False
        if is_ready:
            return True
        # Each of two replicas may lack a model that the other one has.
        is_served = bool(ready) and all(s.state in (READY, UNAVAILABLE) for s in self._states.values())
        return self._replicas.are_several and self._is_complete and is_served

    def _forget(self, name: str) -> None:
        self._models.pop(name, None)
        self._unreadable.pop(name, None)
        self._described.discard(name)
        if task := self._describing.pop(name, None):
            task.cancel()

    async def _index(self) -> Mapping[str, ModelState]:
        index = await self._replicas.index()
        self._is_complete = index is not None
        if index is not None:
            return index
        wanted = dict.fromkeys([*self._sources, *(running.model for running in self._processors.values())])
        ready = await asyncio.gather(*(self._predictor.model_ready(name) for name in wanted))
        return {
            name: ModelState(READY if is_ready else UNAVAILABLE) for name, is_ready in zip(wanted, ready, strict=True)
        }

    async def _describe(self, name: str) -> None:
        """Adds a model that the predictor serves; if that fails, the next update tries again."""
        try:
            pool = self._pools.get(name)
            described = await self._replicas.describe(name) if pool is None else pool.description
            known = self._models.get(name)
            if known is not None and known.fingerprint != described.fingerprint:
                self._texts.pop(name, None)  # Other files may have another tokenizer.
            text = await self._text_of(name, described)
            model = model_of(name, described, text) if pool is None else engine_model(pool, described, text)
            if isinstance(model, TextModel):
                await model.tokenizer.try_template(self._bodies)
            self._models[name] = model
            self._described.add(name)
            self.notify()
            self._troubles.pop(name, None)
        except HeadraceError as error:
            if self._troubles.get(name) != error.message:
                logger.warning("model %s: the predictor does not describe it: %s", name, error.message)
            self._troubles[name] = error.message
        except Exception as error:
            # An error of one model; other models are served.
            if self._troubles.get(name) != repr(error):
                logger.exception("model %s cannot be added", name)
            self._troubles[name] = repr(error)
        finally:
            if self._describing.get(name) is asyncio.current_task():
                del self._describing[name]

    async def _text_of(self, name: str, described: PredictorModel) -> ModelText:
        """The text side of a model; empty where it has none or it cannot be read."""
        self._unreadable.pop(name, None)
        if name in self._texts:
            return self._texts[name]
        source = self._sources.get(name)
        if (source is None and not described.source) or not (described.generates or described.row_output):
            return ModelText()
        try:
            source = source or parse_location(name, described.source or "")
            base = None
            if described.base is not None:
                base_name, base_source = described.base
                found = self._sources.get(base_name) or parse_location(base_name, base_source)
                base = AdapterBase(found, self._texts.get(base_name))
            text = await run_in_daemon_thread(f"tokenizer-{name}", partial(read_text, source, self._pool, base))
        except (StartupError, ValueError) as error:
            reason = str(error)
            if name not in self._sources and not (source and source.is_local):
                reason += "; it is what the predictor reads: if that is on another host, MODELS here must name a folder"
            logger.warning("model %s takes token ids but no text: %s", name, reason)
            self._unreadable[name] = reason
            return ModelText()
        self._texts[name] = text
        return text
