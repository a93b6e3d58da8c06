"""Rows in eight bits: the quantiser, alone and inside the ops that feed fp8 products, and the product itself.

Triton's interpreter truncates where a card rounds to e4m3, so there kernels write their values in float32: what is checked
is everything but that last rounding.
"""

import pytest
import torch
from comfyui_ltx25.kernels import fp8_linear, gated_residual, head_gate, linear_gelu, quantise, rms_adaln
from comfyui_ltx25.kernels.quantise import E4M3, Quantised
from comfyui_ltx25.kernels.rms_adaln import Norm
from comfyui_ltx25.tests.support.kernels import CUDA, PLACES, random
from comfyui_ltx25.tests.support.tolerance import assert_no_worse_than, poisoned_memory

pytest.importorskip("triton")

SHAPES = [(1, 1, 16), (2, 7, 72)] + ([(1, 1343, 4096), (1, 26, 2048), (1, 7, 16384)] if CUDA else [])


def place(shape, device) -> Quantised:
    values = torch.empty(shape, dtype=E4M3 if device.type == "cuda" else torch.float32, device=device)
    return Quantised(values, torch.empty(*shape[:-1], 1, device=device))


def assert_quantised(got: Quantised, twin: Quantised, truth: torch.Tensor) -> None:
    """`truth` (R, T, D) float64 is what was to be quantised."""
    torch.testing.assert_close(got.scale.cpu().double(), truth.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448, rtol=1e-5, atol=0)
    assert_no_worse_than(got.dequantised(torch.float32), twin.dequantised(torch.float32), truth)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_quantise_stays_within_twice_the_twins_error(device, dtype, shape, gelu):
    x = random(shape, dtype, 1, 3.0)
    got = quantise._launch(x.to(device), place(shape, device), gelu)
    twin = quantise.gelu_quantise_reference(x) if gelu else quantise.quantise_reference(x)
    truth = torch.nn.functional.gelu(x.double(), approximate="tanh") if gelu else x.double()
    assert_quantised(got, twin, truth)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_norms_quantise_what_they_write(device, dtype, shape):
    """Of two norms one is quantised; the other is as good as it is without."""
    x, y, gate = random(shape, dtype, 1), random(shape, dtype, 2), random((1, shape[2]), dtype, 3)
    table = random((1, 4, shape[2]), dtype, 4)

    def norms(table, quantised):
        return [Norm(table[:, 2 * i], table[:, 2 * i + 1], quantised[i]) for i in range(2)]

    on = [part.to(device) for part in (y, gate, table)]
    updated = x.to(device, copy=True)
    with poisoned_memory():
        out = [place(shape, device), torch.empty(shape, dtype=dtype, device=device)]
    got = gated_residual._launch(updated, on[0], on[1], norms(on[2], (True, False)), None, 1e-6, out)
    twin, plain = rms_adaln.rms_adaln_reference(updated.cpu(), norms(table, (True, False)), None, 1e-6)
    truth, plain_truth = rms_adaln.rms_adaln_reference(updated.cpu().double(), norms(table.double(), (False, False)), None, 1e-6)
    assert_no_worse_than(got[1], plain, plain_truth)
    assert_quantised(got[0], twin, truth)
    alone = rms_adaln._launch(updated, norms(on[2], (True, False))[:1], None, 1e-6, [place(shape, device)])[0]
    assert_quantised(alone, twin, truth)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_head_gate_quantises_what_it_writes(device, dtype):
    o, logits = random((2, 5, 3, 24), dtype, 1), random((2, 5, 3), dtype, 2, 4.0)
    got = head_gate._launch(o.to(device), logits.to(device), place((2, 5, 72), device))
    twin = head_gate.head_gate_reference(o, logits, quantised=True)
    assert_quantised(got, twin, head_gate.head_gate_reference(o.double(), logits.double()))


def test_a_row_of_zeros_stays_zeros():
    q = quantise.quantise_reference(torch.zeros(1, 2, 8))
    assert torch.equal(q.dequantised(torch.float32), torch.zeros(1, 2, 8))


