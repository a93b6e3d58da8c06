"""Formats and stored weights as objects: `Format` decodes what a file holds, `Weight` is a matrix kept as it is stored.

A `Weight` fits ltx25/linear.py's Storage: the layer that holds it multiplies without knowing the format. Rows of different
formats may stand in one matrix (`Stacked`): merged projections whose parts the file keeps apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
import torch.nn.functional as F

from ...kernels.int8_linear import int8_linear, supported
from ...kernels.nvfp4_linear import TILE_ROWS, nvfp4_linear, runs
from ...kernels.quantise import E4M3, Quantised, quantise_matrix
from .fp8 import dequantise_fp8
from .ggml import BlockType, dequantise_ggml, halves_of
from .int8 import dequantise_int8, row_scale
from .nvfp4 import dequantise_nvfp4


class Held(Enum):
    """What becomes of quantised weights once they are loaded."""

    DENSE = "decoded on load"
    EXACT = "as stored, multiplied in the precision of activations"
    FAST = "as stored but for nvfp4, multiplied in their own precision where the device can"
    NATIVE = "the same on a device that multiplies nvfp4: that stays as stored too"
    FP8 = "fp8 as stored, all others decoded on load: what is then multiplied in fp8 has been rounded once"


_AS_STORED = (Held.EXACT, Held.FAST, Held.NATIVE)
Parts = Mapping[str, torch.Tensor]  # of one weight, by role: "weight", "scale", ...


class Weight(Protocol):
    """A matrix (out, in) in some format, on its device."""

    quantised: bool  # always False: products read plain activations
    rows: int

    @property
    def nbytes(self) -> int: ...

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """x (..., in), bias (out,) or None: x W^T + bias, (..., out) in the dtype of `like`."""

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """(out, in): the numbers it stands for."""

    def e4m3(self) -> Quantised:
        """(1, out, in): what fp8 products read. Rows that are e4m3 already keep their bits, others are rounded."""


class Format(Protocol):
    """How one weight is stored. Equal formats of one width may be stacked row by row."""

    name: str
    scales: tuple[str, ...]  # roles of numbers that a weight, or a row of it, is multiplied by: above 0 in any sound file

    def stays(self, held: Held) -> bool:
        """Whether weights stay in this format on the device; else they are decoded when they are loaded."""

    def decode(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """The weight in its logical shape."""

    def inside(self, parts: Parts) -> Sequence[torch.Tensor]:
        """Floating numbers that stand inside of bytes."""

    def weight(self, stack: Sequence[Parts], exact: bool) -> Weight:
        """The weights of `stack`, one below the other, as stored. exact: products in full precision of the activations."""


@dataclass(frozen=True)
class Int8:
    """See int8.py. group: columns turned together; None: not turned."""

    group: int | None
    name = "int8"
    scales = ("scale",)

    def stays(self, held: Held) -> bool:
        return held in _AS_STORED

    def decode(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        return dequantise_int8(parts["weight"], parts["scale"], self.group, dtype)

    def inside(self, parts: Parts) -> Sequence[torch.Tensor]:
        return ()

    def weight(self, stack: Sequence[Parts], exact: bool) -> Weight:
        return Int8Weight(_rows(stack, "weight"), _scales(stack), self.group, exact)


@dataclass(frozen=True)
class Fp8:
    """See fp8.py."""

    name = "fp8"
    scales = ("scale",)

    def stays(self, held: Held) -> bool:
        return held in _AS_STORED or held is Held.FP8

    def decode(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        return dequantise_fp8(parts["weight"], parts.get("scale"), dtype)

    def inside(self, parts: Parts) -> Sequence[torch.Tensor]:
        return ()

    def weight(self, stack: Sequence[Parts], exact: bool) -> Weight:
        scaled = any("scale" in parts for parts in stack)
        return Fp8Weight(_rows(stack, "weight"), _scales(stack) if scaled else None)


@dataclass(frozen=True)
class Nvfp4:
    """See nvfp4.py. Decoded on load where the device does not multiply it."""

    name = "nvfp4"
    scales = ("scale_2",)  # those of single blocks may be 0

    def stays(self, held: Held) -> bool:
        return held is Held.NATIVE

    def decode(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        return dequantise_nvfp4(parts["weight"], parts["scale"], parts["scale_2"], dtype)

    def inside(self, parts: Parts) -> Sequence[torch.Tensor]:
        return ()

    def weight(self, stack: Sequence[Parts], exact: bool) -> Weight:
        if len(stack) > 1 and any(len(parts["weight"]) % TILE_ROWS for parts in stack):  # a tile would hold rows of two
            return Stacked([self.weight([parts], exact) for parts in stack])
        scales = torch.cat([parts["scale"].flatten() for parts in stack])
        rows = torch.cat([parts["scale_2"].float().reshape(1, 1).expand(len(parts["weight"]), 1) for parts in stack])
        inputs = [parts["input_scale"].float().reshape(()) for parts in stack if "input_scale" in parts]
        # Merged weights read one input: the widest of its calibrated scales holds it for all.
        x_scale = torch.stack(inputs).amax() if len(inputs) == len(stack) else None
        return Nvfp4Weight(_rows(stack, "weight"), scales, rows, x_scale, exact)


@dataclass(frozen=True)
class Ggml:
    """See ggml.py. shape: the logical one, which the bytes do not tell where rows were flattened."""

    kind: BlockType
    shape: tuple[int, ...]
    scales = ()

    def stays(self, held: Held) -> bool:
        """A block that holds the end of one row and the start of the next has no place in a matrix of rows."""
        return held in _AS_STORED and self.shape[-1] % self.kind.weights == 0

    @property
    def name(self) -> str:
        return f"GGUF {self.kind.name}"

    def decode(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        return dequantise_ggml(parts["weight"], self.kind, dtype).view(self.shape)

    def inside(self, parts: Parts) -> Sequence[torch.Tensor]:
        return halves_of(parts["weight"], self.kind)

    def weight(self, stack: Sequence[Parts], exact: bool) -> Weight:
        return GgmlWeight(_rows(stack, "weight"), self.kind)


class Widened:
    """A weight whose products are those of its dense form, made for each product and dropped after it."""

    quantised = False
    rows: int

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.dense(like.dtype), bias)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError

    def e4m3(self) -> Quantised:
        return quantise_matrix(self.dense(torch.float32))


class Int8Weight(Widened):
    """values (N, K) int8, scale (N, 1) float32. Multiplied in int8 where that is allowed and the device can."""

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, group: int | None, exact: bool) -> None:
        self.values, self.scale, self.group = values, scale, group
        self.rows = len(values)
        self._int8 = not exact and supported(values.device)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        if self._int8:
            return int8_linear(x, self.values, self.scale, bias, self.group, like.dtype)
        return super().product(x, bias, like)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantise_int8(self.values, self.scale, self.group, dtype)


class Fp8Weight(Widened):
    """values (N, K) e4m3 or e5m2, scale (N, 1) float32 or None."""

    def __init__(self, values: torch.Tensor, scale: torch.Tensor | None) -> None:
        self.values, self.scale = values, scale
        self.rows = len(values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantise_fp8(self.values, self.scale, dtype)

    def e4m3(self) -> Quantised:
        if self.values.dtype is not E4M3:
            return super().e4m3()
        scale = self.values.new_ones((self.rows, 1), dtype=torch.float32) if self.scale is None else self.scale
        return Quantised(self.values[None], scale[None])


class Nvfp4Weight(Widened):
    """values (N, K / 2) uint8, scales e4m3 in tiles, scale (N, 1) float32; x_scale () of activations, None: their own.

    Multiplied in four bits where that is allowed and the device can and was seen right, else decoded for each product.
    """

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor, x_scale: torch.Tensor | None, exact: bool) -> None:
        self.values, self.scales, self.scale, self.x_scale = values, scales, scale, x_scale
        self.rows = len(values)
        self._exact = exact

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.values, self.scales, self.scale, self.x_scale) if part is not None)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        if not self._exact and runs(self.values, like):
            return nvfp4_linear(x, self.values, self.scales, self.scale, self.x_scale, bias, like.dtype)
        return super().product(x, bias, like)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantise_nvfp4(self.values, self.scales, self.scale, dtype)


class GgmlWeight(Widened):
    """bytes (N, row bytes) uint8."""

    def __init__(self, values: torch.Tensor, kind: BlockType) -> None:
        self.values, self.kind = values, kind
        self.rows = len(values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantise_ggml(self.values, self.kind, dtype)


class Dense(Widened):
    """Rows that the file does not quantise, beside others that it does."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.rows = len(values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values.to(dtype)


