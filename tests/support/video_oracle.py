"""Video VAEs of diffusers with random weights, and the same weights as a file in the published layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

RES = ["res_x", {"num_layers": 1}]


def conv_vae():
    """The 2.5 topology at 1/8 width; every statistic and weight random."""
    from diffusers import AutoencoderKLLTX2Video

    torch.manual_seed(0)
    model = AutoencoderKLLTX2Video(
        in_channels=3,
        out_channels=3,
        latent_channels=16,
        block_out_channels=(32, 64, 128, 128),
        down_block_types=("LTX2VideoDownBlock3D",) * 4,
        decoder_block_out_channels=(32, 64, 64, 128),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True,) * 4,
        decoder_spatio_temporal_scaling=(True,) * 4,
        decoder_inject_noise=(False,) * 5,
        downsample_type=("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
        upsample_type=("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
        upsample_residual=(False,) * 4,
        upsample_factor=(2, 2, 1, 2),
        timestep_conditioning=False,
        patch_size=4,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
        encoder_spatial_padding_mode="zeros",
        decoder_spatial_padding_mode="zeros",
    ).eval()
    model.latents_mean.normal_(0, 0.3)
    model.latents_std.uniform_(0.5, 1.5)
    return model


def write_conv_vae(model, path: Path) -> Path:
    """`conv_vae()` under the official names, with the metadata of a flat file."""
    config = {
        "_class_name": "CausalVideoAutoencoder",
        "dims": 3,
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 16,
        "encoder_blocks": [
            RES,
            ["compress_space_res", {"multiplier": 2}],
            RES,
            ["compress_time_res", {"multiplier": 2}],
            RES,
            ["compress_all_res", {"multiplier": 2}],
            RES,
            ["compress_all_res", {"multiplier": 1}],
            RES,
        ],
        "decoder_blocks": [
            RES,
            ["compress_space", {"multiplier": 2}],
            RES,
            ["compress_time", {"multiplier": 2}],
            RES,
            ["compress_all", {"multiplier": 1}],
            RES,
            ["compress_all", {"multiplier": 2}],
            RES,
        ],
        "encoder_base_channels": model.encoder.conv_in.conv.out_channels,
        "decoder_base_channels": model.decoder.conv_out.conv.in_channels,
        "patch_size": 4,
        "norm_layer": "pixel_norm",
        "latent_log_var": "uniform",
        "spatial_padding_mode": "zeros",
        "causal_decoder": False,
        "timestep_conditioning": False,
    }
    tensors = {_official_conv(name): tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, path, {"config": json.dumps({"vae": config})})
    return path


def _official_conv(name: str) -> str:
    rules = (
        (r"^latents_mean$", "per_channel_statistics.mean-of-means"),
        (r"^latents_std$", "per_channel_statistics.std-of-means"),
        (r"^encoder\.mid_block\.", "encoder.down_blocks.8."),
        (r"^decoder\.mid_block\.", "decoder.up_blocks.0."),
        (r"down_blocks\.(\d)\.downsamplers\.0", lambda m: f"down_blocks.{2 * int(m[1]) + 1}"),
        (r"down_blocks\.(\d)\.resnets", lambda m: f"down_blocks.{2 * int(m[1])}.resnets"),
        (r"up_blocks\.(\d)\.upsamplers\.0", lambda m: f"up_blocks.{2 * int(m[1]) + 1}"),
        (r"up_blocks\.(\d)\.resnets", lambda m: f"up_blocks.{2 * int(m[1]) + 2}.resnets" if not m.string.startswith("decoder.up_blocks.0.res_") else m[0]),
    )
    for pattern, new in rules[:4]:
        if re.search(pattern, name):
            return re.sub(pattern, new, name).replace("resnets", "res_blocks")
    for pattern, new in rules[4:]:
        name, changed = re.subn(pattern, new, name)
        if changed:
            break
    return name.replace("resnets", "res_blocks")
