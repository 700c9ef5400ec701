"""How completions and chat completions are written, whole and in chunks, log probabilities included.

Log probabilities are of the tokens that `usage` counts, those of a stop string or a stop token among
them. `text_offset` counts characters of the answer. With `echo` the prompt's tokens go before; the first of them has
no log probability. A token's name is its text, or `bytes:\\xe2\\x9c` where it is no whole character. A log probability
of minus infinity, which JSON lacks, is written as -9999. Source: OpenAI's API reference, and vLLM's answers where it is
silent.

Reasoning has two names: `reasoning`, vLLM's, and `reasoning_content`, which DeepSeek's API has and vLLM had before.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from headrace_protos.headrace_pb2 import Usage
from headrace_transformer.frontends.openai.generation_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from headrace_transformer.generation.chunks import TextChunk
from headrace_transformer.text.answer_parts import CallArguments, CallStart, Content, Part, Reasoning

_LOWEST = -9999.0


def token_scores(chunk: TextChunk, as_ids: bool = False) -> list[dict[str, Any]]:
    """The log probabilities of a chunk's tokens, and of the likeliest ones there; `as_ids` as in `token_name`."""
    written = chunk.origin.model.tokenizer.token_bytes

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = written.of(token_id)
        return {"token": token_name(token_id, data, as_ids), "logprob": finite(logprob), "bytes": list(data)}

    return [
        entry(token_id, logprob) | {"top_logprobs": [entry(*other) for other in top]}
        for token_id, logprob, top in chunk.scored
    ]


def prompt_scores(chunk: TextChunk) -> list[dict[str, Any] | None] | None:
    """vLLM's scores of a prompt: for each of its tokens but the first an object, see `ScoredToken.ranked`.

    None for a chunk without them.
    """
    tokens = chunk.origin.model.tokenizer.token_bytes

    def text_of(token_id: int) -> str:
        return tokens.of(token_id).decode(errors="replace")

    return [None, *(one.ranked(text_of, _LOWEST) for one in scored[1:])] if (scored := chunk.scored_prompt) else None


def token_name(token_id: int, data: bytes, as_id: bool) -> str:
    """A token's text, or vLLM's way of naming it by its id."""
    if as_id:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float | None) -> float | None:
    return logprob and max(logprob, _LOWEST)


