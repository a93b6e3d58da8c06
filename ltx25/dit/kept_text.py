"""Keys and values of the text, kept from one denoise for the next: a second stage at the same noise levels makes none.

They depend on the prompt, the weights and a stream's scalar sigma, and on nothing else: not on the clip's size, the seed or
the leg (with a positive text). Stage 2 of the distilled recipe runs over the last three sigmas of stage 1, so it finds
them all there; another seed of the same prompt does too. What was made is read again bit for bit.

One prompt and one state of the weights at a time, at few levels, in memory that would lie idle. At the published sizes a
level takes 48 blocks * 2 * 1024 tokens * (4096 + 2048) * 2 bytes = 1.2 GB and spares 4.1 TFLOP: 5 ms at the 790 TFLOP/s of an
H200, by arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

import torch

from .modality import Contexts

KeysValues = tuple[torch.Tensor, torch.Tensor]


class KeptTexts:
    """levels: the scalar sigmas at which anything is kept; limit: bytes to hold at most."""

    def __init__(self, levels: Collection[float], limit: int) -> None:
        self._levels = frozenset(levels)
        self._limit = limit
        self._room = 0
        self._prompt: Contexts | None = None
        self._weights: Hashable = None
        self._made: dict[tuple[str, float, int], KeysValues] = {}

    @property
    def bytes(self) -> int:
        """Held now."""
        return sum(tensor.nbytes for pair in self._made.values() for tensor in pair)

    def begin(self, prompt: Contexts, weights: Hashable, spare: int) -> None:
        """Before a denoise of the positive `prompt` by `weights` (equal values mean equal weights): what belongs to others goes.

        spare: bytes on the device that nobody will want; more than that, what is held already included, is not kept.
        """
        if self._prompt is None or weights != self._weights or not (_equal(prompt.video, self._prompt.video) and _equal(prompt.audio, self._prompt.audio)):
            self.drop()
            self._prompt, self._weights = prompt, weights
        held = self.bytes
        if spare < 0:
            self.drop()
            self._room = 0
        else:
            self._room = min(self._limit, held + spare) - held

    def drop(self) -> None:
        """Free everything: weights go, or memory is wanted. A denoise that runs goes on without."""
        self._made.clear()
        self._prompt, self._room = None, 0

    def at(self, stream: str, level: float) -> KeptLevel | None:
        """For the forwards of `stream` at the scalar sigma `level`; None where nothing is kept."""
        return KeptLevel(self, stream, level) if level in self._levels else None

    def get(self, key: tuple[str, float, int]) -> KeysValues | None:
        return self._made.get(key)

    def put(self, key: tuple[str, float, int], pair: KeysValues) -> None:
        size = sum(tensor.nbytes for tensor in pair)
        if size <= self._room:
            self._made[key] = tuple(map(_alone, pair))
            self._room -= size


@dataclass(frozen=True)
class KeptLevel:
    """What is kept of one stream at one level, by block."""

    texts: KeptTexts
    stream: str
    level: float

    def get(self, block: int) -> KeysValues | None:
        return self.texts.get((self.stream, self.level, block))

    def put(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.texts.put((self.stream, self.level, block), (keys, values))


@dataclass(frozen=True)
class StepTexts:
    """What a forward finds kept of either stream; None: nothing is."""

    video: KeptLevel | None
    audio: KeptLevel | None


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Values are a view of the product that keys were made of, which would stay whole as long as they do."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone(memory_format=torch.contiguous_format)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or (one.shape == other.shape and torch.equal(one, other))
