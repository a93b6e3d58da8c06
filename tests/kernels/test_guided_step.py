"""Guided x0 and the step after it in two passes, against the plain sums."""

import pytest
import torch
from comfyui_ltx25.kernels import guided_step as module
from comfyui_ltx25.kernels.guided_step import Keep, guided_step_reference
from comfyui_ltx25.ltx25.dit.modality import Leg
from comfyui_ltx25.ltx25.guidance import AUDIO, combine, pulls
from comfyui_ltx25.tests.support.kernels import CUDA, PLACES, random
from comfyui_ltx25.tests.support.tolerance import assert_no_worse_than, poisoned_memory

pytest.importorskip("triton")

SHAPES = [(1, 1, 8), (2, 7, 72), (1, 131, 128)] + ([(1, 1343, 128), (4, 126, 128), (1, 14080, 128)] if CUDA else [])


def arguments(shape, dtype, count, kept):
    x, clean = random(shape, torch.float32, 1, 2.0), random(shape, torch.float32, 2)
    t = random((shape[1], 1), torch.float32, 3).abs().clamp(max=1)
    cond, *others = (random(shape, dtype, seed) for seed in range(4, 8))
    weights = (2.0, 1.0, -0.5)[:count]
    return x, t, cond, list(zip(weights, others, strict=False)), 0.7, Keep(t.round(), clean) if kept else None, (0.9, 0.6)


def moved(arguments, move):
    x, t, cond, parts, rescale, keep, step = arguments
    return move(x), move(t), move(cond), [(weight, move(v)) for weight, v in parts], rescale, keep and Keep(*map(move, keep)), step


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_it_stays_within_twice_the_twins_error(device, dtype, shape, count, kept):
    given = arguments(shape, dtype, count, kept)
    with poisoned_memory():
        got = module._launch(*moved(given, lambda part: part.to(device)))
    twin, truth = guided_step_reference(*given), guided_step_reference(*moved(given, torch.Tensor.double))
    for one, two, three in zip(got, twin, truth, strict=True):
        assert_no_worse_than(one, two, three)
    if kept:
        still = given[5].mask[:, 0] == 0
        assert torch.equal(got.x0.cpu()[:, still], given[5].clean[:, still]), "kept tokens are the clean ones, bit for bit"


def test_the_twin_mixes_as_guidance_does_bit_for_bit():
    x, t, cond, parts, *_ = arguments((2, 7, 72), torch.float32, 3, False)
    velocities = {Leg.COND: cond, **dict(zip((Leg.UNCOND, Leg.STG, Leg.ISOLATED), (v for _, v in parts), strict=True))}
    want = combine(AUDIO, {leg: x - t * velocity for leg, velocity in velocities.items()})
    weighted = [(weight, velocities[leg]) for leg, weight in pulls(AUDIO, velocities)]
    assert torch.equal(guided_step_reference(x, t, cond, weighted, AUDIO.rescale, None, None).x0, want) and len(weighted) == 3
