"""How completions and chat completions are written, whole and in chunks, log probabilities included.

Log probabilities are of the tokens that `usage` counts, those of a stop string or a stop token among
them. `token` is the token's text, or `bytes:\\xe2\\x9c` where it is no whole character. `text_offset` counts
characters of the answer. With `echo` the prompt's tokens go before; the first of them has no log probability. One
of minus infinity, which JSON lacks, is written as -9999.
Source: OpenAI's API reference, and vLLM's answers where it is silent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from headrace_protos.headrace_pb2 import Usage
from headrace_transformer.frontends.openai.message_parts import delta_of, has_call, message_of
from headrace_transformer.frontends.openai.prompt_scores import LOWEST, prompt_logprobs
from headrace_transformer.frontends.openai.requests import Prompt
from headrace_transformer.generation.chunks import TextChunk, joined
from headrace_transformer.text.token_bytes import TokenBytes
from headrace_transformer.text.tokenizer import TextTokenizer


class Format(ABC):
    """One of the two APIs' ways; `index` is a choice's number; `scored` where the prompt's scores are wanted.

    With `returns_ids` a choice has its tokens' ids, and the answer the prompt's, as vLLM writes them.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    scored: TokenBytes | None = None
    returns_ids = False

    def whole(self, index: int, chunks: Sequence[TextChunk]) -> dict[str, Any]:
        """A whole choice."""
        return self._whole(index, joined(chunks))

    def beside(self, first: TextChunk) -> dict[str, Any]:
        """Fields of a whole answer beside its choices, by the first chunk of its first choice."""
        return {}

    def beside_first(self, chunk: TextChunk) -> dict[str, Any]:
        """Fields of an event beside its choice, by the first chunk of that choice."""
        return {}

    def _ids(self, chunk: TextChunk) -> dict[str, Any]:
        return {"token_ids": chunk.token_ids} if self.returns_ids else {}

    def _prompt_ids(self, chunk: TextChunk) -> dict[str, Any]:
        return {"prompt_token_ids": chunk.prompt_ids} if self.returns_ids else {}

    def _scores(self, chunk: TextChunk) -> dict[str, Any]:
        if self.scored is None or chunk.prompt is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(chunk.prompt, self.scored)}

    @abstractmethod
    def _whole(self, index: int, chunk: TextChunk) -> dict[str, Any]: ...

    @abstractmethod
    def chunk(self, index: int, chunk: TextChunk, is_first: bool) -> dict[str, Any]:
        """A choice's next piece."""


