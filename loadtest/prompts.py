"""What users send: prompts, and how many tokens they request.

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
