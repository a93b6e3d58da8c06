"""The header of a GGUF file, version 2 or 3, as the same `Header` that safetensors files have.

Layout, little-endian: "GGUF", version u32, tensors u64, keys u64; the keys, each name, type u32, value; the tensors, each
name, dimensions u32, their sizes u64 innermost first, type u32, offset u64; padding to `general.alignment` (32); data.
Strings are a u64 length and UTF-8. String and number values become metadata strings under their own names: converters keep
`config` and `gemma_source_checkpoint` that way. Names are those of the published file without its prefix.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import FileError
from ..formats import Ggml
from ..formats.ggml import BLOCK_TYPES
from .header import Header, Stored, TensorInfo

# The format's type numbers of tensors that are stored as they are.
PLAIN = {0: torch.float32, 1: torch.float16, 24: torch.int8, 25: torch.int16, 26: torch.int32, 27: torch.int64, 28: torch.float64, 30: torch.bfloat16}
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST = 1 << 24  # keys, tensors, array elements: more means the file is broken
_DEEPEST = 8  # arrays in arrays: what is read has none
# Converters that flatten tensors of more or fewer axes keep the shape they had.
_SHAPE_KEY = "comfy.gguf.orig_shape."


def is_gguf(path: str | Path) -> bool:
    """Whether the file starts as a GGUF file does; False for one that cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def read_gguf(path: str | Path) -> Header:
    """Read the header of `path` and nothing else of it.

    Raises FileError for a file that is broken or cut off, names a key or tensor twice, lets two tensors share bytes, puts one
    where its alignment does not allow it or has bytes that belong to none, for tensor types that are not read, and for a
    language model in llama.cpp's own layout, which holds no LTX projections.
    """
    path = Path(path)
    stat = path.stat()
    try:
        with path.open("rb") as file:
            reader = _Reader(file, stat.st_size)
            keys, entries = reader.header()
            alignment = keys.get("general.alignment", 32)
            begin = reader.data(alignment)
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror}); check its permissions and the disk.") from None
    except (_Broken, struct.error, UnicodeDecodeError, MemoryError) as error:
        raise FileError(f"{path.name} is a broken GGUF file ({error}); download it again.") from None
    _check_layout(path.name, keys, [name for name, *_ in entries])
    tensors: dict[str, TensorInfo] = {}
    stored: dict[str, Stored] = {}
    for name, shape, kind, offset in entries:
        logical = _logical(path.name, name, keys.get(_SHAPE_KEY + name, list(shape)), shape)
        if name in tensors:
            raise FileError(f"{path.name} is a broken GGUF file ({name} stands in it twice); download it again.")
        if kind in PLAIN:
            size = math.prod(shape) * PLAIN[kind].itemsize
            tensors[name] = TensorInfo(name, PLAIN[kind], logical, begin + offset, begin + offset + size)
            continue
        block = BLOCK_TYPES.get(kind)
        if block is None:
            raise FileError(
                f"{path.name}: {name} is stored in GGUF type {kind}, which is not read; "
                f"use a file of {', '.join(one.name for one in BLOCK_TYPES.values())}, F16, BF16 or F32."
            )
        if shape[-1] % block.weights:
            raise FileError(f"{path.name} is a broken GGUF file ({name}: {shape[-1]} columns in blocks of {block.weights}); download it again.")
        rows = shape if logical[-1] % block.weights else logical  # blocks follow each other as weights do, however rows were cut
        packed = (math.prod(rows[:-1]), rows[-1] // block.weights * block.size)
        first, last = begin + offset, begin + offset + math.prod(packed)
        tensors[name] = TensorInfo(name, torch.bfloat16, logical, first, last)
        stored[name] = Stored(Ggml(block, logical), {"weight": TensorInfo(name, torch.uint8, packed, first, last)})
    _check_places(path.name, stat.st_size, begin, alignment, tensors.values())
    metadata = {key: value if isinstance(value, str) else str(value) for key, value in keys.items() if not isinstance(value, list)}
    return Header(path, stat.st_size, stat.st_mtime_ns, reader.digest(), metadata, tensors, stored)


def _logical(file: str, name: str, wanted: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape a tensor had before its converter flattened it, in place of the one its bytes are counted by."""
    listed = isinstance(wanted, list) and wanted and all(type(size) is int and size >= 0 for size in wanted)
    if not listed or math.prod(wanted) != math.prod(shape):
        raise FileError(
            f"{file} is a broken GGUF file ({_SHAPE_KEY}{name} is {str(wanted)[:80]}, wanted a list of sizes with the {math.prod(shape)} "
            "elements of the tensor); download it again."
        )
    return tuple(wanted)


def _check_layout(name: str, keys: dict[str, Any], tensors: list[str]) -> None:
    """Refuse llama.cpp's language models before anything else is said of them."""
    if any(tensor.startswith(("blk.", "token_embd.")) for tensor in tensors) or not tensors:
        architecture = keys.get("general.architecture", "unknown")
        raise FileError(
            f"{name} is a GGUF of architecture '{architecture}' in llama.cpp's layout, without LTX tensors; GGUF files are read with "
            "the published LTX-2.5 tensor names: use one of those, or gemma4-12b-with-proj-ltx-2.5 from huggingface.co/Lightricks/LTX-2.5."
        )


def _check_places(name: str, size: int, begin: int, alignment: int, tensors: Iterable[TensorInfo]) -> None:
    """Raise FileError unless the tensors' bytes are apart, aligned, and all that stands behind `begin` in a file of `size` bytes."""
    ordered = sorted(tensors, key=lambda info: (info.begin, info.end))
    for info in ordered:
        if (info.begin - begin) % alignment:
            raise FileError(f"{name} is a broken GGUF file ({info.name} is at byte {info.begin - begin}, no multiple of {alignment}); download it again.")
    for before, after in pairwise(ordered):
        if after.begin < before.end:
            raise FileError(f"{name} is a broken GGUF file ({before.name} and {after.name} share bytes); download it again.")
    end = ordered[-1].end
    if end > size:
        raise FileError(f"{name} is cut off ({size} bytes of {end}); download it again.")
    if size >= end + alignment:  # writers may pad the last tensor as they do the others
        raise FileError(f"{name} has {size - end} bytes after its last tensor that belong to none; download it again.")


class _Broken(ValueError):
    """What exactly is wrong."""


class _Reader:
    """Fields in order, each checked against what the file can hold."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._digest = hashlib.sha256()

    def header(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]]]:
        """Keys by name (values: str, number, bool, list of these), tensors as (name, shape outermost first, type, offset)."""
        self._bytes(4)
        version = self._number("I")
        if version not in (2, 3):
            raise _Broken(f"version {version}, wanted 2 or 3")
        tensors, count = self._count(), self._count()
        keys = {}
        for _ in range(count):
            name = self._string()
            if name in keys:
                raise _Broken(f"the key {name} stands in it twice")
            keys[name] = self._value(self._number("I"))
        entries = []
        for _ in range(tensors):
            name, axes = self._string(), self._number("I")
            if not 1 <= axes <= 8:
                raise _Broken(f"{name} has {axes} dimensions")
            shape = tuple(self._number("Q") for _ in range(axes))[::-1]
            entries.append((name, shape, self._number("I"), self._number("Q")))
        return keys, entries

    def data(self, alignment: int) -> int:
        """Where the data begins."""
        if type(alignment) is not int or alignment < 1:
            raise _Broken(f"alignment {alignment}")
        return -(-self._file.tell() // alignment) * alignment

    def digest(self) -> str:
        return self._digest.hexdigest()

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if depth > _DEEPEST:
            raise _Broken(f"arrays in arrays, more than {_DEEPEST} deep")
        if kind == _ARRAY:
            inner, count = self._number("I"), self._count()
            if inner in _NUMBERS:
                code = _NUMBERS[inner]
                return list(struct.unpack(f"<{count}{code}", self._bytes(count * struct.calcsize("<" + code))))
            return [self._value(inner, depth + 1) for _ in range(count)]
        if kind not in _NUMBERS:
            raise _Broken(f"a value of type {kind}")
        return self._number(_NUMBERS[kind])

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8")

    def _count(self) -> int:
        count = self._number("Q")
        if count > _MOST:
            raise _Broken(f"a table of {count} entries")
        return count

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))[0]

    def _bytes(self, count: int) -> bytes:
        if count > self._size:
            raise _Broken("a length beyond the file's")
        got = self._file.read(count)
        if len(got) != count:
            raise _Broken("it ends inside its header")
        self._digest.update(got)
        return got
