"""What an IC-LoRA's file says about the video it wants to be shown: how much smaller, and every how many frames."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import FileError, InputError
from .file import Lora

# Metadata keys, as ltx_pipelines.iclora_utils reads them. A file without one means 1.
# DOWNSCALE: the clip's sides over the reference's. TEMPORAL: one frame of so many is shown, behind the first.
DOWNSCALE, TEMPORAL = "reference_downscale_factor", "reference_temporal_scale_factor"


def reference_factor(loras: Sequence[Lora], key: str) -> int:
    """DOWNSCALE or TEMPORAL of those of `loras` that act; 1 where none says anything.

    Raises FileError for a factor that is none, InputError where two files say different ones: the clip has one reference.
    """
    told = {factor: lora for lora in loras if lora.strength != 0 and (factor := _factor(lora, key)) != 1}
    if len(told) > 1:
        (one, first), (other, second) = list(told.items())[:2]
        raise InputError(f"{first.header.name} wants {key} {one} and {second.header.name} {other}; use one of the two LoRAs, or set the factor yourself.")
    return next(iter(told), 1)


def _factor(lora: Lora, key: str) -> int:
    text = lora.header.metadata.get(key, "1")
    try:
        factor = int(text)
    except ValueError:
        factor = 0
    if factor < 1:
        raise FileError(f"{lora.header.name}: metadata key '{key}' is {text!r}, wanted a whole number from 1; set the factor yourself.")
    return factor
