"""What the tiny files say about themselves: the published metadata, key by key, with smaller numbers.

Patterns are cut down, not changed: five sliding text layers and one full, 128 video latent channels, 8 x 16 audio
latents, 8 x 32 x 32 pixels per latent cell, the published strides, reductions and sampling rates.
"""

from __future__ import annotations

import json
from typing import Any

LAYOUT = 3  # to be raised when names, sizes or weights change: caches of older files are then written anew

DIT_BLOCKS = 4
LORA_RANK = 8
VIDEO_WIDTH, AUDIO_WIDTH = 64, 32
HEADS = 4
TEXT_WIDTH = 32
GEMMA_VERSION = "gemma4-12b-ltx-v1"


def license_text(seed: int) -> str:
    return f"Random weights made by 'ltx25 tiny' (layout {LAYOUT}, seed {seed}) to try the software with; they hold nothing of a published weight."


def transformer_metadata(seed: int) -> dict[str, str]:
    return {
        "config": json.dumps({"transformer": TRANSFORMER, "scheduler": SCHEDULER}),
        "gemma_source_checkpoint": json.dumps({"ltx_version": "2.5.0", "gemma_version": GEMMA_VERSION}),
        "license": license_text(seed),
        "model_version": "2.5.0",
    }


def text_encoder_metadata(vocabulary: int) -> dict[str, str]:
    """`vocabulary`: rows of the embedding table, as many as the tokenizer has ids."""
    text = {**TEXT, "vocab_size": vocabulary, "vocab_size_per_layer_input": vocabulary}
    return {"format": "pt", "gemma_config": json.dumps({**GEMMA, "text_config": text})}


def vae_metadata(config: dict[str, Any], seed: int) -> dict[str, str]:
    return {"config": json.dumps(config), "license": license_text(seed), "model_version": "2.5.0"}


def duration_metadata(seed: int) -> dict[str, str]:
    config = {"transformer": {"cross_attention_dim": VIDEO_WIDTH, "audio_cross_attention_dim": AUDIO_WIDTH}, "duration_head": {}}
    return {"config": json.dumps(config), "license": license_text(seed), "model_version": "2.5.0"}


def lora_metadata(seed: int) -> dict[str, str]:
    return {"license": license_text(seed), "lora_alpha": str(LORA_RANK), "lora_rank": str(LORA_RANK), "model_version": "2.5.0"}


def upscaler_metadata(config: dict[str, Any], seed: int) -> dict[str, str]:
    """Of the two published files only the spatial one carries a licence."""
    return {"config": json.dumps(config), **({"license": license_text(seed)} if config["spatial_upsample"] else {})}


TRANSFORMER: dict[str, Any] = {
    "_class_name": "AVTransformer3DModel",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "attention_head_dim": VIDEO_WIDTH // HEADS,
    "attention_type": "default",
    "caption_channels": TEXT_WIDTH,
    "cross_attention_dim": VIDEO_WIDTH,
    "double_self_attention": False,
    "dropout": 0.0,
    "in_channels": 128,
    "norm_elementwise_affine": False,
    "norm_eps": 1e-06,
    "norm_num_groups": 32,
    "num_attention_heads": HEADS,
    "num_embeds_ada_norm": 1000,
    "num_layers": DIT_BLOCKS,
    "num_vector_embeds": None,
    "only_cross_attention": False,
    "cross_attention_norm": True,
    "out_channels": 128,
    "upcast_attention": False,
    "use_linear_projection": False,
    "qk_norm": "rms_norm",
    "standardization_norm": "rms_norm",
    "positional_embedding_type": "rope",
    "positional_embedding_theta": 10000.0,
    "positional_embedding_max_pos": [20, 2048, 2048],
    "timestep_scale_multiplier": 1000,
    "av_ca_timestep_scale_multiplier": 1000.0,
    "causal_temporal_positioning": True,
    "audio_num_attention_heads": HEADS,
    "audio_attention_head_dim": AUDIO_WIDTH // HEADS,
    "use_audio_video_cross_attention": True,
    "ff_bias": False,
    "share_ff": False,
    "audio_out_channels": 128,
    "audio_cross_attention_dim": AUDIO_WIDTH,
    "audio_positional_embedding_max_pos": [20],
    "av_cross_ada_norm": True,
    "use_embeddings_connector": True,
    "connector_attention_head_dim": VIDEO_WIDTH // HEADS,
    "connector_num_attention_heads": HEADS,
    "connector_num_layers": 2,
    "connector_positional_embedding_max_pos": [4096],
    "connector_num_learnable_registers": 128,
    "connector_norm_output": True,
    "use_middle_indices_grid": True,
    "apply_gated_attention": True,
    "connector_apply_gated_attention": True,
    "caption_projection_first_linear": False,
    "caption_projection_second_linear": False,
    "caption_proj_input_norm": False,
    "connector_learnable_registers_std": 1,
    "caption_proj_before_connector": True,
    "audio_connector_attention_head_dim": AUDIO_WIDTH // HEADS,
    "audio_connector_num_attention_heads": HEADS,
    "cross_attention_adaln": True,
    "rope_type": "split",
    "frequencies_precision": "float64",
    "text_encoder_norm_type": "PER_TOKEN_RMS",
    "use_keyframes_abs_pos_embedding": True,
}

