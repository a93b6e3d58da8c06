"""Sound -> audio latent: the entry the engine calls."""

from __future__ import annotations

import torch
from torch import nn

from ..config.audio import AudioConfig
from ..errors import InputError
from ..finite import all_finite
from ..instrument import Watch
from ..precision import full_precision
from ..shapes import MEL_PER_LATENT
from .encoder import MelEncoder
from .layers import ChannelStatistics
from .mel import log_mel, stereo

UNUSED = ("audio_vae.decoder.*", "vocoder.*")  # audio/decode.py has them
MAX_RATE = 768000  # Hz


class SoundEncoder(nn.Module):
    """Everything between a wave and its audio latent. Parameter names are the file's (prefix "")."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        self.audio_vae = nn.Module()
        self.audio_vae.encoder = MelEncoder(config.vae)
        self.audio_vae.per_channel_statistics = ChannelStatistics(config.vae.latent_channels, config.vae.latent_bins)


def encode_audio(model: SoundEncoder, wave: torch.Tensor, rate: int, watch: Watch) -> torch.Tensor:
    """wave (B, channels, N) at `rate` Hz -> normalised latent (B, 8, n, 16) float32 on the CPU, 25 frames a second.

    n = ceil((1 + N' // 160) / 4) for N' samples at 16 kHz. Any layout and rate; the level is taken as it is.
    Raises InputError for an empty clip, another shape, an impossible rate or samples that are not finite.
    """
    check_sound(wave, rate)
    wave = stereo(wave)
    parameter = next(model.parameters())
    mel_frames = max(1 + -(-wave.shape[-1] * model.config.vae.rate // rate) // model.config.vae.hop, 1)
    encoder = model.audio_vae.encoder
    total = wave.shape[0] * encoder.chunks(mel_frames) * encoder.ticks
    size = {"latent_frames": -(-mel_frames // MEL_PER_LATENT), "batch": len(wave)}
    with watch.phase("encode.audio", total=total, unit="layer", **size) as phase, torch.no_grad(), full_precision():
        latents = []
        for item in wave.split(1):
            mel = log_mel(item.to(parameter.device, parameter.dtype), rate, model.config.vae)
            latent = encoder.encode(mel, phase.tick)
            latents.append(model.audio_vae.per_channel_statistics.normalize(latent).to("cpu", torch.float32))
        latent = torch.cat(latents)
        if not all_finite(latent):
            raise InputError("encode.audio made a latent that is not finite; the audio VAE file is damaged.")
    return latent


def check_sound(wave: torch.Tensor, rate: int) -> None:
    """Raise InputError for an impossible rate in Hz, and for samples that are no fractions of the full level."""
    if not 1 <= rate <= MAX_RATE:
        raise InputError(f"the audio has a sample rate of {rate} Hz, wanted 1 to {MAX_RATE}; use another clip.")
    if not wave.is_floating_point():
        raise InputError(f"the audio has samples of type {str(wave.dtype).removeprefix('torch.')}, wanted floating-point ones in -1 to 1; divide them by the highest value of their type.")
