"""What users send: prompts, how many tokens they request, and tensors of random values, as metadata describes inputs.

Lengths are `N`, or `N-M` for each whole number from N to M with equal probability. Prompts are the examples below, made
of as many words as a length says, or those of a file:

- JSON Lines: an object a line, with `prompt`, or `messages` as in OpenAI's API, and optionally `max_tokens`;
- ShareGPT's JSON: a list of objects with `conversations`; the first turn is the prompt, the second the answer, whose
  length (4/3 tokens a word) is the number of tokens to request.
"""

# ruff: noqa: S311  (random numbers here are not secrets)
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from headrace.oip.tensors import BF16, BYTES, DATATYPES, Tensor, dtype_of
from headrace_protos.inference_pb2 import ModelMetadataResponse
from loadtest.gateway import GatewayError

EXAMPLES = (
    "Once upon a time",
    "The little mill by the river",
    "One morning a fox",
    "Tom had a red kite, and",
    "It was raining, so the children",
    "In the garden there was",
    "The old boat",
    "Lily wanted to bake a cake because",
)
_TOKENS_A_WORD = 4 / 3
MAX_LENGTH = 1_000_000


@dataclass(frozen=True)
class Prompt:
    """`max_tokens` is None where the prompt comes without a length."""

    text: str
    max_tokens: int | None = None


@dataclass(frozen=True)
class Workload:
    """Draws prompts; without `words` or `prompts` the examples. Lengths have their bounds, and are equally likely."""

    output: tuple[int, int]
    words: tuple[int, int] | None = None
    prompts: Sequence[Prompt] = ()

    def draw_output(self) -> int:
        return random.randint(*self.output)

    def draw(self) -> tuple[str, int]:
        """A prompt and the number of tokens to request."""
        if self.prompts:
            prompt = random.choice(self.prompts)
            return prompt.text, prompt.max_tokens or self.draw_output()
        if self.words is None:
            return random.choice(EXAMPLES), self.draw_output()
        vocabulary = " ".join(EXAMPLES).split()
        return " ".join(random.choices(vocabulary, k=random.randint(*self.words))), self.draw_output()


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file; raises ValueError for one that cannot be read or has none."""
    try:
        text = path.read_text(encoding="utf-8")
        items = json.loads(text) if text.lstrip().startswith("[") else _lines(text)
        prompts = [prompt for item in items if (prompt := _prompt(item)) is not None]
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"cannot be read: {error}") from None
    if not prompts:
        raise ValueError("has no prompts; JSON Lines with `prompt`, or ShareGPT's JSON")
    return prompts


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _prompt(item: Mapping[str, Any]) -> Prompt | None:
    """None for an item without a prompt, such as a conversation that has no answer."""
    if (turns := item.get("conversations")) is not None:
        if len(turns) < 2 or not turns[0]["value"]:
            return None
        return Prompt(turns[0]["value"], max(1, round(_TOKENS_A_WORD * len(turns[1]["value"].split()))))
    text = item.get("prompt") or "\n".join(message["content"] for message in item.get("messages", ()))
    return Prompt(text, item.get("max_tokens")) if text else None


def replayed(records: Iterable[Mapping[str, Any]]) -> list[tuple[float, Prompt]]:
    """Arrivals of records as REST gives them: seconds since the oldest, prompt and the answer's length."""
    asked = [record for record in records if record.get("prompt")]
    asked.sort(key=lambda record: record["time"])
    times = [datetime.fromisoformat(record["time"]).timestamp() for record in asked]
    return [
        (at - times[0], Prompt(record["prompt"], record.get("usage", {}).get("completion_tokens")))
        for at, record in zip(times, asked, strict=True)
    ]


_TOKEN_IDS = (3, 200)  # In every vocabulary, behind the special tokens of most.


def with_inputs(model: ModelMetadataResponse, given: tuple[int, ...]) -> ModelMetadataResponse:
    """The model; one that takes any inputs gets one of INT64 and the given shape.

    Raises GatewayError for a model with an input of whose type there are no values here.
    """
    if not model.inputs:
        model.inputs.add(name="input", datatype="INT64", shape=given)
    for tensor in model.inputs:
        if tensor.datatype not in DATATYPES - {BF16}:
            raise GatewayError(
                f"input {tensor.name} of {model.name} is {tensor.datatype}: there are no random values of it"
            )
    return model


def filled(shape: Sequence[int], given: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with sizes of the given one, aligned at the end, for its open dimensions; 1 where that has none."""
    sizes = (1,) * max(0, len(shape) - len(given)) + given[max(0, len(given) - len(shape)) :]
    return tuple(own if own >= 0 else size for own, size in zip(shape, sizes, strict=True))


def filled_tensor(tensor: ModelMetadataResponse.TensorMetadata, shape: tuple[int, ...]) -> Tensor:
    """Random values; token ids where the type is one of integers, ones for a mask, zeros for token types."""
    return Tensor(tensor.name, tensor.datatype, _values(tensor, shape))


def _values(tensor: ModelMetadataResponse.TensorMetadata, shape: tuple[int, ...]) -> Any:
    dtype = dtype_of(tensor.name, tensor.datatype)
    if tensor.datatype == BYTES:
        return np.full(shape, b"word", dtype)
    if "mask" in tensor.name:
        return np.ones(shape, dtype)
    if "token_type" in tensor.name:
        return np.zeros(shape, dtype)
    random_values = np.random.default_rng(random.getrandbits(64))
    if tensor.datatype.startswith("FP"):
        return random_values.random(shape).astype(dtype)
    if tensor.datatype == "BOOL":
        return random_values.random(shape) < 0.5
    least, end = (3, 100) if tensor.datatype.endswith("INT8") else _TOKEN_IDS
    return random_values.integers(least, end, shape).astype(dtype)


def json_tensor(tensor: ModelMetadataResponse.TensorMetadata, given: tuple[int, ...]) -> dict[str, Any]:
    """A tensor of V2 REST."""
    shape = filled(tensor.shape, given)
    values = _values(tensor, shape)
    data = [item.decode() for item in values.flat] if values.dtype == object else values.reshape(-1).tolist()
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(shape), "data": data}
