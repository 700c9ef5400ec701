"""Sampling: the table of its parameters, their limits and their defaults.

Every front end (gRPC, OIP, OpenAI) and the predictor read requests through `SamplingParameters`, so a parameter has the
same meaning and the same errors everywhere. `may_end`, `end_ids` and `finish_reason` decide where a sequence ends, for
the sampler and for the engine.
"""

import reprlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import from_json

from headrace.errors import ContextLengthError, InvalidRequestError
from headrace.structured_outputs import Form, read_structured_outputs

DEFAULT_MAX_TOKENS = 256
GREEDY_BELOW = 1e-5  # A temperature that divides logits beyond what a float holds.
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20  # OpenAI's limit.
MAX_CACHE_SALT = 256
MAX_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_SEQUENCES = 128
MAX_BAD_TOKENS = 4096  # Of all sequences together.
SLOWEST_PACE = 5
LENGTHS = ("max_new_tokens", "max_length")
# The names that configurations have for the context's length: transformers' own, those of MPT, of BLOOM, of old files.
CONTEXT_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
    "max_decoder_position_embeddings",
)
# The parameters that change the logits of single tokens.
RESTRICTIONS = ("logit_bias", "allowed_token_ids", "bad_token_ids")

_MAX_LIST_TEXT = 2048  # Characters; MAX_STOP_TOKEN_IDS of any vocabulary's ids are shorter.
_MAX_JSON_TEXT = 64 * 1024

CHECKED = {"checked": True}  # Pydantic's context for parameters that are a dump of others.

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True)
class ContextLimits:
    """How many tokens a model holds; of an answer without max_tokens, what the model's generation config says."""

    context_length: int
    is_encoder_decoder: bool
    max_new_tokens: int | None = field(default=None, kw_only=True)
    max_length: int | None = field(default=None, kw_only=True)  # With the prompt, or the decoder's start token.

    def with_defaults(self, stated: Mapping[str, Any]) -> Self:
        """With what a generation config, or a model's description, states of the last two."""
        lengths = {name: int(stated[name]) for name in LENGTHS if stated.get(name)}
        return replace(self, max_new_tokens=lengths.get(LENGTHS[0]), max_length=lengths.get(LENGTHS[1]))

    def room(self, prompt_tokens: int) -> int:
        """Tokens that the context has left for output after a prompt."""
        # An encoder-decoder model has separate limits for its prompt and its output.
        return self.context_length if self.is_encoder_decoder else self.context_length - prompt_tokens

    def default_tokens(self, prompt_tokens: int) -> int:
        """`max_tokens` of a request that has none."""
        if self.max_new_tokens is not None or self.max_length is None:
            return self.max_new_tokens or DEFAULT_MAX_TOKENS
        if self.is_encoder_decoder:
            return max(1, self.max_length - 1)
        return min(DEFAULT_MAX_TOKENS, max(1, self.max_length - prompt_tokens))


