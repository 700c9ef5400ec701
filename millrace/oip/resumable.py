"""How a generation survives its replica: the contract between a caller that goes on elsewhere and a predictor.

It is of `ModelStreamInfer` calls of generation models. The caller keeps every token id that it was sent. When the call
breaks, falls silent or is handed back, it calls another replica, or the same one after its restart, with the same
prompt, parameters and seed and the ids so far as the input `output_ids`: the sampler depends on the seed and the
position alone, so the answer goes on as if nothing had happened. Ids that are complete already, `max_tokens` of them
or with an end token last, are answered by one empty last chunk.

What the caller says travels as metadata, see `CallOptions`. What the predictor says:

- A heartbeat, where it has had nothing to send for the interval asked for: a response with the model's name and the
  request's id, without outputs, and with the parameter `HEARTBEAT` = true. In the queue, in the prefill, and while
  tokens are held back for a chunk, so that silence always means that something is wrong.
- A heartbeat with the parameter `RUNS_ALONE` = true, where it was asked to run the request alone: from now on it does,
  and has waited with the first step until this was on its way.
- `SPAN`, a parameter of the first response of all, heartbeat or not, where the caller resumes and the call is traced:
  the predictor's span of the call, as W3C trace context writes it. The next attempt's spans link to it.
- `cached_tokens`, a parameter of the first response with ids where the caller resumes: of the prompt's tokens those
  that needed no computation. The last response, which has it always, may come from another replica.
- `FINGERPRINT`, a parameter of the first response of every call, heartbeat or not: which weights answer, see
  services/predictor/models/fingerprint.py. A stream goes on only where the same ones do: the caller sends it along, and
  a replica with others refuses with `millrace.errors.OtherWeightsError` before it begins. In ModelConfig too.
- `LEAVING` = true, a parameter of every response where the caller resumes and the predictor is about to stop: the
  caller may go on elsewhere now. It does so by cancelling the call, once another replica with the same weights is
  there; until then it stays, and the stream goes on here as long as the drain lasts.
- `millrace.errors.DrainingError`: the stream is handed back, for the drain is over. Every id published before has been
  sent. Nothing is wrong with the request, and the next replica can have it at once.
- `HopBrokenError` (engine died), or a call that breaks: a death, which the request itself may have caused.

The gateway removes the headers named `x-millrace-…` from what strangers send.
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
    """What a caller says of one call beside the request.

    `resumes`: it goes on elsewhere when the stream is handed back. `heartbeat_ms`: so often it wants a sign of life
    (None: never). `alone`: the engine computes nothing else until the call's next token, so that what kills it then
    is known. `fingerprint`: of the weights that have answered so far, the only ones that may go on ("": any).
    `first_token_timeout_ms`: what is left until the first token of the answer must be there (None: no limit).
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
