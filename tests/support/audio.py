"""Small audio VAE files for tests: the official golden one, and one whose weights an oracle made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from comfyui_ltx25.ltx25.audio.decode import UNUSED as DECODER_UNUSED
from comfyui_ltx25.ltx25.audio.decode import SoundDecoder
from comfyui_ltx25.ltx25.audio.encode import UNUSED as ENCODER_UNUSED
from comfyui_ltx25.ltx25.audio.encode import SoundEncoder
from comfyui_ltx25.ltx25.checkpoint import fill, read_header
from comfyui_ltx25.ltx25.config.audio import AudioConfig, read_audio_config
from safetensors.torch import save_file
from torch import nn

from .files import GOLDEN

GOLDEN_FILE = GOLDEN / "audio" / "audio_vae.bf16.safetensors"

# The oracle's sizes: published strides and kernels, small widths.
MEL_BINS = 16
VAE = {"latent_channels": 4, "base_channels": 16, "ch_mult": (1, 2, 4), "num_res_blocks": 2}
FFT = 128


def load_decoder(path: Path, dtype: torch.dtype = torch.float32, config: AudioConfig | None = None) -> SoundDecoder:
    return _load(path, SoundDecoder, DECODER_UNUSED, dtype, config)


def load_encoder(path: Path, dtype: torch.dtype = torch.float32) -> SoundEncoder:
    return _load(path, SoundEncoder, ENCODER_UNUSED, dtype, None)


def _load(
    path: Path,
    build: Callable[[AudioConfig], nn.Module],
    unused: tuple[str, ...],
    dtype: torch.dtype,
    config: AudioConfig | None,
) -> Any:
    header = read_header(path)
    with torch.device("meta"):
        module = build(config or read_audio_config(header))
    fill(module, header, "", torch.device("cpu"), dtype, lambda n: None, unused)
    return module.eval()


def oracles() -> tuple[nn.Module, nn.Module]:
    """diffusers' audio VAE and vocoder with seeded weights whose first stage stays below clipping."""
    from diffusers import AutoencoderKLLTX2Audio
    from diffusers.pipelines.ltx2.vocoder import LTX2VocoderWithBWE

    generator = torch.Generator().manual_seed(5)
    vae = AutoencoderKLLTX2Audio(
        in_channels=2,
        output_channels=2,
        resolution=16,
        attn_resolutions=None,
        norm_type="pixel",
        causality_axis="height",
        mid_block_add_attention=False,
        sample_rate=16000,
        mel_hop_length=160,
        mel_bins=MEL_BINS,
        is_causal=True,
        double_z=True,
        **VAE,
    )
    vocoder = LTX2VocoderWithBWE(
        in_channels=2 * MEL_BINS,
        hidden_channels=128,
        bwe_in_channels=2 * MEL_BINS,
        bwe_hidden_channels=64,
        filter_length=FFT,
        window_length=FFT,
        hop_length=80,
        num_mel_channels=MEL_BINS,
    )
    for module in (vae, vocoder):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if "filter" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("latents_std"):
                noise = noise.abs() + 0.5
            elif "mel_basis" in name:
                noise = noise.abs() * 0.1
            elif tensor.ndim > 1:
                noise = noise * (0.9 / tensor[0].numel() ** 0.5)
            else:
                noise = noise * 0.3
            tensor.data.copy_(noise)
    for stage in (vocoder.vocoder, vocoder.bwe_generator):
        stage.conv_out.weight.data.mul_(0.03)
    return vae.eval(), vocoder.eval()


def write_oracle_file(path: Path, vae: nn.Module, vocoder: nn.Module, metadata: bool = True) -> Path:
    """The oracles' weights as an LTX-2.5 audio VAE file: official names, official metadata or none."""
    tensors = {_vae_name(name): tensor for name, tensor in vae.state_dict().items()}
    tensors |= {_vocoder_name(name): tensor for name, tensor in vocoder.state_dict().items() if "resampler" not in name}
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(
        tensors,
        path,
        metadata={"config": json.dumps(oracle_metadata()), "model_version": "2.5.0"} if metadata else None,
    )
    return path


def oracle_metadata() -> dict[str, Any]:
    """The `config` block that describes the oracles, laid out as the published file's."""
    generator = {
        "resblock": "AMP1",
        "activation": "snakebeta",
        "stereo": True,
        "use_bias_at_final": False,
        "use_tanh_at_final": False,
        "resblock_kernel_sizes": [3, 7, 11],
        "resblock_dilation_sizes": [[1, 3, 5]] * 3,
    }
    return {
        "audio_vae": {
            "model": {
                "params": {
                    "ddconfig": {
                        "ch": VAE["base_channels"],
                        "ch_mult": list(VAE["ch_mult"]),
                        "num_res_blocks": VAE["num_res_blocks"],
                        "z_channels": VAE["latent_channels"],
                        "mel_bins": MEL_BINS,
                        "in_channels": 2,
                        "out_ch": 2,
                        "double_z": True,
                        "norm_type": "pixel",
                        "causality_axis": "height",
                        "attn_resolutions": [],
                        "mid_block_add_attention": False,
                        "resolution": 256,
                        "dropout": 0.0,
                    },
                    "sampling_rate": 16000,
                }
            },
            "preprocessing": {
                "stft": {"filter_length": 1024, "hop_length": 160, "win_length": 1024, "causal": True},
                "mel": {"n_mel_channels": MEL_BINS, "mel_fmin": 0, "mel_fmax": 8000},
            },
        },
        "vocoder": {
            "vocoder": generator
            | {
                "upsample_initial_channel": 128,
                "upsample_rates": [5, 2, 2, 2, 2, 2],
                "upsample_kernel_sizes": [11, 4, 4, 4, 4, 4],
            },
            "bwe": generator
            | {
                "upsample_initial_channel": 64,
                "upsample_rates": [6, 5, 2, 2, 2],
                "upsample_kernel_sizes": [12, 11, 4, 4, 4],
                "apply_final_activation": False,
                "input_sampling_rate": 16000,
                "output_sampling_rate": 48000,
                "hop_length": 80,
                "n_fft": FFT,
                "win_size": FFT,
                "num_mels": MEL_BINS,
            },
        },
    }


def _vae_name(name: str) -> str:
    statistics = {
        "latents_mean": "per_channel_statistics.mean-of-means",
        "latents_std": "per_channel_statistics.std-of-means",
    }
    return "audio_vae." + statistics.get(name, name)


def _vocoder_name(name: str) -> str:
    renamed = {
        "conv_in": "conv_pre",
        "conv_out": "conv_post",
        "upsamplers": "ups",
        "resnets": "resblocks",
        "act_out": "act_post",
    }
    parts = []
    for part in name.split("."):
        parts += ["downsample", "lowpass"] if part == "downsample" else [renamed.get(part, part)]
    return "vocoder." + ".".join(parts)
