"""Seeded random weights that keep activations near 1 and leave something to see and hear.

Every tensor draws from a generator of its own, seeded by its name: adding one changes no other. What a file holds that
is no weight (filters, transforms, statistics) is computed as for the published file.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable

import torch

from ..audio.mel import mel_filters
from . import metadata as tiny

Shape = tuple[int, ...]

DIFFERENCE = 0.1  # of neighbouring pixels, see `unfolded`


def make(name: str, shape: Shape, seed: int, device: str = "cpu") -> torch.Tensor:
    """The tensor `name` of a tiny file with that seed, in its dtype: F32 for adaLN tables, as published, BF16 for the rest.

    Any shape will do, the published ones included; `device` is where it is made, which changes the numbers.
    """
    generator = torch.Generator(device).manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big"))
    for pattern, rule in _RULES:
        if re.search(pattern, name):
            with torch.device(device):
                value = rule(shape, generator)
            break
    else:
        raise ValueError(f"no rule for {name} of shape {shape}")
    return value.to(torch.float32 if _is_table(name) else torch.bfloat16).contiguous()


def _is_table(name: str) -> bool:
    return name.startswith("model.diffusion_model.") and "scale_shift_table" in name


Rule = Callable[[Shape, torch.Generator], torch.Tensor]


def normal(std: float, mean: float = 0.0) -> Rule:
    return lambda shape, generator: mean + std * torch.randn(shape, generator=generator)


def spread(gain: float) -> Rule:
    """For a linear or convolution weight (out, in, ...): outputs of deviation `gain` from inputs of deviation 1."""
    return lambda shape, generator: gain / math.sqrt(math.prod(shape[1:])) * torch.randn(shape, generator=generator)


def transposed(gain: float, stride_of: dict[int, int]) -> Rule:
    """`spread` for a transposed convolution (in, out, kernel), whose stride goes with its kernel."""

    def rule(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        taps = shape[2] / stride_of[shape[2]]
        return gain / math.sqrt(shape[0] * taps) * torch.randn(shape, generator=generator)

    return rule


def unfolded(layer: str, gain: float, cells: int) -> tuple[tuple[str, Rule], ...]:
    """Rules of a layer whose every run of `cells` outputs becomes neighbouring pixels: they share most of what they do,
    so that a picture is made of shapes and not of a grid."""

    def share(std: Callable[[Shape], float]) -> Rule:
        def rule(shape: Shape, generator: torch.Generator) -> torch.Tensor:
            runs = shape[0] // cells
            shared = torch.randn((runs, 1, *shape[1:]), generator=generator).expand(runs, cells, *shape[1:])
            own = torch.randn((runs, cells, *shape[1:]), generator=generator)
            return std(shape) * torch.lerp(shared, own, DIFFERENCE).reshape(shape)

        return rule

    return ((layer + r"\.weight$", share(lambda shape: gain / math.sqrt(math.prod(shape[1:])))), (layer + r"\.bias$", share(lambda shape: 0.1)))


def low_pass(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """The vocoder's anti-aliasing filter: 12 taps of a Kaiser-windowed sinc at a quarter of the rate, of sum 1.

    Kaiser's rule for an attenuation A above 50 dB is beta = 0.1102 (A - 8.7), with A = 2.285 (taps / 2 - 1) pi width + 7.95.
    """
    beta = 0.1102 * (2.285 * 5 * math.pi * 1.2 + 7.95 - 8.7)
    window = torch.kaiser_window(12, periodic=False, beta=beta, dtype=torch.float64)
    taps = torch.sinc((torch.arange(12, dtype=torch.float64) - 5.5) / 2) * window
    return (taps / taps.sum()).view(shape)


def fourier_basis(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """(2 bins, 1, n): a windowed DFT as convolution filters, real parts first."""
    bins, n = shape[0] // 2, shape[2]
    angle = 2 * math.pi * torch.arange(bins, dtype=torch.float64)[:, None] * torch.arange(n, dtype=torch.float64) / n
    window = torch.hann_window(n, dtype=torch.float64)
    return torch.cat([angle.cos() * window, -angle.sin() * window])[:, None]


def mel_basis(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    rate = tiny.AUDIO_VAE["vocoder"]["bwe"]["input_sampling_rate"]
    return mel_filters(shape[1], shape[0], rate).t()


# First match wins. Kernel -> stride of the transposed convolutions, as in the metadata.
_STRIDES = {11: 5, 12: 6, 4: 2}
_RULES: tuple[tuple[str, Rule], ...] = (
    # Sound. Log mels of real sound lie a few units around -4.
    (r"^audio_vae\.decoder\.conv_out\.conv\.weight$", spread(3.0)),
    (r"^audio_vae\.decoder\.conv_out\.conv\.bias$", normal(0.1, -4.0)),
    (r"vocoder\..*\.filter$", low_pass),
    (r"vocoder\.mel_stft\.stft_fn\.\w+_basis$", fourier_basis),
    (r"vocoder\.mel_stft\.mel_basis$", mel_basis),
    (r"vocoder\..*\.act\.(alpha|beta)$", normal(0.3)),
    (r"vocoder\..*\.conv_pre\.weight$", spread(0.25)),
    (r"vocoder\..*\.ups\.\d+\.weight$", transposed(1.0, _STRIDES)),
    (r"vocoder\..*\.convs[12]\.\d+\.weight$", spread(0.4)),
    (r"vocoder\.vocoder\.conv_post\.weight$", spread(0.1)),
    (r"vocoder\.bwe_generator\.conv_post\.weight$", spread(0.02)),
    # Statistics of the latents
    (r"per_channel_statistics\.mean-of-means$", normal(0.1)),
    (r"per_channel_statistics\.std-of-means$", normal(0.05, 1.0)),
    # Pictures
    *unfolded(r"^decoder\.up_blocks\.(1|3)\.conv\.conv", 1.0, 8),
    *unfolded(r"^decoder\.up_blocks\.5\.conv\.conv", 1.0, 2),
    *unfolded(r"^decoder\.up_blocks\.7\.conv\.conv", 1.0, 4),
    *unfolded(r"^decoder\.conv_out(\.conv)?", 0.5, 16),
    *unfolded(r"^decoder\.upsamples\.0\.proj", 1.0, 4),
    *unfolded(r"^decoder\.upsamples\.1\.proj", 1.0, 2),
    *unfolded(r"^decoder\.upsamples\.[23]\.proj", 1.0, 8),
    # Text
    (r"embed_tokens\.weight$", normal(1 / math.sqrt(tiny.TEXT_WIDTH))),  # the tower multiplies by sqrt(width)
    (r"layer_scalar$", normal(0.05, 0.9)),
    (r"learnable_registers$", normal(1.0)),
    # Transformer
    (r"scale_shift_table", normal(0.4)),
    (r"keyframes_abs_pos_embedding$", normal(0.5)),
    (r"adaln_single\.linear\.weight$", spread(0.3)),
    (r"\.lora_B\.weight$", spread(0.3)),  # to be seen, and far from drowning what it changes
    # The rest of a clip's life: upscalers keep the level of a latent, the duration head says about four seconds
    (r"(^|post_upsample_)res_blocks\.\d+\.norm2\.weight$", normal(0.05, 0.3)),
    (r"^duration_head\.mlp_out\.bias$", normal(0.1, 1.4)),
    (r"(query_tokens|modality_emb)$", normal(0.5)),
    # Whatever is left, by what it is
    (r"norm\d?\.weight$|layernorm\.weight$|(patch_ln\d|norm_out)\.weight$", normal(0.1, 1.0)),
    (r"bias$", normal(0.1)),
    (r"(pos_embedding|type_emb)$", normal(0.5)),
    (r"weight$", spread(1.0)),
)
