"""Which LoRAs the transformer on the device has, and how it gets others without reading the base again.

A module that is being filled, or a block that comes to the device, is changed right then. What is there already is changed
where it is: base weights come back bit for bit and are changed anew. They come from a copy on the device, kept where memory
allows it; of blocks that share the device with others that take turns, from a copy in host memory; else from the file. While
the copy on the device is there, going back and forth between the base and its LoRAs (stages of one workflow) only exchanges
the two: nothing is read or computed again. Blocks that take turns come as the base and are changed each time (streaming.py),
so other LoRAs cost them nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ..checkpoint import decode, read_tensors
from ..device import copied
from ..host_spare import host_has_room
from ..instrument import Phase, Watch
from ..linear import Linear
from ..part import Part
from ..piece import Piece
from ..residency import free_memory
from .change import Sided, Target, apply, fuse_in, targets, weight_of, within
from .factors import Changes, Factors, FactorStore
from .file import Lora

SPARE = 16 << 30  # bytes that a copy of changed weights leaves free on the device


@dataclass
class _Kept:
    """Another state of the weights: what they hold with `loras`, by name in the file; low-rank products by layer."""

    loras: tuple[Lora, ...]
    weights: dict[str, torch.Tensor]
    sides: dict[str, Sided] = field(default_factory=dict)


class _Needed(NamedTuple):
    """Dense weights of a block by their names in it, and the factors that change them."""

    found: Sequence[tuple[str, Target]]
    factors: Factors


class Adapter:
    """The LoRAs of one part's first piece. `part.adapter` once there were any."""

    def __init__(self, piece: Piece, device: torch.device, spare: int = SPARE) -> None:
        self.loras: tuple[Lora, ...] = ()
        self.fuses = 0  # how often a module that was loaded was changed by computing
        self._piece = piece
        self._device = device
        self._spare = spare
        self._targets: list[Target] = []
        self._within: dict[str, list[Target]] = {}  # by path of a block
        self._named: dict[str, list[tuple[str, Target]]] = {}  # the same with the names of their parameters in it
        self._kept: _Kept | None = None
        self._factors = FactorStore(device)

    @property
    def bytes(self) -> int:
        """To read for the LoRAs."""
        return sum(target.bytes for target in self._targets)

    def needed(self, piece: Piece, dense: Collection[str], path: str, read: Callable[[int], None]) -> _Needed | None:
        """See piece.Changes."""
        if piece is not self._piece:
            return _Needed([], {})
        mine = self._named.get(path)
        if mine is None:
            mine = self._named[path] = [(target.place.name.removeprefix(path), target) for target in self._targets if target.place.name.startswith(path)]
        if not all(name in dense for name, _ in mine):
            return None
        return _Needed(mine, self._factors.fetch([change for _, target in mine for change in target.changes], read, path))

    def fused(self, needed: _Needed, weights: Mapping[str, torch.Tensor]) -> int:
        """See piece.Changes."""
        fuse_in(weights, needed.found, needed.factors)
        for factor in needed.factors.values() if self._device.type == "cuda" else ():
            factor.record_stream(torch.cuda.current_stream(self._device))  # they came on another one, whose memory they are
        return sum(target.bytes for _, target in needed.found)

    def changed(self, piece: Piece, module: nn.Module, path: str, read: Callable[[int], None]) -> int:
        """Change `module`, just filled: the piece's, or its block at `path` ("transformer_blocks.3."). Bytes of the pairs."""
        if not self._targets or piece is not self._piece:
            return 0
        mine = self._within.get(path)
        if mine is None:
            mine = within(self._targets, module, path)
        if path:
            self._within[path] = mine
            apply(module, mine, partial(self._factors.fetch, read=read, path=path), None)
        else:  # whose blocks are not there keeps little: in host memory where the device has no room
            self._kept = self._copied(_dense(module, mine), None, len(mine) < len(self._targets))
            apply(module, mine, partial(self._factors.fetch, read=read))
        return sum(target.bytes for target in mine)

    def lacking(self, piece: Piece, path: str) -> int:
        """Bytes that `bring` would read for the block at `path`."""
        return 0 if piece is not self._piece else self._factors.lacking(self._changes_at(path), path)

    def bring(self, piece: Piece, path: str, read: Callable[[int], None]) -> bool:
        """Have what changes the block at `path` in host memory before its first turn; False where that has no room for it."""
        return piece is not self._piece or self._factors.bring(self._changes_at(path), read, path)

    def _changes_at(self, path: str) -> Changes:
        return [change for target in self._targets if target.place.name.startswith(path) for change in target.changes]

    def forget(self) -> None:
        """Weights go, or memory is wanted: with them what was kept of them."""
        self._kept = None

    def let_go(self) -> None:
        """The part is done with for now: so is what changes it."""
        self._factors.forget()

    @torch.inference_mode()
    def switch(self, part: Part, loras: Sequence[Lora], watch: Watch) -> None:
        """Let `part` have `loras` and no others: what of it is on the device now, the rest when it comes there.

        A cancel or error inside leaves the part unloaded.
        """
        loras = tuple(loras)
        if _key(loras) == _key(self.loras):
            return
        if not part.there:
            self._set(part, loras)
            return
        try:
            self._change(part.standing(self._piece.name), part, loras, watch)
        except BaseException:
            part.unload()
            self._set(part, loras)
            raise

    def _set(self, part: Part, loras: tuple[Lora, ...]) -> None:
        self.loras = loras
        self._targets = self._targets_of(loras) if loras else []
        self._within.clear()
        self._named.clear()
        if loras:  # without any, those of before may come back
            self._factors.keep(loras)
        beside: dict[str, list[int]] = {}
        of_blocks: dict[int, list[Target]] = {}
        for target in self._targets:
            numbers = (info.numel for _, pair in target.changes for info in (pair.a, pair.b))
            beside.setdefault(target.place.name, []).extend(number * self._piece.dtype.itemsize for number in numbers)
            block = part.block_of(target.place.name)
            if block is not None:
                of_blocks.setdefault(block, []).append(target)
        # Factors of one block come while another one is changed by its own.
        passing = (2 * sum(target.bytes for target in mine) + max(target.passing for target in mine) for mine in of_blocks.values())
        part.carry(beside, max(passing, default=0))

    def _change(self, module: nn.Module, part: Part, loras: tuple[Lora, ...], watch: Watch) -> None:
        kept, self._kept = self._kept, None
        sided = any(weight_of(module, target.place) is None for target in self._here(part))
        if sided or (kept and kept.sides) or loras:
            part.moved()  # graphs hold the addresses of low-rank products
        if part.whole and kept is not None and _key(kept.loras) == _key(loras) and self._covers(kept, module):
            self._kept = _Kept(self.loras, kept.weights, self._exchange(module, kept))
            self._set(part, loras)
            return
        with watch.phase("load.stage", total=0, unit="byte", part="LoRA", loras=[str(lora) for lora in loras]) as phase:
            if self.loras:
                self._restore(module, part, kept.weights if kept and not kept.loras else {}, phase)
            self._set(part, loras)
            if not loras:
                return
            here = self._here(part)
            phase.total = phase.done + sum(target.bytes for target in here)
            if not part.whole:
                part.back_up()
            loose = here if part.whole else [target for target in here if part.block_of(target.place.name) is None]
            base = self._copied(_dense(module, loose), kept, not part.whole)
            apply(module, here, partial(self._factors.fetch, read=phase.tick))
            self.fuses += 1
        self._kept = base

    def _here(self, part: Part) -> list[Target]:
        return [target for target in self._targets if part.holds(target.place.name)]

    def _covers(self, kept: _Kept, module: nn.Module) -> bool:
        """Whether `kept` has all that differs: a part of which blocks came later has less."""
        return _dense(module, self._targets or self._targets_of(kept.loras)).keys() <= kept.weights.keys()

    def _exchange(self, module: nn.Module, kept: _Kept) -> dict[str, Sided]:
        """Weights and their kept counterpart change places; returns the low-rank products that were taken off."""
        places = {target.name: target.place for target in (self._targets or self._targets_of(kept.loras))}
        for name, other in kept.weights.items():
            weight = weight_of(module, places[name])
            now = weight.clone()
            weight.copy_(other)
            other.copy_(now)
        sides = _sides(module)
        for path, side in sides.items():
            module.get_submodule(path).storage = side.base
        for path, side in kept.sides.items():
            module.get_submodule(path).storage = side
        return sides

    def _targets_of(self, loras: tuple[Lora, ...]) -> list[Target]:
        return targets(self._piece.on_meta(), self._piece.header, self._piece.prefix, loras)

    def _restore(self, module: nn.Module, part: Part, base: Mapping[str, torch.Tensor], phase: Phase) -> None:
        """Base weights where LoRAs changed them, as fill makes them. base: of some of them, by name in the file."""
        for path, side in _sides(module).items():
            if part.holds(f"{path}.weight"):
                module.get_submodule(path).storage = side.base
        here = self._here(part)
        dense = _dense(module, here)
        for target in here:
            if target.name not in dense:
                continue
            whole = None if target.name in base else part.parked(target.place.name)
            if whole is not None:
                whole = whole if target.place.rows is None else whole.narrow(0, target.place.start, target.place.rows)
            known = base.get(target.name, whole)
            if known is not None:
                copied(known, dense.pop(target.name))
        if not dense:
            return
        header = self._piece.header
        phase.total = sum(map(header.bytes_of, dense))
        read_tensors(header, {name: weight for name, weight in dense.items() if name not in header.stored}, phase.tick)
        decode(header, {name: weight for name, weight in dense.items() if name in header.stored}, phase.tick)

    def _copied(self, dense: Mapping[str, torch.Tensor], old: _Kept | None, on_host: bool) -> _Kept | None:
        """A copy of base weights that are about to change, where there is room for it. old: what was kept before, whose memory serves.

        on_host: host memory will do where the device has no room.
        """
        have = {} if old is None else {name: old.weights[name] for name in dense.keys() & old.weights.keys()}
        size = sum(weight.nbytes for name, weight in dense.items() if name not in have)
        fits = size + self._spare <= free_memory(self._device)
        if not fits and not (on_host and host_has_room(size, self._device)):
            return None
        where = self._device if fits else torch.device("cpu")
        for name in have if old is not None and old.loras else ():
            have[name].copy_(dense[name])
        return _Kept((), {name: have[name] if name in have else weight.to(where, copy=True) for name, weight in dense.items()})


def _dense(module: nn.Module, found: Sequence[Target]) -> dict[str, torch.Tensor]:
    """Name in the file -> the weight, of those that are not kept as stored."""
    weights = {target.name: weight_of(module, target.place) for target in found}
    return {name: weight for name, weight in weights.items() if weight is not None}


def _sides(module: nn.Module) -> dict[str, Sided]:
    return {path: layer.storage for path, layer in module.named_modules() if isinstance(layer, Linear) and isinstance(layer.storage, Sided)}


def _key(loras: Sequence[Lora]) -> tuple[object, ...]:
    return tuple(lora.key for lora in loras)
