import pytest
import torch
from comfyui_ltx25.ltx25.finite import all_finite, count_not_finite

SHAPES = [(1,), (7,), (3, 5, 2), (1, 128, 4, 9, 11), (257, 4099)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bad_value_is_counted_wherever_it_is(shape, dtype):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert count_not_finite(values) == 0 and all_finite(values)
    for place in {0, values.numel() // 2, values.numel() - 1}:
        for bad in (float("nan"), float("inf"), float("-inf")):
            wrong = values.clone()
            wrong.view(-1)[place] = bad
            assert count_not_finite(wrong) == 1 and not all_finite(wrong)
    assert count_not_finite(torch.full(shape, float("inf"), dtype=dtype)) == values.numel()


def test_the_largest_numbers_are_numbers_and_nothing_is_finite():
    assert all_finite(torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min, 0.0]))
    assert all_finite(torch.empty(0, 3))


def test_a_tensor_in_any_order_is_looked_at_whole():
    values = torch.randn(6, 5, 4).permute(2, 0, 1)[:, ::2]
    assert all_finite(values)
    values[3, 2, 4] = float("nan")
    assert count_not_finite(values) == 1


class OnMps(torch.Tensor):
    """A tensor that says it is on a device of another kind."""

    device = property(lambda self: torch.device("mps"))


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_a_device_of_another_kind_is_asked_value_by_value(bad, monkeypatch):
    monkeypatch.setattr(torch, "aminmax", lambda values: pytest.fail("not all devices have it"))
    values = torch.randn(3, 5)
    if bad is not None:
        values[1, 2] = bad
    assert count_not_finite(values.as_subclass(OnMps)) == (bad is not None)
