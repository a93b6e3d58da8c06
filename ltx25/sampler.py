"""The denoising loop: from noised tokens to clean ones by one of the samplers.

State and arithmetic are float32 (official: bfloat16 state; res_2s float64 arithmetic), so a float32 device suffices and the
result is the closer to a float64 run.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import steps
from .dit.kept_text import KeptTexts
from .errors import InputError
from .finite import count_not_finite
from .instrument import Phase
from .predictor import Call, Course, Denoise, Draw, Predictor, Sampler, Tokens, Transformer

SAMPLERS = ("auto", "euler", "euler_ancestral", "res_2s", "gradient_estimation", "euler_cfg_pp")


class Outcome(NamedTuple):
    """tokens: the result by stream, (B, T, C) float32 on the device. legs and seconds: of every group, in order run."""

    tokens: Tokens
    legs: tuple[tuple[str, ...], ...]
    seconds: tuple[float, ...]

    @property
    def forwards(self) -> int:
        return sum(len(group) for group in self.legs)


def denoise(
    dit: Transformer,
    job: Denoise,
    x: Tokens,
    draw: Draw,
    phase: Phase,
    device: torch.device,
    dtype: torch.dtype,
    prediction: str = "",
    known: dict[Hashable, float] | None = None,
    texts: KeptTexts | None = None,
    traced: Collection[int] = (),
) -> Outcome:
    """Run `job` from the noised tokens `x`, (B, T, C) float32 by stream.

    draw: noise of the sampler's steps (not called by those that add none). phase: open, its total = job.forwards, its unit
    a forward. dtype: the transformer's activations. prediction: a sentence about the time it will take, shown until the
    first group is done. known: seconds per kind of group, for the caller to hand to its next run with this transformer:
    groups known to be fast are neither marked block by block nor kept from being captured. texts: begun with this job's prompt,
    see dit.kept_text. traced: numbers, from 0, of the groups that run under a profiler. Raises what the phase raises on a cancel, and InputError when the result has values that are not
    finite numbers.
    """
    predict = Predictor(dit, job, phase, device, dtype, prediction, known, texts, traced)
    x = {name: x[name].to(device) for name in ("video", "audio") if name in x}
    x = predict.keep(job.sampler.run(predict, x, job.sigmas, draw))
    predict.flight.land()
    for name, tokens in x.items():
        bad = count_not_finite(tokens)
        if bad:
            raise InputError(
                f"sampling ended with {bad} {name} values of {tokens.numel()} that are not finite numbers; "
                + (f"lower the strength of LoRA {', '.join(job.loras)}, or " if job.loras else "")
                + "lower the guidance scales, or load the model with precision=bf16."
            )
    return Outcome(x, predict.legs, tuple(predict.flight.seconds))


def sampler_of(name: str, schedule: str | None, eta: float = 1.0) -> Sampler:
    """The sampler of a name. `schedule` None: the user gave sigmas. eta: noise per step, 1 = the official amount.

    auto is the official choice: ancestral for the distilled schedule (LTX-2.5's stage 1), plain Euler otherwise. For
    res_2s eta 1 means the 0.5 that the official HQ pipeline runs with. Raises InputError for an unknown name, and for an eta
    that is no share: a host compares a NaN with the limits of its widget and finds nothing wrong.
    """
    if not 0.0 <= eta <= 1.0:
        raise InputError(f"eta is {eta:g}, wanted a share of fresh noise from 0 to 1; 1 is the official amount.")
    if name == "auto":
        name = "euler_ancestral" if schedule == "distilled" else "euler"
    if name == "euler":
        return Euler()
    if name == "euler_ancestral":
        return EulerAncestral(eta, 1.0)
    if name == "res_2s":
        return Res2s(0.5 * eta)
    if name == "gradient_estimation":
        return GradientEstimation(2.0)
    if name == "euler_cfg_pp":
        return EulerCfgPlusPlus(eta, 1.0)
    raise InputError(f"sampler '{name}' is not one of {', '.join(SAMPLERS)}.")


def check_job(job: Denoise) -> None:
    """Raise InputError for settings its sampler cannot run with."""
    check_course(job.course, job.negative is not None)


def check_course(course: Course, negative: bool) -> None:
    """`check_job` of what is known before there are latents; negative: whether a negative prompt is given."""
    sampler, sigmas = course.sampler, course.sigmas
    skips = any(guidance.skip_step for bins in course.guidance.values() for guidance in bins)
    if skips and sampler.uncond:
        raise InputError("skip_step above 0 cannot be used with euler_cfg_pp, which needs the negative forward at every step; set skip_step to 0.")
    if sampler.uncond and not negative:
        raise InputError("euler_cfg_pp needs a negative prompt, whatever cfg is; connect `negative` (--negative on the command line) or choose another sampler.")
    if isinstance(sampler, Res2s) and sigmas[-1] == 0 and sigmas[-2] <= steps.RES_2S_END:
        raise InputError(f"res_2s goes to sigma {steps.RES_2S_END} before the end, so the sigma before 0 must be above it, got {sigmas[-2]:g}.")


class Euler:
    """First order, without noise."""

    uncond = False
    standard_noise = False
    unscaled = True

    def calls(self, sigmas: Sequence[float]) -> tuple[Call, ...]:
        return _one_per_step(sigmas)

    def run(self, predict: Predictor, x: Tokens, sigmas: Sequence[float], draw: Draw) -> Tokens:
        for t in sigmas[1:]:
            x = predict(x, t).stepped
        return x


@dataclass(frozen=True)
class EulerAncestral:
    """Euler down, noise up. eta in [0, 1]: 0 adds none; s_noise scales what is added."""

    eta: float
    s_noise: float
    uncond = False
    standard_noise = False
    unscaled = True

    def calls(self, sigmas: Sequence[float]) -> tuple[Call, ...]:
        return _one_per_step(sigmas)

    def run(self, predict: Predictor, x: Tokens, sigmas: Sequence[float], draw: Draw) -> Tokens:
        for s, t in itertools.pairwise(sigmas):
            x0 = predict(x).x0
            if t == 0:
                return x0
            k = steps.Ancestral.of(s, t, self.eta, self.s_noise)
            if self.eta > 0:
                noise = draw("step")
                x = predict.blend({name: steps.ancestral(x[name], x0[name], noise[name], k) for name in x})
            else:
                x = {name: steps.ancestral(x[name], x0[name], None, k) for name in x}
        return x


@dataclass(frozen=True)
class GradientEstimation:
    """Euler along a velocity corrected by its change since the step before; gamma 2 officially, 1 is plain Euler."""

    gamma: float
    uncond = False
    standard_noise = False
    unscaled = True

    def calls(self, sigmas: Sequence[float]) -> tuple[Call, ...]:
        return _one_per_step(sigmas)

    def run(self, predict: Predictor, x: Tokens, sigmas: Sequence[float], draw: Draw) -> Tokens:
        before: Tokens = {}
        for s, t in itertools.pairwise(sigmas):
            x0 = predict(x).x0
            if t == 0:
                return x0
            for name in x:
                corrected, before[name] = steps.gradient_estimate(x[name], x0[name], before.get(name), s, self.gamma)
                x = {**x, name: steps.euler(x[name], corrected, s, t)}
        return x


@dataclass(frozen=True)
class EulerCfgPlusPlus:
    """CFG++: the guided x0 is the target, the negative leg gives the direction. eta, s_noise as EulerAncestral."""

    eta: float
    s_noise: float
    uncond = True
    standard_noise = False
    unscaled = True

    def calls(self, sigmas: Sequence[float]) -> tuple[Call, ...]:
        return _one_per_step(sigmas)

    def run(self, predict: Predictor, x: Tokens, sigmas: Sequence[float], draw: Draw) -> Tokens:
        for s, t in itertools.pairwise(sigmas):
            guess = predict(x)
            if t == 0:
                return guess.x0
            k = steps.CfgPlusPlus.of(s, t, self.eta, self.s_noise)
            noise = draw("step") if self.eta > 0 and self.s_noise > 0 else None
            x = {
                name: steps.cfg_plus_plus(x[name], guess.x0[name], guess.uncond[name], noise and noise[name], s, k) for name in x
            }
            if noise is not None:
                x = predict.blend(x)
        return x


@dataclass(frozen=True)
class Res2s:
    """Second order: two calls per step, noise at the midpoint and at the end; a last call at sigma 0.0011 instead of 0.

    eta: share of the noise renewed at a step's end; the midpoint always renews half, as officially. The noise is standardised.
    Guidance bins and skip_step treat every midpoint as step 0: that is what the official loop does.
    """

    eta: float
    uncond = False
    standard_noise = True
    unscaled = True

    def calls(self, sigmas: Sequence[float]) -> tuple[Call, ...]:
        calls = []
        for step, (s, t) in enumerate(itertools.pairwise(_above_zero(sigmas))):
            calls += [Call(s, step, (step, s)), Call(steps.Res2s.of(s, t).middle, step, (0, sigmas[0]))]
        if sigmas[-1] == 0:
            calls.append(Call(steps.RES_2S_END, len(sigmas) - 2, (len(sigmas) - 1, steps.RES_2S_END)))
        return tuple(calls)

    def run(self, predict: Predictor, x: Tokens, sigmas: Sequence[float], draw: Draw) -> Tokens:
        for s, t in itertools.pairwise(_above_zero(sigmas)):
            k = steps.Res2s.of(s, t)
            x0 = predict(x).x0
            noise = draw("substep")
            middle = predict.blend({name: steps.mix_noise(x[name], steps.res_2s_middle(x[name], x0[name], k), noise[name], s, k.middle, 0.5) for name in x})
            anchor = {name: steps.res_2s_anchor(middle[name], x0[name], k) for name in x} if k.refine else x
            x0_middle = predict(middle).x0
            noise = draw("step")
            x = predict.blend(
                {
                    name: steps.mix_noise(anchor[name], steps.res_2s_end(anchor[name], x0[name], x0_middle[name], k), noise[name], s, t, self.eta)
                    for name in x
                }
            )
        return predict(x).x0 if sigmas[-1] == 0 else x


def _one_per_step(sigmas: Sequence[float]) -> tuple[Call, ...]:
    return tuple(Call(sigma, step, (step, sigma)) for step, sigma in enumerate(sigmas[:-1]))


def _above_zero(sigmas: Sequence[float]) -> tuple[float, ...]:
    return (*sigmas[:-1], steps.RES_2S_END) if sigmas[-1] == 0 else tuple(sigmas)
