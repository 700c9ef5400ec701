"""Functions that a model may call, as a request declares them."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ToolFunction:
    """`definition` is the whole declaration, `parameters` the schema of the arguments, both JSON objects as text.

    `is_strict`: a schema that cannot be enforced is refused.
    """

    name: str
    definition: str
    parameters: str
    is_strict: bool = False


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
    def is_strict(self) -> bool:
        """Whether arguments must follow a schema, whatever the model decides."""
        return any(function.is_strict for function in self.functions)

    @property
    def loosened(self) -> "ToolUse":
        """The same, with any arguments for functions that are not strict."""
        loose = (one if one.is_strict else replace(one, parameters="{}") for one in self.functions)
        return replace(self, functions=tuple(loose))

    @property
    def definitions(self) -> str:
        """The declarations as a JSON list, as chat templates take them."""
        return f"[{','.join(function.definition for function in self.functions)}]"
