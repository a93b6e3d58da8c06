"""High dynamic range: between the 0..1 signal a video VAE works on and scene-linear light, by curve and primaries.

ACEScct: AMPAS S-2016-001, defined on ACEScg light. LogC3: ARRI, EI 800, on Rec.709 light. The matrices are the published
ones ltx_core.color uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import InputError

REC709, ACESCG, REC2020 = "rec709", "acescg", "rec2020"
SDR = "sdr"  # the signal is the picture
CURVES = ("ACEScct", "LogC3")
TRANSFERS = (SDR, *CURVES)

_ACESCG_TO_REC709 = ((1.70505, -0.62179, -0.08326), (-0.13026, 1.1408, -0.01055), (-0.024, -0.12897, 1.15297))
_REC709_TO_REC2020 = ((0.62740389, 0.32928304, 0.04331307), (0.06909729, 0.9195404, 0.01136232), (0.01639144, 0.08801331, 0.89559525))
_ACESCG_TO_REC2020 = ((1.02582475, -0.02005319, -0.00577156), (-0.00223437, 1.0045865, -0.00235213), (-0.00501335, -0.02529007, 1.03030342))


def to_linear(signal: torch.Tensor, curve: str, primaries: str = REC709) -> torch.Tensor:
    """Signal (..., 3) in 0..1 -> scene-linear light (..., 3) float32 >= 0 in `primaries`. Raises InputError for unknown names."""
    law = _curve(curve)
    return convert(law.decode(signal.float()), law.primaries, primaries).clamp(min=0)


def check_transfer(transfer: str) -> str:
    """Return it, or raise InputError for one that does not exist."""
    if transfer not in TRANSFERS:
        raise InputError(f"transfer '{transfer}' does not exist; choose {', '.join(CURVES)}, or {SDR} for frames in 0 to 1.")
    return transfer


def convert(light: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """Linear light (..., 3) from one set of primaries to another."""
    if source == target:
        return light
    to_709 = torch.tensor(_ACESCG_TO_REC709)
    known = {
        (ACESCG, REC709): to_709,
        (REC709, ACESCG): torch.linalg.inv(to_709.double()).float(),
        (REC709, REC2020): torch.tensor(_REC709_TO_REC2020),
        (ACESCG, REC2020): torch.tensor(_ACESCG_TO_REC2020),
    }
    if (source, target) not in known:
        raise InputError(f"light cannot be turned from '{source}' into '{target}'; use {REC709} or {ACESCG}, or {REC2020} as a target.")
    return light @ known[source, target].to(light).T


@dataclass(frozen=True)
class AcesCct:
    """Signal (log2 x + 9.72) / 17.52 above x = 2^-7, a straight line below."""

    primaries = ACESCG
    slope, offset = 10.5402377416545, 0.0729055341958355
    split_signal = 0.155251141552511  # of x = 2^-7

    def decode(self, y: torch.Tensor) -> torch.Tensor:
        y = y.clamp(0, 1)
        return torch.where(y > self.split_signal, torch.exp2(y * 17.52 - 9.72), (y - self.offset) / self.slope)


@dataclass(frozen=True)
class LogC3:
    """Signal c log10(a x + b) + d from the cut on, e x + f below."""

    primaries = REC709
    a, b, c, d, e, f, cut = 5.555556, 0.052272, 0.247190, 0.385537, 5.367655, 0.092809, 0.010591

    def decode(self, y: torch.Tensor) -> torch.Tensor:
        y = y.clamp(0, 1)
        log = (torch.pow(10.0, (y - self.d) / self.c) - self.b) / self.a
        return torch.where(y >= self.e * self.cut + self.f, log, (y - self.f) / self.e)


def _curve(name: str) -> AcesCct | LogC3:
    if name not in CURVES:
        raise InputError(f"hdr curve '{name}' does not exist; choose {' or '.join(CURVES)}.")
    return AcesCct() if name == "ACEScct" else LogC3()
