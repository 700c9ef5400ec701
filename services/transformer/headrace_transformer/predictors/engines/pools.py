"""The engines of each model by address: which are there, what they serve, and which gets the next request.

A host's name stands for all of its addresses, looked up every second. The next request goes to the engine that has the
prompt's beginning cached, or to the least loaded one, as among predictors (link/links.py).

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace.clients import WITHOUT_KEY
from headrace.errors import HeadraceError, NotReadyError
from headrace.models.engine_sources import EngineSource
from headrace.oip.model_description import INPUT_IDS, OUTPUT_IDS
from headrace.rpc.client.interceptors import ClientSpan
from headrace.sampling import SamplingParameters
from headrace.telemetry.page import PickableLoad
from headrace_protos import inference_pb2 as pb
from headrace_protos.steps_pb2 import Submission
from headrace_transformer.predictors.discovery.descriptions import PredictorModel
from headrace_transformer.predictors.discovery.replicas import LOADING, READY, ModelState
from headrace_transformer.predictors.discovery.resolver import Resolver
from headrace_transformer.predictors.engines.engine import HOP, TOKEN_ID_KINDS, Engine
from headrace_transformer.predictors.engines.fair_places import FairPlaces
from headrace_transformer.predictors.engines.token_call import TokenCall
from headrace_transformer.predictors.engines.token_formats import LlamaFormat, OpenAIFormat, TokenFormat
from headrace_transformer.predictors.link.links import choose, prefix_key
from headrace_transformer.predictors.resume.retries import Backoff
from headrace_transformer.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    import aiohttp  # Loaded where there are engines only: it takes a quarter of a second.

logger = logging.getLogger(__name__)

_VERSION = "1"
_LOOK_EVERY_S = 1.0
_CONNECT_S = 10.0  # Where both are busy; an engine that is gone is noticed before.
_KEPT_S = 4.0  # Idle connections; vLLM's server closes them after 5.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))  # Seconds, count.
_DEFAULT_PORTS = {"http": 80, "https": 443}


class EnginePool:
    """The engines of one model."""

    def __init__(self, source: EngineSource, silence_limit_s: float) -> None:
        self.source = source
        self.places = FairPlaces()
        self.statistics = pb.ModelStatistics(name=source.name, version=_VERSION)  # Since the start.
        self.token_bytes: TokenBytes | None = None  # Of the model's tokenizer, once it is here.
        self.changed = asyncio.Event()  # Set, and replaced, when an engine begins to answer, or ends.
        self._silence_limit_s = silence_limit_s
        self._engines: dict[str, Engine] = {}
        self._resolvers: dict[str, Resolver] = {}

    @property
    def state(self) -> ModelState:
        """READY once an engine has answered, LOADING before."""
        return ModelState(READY if self.ready else LOADING, "" if self.ready else "no engine answers", _VERSION)

    @property
    def ready(self) -> list[Engine]:
        """The engines that answer."""
        return [engine for engine in self._engines.values() if engine.ready]

    @property
    def load(self) -> PickableLoad:
        """The requests at the engines, and those that wait here for a place; on any thread."""
        return PickableLoad(sum(len(each.running) for each in tuple(self._engines.values())), self.places.waiting)

    @property
    def nature(self) -> frozenset[tuple[str, int | None, str]]:
        """What the engines that answer are; if it changes, the model is another one."""
        return frozenset((engine.kind, engine.context_length, engine.folder) for engine in self.ready)

    @property
    def context_length(self) -> int | None:
        """Of the engines that answer, None if none says it."""
        return next((engine.context_length for engine in self.ready), None)

    @property
    def description(self) -> PredictorModel:
        """What the engines say of the model; raises NotReadyError while none answers."""
        engine = self.choose(None)
        takes_ids = engine.kind in TOKEN_ID_KINDS and engine.generates
        is_here = Path(engine.folder).is_absolute() and Path(engine.folder).is_dir()
        return PredictorModel(
            name=self.source.name,
            versions=(_VERSION,),
            inputs=frozenset({INPUT_IDS, OUTPUT_IDS} if takes_ids else ()),
            outputs=frozenset({OUTPUT_IDS} if takes_ids else ()),
            context_length=engine.context_length,
            source=self.source.tokenizer or (engine.folder if is_here else None),
            facts={"engine": engine.kind},
        )

    def choose(self, key: bytes | None, besides: Sequence[Engine] = ()) -> Engine:
        """The engine for the next request; `key` as of `prefix_key`; raises NotReadyError."""
        ready = self.ready
        ready = [engine for engine in ready if engine not in besides] or ready
        if not ready:
            raise self._none()
        return self._engines[choose({engine.address: len(engine.running) for engine in ready}, key)]

    async def until_ready(
        self, backoff: Backoff, last_word: Callable[[HeadraceError], HeadraceError] | None = None
    ) -> None:
        """Waits until an engine answers; raises the `last_word` of NotReadyError where none does in time."""
        while not self.ready:
            error = self._none()
            await backoff.wait_for(self.changed, error if last_word is None else last_word(error))

    def _none(self) -> NotReadyError:
        return NotReadyError(f"no engine of model {self.source.name!r} answers", hop=HOP)

    def call(
        self,
        submission: Submission,
        output_ids: Sequence[int],
        sampling: SamplingParameters,
        further_fields: Mapping[str, Any],
        span: ClientSpan,
    ) -> TokenCall:
        """Begins a request that continues after `output_ids`, and has the `further_fields` as they are.

        Raises NotReadyError, InvalidRequestError.
        """
        prompt, name = submission.prompt_ids, self.source.name
        if submission.client and not submission.client.startswith(WITHOUT_KEY):  # Its cached prefixes are its own.
            sampling = sampling.model_copy(update={"cache_salt": f"{submission.client}\n{sampling.cache_salt}"})
        key = prefix_key(name, sampling.cache_salt, prompt, submission.client)
        engine = self.choose(key, [engine for engine in self.ready if engine.kind not in TOKEN_ID_KINDS])
        if engine.kind not in TOKEN_ID_KINDS:
            raise NotReadyError(f"no engine of model {name!r} takes token ids", hop=HOP)
        new_format: Callable[[], TokenFormat] = OpenAIFormat
        if engine.kind == "llamacpp" and self.token_bytes is not None:
            new_format = partial(LlamaFormat, self.token_bytes)
        return TokenCall(engine, new_format, prompt, list(output_ids), sampling, further_fields, span)

    async def look(self, session: aiohttp.ClientSession) -> None:
        """Follows the addresses, and asks each engine."""
        wanted: dict[str, str] = {}
        for address in self.source.addresses:
            wanted |= await self._resolved(address)
        for address, host in wanted.items():
            if address not in self._engines:
                self._engines[address] = Engine(
                    self.source,
                    address,
                    host,
                    session,
                    silence_limit_s=self._silence_limit_s,
                    statistics=self.statistics,
                )
        for address in [address for address in self._engines if address not in wanted]:
            if not self._engines[address].running:
                del self._engines[address]
        before = {engine.address for engine in self.ready}
        await asyncio.gather(*(engine.look() for engine in self._engines.values()))
        for address, engine in self._engines.items():
            engine.ready = engine.ready and address in wanted
        self.places.limit = sum(engine.places for engine in self.ready)
        self.places.serve()
        if before != {engine.address for engine in self.ready}:
            self.changed.set()
            self.changed = asyncio.Event()

    async def _resolved(self, address: str) -> dict[str, str]:
        """The addresses behind one, each with the host's name; that of TLS needs its name, and stays."""
        parts = urlsplit(address)
        if parts.scheme == "https" or parts.hostname is None:
            return {address: parts.netloc}
        port = parts.port or _DEFAULT_PORTS[parts.scheme]
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        resolver = self._resolvers.setdefault(address, Resolver((f"{host}:{port}",)))
        return {f"{parts.scheme}://{found}{parts.path}": parts.netloc for found in await resolver.addresses()}

    async def close(self) -> None:
        """Ends the look-ups in progress."""
        for resolver in self._resolvers.values():
            await resolver.close()


