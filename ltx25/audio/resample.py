"""Band-limited resampling between two rates: a sinc under a squared-cosine (Hann) window.

The published models were trained with torchaudio.functional.resample at its defaults (lowpass_filter_width 6, rolloff
0.99); this is the same filter.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

ZERO_CROSSINGS = 6  # of the sinc, on either side, inside the window
ROLLOFF = 0.99  # the cut-off as a part of the lower Nyquist frequency


def resample(wave: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """(..., N) at `source` Hz -> (..., ceil(N target / source)) at `target` Hz. Silence is assumed around the clip."""
    if source == target:
        return wave
    kernel, reach = sinc_kernel(source, target)
    step = source // math.gcd(source, target)
    padded = F.pad(wave.reshape(-1, 1, wave.shape[-1]), (reach, reach + step))
    out = polyphase(padded, kernel.to(wave.dtype).to(wave.device), step)
    wanted = -(-wave.shape[-1] * target // source)
    return out[..., :wanted].reshape(*wave.shape[:-1], wanted)


def upsample_held(wave: torch.Tensor, kernel: torch.Tensor, reach: int) -> torch.Tensor:
    """(B, C, N) -> (B, C, N times the kernel's phases); the first and last sample go on outside the clip."""
    batch, channels, length = wave.shape
    padded = F.pad(wave, (reach, reach), mode="replicate").view(batch * channels, 1, length + 2 * reach)
    return polyphase(padded, kernel, 1).view(batch, channels, -1)


def polyphase(wave: torch.Tensor, kernel: torch.Tensor, step: int) -> torch.Tensor:
    """(B, 1, N) -> (B, 1, phases * frames): every `step` input samples make one output sample per phase."""
    return F.conv1d(wave, kernel[:, None], stride=step).transpose(1, 2).reshape(wave.shape[0], 1, -1)


def sinc_kernel(source: int, target: int) -> tuple[torch.Tensor, int]:
    """Filters (phases, taps), float64 on the CPU, and the source samples they reach to the left of a step's first one.

    Both rates are divided by their common divisor; a step is `source` samples in and `target` out, one per phase.
    """
    divisor = math.gcd(source, target)
    source, target = source // divisor, target // divisor
    band = min(source, target) * ROLLOFF
    reach = math.ceil(ZERO_CROSSINGS * source / band)
    taps = torch.arange(-reach, reach + source, dtype=torch.float64, device="cpu") / source
    phases = torch.arange(target, dtype=torch.float64, device="cpu") / target
    t = ((taps - phases[:, None]) * band).clamp(-ZERO_CROSSINGS, ZERO_CROSSINGS)
    window = torch.cos(t * (math.pi / 2 / ZERO_CROSSINGS)).square()
    return torch.sinc(t) * window * (band / source), reach
