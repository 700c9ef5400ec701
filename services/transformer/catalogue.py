"""The models: a text model's tokenizer and defaults, and what the predictor says of it; which ones are relayed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from millrace.errors import InvalidRequestError, MillraceError, NotFoundError, NotReadyError, StartupError
from millrace.hub import fetch
from millrace.model_kinds import ModelKind, kind_of
from millrace.model_sources import ModelSource, read_config
from millrace.sampling import ContextLimits, SamplingParameters, defaults_of
from services.transformer.predictor_client import PredictorClient
from services.transformer.tokenizer import FILES, TextTokenizer

VERSION = "1"
_PROBE_INTERVAL_S = 1.0
_STARTING_INTERVAL_S = 0.1


@dataclass(frozen=True)
class TextModel:
    """A model that generates text."""

    name: str
    tokenizer: TextTokenizer
    defaults: SamplingParameters


@dataclass(frozen=True)
class RelayedModel:
    """A model that needs no text processing."""

    name: str


def load_model(source: ModelSource, pool: ThreadPoolExecutor) -> TextModel | RelayedModel:
    """Decides a model's kind and reads a text model's tokenizer; blocks; raises StartupError."""
    folder = fetch(source, FILES)

    try:
        if kind_of(source, folder) is not ModelKind.GENERATION:
            return RelayedModel(source.name)
        is_encoder_decoder = bool(read_config(folder, "config.json").get("is_encoder_decoder"))
        defaults = defaults_of(read_config(folder, "generation_config.json"), is_encoder_decoder)
    except (ValueError, MillraceError) as error:
        raise StartupError(f"model {source.name}: {folder}: {error}") from None
    return TextModel(source.name, TextTokenizer(source.name, folder, pool), defaults)


class Catalogue:
    """Owned by the event loop."""

    def __init__(self, sources: Sequence[ModelSource], predictor: PredictorClient, pool: ThreadPoolExecutor) -> None:
        self._sources = sources
        self._predictor = predictor
        self._pool = pool
        self._models: dict[str, TextModel | RelayedModel] = {}
        self._limits: dict[str, ContextLimits] = {}
        self.ready = False

    @property
    def names(self) -> list[str]:
        return [source.name for source in self._sources]

    def load_all(self) -> None:
        """Makes every model known, one by one; blocks; raises StartupError."""
        for source in self._sources:
            self._models[source.name] = load_model(source, self._pool)

    def get(self, name: str, version: str = "") -> TextModel:
        """The text model; raises as `is_relayed`, and InvalidRequestError where the model is relayed."""
        model = self._find(name, version)
        if isinstance(model, RelayedModel):
            raise InvalidRequestError(f"model {name!r} takes tensors, not text; call it by ModelInfer")
        return model

    def is_relayed(self, name: str, version: str = "") -> bool:
        """Whether the model needs no text processing; raises NotFoundError, or NotReadyError while it loads."""
        return isinstance(self._find(name, version), RelayedModel)

    def _find(self, name: str, version: str) -> TextModel | RelayedModel:
        if name not in self.names:
            raise NotFoundError(f"no model {name!r}" if name else "the request names no model")
        if version not in ("", VERSION):
            raise NotFoundError(f"model {name!r} has no version {version!r}, only {VERSION}")
        if name not in self._models:
            raise NotReadyError(f"model {name!r} is loading")
        return self._models[name]

    async def limits(self, name: str) -> ContextLimits:
        """What the predictor says of a model, which is asked once a life of the predictor."""
        if name not in self._limits:
            self._limits[name] = await self._predictor.limits(name)
        return self._limits[name]

    async def watch(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Keeps `ready` true to whether a generation would work now, and tells of each change."""
        while True:
            ready = await self._probe()
            if ready != self.ready:
                self.ready = ready
                await tell(ready)
            await asyncio.sleep(_PROBE_INTERVAL_S if ready else _STARTING_INTERVAL_S)

    async def _probe(self) -> bool:
        if len(self._models) < len(self._sources) or not await self._predictor.ready():
            # It may come back with other models and limits.
            self._limits.clear()
            return False
        try:
            for model in self._models.values():
                if isinstance(model, TextModel):
                    await self.limits(model.name)
        except MillraceError:
            return False
        return True
