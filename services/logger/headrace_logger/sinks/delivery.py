"""The unit of delivery to a sink, its errors, and its delivery by HTTP."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx2

from headrace_logger.settings import LoggerSettings

_MAX_RETRY_AFTER_S = 3600.0
# A connection can be reused only after a response has been read to its end.
_MAX_ANSWER_BYTES = 64 * 1024


class TryAgainError(Exception):
    """The sink cannot accept the event now; `retry_after_s` is the minimum delay that it asks for."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class RefusedError(Exception):
    """The sink will never accept this event."""


@dataclass(frozen=True)
class Event:
    id: str
    headers: Mapping[str, str]
    body: bytes


class HttpSink:
    """Posts events to one URL, over at most `sink_concurrency` connections.

    `name` identifies the cursor and appears in the log; another name is another sink. Of the client's errors those in
    `tried_again` are retried, all others refusals.
    """

    tried_again: Collection[int] = (408, 429)

    def __init__(self, name: str, url: str, settings: LoggerSettings) -> None:
        self.name = name
        self._url = url
        self._timeout_s = settings.sink_timeout_s
        # No timeouts of its own: they apply to single reads, and a slow, steady response would never exceed them.
        limits = httpx2.Limits(max_connections=settings.sink_concurrency)
        self._client = httpx2.AsyncClient(timeout=None, limits=limits)

    async def send(self, event: Event) -> None:
        """Returns when the sink has accepted the event; raises TryAgainError or RefusedError."""
        answer = b""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream("POST", self._url, headers=event.headers, content=event.body) as response,
            ):
                async for part in response.aiter_raw():
                    answer += part
                    if len(answer) > _MAX_ANSWER_BYTES:
                        break
        except TimeoutError:
            raise TryAgainError(f"no answer within {self._timeout_s:g} s") from None
        except httpx2.RequestError as error:
            raise TryAgainError(f"{type(error).__name__}: {error}") from error
        if response.is_success:
            self._check(response, answer)
            return
        status = f"it answered {response.status_code}"
        if 400 <= response.status_code < 500 and response.status_code not in self.tried_again:
            raise RefusedError(status)
        raise TryAgainError(status, retry_after_s(response.headers.get("retry-after", "")))

    def _check(self, response: httpx2.Response, answer: bytes) -> None:
        """Raises RefusedError if a successful response rejects the event."""

    async def close(self) -> None:
        await self._client.aclose()


def retry_after_s(value: str) -> float:
    """Parses a Retry-After header, a number of seconds or a date, to seconds; 0 if it is unreadable."""
    if value.isascii() and value.isdigit():
        wait_s = float(value)
    else:
        try:
            at = parsedate_to_datetime(value)
        except ValueError:
            return 0.0
        # A date without a zone violates the specification; it is read as UTC.
        wait_s = (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(wait_s, 0.0), _MAX_RETRY_AFTER_S)


def without_credentials(url: str) -> str:
    """The URL for messages and cursors."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
