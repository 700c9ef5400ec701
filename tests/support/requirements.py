"""What the parts of Headrace require, and the distributions that others require."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_FOLDER = Path(__file__).parents[2] / "requirements"
PARTS = ("command", "transformer", "predictor", "logger", "runner")  # Of a stack, all of them.


def requirements(part: str) -> list[str]:
    """What a part requires beyond the command, and what the command requires itself."""
    lines = (_FOLDER / f"{part}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def closure(requirements: Iterable[str]) -> set[str]:
    """The names of the distributions of requirements, of what these require, and so on, as far as installed."""
    found: set[tuple[str, frozenset[str]]] = set()  # Names with the extras that are asked of them.
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name, asked = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, asked) in found:
            continue
        found.add((name, asked))
        try:
            inner = [Requirement(text) for text in distribution(name).requires or ()]
        except PackageNotFoundError:
            continue
        waiting += [
            each
            for each in inner
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in asked or {""})
        ]
    return {name for name, _ in found}
