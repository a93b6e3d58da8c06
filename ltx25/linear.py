"""Linear layers by how their weights are stored: the one place that knows.

A layer is filled as in the file, with `weight` and `bias`. It may then be given another storage, which takes the place of
`weight`; nothing else of the model knows the difference, except that `quantised` says in which form the layer likes its
input. A further format is a further `Storage`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.fp8_linear import fp8_linear
from ..kernels.linear_gelu import linear_gelu
from ..kernels.quantise import Activation, Quantised, quantise, quantise_matrix, room


class Storage(Protocol):
    """A weight (out, in) in some format."""

    quantised: bool  # its product reads Quantised rows

    @property
    def nbytes(self) -> int: ...

    def product(self, x: Activation, bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """x (R, T, in), Quantised where `quantised`: (R, T, out) in the dtype of `like`, on its device."""

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """(out, in): the numbers it stands for."""


class Linear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.register_parameter("bias", nn.Parameter(torch.empty(outputs)) if bias else None)
        self.storage: Storage | None = None
        self._dtype_of: torch.Tensor | None = None  # empty; tells dtype and device of activations once `weight` is gone

    @property
    def quantised(self) -> bool:
        """Whether the layer wants its input in the form of kernels/quantise.py; given a plain one it quantises that first."""
        return self.storage is not None and self.storage.quantised

    def forward(self, x: Activation) -> torch.Tensor:
        """x (R, T, in): (R, T, out)."""
        if self.storage is None:
            return F.linear(x, self.weight, self.bias)
        if self.storage.quantised and not isinstance(x, Quantised):
            x = quantise(x)
        return self.storage.product(x, self.bias, self._dtype_of)

    def gelu(self, x: Activation) -> torch.Tensor:
        """tanh GELU of the product, within it where that can be."""
        if self.storage is None:
            return linear_gelu(x, self.weight, self.bias)
        return F.gelu(self(x), approximate="tanh")

    def store(self, storage: Storage) -> None:
        """Let `storage` take the place of `weight`, whose memory is free from here on."""
        self._dtype_of = self.weight.new_empty(0)
        self.storage = storage
        self.weight = None


class RowwiseE4M3:
    """e4m3 with a scale per output row. Inputs are quantised per row as well, sums are float32."""

    quantised = True

    def __init__(self, weight: Quantised) -> None:
        """weight (1, out, in), on its device."""
        self._weight = weight

    @property
    def nbytes(self) -> int:
        return self._weight.values.nbytes + self._weight.scale.nbytes

    def product(self, x: Activation, bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        return fp8_linear(x, self._weight, bias, like)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self._weight.dequantised(dtype)[0]


def store_e4m3(layers: Iterable[Linear]) -> int:
    """Let filled layers hold their weights as rows of e4m3, one after the other: beside them never more than one is held twice.

    What the file has as e4m3 keeps its bits. Returns the bytes they now take.
    """
    total = 0
    for layer in layers:
        if layer.storage is None:
            layer.store(RowwiseE4M3(quantise_matrix(layer.weight.detach())))
        else:
            layer.storage = RowwiseE4M3(layer.storage.e4m3())
        total += layer.storage.nbytes
    return total


def announce_e4m3(layers: Iterable[Linear]) -> None:
    """Let layers on meta hold rows of e4m3 that are not there yet: whoever writes their input has to know before they come."""
    for layer in layers:
        weight = layer.weight.detach()[None]
        layer.store(RowwiseE4M3(room(weight, weight.shape[-1], True)))


def e4m3_bytes(outputs: int, inputs: int) -> int:
    """What a weight (outputs, inputs) takes as rows of e4m3."""
    return outputs * (inputs + 4)