class Stacked:
    """Weights of any formats, one below the other."""

    quantised = False

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = tuple(part for weight in weights for part in (weight.weights if isinstance(weight, Stacked) else (weight,)))
        self.rows = sum(weight.rows for weight in self.weights)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        biases = [None] * len(self.weights) if bias is None else bias.split([weight.rows for weight in self.weights])
        return torch.cat([weight.product(x, own, like) for weight, own in zip(self.weights, biases, strict=True)], dim=-1)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([weight.dense(dtype) for weight in self.weights])

    def e4m3(self) -> Quantised:
        parts = [weight.e4m3() for weight in self.weights]
        return Quantised(torch.cat([part.values for part in parts], 1), torch.cat([part.scale for part in parts], 1))


def _rows(stack: Sequence[Parts], role: str) -> torch.Tensor:
    return stack[0][role] if len(stack) == 1 else torch.cat([parts[role] for parts in stack])


def _scales(stack: Sequence[Parts]) -> torch.Tensor:
    """(rows, 1) float32; weights without a scale have 1."""
    columns = []
    for parts in stack:
        scale = parts.get("scale")
        rows = len(parts["weight"])
        columns.append(parts["weight"].new_ones((rows, 1), dtype=torch.float32) if scale is None else row_scale(scale, rows).float())
    return torch.cat(columns).contiguous()
