"""Sound of any rate and layout -> the log mel that the audio VAE encodes.

The level is taken as it is: nothing is normalised.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from ..config.audio import MelVAEConfig
from ..errors import InputError
from ..finite import all_finite
from .resample import resample

LOG_FLOOR = 1e-5
CENTRE = SURROUND = math.sqrt(0.5)  # ITU-R BS.775; the low-frequency channel is left out

# Gains into (left, right) by channel count, in the order video files use: L R C LFE, then surround pairs.
DOWN_MIX = {
    3: ((1, 0), (0, 1), (CENTRE, CENTRE)),
    4: ((1, 0), (0, 1), (SURROUND, 0), (0, SURROUND)),
    5: ((1, 0), (0, 1), (CENTRE, CENTRE), (SURROUND, 0), (0, SURROUND)),
    6: ((1, 0), (0, 1), (CENTRE, CENTRE), (0, 0), (SURROUND, 0), (0, SURROUND)),
    8: ((1, 0), (0, 1), (CENTRE, CENTRE), (0, 0), (SURROUND, 0), (0, SURROUND), (SURROUND, 0), (0, SURROUND)),
}


def log_mel(wave: torch.Tensor, rate: int, config: MelVAEConfig) -> torch.Tensor:
    """wave (B, channels, N) at `rate` Hz -> natural-log mel (B, channels, 1 + N' // hop, bins), N' samples at config.rate.

    Magnitudes of a centred, reflected STFT with a periodic Hann window, slaney mel filters of area 1 over 0 Hz to half
    the rate, floor 1e-5. A clip too short to reflect (32 ms) is filled up with silence.
    """
    wave = resample(wave, rate, config.rate)
    wave = F.pad(wave, (0, max(0, config.fft // 2 + 1 - wave.shape[-1])))
    batch, channels, length = wave.shape
    window = torch.hann_window(config.fft, dtype=torch.float64, device="cpu").to(wave.dtype).to(wave.device)
    spectrum = torch.stft(
        wave.reshape(batch * channels, length),
        config.fft,
        config.hop,
        window=window,
        center=True,
        pad_mode="reflect",
        return_complex=True,
    )
    filters = mel_filters(config.fft // 2 + 1, config.mel_bins, config.rate).to(wave.dtype).to(wave.device)
    mel = torch.matmul(spectrum.abs().transpose(1, 2), filters)
    return mel.clamp(min=LOG_FLOOR).log().view(batch, channels, -1, config.mel_bins)


def stereo(wave: torch.Tensor) -> torch.Tensor:
    """(B, channels, N) -> (B, 2, N): mono on both sides, two as they are, more mixed down.

    Each side of a mix is divided by the sum of its gains, so that nothing clips; a layout not in DOWN_MIX is averaged into
    both sides. Raises InputError for another shape, for no samples at all and for numbers that are not finite.
    """
    if wave.ndim != 3 or min(wave.shape) < 1:
        raise InputError(
            f"the audio has shape {list(wave.shape)}, wanted [batch, channels, samples] with at least one sample; use another clip."
        )
    if not all_finite(wave):
        raise InputError("the audio has samples that are not finite numbers; use another clip.")
    count = wave.shape[1]
    if count == 2:
        return wave
    if count == 1:
        return wave.expand(-1, 2, -1)
    gains = torch.tensor(DOWN_MIX.get(count, ((1, 1),) * count), dtype=wave.dtype, device=wave.device)
    return torch.einsum("bcn,cs->bsn", wave, gains / gains.sum(dim=0))


def mel_filters(frequencies: int, bins: int, rate: int) -> torch.Tensor:
    """Triangles on the slaney mel scale, each of area 1: (frequencies, bins), float64 on the CPU."""
    hertz = torch.linspace(0, rate / 2, frequencies, dtype=torch.float64, device="cpu")
    corners = _hertz(torch.linspace(0, _mel(rate / 2), bins + 2, dtype=torch.float64, device="cpu"))
    width = corners.diff()
    slope = corners - hertz[:, None]
    rising, falling = -slope[:, :-2] / width[:-1], slope[:, 2:] / width[1:]
    return torch.minimum(rising, falling).clamp(min=0) * (2 / (corners[2:] - corners[:-2]))


# The slaney scale: linear below 1 kHz (15 mel), then a factor of 6.4 every 27 mel.
_LINEAR = 200 / 3  # Hz per mel
_KNEE = 1000.0  # Hz
_STEP = math.log(6.4) / 27


def _mel(hertz: float) -> float:
    return hertz / _LINEAR if hertz < _KNEE else _KNEE / _LINEAR + math.log(hertz / _KNEE) / _STEP


def _hertz(mel: torch.Tensor) -> torch.Tensor:
    knee = _KNEE / _LINEAR
    return torch.where(mel < knee, mel * _LINEAR, _KNEE * torch.exp(_STEP * (mel - knee)))
