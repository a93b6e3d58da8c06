"""Does this text encoder belong to this transformer? Wrong pairs have fitting shapes and render nonsense, or fail deep inside."""

from __future__ import annotations

import json
import logging
from typing import Any

from ..checkpoint import Header
from ..errors import FileError
from .connector import AUDIO, VIDEO, connector_prefix
from .text_layout import PROJECTION

log = logging.getLogger(__name__)

_OWN_GEMMA_SINCE = (2, 4, 0)  # model_version from which a transformer names the Gemma it was trained with


def check_pairing(transformer: Header, text_encoder: Header) -> None:
    """Raise FileError, naming both files, unless `text_encoder` is the one `transformer` was trained with.

    Versions as the official loader compares them; the widths of projections and connectors as well, from the tensors.
    Where one of the files lost its metadata the versions cannot be compared: that is logged, the widths still count.
    """
    _check_widths(transformer, text_encoder)
    _check_version(transformer, text_encoder)


def _check_widths(transformer: Header, text_encoder: Header) -> None:
    prefix = connector_prefix(transformer)
    for stream, connector in (("video", VIDEO), ("audio", AUDIO)):
        projection = text_encoder.tensors.get(f"{PROJECTION}{stream}_aggregate_embed.weight")
        registers = transformer.tensors.get(f"{prefix}{connector}learnable_registers")
        if projection is None or registers is None:  # loading names what is missing
            continue
        if projection.shape[0] != registers.shape[-1]:
            raise FileError(
                f"{text_encoder.name} makes {stream} features of width {projection.shape[0]}, and {transformer.name} reads "
                f"{registers.shape[-1]}: the two files do not belong together; use the text encoder published with the transformer."
            )


def _check_version(transformer: Header, text_encoder: Header) -> None:
    if not transformer.metadata.keys() & {"config", "model_version", "gemma_source_checkpoint"} or "gemma_config" not in text_encoder.metadata:
        log.warning(
            "%s and %s cannot be checked for belonging together: metadata is missing, only their widths were compared.",
            transformer.name,
            text_encoder.name,
        )
        return
    gemma = text_encoder.metadata_json("gemma_config")
    version = gemma.get("gemma_version") if isinstance(gemma, dict) else None
    if "gemma_source_checkpoint" in transformer.metadata:
        source = transformer.metadata_json("gemma_source_checkpoint")
        wanted = source.get("gemma_version") if isinstance(source, dict) else None
        if wanted != version:
            raise FileError(
                f"{transformer.name} was trained with text encoder '{wanted}', and {text_encoder.name} is "
                f"{_named(version)}; use the text encoder published with the transformer."
            )
    elif _version(transformer) < _OWN_GEMMA_SINCE:
        raise FileError(
            f"{transformer.name} is of model version {transformer.metadata.get('model_version', 'unknown')}, which does not go with "
            f"{text_encoder.name}; use an LTX-2.5 transformer."
        )
    elif version is not None:
        raise FileError(
            f"{transformer.name} does not say which text encoder it was trained with, and {text_encoder.name} is '{version}'; "
            "use the transformer as published by Lightricks."
        )
    else:
        log.warning("Neither %s nor %s names its Gemma version: check that they belong together.", transformer.name, text_encoder.name)


def _named(version: Any) -> str:
    return "of no named version" if version is None else f"'{version}'"


def _version(header: Header) -> tuple[int, ...]:
    """`model_version` "2.5.0" as (2, 5, 0), up to the first part that is not a number; () when there is none."""
    text = header.metadata.get("model_version", "")
    try:
        parsed = json.loads(text)  # some writers store the string with its JSON quotes
        text = parsed if isinstance(parsed, str) else text
    except json.JSONDecodeError:
        pass
    numbers: list[int] = []
    for part in text.replace("-", ".").split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
