"""Single sampler steps as formulas: tensors of any float dtype in and out, coefficients as Python floats (float64).

x: the noisy state, x0: the prediction of the clean one, both (B, T, C); s, t: this and the next sigma, s > t >= 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..kernels.guided_step import euler as euler

RES_2S_END = 0.0011  # res_2s goes to this sigma instead of 0 and then takes the prediction


@dataclass(frozen=True)
class Ancestral:
    """An Euler step of rectified flow down to `down`, then noise up to t: keep * (x0 + ratio (x - x0)) + renoise * noise."""

    ratio: float
    keep: float
    renoise: float

    @staticmethod
    def of(s: float, t: float, eta: float, s_noise: float) -> Ancestral:
        """ltx_core EulerAncestralDiffusionStep, for t > 0. eta 0 is a plain Euler step without noise."""
        down = t * (1 + (t / s - 1) * eta)
        if eta <= 0:
            return Ancestral(down / s, 1.0, 0.0)
        keep = (1 - t) / (1 - down)
        return Ancestral(down / s, keep, s_noise * math.sqrt(max(0.0, t * t - (down * keep) ** 2)))


def ancestral(x: torch.Tensor, x0: torch.Tensor, noise: torch.Tensor | None, k: Ancestral) -> torch.Tensor:
    """One ancestral step; `noise` is None without renoising. The state at t = 0 is x0 itself: not for this function."""
    down = k.ratio * x + (1 - k.ratio) * x0
    return down if noise is None else k.keep * down + k.renoise * noise


@dataclass(frozen=True)
class CfgPlusPlus:
    """x' = signal * x0 + direction * d + renoise * noise with d = (x - (1 - s) u) / s, u the unconditional x0."""

    signal: float
    direction: float
    renoise: float

    @staticmethod
    def of(s: float, t: float, eta: float, s_noise: float) -> CfgPlusPlus:
        """ltx_core EulerCfgPpDiffusionStep, for t > 0: ancestral coefficients in the variable sigma / (1 - sigma).

        The official code holds 1 - s at float32's epsilon; here s = 1 is the limit itself, which float32 cannot tell apart.
        """
        start, end = s / (1 - s) if s < 1 else math.inf, t / (1 - t)
        up = min(end, eta * end * math.sqrt(max(0.0, 1 - (end / start) ** 2)))
        return CfgPlusPlus(1 - t, (1 - t) * math.sqrt(max(0.0, end * end - up * up)), (1 - t) * up * s_noise)


def cfg_plus_plus(
    x: torch.Tensor, x0: torch.Tensor, uncond: torch.Tensor, noise: torch.Tensor | None, s: float, k: CfgPlusPlus
) -> torch.Tensor:
    """One CFG++ step (arXiv 2406.08070): the guided x0 is the target, the unconditional one gives the direction."""
    stepped = k.signal * x0 + k.direction * ((x - (1 - s) * uncond) / s)
    return stepped if noise is None else stepped + k.renoise * noise


def gradient_estimate(
    x: torch.Tensor, x0: torch.Tensor, before: torch.Tensor | None, s: float, gamma: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x0 corrected by the change of velocity since the step before, and this step's own velocity, to hand on.

    v' = gamma (v - before) + before (openreview o2ND9v0CeK); the first step has nothing before and keeps x0.
    """
    velocity = (x - x0) / s
    if before is None:
        return x0, velocity
    return x - (gamma * (velocity - before) + before) * s, velocity


@dataclass(frozen=True)
class Res2s:
    """Coefficients of a res_2s step from s to t: exponential Runge-Kutta of second order with its midpoint at sqrt(s t).

    h = ln(s / t); phi1(z) = (e^z - 1) / z, phi2(z) = (e^z - 1 - z) / z^2; a21 = phi1(-h / 2) / 2, b2 = 2 phi2(-h),
    b1 = phi1(-h) - b2.
    """

    h: float
    middle: float
    a21: float
    b1: float
    b2: float
    refine: bool  # h < 0.5 and s > 0.03: the anchor is moved so that the noisy midpoint lies on its path

    @staticmethod
    def of(s: float, t: float) -> Res2s:
        h = math.log(s / t)
        b2 = 2 * _phi2(-h)
        return Res2s(h, math.sqrt(s * t), _phi1(-h / 2) / 2, _phi1(-h) - b2, b2, h < 0.5 and s > 0.03)


def _phi1(z: float) -> float:
    return math.expm1(z) / z if abs(z) > 1e-10 else 1.0


def _phi2(z: float) -> float:
    return (math.expm1(z) - z) / (z * z) if abs(z) > 1e-5 else 0.5 + z / 6


def res_2s_middle(anchor: torch.Tensor, x0: torch.Tensor, k: Res2s) -> torch.Tensor:
    """The state at the midpoint, before its noise."""
    return anchor + k.h * k.a21 * (x0 - anchor)


def res_2s_anchor(middle: torch.Tensor, x0: torch.Tensor, k: Res2s) -> torch.Tensor:
    """The anchor from which `middle` would have been reached without noise.

    The official code iterates anchor = middle - h a21 (x0 - anchor) a hundred times; this is where that ends (h a21 < 1/4).
    """
    return (middle - k.h * k.a21 * x0) / (1 - k.h * k.a21)


def res_2s_end(anchor: torch.Tensor, x0: torch.Tensor, x0_middle: torch.Tensor, k: Res2s) -> torch.Tensor:
    """The state at t from both predictions, before its noise."""
    return anchor + k.h * (k.b1 * (x0 - anchor) + k.b2 * (x0_middle - anchor))


def mix_noise(x: torch.Tensor, stepped: torch.Tensor, noise: torch.Tensor, s: float, t: float, eta: float) -> torch.Tensor:
    """Replace part of the noise of `stepped`, the deterministic result at t of a step from x at s (Res2sDiffusionStep).

    `noise` has mean 0 and deviation 1 per sample. t = 0 or eta = 0: `stepped` as it is.
    """
    up = min(t * eta, 0.9999 * t)
    if up <= 0:
        return stepped
    rest = math.sqrt(t * t - up * up)
    signal = 1 - t + rest
    # x - (s - down) eps with eps = (x - stepped) / (s - t): one factor, so that float32 loses nothing to a short step
    fraction = (s - rest / signal) / (s - t)
    return signal * (x - fraction * (x - stepped)) + up * noise


def standardise(noise: torch.Tensor) -> torch.Tensor:
    """Mean 0 and unbiased deviation 1 over tokens and channels of every sample of (B, T, C).

    The official code first does the same over the batch, which the second pass undoes.
    """
    return (noise - noise.mean(dim=(-2, -1), keepdim=True)) / noise.std(dim=(-2, -1), keepdim=True)
