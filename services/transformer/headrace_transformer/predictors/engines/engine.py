"""One engine at one address: what it is, whether it answers, and the requests to it.

What it is, it says itself: `GET /models` names its kind, its model and its context. Whether it answers, only a real
answer shows: after its start, and after failures, it must generate a token before it gets requests. One that has been
silent while requests wait must generate one too, or it counts as hung and its answers go on elsewhere; not one whose
places are all taken, nor one of an unknown kind, where that token might only wait for its turn.

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from headrace.errors import (
    HeadraceError,
    HopBrokenError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestFailedError,
)
from headrace.models.engine_sources import KINDS, OTHER, TGI, EngineSource
from headrace_protos import inference_pb2 as pb
from headrace_transformer.predictors.resume.progress import PredictorLostError

if TYPE_CHECKING:
    import aiohttp  # Loaded where there are engines only: it takes a quarter of a second.

logger = logging.getLogger(__name__)

HOP = "engine"
TOKEN_ID_KINDS = ("vllm", "llamacpp", "headrace")  # They take and give token ids.
_LOOK_S = 2.0
_AT_ROOT = ("/completion", "/props", "/detokenize", "/info")  # llama.cpp's own paths, vLLM's, TGI's.
_TGI_MODEL = "tgi"  # Any other name is that of an adapter.
_PLACES = 256  # vLLM's default of requests at a time.
_MAX_ERROR, _MAX_TEXT = 64 * 1024, 16 << 20
_STALLS = 6  # Times the limit of silence: an answer that has begun, beside others that go on.
_GENERATION_FAILED = 424  # TGI's.
_FAILURES = 3  # In a row: server errors after which an engine must prove itself.


class Running(Protocol):
    """A request at an engine; `heard` is when the latest piece of its answer came, None before the first."""

    heard: float | None

    @property
    def is_reading(self) -> bool:
        """Whether somebody waits for the next piece."""

    @property
    def is_stranded(self) -> bool:
        """Whether its connection is gone, before the end: nothing more can come."""

    def fail(self, error: HeadraceError) -> None:
        """Ends it with an error, at once."""


class Engine:
    """See the module. `address` is the base of its paths, with the host as an address; `host` is its name.

    `statistics` are those of the model, to which its requests are added.
    """

    def __init__(
        self,
        source: EngineSource,
        address: str,
        host: str,
        session: aiohttp.ClientSession,
        *,
        silence_limit_s: float,
        statistics: pb.ModelStatistics,
    ) -> None:
        self.source = source
        self.address = address
        self.name = address.partition("://")[2].partition("/")[0]
        self.running: set[Running] = set()
        self.statistics = statistics
        self.kind = source.kind
        self.served = source.served
        self.context_length: int | None = None
        self.folder = ""
        self.generates = True
        self.places = source.max_running or _PLACES
        self.ready = False
        self.heard = time.monotonic()
        self._host = host
        self._session = session
        self._silence_limit_s = silence_limit_s
        self._failures = 0
        self._trouble = ""

    async def look(self) -> None:
        """Finds out what the engine is, and whether it answers."""
        try:
            await self._describe()
            if not self.ready:
                await self._prove()
                self.ready, self._failures, self._trouble = True, 0, ""
                logger.info("engine %s answers: %s, model %s", self.address, self.kind, self.served)
            elif self.running and self.kind != OTHER and len(self.running) < self.places and self._is_silent():
                await self._prove()
                self.heard = time.monotonic()
        except HeadraceError as error:
            if not (self.ready and self.running) or self._is_silent():  # One slow answer to a look is no death.
                self.lost(error)
        for running in tuple(self.running):
            if running.is_reading and (running.is_stranded or self._stands_still(running)):
                running.fail(PredictorLostError(f"engine {self.name} goes on with others, and not with this", hop=HOP))

    def begins(self, running: Running) -> None:
        """Notes a request that begins now."""
        if not self.running:
            self.heard = time.monotonic()
        self.running.add(running)

    def _is_silent(self) -> bool:
        return time.monotonic() - self.heard > self._silence_limit_s

    def _stands_still(self, running: Running) -> bool:
        """Whether an answer that has begun gets nothing; a connection may be lost without a notice."""
        return running.heard is not None and time.monotonic() - running.heard > _STALLS * self._silence_limit_s

    def lost(self, error: HeadraceError) -> None:
        """The engine gets no request until it has answered one; those that it has go on elsewhere."""
        if self.ready or self._trouble != error.message:
            logger.warning("engine %s does not answer: %s", self.address, error.message)
        self.ready, self._trouble = False, error.message
        for running in tuple(self.running):
            running.fail(PredictorLostError(f"engine {self.name} does not answer", hop=HOP))

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path, within 2 s; raises HeadraceError."""
        with _as_lost():
            async with (
                asyncio.timeout(_LOOK_S),
                self._session.get(self._url(path), headers=self._headers()) as response,
            ):
                value = _json(data := await _read(response, _MAX_ERROR))
        if response.status != 200 or not isinstance(value, dict):
            raise NotReadyError(
                f"{response.url.path}: status {response.status}, {error_message(data) or 'no JSON'}", hop=HOP
            )
        return value

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = {}) -> aiohttp.ClientResponse:
        """The answer to a request, of which the head has come; raises HeadraceError for any but 200.

        Whoever closes the response before its end closes the connection, by which engines cancel.
        """
        import aiohttp

        try:
            try:
                response = await self._sent(path, body, headers)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # It has closed a connection that was kept, or died: a new connection shows which.
                if isinstance(error, aiohttp.ClientConnectorError):
                    raise
                response = await self._sent(path, body, headers)
        except (aiohttp.ClientError, OSError) as error:
            lost = _lost(error)
            if isinstance(error, aiohttp.ClientConnectorError):
                self.lost(lost)
            raise lost from None
        if response.status == 200:
            self._failures = 0
            self.heard = time.monotonic()
            return response
        async with response:
            raise self._refusal(response, await _read(response, _MAX_ERROR, cut=True))

    async def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids by the engine's own tokenizer; "" where it gives none within 2 s."""
        try:
            if not ids:
                return ""
            async with asyncio.timeout(_LOOK_S):
                response = await self.post("/detokenize", {"model": self.served, "tokens": ids})
                async with response:
                    value = _json(await _read(response, _MAX_TEXT))
        except (TimeoutError, HeadraceError):
            return ""
        return str(value.get("prompt") or "") if isinstance(value, dict) else ""

    async def _sent(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        data, headers = orjson.dumps(body), {**self._headers(), **headers}
        return await self._session.post(self._url(path), data=data, headers=headers, allow_redirects=False)

    def _url(self, path: str) -> str:
        return (self.address.removesuffix("/v1") if path in _AT_ROOT else self.address) + path

    def _headers(self) -> dict[str, str]:
        headers = {"host": self._host, "content-type": "application/json"}
        try:
            key = self.source.key
        except (OSError, ValueError):
            key = "\n"
        if not key.isprintable():
            raise NotReadyError(f"{self.source.key_file}: there is no key of engines in it", hop="transformer")
        return headers | ({"authorization": f"Bearer {key}"} if key else {})

    def _refusal(self, response: aiohttp.ClientResponse, data: bytes) -> HeadraceError:
        status, message = response.status, error_message(data) or f"status {response.status}"
        if status in (401, 403):
            logger.error("engine %s refuses the key: %s", self.address, message)
            return RequestFailedError("the engine refuses the transformer's key", hop=HOP)
        if status == 429:
            return OverloadedError(message, hop=HOP, retry_after_ms=_retry_after_ms(response))
        if (400 <= status < 500 and status != _GENERATION_FAILED) or status == 501:
            return InvalidRequestError(message, hop=HOP)
        self._failures += 1
        if status in (502, 503, 504) or self._failures >= _FAILURES:
            self.ready = False  # Until it has proved itself; the answers that it gives go on.
        return NotReadyError(message, hop=HOP) if status in (502, 503, 504) else HopBrokenError(message, hop=HOP)

    async def _describe(self) -> None:
        """Reads the engine's list of models; raises HeadraceError."""
        listed = (await self.get("/models")).get("data")
        cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
        names = [str(card.get("id")) for card in cards]
        wanted = self.source.served or (names[0] if len(names) == 1 else self.source.name)
        card = next((card for card in cards if card.get("id") == wanted), None)
        if card is None:
            raise NotReadyError(f"it serves {', '.join(names[:8]) or 'nothing'}, not {wanted!r}", hop=HOP)
        owner = str(card.get("owned_by"))
        self.generates = card.get("kind", "generation") == "generation"
        self.folder = str(card.get("root") or "")
        length, places = card.get("max_model_len"), None
        if owner in KINDS or not self.ready:
            self.kind = self.source.kind or (owner if owner in KINDS else await self._unstated_kind())
        if self.kind == "llamacpp" and not self.ready:
            properties = await self.get("/props")
            settings, places = properties.get("default_generation_settings"), properties.get("total_slots")
            length = settings.get("n_ctx") if isinstance(settings, dict) else None
        elif self.kind == TGI and not self.ready:
            information = await self.get("/info")
            length, places = information.get("max_total_tokens"), information.get("max_concurrent_requests")
        if isinstance(places, int):
            self.places = self.source.max_running or places
        self.served = _TGI_MODEL if self.kind == TGI else wanted
        if isinstance(length, int) and length > 0:
            self.context_length = length

    async def _unstated_kind(self) -> str:
        """The kind of an engine whose list of models does not name it."""
        try:
            return TGI if "max_concurrent_requests" in await self.get("/info") else OTHER
        except HeadraceError:
            return OTHER

    async def _prove(self) -> None:
        """Has the engine generate one token; raises HeadraceError. A refusal is an answer too: of an encoder."""
        body = {"model": self.served, "prompt": "a", "max_tokens": 1}
        with _as_lost():
            async with asyncio.timeout(self._silence_limit_s), await self._sent("/completions", body, {}) as response:
                data = await _read(response, _MAX_ERROR)
        if response.status >= 500 or response.status in (401, 403):
            raise NotReadyError(error_message(data) or f"status {response.status}", hop=HOP)
        if response.status == 200 and not isinstance(_json(data), dict):
            raise HopBrokenError("its answer is not JSON", hop=HOP)


def error_message(data: bytes) -> str:
    """The message in the body of an error, as OpenAI's API and others have it; "" for none."""
    value = _json(data)
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(name):
            value = value[name]
    return value if isinstance(value, str) else ""


def error_of_event(value: Mapping[str, Any]) -> HeadraceError | None:
    """The error that a 200 carries, if it does."""
    error = value.get("error")
    if not error or value.get("choices"):
        return None
    code = error.get("code", error.get("http_status_code")) if isinstance(error, dict) else None
    message = error_message(orjson.dumps({"error": error})) or "an error without a message"
    if isinstance(code, int) and 400 <= code < 500 and code != _GENERATION_FAILED:
        return InvalidRequestError(message, hop=HOP)
    return HopBrokenError(f"the engine reports an error: {message}", hop=HOP)


def _lost(error: BaseException) -> PredictorLostError:
    text = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    return PredictorLostError(f"the connection to the engine failed: {text}", hop=HOP)


@contextmanager
def _as_lost() -> Iterator[None]:
    """Makes PredictorLostError of a connection that fails, or takes too long, in the block."""
    import aiohttp

    try:
        yield
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise _lost(error) from None


async def _read(response: aiohttp.ClientResponse, most: int, cut: bool = False) -> bytes:
    """The body, or its beginning with `cut`; raises HopBrokenError for one longer than `most`, or not complete."""
    data = bytearray()
    with _as_lost():
        async for piece in response.content.iter_any():
            data += piece
            if len(data) > most and cut:
                return bytes(data)
            if len(data) > most:
                raise HopBrokenError(f"the engine's answer has more than {most} bytes", hop=HOP)
    return bytes(data)


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def _retry_after_ms(response: aiohttp.ClientResponse) -> int | None:
    seconds = response.headers.get("retry-after", "")
    return 1000 * int(seconds) if seconds.isascii() and seconds.isdecimal() and len(seconds) < 6 else None
