"""Whether a video latent can be what it says it is: what a wrong file or a sampling that did nothing leaves behind."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

NOISE_SPREAD = 0.1  # how far from 1 the root mean square of pure noise may be
NOISE_ALIKE = 0.1  # the most that neighbours of pure noise are alike
COMPARED = 1 << 17  # values of a latent whose neighbours are looked at: noise is noise in any of its channels
LEAST_VALUES = 1024  # neighbouring pairs below which chance alone could look so: likeness then scatters by 1 / sqrt(pairs)
SMALLEST, LARGEST = 0.1, 4.0  # root mean square of a normalised latent


def doubts(latent: torch.Tensor, loras: Sequence[str] = ()) -> tuple[str, ...]:
    """Notices about a finished, normalised video latent (B, C, t, h, w), made with `loras`; mostly none. Reads it where it is, once for its spread.

    Pure noise: root mean square within 0.1 of 1 and, in time, rows and columns, sum(a b) / sum(a^2) of neighbouring cells
    within 0.1 of 0. Both are true of N(0, 1): with 1024 pairs the second scatters by 0.03 and the first by less. Channels
    keep their mean, so that anything with a subject, or a flat colour, has neighbours that are alike.
    Scale: the statistics in a VAE file bring latents to a spread of about 1, so a root mean square below 0.1 or above 4 was
    made for other statistics, never normalised, or by a LoRA that overdrives the transformer. Statistics that differ by less pass: the latent alone cannot tell.
    """
    if latent.ndim != 5 or latent.numel() == 0:
        return ()  # refused elsewhere
    spread = float(torch.linalg.vector_norm(latent, dtype=torch.float32)) / latent.numel() ** 0.5
    if not math.isfinite(spread):
        return ()  # refused elsewhere
    if not SMALLEST <= spread <= LARGEST:
        told = f"The video latent's values spread by {spread:.3g} and a normalised latent's by about 1:"
        if loras:
            return (f"{told} is LoRA {', '.join(loras)} too strong?",)
        return (f"{told} was it made with another VAE, or by a LoRA that is too strong?",)
    if abs(spread - 1) <= NOISE_SPREAD and _neighbours_differ(latent[:, :: max(1, latent.numel() // COMPARED)].float()):
        return ("The video latent looks like noise: wrong VAE or text encoder pair, or a sampling that ended early?",)
    return ()


def _neighbours_differ(x: torch.Tensor) -> bool:
    """Whether cells next to each other have nothing in common, along every axis with enough of them; False without any."""
    alike = []
    for axis in (2, 3, 4):
        before, after = x.narrow(axis, 0, x.shape[axis] - 1), x.narrow(axis, 1, x.shape[axis] - 1)
        if before.numel() >= LEAST_VALUES:
            alike.append(float((before * after).mean() / x.square().mean()))
    return bool(alike) and max(map(abs, alike)) <= NOISE_ALIKE
