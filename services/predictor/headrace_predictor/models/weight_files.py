"""Checks a model's files before torch is imported, which takes far longer: each error names the file and the reason."""

from pathlib import Path

from headrace.models.gguf.folder import WEIGHTS_FILE
from headrace.models.gguf.reader import read_gguf
from headrace.models.sources import read_config
from headrace.models.weight_headers import read_header

_POINTER = b"version https://git-lfs"
_WEIGHTS = "*.safetensors"
_READ = (_WEIGHTS, "*.json", "*.model", "*.txt", "*.jinja")


def check_files(folder: Path) -> None:
    """Checks configurations, weights and their index; raises ValueError."""
    for path in sorted(path for pattern in _READ for path in folder.rglob(pattern)):
        if path.stat().st_size < 1024 and path.read_bytes().startswith(_POINTER):
            raise ValueError(f"{path} is a pointer of git-lfs and not the file itself; `git lfs pull` fetches it")
    configs = [path.name for pattern in ("*config.json", "*.index.json") for path in folder.glob(pattern)]
    indexes = [read_config(folder, name) for name in sorted(configs)]
    weights = sorted(folder.rglob(_WEIGHTS))
    if (folder / WEIGHTS_FILE).is_symlink():
        file = read_gguf(folder / WEIGHTS_FILE)
        if not file.tensors:
            raise ValueError(f"{file.path} has a vocabulary and no weights")
    elif not weights:
        raise ValueError(
            f"{folder} has no *.safetensors; of other formats only GGUF is loaded, as the model's location"
        )
    for index in indexes:
        for shard in sorted(set(map(str, index.get("weight_map", {}).values()))):
            if shard.endswith(Path(_WEIGHTS).suffix) and not (folder / shard).is_file():
                raise ValueError(f"{folder} lacks {shard}, which its index of weights names")
    for path in weights:
        _check_weights(path)


def _check_weights(path: Path) -> None:
    try:
        with path.open("rb") as file:
            header, start = read_header(file)
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        needed = start + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise ValueError(f"{path} is not a safetensors file, or is cut off") from None
    if (size := path.stat().st_size) != needed:
        raise ValueError(f"{path} has {size} bytes, by its header {needed}")
