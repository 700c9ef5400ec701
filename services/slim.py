"""`python3 slim.py SITE_PACKAGES`: removes what no service imports, and what no loader reads of shared libraries.

For the Dockerfile: a third of the predictor's packages are headers, tests and symbol tables. The container tests show
that the rest serves.
"""

import shutil
import struct
import sys
from pathlib import Path

UNUSED = (
    "**/tests",
    "*/include",
    "pyarrow/_flight*",  # Arrow's RPC.
    "pyarrow/libarrow_flight*",
    "pyarrow/libarrow_python*flight*",
    "pyarrow/libarrow_python*.so",  # Names for linkers; the loader takes the one with a version.
    "pyarrow/libarrow_python.so.*.*.*",
    "torch/bin/test_*",  # Of the programs torch needs torch_shm_manager alone.
    "torch/bin/[!t]*",
    "torch/lib/*test*.so",
    "torch/share",
    "torch/test",
    "transformers/models/*/modular_*.py",  # What modeling_*.py is generated from.
)
# Networks, which cannot be imported without torch: the transformer's image has only the tokenizers.
WITHOUT_TORCH = ("transformers/models/*/modeling_*.py",)
KEPT = "transformers/models/auto/*"  # Tables of names, which every tokenizer reads.


def main() -> None:
    packages = Path(sys.argv[1])
    for pattern in (*UNUSED, *(() if (packages / "torch").exists() else WITHOUT_TORCH)):
        for path in set(packages.glob(pattern)) - set(packages.glob(KEPT)):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                compiled.unlink()
    for library in [*packages.rglob("*.so"), *packages.rglob("*.so.*")]:
        trim(library)


def trim(library: Path) -> None:
    """Cuts an ELF file behind its last segment: symbol tables and debug information, which only debuggers read."""
    with library.open("r+b") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian.
            return
        (segments,) = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        end = segments + size * count
        for number in range(count):
            file.seek(segments + size * number)
            offset, length = struct.unpack("<8x Q 16x Q", file.read(40))
            end = max(end, offset + length)
        file.truncate(end)
        # The table of sections was there too.
        file.seek(40)
        file.write(bytes(8))
        file.seek(60)
        file.write(bytes(4))


if __name__ == "__main__":
    main()
