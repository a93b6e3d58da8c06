"""What a transformer file says about its two embeddings connectors (text features -> text contexts)."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from ..checkpoint import Header
from ..errors import FileError
from .keys import Keys

log = logging.getLogger(__name__)

PREFIXES = ("model.diffusion_model.", "")  # as published, and as converters leave the names
VIDEO, AUDIO = "video_embeddings_connector.", "audio_embeddings_connector."

# The official code reads neither from the file, whatever the metadata says.
REGISTERS = 128
THETA = 10000.0


@dataclass(frozen=True)
class ConnectorStream:
    """One connector: `layers` blocks of `heads` x `head_dim`. Position i turns as i / max_position of the rotary range."""

    layers: int
    heads: int
    head_dim: int
    max_position: int
    ff_bias: bool

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class ConnectorConfig:
    """Both connectors of one transformer file."""

    video: ConnectorStream
    audio: ConnectorStream

    @staticmethod
    def take(keys: Keys) -> ConnectorConfig:
        """Take the connector_* and audio_connector_* keys out of `config.transformer`; the caller reads the rest.

        Raises FileError for a missing key or a feature the LTX-2.5 connectors do not have.
        """
        keys.require("connector_apply_gated_attention", True)
        # The first two are fixed by the official code, the third is how registers were drawn before training.
        keys.inert(("connector_num_learnable_registers", "connector_norm_output", "connector_learnable_registers_std"))
        max_position = keys.take("connector_positional_embedding_max_pos", list)
        if len(max_position) != 1 or type(max_position[0]) is not int or max_position[0] < 1:
            raise FileError(f"{keys.where}.connector_positional_embedding_max_pos is {max_position}, wanted one positive number.")
        ff_bias = keys.take("connector_ff_bias", bool, True)
        layers = keys.take("connector_num_layers", int)
        config = ConnectorConfig(
            video=ConnectorStream(
                layers=layers,
                heads=keys.take("connector_num_attention_heads", int),
                head_dim=keys.take("connector_attention_head_dim", int),
                max_position=max_position[0],
                ff_bias=ff_bias,
            ),
            audio=ConnectorStream(
                layers=keys.take("audio_connector_num_layers", int, layers),
                heads=keys.take("audio_connector_num_attention_heads", int),
                head_dim=keys.take("audio_connector_attention_head_dim", int),
                max_position=max_position[0],
                ff_bias=ff_bias,
            ),
        )
        for stream in (config.video, config.audio):
            if min(stream.layers, stream.heads, stream.head_dim) < 1 or stream.head_dim % 2:
                raise FileError(
                    f"{keys.where}: a connector of {stream.layers} layers with {stream.heads} heads of {stream.head_dim}; "
                    "wanted at least one layer and heads of an even width."
                )
        return config

    @staticmethod
    def infer(header: Header) -> ConnectorConfig:
        """For a transformer file without metadata: sizes from the tensors, max_position from the published model."""
        config = ConnectorConfig(_infer(header, VIDEO), _infer(header, AUDIO))
        log.warning(
            "%s has no config metadata: connector sizes are taken from its tensors (%d and %d wide), the rest from the published LTX-2.5 model.",
            header.name,
            config.video.width,
            config.audio.width,
        )
        return config


def connector_prefix(header: Header) -> str:
    """What stands before `video_embeddings_connector.` in the file's names; raises FileError when it has no connectors."""
    for prefix in PREFIXES:
        if f"{prefix}{VIDEO}learnable_registers" in header.tensors:
            return prefix
    raise FileError(
        f"{header.name} has no {VIDEO}learnable_registers: it is not an LTX-2.5 transformer with its text connectors; "
        "use a diffusion_models file from huggingface.co/Lightricks/LTX-2.5."
    )


_PUBLISHED_MAX_POSITION = 4096


def _infer(header: Header, connector: str) -> ConnectorStream:
    lead = connector_prefix(header) + connector
    names = [name[len(lead) :] for name in header.tensors if name.startswith(lead)]
    layers = len({found[1] for name in names if (found := re.match(r"transformer_1d_blocks\.(\d+)\.", name))})
    gate = header.tensors.get(lead + "transformer_1d_blocks.0.attn1.to_gate_logits.weight")
    if gate is None or len(gate.shape) != 2 or gate.shape[1] % (2 * gate.shape[0]):
        raise FileError(
            f"{header.name} has no metadata and no usable {lead}transformer_1d_blocks.0.attn1.to_gate_logits.weight to tell "
            "its heads from; use the file as published by Lightricks."
        )
    heads, width = gate.shape
    ff_bias = "transformer_1d_blocks.0.ff.net.0.proj.bias" in names
    return ConnectorStream(layers, heads, width // heads, _PUBLISHED_MAX_POSITION, ff_bias)
