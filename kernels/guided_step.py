"""From the velocities of a step's legs to guided x0 and the next state: prediction, guidance, rescale, mask and Euler in one.

    c = x - t v_c;  g = c + sum of w_i (c - (x - t v_i));  g *= rescale * std(c) / std(g) + 1 - rescale
    x0 = mask g + (1 - mask) clean;  next = x + (x - x0) / s (s' - s)

t (T, 1) is the noise level of every token. Two passes, because the deviations are those of whole samples: the first sums,
the second makes all of it anew from what it reads, which is less than to keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .dispatch import Compared, Op, jit, tl

_BLOCK = 1024
_LOOPS = 8  # blocks a program of the first pass sums: few partial sums are left for the second
Pull = tuple[float, torch.Tensor]  # w_i and v_i


class Keep(NamedTuple):
    """mask (T, 1), 1 = generate; clean (B, T, C): what tokens are pulled to."""

    mask: torch.Tensor
    clean: torch.Tensor


class Guided(NamedTuple):
    """(B, T, C) each: g; x0, with what is kept; the state at the next noise level, None where no step was asked for."""

    guided: torch.Tensor
    x0: torch.Tensor
    state: torch.Tensor | None


def guided_step_reference(
    x: torch.Tensor, t: torch.Tensor, cond: torch.Tensor, pulls: Sequence[Pull], rescale: float, keep: Keep | None, step: tuple[float, float] | None
) -> Guided:
    """x (B, T, C) float32 or wider; t (T, 1); velocities (B, T, C), any float dtype; step: (s, s') or None."""
    prediction = x - t * cond.to(x.dtype)
    guided = mixed(prediction, [weight * (prediction - (x - t * velocity.to(x.dtype))) for weight, velocity in pulls], rescale)
    x0 = guided if keep is None else guided * keep.mask + keep.clean * (1 - keep.mask)
    return Guided(guided, x0, None if step is None else euler(x, x0, *step))


def mixed(cond: torch.Tensor, terms: Sequence[torch.Tensor], rescale: float) -> torch.Tensor:
    """cond (B, T, C) plus its guidance terms, rescaled per sample towards the deviation of cond; cond itself without terms."""
    if not terms:
        return cond
    guided = cond + terms[0]
    for term in terms[1:]:
        guided = guided + term
    if rescale == 0:
        return guided
    ratio = cond.std(dim=(-2, -1), keepdim=True) / guided.std(dim=(-2, -1), keepdim=True)
    return guided * (rescale * ratio + (1 - rescale))


def euler(x: torch.Tensor, x0: torch.Tensor, s: float, t: float) -> torch.Tensor:
    """First-order step from noise level s to t along v = (x - x0) / s. The official one rounds v to bfloat16 on a bfloat16 state."""
    return x + (x - x0) / s * (t - s)


@jit
def _prediction(x, t, cond_ptr, a_ptr, b_ptr, c_ptr, a_weight, b_weight, c_weight, at, there, PULLS: tl.constexpr):
    """c and g before its rescale."""
    v = tl.load(cond_ptr + at, mask=there, other=0.0).to(tl.float32)
    pull = v * 0.0
    if PULLS > 0:
        pull += a_weight * (tl.load(a_ptr + at, mask=there, other=0.0).to(tl.float32) - v)
    if PULLS > 1:
        pull += b_weight * (tl.load(b_ptr + at, mask=there, other=0.0).to(tl.float32) - v)
    if PULLS > 2:
        pull += c_weight * (tl.load(c_ptr + at, mask=there, other=0.0).to(tl.float32) - v)
    cond = x - t * v
    return cond, cond + t * pull


@jit
def _sums(
    x_ptr,  # (B, T, C) float32, contiguous, as the velocities
    t_ptr,  # (T,) float32
    cond_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    a_weight,
    b_weight,
    c_weight,
    sums_ptr,  # (B, programs, 4): of c, c^2, g, g^2
    size,  # T * C
    channels,
    PULLS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOPS: tl.constexpr,
):
    """One program per sample and LOOPS blocks."""
    sample = tl.program_id(1).to(tl.int64) * size
    one = tl.zeros((BLOCK,), tl.float32)
    two, three, four = one, one, one
    for turn in range(LOOPS):
        place = (tl.program_id(0) * LOOPS + turn) * BLOCK + tl.arange(0, BLOCK)
        there = place < size
        x = tl.load(x_ptr + sample + place, mask=there, other=0.0)
        t = tl.load(t_ptr + place // channels, mask=there, other=0.0)
        cond, guided = _prediction(x, t, cond_ptr, a_ptr, b_ptr, c_ptr, a_weight, b_weight, c_weight, sample + place, there, PULLS)
        one += cond
        two += cond * cond
        three += guided
        four += guided * guided
    out = sums_ptr + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 4
    tl.store(out, tl.sum(one, axis=0))
    tl.store(out + 1, tl.sum(two, axis=0))
    tl.store(out + 2, tl.sum(three, axis=0))
    tl.store(out + 3, tl.sum(four, axis=0))


@jit
def _step(
    x_ptr,
    t_ptr,
    cond_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    a_weight,
    b_weight,
    c_weight,
    sums_ptr,
    mask_ptr,  # (T,) float32
    clean_ptr,  # (B, T, C) float32
    guided_ptr,
    x0_ptr,
    state_ptr,
    size,
    channels,
    programs,  # of the first pass, per sample
    rescale,
    slope,  # (s' - s) / s
    PULLS: tl.constexpr,
    RESCALED: tl.constexpr,
    KEPT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program per sample and block."""
    sample = tl.program_id(1).to(tl.int64) * size
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < size
    at = sample + place
    x = tl.load(x_ptr + at, mask=there, other=0.0)
    t = tl.load(t_ptr + place // channels, mask=there, other=0.0)
    _, guided = _prediction(x, t, cond_ptr, a_ptr, b_ptr, c_ptr, a_weight, b_weight, c_weight, at, there, PULLS)
    if RESCALED:
        part = tl.arange(0, PARTS)
        sums = sums_ptr + (tl.program_id(1) * programs + part) * 4
        summed = part < programs
        one = tl.sum(tl.load(sums, mask=summed, other=0.0).to(tl.float64), axis=0)
        two = tl.sum(tl.load(sums + 1, mask=summed, other=0.0).to(tl.float64), axis=0)
        three = tl.sum(tl.load(sums + 2, mask=summed, other=0.0).to(tl.float64), axis=0)
        four = tl.sum(tl.load(sums + 3, mask=summed, other=0.0).to(tl.float64), axis=0)
        count = size.to(tl.float64)
        ratio = tl.sqrt((two - one * one / count) / (four - three * three / count)).to(tl.float32)
        guided = guided * (rescale * ratio + (1 - rescale))
    tl.store(guided_ptr + at, guided, mask=there)
    x0 = guided
    if KEPT:
        mask = tl.load(mask_ptr + place // channels, mask=there, other=0.0)
        x0 = guided * mask + tl.load(clean_ptr + at, mask=there, other=0.0) * (1 - mask)
        tl.store(x0_ptr + at, x0, mask=there)
    if STEPS:
        tl.store(state_ptr + at, x + (x - x0) * slope, mask=there)


def _launch(
    x: torch.Tensor, t: torch.Tensor, cond: torch.Tensor, pulls: Sequence[Pull], rescale: float, keep: Keep | None, step: tuple[float, float] | None
) -> Guided:
    """As `guided_step`; all contiguous, x, t, mask and clean float32, at most three pulls."""
    batch, tokens, channels = x.shape
    size = tokens * channels
    weights = [weight for weight, _ in pulls] + [0.0] * (3 - len(pulls))
    velocities = [velocity for _, velocity in pulls] + [cond] * (3 - len(pulls))
    rescaled = bool(pulls) and rescale != 0
    programs = -(-size // (_BLOCK * _LOOPS))
    sums = x.new_empty(batch, programs, 4) if rescaled else x
    given = (x, t, cond, *velocities, *weights)
    if rescaled:
        _sums[(programs, batch)](*given, sums, size, channels, PULLS=len(pulls), BLOCK=_BLOCK, LOOPS=_LOOPS)
    guided = torch.empty_like(x)
    x0 = guided if keep is None else torch.empty_like(x)
    state = None if step is None else torch.empty_like(x)
    mask, clean = (t, x) if keep is None else keep
    slope = 0.0 if step is None else (step[1] - step[0]) / step[0]
    kinds = {"PULLS": len(pulls), "RESCALED": rescaled, "KEPT": keep is not None, "STEPS": step is not None}
    numbers = (size, channels, programs, float(rescale), slope)
    parts = 1 << (programs - 1).bit_length()
    _step[(-(-size // _BLOCK), batch)](*given, sums, mask, clean, guided, x0, x if state is None else state, *numbers, **kinds, BLOCK=_BLOCK, PARTS=parts)
    return Guided(guided, x0, state)


def _check(device: torch.device, dtype: torch.dtype) -> list[Compared]:
    generator = torch.Generator().manual_seed(0)
    x, clean, *velocities = (torch.randn(2, 37, 24, generator=generator) for _ in range(6))
    t = torch.rand(37, 1, generator=generator)
    cond, *others = (velocity.to(dtype) for velocity in velocities)
    compared = []
    for pulls, keep in ((list(zip((2.0, 1.0, -0.5), others, strict=True)), Keep(t.round(), clean)), ([(6.0, others[0])], None), ([], None)):

        def run(op, move, pulls=pulls, keep=keep):
            kept = None if keep is None else Keep(*map(move, keep))
            return op(move(x), move(t), move(cond), [(weight, move(velocity)) for weight, velocity in pulls], 0.7, kept, (0.9, 0.6))

        results = [run(_launch, lambda part: part.to(device)), run(guided_step_reference, lambda part: part), run(guided_step_reference, torch.Tensor.double)]
        compared += zip(*results, strict=True)
    return compared


_OP = Op("guided_step", _check)


def guided_step(
    x: torch.Tensor, t: torch.Tensor, cond: torch.Tensor, pulls: Sequence[Pull], rescale: float, keep: Keep | None, step: tuple[float, float] | None
) -> Guided:
    """See `guided_step_reference`."""
    if not (x.dtype == torch.float32 and len(pulls) <= 3 and _OP.runs(cond)):
        return guided_step_reference(x, t, cond, pulls, rescale, keep, step)
    kept = None if keep is None else Keep(*(part.contiguous() for part in keep))
    return _launch(x.contiguous(), t.contiguous(), cond.contiguous(), [(weight, velocity.contiguous()) for weight, velocity in pulls], rescale, kept, step)
