"""Audio latent -> sound: the entry the engine calls."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..config.audio import CHANNELS, AudioConfig
from ..errors import InputError
from ..finite import all_finite
from ..instrument import Tick, Watch
from ..precision import full_precision
from ..replay import Replay
from .decoder import MelDecoder
from .layers import KEPT_GRAPHS, ChannelStatistics
from .vocoder import Vocoder

# Tensors of an audio VAE file that decoding does not need: the encoder (audio/encode.py), and an inverse transform
# that no version of the model uses.
UNUSED = ("audio_vae.encoder.*", "vocoder.mel_stft.stft_fn.inverse_basis")


class SoundDecoder(nn.Module):
    """Everything between an audio latent and its wave. Parameter names are the file's (prefix "")."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        self.audio_vae = nn.Module()
        self.audio_vae.decoder = MelDecoder(config.vae)
        self.audio_vae.per_channel_statistics = ChannelStatistics(config.vae.latent_channels, config.vae.latent_bins)
        self.vocoder = Vocoder(config)
        self._replay = Replay("the sound decoder", KEPT_GRAPHS)

    def decode(self, latent: torch.Tensor, tick: Tick) -> torch.Tensor:
        """`forward`, as one graph on a GPU where the clip is one chunk; longer clips replay chunk by chunk."""
        frames = latent.shape[2]
        return (
            self._replay(self, (latent,), tick, self.ticks(frames))
            if self.audio_vae.decoder.chunks(frames) == 1
            else self(latent, tick)
        )

    def forward(self, latent: torch.Tensor, tick: Tick) -> torch.Tensor:
        """(1, C, n, bins), normalised -> (1, 2, samples)."""
        latent = self.audio_vae.per_channel_statistics.denormalize(latent)
        return self.vocoder(self.audio_vae.decoder.decode(latent, tick), tick)

    def ticks(self, frames: int) -> int:
        """Ticks of a whole `forward` over that many latent frames."""
        decoder = self.audio_vae.decoder
        return decoder.chunks(frames) * decoder.ticks + self.vocoder.ticks(self.config.vae.mel_frames(frames))


def decode_audio(model: SoundDecoder, latent: torch.Tensor, watch: Watch, samples: int | None = None) -> torch.Tensor:
    """The sound of `latent` (B, 8, n, 16), normalised: (B, 2, N) float32 on the CPU, in [-1, 1], at 48 kHz.

    N is 480 (4 n - 3), or `samples`: the tail is cut, or padded with silence. Batch items are decoded one by one, so
    that each sounds as it does alone and memory does not grow with the batch. Level is never changed.

    Raises InputError for a latent of another shape or with numbers that are not finite.
    """
    check_latent(model, latent)
    parameter = next(model.parameters())
    total = latent.shape[0] * model.ticks(latent.shape[2])
    size = {"latent_frames": latent.shape[2], "batch": len(latent)}
    with watch.phase("decode.audio", total=total, unit="layer", **size) as phase, torch.no_grad(), full_precision():
        waves = []
        for item in latent.split(1):
            wave = model.decode(item.to(parameter.device, parameter.dtype), phase.tick)
            waves.append(wave.to("cpu", torch.float32))
        wave = torch.cat(waves)
        if not all_finite(wave):
            raise InputError(
                "decode.audio made samples that are not finite numbers; the audio latent or the audio VAE file is damaged."
            )
    if samples is not None:
        wave = F.pad(wave[..., :samples], (0, max(0, samples - wave.shape[-1])))
    return wave.contiguous()


def check_latent(model: SoundDecoder, latent: torch.Tensor) -> None:
    """Raise InputError unless `latent` is a finite (B, channels, n, bins) of this model, n at least 1."""
    vae = model.config.vae
    wanted = (vae.latent_channels, vae.latent_bins)
    if latent.ndim != 4 or (latent.shape[1], latent.shape[3]) != wanted or min(latent.shape) < 1:
        raise InputError(
            f"decode.audio got a latent of shape {list(latent.shape)}, wanted [batch, {wanted[0]}, frames, {wanted[1]}] of "
            f"{CHANNELS}-channel sound; connect an audio latent made for this audio VAE."
        )
    if not all_finite(latent):
        raise InputError(
            "decode.audio got an audio latent with numbers that are not finite; sample it again with other settings."
        )
