"""The chunks of an answer: a predictor's token ids become text."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.oip.prompt_logprobs import PromptLogprobs
from headrace_protos.headrace_pb2 import Usage
from headrace_transformer.predictors.tokens import TokenChunk
from headrace_transformer.text.answer_parser import AnswerParser
from headrace_transformer.text.answer_parts import Content, Part, merged
from headrace_transformer.text.detokenizer import Detokenizer


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt's ids, and the log probabilities of all but the first."""

    ids: Sequence[int]
    logprobs: PromptLogprobs


class TextChunk(NamedTuple):
    """New text and its token ids; the last chunk has `finish_reason` and `usage`.

    `logprobs` has one value for each id where the request asks for them, and `top_logprobs` the likeliest tokens at
    that position with their log probabilities, best first. `prompt_tokens` and `prompt_ids`, a list that must not be
    changed, are the same in every chunk. `prompt` is in the first chunk where the request asks for it. `resumed` marks
    the first chunk after another predictor has resumed the answer; `fingerprint` is that of the weights. `engine_s`,
    `predictor` and `repeated` are as of a TokenChunk. Where the request asks for parts and the model writes calls or
    reasoning, `parts` are what `text` adds to the answer's parts, and `reasoning_tokens` counts those of the reasoning
    so far.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    finish_reason: str | None = None
    usage: Usage | None = None
    elapsed_s: float = 0.0  # Since the request arrived.
    prompt_tokens: int = 0
    stop_reason: str | int | None = None  # The stop string or the id of `stop_token_ids` that ended the answer.
    prompt: ScoredPrompt | None = None
    resumed: bool = False
    fingerprint: str = ""
    engine_s: float | None = None
    predictor: str = ""
    repeated: bool = False
    parts: Sequence[Part] | None = None
    reasoning_tokens: int | None = None
    prompt_ids: Sequence[int] = ()

    @property
    def has_news(self) -> bool:
        """Whether there is anything new to pass on."""
        return bool(self.text if self.parts is None else self.parts)

    @property
    def answer_parts(self) -> Sequence[Part]:
        """The parts; the text alone for a model without calls and reasoning."""
        if self.parts is not None:
            return self.parts
        return (Content(self.text),) if self.text else ()

    def without_output(self) -> TextChunk:
        """The chunk of an answer without tokens; a predictor generates at least one."""
        usage = self.usage
        if usage is not None:
            usage = Usage(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
        reason = None if self.finish_reason is None else "length"
        return self._replace(
            text="",
            token_ids=[],
            logprobs=[],
            top_logprobs=[],
            finish_reason=reason,
            usage=usage,
            stop_reason=None,
        )

    def without_cached_tokens(self) -> TextChunk:
        """The chunk for a caller that must not find out which prompts other callers have sent."""
        if self.usage is None:
            return self
        usage = Usage(prompt_tokens=self.usage.prompt_tokens, completion_tokens=self.usage.completion_tokens)
        return self._replace(usage=usage)


def joined(chunks: Sequence[TextChunk]) -> TextChunk:
    """A whole answer as one chunk."""
    return chunks[-1]._replace(
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
        top_logprobs=[top for chunk in chunks for top in chunk.top_logprobs],
        prompt=chunks[0].prompt,
        parts=None if chunks[-1].parts is None else merged(part for chunk in chunks for part in chunk.parts or ()),
    )


class Assembler:
    """Turns a predictor's chunks into text chunks; a stop string ends the answer before the predictor does.

    The token that ends an answer, one of `stop_token_ids` or of the special tokens `end_ids`, is among its ids; its
    text is in the answer's only with `includes_stop`. `parser` separates the answer's parts.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        prompt_ids: Sequence[int],
        stop_token_ids: Iterable[int],
        parser: AnswerParser | None = None,
        includes_stop: bool = False,
        end_ids: Container[int] = (),
    ) -> None:
        self._includes_stop = includes_stop
        self._end_ids = end_ids
        self._detokenizer = detokenizer
        self._parser = parser
        self._prompt_ids = prompt_ids
        self._prompt_tokens = len(prompt_ids)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._produced = 0

    def take(self, chunk: TokenChunk, elapsed_s: float) -> TextChunk:
        """The text of the next chunk."""
        detokenizer, ids, reason, usage = self._detokenizer, chunk.token_ids, chunk.finish_reason, chunk.usage
        text, used, parser = "", 0, self._parser
        ends_with_stop_token = reason == "stop" and not self._stop_token_ids.isdisjoint(ids[-1:])
        written = len(ids)
        if reason == "stop" and not self._includes_stop:
            written -= ends_with_stop_token or (bool(ids) and ids[-1] in self._end_ids)
        for token_id in ids:
            if used < written:
                piece = detokenizer.push(token_id)
                text += piece
                if parser is not None:
                    parser.push(piece)
            used += 1
            if detokenizer.stopped:
                break
        self._produced += used
        stop_reason: str | int | None = ids[-1] if ends_with_stop_token else None
        if reason is not None and not detokenizer.stopped:
            piece = detokenizer.flush()
            text += piece
            if parser is not None:
                parser.push_rest(piece)
        if detokenizer.stopped:
            reason, stop_reason = "stop", detokenizer.stop_string
            cached = chunk.cached_tokens or 0
            usage = Usage(prompt_tokens=self._prompt_tokens, cached_tokens=cached, completion_tokens=self._produced)
        if parser is not None and reason is not None:
            parser.flush()
        is_cut = used < len(ids)
        return TextChunk(
            text,
            ids[:used] if is_cut else ids,
            chunk.logprobs[:used] if is_cut else chunk.logprobs,
            chunk.top_logprobs[:used] if is_cut else chunk.top_logprobs,
            reason,
            usage,
            elapsed_s,
            self._prompt_tokens,
            stop_reason,
            None if chunk.prompt is None else ScoredPrompt(self._prompt_ids, chunk.prompt),
            chunk.resumed,
            chunk.fingerprint,
            chunk.engine_s,
            chunk.predictor,
            chunk.repeated,
            None if parser is None else parser.parts(),
            None if parser is None else parser.reasoning_tokens,
            self._prompt_ids,
        )
