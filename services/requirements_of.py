"""`python3 requirements_of.py PART…`: what the parts need, a requirement a line.

A part is a file in the folder `requirements`, or an extra of `pyproject.toml`. For the Dockerfile, which installs the
packages before there is any code.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in sys.argv[1:]:
        file = Path("requirements", f"{name}.txt")
        sys.stdout.write(file.read_text() if file.exists() else "".join(f"{each}\n" for each in extras[name]))


if __name__ == "__main__":
    main()