class SamplingParameters(BaseModel):
    """The sampling parameters of a request; numbers and lists of numbers may be text: some clients send only text."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: int | None = Field(None, ge=1, description="Tokens at most; 256, or what the context has left if less.")
    min_tokens: int = Field(0, ge=0, description="The answer cannot end before this number of tokens.")
    temperature: float = Field(
        1.0, ge=0, le=2, description="Below 1e-5 greedy; 0 by default for encoder-decoder models."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Smallest set of tokens with this probability.")
    top_k: int = Field(0, ge=-1, description="The k likeliest tokens; 0 and -1 are off.")
    min_p: float = Field(0.0, ge=0, le=1, description="Tokens at least this likely, relative to the likeliest.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="Random where absent.")
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, description="Of tokens in prompt or output; 1 is off.")
    presence_penalty: float = Field(0.0, ge=-100, le=100, description="Of tokens in the output; 0 is off.")
    frequency_penalty: float = Field(0.0, ge=-100, le=100, description="Of tokens in the output, times their count.")
    ignore_eos: bool = Field(False, description="Continues after the end-of-sequence token.")
    stop_token_ids: tuple[TokenId, ...] = Field(
        (), max_length=MAX_STOP_TOKEN_IDS, description="Each ends the output, as its last id and without its text."
    )
    structured_outputs: str = Field(
        "", description="The form of the answer: one of json, json_object, regex, choice, grammar."
    )
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field(
        {}, max_length=MAX_BIASES, description="Token id to a number that is added to its logit, from -100 to 100."
    )
    allowed_token_ids: tuple[TokenId, ...] = Field(
        (), max_length=MAX_ALLOWED_TOKEN_IDS, description="If there are any, no other token is generated."
    )
    bad_token_ids: tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...] = Field(
        (), max_length=MAX_BAD_SEQUENCES, description="Sequences of token ids that the output does not contain."
    )
    logprobs: bool = Field(False, description="Reports each token's log probability.")
    top_logprobs: int = Field(
        0, ge=0, le=MAX_TOP_LOGPROBS, description="Reports so many of the likeliest tokens too; needs logprobs."
    )
    cache_salt: str = Field(
        "", max_length=MAX_CACHE_SALT, description="Cached prefixes are shared only with requests of the same salt."
    )
    hedge: int = Field(
        1, ge=1, le=2, description="2: two predictors compute the answer at once, and the crash of one causes no pause."
    )
    priority: int = Field(
        0, ge=-(2**31), lt=2**31, description="Of a client's own waiting requests, the lowest is the first to start."
    )
    pace: float = Field(0.0, ge=0, le=10_000, description="Maximum of tokens a second, 5 or more; 0: no limit.")
    chunk_tokens: int = Field(1, ge=1, le=4096, description="Minimum of tokens in a message, except the last one.")
    chunk_ms: int = Field(
        0, ge=0, le=600_000, description="Maximum of milliseconds that a message waits for chunk_tokens; 0: no limit."
    )

    @field_validator("pace")
    @classmethod
    def _refuse_standstill(cls, value: float) -> float:
        if 0 < value < SLOWEST_PACE:
            raise ValueError(f"{SLOWEST_PACE} or more is needed: a running sequence holds its place")
        return value

    @field_validator("stop_token_ids", "allowed_token_ids", mode="before")
    @classmethod
    def _split(cls, value: Any, info: ValidationInfo) -> Any:
        """A list, or its text, with or without brackets."""
        longest = _MAX_LIST_TEXT if info.field_name == "stop_token_ids" else _MAX_JSON_TEXT
        if isinstance(value, str) and len(value) <= longest:
            text = value.strip()
            text = text[1:-1].strip() if text.startswith("[") and text.endswith("]") else text
            return text.split(",") if text else ()
        if not isinstance(value, (list, tuple)) or any(isinstance(item, bool) for item in value[:MAX_BIASES]):
            raise ValueError("a list of token ids is needed")
        return value

    @field_validator("structured_outputs", mode="plain")  # Pydantic's own would make a str of a Form.
    @classmethod
    def _read_structured_outputs(cls, value: Any, info: ValidationInfo) -> Form:
        return Form(value) if info.context is CHECKED else read_structured_outputs(value)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _read_biases(cls, value: Any) -> Any:
        """An object, or its JSON text."""
        value = _from_text(value)
        if not isinstance(value, dict) or True in map(_is_bool, islice(value.values(), MAX_BIASES)):
            raise ValueError("an object of token ids and numbers is needed")
        return value

    @field_validator("bad_token_ids", mode="before")
    @classmethod
    def _read_sequences(cls, value: Any) -> Any:
        """Lists of token ids, or their JSON text."""
        value = _from_text(value)
        is_list = isinstance(value, (list, tuple)) and all(
            isinstance(item, (list, tuple)) for item in value[: MAX_BAD_SEQUENCES + 1]
        )
        if not is_list or any(True in map(_is_bool, item[:MAX_BAD_TOKENS]) for item in value[:MAX_BAD_SEQUENCES]):
            raise ValueError("a list of lists of token ids is needed")
        if sum(map(len, value[:MAX_BAD_SEQUENCES])) > MAX_BAD_TOKENS:
            raise ValueError(f"at most {MAX_BAD_TOKENS} token ids together are allowed")
        return value

    def changed(self, given: Mapping[str, Any]) -> "SamplingParameters":
        """These parameters with those that a request gives; raises InvalidRequestError."""
        for name, value in given.items():
            if (value is True or value is False) and name in _NUMBERS:  # To pydantic they are 1 and 0.
                raise InvalidRequestError(f"{name}={value}: a number is needed", param=name)
        try:
            own = self.model_dump(exclude_unset=True)
            changed = SamplingParameters.model_validate({**own, **given})
            if "min_tokens" in own and "min_tokens" not in given and given.get("max_tokens") is not None:
                least = min(changed.min_tokens, changed.max_tokens or 0)  # A default does not contradict a request.
                changed = changed.model_copy(update={"min_tokens": least})
            return changed
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else "parameters"
            if first["type"] == "extra_forbidden":
                raise InvalidRequestError(f"unknown parameter {name!r}", param=name) from None
            raise InvalidRequestError(
                f"{name}={reprlib.repr(first['input'])}: {first['msg'].removeprefix('Value error, ')}", param=name
            ) from None

    def resolved(
        self, room: int, default_max_tokens: int = DEFAULT_MAX_TOKENS, default_seed: int | None = None
    ) -> "SamplingParameters":
        """With a seed, if there is none `default_seed` or a random one, and `max_tokens` within the `room` that the
        context has left for output."""
        if room < 1:
            raise ContextLengthError("the prompt fills the context: no room is left for output")
        if self.max_tokens is not None and self.max_tokens > room:
            raise ContextLengthError(
                f"max_tokens={self.max_tokens}: the context has room for {room} after the prompt", param="max_tokens"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}", param="min_tokens"
            )
        max_tokens = self.max_tokens or min(max(default_max_tokens, self.min_tokens), room)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(f"top_logprobs={self.top_logprobs} needs logprobs", param="top_logprobs")
        seed = default_seed if self.seed is None else self.seed
        if seed is None:
            seed = secrets.randbits(63)
        least = min(self.min_tokens, max_tokens)
        return self.model_copy(update={"max_tokens": max_tokens, "min_tokens": least, "seed": seed})

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_filtered(self) -> bool:
        """Whether a token is drawn from a part of the vocabulary."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def is_plain(self) -> bool:
        """Whether a token depends on the model's own logits, seed and position alone, and only the token is wanted."""
        has_penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        is_free = not (self.has_restrictions or self.structured_outputs or self.min_tokens)
        return is_free and not (has_penalties or self.logprobs)

    @property
    def takes_likeliest(self) -> bool:
        """Whether each token is the likeliest of the model's own logits, and nothing else is wanted of these."""
        return self.is_greedy and self.is_plain

    @property
    def has_restrictions(self) -> bool:
        """Whether the request changes the logits of some tokens."""
        return any(getattr(self, name) for name in RESTRICTIONS)

    def may_end(self, produced: int) -> bool:
        """Whether the token after `produced` ones may be one of `end_ids`."""
        return produced >= self.min_tokens

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end a sequence that may end; `eos_ids` are the model's own."""
        return frozenset(self.stop_token_ids) if self.ignore_eos else eos_ids.union(self.stop_token_ids)

    def finish_reason(self, token_id: int, produced: int, end_ids: frozenset[int]) -> str | None:
        """Why a sequence with these `end_ids` ends with `token_id`, if it does, after `produced` tokens before it."""
        if token_id in end_ids and self.may_end(produced):
            return "stop"
        return "length" if produced + 1 >= (self.max_tokens or 0) else None


