"""What a latent upscaler file says about itself: widths, and which way it enlarges."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from ..checkpoint.header import Header
from ..errors import FileError
from .keys import Keys

RATIONAL = {Fraction(3, 4), Fraction(3, 2), Fraction(2), Fraction(4)}  # enlarge by the numerator, blur down by the denominator


@dataclass(frozen=True)
class UpscalerConfig:
    """space: factor of rows and columns; time: 2 makes 2 t - 1 latent frames of t, 1 keeps them.

    rational: the spatial resampler is the one with a blur (its tensors have other names), also for a whole factor.
    """

    channels: int
    width: int
    blocks: int
    space: Fraction
    time: int
    rational: bool

    def size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Latent cells (t, h, w) that come out of so many."""
        up, down = self.space.numerator, self.space.denominator
        return (2 * frames - 1 if self.time == 2 else frames, -(-height * up // down), -(-width * up // down))


def read_upscaler_config(header: Header) -> UpscalerConfig:
    """The configuration of a latent upscaler; raises FileError for settings this engine does not implement.

    The direction decides before the rational flag: the published temporal file sets it without having that resampler.
    Without metadata all of it is read off the tensors (a blurred resampler's factor then from its rows: 3/2, 2 or 4).
    """
    if "config" not in header.metadata:
        return _from_shapes(header)
    keys = Keys(header.metadata_json("config"), f"{header.name}: config")
    keys.require("_class_name", "LatentUpsampler", "LatentUpsampler")
    keys.require("dims", 3)
    channels, width, blocks = (keys.take(name, int) for name in ("in_channels", "mid_channels", "num_blocks_per_stage"))
    spatial, temporal = keys.take("spatial_upsample", bool), keys.take("temporal_upsample", bool)
    scale, rational = keys.take("spatial_scale", float, 2.0), keys.take("rational_resampler", bool, False)
    keys.done()
    if not (spatial or temporal):
        raise FileError(f"{header.name} enlarges neither space nor time; use a published latent upscaler.")
    if width % 32:
        raise FileError(f"{header.name}: mid_channels is {width}, wanted a multiple of 32.")
    rational = rational and spatial and not temporal
    space = Fraction(scale).limit_denominator(8) if rational else Fraction(2 if spatial else 1)
    if rational and space not in RATIONAL:
        raise FileError(f"{header.name}: spatial_scale {scale:g} is not one of {', '.join(f'{float(s):g}' for s in sorted(RATIONAL))}.")
    return UpscalerConfig(channels, width, blocks, space, 2 if temporal else 1, rational)


def _from_shapes(header: Header) -> UpscalerConfig:
    shapes = {name: info.shape for name, info in header.tensors.items()}
    width, channels = shapes["initial_conv.weight"][:2]
    blocks = len({match[1] for name in shapes if (match := re.match(r"res_blocks\.(\d+)\.", name))})
    if "upsampler.conv.weight" in shapes:
        space = {3: Fraction(3, 2), 2: Fraction(2), 4: Fraction(4)}
        up = round((shapes["upsampler.conv.weight"][0] / width) ** 0.5)
        if up in space:
            return UpscalerConfig(channels, width, blocks, space[up], 1, True)
    elif "upsampler.0.weight" in shapes:
        rows, rank = shapes["upsampler.0.weight"][0] // width, len(shapes["upsampler.0.weight"])
        known = {(4, 4): (2, 1), (2, 5): (1, 2), (8, 5): (2, 2)}
        if (rows, rank) in known:
            space, time = known[rows, rank]
            return UpscalerConfig(channels, width, blocks, Fraction(space), time, False)
    raise FileError(f"{header.name} has no metadata and its tensors fit no known upscaler; use the published file.")
