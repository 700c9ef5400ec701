"""`metadata_of.py FOLDER PART…`: an environment with the metadata, and nothing else, of what some parts of Headrace
require (see requirements_of.py), in the versions that are installed here; from it .ci/release makes an SBOM."""

import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from services.requirements_of import requirements_of
from tests.support.requirements import closure


def main() -> None:
    folder = Path(sys.argv[1])
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    for name in closure([line for line in requirements_of("command", *sys.argv[2:]) if not line.startswith("#")]):
        try:
            metadata = Path(distribution(name)._path)  # type: ignore[attr-defined]
        except PackageNotFoundError:  # Of another platform.
            continue
        (packages / metadata.name).symlink_to(metadata)


if __name__ == "__main__":
    main()
