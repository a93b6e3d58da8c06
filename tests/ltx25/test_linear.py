"""Linear layers by storage: filled, quantised, and what the rest of the model sees of it."""

import pytest
import torch
import torch.nn.functional as F
from comfyui_ltx25.kernels.quantise import Quantised, quantise
from comfyui_ltx25.ltx25.linear import Linear, store_e4m3


def layer(bias=True):
    torch.manual_seed(0)
    made = Linear(64, 48, bias)
    for parameter in made.parameters():
        parameter.data = torch.randn_like(parameter) / 8
    return made.requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
def test_a_filled_layer_is_a_plain_linear(bias):
    x, made = torch.randn(1, 5, 64), layer(bias)
    assert torch.equal(made(x), F.linear(x, made.weight, made.bias))
    assert torch.equal(made.gelu(x), F.gelu(made(x), approximate="tanh"))
    assert not made.quantised
    assert set(made.state_dict()) == ({"weight", "bias"} if bias else {"weight"})


@pytest.mark.parametrize("bias", [True, False])
def test_e4m3_keeps_a_quarter_of_the_bytes_and_stays_near(bias):
    x, made = torch.randn(2, 5, 64), layer(bias)
    weight, exact = made.weight.clone(), made(x)
    assert store_e4m3([made]) == 48 * 64 + 4 * 48
    assert made.quantised and made.weight is None
    error = (made.storage.dense(torch.float32) - weight).abs()
    assert bool((error <= weight.abs().amax(-1, keepdim=True) / 28 + 1e-9).all())  # half a step of e4m3's coarsest
    got = made(x)
    assert got.dtype == torch.float32 and 0 < (got - exact).norm() / exact.norm() < 0.06
    assert torch.equal(made.gelu(x), F.gelu(got, approximate="tanh"))


def test_a_quantised_layer_reads_rows_quantised_before_alike():
    x, made = torch.randn(2, 5, 64), layer()
    store_e4m3([made])
    rows = quantise(x)
    assert isinstance(rows, Quantised)
    assert torch.equal(made(rows), made(x))


def test_the_result_has_the_dtype_the_weight_had():
    made = layer().to(torch.bfloat16)
    store_e4m3([made])
    assert made(torch.randn(1, 3, 64).bfloat16()).dtype == torch.bfloat16
