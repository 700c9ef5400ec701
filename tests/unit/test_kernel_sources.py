"""No kernel assigns an array or a tuple to a slice: Numba would compile the message about unequal sizes too.

That takes seconds for each kernel, and for each one that calls it.
"""

import ast
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "services/predictor/headrace_predictor/engine/cpu"
COMPILED = ("njit", "overload")


def functions_of(path):
    """The functions of a file that Numba compiles; those that an `overload` chooses among begin with `like`."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            decorators = " ".join(map(ast.unparse, function.decorator_list))
            if any(name in decorators for name in COMPILED) or [each.arg for each in function.args.args[:1]] == [
                "like"
            ]:
                yield function


def fills(statement):
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Subscript) and any(isinstance(part, ast.Slice) for part in ast.walk(target.slice))
        for target in statement.targets
    )


def is_number(value):
    """A literal, a constant of the module, or `like`."""
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Name) and (value.id.isupper() or value.id == "like")
    )


def test_kernels_fill_slices_with_numbers_only():
    found = [
        f"{path.name}:{statement.lineno}: {ast.unparse(statement)}"
        for path in sorted(KERNELS.glob("*.py"))
        for function in functions_of(path)
        for statement in ast.walk(function)
        if fills(statement) and not is_number(statement.value)
    ]
    assert not found
