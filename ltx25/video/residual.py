"""Residual blocks of the convolutional decoder and the encoder."""

from __future__ import annotations

from collections import deque

import torch
from torch import nn

from .frames import Activated, Added, Convolved, FrameConv, Stage


class ResBlocks(nn.Module):
    """A stack of residual blocks of one width."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.res_blocks = nn.ModuleList(ResBlock(channels) for _ in range(layers))

    def around(self, stage: Stage, ahead: int) -> Stage:
        """The stack as stages that read `stage`; `ahead`: frames of the future its convolutions see."""
        for block in self.res_blocks:
            stage = block.around(stage, ahead)
        return stage


class ResBlock(nn.Module):
    """x + conv2(silu(norm(conv1(silu(norm(x)))))), the norm over channels without weights."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = FrameConv(channels, channels)
        self.conv2 = FrameConv(channels, channels)

    def around(self, before: Stage, ahead: int) -> Stage:
        """The block as stages that read `before`."""
        tap: deque[torch.Tensor] = deque()
        hidden = Convolved(self.conv1, Activated(before, tap), ahead)
        return Added(Convolved(self.conv2, Activated(hidden), ahead), tap, before)
