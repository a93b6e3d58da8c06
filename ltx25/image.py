"""Pictures on the way into the video encoder: channels, the compression the model was trained with, and one crop rule.

The order is the official one: compressed at the picture's own size first, resized after.
"""

from __future__ import annotations

import io
import math

import av
import torch

from .errors import InputError
from .finite import count_not_finite

CRF = 18  # what LTX-2.5 was trained on (ltx_pipelines.utils.constants); 33 for earlier models, 0 is off
WORST_CRF = 51


def prepare_images(images: torch.Tensor, height: int, width: int, crf: int) -> torch.Tensor:
    """Pictures (F, H, W, 1 to 4) of any size in 0..1 -> (F, height, width, 3) float32 CPU in 0..1. The input is not changed.

    Grey becomes three equal channels, alpha is dropped, values beyond 0..1 are held there. Raises InputError for other
    shapes, for whole numbers, for values that are not finite and for a crf outside 0 (off) to 51.
    """
    return cover(compress(rgb(images), crf), height, width)


def rgb(images: torch.Tensor) -> torch.Tensor:
    """Pictures (F, H, W, C) or (F, H, W) as (F, H, W, 3) float32 CPU in 0..1; errors as prepare_images."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or 0 in images.shape or images.shape[-1] > 4:
        raise InputError(f"the picture has shape {tuple(images.shape)}, wanted (frames, height, width, 1 to 4 channels); connect an IMAGE.")
    if not images.is_floating_point():
        raise InputError(f"the picture has values of type {str(images.dtype).removeprefix('torch.')}, wanted floating-point ones in 0 to 1; divide them by the highest value of their type.")
    images = images.detach().to("cpu", torch.float32)
    bad = count_not_finite(images)
    if bad:
        raise InputError(f"the picture has {bad} values that are not finite numbers; look at the node that made it.")
    if images.shape[-1] < 3:
        images = images[..., :1].expand(-1, -1, -1, 3)
    return images[..., :3].clamp(0, 1)


def cover(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize (F, H, W, 3) to cover height x width px, keeping its proportions, and cut out the centre.

    Bilinear without antialiasing (ltx_pipelines resize_and_center_crop); only what remains is computed, so that a strip of
    4096 x 16 px needs no more memory than a square.
    """
    _, rows, columns, _ = images.shape
    scale = max(height / rows, width / columns)
    for axis, had, wanted in ((1, rows, height), (2, columns, width)):
        if (rows, columns) == (height, width):
            return images
        low, high, share = _taps(had, math.ceil(had * scale), wanted)
        share = share.view(-1, 1, 1) if axis == 1 else share.view(-1, 1)
        images = torch.lerp(images.index_select(axis, low), images.index_select(axis, high), share)
    return images


def _taps(had: int, made: int, wanted: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The two source rows and the share of the second, for the middle `wanted` of `made` rows out of `had`."""
    first = (made - wanted) // 2
    place = ((torch.arange(first, first + wanted, dtype=torch.float32) + 0.5) * (had / made) - 0.5).clamp(min=0)
    low = place.floor().long().clamp(max=had - 1)
    return low, (low + 1).clamp(max=had - 1), place - low


def compress(images: torch.Tensor, crf: int) -> torch.Tensor:
    """Every picture (H, W, 3) through one H.264 frame of quality `crf`: 0 is off, more is coarser. Odd sides lose a row.

    As officially, a picture with a side of 1 px stays as it is: H.264 knows no such size.
    """
    if not 0 <= crf <= WORST_CRF:
        raise InputError(f"crf is {crf}, wanted 0 (off) to {WORST_CRF} (coarse); {CRF} is what LTX-2.5 was trained with.")
    if crf == 0 or min(images.shape[1:3]) < 2:
        return images
    if "libx264" not in av.codecs_available:
        raise InputError(f"crf is {crf}, but this PyAV has no H.264 encoder (libx264); set crf to 0 or install another build of av.")
    coded = (images * 255).round().to(torch.uint8)[:, : images.shape[1] // 2 * 2, : images.shape[2] // 2 * 2].contiguous()
    return torch.stack([_through_h264(picture, crf) for picture in coded]).float() / 255


def _through_h264(picture: torch.Tensor, crf: int) -> torch.Tensor:
    """(H, W, 3) uint8 with even sides, in and out."""
    held = io.BytesIO()
    with av.open(held, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=1, options={"crf": str(crf), "preset": "veryfast"})
        stream.height, stream.width = picture.shape[:2]
        container.mux(stream.encode(av.VideoFrame.from_ndarray(picture.numpy(), format="rgb24").reformat(format="yuv420p")))
        container.mux(stream.encode())
    held.seek(0)
    with av.open(held) as container:
        return torch.from_numpy(next(container.decode(video=0)).to_ndarray(format="rgb24"))


def every_other(images: torch.Tensor, factor: int) -> torch.Tensor:
    """Frames 0, 1, 1 + factor, 1 + 2 factor, ...: a reference in the time steps an IC-LoRA was trained with."""
    if factor < 1:
        raise InputError(f"a temporal factor of {factor} makes no sense, wanted 1 or more; the LoRA's metadata has the right one.")
    return images if factor == 1 else torch.cat([images[:1], images[1::factor]])
