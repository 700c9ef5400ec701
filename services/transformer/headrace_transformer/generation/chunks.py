"""The chunks of an answer: a predictor's token ids become text."""

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from headrace_protos.headrace_pb2 import Usage
from headrace_transformer.models.models import TextModel
from headrace_transformer.predictors import TokenChunk
from headrace_transformer.text.answer_parser import AnswerParser
from headrace_transformer.text.answer_parts import Answer, Content, Part, merged
from headrace_transformer.text.detokenizer import Detokenizer


class Origin(NamedTuple):
    """What an answer comes from; the ids must not be changed."""

    model: TextModel
    prompt_ids: Sequence[int]


class End(NamedTuple):
    """How an answer ended; `stop` is the stop string, or the id of `stop_token_ids`, that ended it."""

    reason: str
    usage: Usage
    stop: str | int | None = None


class ScoredToken(NamedTuple):
    """A token with its log probability, None for the first of a prompt, and the likeliest ones in its place."""

    id: int
    logprob: float | None
    top: Sequence[tuple[int, float]]

    def ranked(self, text_of: Callable[[int], str], least: float = -math.inf) -> dict[str, Any]:
        """vLLM's form: an object of token id to log probability, which is at `least` so much, rank and text.

        The own token is first. Its rank is null if it is not among the likeliest ones, of which the first has rank 1.
        """
        ranked = {self.id: (self.logprob, None)} | {one: (value, rank) for rank, (one, value) in enumerate(self.top, 1)}
        return {
            str(one): {"logprob": value and max(value, least), "rank": rank, "decoded_token": text_of(one)}
            for one, (value, rank) in ranked.items()
        }


class TextChunk(NamedTuple):
    """New text and its tokens; only the last chunk has an `end`.

    `tokens` are the predictor's; those behind a stop string are left out. `answer` is what `text` adds to the parts of
    the answer, where the request asks for them and the model writes calls or reasoning. `origin` is the same in every
    chunk.
    """

    text: str
    tokens: TokenChunk
    origin: Origin
    elapsed_s: float = 0.0  # Since the request arrived.
    answer: Answer | None = None
    end: End | None = None

    @property
    def parts(self) -> Sequence[Part]:
        """What the text adds; the text alone for a model without calls and reasoning."""
        if self.answer is not None:
            return self.answer.parts
        return (Content(self.text),) if self.text else ()

    @property
    def scored(self) -> list[ScoredToken]:
        """The new tokens, where their log probabilities were asked for."""
        made = self.tokens
        return list(map(ScoredToken, made.token_ids, made.logprobs, made.top_logprobs or [[]] * len(made.token_ids)))

    @property
    def scored_prompt(self) -> list[ScoredToken]:
        """The prompt's tokens, in a chunk that has their log probabilities; none in any other one."""
        scores = self.tokens.prompt
        if scores is None:
            return []
        tops = [list(zip(*top, strict=True)) for top in zip(scores.top_ids.tolist(), scores.top.tolist(), strict=True)]
        return list(map(ScoredToken, self.origin.prompt_ids, [None, *scores.chosen.tolist()], [[], *tops]))

    def without_output(self) -> "TextChunk":
        """The chunk of an answer without tokens; a predictor generates at least one."""
        tokens, end = self.tokens.part(0, 0), self.end
        if end is not None:
            usage = Usage(prompt_tokens=end.usage.prompt_tokens, cached_tokens=end.usage.cached_tokens)
            end = End("length", usage)
        return self._replace(text="", tokens=tokens, end=end)

    def without_cached_tokens(self) -> "TextChunk":
        """The chunk for a caller that must not find out which prompts other callers have sent."""
        if self.end is None:
            return self
        usage = self.end.usage
        usage = Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
        return self._replace(end=self.end._replace(usage=usage))


def joined(chunks: Sequence[TextChunk]) -> TextChunk:
    """A whole answer as one chunk."""
    last, steps = chunks[-1], [chunk.tokens for chunk in chunks]
    answer = last.answer
    return last._replace(
        text="".join(chunk.text for chunk in chunks),
        tokens=replace(
            last.tokens,
            token_ids=[token_id for step in steps for token_id in step.token_ids],
            logprobs=[logprob for step in steps for logprob in step.logprobs],
            top_logprobs=[top for step in steps for top in step.top_logprobs],
            prompt=steps[0].prompt,
        ),
        answer=answer and answer._replace(parts=merged(part for chunk in chunks for part in chunk.parts)),
    )


@dataclass(eq=False)
class Assembler:
    """Turns a predictor's chunks into text chunks; a stop string ends the answer before the predictor does.

    The token that ends an answer, one of `stop_token_ids` or of the model's `end_ids`, is among its ids; its text is in
    the answer's only with `includes_stop`. `parser` separates the answer's parts.
    """

    detokenizer: Detokenizer
    origin: Origin
    stop_token_ids: Container[int] = ()
    parser: AnswerParser | None = None
    includes_stop: bool = False
    end_ids: Container[int] = ()
    _produced: int = 0

    def take(self, tokens: TokenChunk, elapsed_s: float) -> TextChunk:
        """The text of the next tokens."""
        ids, parser, detokenizer = tokens.token_ids, self.parser, self.detokenizer
        reason, text, used, end = tokens.finish_reason, "", 0, None
        stop_token = ids[-1] if reason == "stop" and ids else None
        has_no_text = stop_token in self.stop_token_ids or stop_token in self.end_ids
        left_out = stop_token is not None and not self.includes_stop and has_no_text
        written = len(ids) - 1 if left_out else len(ids)
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
        if reason is not None and not detokenizer.stopped:
            rest = detokenizer.flush()
            text += rest
            if parser is not None:
                parser.push_rest(rest)
        if reason is not None or detokenizer.stopped:
            if parser is not None:
                parser.flush()
            end = self._end(tokens, stop_token)
        if used < len(ids):
            tokens = tokens.part(0, used)
        answer = None if parser is None else parser.taken()
        return TextChunk(text=text, tokens=tokens, origin=self.origin, elapsed_s=elapsed_s, answer=answer, end=end)

    def _end(self, tokens: TokenChunk, stop_token: int | None) -> End:
        """The end of an answer, by a stop string or by the predictor."""
        reason, usage, stop = tokens.finish_reason or "stop", tokens.usage, self.detokenizer.stop_string
        if stop is not None or usage is None:
            cached = tokens.cached_tokens or 0
            prompt_tokens = len(self.origin.prompt_ids)
            usage = Usage(prompt_tokens=prompt_tokens, cached_tokens=cached, completion_tokens=self._produced)
        if stop is not None:
            return End("stop", usage, stop)
        return End(reason, usage, stop_token if stop_token in self.stop_token_ids else None)
