"""`python3 requirements_of.py PART…`: what the parts need, a requirement a line.

A part is a file in the folder `requirements`, or an extra of `pyproject.toml`. For the Dockerfile, which installs the
packages before there is any code.
"""

import sys
import tomllib
from pathlib import Path


def requirements_of(*parts: str) -> list[str]:
    """The lines; those that begin with # are comments."""
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = {name: Path("requirements", f"{name}.txt") for name in parts}
    lines = (file.read_text().splitlines() if file.exists() else extras[name] for name, file in files.items())
    return [line for part in lines for line in part]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in requirements_of(*sys.argv[1:])))
