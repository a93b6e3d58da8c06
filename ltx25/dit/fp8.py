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
    blocks = dit.transformer_blocks
    return sum(store_e4m3(fp8_layers(block, number, len(blocks)).values()) for number, block in enumerate(blocks))


def fp8_layers(block: Block, number: int, count: int) -> dict[str, Linear]:
    """The linear layers, by path, that run in fp8 in block `number` of `count`: all but text attention's, none in the outermost."""
    if number in (0, count - 1):
        return {}
    kept = {id(layer) for attention in (block.attn2, block.audio_attn2) for layer in attention.modules()}
    return {path: layer for path, layer in block.named_modules() if isinstance(layer, Linear) and id(layer) not in kept}
