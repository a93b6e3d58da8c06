"""Latents to frames, whichever decoder the file holds: checks, memory, progress, and the way out of the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch

from ...kernels.memory import is_out_of_memory
from ..errors import InputError
from ..finite import all_finite
from ..hdr import SDR, check_transfer, to_linear
from ..instrument.watch import Phase, Watch
from ..pages import in_large_pages
from ..shapes import Compression, VideoLatentShape
from .output import FrameOutput, Part

logger = logging.getLogger(__name__)


class Plan(Protocol):
    """How one clip is decoded. `units`: ticks of progress it takes; `text` names the choice to the user."""

    @property
    def units(self) -> int: ...

    @property
    def text(self) -> str: ...


class VideoDecoder(Protocol):
    """What both decoders offer."""

    @property
    def compression(self) -> Compression: ...

    @property
    def latent_channels(self) -> int: ...

    def plan(self, shape: VideoLatentShape, tiling: str, free: int | None) -> Plan:
        """The fastest plan that fits into `free` bytes (None: not known)."""

    def smaller(self, shape: VideoLatentShape, plan: Plan) -> Plan | None:
        """The next plan that needs less memory."""

    def parts(self, latent: torch.Tensor, plan: Plan, seed: int, phase: Phase) -> Iterator[Part]:
        """Decode (1, C, t, h, w) part by part; ticks `plan.units` times."""


def decode_video(
    decoder: VideoDecoder, latent: torch.Tensor, *, tiling: str, seed: int, watch: Watch, free: int | None, transfer: str = SDR
) -> torch.Tensor:
    """Decode a normalised latent (B, C, t, h, w), on any device, to frames (B * F, H, W, 3) float32 on the CPU in 0..1.

    transfer: one of hdr.TRANSFERS. With a curve the decoded signal is taken for that curve's, and the frames are
    scene-linear light of Rec.709 primaries from 0 up, not held below 1. tiling: "auto" or "off"; free: bytes the decoder may
    use on its device, None when not known. Item i of the batch draws its noise from seed + i. Out of memory: goes on with a smaller plan, says so, and gives up only at the smallest.
    The latent is not changed. Raises InputError for a latent of another shape or with NaN in it.
    """
    shape = _checked(decoder, latent, tiling)
    light = None if check_transfer(transfer) == SDR else partial(to_linear, curve=transfer)
    device = next(decoder.parameters()).device
    pixels = shape.pixels(decoder.compression)
    items = latent.shape[0]
    out = in_large_pages(torch.empty(items * pixels.frames, pixels.height, pixels.width, 3))
    plan = decoder.plan(shape, tiling, free)
    with watch.phase("decode.video", total=items * plan.units, unit="chunk", **vars(pixels), batch=items, plan=plan.text, transfer=transfer) as phase:
        for item in range(items):
            target = out[item * pixels.frames : (item + 1) * pixels.frames]
            source = latent[item : item + 1].to(device)
            while not _decode_item(decoder, source, plan, seed + item, target, phase, light):
                plan = _retreat(decoder, shape, plan, device, phase, items - item)
    return out


def _decode_item(
    decoder: VideoDecoder,
    latent: torch.Tensor,
    plan: Plan,
    seed: int,
    target: torch.Tensor,
    phase: Phase,
    light: Callable[[torch.Tensor], torch.Tensor] | None,
) -> bool:
    """Decode one item into `target`; False when the device's memory ran out."""
    try:
        with FrameOutput(target, latent.device, light) as output:
            for part in decoder.parts(latent, plan, seed, phase):
                output.put(part)
            finite = output.finish()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    phase.moved(d2h=target.nbytes if latent.device.type != "cpu" else 0)
    if not finite:
        raise InputError("decode.video made values that are not finite (NaN or infinity); load the VAE file again or use precision bf16.")
    return True


def _retreat(
    decoder: VideoDecoder, shape: VideoLatentShape, plan: Plan, device: torch.device, phase: Phase, items: int
) -> Plan:
    """The next smaller plan, after freeing what the failed one left; `items` are still to be decoded."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    smaller = decoder.smaller(shape, plan)
    if smaller is None:
        raise torch.OutOfMemoryError(
            f"decode.video does not fit into the device's memory even with {plan.text}; unload other models, or sample a smaller or shorter clip."
        )
    logger.warning("decode.video ran out of memory with %s; going on with %s.", plan.text, smaller.text)
    phase.total = phase.done + items * smaller.units
    phase.within(f"out of memory with {plan.text}, going on with {smaller.text}", plan=smaller.text)
    return smaller


def _checked(decoder: VideoDecoder, latent: torch.Tensor, tiling: str) -> VideoLatentShape:
    if tiling not in ("auto", "off"):
        raise InputError(f"tiling is {tiling!r}, wanted 'auto' or 'off'.")
    if latent.ndim != 5 or latent.shape[1] != decoder.latent_channels or 0 in latent.shape:
        wanted = f"(batch, {decoder.latent_channels}, frames, height, width)"
        raise InputError(f"the video latent has shape {tuple(latent.shape)}, and this video VAE decodes {wanted}; use a latent of the same model.")
    if not all_finite(latent):
        raise InputError("decode.video got a latent with values that are not finite (NaN or infinity); sample it again.")
    return VideoLatentShape(*latent.shape[1:])