SCHEDULER: dict[str, Any] = {
    "_class_name": "RectifiedFlowScheduler",
    "_diffusers_version": "0.25.1",
    "num_train_timesteps": 1000,
    "shifting": None,
    "base_resolution": None,
    "sampler": "LinearQuadratic",
}

TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 32,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": TEXT_WIDTH,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 262144,
    "model_type": "gemma4_unified_text",
    "moe_intermediate_size": None,
    "num_attention_heads": 4,
    "num_experts": None,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": False,
}

VISION: dict[str, Any] = {
    "mm_embed_dim": TEXT_WIDTH,
    "mm_posemb_size": 8,
    "model_type": "gemma4_unified_vision",
    "num_soft_tokens": 4,
    "output_proj_dims": TEXT_WIDTH,
    "patch_size": 4,
    "pooling_kernel_size": 1,
    "rms_norm_eps": 1e-06,
}
HEARING: dict[str, Any] = {"audio_embed_dim": 16, "model_type": "gemma4_unified_audio", "rms_norm_eps": 1e-06}

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "gemma_version": GEMMA_VERSION,
    "audio_config": HEARING,
    "dtype": "bfloat16",
    "eos_token_id": [1],
    "initializer_range": 0.02,
    "model_type": "gemma4_unified",
    "text_config": TEXT,
    "tie_word_embeddings": True,
    "vision_config": VISION,
}

_ENCODER_BLOCKS: list[Any] = [
    ["res_x", {"num_layers": 1}],
    ["compress_space_res", {"multiplier": 2}],
    ["res_x", {"num_layers": 2}],
    ["compress_time_res", {"multiplier": 2}],
    ["res_x", {"num_layers": 1}],
    ["compress_all_res", {"multiplier": 2}],
    ["res_x", {"num_layers": 1}],
    ["compress_all_res", {"multiplier": 1}],
    ["res_x", {"num_layers": 1}],
]
_ENCODER_WIDTH = 4

CONV_VAE: dict[str, Any] = {
    "vae": {
        "_class_name": "CausalVideoAutoencoder",
        "dims": 3,
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 128,
        "encoder_blocks": _ENCODER_BLOCKS,
        "decoder_blocks": [
            ["res_x", {"num_layers": 1}],
            ["compress_space", {"multiplier": 2}],
            ["res_x", {"num_layers": 2}],
            ["compress_time", {"multiplier": 2}],
            ["res_x", {"num_layers": 1}],
            ["compress_all", {"multiplier": 1}],
            ["res_x", {"num_layers": 1}],
            ["compress_all", {"multiplier": 2}],
            ["res_x", {"num_layers": 1}],
        ],
        "scaling_factor": 1.0,
        "norm_layer": "pixel_norm",
        "patch_size": 4,
        "latent_log_var": "uniform",
        "use_quant_conv": False,
        "causal_decoder": False,
        "timestep_conditioning": False,
        "normalize_latent_channels": False,
        "encoder_base_channels": _ENCODER_WIDTH,
        "decoder_base_channels": 8,
        "spatial_padding_mode": "zeros",
    }
}

