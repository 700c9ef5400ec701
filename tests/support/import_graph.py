"""The imports of this repository's modules, read from their source, including those inside functions."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The folders of packages.
FOLDERS = (ROOT, *(ROOT / "services" / name for name in ("transformer", "predictor", "logger")))


@dataclass(frozen=True)
class Import:
    """`name` is a module of this repository or of a library.

    An import `inside` a function runs when the function is called, and one under `if TYPE_CHECKING` never.
    """

    name: str
    inside: bool
    for_types: bool


@cache
def modules(*packages: str) -> dict[str, Path]:
    """The modules of packages of this repository, by name."""
    paths = [package.replace(".", "/") for package in packages]
    return {_name(file, folder): file for folder in FOLDERS for path in paths for file in (folder / path).rglob("*.py")}


@cache
def imports(module: str) -> tuple[Import, ...]:
    """The imports of a module; `from a import b` imports `a.b` if that is a module, else `a`."""
    file = _file(module)
    assert file is not None, module
    return tuple(dict.fromkeys(_statements(ast.parse(file.read_text()))))


def loaded_with(module: str) -> set[str]:
    """Every module that an import of `module` loads, followed through this repository's modules."""
    seen, waiting = {module}, [module]
    while waiting:
        for found in imports(waiting.pop()):
            if found.inside or found.for_types:
                continue
            parts = found.name.split(".")
            for name in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
                if name not in seen:
                    seen.add(name)
                    if _file(name) is not None:
                        waiting.append(name)
    return seen


def _statements(node: ast.AST, inside: bool = False, for_types: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.module is not None, "absolute imports alone"
            names = [f"{child.module}.{alias.name}" for alias in child.names]
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            is_condition = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from _statements(child, inside or is_function, for_types or is_condition)
            continue
        yield from (Import(_module(name), inside, for_types) for name in names)


@cache
def _module(name: str) -> str:
    """`name` if it is a module, else its module."""
    parent = name.rpartition(".")[0]
    if not parent or _file(name) is not None or (_file(parent) is None and _is_package(name.split(".")[0])):
        return name
    return parent


@cache
def _file(module: str) -> Path | None:
    path = module.replace(".", "/")
    files = (folder / name for folder in FOLDERS for name in (f"{path}.py", f"{path}/__init__.py"))
    return next((file for file in files if file.is_file()), None)


def _is_package(name: str) -> bool:
    return any((folder / name).is_dir() for folder in FOLDERS)


def _name(file: Path, folder: Path) -> str:
    parts = file.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