class Format(ABC):
    """One of the two APIs' ways of writing the choices of a request; `index` is a choice's number."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, request: GenerationRequest) -> None:
        self._returns_ids = request.return_token_ids
        self._names_ids = request.return_tokens_as_token_ids
        self._scores_prompt = request.prompt_logprobs is not None

    def size(self, chunk: TextChunk, is_first: bool) -> int:
        """The log probabilities that a chunk is written with; a choice's first one has the prompt's."""
        scores, tops = chunk.tokens.prompt, chunk.tokens.top_logprobs
        own = len(chunk.tokens.logprobs) * (1 + (len(tops[0]) if tops else 0))
        return own if scores is None else own + scores.chosen.size + scores.top.size

    @abstractmethod
    def whole(self, index: int, chunk: TextChunk) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def chunk(self, index: int, chunk: TextChunk, is_first: bool) -> dict[str, Any]:
        """A choice's next piece."""

    def beside(self, first: TextChunk) -> dict[str, Any]:
        """Fields beside a choice, by its first chunk."""
        return {}

    def before_end(self, choice: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """A streamed choice that ends as two, the second of which is the end alone."""
        begun = choice | {"finish_reason": None, "stop_reason": None}
        ids: dict[str, Any] = {"token_ids": []} if self._returns_ids else {}
        return begun, choice | {"delta": {}, "logprobs": None} | ids

    def _prompt_ids(self, chunk: TextChunk) -> dict[str, Any]:
        return {"prompt_token_ids": chunk.origin.prompt_ids} if self._returns_ids else {}

    def _prompt_scores(self, chunk: TextChunk) -> dict[str, Any]:
        scores = prompt_scores(chunk) if self._scores_prompt else None
        return {} if scores is None else {"prompt_logprobs": scores}

    def _end(self, chunk: TextChunk) -> dict[str, Any]:
        """Why the choice ended, and the ids of its tokens as vLLM writes them: `stop_reason` is what stopped it."""
        reason, stop = (None, None) if chunk.end is None else (chunk.end.reason, chunk.end.stop)
        ids = {"token_ids": chunk.tokens.token_ids} if self._returns_ids else {}
        return {"finish_reason": reason, "stop_reason": stop, **ids}


class CompletionFormat(Format):
    """Text after text, the prompt before it where the request wants an echo."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request)
        self._echoed = request.prompt if request.echo else []
        self._n = request.n
        self._writes_special = not request.skip_special_tokens
        self._has_scores = request.logprobs is not None
        self._lengths: dict[int, int] = {}  # Characters of a choice so far.
        self._echoes: dict[int, str] = {}  # Of prompts of ids, by number.

    def size(self, chunk: TextChunk, is_first: bool) -> int:
        """The echoed ids too."""
        return super().size(chunk, is_first) + (len(chunk.origin.prompt_ids) if self._echoed and is_first else 0)

    def whole(self, index: int, chunk: TextChunk) -> dict[str, Any]:
        return self.chunk(index, chunk, True) | self._prompt_scores(chunk)

    def chunk(self, index: int, chunk: TextChunk, is_first: bool) -> dict[str, Any]:
        echo = self._echo(index, chunk) if self._echoed and is_first else ""
        logprobs = self._logprobs(index, chunk) if self._has_scores else None
        prompt_ids = self._prompt_ids(chunk) if is_first else {}
        return {"index": index, "text": echo + chunk.text, "logprobs": logprobs, **self._end(chunk), **prompt_ids}

    def _echo(self, index: int, chunk: TextChunk) -> str:
        """The prompt, as it is put before choice `index`."""
        number = index // self._n
        prompt = self._echoed[number]
        if isinstance(prompt, str):
            return prompt
        if number not in self._echoes:
            tokenizer = chunk.origin.model.tokenizer
            self._echoes[number] = tokenizer.backend.decode(prompt, skip_special_tokens=True)
        return self._echoes[number]

    def _logprobs(self, index: int, chunk: TextChunk) -> dict[str, Any]:
        tokenizer, names_ids = chunk.origin.model.tokenizer, self._names_ids
        prompt = chunk.scored_prompt if self._echoed else []
        echo, scored = self._echo(index, chunk) if prompt else "", [*prompt, *chunk.scored]
        written = tokenizer.token_bytes
        pieces = [written.of(one.id) for one in scored]
        offsets, length = [], self._lengths.get(index, 0)
        for number, (one, piece) in enumerate(zip(scored, pieces, strict=True)):
            offsets.append(length)
            # In an echo a special token is part of the caller's text, or the tokenizer's own, such as the first one.
            special = tokenizer.decoder.special_texts.get(one.id)
            has_text = echo.startswith(special or "", length) if number < len(prompt) else self._writes_special
            if special is None or has_text:
                length += sum(byte & 0xC0 != 0x80 for byte in piece)  # Bytes that begin a character of UTF-8.
                # Decoders of SentencePiece leave out the space of a text's first word.
                length -= number < len(prompt) and piece[:1] == b" " and _lacks_space(echo, offsets[-1], piece)
        self._lengths[index] = length
        texts = [token_name(one.id, piece, names_ids) for one, piece in zip(scored, pieces, strict=True)]
        return {
            "tokens": texts,
            "token_logprobs": [finite(one.logprob) for one in scored],
            # The token itself is always among them.
            "top_logprobs": [
                None
                if one.logprob is None
                else {token_name(other, written.of(other), names_ids): finite(logprob) for other, logprob in one.top}
                | {text: finite(one.logprob)}
                for one, text in zip(scored, texts, strict=True)
            ],
            "text_offset": offsets,
        }


def _lacks_space(text: str, start: int, piece: bytes) -> bool:
    """Whether a text has, from a place on, a piece without its space."""
    written = piece.decode(errors="replace")
    return text.startswith(written[1:], start) and not text.startswith(written, start)


class ChatFormat(Format):
    """Messages of the assistant; a call is an older `function_call` where the request has the older `functions`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatCompletionRequest) -> None:
        super().__init__(request)
        self._has_scores = request.logprobs
        self._has_functions = bool(request.functions)
        self._calling: set[int] = set()  # Choices that have a call.

    def whole(self, index: int, chunk: TextChunk) -> dict[str, Any]:
        message = {"content": chunk.text} if chunk.answer is None else self._with_call(message_of(chunk.parts))
        fields: dict[str, Any] = {"role": "assistant", "refusal": None, "annotations": []}
        return self._choice(index, chunk) | {"message": fields | message}

    def beside(self, first: TextChunk) -> dict[str, Any]:
        return self._prompt_scores(first) | self._prompt_ids(first)

    def chunk(self, index: int, chunk: TextChunk, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant", "content": ""} if is_first else {}
        delta = {"content": chunk.text} if chunk.answer is None else self._with_call(delta_of(chunk.parts))
        return self._choice(index, chunk) | {"delta": role | delta}

    def _with_call(self, fields: dict[str, Any]) -> dict[str, Any]:
        if self._has_functions and (calls := fields.pop("tool_calls", None)):
            fields["function_call"] = calls[0]["function"]  # There is no other.
        return fields

    def _choice(self, index: int, chunk: TextChunk) -> dict[str, Any]:
        logprobs = {"content": token_scores(chunk, self._names_ids), "refusal": None} if self._has_scores else None
        if chunk.answer is not None and has_call(chunk.parts):
            self._calling.add(index)
        end = self._end(chunk)
        if end["finish_reason"] == "stop" and index in self._calling:
            end["finish_reason"] = "function_call" if self._has_functions else "tool_calls"
        return {"index": index, "logprobs": logprobs, **end}


def usage_of(ends: Sequence[TextChunk], n: int) -> dict[str, Any]:
    """What all choices took together, by their last chunks; a prompt counts once for all `n` of its choices."""
    usages = [Usage() if chunk.end is None else chunk.end.usage for chunk in ends]
    reasoning = [chunk.answer.reasoning_tokens for chunk in ends if chunk.answer is not None]
    counted = [count for count in reasoning if count is not None]
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages[::n])},
        **({"completion_tokens_details": {"reasoning_tokens": sum(counted)}} if counted else {}),
    }


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """A whole message, without its role; the content is null if there is none beside calls or reasoning."""
    delta = delta_of(parts)
    has_others = bool(delta.keys() - {"content"})
    calls = delta.pop("tool_calls", None)
    message: dict[str, Any] = {"content": delta.pop("content", None if has_others else ""), **delta}
    if calls is not None:
        message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    return message


def delta_of(parts: Sequence[Part]) -> dict[str, Any]:
    """A delta, without the role; a call has its id, type and name in its first one."""
    delta: dict[str, Any] = {}
    if content := "".join(part.text for part in parts if isinstance(part, Content)):
        delta["content"] = content
    if reasoning := "".join(part.text for part in parts if isinstance(part, Reasoning)):
        delta |= {"reasoning": reasoning, "reasoning_content": reasoning}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            calls[part.number] = {"index": part.number, "id": part.id, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            call = calls.setdefault(part.number, {"index": part.number, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def has_call(parts: Sequence[Part]) -> bool:
    return any(isinstance(part, CallStart) for part in parts)
