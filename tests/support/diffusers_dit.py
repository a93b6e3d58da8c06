"""The transformer in diffusers as an oracle: built for one of our configs, on our weights or with its own renamed to ours.

Valid for text-to-video with one sigma for both streams; elsewhere it is known to differ from the official model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...ltx25.checkpoint import expected
from ...ltx25.config.dit import DiTConfig
from ...ltx25.dit import Contexts, DiT, Leg

# Official name -> name there, replaced in this order.
RENAMED = (
    ("patchify_proj", "proj_in"),
    ("av_ca_video_scale_shift_adaln_single", "av_cross_attn_video_scale_shift"),
    ("av_ca_a2v_gate_adaln_single", "av_cross_attn_video_a2v_gate"),
    ("av_ca_audio_scale_shift_adaln_single", "av_cross_attn_audio_scale_shift"),
    ("av_ca_v2a_gate_adaln_single", "av_cross_attn_audio_v2a_gate"),
    ("scale_shift_table_a2v_ca_video", "video_a2v_cross_attn_scale_shift_table"),
    ("scale_shift_table_a2v_ca_audio", "audio_a2v_cross_attn_scale_shift_table"),
    ("q_norm", "norm_q"),
    ("k_norm", "norm_k"),
    ("audio_prompt_adaln_single", "audio_prompt_adaln"),
    ("prompt_adaln_single", "prompt_adaln"),
    ("audio_adaln_single.", "audio_time_embed."),
    ("adaln_single.", "time_embed."),
)


def oracle_name(name: str) -> str:
    for old, new in RENAMED:
        name = name.replace(old, new)
    return name


def build(config: DiTConfig) -> nn.Module:
    """An LTX2VideoTransformer3DModel of the same sizes, on the current default device."""
    from diffusers import LTX2VideoTransformer3DModel

    return LTX2VideoTransformer3DModel(
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        num_attention_heads=config.heads,
        attention_head_dim=config.head_dim,
        cross_attention_dim=config.width,
        gated_attn=True,
        cross_attn_mod=True,
        audio_in_channels=config.audio_in_channels,
        audio_out_channels=config.audio_out_channels,
        audio_num_attention_heads=config.heads,
        audio_attention_head_dim=config.audio_head_dim,
        audio_cross_attention_dim=config.audio_width,
        audio_gated_attn=True,
        audio_cross_attn_mod=True,
        num_layers=config.layers,
        caption_channels=16,
        rope_double_precision=True,
        rope_type="split",
        use_prompt_embeddings=False,
        perturbed_attn=True,
        ff_bias=config.ff_bias,
        use_keyframes_abs_pos_embedding=config.keyframe_embedding,
        cross_attn_timestep_scale_multiplier=config.cross_timestep_scale,
    ).eval()


def official_weights(oracle: nn.Module, dit: DiT) -> dict[str, torch.Tensor]:
    """The oracle's weights under the official names, as a file holds them; every one of them has a place in `dit`."""
    there = oracle.state_dict()
    ours = {name: there.pop(oracle_name(name)).contiguous() for name in expected(dit)}
    assert not there, f"weights of the oracle that have no place: {sorted(there)}"
    return ours


def share_weights(oracle: nn.Module, dit: DiT) -> None:
    """Give an oracle built on meta the weights of `dit`, without a copy: parts of merged parameters are views.

    Tables are rounded to the activations' dtype, which the official code does before adding; diffusers does not.
    """
    parameters = dict(dit.named_parameters())
    dtype = dit.patchify_proj.weight.dtype
    for name, place in expected(dit).items():
        whole = parameters[place.name]
        part = whole if place.rows is None else whole[place.start : place.start + place.rows]
        path, _, leaf = oracle_name(name).rpartition(".")
        owner = oracle.get_submodule(path)
        assert owner._parameters[leaf].shape == part.shape, name
        owner._parameters[leaf] = nn.Parameter(part.detach().to(dtype), requires_grad=False)
    assert not [name for name, p in oracle.named_parameters() if p.is_meta]


def leg_arguments(leg: Leg, block: int) -> dict[str, Any]:
    """What makes the oracle run `leg`; `block` is the perturbed one."""
    return {
        Leg.COND: {},
        Leg.UNCOND: {},
        Leg.STG: {"spatio_temporal_guidance_blocks": [block]},
        Leg.ISOLATED: {"isolate_modalities": True},
    }[leg]


@torch.no_grad()
def velocities(
    oracle: nn.Module,
    video: torch.Tensor,
    audio: torch.Tensor,
    text: Contexts,
    sigma: float,
    grid: tuple[int, int, int],
    frame_rate: float,
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward at `sigma` for both streams; `grid` = latent (t, h, w). The keyframe mask, which nothing there makes, is the first latent frame."""
    t = torch.full((video.shape[0],), 1000.0 * sigma, device=video.device)
    marked = (torch.arange(video.shape[1], device=video.device) < grid[1] * grid[2]).to(video.dtype)
    return oracle(
        hidden_states=video,
        audio_hidden_states=audio,
        encoder_hidden_states=text.video,
        audio_encoder_hidden_states=text.audio,
        timestep=t,
        audio_timestep=t,
        sigma=t,
        audio_sigma=t,
        num_frames=grid[0],
        height=grid[1],
        width=grid[2],
        fps=frame_rate,
        audio_num_frames=audio.shape[1],
        use_cross_timestep=True,
        video_keyframes_mask=marked[None, :, None].expand(video.shape[0], -1, -1),
        return_dict=False,
        **arguments,
    )
