"""Packed hidden states -> one feature row per token for each stream."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..config.text import FeatureConfig


class FeatureProjection(nn.Module):
    """Two linear maps of the same rows. Names are those below `text_embedding_projection.`."""

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.config = config
        self.video_aggregate_embed = nn.Linear(config.hidden * config.states, config.video_width)
        self.audio_aggregate_embed = nn.Linear(config.hidden * config.states, config.audio_width)

    def forward(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """packed (n, H * S) -> video (n, D), audio (n, Da)."""
        return self._project(self.video_aggregate_embed, packed), self._project(self.audio_aggregate_embed, packed)

    def _project(self, linear: nn.Linear, packed: torch.Tensor) -> torch.Tensor:
        """W (packed * sqrt(D / H)) + b, one product with the factor applied to its float32 sums: the bias is not scaled,
        and no rescaled copy of the rows is made or rounded."""
        factor = math.sqrt(linear.out_features / self.config.hidden)
        return torch.addmm(linear.bias, packed, linear.weight.t(), alpha=factor)
