"""The distributions that others require."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


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
