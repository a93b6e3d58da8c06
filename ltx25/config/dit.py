"""What the audio-video transformer is made of, read from `config.transformer` and from the tensors that are there."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..checkpoint.header import TensorInfo
from ..errors import FileError
from .keys import Keys

log = logging.getLogger(__name__)

KEYFRAMES = "keyframes_abs_pos_embedding"
PROMPT = "prompt_adaln_single.linear.weight"
AUDIO_PROMPT = "audio_prompt_adaln_single.linear.weight"


@dataclass(frozen=True)
class DiTConfig:
    """Widths in features, positions in seconds (first axis) and pixels. D = heads * head_dim, Da = heads * audio_head_dim."""

    layers: int
    heads: int
    head_dim: int
    audio_head_dim: int
    in_channels: int
    out_channels: int
    audio_in_channels: int
    audio_out_channels: int
    norm_eps: float
    rope_theta: float
    max_position: tuple[int, int, int]  # s, px, px
    audio_max_position: int  # s
    timestep_scale: float
    cross_timestep_scale: float
    ff_bias: bool
    audio_ff_bias: bool
    prompt_adaln: bool
    keyframe_embedding: bool

    @property
    def width(self) -> int:
        """D, the video stream's width."""
        return self.heads * self.head_dim

    @property
    def audio_width(self) -> int:
        """Da, the audio stream's width, and the inner width of attention between the streams."""
        return self.heads * self.audio_head_dim

    @staticmethod
    def take(keys: Keys, tensors: Collection[str]) -> DiTConfig:
        """Pop the transformer's own keys from `keys`; `tensors` holds the file's tensor names without their prefix.

        Two features go by what the file holds, not by what it says: quantised builds were published whose keys and
        tensors disagree. Defaults are those of the official code for keys the published files leave out.
        Raises FileError for a missing key and for every feature that is not built.
        """
        _refuse_other_models(keys)
        heads = keys.take("num_attention_heads", int)
        config = DiTConfig(
            layers=keys.take("num_layers", int),
            heads=heads,
            head_dim=keys.take("attention_head_dim", int),
            audio_head_dim=keys.take("audio_attention_head_dim", int),
            in_channels=keys.take("in_channels", int),
            out_channels=keys.take("out_channels", int),
            audio_in_channels=keys.take("audio_in_channels", int, 128),
            audio_out_channels=keys.take("audio_out_channels", int),
            norm_eps=keys.take("norm_eps", float),
            rope_theta=keys.take("positional_embedding_theta", float),
            max_position=_positions(keys, "positional_embedding_max_pos", 3),
            audio_max_position=_positions(keys, "audio_positional_embedding_max_pos", 1)[0],
            timestep_scale=keys.take("timestep_scale_multiplier", float),
            cross_timestep_scale=keys.take("av_ca_timestep_scale_multiplier", float, 1.0),
            ff_bias=keys.take("ff_bias", bool, True),
            audio_ff_bias=keys.take("audio_ff_bias", bool, True),
            prompt_adaln=_both_or_none(tensors, keys.where),
            keyframe_embedding=KEYFRAMES in tensors,
        )
        keys.require("audio_num_attention_heads", heads)
        keys.require("cross_attention_dim", config.width)
        keys.require("audio_cross_attention_dim", config.audio_width)
        return config.check(keys.where)

    @staticmethod
    def from_shapes(tensors: Mapping[str, TensorInfo], where: str) -> DiTConfig:
        """For a file without metadata: widths from tensor shapes, the rest as published for 2.5. Logs one line.

        `tensors` is keyed by name without prefix. Raises FileError where shapes do not tell.
        """

        def shape(name: str) -> tuple[int, ...]:
            if name not in tensors:
                raise FileError(f"{where} has no metadata and no tensor {name}; use the file as published by Lightricks.")
            return tensors[name].shape

        width, audio_width = shape("patchify_proj.weight")[0], shape("audio_patchify_proj.weight")[0]
        heads = shape("transformer_blocks.0.attn1.to_gate_logits.weight")[0]
        if width % heads or audio_width % heads:
            raise FileError(f"{where} has no metadata, and {heads} heads do not divide widths {width} and {audio_width}.")
        blocks = {name.split(".")[1] for name in tensors if name.startswith("transformer_blocks.")}
        if blocks != {str(i) for i in range(len(blocks))}:
            raise FileError(f"{where} has no metadata, and its {len(blocks)} transformer blocks are not numbered from 0 without a gap.")
        config = DiTConfig(
            layers=len(blocks),
            heads=heads,
            head_dim=width // heads,
            audio_head_dim=audio_width // heads,
            in_channels=shape("patchify_proj.weight")[1],
            out_channels=shape("proj_out.weight")[0],
            audio_in_channels=shape("audio_patchify_proj.weight")[1],
            audio_out_channels=shape("audio_proj_out.weight")[0],
            norm_eps=1e-6,
            rope_theta=10000.0,
            max_position=(20, 2048, 2048),
            audio_max_position=20,
            timestep_scale=1000.0,
            cross_timestep_scale=1000.0,
            ff_bias="transformer_blocks.0.ff.net.0.proj.bias" in tensors,
            audio_ff_bias="transformer_blocks.0.audio_ff.net.0.proj.bias" in tensors,
            prompt_adaln=_both_or_none(tensors, where),
            keyframe_embedding=KEYFRAMES in tensors,
        )
        log.warning("%s has no metadata: widths are read from its shapes, everything else is taken as published for LTX-2.5.", where)
        return config.check(where)

    def check(self, where: str) -> DiTConfig:
        """Return self, or raise FileError for sizes the rope cannot split into halves of heads."""
        wrong = [f"{name} {n}" for name, n in vars(self).items() if isinstance(n, int) and not isinstance(n, bool) and n < 1]
        wrong += [f"{name} {n}" for name, n in (("head width", self.head_dim), ("audio head width", self.audio_head_dim)) if n % 2]
        if wrong:
            raise FileError(f"{where}: {', '.join(wrong)} cannot be used; the file is not an LTX-2.5 one.")
        return self


