"""Functions that a model may call, as a request declares them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolFunction:
    """`definition` is the whole declaration, `parameters` the schema of the arguments, both JSON objects as text."""

    name: str
    definition: str
    parameters: str


@dataclass(frozen=True)
class ToolUse:
    """The functions of a request, and how they may be called.

    `is_required`: the answer is one or more calls; otherwise the model decides. Without `is_parallel` it has at most
    one call.
    """

    functions: tuple[ToolFunction, ...]
    is_required: bool = False
    is_parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    @property
    def definitions(self) -> str:
        """The declarations as a JSON list, as chat templates take them."""
        return f"[{','.join(function.definition for function in self.functions)}]"
