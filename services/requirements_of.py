"""`python3 requirements_of.py EXTRA… < pyproject.toml`: what the extras need, a requirement a line.

For the Dockerfile, which installs the packages before there is any code.
"""

import sys
import tomllib


def main() -> None:
    project = tomllib.load(sys.stdin.buffer)["project"]
    extras = project["optional-dependencies"]
    for requirement in (*project["dependencies"], *(one for name in sys.argv[1:] for one in extras[name])):
        sys.stdout.write(f"{requirement}\n")


if __name__ == "__main__":
    main()
