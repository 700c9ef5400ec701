"""The header of a GGUF file: metadata and places of tensors.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count and length is compared with the bytes
that are left before anything is made of it, so a damaged file costs no more time or memory than its size; the reader of
the package `gguf` trusts them. Only little-endian files of versions 2 and 3.
"""

import math
import mmap
import re
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DIMENSIONS = 4
_MAX_FILES = 1000
_MAX_FIELDS, _MAX_TENSORS, _MAX_NAME, _MAX_STRINGS = 1 << 16, 1 << 16, 1 << 16, 1 << 21
_SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


class Type(NamedTuple):
    """How a tensor's numbers are stored: in blocks of so many numbers and bytes."""

    name: str
    numbers: int
    size: int


TYPES = {
    0: Type("F32", 1, 4),
    1: Type("F16", 1, 2),
    2: Type("Q4_0", 32, 18),
    3: Type("Q4_1", 32, 20),
    6: Type("Q5_0", 32, 22),
    7: Type("Q5_1", 32, 24),
    8: Type("Q8_0", 32, 34),
    12: Type("Q4_K", 256, 144),
    13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210),
    30: Type("BF16", 1, 2),
}
# Of others the name, for the error.
_OTHERS = {
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor is: `shape` as torch has it, outputs first; `begin` in bytes of `path`."""

    path: Path
    type: Type
    shape: tuple[int, ...]
    begin: int

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) // self.type.numbers * self.type.size


@dataclass(frozen=True)
class GGUF:
    """See the module; of a model in several files that of all of them."""

    path: Path
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, TensorPlace] = field(repr=False)

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of the metadata; raises ValueError for one of another type."""
        value = self.metadata.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{self.path}: {name} has another type")
        return value


def read_gguf(path: Path) -> GGUF:
    """The header of a file, and of those that belong to it; raises ValueError, which names the file, and OSError.

    They have the names of one model: a link with another name stands for the file that it leads to.
    """
    if path.is_symlink() and not _SPLIT.fullmatch(path.name):
        path = path.parent / path.readlink()
    paths = [path]
    if match := _SPLIT.fullmatch(path.name):
        numbers = range(1, min(int(match[3]), _MAX_FILES) + 1)
        paths = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in numbers]
    first, *others = (_read(part) for part in paths)
    if (stated := max(1, first.get("split.count", int, 1))) != len(paths):
        raise ValueError(f"{paths[0]} is one of {stated} files, whose names end in -00001-of-{stated:05}.gguf")
    return GGUF(paths[0], first.metadata, dict(item for part in (first, *others) for item in part.tensors.items()))


def _read(path: Path) -> GGUF:
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError(f"{path} is empty")
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            try:
                return _Header(path, data).read()
            except (struct.error, IndexError, OverflowError, MemoryError, UnicodeDecodeError):
                raise ValueError(f"{path} is damaged, or cut off") from None
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None


class _Header:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def read(self) -> GGUF:
        if self._bytes(4) != _MAGIC:
            raise ValueError("no GGUF file")
        version, tensors, fields = self._numbers("IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"version {version & 0xFFFFFFFF} of GGUF, or a big-endian file, is not read")
        if fields > _MAX_FIELDS or tensors > _MAX_TENSORS:
            raise ValueError("damaged: it states more tensors or fields than a model has")
        metadata: dict[str, Any] = {}
        for _ in range(fields):
            name = self._string(_MAX_NAME).decode()
            if name in metadata:
                raise ValueError(f"damaged: two fields {name[:64]!r}")
            metadata[name] = self._value(*self._numbers("I"))
        stated = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise ValueError("damaged: general.alignment")
        first = -(-self._at // alignment) * alignment
        places: dict[str, TensorPlace] = {}
        for name, shape, code, offset in stated:
            if code not in TYPES:
                raise ValueError(
                    f"tensor {name} is {_OTHERS.get(code, f'of type {code}')}, which is not served; take a file of "
                    f"{', '.join(kind.name for kind in TYPES.values())}, such as Q4_K_M"
                )
            place = TensorPlace(self._path, TYPES[code], shape, first + offset)
            if name in places or offset % alignment or shape[-1] % place.type.numbers:
                raise ValueError(f"damaged: tensor {name[:64]}")
            if place.begin + place.size > len(self._data):
                raise ValueError(f"cut off: tensor {name[:64]} ends at byte {place.begin + place.size}")
            places[name] = place
        return GGUF(self._path, metadata, places)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(_MAX_NAME).decode()
        (dimensions,) = self._numbers("I")
        if not 1 <= dimensions <= _DIMENSIONS:
            raise ValueError(f"damaged: tensor {name[:64]} has {dimensions} dimensions")
        shape = self._numbers(f"{dimensions}Q")
        if not all(0 < length < 1 << 40 for length in shape):
            raise ValueError(f"damaged: the shape of tensor {name[:64]}")
        code, offset = self._numbers("IQ")
        return name, shape[::-1], code, offset

    def _value(self, code: int) -> Any:
        if code == _STRING:
            return self._string().decode("utf-8", "replace")
        if code == _ARRAY:
            kind, count = self._numbers("IQ")
            if kind == _STRING:
                if count > _MAX_STRINGS:
                    raise ValueError("damaged: an array has more texts than a vocabulary")
                return self._texts(count)
            if kind not in _SCALARS:
                raise ValueError("damaged: an array of another type")
            numbers = array(_SCALARS[kind].replace("?", "B"))
            numbers.frombytes(self._bytes(count * numbers.itemsize))
            return numbers
        if code not in _SCALARS:
            raise ValueError("damaged: a field of an unknown type")
        return self._numbers(_SCALARS[code])[0]

    def _texts(self, count: int) -> list[str]:
        """Tokens may be pieces of characters."""
        data, at, texts, length_at = self._data, self._at, [], struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = at + 8
            at = begin + length_at(data, at)[0]
            if at > len(data):
                raise IndexError
            texts.append(data[begin:at].decode("utf-8", "surrogateescape"))
        self._at = at
        return texts

    def _string(self, most: int = 1 << 40) -> bytes:
        (length,) = self._numbers("Q")
        if length > most:
            raise ValueError("damaged: a name is too long")
        return self._bytes(length)

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise IndexError
        begin, self._at = self._at, self._at + count
        return self._data[begin : self._at]

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self._bytes(struct.calcsize(f"<{layout}")))