class Engines:
    """The pools of all models, by their names."""

    def __init__(self, sources: Sequence[EngineSource], silence_limit_s: float) -> None:
        self.pools = {source.name: EnginePool(source, silence_limit_s) for source in sources}
        if sources:
            import aiohttp  # noqa: F401  # Now, and not while calls are served.

    def serve(self, model: str) -> bool:
        """Whether an engine could begin an answer of the model now."""
        return model in self.pools and bool(self.pools[model].ready)

    async def run(self) -> None:
        """Follows the engines until cancelled."""
        if not self.pools:
            return
        import aiohttp

        timeouts = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        # One client's cookies are not another's, and an engine leads nowhere else.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S, socket_factory=_socket)
        settings: dict[str, Any] = {"connector": connector, "timeout": timeouts, "cookie_jar": aiohttp.DummyCookieJar()}
        async with aiohttp.ClientSession(**settings) as session, asyncio.TaskGroup() as group:
            for name, pool in self.pools.items():
                group.create_task(_follow(pool, session), name=f"engines-{name}")


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices within half a minute that the other end is gone."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    for option, value in _KEEP_ALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return made


async def _follow(pool: EnginePool, session: aiohttp.ClientSession) -> None:
    try:
        while True:
            try:
                await pool.look(session)
            except Exception:  # The other models' engines are followed on.
                logger.exception("engines of model %s", pool.source.name)
            await asyncio.sleep(_LOOK_EVERY_S)
    finally:
        await pool.close()
