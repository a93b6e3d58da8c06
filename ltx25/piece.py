"""What a part is made of: modules, the tensors of files that fill them, and blocks that may be read one by one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from .checkpoint import Header, fill
from .content import Content
from .formats import Held
from .linear import Linear, store_e4m3


@dataclass(frozen=True)
class Blocks:
    """A module's stack of blocks. path: of its ModuleList; stay: patterns of block parameters that never leave the device.

    lanes(module): the streams blocks run on beside the current one. in_fp8(block, number, count): layers, by path, of block
    `number` of `count`, whose weights are rounded to rows of e4m3 as soon as they are read; None: nothing is rounded.
    """

    path: str
    stay: tuple[str, ...] = ()
    lanes: Callable[[nn.Module], Sequence[torch.cuda.Stream]] = lambda module: ()
    in_fp8: Callable[[nn.Module, int, int], Mapping[str, Linear]] | None = None

    def rounded(self, block: nn.Module, number: int, count: int) -> Mapping[str, Linear]:
        return {} if self.in_fp8 is None else self.in_fp8(block, number, count)


class Changes(Protocol):
    """What is done to modules once they are filled (lora/adapter.py)."""

    bytes: int  # to read for it

    def needed(self, piece: Piece, dense: Collection[str], path: str, read: Callable[[int], None]) -> object | None:
        """What `fused` wants for the piece's block at `path`, queued on its way to the device. None: that is not for this block, of whose
        parameters `dense` are dense; `changed` is."""

    def fused(self, needed: object, weights: Mapping[str, torch.Tensor]) -> int:
        """Change dense weights of a block, by their names in it, where they are; as `changed`."""

    def changed(self, piece: Piece, module: nn.Module, path: str, read: Callable[[int], None]) -> int:
        """`module` is the piece's, whose blocks may be missing, or its block at `path`; `read` counts bytes and may raise.

        Returns the bytes that came to the device for it.
        """

    def lacking(self, piece: Piece, path: str) -> int:
        """Bytes that `bring` would read."""

    def bring(self, piece: Piece, path: str, read: Callable[[int], None]) -> bool:
        """Have in host memory what changes the piece's block at `path`, which will take turns; False where that has no room."""

    def forget(self) -> None:
        """The weights go, and what is kept of them on the device."""

    def let_go(self) -> None:
        """They will not come back soon: what is kept in host memory goes, too."""


@dataclass(frozen=True)
class Piece:
    """One module of a part and the tensors of a file that fill it.

    dtype: what floating tensors become on the device; keep: patterns of parameters that stay as stored.
    unused: patterns of tensors below the prefix that belong to other parts or that no part needs.
    held: what becomes of quantised weights. blocks: what may be streamed of it.
    """

    name: str
    build: Callable[[], nn.Module]
    header: Header
    prefix: str
    dtype: torch.dtype
    unused: tuple[str, ...]
    keep: tuple[str, ...]
    held: Held = Held.EXACT
    blocks: Blocks | None = None

    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return self.build()


class BlocksFile:
    """Reads single blocks of a piece, and changes them. adapter: what changes them; None: nothing does. beside: bytes that adds to each."""

    def __init__(self, piece: Piece, device: torch.device) -> None:
        self.adapter: Changes | None = None
        self.beside: tuple[int, ...] = ()
        self._piece = piece
        self._device = device
        self._blank: nn.ModuleList | None = None  # the blocks on meta
        self._frames: dict[int, nn.Module] = {}  # blocks that hold what is being changed
        self._told: Callable[[int], None] | None = None

    @contextlib.contextmanager
    def told(self, read: Callable[[int], None]) -> Iterator[None]:
        """Inside, bytes are counted by `read`, which may raise, and the file is not expected to be read again."""
        self._told = read
        try:
            yield
        finally:
            self._told = None

    def read(self, number: int) -> nn.Module:
        """Block `number` on the device, apart from the model."""
        piece, block = self._piece, self._bare(number)
        told, again = self._told or (lambda n: None), self._told is None
        fill(block, piece.header, block_prefix(piece, number), self._device, piece.dtype, told, (), piece.keep, piece.held, again)
        store_e4m3(piece.blocks.rounded(block, number, len(self._blank)).values())
        return block

    def needed(self, number: int, content: Content) -> object | None:
        """What `changed` wants for block `number`, whose content is like `content`, queued on its way to the device."""
        return None if self.adapter is None else self.adapter.needed(self._piece, content.parameters().keys(), self._path(number), self._counted)

    def changed(self, number: int, content: Content, needed: object | None) -> tuple[Content, int]:
        """What block `number` runs with, made of its `content`, and the bytes that came for it."""
        if self.adapter is None:
            return content, 0
        if needed is not None:  # to put a block together only to change it took longer than that
            return content, self.adapter.fused(needed, content.parameters())
        piece = self._piece
        frame = self._frames.pop(number, None) or self._bare(number)  # one at a time uses it
        content.put(frame)
        came = self.adapter.changed(piece, frame, self._path(number), self._counted)
        content = Content.of(frame, piece.blocks.stay) if came else content
        content.take_from(frame)
        self._frames[number] = frame
        return content, came

    def room_beside(self, number: int) -> int:
        """The most bytes that changing block `number` adds to it."""
        return self.beside[number]

    def _path(self, number: int) -> str:
        return f"{self._piece.blocks.path}.{number}."

    def _bare(self, number: int) -> nn.Module:
        if self._blank is None:
            self._blank = self._piece.on_meta().get_submodule(self._piece.blocks.path)
        return copy.deepcopy(self._blank[number])

    def _counted(self, n: int) -> None:
        """Bytes of changes are not the file's, and a cancel acts between them all the same."""
        if self._told is not None:
            self._told(0)


def block_prefix(piece: Piece, number: int) -> str:
    return f"{piece.prefix}{piece.blocks.path}.{number}."
