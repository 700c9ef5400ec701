"""The record of one generation: its prompt and parameters, and every chunk of its answer.

A prompt far beyond any context is cut off, and parameters, which are not checked yet, are shortened.
"""

import json
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import orjson

from headrace.payload.call import recorded
from headrace.payload.recording import Recording
from headrace.payload.tap import PayloadTap
from headrace.sampling import MAX_STOP_TOKEN_IDS
from headrace_transformer.generation.chunks import TextChunk
from headrace_transformer.generation.preparation import Prepared
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.predictors import worse

MAX_RECORDED_CHARACTERS = 1024 * 1024
_MAX_IDS = 128 * 1024
# Of the sampling parameters: how many, and the characters of a name and of a value.
_MAX_NAMES, _MAX_NAME, _MAX_VALUE = 64, 256, 4096


@contextmanager
def recorded_generation(request: TextRequest, tap: PayloadTap) -> Iterator[Recording]:
    """Records the generation that the block makes, and how it ends.

    Raises InvalidRequestError for a request that no model would take; its record has neither prompt nor parameters.
    """
    prompt, parameters = recorded_texts(request) if request.refusal is None else ("", "")
    with recorded(tap, request.call, request.model, prompt=prompt, parameters=parameters) as recording:
        if request.refusal is not None:
            raise request.refusal
        recording.engine_s = 0.0  # For a generation that ends before its first token.
        yield recording


def record_begun(recording: Recording, served: str, prompt_kind: str, prepared: Prepared) -> None:
    """Records what it takes to repeat the generation, and the model that a route chose."""
    recording.served_model = served
    recording.prompt_ids, recording.prompt_kind = prepared.origin.prompt_ids, prompt_kind
    # The salt decides what the cache shares, and not the answer.
    recording.sampling = prepared.sampling.model_dump_json(exclude_defaults=True, exclude={"cache_salt"})


def record_chunk(recording: Recording, chunk: TextChunk, counts_prompt: bool) -> None:
    """Adds a chunk, before it goes to the client. The tokens of a prompt that records share count in one of them."""
    tokens = chunk.tokens
    if tokens.resumed:
        recording.resumes += 1
    if tokens.continuity:
        recording.continuity = worse(recording.continuity, tokens.continuity)
    if tokens.predictor:
        recording.answered_by(tokens.predictor)
    recording.fingerprint = tokens.fingerprint
    recording.prompt_tokens = len(chunk.origin.prompt_ids) if counts_prompt else 0
    recording.engine_s = tokens.engine_s
    recording.chunk(chunk.text, tokens.token_ids, tokens.logprobs)
    if chunk.end is not None:
        usage = chunk.end.usage if counts_prompt else None  # Without one it is what was counted.
        recording.end("OK", finish_reason=chunk.end.reason, usage=usage)


def recorded_texts(request: TextRequest) -> tuple[str, str]:
    """The prompt and the parameters as records keep them, made once for all choices but for the seed."""
    shared = request.shared
    if shared.recorded is None:
        shared.recorded = _recorded_prompt(request), _recorded_parameters(request)
    prompt, parameters = shared.recorded
    if (seed := request.sampling.get("seed")) is not None:
        parameters = {"seed": _brief(seed)} | parameters
    return prompt, json.dumps(parameters, ensure_ascii=False, default=str) if parameters else ""


def _recorded_prompt(request: TextRequest) -> str:
    """The prompt, or its ids or the messages as JSON."""
    if request.prompt is not None:
        return _cut(request.prompt)
    if request.prompt_ids is not None:
        return _ids_text(request.prompt_ids[:_MAX_IDS])
    texts = iter(_cut_together([text for message in request.messages for text in message]))
    return json.dumps([_recorded_message(message, texts) for message in request.messages], ensure_ascii=False)


def _recorded_message(message: Sequence[str], texts: Iterator[str]) -> dict[str, Any]:
    """A message with the next of the texts that were cut; further fields that were cut stay text."""
    role, content, *fields = (next(texts) for _ in message)
    recorded: dict[str, Any] = {"role": role, "content": content}
    for text, whole in zip(fields, message[2:], strict=True):
        recorded |= json.loads(text) if text == whole else {"fields": text}
    return recorded


def recorded_list(prompts: Sequence[str | Sequence[int]]) -> str:
    """Several prompts as a JSON list, also if prompts are cut off, because redaction rules parse it."""
    texts = iter(_cut_together([prompt for prompt in prompts if isinstance(prompt, str)]))
    left = _MAX_IDS
    kept: list[str] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            kept.append(json.dumps(next(texts), ensure_ascii=False))
        else:
            kept.append(_ids_text(prompt[:left]))
            left -= min(left, len(prompt))
    return f"[{', '.join(kept)}]"


def _ids_text(ids: Sequence[int]) -> str:
    values = ids if isinstance(ids, list) else np.asarray(ids)
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def _cut_together(texts: Sequence[str]) -> list[str]:
    """The texts, cut where all of them together become too long."""
    cut, left = [], MAX_RECORDED_CHARACTERS
    for text in texts:
        cut.append(_cut(text, left))
        left = max(0, left - len(text))
    return cut


def _cut(text: str, limit: int = MAX_RECORDED_CHARACTERS) -> str:
    beyond = len(text) - limit
    return text if beyond <= 0 else f"{text[:limit]}… ({beyond} characters more)"


def _recorded_parameters(request: TextRequest) -> dict[str, Any]:
    """The parameters without the seed."""
    given = {name[:_MAX_NAME]: _brief(value) for name, value in islice(request.sampling.items(), _MAX_NAMES)}
    given.pop("seed", None)
    given.pop("cache_salt", None)  # Knowing it would reveal which prompts share a prefix with its owner's.
    given |= {asked.name: value for asked, value in request.asked.ListFields()}
    optional: dict[str, Any] = {
        "max_tokens": 0 if request.prompt_only else None,
        "stop": list(request.stop) or None,
        "bad_words": list(request.bad_words) or None,
        "include_stop_str_in_output": request.include_stop_str_in_output or None,
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
        "skip_special_tokens": None if request.skip_special_tokens else False,
        "add_special_tokens": None if request.add_special_tokens else False,
        "chat_template_kwargs": dict(request.template_options) or None,
        "resumes_after": request.resume and request.resume.tokens,
        "ignored_fields": list(request.ignored_fields) or None,
    }
    if request.tools is not None:
        optional["tools"] = json.loads(request.tools.definitions)
        optional["tool_choice"] = "required" if request.tools.is_required else "auto"
        optional["parallel_tool_calls"] = request.tools.is_parallel
    given |= {name: value for name, value in optional.items() if value is not None}
    return given | dict(request.further_parameters)


def _brief(value: Any) -> Any:
    if isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= _MAX_VALUE):
        return value
    is_list = isinstance(value, (list, tuple)) and len(value) <= MAX_STOP_TOKEN_IDS
    return value if is_list and all(isinstance(item, (int, float)) for item in value) else reprlib.repr(value)
