"""Prints what a machine lacks that has `GIVEN`, as pinned requirements: for the predictor, the transformer and the
check, with the version of Python that is the argument. Packages have the versions of this environment, which has all;
`make wheels` downloads them.
"""

import sys
from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.requirements import requirements

# grpcio and protobuf are not among them: the generated stubs refuse lower versions than these.
GIVEN = ("torch", "transformers", "tokenizers", "numpy", "safetensors")
_OF_THE_CHECK = ("hypothesis", "psutil", "pytest", "pytest-asyncio", "pytest-timeout")
# Its compiler, LLVM, is as large as all the rest; without it the kernels for CPUs are left out.
_LEFT_OUT = ("numba",)


def lacking(python: str) -> list[str]:
    """The names of the distributions that the requirements lead to, sorted."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    parts = ("command", "transformer", "predictor")
    waiting = [Requirement(text) for text in (*_OF_THE_CHECK, *(each for part in parts for each in requirements(part)))]
    found: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in (*GIVEN, *_LEFT_OUT, *found):
            continue
        if requirement.marker is None or requirement.marker.evaluate(environment):
            found.add(name)
            waiting += [Requirement(text) for text in distribution(name).requires or ()]
    return sorted(found)


if __name__ == "__main__":
    print("\n".join(f"{name}=={distribution(name).version.partition('+')[0]}" for name in lacking(sys.argv[1])))
