"""What a duration head file says about itself."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoint.header import Header
from ..errors import FileError
from .keys import Keys

PREFIXES = ("duration_head.", "model.diffusion_model.duration_head.")


@dataclass(frozen=True)
class DurationConfig:
    """width: of the pooled query; hidden: of the MLP; video, audio: of the contexts. `prefix` is before every name."""

    prefix: str
    video: int
    audio: int
    width: int
    queries: int
    heads: int
    hidden: int


def read_duration_config(header: Header) -> DurationConfig:
    """Widths from the tensors; the head count, which no shape tells, from the metadata (published file: left out, 4).

    Raises FileError where metadata and tensors contradict each other.
    """
    prefix = next((p for p in PREFIXES if f"{p}mlp_out.weight" in header.tensors), None)
    if prefix is None:
        raise FileError(f"{header.name} is no duration head; use ltx-2.5-duration-head-bf16 from huggingface.co/Lightricks/LTX-2.5.")

    def shape(name: str) -> tuple[int, ...]:
        if prefix + name not in header.tensors:
            raise FileError(f"{header.name} lacks {prefix}{name}; download the file again.")
        return header.tensors[prefix + name].shape

    queries, width = shape("attention_pooler.query_tokens")
    hidden, heads = shape("mlp_hidden.weight")[0], 4
    video, audio = shape("video_input_proj.weight")[1], shape("audio_input_proj.weight")[1]
    if "config" in header.metadata:
        config = Keys(header.metadata_json("config"), f"{header.name}: config")
        if config.has("duration_head"):
            head = config.block("duration_head")
            heads = head.take("num_pooler_heads", int, heads)
            head.require("pooler_hidden_dim", width, width)
            head.require("num_queries", queries, queries)
            head.require("mlp_hidden", hidden, hidden)
            head.done()
    if width % heads:
        raise FileError(f"{header.name}: {heads} heads do not divide a width of {width}; use the published file.")
    return DurationConfig(prefix, video, audio, width, queries, heads, hidden)