def _from_text(value: Any) -> Any:
    """A value, or what its JSON text has; a text that is no JSON stays."""
    if not isinstance(value, str) or len(value) > _MAX_JSON_TEXT:
        return value
    try:
        return from_json(value)
    except ValueError:
        return value


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


_NUMBERS = frozenset(
    name for name, field in SamplingParameters.model_fields.items() if field.annotation not in (bool, str)
)


def end_ids_of(eos_token_id: int | Iterable[int] | None) -> frozenset[int]:
    """A model's end tokens, of which its generation config names one, several or none."""
    if eos_token_id is None:
        return frozenset()
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)


def defaults_of(generation: Mapping[str, Any], is_encoder_decoder: bool) -> SamplingParameters:
    """A model's defaults: what its generation config says, see headrace/models/generation_config.py, or the table's."""
    names = ["repetition_penalty"]
    samples = generation.get("do_sample")
    if samples or (samples is None and not is_encoder_decoder):
        names += ["temperature", "top_p", "top_k", "min_p"]
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    if len(names) == 1:
        given["temperature"] = 0.0
    least = generation.get("min_new_tokens")
    if least is None and is_encoder_decoder:
        least = (generation.get("min_length") or 0) - 1  # The decoder's start token counts there.
    return SamplingParameters().changed(given | ({"min_tokens": least} if least and least > 0 else {}))
