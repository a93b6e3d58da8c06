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
    torch.manual_seed(0)
    model = _conv_vae(16, (32, 64, 128, 128), (32, 64, 64, 128), (1, 1, 1, 1, 1), (1, 1, 1, 1, 1))
    model.latents_mean.normal_(0, 0.3)
    model.latents_std.uniform_(0.5, 1.5)
    return model


def published_conv_vae():
    """The published sizes, on the current default device; give it weights with `share_conv_decoder`."""
    return _conv_vae(128, (256, 512, 1024, 1024), (256, 512, 512, 1024), (4, 6, 4, 2, 2), (4, 6, 4, 2, 2))


def share_conv_decoder(model, decoder) -> None:
    """Make `model` decode with the weights of our ConvDecoder, without a copy. Its encoder stays as it was."""
    ours = decoder.state_dict(keep_vars=True)
    weights = {name: ours[_official_conv("decoder." + name)].data for name in model.decoder.state_dict()}
    model.decoder.load_state_dict(weights, strict=True, assign=True)


def _conv_vae(latent, encoder_widths, decoder_widths, encoder_layers, decoder_layers):
    from diffusers import AutoencoderKLLTX2Video

    return AutoencoderKLLTX2Video(
        in_channels=3,
        out_channels=3,
        latent_channels=latent,
        block_out_channels=encoder_widths,
        down_block_types=("LTX2VideoDownBlock3D",) * 4,
        decoder_block_out_channels=decoder_widths,
        layers_per_block=encoder_layers,
        decoder_layers_per_block=decoder_layers,
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


DIFFUSION = {
    "out_channels": 3,
    "latent_channels": 8,
    "patch_size": 2,
    "decoder_head_dim": 16,
    "decoder_stage_channels": (64, 32, 16, 16, 16),
    "decoder_stage_depths": (1, 1, 1, 1, 2),
    "decoder_stage_kernels": ((3, 3, 3),) * 4,
    "decoder_upsample_strides": ((1, 2, 2), (2, 1, 1), (2, 2, 2), (1, 2, 2)),  # 4 frames a latent: quicker
    "decoder_upsample_channel_reductions": (2, 2, 1, 1),
    "decoder_stage5_kernel": (3, 3, 3),
    "decoder_t_emb_dim": 32,
    "spatial_compression_ratio": 16,
    "temporal_compression_ratio": 4,
}


def diffusion_vae():
    """A small diffusion decoder with every weight random."""
    from diffusers import LTX2VideoDiffusionDecoderModel

    torch.manual_seed(0)
    model = LTX2VideoDiffusionDecoderModel(**DIFFUSION).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                parameter.normal_(1, 0.1)
            elif parameter.ndim == 1 or "table" in name:
                parameter.normal_(0, 0.1)
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    model.latents_mean.normal_(0, 0.3)
    model.latents_std.uniform_(0.5, 1.5)
    return model


def write_diffusion_vae(model, path: Path) -> Path:
    """`diffusion_vae()` under the official names, with the metadata of a nested file; it has no encoder weights."""
    d = DIFFUSION
    space, time, both = (["compress_" + kind + "_res", {"multiplier": 1}] for kind in ("space", "time", "all"))
    config = {
        "_class_name": "CausalDiffusionVAE",
        "model_output_type": "x0",
        "encoder": {
            "out_channels": d["latent_channels"],
            "blocks": [RES, space, RES, time, RES, both, RES, space, RES],
            "patch_size": d["patch_size"],
            "latent_log_var": "constant",
        },
        "decoder": {
            "_class_name": "NADiffusionDecoder",
            "in_channels": d["latent_channels"],
            "patch_size": d["patch_size"],
            "head_dim": d["decoder_head_dim"],
            "stage_channels": d["decoder_stage_channels"],
            "stage_depths": d["decoder_stage_depths"],
            "stage_kernels": d["decoder_stage_kernels"],
            "upsamples": list(zip(d["decoder_upsample_strides"], d["decoder_upsample_channel_reductions"], strict=True)),
            "stage5_kernel": d["decoder_stage5_kernel"],
            "t_emb_dim": d["decoder_t_emb_dim"],
            "timestep_scale_multiplier": model.config.decoder_timestep_scale_multiplier,
            "default_num_inference_steps": 1,
        },
    }
    tensors = {}
    for name, tensor in model.state_dict().items():
        for old, new in (
            ("t_embedder.timestep_embedder.linear_1.", "t_embedder.mlp.0."),
            ("t_embedder.timestep_embedder.linear_2.", "t_embedder.mlp.2."),
            (".attn.to_out.0.", ".attn.proj."),
            (".attn.norm_q.", ".attn.q_norm."),
            (".attn.norm_k.", ".attn.k_norm."),
        ):
            name = name.replace(old, new)
        name = {"latents_mean": "per_channel_statistics.mean-of-means", "latents_std": "per_channel_statistics.std-of-means"}.get(name, name)
        tensors[name] = tensor.clone().contiguous()
    for name in [name for name in tensors if ".attn.to_q." in name]:
        rows = [tensors.pop(name.replace("to_q", part)) for part in ("to_q", "to_k", "to_v")]
        tensors[name.replace("to_q", "qkv")] = torch.cat(rows)
    save_file(tensors, path, {"config": json.dumps({"vae": config})})
    return path
