"""Which part of the model a file is, told from its tensor names alone: file names lie, and no header names the part."""

from __future__ import annotations

from enum import Enum

from ..errors import FileError
from .header import Header


class Kind(Enum):
    """The parts users can mix up; the value is how an error names them."""

    TRANSFORMER = "a diffusion transformer"
    TEXT_ENCODER = "a Gemma text encoder with LTX projections"
    STOCK_TEXT_ENCODER = "a text encoder without the LTX projections"
    VIDEO_VAE_CONV = "a video VAE (convolutional decoder)"
    VIDEO_VAE_DIFFUSION = "a video VAE (diffusion decoder)"
    AUDIO_VAE = "an audio VAE with vocoder"
    UPSCALER = "a latent upscaler"
    DURATION_HEAD = "a duration head"
    LORA = "a LoRA"
    UNKNOWN = "something this pack does not know"


def identify(header: Header) -> Kind:
    """The kind of `header`'s file. A name may carry the prefix of a monolithic checkpoint (`vae.`) or none."""
    names = header.tensors.keys()
    has = names.__contains__
    if any(name.endswith((".lora_A.weight", ".lora_down.weight")) for name in names):
        return Kind.LORA
    if has("model.diffusion_model.adaln_single.linear.weight") or has("adaln_single.linear.weight"):
        return Kind.TRANSFORMER
    if has("model.layers.0.post_feedforward_layernorm.weight") or has("model.language_model.layers.0.input_layernorm.weight"):
        projected = has("text_embedding_projection.video_aggregate_embed.weight")
        return Kind.TEXT_ENCODER if projected else Kind.STOCK_TEXT_ENCODER
    if has("model.embed_tokens.weight") or has("model.layers.0.input_layernorm.weight"):
        return Kind.STOCK_TEXT_ENCODER
    for prefix in ("", "vae."):
        if has(f"{prefix}decoder.conv_in_x_t.weight"):
            return Kind.VIDEO_VAE_DIFFUSION
        if has(f"{prefix}decoder.conv_in.conv.weight") and has(f"{prefix}decoder.up_blocks.0.res_blocks.0.conv1.conv.weight"):
            return Kind.VIDEO_VAE_CONV
    if any(name.startswith("vocoder.") for name in names) and any(name.startswith("audio_vae.") for name in names):
        return Kind.AUDIO_VAE
    if has("post_upsample_res_blocks.0.conv2.bias"):
        return Kind.UPSCALER
    if has("duration_head.mlp_out.weight") or has("model.diffusion_model.duration_head.mlp_out.weight"):
        return Kind.DURATION_HEAD
    return Kind.UNKNOWN


def require_kind(header: Header, slot: str, wanted: tuple[Kind, ...]) -> Kind:
    """The file's kind, or a FileError that names the slot, what was put there and what belongs there."""
    kind = identify(header)
    if kind in wanted:
        return kind
    if kind is Kind.STOCK_TEXT_ENCODER and Kind.TEXT_ENCODER in wanted:
        raise FileError(
            f"{slot}: {header.name} lacks text_embedding_projection.video_aggregate_embed (it is a stock Gemma); "
            "use gemma4-12b-with-proj-ltx-2.5 from huggingface.co/Lightricks/LTX-2.5."
        )
    names = " or ".join(f"{one.value} like {_PUBLISHED[one]}" for one in wanted)
    raise FileError(f"{slot}: {header.name} is {kind.value}, wanted {names}.")


# One published file of each kind: what to pick instead.
_PUBLISHED = {
    Kind.TRANSFORMER: "ltx-2.5-22b-dev-transformer-bf16",
    Kind.TEXT_ENCODER: "gemma4-12b-with-proj-ltx-2.5-bf16",
    Kind.VIDEO_VAE_CONV: "ltx-2.5-video-vae-conv-bf16",
    Kind.VIDEO_VAE_DIFFUSION: "ltx-2.5-video-vae-bf16",
    Kind.AUDIO_VAE: "ltx-2.5-audio-vae-bf16",
    Kind.UPSCALER: "ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0",
    Kind.DURATION_HEAD: "ltx-2.5-duration-head-bf16",
    Kind.LORA: "ltx-2.5-22b-distilled-lora-450-bf16",
}