class CompletionFormat(Format):
    """Text after text, the prompt before it where `echoes` has it; `tokens` where log probabilities are wanted."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, echoes: Echoes | None = None, tokens: TokenBytes | None = None) -> None:
        self._echoes = echoes
        self._tokens = tokens
        self._lengths: dict[int, int] = {}  # Characters of a choice so far.

    def _whole(self, index: int, chunk: TextChunk) -> dict[str, Any]:
        return self.chunk(index, chunk, True) | self._scores(chunk)

    def chunk(self, index: int, chunk: TextChunk, is_first: bool) -> dict[str, Any]:
        echo = self._echoes.of(index) if self._echoes is not None and is_first else ""
        logprobs = None if self._tokens is None else self._logprobs(self._tokens, index, chunk)
        prompt_ids = self._prompt_ids(chunk) if is_first else {}
        ids = self._ids(chunk)
        return {"index": index, "text": echo + chunk.text, "logprobs": logprobs, **_end(chunk), **prompt_ids, **ids}

    def _logprobs(self, tokens: TokenBytes, index: int, chunk: TextChunk) -> dict[str, Any]:
        ids: list[int] = []
        values: list[float | None] = []
        tops: list[Sequence[tuple[int, float]]] = []
        if chunk.prompt is not None and self._echoes is not None:
            found = chunk.prompt.logprobs
            ids += chunk.prompt.ids
            values += [None, *found.chosen.tolist()]
            likeliest = zip(found.top_ids.tolist(), found.top.tolist(), strict=True)
            tops += [(), *(list(zip(*place, strict=True)) for place in likeliest)]
        prompt_tokens = len(ids)
        ids += chunk.token_ids
        values += chunk.logprobs
        tops += chunk.top_logprobs or [()] * len(chunk.token_ids)
        pieces = list(map(tokens.of, ids))
        offsets, length = [], self._lengths.get(index, 0)
        for number, (token_id, piece) in enumerate(zip(ids, pieces, strict=True)):
            offsets.append(length)
            if number >= prompt_tokens or not self._skips(token_id):
                length += sum(byte & 0xC0 != 0x80 for byte in piece)  # Bytes that begin a character of UTF-8.
        self._lengths[index] = length
        texts = list(map(_text, pieces))
        return {
            "tokens": texts,
            "token_logprobs": [None if value is None else _finite(value) for value in values],
            # The token itself is always among them.
            "top_logprobs": [
                None
                if value is None
                else {_text(tokens.of(other)): _finite(logprob) for other, logprob in top} | {text: _finite(value)}
                for top, text, value in zip(tops, texts, values, strict=True)
            ],
            "text_offset": offsets,
        }

    def _skips(self, token_id: int) -> bool:
        """Whether a token of the prompt is no part of the text that is echoed."""
        return self._echoes is not None and self._echoes.skips(token_id)


class ChatFormat(Format):
    """Messages of the assistant; `tokens` where log probabilities are wanted.

    `has_functions`: a call is written as OpenAI's older `function_call`.
    """

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokens: TokenBytes | None = None, has_functions: bool = False) -> None:
        self._tokens = tokens
        self._has_functions = has_functions
        self._calling: set[int] = set()  # Choices that have a call.

    def _whole(self, index: int, chunk: TextChunk) -> dict[str, Any]:
        message = {"content": chunk.text} if chunk.parts is None else self._with_call(message_of(chunk.parts))
        fields: dict[str, Any] = {"role": "assistant", "refusal": None, "annotations": []}
        return self._choice(index, chunk) | {"message": fields | message}

    def beside(self, first: TextChunk) -> dict[str, Any]:
        return self._scores(first) | self._prompt_ids(first)

    def beside_first(self, chunk: TextChunk) -> dict[str, Any]:
        return self._prompt_ids(chunk)

    def chunk(self, index: int, chunk: TextChunk, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant", "content": ""} if is_first else {}
        delta = {"content": chunk.text} if chunk.parts is None else self._with_call(delta_of(chunk.parts))
        return self._choice(index, chunk) | {"delta": role | delta}

    def _with_call(self, fields: dict[str, Any]) -> dict[str, Any]:
        if self._has_functions and (calls := fields.pop("tool_calls", None)):
            fields["function_call"] = calls[0]["function"]  # There is no other.
        return fields

    def _choice(self, index: int, chunk: TextChunk) -> dict[str, Any]:
        logprobs = None
        if self._tokens is not None:
            logprobs = {"content": token_scores(self._tokens, chunk), "refusal": None}
        if chunk.parts and has_call(chunk.parts):
            self._calling.add(index)
        end = _end(chunk)
        if end["finish_reason"] == "stop" and index in self._calling:
            end["finish_reason"] = "function_call" if self._has_functions else "tool_calls"
        return {"index": index, "logprobs": logprobs, **end, **self._ids(chunk)}


class Echoes:
    """The prompts as they are put before their choices, `n` of each."""

    def __init__(self, prompts: Sequence[Prompt], n: int, tokenizer: TextTokenizer) -> None:
        self._prompts = prompts
        self._n = n
        self._tokenizer = tokenizer

    def of(self, index: int) -> str:
        """The text before choice `index`."""
        prompt = self._prompts[index // self._n]
        if isinstance(prompt, str):
            return prompt
        text: str = self._tokenizer.backend.decode(prompt, skip_special_tokens=True)
        return text

    def skips(self, token_id: int) -> bool:
        """Whether the id has no part in an echoed prompt: the tokenizer's own, such as what begins a text."""
        return self._tokenizer.decoder.skips(token_id)


def token_scores(tokens: TokenBytes, chunk: TextChunk) -> list[dict[str, Any]]:
    """The log probabilities of a chunk's tokens, and of the likeliest ones in their places."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokens.of(token_id)
        return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(data)}

    tops = chunk.top_logprobs or [[] for _ in chunk.token_ids]
    return [
        entry(token_id, logprob) | {"top_logprobs": [entry(*other) for other in top]}
        for token_id, logprob, top in zip(chunk.token_ids, chunk.logprobs, tops, strict=True)
    ]


def _end(chunk: TextChunk) -> dict[str, Any]:
    """Why the answer ended; `stop_reason` is vLLM's: the stop string or the stop token's id."""
    return {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}


def usage_of(usages: Sequence[Usage], n: int) -> dict[str, Any]:
    """What all choices took together; a prompt counts once for all `n` of its choices."""
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages[::n])},
    }


def reasoning_usage(tokens: Iterable[int | None]) -> dict[str, Any]:
    """The tokens of reasoning in all choices; nothing for a model without."""
    counts = [count for count in tokens if count is not None]
    return {"completion_tokens_details": {"reasoning_tokens": sum(counts)}} if counts else {}


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """What one choice has taken until now, as vLLM writes it."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
