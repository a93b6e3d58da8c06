"""float32 convolution by three bf16 products, against its twin and float64."""

import pytest
import torch
from comfyui_ltx25.kernels.wide_conv import (
    _check,
    launch_wide_conv,
    launch_wide_conv_transpose,
    pack,
    pack_transpose,
    wide_conv,
    wide_conv_reference,
    wide_conv_transpose,
    wide_conv_transpose_reference,
)

DEVICE = (
    "cuda" if torch.cuda.is_available() else "cpu"
)  # where there is no card, Triton's interpreter (tests/conftest.py)


def inputs(grid, channels, kernel, device=DEVICE, batch=1):
    generator = torch.Generator().manual_seed(sum(grid))
    into, out = channels
    x = torch.randn(batch, into, *grid, generator=generator)
    weight = (
        (torch.randn(out, into, *kernel, generator=generator) / (into * kernel[0] * kernel[1]) ** 0.5)
        .bfloat16()
        .float()
    )
    bias, residual = torch.randn(out, generator=generator), torch.randn(batch, out, *grid, generator=generator)
    return [t.to(device) for t in (x, weight, bias, residual)]


def assert_float32_accurate(x, weight, bias, past, dilation, residual):
    """Against the CPU's float64; the twin is the CPU's float32, which no setting of a card can make less."""
    x, weight, bias = x.cpu(), weight.cpu(), bias.cpu()
    residual = None if residual is None else residual.cpu()
    truth = wide_conv_reference(
        x.double(), weight.double(), bias.double(), past, dilation, None if residual is None else residual.double()
    )
    twin = (wide_conv_reference(x, weight, bias, past, dilation, residual) - truth).abs().max()
    there = [None if t is None else t.to(DEVICE) for t in (x, pack(weight), bias, residual)]
    got = launch_wide_conv(*there[:2], weight.shape[3], there[2], past, dilation, there[3]).cpu()
    assert got.shape == truth.shape
    assert (got - truth).abs().max() <= 2 * twin + 1e-7 * truth.abs().max()


CASES = [
    ((70, 1), (24, 24), (11, 1), 25, 5),  # a vocoder layer: dilated, same length
    ((3, 1), (5, 40), (3, 1), 1, 1),  # shorter than a tile
    ((9, 16), (40, 17), (3, 3), 2, 1),  # a mel layer: causal in time
    ((1, 4), (3, 2), (1, 1), 0, 1),  # a shortcut
]


@pytest.mark.parametrize(("grid", "channels", "kernel", "past", "dilation"), CASES)
@pytest.mark.parametrize("add", [False, True])
def test_kernel_equals_twin(grid, channels, kernel, past, dilation, add):
    x, weight, bias, residual = inputs(grid, channels, kernel, batch=2)
    assert_float32_accurate(x, weight, bias, past, dilation, residual if add else None)


def test_weights_that_are_not_bf16_numbers_are_not_packed():
    weight = torch.randn(4, 3, 3, 1)
    assert pack(weight) is None
    assert torch.equal(pack(weight.bfloat16().float()).permute(2, 1, 0).float(), weight.bfloat16().float().flatten(2))


def test_without_packed_weights_the_plain_version_runs():
    x, _, bias, residual = inputs((20, 1), (6, 8), (3, 1), "cpu")
    weight = torch.randn(8, 6, 3, 1)
    assert torch.equal(
        wide_conv(x, weight, None, bias, 1, 1, residual), wide_conv_reference(x, weight, bias, 1, 1, residual)
    )


def test_self_check_passes_here():
    for got, twin, truth in _check(torch.device(DEVICE), torch.float32):
        assert (got.cpu() - truth).abs().max() <= 2 * (twin - truth).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("grid", "channels", "kernel", "past", "dilation"), [*CASES, ((501 * 5, 1), (768, 768), (11, 1), 25, 5)]
)
def test_kernel_on_a_gpu(grid, channels, kernel, past, dilation):
    assert_float32_accurate(*inputs(grid, channels, kernel)[:3], past, dilation, None)


@pytest.mark.parametrize(("kernel", "rate"), [(11, 5), (4, 2), (12, 6), (8, 4), (5, 3), (3, 1)])
def test_transposed_kernel_equals_twin(kernel, rate):
    generator = torch.Generator().manual_seed(kernel)
    x = torch.randn(2, 24, 19, generator=generator)
    weight = (torch.randn(24, 10, kernel, generator=generator) / 10).bfloat16().float()
    arguments = (x, weight, torch.randn(10, generator=generator))
    padding = (kernel - rate) // 2
    truth = wide_conv_transpose_reference(*(t.double() for t in arguments), rate, padding)
    twin = (wide_conv_transpose_reference(*arguments, rate, padding) - truth).abs().max()
    packed = pack_transpose(weight.to(DEVICE), arguments[2].to(DEVICE), rate, padding)
    got = launch_wide_conv_transpose(x.to(DEVICE), packed).cpu()
    assert got.shape == truth.shape == (2, 10, 19 * rate)
    assert (got - truth).abs().max() <= 2 * twin + 1e-7 * truth.abs().max()


def test_transposed_weights_that_are_not_bf16_numbers_run_plain():
    x, weight, bias = torch.randn(1, 3, 5), torch.randn(3, 2, 4), torch.randn(2)
    assert pack_transpose(weight, bias, 2, 1) is None
    assert torch.equal(
        wide_conv_transpose(x, weight, None, bias, 2, 1), torch.nn.functional.conv_transpose1d(x, weight, bias, 2, 1)
    )
