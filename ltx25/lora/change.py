"""LoRAs on a filled module. Dense weights become W + sum of strength * scale * B A, added in float32 and rounded once; the
official loader adds in bf16. A weight kept as it is stored stays that, and its layer adds (x A^T) B^T to its product: a
change far below the format's own steps would vanish in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.low_rank import LowRank, add_low_rank, passing_bytes
from ...kernels.quantise import Activation, Quantised
from ..checkpoint import Header, expected
from ..checkpoint.fill import Slice
from ..linear import Linear, Storage
from .factors import Changes, Factors
from .file import Lora, Pair

_AT_ONCE = 1 << 30  # bytes of pairs on the device at a time


@dataclass(frozen=True)
class Branch:
    """b (rows, rank) writes outputs [start, start + rows) from ranks [first, first + rank) of a Sided's `a`."""

    b: torch.Tensor
    start: int
    first: int


class Sided:
    """A stored weight (linear.Storage) and low-rank products beside it. a (ranks, in) holds the first factors of all."""

    def __init__(self, base: Storage, a: torch.Tensor, branches: Sequence[Branch]) -> None:
        self.base, self.a, self.branches = base, a, tuple(branches)
        self.quantised = base.quantised

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + self.a.nbytes + sum(branch.b.nbytes for branch in self.branches)

    def product(self, x: Activation, bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        y = self.base.product(x, bias, like)
        low = F.linear(x.dequantised(like.dtype) if isinstance(x, Quantised) else x, self.a)
        for branch in self.branches:
            rows, rank = branch.b.shape
            y.narrow(-1, branch.start, rows).add_(F.linear(low.narrow(-1, branch.first, rank), branch.b))
        return y

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        whole = self.base.dense(torch.promote_types(dtype, torch.float32))
        for branch in self.branches:
            rows, rank = branch.b.shape
            whole.narrow(0, branch.start, rows).add_(branch.b.to(whole.dtype) @ self.a.narrow(0, branch.first, rank).to(whole.dtype))
        return whole.to(dtype)


@dataclass(frozen=True)
class Target:
    """A tensor of the base file that LoRAs change: where it is in the module, and by what, in order."""

    name: str
    place: Slice
    changes: tuple[tuple[Lora, Pair], ...]

    @property
    def bytes(self) -> int:
        return sum(pair.bytes for _, pair in self.changes)

    @property
    def passing(self) -> int:
        """Bytes on the device, beside the pairs as they are stored, while the weight is changed."""
        _, first = self.changes[0]
        return passing_bytes(first.b.shape[0], first.a.shape[1], sum(pair.a.shape[0] for _, pair in self.changes))


Fetch = Callable[[Changes], Factors]  # (LoRA, pair) of a few targets -> their tensors on the device


def targets(blank: nn.Module, header: Header, prefix: str, loras: Sequence[Lora]) -> list[Target]:
    """What the LoRAs change of a module whose tensors are below `prefix` in the base file, in file order of the first.

    blank: the module before it is filled, on meta: filled layers may have let go of their parameters.
    """
    found = []
    for relative, place in expected(blank, header, prefix).items():
        name = prefix + relative
        changes = tuple((lora, lora.pairs[name]) for lora in loras if name in lora.pairs)
        if changes:
            found.append(Target(name, place, changes))
    return sorted(found, key=lambda target: target.changes[0][1].a.begin)


def within(found: Sequence[Target], module: nn.Module, path: str) -> list[Target]:
    """The targets that are in `module`, the part at `path` ("transformer_blocks.3." or "") of the whole, in its own names."""
    there = {name for name, _ in module.named_modules()}
    mine = [replace(one, place=replace(one.place, name=one.place.name.removeprefix(path))) for one in found if one.place.name.startswith(path)]
    return [one for one in mine if one.place.name.rpartition(".")[0] in there]


def apply(module: nn.Module, found: Sequence[Target], fetch: Fetch, at_once: int | None = _AT_ONCE) -> None:
    """Change a filled `module` by targets `within` it, none of them applied yet. Where `fetch` raises, the module is to be dropped.

    at_once: bytes of pairs to have on the device at a time; None: all.
    """
    sides: dict[str, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
    for batch in [found] if at_once is None else _batches(found, at_once):
        factors = fetch([change for target in batch for change in target.changes])
        for target in batch:
            weight = weight_of(module, target.place)
            if weight is not None:
                _fuse(weight, target, factors)
            else:
                start, path = target.place.start, target.place.name.rpartition(".")[0]
                sides.setdefault(path, []).extend((start, *_scaled(factors, lora, pair)) for lora, pair in target.changes)
    for path, parts in sides.items():
        layer: Linear = module.get_submodule(path)
        layer.storage = _sided(layer, parts)


def weight_of(module: nn.Module, place: Slice) -> torch.Tensor | None:
    """The rows of a dense parameter that `place` means; None where the layer keeps its weight as stored."""
    path, _, leaf = place.name.rpartition(".")
    parameter = module.get_submodule(path)._parameters.get(leaf)
    return None if parameter is None else _rows(parameter.data, place)


def fuse_in(weights: Mapping[str, torch.Tensor], found: Sequence[tuple[str, Target]], factors: Factors) -> None:
    """Change dense weights, by name, where they are."""
    for name, target in found:
        _fuse(_rows(weights[name], target.place), target, factors)


def _rows(weight: torch.Tensor, place: Slice) -> torch.Tensor:
    return weight if place.rows is None else weight.narrow(0, place.start, place.rows)


def _fuse(weight: torch.Tensor, target: Target, factors: Factors) -> None:
    found = [(factors[lora.file, pair.a.name], factors[lora.file, pair.b.name], lora.strength * pair.scale) for lora, pair in target.changes]
    add_low_rank(weight, [LowRank(*one) for one in found])


def _scaled(factors: Factors, lora: Lora, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = factors[lora.file, pair.a.name], factors[lora.file, pair.b.name]
    return a, b[:, : len(a)].float() * (lora.strength * pair.scale)


def _sided(layer: Linear, parts: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> Sided:
    dtype = layer._dtype_of.dtype
    branches, first = [], 0
    for start, a, b in parts:
        branches.append(Branch(b.to(dtype), start, first))
        first += len(a)
    return Sided(layer.storage, torch.cat([a.to(dtype) for _, a, _ in parts]), branches)


def _batches(found: Sequence[Target], at_once: int) -> Iterator[list[Target]]:
    batch: list[Target] = []
    for target in found:
        if batch and sum(one.bytes for one in batch) + target.bytes > at_once:
            yield batch
            batch = []
        batch.append(target)
    if batch:
        yield batch

