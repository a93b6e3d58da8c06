"""Low-rank changes of a weight in one pass over it, against sums in float32 and in float64."""

import pytest
import torch
from comfyui_ltx25.kernels import low_rank as module
from comfyui_ltx25.kernels.low_rank import LowRank, add_low_rank, add_low_rank_reference
from comfyui_ltx25.tests.support.kernels import CUDA, PLACES, random
from comfyui_ltx25.tests.support.tolerance import assert_no_worse_than

pytest.importorskip("triton")

SHAPES = [(1, 1, (1,)), (7, 40, (3,)), (131, 264, (72, 16, 5))] + ([(4096, 4096, (450,)), (16384, 4096, (450, 32)), (1343, 1000, (1, 450, 64))] if CUDA else [])
PLACES = [place for place in PLACES if place.values[1] == torch.bfloat16 or place.values[0].type == "cpu"]  # on a card float32 weights are the twin's
ALPHAS = (0.5, -2.0, 1.0)


def changed(weight, pairs, add, move):
    there = move(weight.clone())
    add(there, [LowRank(move(pair.a), move(pair.b), pair.alpha) for pair in pairs])
    return there


@pytest.mark.parametrize("stored", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not CUDA, reason="the interpreter has no right bf16"))], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_it_stays_within_twice_the_twins_error(device, dtype, shape, stored):
    rows, columns, ranks = shape
    weight = random((rows, columns), dtype, 1)
    pairs = [LowRank(random((rank, columns), stored, 2), random((rows, rank), stored, 3, 0.1), alpha) for rank, alpha in zip(ranks, ALPHAS, strict=False)]
    got = changed(weight, pairs, module._launch, lambda part: part.to(device))
    twin, truth = changed(weight, pairs, add_low_rank_reference, torch.Tensor.clone), changed(weight, pairs, add_low_rank_reference, torch.Tensor.double)
    assert_no_worse_than(got, twin, truth)
    again = changed(weight, pairs, module._launch, lambda part: part.to(device))
    assert torch.equal(got, again)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rows_of_a_larger_weight_are_changed_alone(device, dtype):
    whole = random((96, 48), dtype, 1).to(device)
    before, pair = whole.clone(), LowRank(random((20, 48), torch.float16, 2).to(device), random((33, 20), torch.float16, 3).to(device), 0.5)
    module._launch(whole[17:50], [pair])
    assert torch.equal(whole[:17], before[:17]) and torch.equal(whole[50:], before[50:])
    alone = before[17:50].clone()
    module._launch(alone, [pair])
    assert torch.equal(whole[17:50], alone) and not torch.equal(alone, before[17:50])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("alphas", [(1.0, 1e-42), (1e-42, 1.0), (1e-30, -1e4, 1e-38)])
def test_alphas_may_be_far_apart(device, dtype, alphas):
    """Their quotient is no float32."""
    weight = random((40, 48), dtype, 1)
    pairs = [LowRank(random((16, 48), torch.float16, seed), random((40, 16), torch.float16, seed + 9, 0.01), alpha) for seed, alpha in enumerate(alphas)]
    got = changed(weight, pairs, module._launch, lambda part: part.to(device))
    assert_no_worse_than(got, changed(weight, pairs, add_low_rank_reference, torch.Tensor.clone), changed(weight, pairs, add_low_rank_reference, torch.Tensor.double))


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("rank", [1, 63, 64, 65])
def test_rows_of_b_that_go_on_with_zeros_change_nothing(device, dtype, rank):
    weight, pair = random((40, 48), dtype, 1), LowRank(random((rank, 48), torch.float16, 2), random((40, rank), torch.float16, 3), 0.5)
    longer = pair._replace(b=torch.nn.functional.pad(pair.b, (0, module.padded_rank(rank) - rank)))
    for add, move in ((module._launch, lambda part: part.to(device)), (add_low_rank_reference, torch.Tensor.clone)):
        assert torch.equal(changed(weight, [longer], add, move), changed(weight, [pair], add, move))
    assert module.padded_rank(rank) >= rank and module._padded(longer.b, rank)[0] is longer.b, "which is why they do"


def test_what_is_multiplied_by_nothing_changes_nothing():
    weight = random((8, 8), torch.float32, 1)
    add_low_rank(there := weight.clone(), [LowRank(torch.full((2, 8), float("inf")), torch.ones(8, 2), 0.0)])
    assert torch.equal(there, weight)


@pytest.mark.parametrize(
    ("count", "kinds", "dtype"),
    [(5, [torch.bfloat16], torch.bfloat16), (2, [torch.bfloat16, torch.float32], torch.bfloat16), (1, [torch.float64], torch.bfloat16), (1, [torch.bfloat16], torch.float32)],
)
def test_what_the_kernel_does_not_take_is_summed_plainly_and_rounded_once(count, kinds, dtype, monkeypatch):
    monkeypatch.setattr(module._OP, "runs", lambda like: pytest.fail("not the kernel's"))
    weight = random((24, 16), dtype, 1)
    pairs = [LowRank(random((3, 16), kind, seed), random((24, 3), kind, seed + 9), 0.25) for seed, kind in zip(range(count), kinds * count, strict=False)]
    add_low_rank(there := weight.clone(), pairs)
    whole = weight.double() + sum(0.25 * pair.b.double() @ pair.a.double() for pair in pairs)
    assert (there.double() - whole).abs().max() <= (whole.to(dtype).double() - whole).abs().max() * (1.01 if dtype == torch.bfloat16 else 4)
