"""What a video VAE file says about itself: encoder, decoder (convolutional or diffusion) and pixels per latent cell.

Published layouts: the convolutional file keeps everything flat under `config.vae`, the diffusion file nests
`vae.encoder` and `vae.decoder`. Names carry the prefix `vae.` in monolithic checkpoints and none in split files.
Without metadata the block lists are read off the tensor shapes (video_shapes.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..checkpoint.header import Header
from ..checkpoint.identify import Kind, identify
from ..errors import FileError
from .keys import Keys
from .video_layout import (
    Block,
    ConvDecoderConfig,
    DiffusionDecoderConfig,
    EncoderConfig,
    Resample,
    ResStack,
    VideoVAEConfig,
)
from .video_shapes import conv_decoder_from_shapes, diffusion_decoder_from_shapes, encoder_from_shapes

logger = logging.getLogger(__name__)


def read_video_config(header: Header) -> VideoVAEConfig:
    """The configuration of a video VAE file; raises FileError for settings this engine does not implement."""
    prefix = "" if "per_channel_statistics.mean-of-means" in header.tensors else "vae."
    diffusion = identify(header) is Kind.VIDEO_VAE_DIFFUSION
    if "config" in header.metadata:
        vae = Keys(header.metadata_json("config"), f"{header.name}: config").block("vae")
        encoder, decoder = (_nested if diffusion else _flat)(vae)
        if isinstance(decoder, DiffusionDecoderConfig):
            decoder = _with_gates(decoder, header, prefix)
    else:
        encoder = encoder_from_shapes(header, prefix)
        decoder = (diffusion_decoder_from_shapes if diffusion else conv_decoder_from_shapes)(header, prefix)
        logger.info("%s has no metadata: widths were read off its tensors, the rest is taken from the published 2.5 file.", header.name)
    down, up = encoder.compression, decoder.compression
    if down != up:
        raise FileError(
            f"{header.name}: a latent cell is {down.frames} frames x {down.side} px for the encoder and "
            f"{up.frames} x {up.side} for the decoder; use the published file."
        )
    return VideoVAEConfig(prefix, encoder, decoder)


def _flat(vae: Keys) -> tuple[EncoderConfig, ConvDecoderConfig]:
    vae.require("_class_name", "CausalVideoAutoencoder", "CausalVideoAutoencoder")
    vae.require("dims", 3)
    vae.require("in_channels", 3)
    vae.require("out_channels", 3)
    vae.require("norm_layer", "pixel_norm")
    vae.require("spatial_padding_mode", "zeros")  # the official code takes "reflect" when the key is missing
    vae.require("causal_decoder", False)
    vae.require("timestep_conditioning", False)  # the official code takes True when the key is missing
    vae.require("use_quant_conv", False, False)
    vae.require("normalize_latent_channels", False, False)
    vae.require("scaling_factor", 1.0, 1.0)
    _log_var(vae)
    latent, patch = vae.take("latent_channels", int), vae.take("patch_size", int)
    encoder = EncoderConfig(
        latent_channels=latent,
        width=vae.take("encoder_base_channels", int, latent),
        patch=patch,
        blocks=_blocks(vae.take("encoder_blocks", list), f"{vae.where}.encoder_blocks", suffix="_res"),
    )
    decoder = ConvDecoderConfig(
        latent_channels=latent,
        width=vae.take("decoder_base_channels", int),
        patch=patch,
        blocks=_blocks(vae.take("decoder_blocks", list), f"{vae.where}.decoder_blocks", suffix="")[::-1],
    )
    vae.done()
    return encoder, decoder


def _nested(vae: Keys) -> tuple[EncoderConfig, DiffusionDecoderConfig]:
    vae.require("_class_name", "CausalDiffusionVAE")
    vae.inert(("dims", "spatial_padding_mode"))
    latent = vae.take("latent_channels", int, 0)
    output = vae.take("model_output_type", str)
    if output not in ("x0", "v"):
        raise FileError(f"{vae.where}.model_output_type is {output!r}, and only 'x0' and 'v' are supported.")
    encoder = _nested_encoder(vae.block("encoder"))
    decoder = _nested_decoder(vae.block("decoder"), output)
    vae.done()
    if len({encoder.latent_channels, decoder.latent_channels, latent or encoder.latent_channels}) != 1:
        raise FileError(f"{vae.where}: encoder and decoder disagree about the latent channels; use the published file.")
    return encoder, decoder


def _nested_encoder(keys: Keys) -> EncoderConfig:
    keys.inert(("_class_name",))
    keys.require("dims", 3, 3)
    keys.require("in_channels", 3, 3)
    keys.require("norm_layer", "pixel_norm", "pixel_norm")
    keys.require("spatial_padding_mode", "zeros", "zeros")
    _log_var(keys)
    latent = keys.take("out_channels", int)
    config = EncoderConfig(
        latent_channels=latent,
        width=keys.take("base_channels", int, latent),
        patch=keys.take("patch_size", int),
        blocks=_blocks(keys.take("blocks", list), f"{keys.where}.blocks", suffix="_res"),
    )
    keys.done()
    return config


def _nested_decoder(keys: Keys, output: str) -> DiffusionDecoderConfig:
    keys.inert(("_class_name", "spatial_padding_mode"))  # nothing in this decoder pads
    keys.require("out_channels", 3, 3)
    keys.require("resampler_kind", "linear", "linear")
    channels = tuple(keys.take("stage_channels", list))
    keys.require("stage5_channels", channels[-1], channels[-1])
    kernels = [_triple(kernel, f"{keys.where}.stage_kernels") for kernel in keys.take("stage_kernels", list)]
    last = _triple(keys.take("stage5_kernel", list), f"{keys.where}.stage5_kernel")
    config = DiffusionDecoderConfig(
        latent_channels=keys.take("in_channels", int),
        patch=keys.take("patch_size", int),
        head_dim=keys.take("head_dim", int),
        channels=channels,
        depths=tuple(keys.take("stage_depths", list)),
        kernels=(*kernels[: len(channels) - 1], last),
        upsamples=tuple(
            Resample(_triple(stride, f"{keys.where}.upsamples"), int(reduction)) for stride, reduction in keys.take("upsamples", list)
        ),
        time_width=keys.take("t_emb_dim", int, 384),
        time_scale=keys.take("timestep_scale_multiplier", float),
        steps=keys.take("default_num_inference_steps", int),
        output=output,
        gates=False,
    )
    keys.done()
    stages = len(channels)
    if (len(config.depths), len(config.kernels), len(config.upsamples)) != (stages, stages, stages - 1) or stages < 2:
        raise FileError(f"{keys.where}: stage_channels, stage_depths, stage_kernels and upsamples do not describe the same stages.")
    return config


def _with_gates(config: DiffusionDecoderConfig, header: Header, prefix: str) -> DiffusionDecoderConfig:
    return replace(config, gates=f"{prefix}decoder.diff_blocks.0.gate_msa" in header.tensors)


def _log_var(keys: Keys) -> None:
    """Both published kinds give one extra output channel, which decoding and deterministic encoding do not use."""
    kind = keys.take("latent_log_var", str)
    if kind not in ("uniform", "constant"):
        raise FileError(f"{keys.where}.latent_log_var is {kind!r}, and only 'uniform' and 'constant' are supported.")
    keys.inert(("latent_log_var_value",))


_STRIDES = {"space": (1, 2, 2), "time": (2, 1, 1), "all": (2, 2, 2)}


def _blocks(entries: Sequence[Any], where: str, suffix: str) -> tuple[Block, ...]:
    """Parse [[kind, {settings}], ...]; kinds are res_x and compress_{space,time,all}`suffix`."""
    kinds = {f"compress_{name}{suffix}": stride for name, stride in _STRIDES.items()}
    blocks: list[Block] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, list) or len(entry) != 2:
            raise FileError(f"{where}[{index}] is {entry!r}, wanted [kind, settings].")
        kind, settings = entry[0], Keys(entry[1], f"{where}[{index}]")
        settings.require("inject_noise", False, False)
        if kind == "res_x":
            blocks.append(ResStack(layers=settings.take("num_layers", int)))
        elif kind in kinds:
            settings.require("residual", False, False)
            blocks.append(Resample(stride=kinds[kind], multiplier=settings.take("multiplier", int)))
        else:
            raise FileError(f"{where}[{index}] is of kind {kind!r}, and only res_x, {', '.join(kinds)} are supported.")
        settings.done()
    return tuple(blocks)


def _triple(value: Any, where: str) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(n, int) and n > 0 for n in value):
        raise FileError(f"{where} holds {value!r}, wanted three positive numbers (t, h, w).")
    if value[1] != value[2]:
        raise FileError(f"{where} holds {value!r}, and only equal heights and widths are supported.")
    return value[0], value[1], value[2]
