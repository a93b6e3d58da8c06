"""The way from scene-linear light to a signal: the official cases know it, and files are compared as signals. Renders go back alone."""

from __future__ import annotations

import torch

from ...ltx25.hdr import REC709, AcesCct, LogC3, convert

LAWS = {"ACEScct": AcesCct(), "LogC3": LogC3()}


def from_linear(light: torch.Tensor, curve: str, primaries: str = REC709) -> torch.Tensor:
    """Scene-linear light (..., 3) in `primaries` -> signal (..., 3) float32 in 0..1."""
    return encode(convert(light.float(), primaries, LAWS[curve].primaries), curve)


def encode(light: torch.Tensor, curve: str) -> torch.Tensor:
    """Light in the curve's primaries -> signal in 0..1; what is below 0 counts as 0."""
    x, law = light.clamp(min=0), LAWS[curve]
    if curve == "ACEScct":
        log, line, straight = (x.clamp(min=1e-12).log2() + 9.72) / 17.52, law.slope * x + law.offset, x <= 2**-7
    else:
        log, line, straight = law.c * (law.a * x + law.b).log10() + law.d, law.e * x + law.f, x < law.cut
    return torch.where(straight, line, log).clamp(0, 1)