def test_quantising_again_changes_nothing():
    once = quantise.quantise_reference(random((1, 5, 64), torch.float32, 1)).dequantised(torch.float32)
    assert torch.equal(quantise.quantise_reference(once).dequantised(torch.float32), once)


@pytest.mark.parametrize("shape", [(1, 7, 64, 48), (2, 5, 128, 32)])
def test_the_plain_fp8_product_is_the_product_of_what_the_values_stand_for(shape):
    batch, tokens, inner, outer = shape
    x, weight = random((batch, tokens, inner), torch.float32, 1), random((1, outer, inner), torch.float32, 2)
    bias = random((outer,), torch.float32, 3)
    qx, qw = quantise.quantise_reference(x), quantise.quantise_reference(weight)
    got = fp8_linear.fp8_linear(qx, qw, bias, torch.empty(0))
    want = qx.dequantised(torch.float64) @ qw.dequantised(torch.float64)[0].t() + bias.double()
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-5)
    exact = x.double() @ weight.double()[0].t() + bias.double()
    assert 0 < (got - exact).square().mean().sqrt() / exact.square().mean().sqrt() < 0.06


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 7, 26, 1343])
@pytest.mark.parametrize("outer", [4096, 12320])
def test_fp8_product_on_the_card_stays_within_twice_the_twins_error(tokens, outer):
    if not fp8_linear.supported(torch.device("cuda")):
        pytest.skip("this card has no e4m3 products")
    qx = quantise.quantise_reference(random((1, tokens, 4096), torch.bfloat16, 1))
    qw = quantise.quantise_reference(random((1, outer, 4096), torch.bfloat16, 2, 0.02))
    bias = random((outer,), torch.bfloat16, 3)
    on = [Quantised(q.values.cuda(), q.scale.cuda()) for q in (qx, qw)]
    got = fp8_linear._launch(*on, bias.cuda(), torch.bfloat16)
    twin = fp8_linear.fp8_linear_reference(*on, bias.cuda(), torch.bfloat16)
    truth = fp8_linear.fp8_linear_reference(*on, bias.cuda().double(), torch.float64)
    assert_no_worse_than(got, twin, truth)


def test_off_the_card_the_product_with_gelu_is_the_plain_one():
    x, weight, bias = random((1, 5, 16), torch.float32, 1), random((32, 16), torch.float32, 2), random((32,), torch.float32, 3)
    for b in (bias, None):
        want = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, b), approximate="tanh")
        assert torch.equal(linear_gelu.linear_gelu(x, weight, b), want)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(1343, 4096), (26, 2048), (1, 2048)])
def test_product_with_gelu_stays_within_twice_the_twins_error(tokens, width, biased):
    """The tanh GELU, of float32 sums: the library's exact one would fail the small results of the first-use check."""
    x, weight = random((1, tokens, width), torch.bfloat16, 1).cuda(), random((4 * width, width), torch.bfloat16, 2, width**-0.5).cuda()
    bias = random((4 * width,), torch.bfloat16, 3).cuda() if biased else None
    got, twin = linear_gelu._launch(x, weight, bias), linear_gelu.linear_gelu_reference(x, weight, bias)
    truth = linear_gelu.linear_gelu_reference(x.double(), weight.double(), None if bias is None else bias.double())
    assert_no_worse_than(got, twin, truth)


def test_the_first_use_check_of_the_gelu_epilogue_tells_the_exact_gelu(monkeypatch):
    """On the CPU torch's own product with GELU applies the exact form: the check must see that, in bf16 too."""
    assert not linear_gelu._OP._first_use(torch.device("cpu"), torch.float32)
    assert not linear_gelu._OP._first_use(torch.device("cpu"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("module", [quantise, linear_gelu, fp8_linear], ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_first_use_check_passes(module):
    assert module._OP._first_use(torch.device("cuda"), torch.bfloat16)
