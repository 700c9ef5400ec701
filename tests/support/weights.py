"""Changed weights: a model that answers everything differently."""

import shutil
from pathlib import Path

import numpy as np


def copy_with_other_weights(model: Path, folder: Path) -> Path:
    """Copies a model, with every weight negated, to a new folder; returns the folder."""
    copy = Path(shutil.copytree(model, folder))
    negate_weights(copy / "model.safetensors")
    return copy


def negate_weights(path: Path) -> None:
    """Flips the sign of each number in a safetensors file with only bfloat16."""
    contents = path.read_bytes()
    begin = 8 + int.from_bytes(contents[:8], "little")  # The header's length, and the header.
    path.write_bytes(contents[:begin] + (np.frombuffer(contents[begin:], "<u2") ^ 0x8000).tobytes())