DIFFUSION_VAE: dict[str, Any] = {
    "vae": {
        "_class_name": "CausalDiffusionVAE",
        "dims": 3,
        "encoder": {
            "_class_name": "Encoder",
            "dims": 3,
            "in_channels": 3,
            "out_channels": 128,
            "blocks": _ENCODER_BLOCKS,
            "patch_size": 4,
            "latent_log_var": "constant",
            "latent_log_var_value": -7.824046010856292,
            "norm_layer": "pixel_norm",
            "base_channels": _ENCODER_WIDTH,
            "spatial_padding_mode": "zeros",
        },
        "decoder": {
            "_class_name": "NADiffusionDecoder",
            "in_channels": 128,
            "out_channels": 3,
            "patch_size": 4,
            "head_dim": 16,
            "stage_channels": [128, 64, 32, 32, 16],
            "stage_depths": [1, 1, 1, 1, 2],
            "stage_kernels": [[3, 5, 5], [3, 3, 3], [3, 3, 3], [3, 3, 3], [5, 5, 5]],
            "upsamples": [[[1, 2, 2], 2], [[2, 1, 1], 2], [[2, 2, 2], 1], [[2, 2, 2], 2]],
            "spatial_padding_mode": "zeros",
            "resampler_kind": "linear",
            "stage5_kernel": [5, 5, 5],
            "timestep_scale_multiplier": 1000.0,
            "default_num_inference_steps": 1,
        },
        "model_output_type": "x0",
        "spatial_padding_mode": "zeros",
    }
}

_GENERATOR: dict[str, Any] = {
    "resblock": "AMP1",
    "resblock_kernel_sizes": [3, 7, 11],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
    "stereo": True,
    "use_tanh_at_final": False,
    "activation": "snakebeta",
    "use_bias_at_final": False,
}

AUDIO_VAE: dict[str, Any] = {
    "audio_vae": {
        "model": {
            "params": {
                "ddconfig": {
                    "double_z": True,
                    "mel_bins": 64,
                    "z_channels": 8,
                    "resolution": 256,
                    "downsample_time": False,
                    "in_channels": 2,
                    "out_ch": 2,
                    "ch": 16,
                    "ch_mult": [1, 2, 4],
                    "num_res_blocks": 1,
                    "attn_resolutions": [],
                    "dropout": 0.0,
                    "mid_block_add_attention": False,
                    "norm_type": "pixel",
                    "causality_axis": "height",
                },
                "sampling_rate": 16000,
            }
        },
        "preprocessing": {
            "audio": {"sampling_rate": 16000, "max_wav_value": 32768.0, "duration": 5.12, "stereo": True, "causal_padding": 3},
            "stft": {"filter_length": 1024, "hop_length": 160, "win_length": 1024, "causal": True},
            "mel": {"n_mel_channels": 64, "mel_fmin": 0, "mel_fmax": 8000},
        },
    },
    "vocoder": {
        "vocoder": {
            **_GENERATOR,
            "upsample_initial_channel": 128,
            "upsample_rates": [5, 2, 2, 2, 2, 2],
            "upsample_kernel_sizes": [11, 4, 4, 4, 4, 4],
        },
        "bwe": {
            **_GENERATOR,
            "upsample_initial_channel": 64,
            "upsample_rates": [6, 5, 2, 2, 2],
            "upsample_kernel_sizes": [12, 11, 4, 4, 4],
            "apply_final_activation": False,
            "input_sampling_rate": 16000,
            "output_sampling_rate": 48000,
            "hop_length": 80,
            "n_fft": 128,
            "win_size": 128,
            "num_mels": 64,
        },
    },
}

DURATION_WIDTH = 16

_UPSCALER: dict[str, Any] = {"_class_name": "LatentUpsampler", "in_channels": 128, "mid_channels": 32, "num_blocks_per_stage": 1, "dims": 3}
# The temporal file's flag and scale are as odd as the published ones.
SPATIAL_UPSCALER = {**_UPSCALER, "spatial_upsample": True, "temporal_upsample": False, "spatial_scale": 2.0, "rational_resampler": False}
TEMPORAL_UPSCALER = {**_UPSCALER, "spatial_upsample": False, "temporal_upsample": True, "spatial_scale": 1.0, "rational_resampler": True}