def _positions(keys: Keys, name: str, count: int) -> tuple[int, ...]:
    values = keys.take(name, list)
    if len(values) != count or not all(isinstance(value, int) and value > 0 for value in values):
        raise FileError(f"{keys.where}.{name} is {values!r}, wanted {count} positive integers.")
    return tuple(values)


def _both_or_none(tensors: Collection[str], where: str) -> bool:
    found = [name for name in (PROMPT, AUDIO_PROMPT) if name in tensors]
    if len(found) == 1:
        raise FileError(f"{where}: the file has {found[0]} but not its counterpart of the other stream; download it again.")
    return len(found) == 2


def _refuse_other_models(keys: Keys) -> None:
    """Keys that must have one value: anything else is a model this engine does not build."""
    for name, wanted in (
        ("activation_fn", "gelu-approximate"),
        ("qk_norm", "rms_norm"),
        ("standardization_norm", "rms_norm"),
        ("norm_elementwise_affine", False),
        ("attention_bias", True),
        ("apply_gated_attention", True),
        ("cross_attention_adaln", True),
        ("cross_attention_norm", True),
        ("av_cross_ada_norm", True),
        ("use_audio_video_cross_attention", True),
        ("share_ff", False),
        ("dropout", 0.0),
        ("num_vector_embeds", None),
        ("num_embeds_ada_norm", 1000),
        ("use_linear_projection", False),
        ("only_cross_attention", False),
        ("double_self_attention", False),
        ("upcast_attention", False),
        ("positional_embedding_type", "rope"),
        ("rope_type", "split"),
        ("frequencies_precision", "float64"),
        ("use_middle_indices_grid", True),
        ("causal_temporal_positioning", True),
        # Text arrives projected and connected: nothing in the transformer projects it again.
        ("use_embeddings_connector", True),
        ("caption_proj_before_connector", True),
        ("caption_projection_first_linear", False),
        ("caption_projection_second_linear", False),
        ("caption_proj_input_norm", False),
        ("text_encoder_norm_type", "PER_TOKEN_RMS"),
    ):
        keys.require(name, wanted)
    # Read by nobody, or settled by the tensors themselves (see `take`).
    keys.inert(("_class_name", "attention_type", "norm_num_groups", "caption_channels"))
    keys.inert(("use_prompt_adaln_single", "use_keyframes_abs_pos_embedding"))
