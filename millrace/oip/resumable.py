"""How a generation survives the loss of its replica: the contract between a predictor and a caller that resumes.

It applies to `ModelStreamInfer` calls of generation models. The caller keeps every token id that it has received. When
the call breaks, becomes silent or is handed back, it calls another replica, or the same one after its restart, with the
same prompt, parameters and seed, and with the ids so far as the input `output_ids`. The sampler depends only on the
seed and the position, so the answer continues unchanged. If the ids are complete already (`max_tokens` of them, or an
end token last), the answer is one empty last chunk.

The caller's options are metadata, see `CallOptions`. The predictor sends:

- A heartbeat when it had nothing to send for the requested interval: a response with the model's name and the request's
  id, without outputs, with the parameter `HEARTBEAT` = true. It is sent in the queue, in the prefill, and while tokens
  are held back for a chunk, so that silence always means a fault.
- A heartbeat with the parameter `RUNS_ALONE` = true, if the call requests isolation: from now on the engine computes
  nothing else. The first step waits until this heartbeat is on its way.
- `SPAN`, a parameter of the very first response, heartbeat or not, if the caller resumes and the call is traced: the
  predictor's span of the call as a W3C traceparent. The spans of the next attempt link to it.
- `cached_tokens`, a parameter of the first response with ids, if the caller resumes: the number of prompt tokens that
  needed no computation. The last response always has it, but may come from another replica.
- `FINGERPRINT`, a parameter of the first response of every call, heartbeat or not: the fingerprint of the weights, see
  services/predictor/models/fingerprint.py. Only the same weights may resume a stream: the caller sends the fingerprint,
  and a replica with other weights refuses with `millrace.errors.OtherWeightsError` before it begins. ModelConfig has it
  too.
- `LEAVING` = true, a parameter of every response, if the caller resumes and the predictor is about to stop: the caller
  may resume elsewhere now. It does so by cancelling the call once another replica with the same weights is ready; until
  then it stays, and the stream continues here as long as the drain lasts.
- `millrace.errors.DrainingError`: the drain is over and the stream is handed back. Every id published before has been
  sent. The request is not at fault, and the next replica can take it at once.
- `HopBrokenError` (the engine died), or a broken call: a crash, which the request itself may have caused.

The gateway removes the headers named `x-millrace-…` from requests that come from outside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millrace.errors import InvalidRequestError

RESUMES = "x-millrace-resumes"
HEARTBEAT_MS = "x-millrace-heartbeat-ms"
ALONE = "x-millrace-alone"
EXPECTED_FINGERPRINT = "x-millrace-fingerprint"
FIRST_TOKEN_TIMEOUT_MS = "x-first-token-timeout-ms"  # noqa: S105 (public: clients send it too)

# Parameters of a response: that it says only that the call is alive, that nothing else is computed beside it, which
# span of the predictor's describes it, which weights answer, and that the predictor is about to stop.
HEARTBEAT = "heartbeat"
RUNS_ALONE = "runs_alone"
SPAN = "span"
FINGERPRINT = "fingerprint"
LEAVING = "leaving"

MAX_TIMEOUT_MS = 99_999_999  # gRPC's own limit of digits in a timeout.


@dataclass(frozen=True)
class CallOptions:
    """The options of one call, besides the request.

    `resumes`: the caller resumes elsewhere when the stream is handed back. `heartbeat_ms`: the interval of heartbeats
    (None: no heartbeats). `alone`: the engine computes nothing else until the call's next token (isolation), so that
    the cause of a crash is known. `fingerprint`: of the weights that have answered so far, the only ones that may
    resume ("": any). `first_token_timeout_ms`: the time left until the first token must be there (None: no limit).
    """

    resumes: bool = False
    heartbeat_ms: int | None = None
    alone: bool = False
    first_token_timeout_ms: int | None = None
    fingerprint: str = ""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The options as the call carries them."""
        options = {
            RESUMES: "true" if self.resumes else None,
            HEARTBEAT_MS: self.heartbeat_ms,
            ALONE: "true" if self.alone else None,
            FIRST_TOKEN_TIMEOUT_MS: self.first_token_timeout_ms,
            EXPECTED_FINGERPRINT: self.fingerprint or None,
        }
        return tuple((name, str(value)) for name, value in options.items() if value is not None)


def call_options_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> CallOptions:
    """The options that a call's metadata carries; raises InvalidRequestError."""
    given = {name: value for name, value in metadata or () if isinstance(value, str)}
    return CallOptions(
        resumes=given.get(RESUMES) == "true",
        heartbeat_ms=_milliseconds(given, HEARTBEAT_MS),
        alone=given.get(ALONE) == "true",
        first_token_timeout_ms=_milliseconds(given, FIRST_TOKEN_TIMEOUT_MS),
        fingerprint=given.get(EXPECTED_FINGERPRINT, ""),
    )


def _milliseconds(given: dict[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and 1 <= len(text) <= 9 and 1 <= int(text) <= MAX_TIMEOUT_MS):
        raise InvalidRequestError(f"{name} must be a whole number of milliseconds from 1 to {MAX_TIMEOUT_MS}")
    return int(text)
