"""A generation as one request at an engine that takes token ids and gives them.

A request that continues an answer either has the ids so far behind its prompt, which is exact where the next token
depends on them alone; or it repeats the answer from its beginning, with the same seed, and the ids that are there
already are compared and left out. So does each answer that has a form: an engine's grammar begins with its request.
Where an engine does not repeat itself, an answer without a form goes on from its ids, as an approximation.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.errors import HeadraceError, HopBrokenError
from headrace.rpc.client.interceptors import ClientSpan
from headrace.sampling import SamplingParameters
from headrace_protos.headrace_pb2 import Usage
from headrace_transformer.predictors import APPROXIMATE, EXACT, TokenChunk
from headrace_transformer.predictors.engines.engine import HOP, Engine
from headrace_transformer.predictors.engines.events import EventStream, parsed
from headrace_transformer.predictors.engines.token_formats import TokenFormat

# Fields of engines by which an answer has a form.
FORMS = ("grammar", "json_schema", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


@dataclass(eq=False)
class TokenCall:
    """See the module; one task reads it. `continuity` is how it continues the ids, "" for a new answer."""

    is_accepted: ClassVar = False
    runs_alone: ClassVar = False
    fingerprint: ClassVar = ""

    engine: Engine
    new_format: Callable[[], TokenFormat]
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    sampling: SamplingParameters
    further_fields: Mapping[str, Any]
    span: ClientSpan
    _error: HeadraceError | None = None
    _produced: int = 0
    _cached_tokens: int | None = None

    def __post_init__(self) -> None:
        self.predictor, sampling = self.engine.name, self.sampling
        self.continuity = "" if not self.output_ids else EXACT if is_exact(sampling) else APPROXIMATE
        self._has_form = bool(sampling.structured_outputs) or any(name in self.further_fields for name in FORMS)
        self._begin(repeats=bool(self.output_ids) and (self._has_form or not continues(sampling)))

    async def read(self) -> TokenChunk:
        """The next tokens, or none where all were there already; raises HeadraceError."""
        if self._error is not None:
            raise self._error
        if self.output_ids and len(self.output_ids) >= (self.sampling.max_tokens or 0):
            return self._end(TokenChunk(finish_reason="length"))
        chunk = self._chunk(await self._events.read())
        if chunk.finish_reason is not None and self._format.has_more:
            self._take(await self._events.rest(), TokenChunk())
        self._leave_out(chunk)
        if chunk.finish_reason is None:
            return chunk
        self._events.ended = True
        return self._end(chunk)

    def fail(self, error: HeadraceError) -> None:
        """Ends the call with an error, at once."""
        self._error = error
        self._events.fail(error)

    def close(self) -> None:
        """Ends the request unless it has ended."""
        self._events.close()

    def _begin(self, repeats: bool) -> None:
        self._format = self.new_format()
        produced = 0 if repeats else len(self.output_ids)
        ids = self.prompt_ids if repeats else [*self.prompt_ids, *self.output_ids]
        self._repeated = deque(self.output_ids if repeats else ())
        body = {**self.further_fields, **self._format.body(self.engine.served, ids, self.sampling, produced)}
        self._events = EventStream(self.engine, self._format.path, body, self.span)

    def _chunk(self, events: Sequence[bytes]) -> TokenChunk:
        """The tokens of events; an error behind them is raised when they have been read."""
        chunk = TokenChunk()
        try:
            self._take(events, chunk)
        except HeadraceError as error:
            self.fail(error)
            if not chunk.token_ids:
                raise
        return chunk

    def _take(self, events: Sequence[bytes], chunk: TokenChunk) -> None:
        for data in events:
            event = parsed(data)
            try:
                self._format.take(event, chunk)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError):
                raise HopBrokenError("the engine sends an event that is none of its kind", hop=HOP) from None
        if chunk.cached_tokens is not None:
            self._cached_tokens = chunk.cached_tokens
        chunk.cached_tokens = self._cached_tokens

    def _leave_out(self, chunk: TokenChunk) -> None:
        """Drops the ids that are there already; raises HopBrokenError where an answer with a form is another one."""
        same = 0
        for token_id in chunk.token_ids:
            if not self._repeated:
                break
            if token_id != self._repeated.popleft():
                self._differs(chunk)
                return
            same += 1
        if chunk.finish_reason is not None and self._repeated:
            self._differs(chunk)
            return
        for values in (chunk.token_ids, chunk.logprobs, chunk.top_logprobs):
            del values[:same]
        self._produced += len(chunk.token_ids)

    def _differs(self, chunk: TokenChunk) -> None:
        if self._has_form:
            raise HopBrokenError("the engine does not repeat the answer's beginning", hop=HOP)
        self._events.close()
        chunk.finish_reason = None
        for values in (chunk.token_ids, chunk.logprobs, chunk.top_logprobs):
            values.clear()
        self.continuity = APPROXIMATE
        self._begin(repeats=False)

    def _end(self, chunk: TokenChunk) -> TokenChunk:
        self._events.close()
        completion = len(self.output_ids) + self._produced
        chunk.usage = Usage(
            prompt_tokens=len(self.prompt_ids), cached_tokens=self._cached_tokens or 0, completion_tokens=completion
        )
        return chunk


def continues(sampling: SamplingParameters) -> bool:
    """Whether an answer goes on from its ids: the next token depends on them alone, or nothing would repeat them."""
    if sampling.structured_outputs:
        return False
    counts_output = sampling.presence_penalty or sampling.frequency_penalty
    return not counts_output if sampling.is_greedy else sampling.seed is None


def is_exact(sampling: SamplingParameters) -> bool:
    """Whether an answer continues exactly, by its ids or by its repetition."""
    return sampling.is_greedy or not continues(sampling)
