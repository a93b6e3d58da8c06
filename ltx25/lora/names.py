"""Names of LoRA tensors: the layer, in one of many spellings, and what the tensor is to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Endings of the two factors, A (rank, in) first in the product, and of the rest. Trainers and converters each have theirs.
ROLES = {
    ".lora_A.weight": "a",
    ".lora_A.default.weight": "a",
    ".lora_down.weight": "a",
    ".lora.down.weight": "a",
    "_lora.down.weight": "a",
    ".lora_linear_layer.down.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.default.weight": "b",
    ".lora_up.weight": "b",
    ".lora.up.weight": "b",
    "_lora.up.weight": "b",
    ".lora_linear_layer.up.weight": "b",
    ".alpha": "alpha",
}
# Endings of what changes the layer in another way than by two factors, alone or beside them: the pair is then not the change.
FOREIGN = {
    ".dora_scale": "DoRA",
    ".lora_magnitude_vector": "DoRA",
    ".lora_magnitude_vector.weight": "DoRA",
    ".lora_mid.weight": "LoRA of three factors (Tucker)",
    ".lora_A.bias": "LoRA with a bias",
    **{ending.removesuffix(".weight") + ".bias": "LoRA with a bias" for ending, role in ROLES.items() if role == "b"},
    ".diff": "difference of the whole weight",
    ".diff_b": "difference of the bias",
    ".w_norm": "difference of a norm's weight",
    ".b_norm": "difference of a norm's bias",
    ".set_weight": "weight set anew",
    ".reshape_weight": "LoRA that reshapes the weight",
    **{f".lokr_{part}": "LoKr" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
    **{f".hada_{part}": "LoHa" for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
}
_PREFIXES = ("", "diffusion_model.", "model.diffusion_model.", "transformer.", "base_model.model.", "base_model.model.diffusion_model.", "unet.")
_FLAT = ("lora_unet_", "lora_transformer_", "lycoris_", "")  # before a name whose dots are underscores

# Official name -> diffusers' name, replaced in this order.
_DIFFUSERS = (
    ("patchify_proj", "proj_in"),
    ("av_ca_video_scale_shift_adaln_single", "av_cross_attn_video_scale_shift"),
    ("av_ca_a2v_gate_adaln_single", "av_cross_attn_video_a2v_gate"),
    ("av_ca_audio_scale_shift_adaln_single", "av_cross_attn_audio_scale_shift"),
    ("av_ca_v2a_gate_adaln_single", "av_cross_attn_audio_v2a_gate"),
    ("audio_prompt_adaln_single", "audio_prompt_adaln"),
    ("prompt_adaln_single", "prompt_adaln"),
    ("audio_adaln_single.", "audio_time_embed."),
    ("adaln_single.", "time_embed."),
)


def split(key: str) -> tuple[str, str | None]:
    """(layer as the file spells it, "a", "b", "alpha" or a kind of FOREIGN); the role is None where the ending is no known one."""
    for ending, role in {**ROLES, **FOREIGN}.items():
        if key.endswith(ending):
            return key.removesuffix(ending), role
    return key, None


def owner(key: str, table: Mapping[str, str]) -> str | None:
    """The layer of `table` (spelling -> layer) that a tensor with an ending of its own belongs to, or that it is."""
    while key and key not in table:
        key = key.rpartition(".")[0]
    return table.get(key)


def spellings(layers: Iterable[str]) -> dict[str, str]:
    """Every spelling of every layer -> the layer. `layers`: names in the base file, without its prefix and `.weight`."""
    table: dict[str, str] = {}
    for layer in layers:
        other = layer
        for official, renamed in _DIFFUSERS:
            other = other.replace(official, renamed)
        for name in (layer, other):
            for prefix in _PREFIXES:
                table.setdefault(prefix + name, layer)
            for prefix in _FLAT:
                table.setdefault(prefix + name.replace(".", "_"), layer)
    return table
