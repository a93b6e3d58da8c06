"""Prompt -> text features: tokenizer, Gemma tower, projections. What comes next, the connectors, is in connector.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..instrument import Tick, Watch
from ..replay import Replay
from .features import FeatureProjection
from .tokenizer import MAX_TOKENS, TokenCount, Tokenizer
from .tower import Tower, working_bytes

__all__ = ["MAX_TOKENS", "FeatureProjection", "Features", "TextEncoder", "TokenCount", "Tokenizer", "Tower", "run_length", "working_bytes"]

STEP = 128  # tokens: the rows a tensor core's product computes at once or in two
SHORT = 512  # tokens of a tower whose launches take longer than its arithmetic on a fast device


@dataclass(frozen=True)
class Features:
    """One prompt, only its valid tokens: video (1, n, D), audio (1, n, Da), n = tokens.used."""

    video: torch.Tensor
    audio: torch.Tensor
    tokens: TokenCount


class TextEncoder:
    """The three steps in order, on modules that are already loaded. replay: graphs of that tower; None: none are made."""

    def __init__(self, tokenizer: Tokenizer, tower: Tower, projection: FeatureProjection, replay: Replay | None) -> None:
        self._replay = replay
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
            packed = self._packed(ids, phase.tick)[: len(ids)]
        with watch.phase("text.project", total=1, unit="projection", tokens=tokens.used) as phase:
            video, audio = self._projection(packed)
            phase.tick(1)
        return Features(video[None], audio[None], tokens)

    def _packed(self, ids: list[int], tick: Tick) -> torch.Tensor:
        """The tower's rows of `ids` and, behind them, of what fills up to `run_length`."""
        tower = self._tower
        device = tower.embed_tokens.weight.device
        length = run_length(len(ids), device)
        row = torch.tensor(ids + [tower.config.pad] * (length - len(ids)), device=device)
        if self._replay is None or length > SHORT:
            return tower(row, tick)
        return self._replay(tower, (row,), tick, tower.config.layers)


def run_length(tokens: int, device: torch.device) -> int:
    """How many tokens run for `tokens` valid ones, behind which the pads come: no token sees what follows it.

    Short prompts run at a few lengths on CUDA, so that a graph serves many of them and equal kernels run with and without
    one; the rows cost nothing there, since weights are what is read. Valid rows are equal to rounding.
    """
    return -(-tokens // STEP) * STEP if device.type == "cuda" and tokens <= SHORT else tokens
