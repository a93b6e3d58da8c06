"""A filled transformer in fp8: which of its products, and when that is refused.

Inner blocks only. Text attention stays in bf16, and so do the first and the last block and all that is outside of them:
they are few, and their errors reach everything.
"""

from __future__ import annotations

import torch

from ...kernels.fp8_linear import supported
from ..errors import InputError
from ..linear import Linear, store_e4m3
from .block import Block
from .model import DiT


def check_fp8(device: torch.device) -> None:
    """Raise InputError where `device` cannot multiply in fp8: call it before weights are read."""
    if not supported(device):
        has = f"{torch.cuda.get_device_name(device)} has none" if device.type == "cuda" else f"'{device.type}' has none"
        raise InputError(f"precision fp8 needs a card with fp8 products (NVIDIA, compute capability 8.9 or newer), and {has}; choose precision=bf16.")


@torch.no_grad()
def quantise(dit: DiT) -> int:
    """Store the inner blocks' weights as row-wise e4m3, one after the other; returns the bytes these now take."""
    return sum(store_e4m3(fp8_layers(block)) for block in list(dit.transformer_blocks)[1:-1])


def fp8_layers(block: Block) -> list[Linear]:
    """The linear layers of a block that run in fp8: all but text attention's."""
    kept = {id(layer) for attention in (block.attn2, block.audio_attn2) for layer in attention.modules()}
    return [layer for layer in block.modules() if isinstance(layer, Linear) and id(layer) not in kept]
