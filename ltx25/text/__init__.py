"""Prompt -> text features: tokenizer, Gemma tower, projections. What comes next, the connectors, is in connector.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..instrument import Watch
from .features import FeatureProjection
from .tokenizer import MAX_TOKENS, TokenCount, Tokenizer
from .tower import Tower, working_bytes

__all__ = ["MAX_TOKENS", "FeatureProjection", "Features", "TextEncoder", "TokenCount", "Tokenizer", "Tower", "working_bytes"]


@dataclass(frozen=True)
class Features:
    """One prompt, only its valid tokens: video (1, n, D), audio (1, n, Da), n = tokens.used."""

    video: torch.Tensor
    audio: torch.Tensor
    tokens: TokenCount


class TextEncoder:
    """The three steps in order, on modules that are already loaded."""

    def __init__(self, tokenizer: Tokenizer, tower: Tower, projection: FeatureProjection) -> None:
        self._tokenizer = tokenizer
        self._tower = tower
        self._projection = projection

    @torch.no_grad()
    def encode(self, text: str, watch: Watch) -> Features:
        """Features of `text` on the tower's device. Phases text.tokenize, text.tower (a tick per layer), text.project.

        A prompt that is too long is cut, which the first phase says; `Features.tokens` keeps the counts.
        Raises InputError for a text that is not Unicode.
        """
        with watch.phase("text.tokenize", total=1, unit="prompt") as phase:
            ids, tokens = self._tokenizer.encode(text)
            phase.tick(1, str(tokens), tokens=tokens.used, prompt_tokens=tokens.prompt)
        tower = self._tower
        with watch.phase("text.tower", total=tower.config.layers, unit="layer", tokens=tokens.used) as phase:
            packed = tower(torch.tensor(ids, device=tower.embed_tokens.weight.device), phase)
        with watch.phase("text.project", total=1, unit="projection", tokens=tokens.used) as phase:
            video, audio = self._projection(packed)
            phase.tick(1)
        return Features(video[None], audio[None], tokens)
