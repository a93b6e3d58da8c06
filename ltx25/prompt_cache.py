"""Prompts that were encoded before: contexts in memory, and where asked for on disk, so that a text seen before loads nothing.

An entry belongs to a text and to what encodes it: the encoder and the connectors (their files' places, headers, sizes and
dates) and the dtype they run in. On disk an entry is a safetensors file named by the hash of all that; no words are kept. The
folder is bounded: the entries used longest ago go first. An entry that is not whole, or holds what no encoder gives, is a
miss, and goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..kernels.cache_folder import cache_folder
from .checkpoint import Header, read_header, read_tensors, write_file
from .config.connector import REGISTERS
from .connector import Conditioning
from .errors import FileError, InputError
from .finite import all_finite

log = logging.getLogger(__name__)

IN_MEMORY = 64  # prompts of 25 MB each: a session's, not a library
DISK_GB = 2.0  # unless LTX25_CACHE_GB says otherwise
FORMAT = "1"


class PromptMemory:
    """Conditioning by (identity, text) in memory, the IN_MEMORY used last. Engines may share one, whatever their files."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], Conditioning] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, identity: str, text: str) -> Conditioning | None:
        found = self._known.get((identity, text))
        if found is not None:
            self._known.move_to_end((identity, text))
        return found

    def put(self, identity: str, text: str, encoded: Conditioning) -> None:
        self._known[identity, text] = encoded
        self._known.move_to_end((identity, text))
        while len(self._known) > IN_MEMORY:
            self._known.popitem(last=False)


class PromptCache:
    """Conditioning by text. Use one per engine."""

    def __init__(self, memory: PromptMemory | None, folder: Path | None, identity: str, limit: int, widths: tuple[int, int]) -> None:
        """memory, folder: None: not kept there. identity: of what encodes, see `identity_of`. limit: bytes of the folder.
        widths: features of video and audio contexts.
        """
        self._memory = memory
        self._folder = folder
        self._identity = identity
        self._limit = limit
        self._widths = widths

    def get(self, text: str) -> Conditioning | None:
        """The contexts of `text`, float32 CPU, or None."""
        found = None if self._memory is None else self._memory.get(self._identity, text)
        if found is None and self._folder is not None:
            found = self._read(self._path(text))
            if found is not None and self._memory is not None:
                self._memory.put(self._identity, text, found)
        return found

    def put(self, text: str, encoded: Conditioning) -> None:
        """Keep the contexts of `text`. A disk that is full or not writable is told in the log, never an error."""
        if not self._sound(encoded):  # what makes no clip now would make none later
            return
        if self._memory is not None:
            self._memory.put(self._identity, text, encoded)
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(self._path(text), encoded)
            self._trim()
        except OSError as error:
            log.warning("the prompt could not be kept in %s: %s", self._folder, error.strerror)

    def _sound(self, encoded: Conditioning) -> bool:
        """Whether these are contexts as connectors give them: (1, n registers' worth of tokens, width), finite."""
        tokens = encoded.video.shape[1] if encoded.video.ndim == 3 else 0
        shapes = [tuple(context.shape) for context in (encoded.video, encoded.audio)]
        fit = tokens > 0 and tokens % REGISTERS == 0 and shapes == [(1, tokens, width) for width in self._widths]
        return fit and all(map(all_finite, (encoded.video, encoded.audio)))

    def _path(self, text: str) -> Path:
        key = json.dumps([FORMAT, self._identity, text]).encode()
        return self._folder / f"{hashlib.sha256(key).hexdigest()}.safetensors"

    def _read(self, path: Path) -> Conditioning | None:
        if not path.exists():
            return None
        try:
            header = read_header(path)
            tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in header.tensors.items()}
            read_tensors(header, tensors, lambda n: None)
            if header.metadata["identity"] != self._identity or header.metadata["digest"] != _digest(tensors):
                raise FileError(f"{path.name} is not what was written")
            notices = header.metadata_json("notices")
            if not isinstance(notices, list) or not all(isinstance(notice, str) for notice in notices):
                raise FileError(f"{path.name} has notices that are no sentences")
            found = Conditioning(tensors["video"].float(), tensors["audio"].float(), tuple(notices))
            if not self._sound(found):
                raise FileError(f"{path.name} has no contexts of this model")
        except (FileError, KeyError, ValueError, OSError) as error:
            log.info("cached prompt dropped: %s", error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return found

    def _write(self, path: Path, encoded: Conditioning) -> None:
        tensors = {"video": _narrowed(encoded.video), "audio": _narrowed(encoded.audio)}
        metadata = {"identity": self._identity, "digest": _digest(tensors), "notices": json.dumps(encoded.notices)}
        write_file(path, tensors, metadata)

    def _trim(self) -> None:
        """Another process may do the same: a file that is gone is no error."""
        entries = []
        for path in self._folder.glob("*.safetensors"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                entries.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self._limit:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
        for path in self._folder.glob(".*.part"):  # of a process that was killed while it wrote
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > 3600:
                    path.unlink()


def identity_of(headers: Sequence[Header], dtype: torch.dtype, more: str = "") -> str:
    """What contexts depend on beside the text. more: whatever else changes them.

    The published dev and distilled files have equal headers and sizes, and unpacked or copied together equal dates as well:
    only their places tell them apart.
    """
    facts = [[os.fspath(header.path.resolve()), header.digest, header.size, header.mtime_ns] for header in headers]
    return hashlib.sha256(json.dumps([facts, str(dtype), more]).encode()).hexdigest()


def prompts_folder() -> Path:
    return cache_folder() / "prompts"


def disk_limit() -> int:
    """Bytes: LTX25_CACHE_GB, else DISK_GB. Raises InputError for what is no size."""
    text = os.environ.get("LTX25_CACHE_GB", "")
    try:
        size = float(text) if text else DISK_GB
    except ValueError:
        size = math.nan
    if not 0 <= size < math.inf:
        raise InputError(f"LTX25_CACHE_GB is '{text}', wanted a number of GB like {DISK_GB:g}, 0 or more; correct it, or unset it.")
    return int(size * 1e9)


def _narrowed(context: torch.Tensor) -> torch.Tensor:
    """As bf16 where that loses nothing: contexts of a bf16 model."""
    narrow = context.bfloat16()
    return narrow if torch.equal(narrow.float(), context) else context


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(str((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()
