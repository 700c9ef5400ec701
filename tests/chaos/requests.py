"""Requests with one right answer each, generated from a seed and a number alone.

A `Story` is a generation whose text never changes: greedy, or sampled with a seed. A `Request` is a story
or something else, the way into the stack, and the behaviour of its caller.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

TEXT_MODEL, DATE_MODEL, TENSOR_MODEL, VECTOR_MODEL = "storyteller", "normalizer", "identity", "embedder"

_PROMPTS = (
    "Once upon a time",
    "The little mill by the river",
    "One morning a fox",
    "Tom had a red kite, and",
    "In the garden there was",
    "The old boat",
)
_QUESTIONS = ("Tell me a story about a fox.", "Tell me a story about a mill.", "Tell me about a boat.")
_DATES = ("date: 3 Mar 2021", "number to words: 4217", "number to words: 918273")
WORDS = ("the", "fox", "mill", "boat", "river", "kite")  # The embedding model's vocabulary.
SENTENCES = ("the fox", "the mill the river", "boat", "kite fox", "the river the boat the kite")

# Ways into the stack, with their weights.
TEXT_WAYS = ("Generate", "completions", "chat completions", "ModelStreamInfer")
DIRECT_WAYS = ("ModelInfer",)  # The gateway gives these to a predictor, and after its failure to a transformer.
_WAYS = {
    "Generate": 5,
    "completions": 3,
    "chat completions": 3,
    "ModelStreamInfer": 3,
    "ModelInfer": 2,
    "embeddings": 1,
    "refused": 2,
}
_MANNERS = {"reads": 7, "reads slowly": 1, "leaves": 1, "has a deadline": 1}
REFUSED = ("temperature", "unknown model", "too long", "wrong endpoint", "tensor", "not JSON")

_PATIENT_S = 120.0


@dataclass(frozen=True)
class Story:
    """A generation; `sampling` are sampling parameters by name."""

    prompt: str
    sampling: tuple[tuple[str, Any], ...]
    model: str = TEXT_MODEL
    is_chat: bool = False
    stop: tuple[str, ...] = ()

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.sampling)


@dataclass(frozen=True)
class Request:
    """One request; `name` is its request id.

    `manner`: the caller reads all, reads slowly, leaves after `pieces` of the answer, or has a deadline. `variant`
    names the fault of a request that must be refused.
    """

    name: str
    way: str
    story: Story | None = None
    manner: str = "reads"
    pieces: int = 0
    timeout_s: float = _PATIENT_S
    variant: str = ""

    @property
    def required_story(self) -> Story:
        """The story; ValueError for a request without one."""
        if self.story is None:
            raise ValueError(f"{self.way} has no story")
        return self.story

    @property
    def sentence(self) -> str:
        """The input of a request for an embedding."""
        return Random(self.name).choice(SENTENCES)

    @property
    def numbers(self) -> NDArray[np.float32]:
        """The input of a request for an echo."""
        dice = Random(self.name)
        return np.frombuffer(dice.randbytes(dice.randrange(1, 20_000)), np.uint8).astype(np.float32)


def greedy(prompt: str, tokens: int, **more: Any) -> Story:
    return Story(prompt, (("max_tokens", tokens), ("temperature", 0.0), ("ignore_eos", True)), **more)


def sampled(prompt: str, tokens: int, seed: int, **more: Any) -> Story:
    sampling = (("max_tokens", tokens), ("temperature", 0.9), ("top_p", 0.95), ("seed", seed), ("ignore_eos", True))
    return Story(prompt, sampling, **more)


def _stories() -> Mapping[str, list[Story]]:
    """The stories of each way; several ways share stories."""
    plain = [greedy(prompt, 40 + 20 * number) for number, prompt in enumerate(_PROMPTS)]
    plain += [sampled(prompt, 150 - 20 * number, seed=number + 1) for number, prompt in enumerate(_PROMPTS)]
    plain += [greedy(_PROMPTS[0], 120, stop=(".",)), sampled(_PROMPTS[1], 120, seed=9, stop=(" and", "?"))]
    dates = [Story(prompt, (("temperature", 0.0),), DATE_MODEL) for prompt in _DATES]
    chats = [greedy(question, 80, is_chat=True) for question in _QUESTIONS]
    chats += [sampled(question, 100, seed=number + 1, is_chat=True) for number, question in enumerate(_QUESTIONS)]
    return {
        "Generate": plain + dates + chats,
        "completions": plain,
        "chat completions": chats,
        "ModelStreamInfer": [story for story in plain if not story.stop] + dates,
    }


STORIES = _stories()


def request_of(seed: int, number: int) -> Request:
    """The request of this number in the load of this seed."""
    dice = Random(f"{seed}/request/{number}")
    name = f"{seed}-{number}"
    (way,) = dice.choices(list(_WAYS), list(_WAYS.values()))
    if way == "refused":
        return Request(name, way, variant=dice.choice(REFUSED))
    if way not in TEXT_WAYS:
        return Request(name, way)
    (manner,) = dice.choices(list(_MANNERS), list(_MANNERS.values()))
    return Request(
        name,
        way,
        dice.choice(STORIES[way]),
        manner,
        pieces=dice.randrange(1, 30),
        timeout_s=dice.uniform(0.05, 1.5) if manner == "has a deadline" else _PATIENT_S,
    )
