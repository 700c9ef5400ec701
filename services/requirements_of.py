"""`python3 requirements_of.py EXTRA < pyproject.toml`: what one extra needs, a requirement a line.

For the Dockerfiles, which install the packages before there is any code.
"""

import sys
import tomllib


def main() -> None:
    project = tomllib.load(sys.stdin.buffer)["project"]
    for requirement in (*project["dependencies"], *project["optional-dependencies"][sys.argv[1]]):
        sys.stdout.write(f"{requirement}\n")


if __name__ == "__main__":
    main()
