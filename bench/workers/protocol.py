"""The control of a contender's process: lines of JSON, commands on stdin, answers on stdout.

The first line out is `{"ready": true, "versions": {...}, "settings": {...}}`. A command is `{"command": name,
...arguments}`; its answer is an object of figures, or `{"error": reason}`, after which the next command is read. The
end of stdin ends the process. Output of libraries goes to stderr. Imports only the standard library, because it runs in
every contender's environment.

A contender's module has `create(folder, *arguments)`.

Times are those of time.perf_counter(), in seconds.
"""

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TextIO

Command = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True)
class Generation:
    """The result of one batch: the new ids of each prompt, and the time of its first one."""

    output_ids: list[list[int]]
    first_token_at: list[float]


class Contender(ABC):
    """Generates greedily, without an end token. `packages` are those whose versions are reported."""

    packages: tuple[str, ...]
    settings: Mapping[str, Any]

    @abstractmethod
    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generation:
        """Serves all prompts at the same time; returns when all are done."""

    def own_commands(self) -> Mapping[str, Command]:
        """Commands that only this contender has."""
        return {}

    def close(self) -> None:  # noqa: B027  # Most have no threads.
        """Ends its threads."""


def serve(contender: Contender, answers: TextIO) -> None:
    """Executes commands until stdin ends: `generate`, and the contender's own."""

    def generate(batches: list[list[list[int]]], new_tokens: int) -> Mapping[str, Any]:
        return _measure(contender, batches, new_tokens)

    known: dict[str, Command] = {"generate": generate, **contender.own_commands()}

    def answer(figures: Mapping[str, Any]) -> None:
        answers.write(json.dumps(figures) + "\n")

    versions = {name: version(name) for name in contender.packages}
    answer({"ready": True, "versions": versions, "settings": contender.settings})
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            figures = known[arguments.pop("command")](**arguments)
        except Exception as error:
            # The parent reports the contender and the reason, and continues without it.
            answer({"error": f"{type(error).__name__}: {error}"})
        else:
            answer(figures)


def _measure(contender: Contender, batches: list[list[list[int]]], new_tokens: int) -> Mapping[str, Any]:
    seconds = cpu_seconds = 0.0
    first_token_s: list[float] = []
    first: Generation | None = None
    for prompts in batches:
        started, cpu_started = time.perf_counter(), time.process_time()
        generation = contender.generate(prompts, new_tokens)
        seconds += time.perf_counter() - started
        cpu_seconds += time.process_time() - cpu_started
        lengths = {len(ids) for ids in generation.output_ids}
        if lengths != {new_tokens} or len(generation.output_ids) != len(prompts):
            raise RuntimeError(f"{len(prompts)} prompts gave {len(generation.output_ids)} outputs, of {lengths} tokens")
        first_token_s += [at - started for at in generation.first_token_at]
        first = first or generation
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens": sum(len(prompts) for prompts in batches) * new_tokens,
        "first_token_s": first_token_s,
        "output_ids": first.output_ids if first else [],
    }
