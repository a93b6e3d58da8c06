"""What the text-encoder file says about its Gemma-4 tower and its two projections."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from ..checkpoint import Header
from ..errors import FileError
from .keys import Keys
from .text_layout import PROJECTION, TextLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TowerConfig:
    """The text half of a `gemma4_unified` model. Sliding layers have heads of `head_dim`, full ones of `full_head_dim`.

    full: per layer, True where it attends to the whole past, False where only to the last `window` keys (itself included).
    rotated: share of a full layer's head that is rotated; sliding heads are rotated whole.
    gemma_version: the name transformers are paired by; None where the file does not tell.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    full: tuple[bool, ...]
    heads: int
    kv_heads: int
    head_dim: int
    full_kv_heads: int
    full_head_dim: int
    window: int
    eps: float
    theta: float
    full_theta: float
    rotated: float
    bos: int
    pad: int
    gemma_version: str | None

    @property
    def layers(self) -> int:
        return len(self.full)

    @property
    def states(self) -> int:
        """Hidden states that make a feature: the embedding and one per layer."""
        return self.layers + 1

    @staticmethod
    def read(header: Header) -> TowerConfig:
        """From the file's `gemma_config` metadata, or from its tensor shapes where it carries no metadata at all.

        Raises FileError for another model family, an unknown or unsupported setting, or shapes that leave a choice.
        """
        if "gemma_config" in header.metadata:
            return _from_metadata(header)
        return _from_shapes(header)


# The text-only path is fixed by these, absent or not; any other value is a feature that the published model does not use.
_FIXED = {
    "model_type": "gemma4_unified_text",
    "attention_bias": False,
    "enable_moe_block": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "moe_intermediate_size": None,
    "num_experts": None,
    "num_kv_shared_layers": 0,
    "top_k_experts": None,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}

# No effect on hidden states: training, generation, and what the format's writer adds to every config.
_INERT = (
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "final_logit_softcapping",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "vocab_size_per_layer_input",
)


def _from_metadata(header: Header) -> TowerConfig:
    # Only three keys of the outer object concern the text tower; the rest describes eyes and ears and the writer.
    outer = Keys(header.metadata_json("gemma_config"), f"{header.name}: gemma_config")
    family = outer.take("model_type", str)
    if family != "gemma4_unified":
        raise FileError(
            f"{header.name} is a text encoder of family '{family}', and LTX-2.5 needs 'gemma4_unified'; "
            "use gemma4-12b-with-proj-ltx-2.5 from huggingface.co/Lightricks/LTX-2.5."
        )
    version = outer.take("gemma_version", (str, type(None)), None)

    keys = outer.block("text_config")
    for name, wanted in _FIXED.items():
        keys.require(name, wanted, wanted)
    keys.require("attention_k_eq_v", True)
    keys.inert(_INERT)
    rope = keys.block("rope_parameters")
    sliding, full = rope.block("sliding_attention"), rope.block("full_attention")
    sliding.require("rope_type", "default")
    full.require("rope_type", "proportional")
    kinds = keys.take("layer_types", list)
    config = TowerConfig(
        vocabulary=keys.take("vocab_size", int),
        hidden=keys.take("hidden_size", int),
        intermediate=keys.take("intermediate_size", int),
        full=tuple(kind == "full_attention" for kind in kinds),
        heads=keys.take("num_attention_heads", int),
        kv_heads=keys.take("num_key_value_heads", int),
        head_dim=keys.take("head_dim", int),
        full_kv_heads=keys.take("num_global_key_value_heads", int),
        full_head_dim=keys.take("global_head_dim", int),
        window=keys.take("sliding_window", int),
        eps=keys.take("rms_norm_eps", float),
        theta=sliding.take("rope_theta", float),
        full_theta=full.take("rope_theta", float),
        rotated=full.take("partial_rotary_factor", float),
        bos=keys.take("bos_token_id", int, 2),
        pad=keys.take("pad_token_id", int, 0),
        gemma_version=version,
    )
    layers = keys.take("num_hidden_layers", int)
    for block in (keys, rope, sliding, full):
        block.done()
    unknown = sorted(set(map(str, kinds)) - {"sliding_attention", "full_attention"})
    if unknown or len(kinds) != layers or not config.full or not config.full[-1]:
        raise FileError(
            f"{keys.where}.layer_types has {len(kinds)} entries for {layers} layers"
            + (f" and unknown kinds {', '.join(unknown)}" if unknown else "")
            + ", wanted one sliding_attention or full_attention per layer and full_attention last."
        )
    return _checked(config, keys.where)


