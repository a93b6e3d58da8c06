"""The factors A and B of LoRAs on the device: from their files, or from copies in host memory.

Blocks that take turns on the device are changed each time they come. Reading a LoRA's file each time would cost more than
the blocks do, so what changes such a block is kept in host memory where that has room, one run of bytes for each block and
file, whatever the strength.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import torch

from ...kernels.low_rank import padded_rank
from ..checkpoint import TensorInfo, read_tensors
from ..content import ALIGNED, Run
from ..device import copied
from ..host_spare import host_has_room
from ..pinned import host_memory, pin
from .file import Lora, Pair

Factors = dict[tuple[Hashable, str], torch.Tensor]  # (file of a LoRA, tensor name) -> a (rank, in) or b (out, rank), see kernels.low_rank.LowRank
Changes = Sequence[tuple[Lora, Pair]]
MOST_ZEROS = 1.25  # a b may be longer by this in its copy: zeros cross the link, too, and of a small rank they would be most of it
Infos = dict[str, tuple[TensorInfo, tuple[int, ...]]]  # as in the file, and the shape of its copy


class FactorStore:
    """Factors for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[tuple[Hashable, str], _Copy] = {}  # of (file, path of a block)

    def fetch(self, changes: Changes, read: Callable[[int], None], path: str | None = None) -> Factors:
        """The factors of `changes` on the device. `read(n)`: as in fill. path: of the block they belong to, which will want them again."""
        factors: Factors = {}
        for lora, infos in _by_file(changes):
            copy = None if path is None else self._copied(lora, path, infos, read)
            found = _read(lora, infos, self._device, read) if copy is None else copy.on(self._device)
            file = lora.file
            factors |= {(file, name): found[name] for name in infos}
        return factors

    def bring(self, changes: Changes, read: Callable[[int], None], path: str) -> bool:
        """Have copies of the factors of `changes`, of the block at `path`, in host memory; False where that has no room for all."""
        return all(self._copied(lora, path, infos, read) is not None for lora, infos in _by_file(changes))

    def lacking(self, changes: Changes, path: str) -> int:
        """Bytes that `bring` would read."""
        return sum(info.numel * info.dtype.itemsize for lora, infos in _by_file(changes) if not self._has(lora, path, infos) for info, _ in infos.values())

    def keep(self, loras: Iterable[Lora]) -> None:
        """Drop the copies of all other files."""
        files = {lora.file for lora in loras}
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] in files}

    def forget(self) -> None:
        self._copies.clear()

    def _copied(self, lora: Lora, path: str, infos: Infos, read: Callable[[int], None]) -> _Copy | None:
        if not self._has(lora, path, infos):
            if not host_has_room(_room(infos), self._device):
                return None
            memory = host_memory(_room(infos))
            if memory is None:
                return None
            copy = _Copy(infos, memory, self._device)
            copy.take(_read(lora, infos, self._device, read))  # a device looks faster at what is read than the host
            self._copies[lora.file, path] = copy
        return self._copies[lora.file, path]

    def _has(self, lora: Lora, path: str, infos: Infos) -> bool:
        copy = self._copies.get((lora.file, path))
        return copy is not None and infos.keys() <= copy.infos.keys()


class _Copy:
    """Tensors of a LoRA in one run of bytes of host memory, (n,) uint8, unread: b's with the zeros that the kernel wants behind their rows."""

    def __init__(self, infos: Infos, memory: torch.Tensor, device: torch.device) -> None:
        self.infos = infos
        self._device = device
        begins = itertools.accumulate((_aligned(*one) for one in infos.values()), initial=0)
        self._places = {name: (begin, info.dtype, shape, torch.empty(shape, device="meta").stride()) for begin, (name, (info, shape)) in zip(begins, infos.items(), strict=False)}
        self._buffer = memory
        pin(self, self._buffer, device)

    def take(self, found: dict[str, torch.Tensor]) -> None:
        """Copy all of them from where they are, and wait for that."""
        for name, place in self._views(self._buffer).items():
            factor, columns = found[name], found[name].shape[1]
            if columns < place.shape[1]:  # on the device: what is queued for scattered host memory goes by way of some that nobody holds
                factor = factor.new_zeros(place.shape)
                factor[:, :columns] = found[name]
            copied(factor, place)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """All of them on `device`, in one copy on its current stream."""
        return self._views(self._buffer.to(device, non_blocking=device.type == "cuda"))

    def _views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        run = Run(buffer)
        return {name: run.at(*place) for name, place in self._places.items()}


def _by_file(changes: Changes) -> Iterator[tuple[Lora, Infos]]:
    """A LoRA of each file, and all that `changes` have of it."""
    found: dict[Hashable, tuple[Lora, Infos]] = {}
    for lora, pair in changes:
        _, infos = found.setdefault(lora.file, (lora, {}))
        rows, rank = pair.b.shape
        columns = padded_rank(rank) if padded_rank(rank) <= MOST_ZEROS * rank else rank
        infos[pair.a.name], infos[pair.b.name] = (pair.a, pair.a.shape), (pair.b, (rows, columns))
    yield from found.values()


def _read(lora: Lora, infos: Infos, device: torch.device, read: Callable[[int], None]) -> dict[str, torch.Tensor]:
    room = {name: torch.empty(lora.header.tensors[name].shape, dtype=info.dtype, device=device) for name, (info, _) in infos.items()}
    read_tensors(lora.header, room, read, finite=True)
    return {name: room[name].view(info.shape) for name, (info, _) in infos.items()}


def _room(infos: Infos) -> int:
    return sum(_aligned(*one) for one in infos.values())


def _aligned(info: TensorInfo, shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) * info.dtype.itemsize // ALIGNED) * ALIGNED
