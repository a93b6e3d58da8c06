"""Which LoRAs the transformer on the device has, and how it gets others.

A module that is being filled, or a block that comes to the device, is changed right then. A module that is there whole is
changed where it is: base weights come back bit for bit, from a copy that was kept where memory allowed it, else from the
file, and are changed anew. While the copy is there, going back and forth between the base and its LoRAs (stages of one
workflow) only exchanges the two: nothing is read or computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..checkpoint import decode, read_tensors
from ..instrument import Phase, Watch
from ..linear import Linear
from ..part import Part, Piece
from ..residency import free_memory
from .change import Sided, Target, apply, targets, weight_of, within
from .file import Lora

SPARE = 16 << 30  # bytes that a copy of changed weights leaves free on the device


@dataclass
class _Kept:
    """Another state of the weights: what they hold with `loras`, by name in the file; low-rank products by layer."""

    loras: tuple[Lora, ...]
    weights: dict[str, torch.Tensor]
    sides: dict[str, Sided] = field(default_factory=dict)


class Adapter:
    """The LoRAs of one part's first piece. `part.adapter` once there were any."""

    def __init__(self, piece: Piece, device: torch.device, spare: int = SPARE) -> None:
        self.loras: tuple[Lora, ...] = ()
        self.fuses = 0  # how often a module that was loaded was changed by computing
        self._piece = piece
        self._device = device
        self._spare = spare
        self._targets: list[Target] = []
        self._kept: _Kept | None = None

    @property
    def bytes(self) -> int:
        """To read for the LoRAs."""
        return sum(target.bytes for target in self._targets)

    def changed(self, piece: Piece, module: nn.Module, path: str, read: Callable[[int], None]) -> None:
        """Change `module`, just filled: the piece's, or its block at `path` ("transformer_blocks.3.")."""
        if self._targets and piece is self._piece:
            apply(module, within(self._targets, module, path), self._device, read)

    def forget(self) -> None:
        """Weights go, and with them what was kept of them."""
        self._kept = None

    @torch.inference_mode()
    def switch(self, part: Part, loras: Sequence[Lora], watch: Watch) -> None:
        """Let `part` have `loras` and no others, now or, where it is not on the device whole, from its next load on.

        A cancel or error inside leaves the part unloaded.
        """
        loras = tuple(loras)
        if _key(loras) == _key(self.loras):
            return
        if not part.loaded or part.streams:
            part.unload()
            self._set(part, loras)
            return
        try:
            self._change(part[self._piece.name], part, loras, watch)
        except BaseException:
            part.unload()
            self._set(part, loras)
            raise

    def _set(self, part: Part, loras: tuple[Lora, ...]) -> None:
        self.loras = loras
        self._targets = self._targets_of(loras) if loras else []
        beside: dict[str, list[int]] = {}
        for target in self._targets:
            numbers = (info.numel for _, pair in target.changes for info in (pair.a, pair.b))
            beside.setdefault(target.place.name, []).extend(number * self._piece.dtype.itemsize for number in numbers)
        part.carry(beside)

    def _change(self, module: nn.Module, part: Part, loras: tuple[Lora, ...], watch: Watch) -> None:
        kept, self._kept = self._kept, None
        if any(weight_of(module, target.place) is None for target in self._targets) or (kept and kept.sides) or loras:
            part.forget()  # graphs hold the addresses of low-rank products
        if kept is not None and _key(kept.loras) == _key(loras):
            self._kept = _Kept(self.loras, kept.weights, self._exchange(module, kept))
            self._set(part, loras)
            return
        with watch.phase("load.stage", total=0, unit="byte", part="LoRA", loras=[str(lora) for lora in loras]) as phase:
            if self.loras:
                self._restore(module, kept if kept and not kept.loras else None, phase)
            self._set(part, loras)
            if not loras:
                return
            phase.total = phase.done + self.bytes
            base = self._copied(module, {} if kept is None or kept.loras else kept.weights)
            apply(module, self._targets, self._device, phase.tick)
            self.fuses += 1
        self._kept = base

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

    def _restore(self, module: nn.Module, base: _Kept | None, phase: Phase) -> None:
        """Base weights where LoRAs changed them, as fill makes them."""
        for path, side in _sides(module).items():
            module.get_submodule(path).storage = side.base
        header = self._piece.header
        found = {target.name: weight_of(module, target.place) for target in self._targets}
        dense = {name: weight for name, weight in found.items() if weight is not None}
        if base is not None:
            for name, weight in dense.items():
                weight.copy_(base.weights[name])
            return
        phase.total = sum(map(header.bytes_of, dense))
        read_tensors(header, {name: weight for name, weight in dense.items() if name not in header.stored}, phase.tick)
        decode(header, {name: weight for name, weight in dense.items() if name in header.stored}, phase.tick)

    def _copied(self, module: nn.Module, have: dict[str, torch.Tensor]) -> _Kept | None:
        """A copy of the base weights that are about to change, where there is room for it. `have`: some of it."""
        found = {target.name: weight_of(module, target.place) for target in self._targets}
        dense = {name: weight for name, weight in found.items() if weight is not None}
        if sum(weight.nbytes for name, weight in dense.items() if name not in have) + self._spare > free_memory(self._device):
            return None
        return _Kept((), {name: have[name] if name in have else weight.clone() for name, weight in dense.items()})


def _sides(module: nn.Module) -> dict[str, Sided]:
    return {path: layer.storage for path, layer in module.named_modules() if isinstance(layer, Linear) and isinstance(layer.storage, Sided)}


def _key(loras: Sequence[Lora]) -> tuple[object, ...]:
    return tuple(lora.key for lora in loras)
