"""Names and shapes of every tensor of a tiny file, from the modules that will read it, built on meta.

What no module of the text-to-video path reads (the video encoder, the diffusion decoder, Gemma's eyes and ears) is
listed here from the same configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..audio.decode import SoundDecoder
from ..audio.encode import SoundEncoder
from ..checkpoint import Header, TensorInfo, expected
from ..config.audio import read_audio_config
from ..config.connector import AUDIO, VIDEO, ConnectorConfig
from ..config.dit import AUDIO_PROMPT, KEYFRAMES, PROMPT, DiTConfig
from ..config.duration import DurationConfig
from ..config.keys import Keys
from ..config.text import FeatureConfig, TowerConfig
from ..config.text_layout import PROJECTION
from ..config.upscaler import read_upscaler_config
from ..config.video import read_video_config
from ..config.video_layout import ConvDecoderConfig, DiffusionDecoderConfig, EncoderConfig, Resample, VideoVAEConfig
from ..connector import Connector
from ..dit import DiT
from ..duration import DurationHead
from ..text.features import FeatureProjection
from ..text.tower import Tower
from ..upscaler import LatentUpscaler
from ..video.conv_decoder import ConvDecoder
from . import metadata as tiny

Shapes = dict[str, tuple[int, ...]]


def transformer_tensors() -> Shapes:
    keys = Keys(tiny.TRANSFORMER, "tiny")
    dit = DiTConfig.take(keys, {KEYFRAMES, PROMPT, AUDIO_PROMPT})
    connectors = ConnectorConfig.take(keys)
    keys.done()
    prefix = "model.diffusion_model."
    return {
        **_shapes(lambda: DiT(dit), prefix),
        **_shapes(lambda: Connector(connectors.video), prefix + VIDEO),
        **_shapes(lambda: Connector(connectors.audio), prefix + AUDIO),
    }


def lora_tensors() -> Shapes:
    """A pair for every linear layer of the transformer but those of its connectors, as the distilled LoRA has them."""
    prefix, shapes = "model.", {}
    for name, shape in transformer_tensors().items():
        layer = name.removesuffix(".weight").removeprefix(prefix)
        if layer == name.removeprefix(prefix) or len(shape) != 2 or "_embeddings_connector." in name:
            continue
        rank = min(tiny.LORA_RANK, *shape)
        shapes |= {f"{layer}.lora_A.weight": (rank, shape[1]), f"{layer}.lora_B.weight": (shape[0], rank)}
    return shapes


def text_encoder_tensors(metadata: dict[str, str]) -> Shapes:
    """Floating tensors only: the tokenizer and other assets are bytes of their own."""
    tower = TowerConfig.read(_header(metadata))
    features = FeatureConfig(tower.hidden, tower.states, tiny.VIDEO_WIDTH, tiny.AUDIO_WIDTH)
    return {
        **_shapes(lambda: Tower(tower), "model."),
        **_shapes(lambda: FeatureProjection(features), PROJECTION),
        **_eyes_and_ears(),
    }


def video_vae_tensors(config: dict[str, Any]) -> Shapes:
    """Encoder, decoder of either kind, and the statistics both share."""
    decoder = config["vae"].get("decoder", {}).get("_class_name")
    kind = {"decoder.conv_in_x_t.weight": (1,)} if decoder == "NADiffusionDecoder" else {}
    vae = read_video_config(_header(tiny.vae_metadata(config, 0), {"per_channel_statistics.mean-of-means": (1,), **kind}))
    return {**_encoder(vae.encoder), **_decoder(vae)}


def audio_vae_tensors() -> Shapes:
    config = read_audio_config(_header(tiny.vae_metadata(tiny.AUDIO_VAE, 0)))
    tensors = {**_shapes(lambda: SoundEncoder(config), ""), **_shapes(lambda: SoundDecoder(config), "")}
    tensors["vocoder.mel_stft.stft_fn.inverse_basis"] = tensors["vocoder.mel_stft.stft_fn.forward_basis"]  # stored, never read
    return tensors


def upscaler_tensors(config: dict[str, Any]) -> Shapes:
    return _shapes(lambda: LatentUpscaler(read_upscaler_config(_header(tiny.upscaler_metadata(config, 0)))), "")


def duration_tensors() -> Shapes:
    config = DurationConfig("duration_head.", tiny.VIDEO_WIDTH, tiny.AUDIO_WIDTH, tiny.DURATION_WIDTH, 1, 4, tiny.DURATION_WIDTH)
    return _shapes(lambda: DurationHead(config), config.prefix)


def _shapes(build: Callable[[], nn.Module], prefix: str) -> Shapes:
    """File name -> shape of everything the module wants from a file."""
    with torch.device("meta"):
        module = build()
    parameters = module.state_dict(keep_vars=True)
    shapes: Shapes = {}
    for name, place in expected(module).items():
        whole = tuple(parameters[place.name].shape)
        shapes[prefix + name] = whole if place.rows is None else (place.rows, *whole[1:])
    return shapes


def _header(metadata: dict[str, str], shapes: Shapes | None = None) -> Header:
    """The header of a file that is not written yet, for the readers of metadata."""
    tensors = {name: TensorInfo(name, torch.bfloat16, shape, 0, 0) for name, shape in (shapes or {}).items()}
    return Header(path=Path("tiny"), size=0, mtime_ns=0, digest="", metadata=metadata, tensors=tensors)


def _decoder(vae: VideoVAEConfig) -> Shapes:
    if isinstance(vae.decoder, ConvDecoderConfig):
        return _shapes(lambda: ConvDecoder(vae.decoder), vae.prefix)
    return {**_diffusion_decoder(vae.decoder), **_statistics(vae.decoder.latent_channels)}


def _statistics(channels: int) -> Shapes:
    return {f"per_channel_statistics.{name}": (channels,) for name in ("mean-of-means", "std-of-means")}


def _encoder(config: EncoderConfig) -> Shapes:
    width = config.width
    shapes: Shapes = {}

    def conv(name: str, channels: int, made: int) -> None:
        shapes[f"encoder.{name}.conv.weight"] = (made, channels, 3, 3, 3)
        shapes[f"encoder.{name}.conv.bias"] = (made,)

    conv("conv_in", 3 * config.patch**2, width)
    for index, block in enumerate(config.blocks):
        lead = f"down_blocks.{index}"
        if isinstance(block, Resample):
            after = width * block.multiplier
            conv(f"{lead}.conv", width, after // math.prod(block.stride))
            width = after
        else:
            for layer in range(block.layers):
                conv(f"{lead}.res_blocks.{layer}.conv1", width, width)
                conv(f"{lead}.res_blocks.{layer}.conv2", width, width)
    conv("conv_out", width, config.latent_channels + 1)  # means, and one logarithm of a variance for all
    return shapes


def _diffusion_decoder(config: DiffusionDecoderConfig) -> Shapes:
    shapes: Shapes = {"decoder.type_emb": (config.latent_channels,)}  # in the published file, read by no version

    def linear(name: str, channels: int, made: int, bias: bool = True) -> None:
        shapes[f"decoder.{name}.weight"] = (made, channels)
        if bias:
            shapes[f"decoder.{name}.bias"] = (made,)

    def block(lead: str, width: int) -> None:
        hidden = -(-4 * width // 16) * 16
        for norm in ("norm1", "norm2"):
            shapes[f"decoder.{lead}.{norm}.weight"] = (width,)
        for norm in ("q_norm", "k_norm"):
            shapes[f"decoder.{lead}.attn.{norm}.weight"] = (config.head_dim,)
        linear(f"{lead}.attn.qkv", width, 3 * width)
        linear(f"{lead}.attn.proj", width, width)
        linear(f"{lead}.mlp.w_gate", width, hidden, bias=False)
        linear(f"{lead}.mlp.w_up", width, hidden, bias=False)
        linear(f"{lead}.mlp.w_down", hidden, width, bias=False)

    cells, last = 3 * config.patch**2, config.channels[-1]
    linear("conv_in", config.latent_channels, config.channels[0])
    for stage, (width, depth) in enumerate(zip(config.channels[:-1], config.depths[:-1], strict=True)):
        for layer in range(depth):
            block(f"det_stages.{stage}.{layer}", width)
        step = config.upsamples[stage]
        linear(f"upsamples.{stage}.proj", width, math.prod(step.stride) * width // step.multiplier)
    linear("conv_in_x_t", cells, last)
    linear("t_embedder.mlp.0", 256, config.time_width)
    linear("t_embedder.mlp.2", config.time_width, config.time_width)
    linear("shared_adaln.proj", config.time_width, 7 * last)
    for layer in range(config.depths[-1]):
        block(f"diff_blocks.{layer}", last)
        linear(f"diff_blocks.{layer}.context_proj", last, last)
        shapes[f"decoder.diff_blocks.{layer}.scale_shift_table"] = (7, last)
    shapes["decoder.norm_out.weight"] = (last,)
    linear("conv_out", last, cells)
    return shapes


def _eyes_and_ears() -> Shapes:
    """Gemma's parts for pictures and sound: in the published file, read by nothing of the text path."""
    width = tiny.VISION["mm_embed_dim"]
    pixels = 3 * tiny.VISION["patch_size"] ** 2
    shapes: Shapes = {
        "vision_model.patch_dense.weight": (width, pixels),
        "vision_model.patch_dense.bias": (width,),
        "vision_model.pos_embedding": (tiny.VISION["mm_posemb_size"], 2, width),
        "multi_modal_projector.embedding_projection.weight": (tiny.TEXT_WIDTH, width),
        "audio_projector.embedding_projection.weight": (tiny.TEXT_WIDTH, tiny.HEARING["audio_embed_dim"]),
    }
    for norm, size in (("patch_ln1", pixels), ("patch_ln2", width), ("pos_norm", width)):
        shapes |= {f"vision_model.{norm}.{leaf}": (size,) for leaf in ("weight", "bias")}
    return shapes
