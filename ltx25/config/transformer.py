"""The transformer file's metadata: one JSON object describes both the DiT and the text connectors beside it."""

from __future__ import annotations

from ..checkpoint.header import Header
from ..errors import FileError
from .connector import PREFIXES, ConnectorConfig
from .dit import DiTConfig
from .keys import Keys

CONNECTOR_TENSORS = ("video_embeddings_connector.*", "audio_embeddings_connector.*")  # not the DiT's, in the same namespace


def read_transformer(header: Header) -> tuple[DiTConfig, ConnectorConfig]:
    """The configs of the DiT and of the connectors in `header`'s file.

    Every key of `config.transformer` is read, required or known to be inert; a file without metadata is described by its
    shapes. Raises FileError naming what is missing, unknown or not built.
    """
    prefix = transformer_prefix(header)
    tensors = {name[len(prefix) :]: info for name, info in header.tensors.items() if name.startswith(prefix)}
    if "config" not in header.metadata:
        return DiTConfig.from_shapes(tensors, header.name), ConnectorConfig.infer(header)
    whole = Keys(header.metadata_json("config"), f"{header.name}: config")
    keys = whole.block("transformer")
    dit = DiTConfig.take(keys, tensors)
    connector = ConnectorConfig.take(keys)
    keys.done()
    # The scheduler block names training settings nobody reads; files that hold all parts describe the others here too.
    whole.inert(("scheduler", "vae", "audio_vae", "vocoder"))
    whole.done()
    return dit, connector


def transformer_prefix(header: Header) -> str:
    """What precedes `adaln_single.` in the file's tensor names. Raises FileError where no transformer is."""
    for prefix in PREFIXES:
        if f"{prefix}adaln_single.linear.weight" in header.tensors:
            return prefix
    raise FileError(f"{header.name} holds no LTX transformer (no adaln_single.linear.weight); choose a transformer file.")
