"""`metadata_of.py FOLDER EXTRA…`: an environment with the metadata, and nothing else, of what Headrace with some extras
requires, in the versions that are installed here; from it .ci/release makes an SBOM."""

import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tests.support.requirements import closure


def main() -> None:
    folder, extras = Path(sys.argv[1]), ",".join(sys.argv[2:])
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    for name in closure([f"headrace[{extras}]"]) - {"headrace"}:
        try:
            metadata = Path(distribution(name)._path)  # type: ignore[attr-defined]
        except PackageNotFoundError:  # Of another platform.
            continue
        (packages / metadata.name).symlink_to(metadata)


if __name__ == "__main__":
    main()
