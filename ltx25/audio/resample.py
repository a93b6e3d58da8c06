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
BLOCK = 32  # output samples that are made by one matrix: its other side is what they reach of the source
ROWS = 4096  # blocks of one channel that are made at once: bounds what is copied, whatever the length of the clip


def resample(wave: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """(..., N) at `source` Hz -> (..., ceil(N target / source)) at `target` Hz. Silence is assumed around the clip.

    A step is the least number of source samples that a whole number of output samples, BLOCK or more, lies on. An output
    sample of a step reaches few of its source samples, so the step's filters are made and applied BLOCK rows at a time:
    the whole table of rates with few common divisors has a gigabyte and more, nearly all of it zeros.
    """
    if source == target:
        return wave
    wanted = -(-wave.shape[-1] * target // source)
    divisor = math.gcd(source, target)
    source, target = source // divisor, target // divisor
    repeats = -(-BLOCK // target)
    step, phases, reach = source * repeats, target * repeats, sinc_reach(source, target)
    steps = -(-wanted // phases)
    flat = wave.reshape(-1, wave.shape[-1])
    padded = F.pad(flat, (reach, max(0, steps * step + reach - wave.shape[-1])))
    out = wave.new_empty(len(flat), steps, phases)
    for start in range(0, min(phases, wanted), BLOCK):
        made = range(start, min(start + BLOCK, phases))
        taps = range(made[0] * source // target - reach, made[-1] * source // target + reach + 1)
        kernel = sinc_filters(source, target, made, taps).T.to(wave.dtype).to(wave.device).expand(len(flat), -1, -1)
        windows = padded[:, taps.start + reach :].unfold(1, len(taps), step)  # (channels, steps, taps), a view
        for first in range(0, steps, ROWS):
            rows = slice(first, min(first + ROWS, steps))
            out[:, rows, made.start : made.stop] = torch.bmm(windows[:, rows], kernel)
    return out.view(len(flat), -1)[:, :wanted].reshape(*wave.shape[:-1], wanted)


def upsample_held(wave: torch.Tensor, kernel: torch.Tensor, reach: int) -> torch.Tensor:
    """(B, C, N) -> (B, C, N times the kernel's phases); the first and last sample go on outside the clip."""
    batch, channels, length = wave.shape
    padded = F.pad(wave, (reach, reach), mode="replicate").view(batch * channels, 1, length + 2 * reach)
    return F.conv1d(padded, kernel[:, None]).transpose(1, 2).reshape(batch, channels, -1)


def sinc_kernel(source: int, target: int) -> tuple[torch.Tensor, int]:
    """Filters (phases, taps), float64 on the CPU, and the source samples they reach to the left of a step's first one.

    Both rates are divided by their common divisor; a step is `source` samples in and `target` out, one per phase.
    """
    divisor = math.gcd(source, target)
    source, target = source // divisor, target // divisor
    reach = sinc_reach(source, target)
    return sinc_filters(source, target, range(target), range(-reach, reach + source)), reach


def sinc_reach(source: int, target: int) -> int:
    """Source samples on either side, rounded up, beyond which a filter between the rates is zero."""
    return math.ceil(ZERO_CROSSINGS * source / (min(source, target) * ROLLOFF))


def sinc_filters(source: int, target: int, phases: range, taps: range) -> torch.Tensor:
    """(phases, taps), float64 on the CPU: what source sample `taps[j]` is worth to output sample `phases[i]`, both counted from one moment."""
    band = min(source, target) * ROLLOFF
    there = torch.arange(taps.start, taps.stop, dtype=torch.float64, device="cpu") / source
    here = torch.arange(phases.start, phases.stop, dtype=torch.float64, device="cpu") / target
    t = ((there - here[:, None]) * band).clamp(-ZERO_CROSSINGS, ZERO_CROSSINGS)
    window = torch.cos(t * (math.pi / 2 / ZERO_CROSSINGS)).square()
    return torch.sinc(t) * window * (band / source)
