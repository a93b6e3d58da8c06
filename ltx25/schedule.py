"""Noise levels: sigma in [0, 1] per step, 1 = pure noise, as tuples of Python floats that are exact in float32."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence

from .errors import InputError

STAGE_2 = "distilled_stage2"
SCHEDULES = ("ltx2", "distilled", STAGE_2)
STEPS = 30  # of the published recipe (ltx_pipelines.utils.constants, 2.5)
HQ_STEPS = 15  # of the same file's HQ preset, which samples with res_2s
TOKENS = 4096  # the pipelines schedule every clip as if it had so many

DISTILLED = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)
DISTILLED_STAGE2 = (0.909375, 0.725, 0.421875, 0.0)
DISTILLED_TILED_STAGE2 = (0.625, 0.4, 0.0)


def sigmas_of(schedule: str, steps: int, tokens: int = TOKENS) -> tuple[float, ...]:
    """The sigmas of a named schedule, first to last, ending in 0.

    steps: only ltx2 reads it; the distilled lists have their own number of steps.
    tokens: video tokens for ltx2's shift; the pipelines always use 4096, only the HQ one the clip's own number.
    Raises InputError for an unknown name and for steps below 1.
    """
    if schedule == "ltx2":
        return ltx2(steps, tokens)
    if schedule == "distilled":
        return float32s(DISTILLED)
    if schedule == STAGE_2:
        return float32s(DISTILLED_STAGE2)
    raise InputError(f"schedule '{schedule}' is not one of {', '.join(SCHEDULES)}.")


def ltx2(
    steps: int,
    tokens: int = TOKENS,
    max_shift: float = 2.05,
    base_shift: float = 0.95,
    stretch: bool = True,
    terminal: float = 0.1,
) -> tuple[float, ...]:
    """The schedule of LTX-2 (ltx_core LTX2Scheduler): even steps, shifted by token count, last nonzero sigma = `terminal`.

    With u = 1/s - 1 for s even from 1 to 0 and a = e^-shift: sigma = 1 / (1 + a u), then 1 - sigma is scaled so that the
    last one is 1 - terminal. Here in closed form and float64, rounded to float32 once: the official float32 order is NaN
    for one step, and its 1 - sigma loses digits as tokens grow. Largest difference, of 8 to 60 steps: less than 1e-6 up to
    10 000 tokens, 2e-5 at 20 000, 9e-4 at 30 000, 2e-2 at 40 000; from about 45 000 on the official one collapses.
    """
    if steps < 1:
        raise InputError(f"steps {steps} is too few; the least is 1 and the model was tuned for {STEPS}.")
    if tokens < 1:
        raise InputError(f"a schedule for {tokens} tokens cannot be made; the least is 1 and the official number is {TOKENS}.")
    slope = (max_shift - base_shift) / (4096 - 1024)
    shrink = math.exp(-(tokens * slope + base_shift - slope * 1024))  # e^-shift: no overflow, however many tokens
    odds = [step / (steps - step) for step in range(steps)]  # 1/s - 1
    if not stretch or steps == 1:
        return float32s([*(1 / (1 + shrink * u) for u in odds), 0.0])
    last = odds[-1]
    scale = (1 - terminal) * (1 + shrink * last) / last
    return float32s([*(1 - scale * u / (1 + shrink * u) for u in odds), 0.0])


def check_sigmas(sigmas: Sequence[float]) -> tuple[float, ...]:
    """Sigmas a user made, as floats exact in float32. A list that does not end in 0 is legal and leaves its noise.

    Raises InputError unless there are at least two, all in [0, 1] and each below the one before.
    """
    checked = float32s([float(sigma) for sigma in sigmas])
    if len(checked) < 2:
        raise InputError(f"sigmas has {len(checked)} value(s); a step needs two, for example 1.0, 0.0.")
    for index, sigma in enumerate(checked):
        if not 0.0 <= sigma <= 1.0:
            raise InputError(f"sigma {index} is {sigma:g}, wanted 0 to 1: this model's noise levels are flow-matching ones, use schedule=ltx2 or a scheduler for flow models.")
    for index, (sigma, following) in enumerate(itertools.pairwise(checked)):
        if following >= sigma:
            raise InputError(f"sigmas must fall, but sigma {index + 1} is {following:g} after {sigma:g}; sort them from high to low and drop repeats.")
    return checked


def float32s(values: Sequence[float]) -> tuple[float, ...]:
    """Each value as a sampler has it, rounded to float32: the written 0.1 is below that one, and 0.9 above."""
    return tuple(struct.unpack("f", struct.pack("f", value))[0] for value in values)