def _checked(config: TowerConfig, where: str) -> TowerConfig:
    """Refuse widths that no tower can have."""
    for name in ("vocabulary", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "full_kv_heads", "full_head_dim", "window"):
        if getattr(config, name) < 1:
            raise FileError(f"{where}: {name} is {getattr(config, name)}, wanted at least 1.")
    for kv in (config.kv_heads, config.full_kv_heads):
        if config.heads % kv:
            raise FileError(f"{where}: {config.heads} attention heads cannot share {kv} key heads evenly.")
    if config.head_dim % 2 or config.full_head_dim % 2 or not 0.0 <= config.rotated <= 1.0:
        raise FileError(
            f"{where}: heads of {config.head_dim} and {config.full_head_dim} with {config.rotated} of them rotated; "
            "rotation needs even heads and a share from 0 to 1."
        )
    return config


def _from_shapes(header: Header) -> TowerConfig:
    """Widths from the tensors, everything that leaves no trace in them from the published model."""
    prefix = TextLayout.read(header).tower
    shapes = {name[len(prefix) :]: info.shape for name, info in header.tensors.items() if name.startswith(prefix)}

    def shape(name: str, axes: int) -> tuple[int, ...]:
        got = shapes.get(name, ())
        if len(got) != axes:
            raise FileError(
                f"{header.name} has no metadata and no usable {prefix}{name} to tell its sizes from; "
                "use the file as published by Lightricks."
            )
        return got

    vocabulary, hidden = shape("embed_tokens.weight", 2)
    numbers = {int(found[1]) for name in shapes if (found := re.match(r"layers\.(\d+)\.", name))}
    layers = [f"layers.{i}." for i in range(len(numbers))]
    full = tuple(layer + "self_attn.v_proj.weight" not in shapes for layer in layers)

    def same(what: str, values: list[int]) -> int:
        if len(set(values)) != 1:
            got = f"differ between layers ({', '.join(map(str, sorted(set(values))))})" if values else "are in no layer"
            raise FileError(f"{header.name} has no metadata and its {what} {got}; use the file as published by Lightricks.")
        return values[0]

    def heads(kind: bool) -> tuple[int, int, int]:
        """(query heads, key heads, head width) of the full (True) or sliding (False) layers."""
        word = "full-attention" if kind else "sliding"
        mine = [layer + "self_attn." for layer, is_full in zip(layers, full, strict=True) if is_full is kind]
        width = same(f"{word} head widths", [shape(layer + "q_norm.weight", 1)[0] for layer in mine])
        rows = [same(f"{word} {part} rows", [shape(layer + part, 2)[0] for layer in mine]) for part in ("q_proj.weight", "k_proj.weight")]
        if any(count % width for count in rows):
            raise FileError(f"{header.name} has no metadata and {rows} attention rows for heads of {width}; use the published file.")
        return rows[0] // width, rows[1] // width, width

    sliding_heads, kv_heads, head_dim = heads(False)
    full_heads, full_kv_heads, full_head_dim = heads(True)
    config = TowerConfig(
        vocabulary=vocabulary,
        hidden=hidden,
        intermediate=same("MLP widths", [shape(layer + "mlp.gate_proj.weight", 2)[0] for layer in layers]),
        full=full,
        heads=same("numbers of heads", [sliding_heads, full_heads]),
        kv_heads=kv_heads,
        head_dim=head_dim,
        full_kv_heads=full_kv_heads,
        full_head_dim=full_head_dim,
        **_PUBLISHED,
    )
    log.warning(
        "%s has no gemma_config metadata: sizes are taken from its tensors (%d layers of %d), the rest from the published LTX-2.5 model.",
        header.name,
        config.layers,
        hidden,
    )
    return _checked(config, header.name)


_PUBLISHED = {
    "window": 1024,
    "eps": 1e-6,
    "theta": 1e4,
    "full_theta": 1e6,
    "rotated": 0.25,
    "bos": 2,
    "pad": 0,
    "gemma_version": None,
}


@dataclass(frozen=True)
class FeatureConfig:
    """The two projections: (hidden * states) -> video width and -> audio width."""

    hidden: int
    states: int
    video_width: int
    audio_width: int

    @staticmethod
    def read(header: Header, tower: TowerConfig) -> FeatureConfig:
        """From the projections' own shapes: the file's metadata does not tell. Raises FileError naming what is missing."""
        names = [f"{PROJECTION}{stream}_aggregate_embed.{leaf}" for stream in ("video", "audio") for leaf in ("weight", "bias")]
        missing = [name for name in names if name not in header.tensors]
        if missing:
            raise FileError(
                f"{header.name} lacks {', '.join(missing)}: it is a stock Gemma, not the LTX one; "
                "use gemma4-12b-with-proj-ltx-2.5 from huggingface.co/Lightricks/LTX-2.5."
            )
        widths = []
        for name in (names[0], names[2]):
            shape = header.tensors[name].shape
            if len(shape) != 2 or shape[1] != tower.hidden * tower.states:
                raise FileError(
                    f"{header.name}: {name} has shape {shape}, and {tower.states} hidden states of {tower.hidden} need "
                    f"{tower.hidden * tower.states} columns; download the file again."
                )
            widths.append(shape[0])
        return FeatureConfig(tower.hidden, tower.states, *widths)
