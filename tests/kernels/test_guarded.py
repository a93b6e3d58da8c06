"""No kernel reads or writes beyond its tensors: their own small cases between guard bands. And that bands find it."""

import sys

import pytest
import torch
from comfyui_ltx25.kernels.dispatch import Op
from comfyui_ltx25.tests.support.guarded import BAND, WHOLE, GuardedMemory, guarded_check, launched, ops, why_not
from comfyui_ltx25.tests.support.kernels import CUDA

triton = pytest.importorskip("triton")
tl = triton.language

DEVICE = torch.device("cuda" if CUDA else "cpu")


@triton.jit
def _copy(x_ptr, out_ptr, count, reach, WIDTH: tl.constexpr):
    """out[i] = x[i + reach] for i below count."""
    column = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + column + reach, mask=column < count, other=0.0)
    tl.store(out_ptr + column, x, mask=column < count)


def op_that(count, reach):
    """Copies five numbers and claims to have done nothing else."""

    def check(device, dtype):
        x = torch.randn(5).to(dtype).to(device)
        out = torch.empty_like(x)
        _copy[(1,)](x, out, count, reach, WIDTH=16)
        return [(out, x, x.cpu().double())]

    return Op("copy", check)


def wrong_with(count, reach):
    return guarded_check(op_that(count, reach), sys.modules[__name__], DEVICE)


def test_a_kernel_that_keeps_to_its_tensors_passes():
    assert launched(sys.modules[__name__]) == {"_copy"}
    assert wrong_with(5, 0) == []


def test_one_number_written_behind_a_tensor_is_found():
    assert any(wrong.startswith("wrote beyond (5,) torch.") for wrong in wrong_with(6, 0))


@pytest.mark.parametrize("reach", [1, -1])
def test_one_number_read_beside_a_tensor_shows_in_the_result(reach):
    assert wrong_with(5, reach) == ["its error is nan, allowed 0"]


def test_a_result_that_is_left_unwritten_shows():
    assert wrong_with(4, 0) == ["its error is nan, allowed 0"]


def test_a_kernel_that_is_never_launched_is_named():
    quiet = Op("quiet", lambda device, dtype: [(torch.ones(2), torch.ones(2), torch.ones(2).double())])
    assert guarded_check(quiet, sys.modules[__name__], DEVICE) == ["_copy was not launched"]


def test_bands_lie_on_both_sides_of_every_new_tensor_and_views_stay_views():
    with GuardedMemory() as memory:
        x = torch.tensor([1, 2, 3], device=DEVICE)
        y = torch.zeros(2, 3, device=DEVICE, dtype=torch.bfloat16).t()
        z = torch.empty(4, device=DEVICE)
    around = x.as_strided((1,), (1,), x.storage_offset() - 1), x.as_strided((1,), (1,), x.storage_offset() + 3)
    assert [int(side) for side in around] == [WHOLE, WHOLE] and x.tolist() == [1, 2, 3]
    assert x.storage_offset() * x.itemsize == BAND == y.storage_offset() * y.itemsize
    assert y.shape == (3, 2) and y.stride() == (1, 3) and not y.any()
    assert z.isnan().all() and memory.broken() == []
    y.as_strided((1,), (1,), y.storage_offset() + 6).zero_()
    assert memory.broken() == ["(2, 3) torch.bfloat16 of aten::zeros"]


@pytest.mark.parametrize("name", sorted(ops()))
def test_kernels_stay_within_their_tensors(name):
    reason = why_not(name, DEVICE)
    if reason:
        pytest.skip(reason)
    assert guarded_check(*ops()[name], DEVICE) == []
