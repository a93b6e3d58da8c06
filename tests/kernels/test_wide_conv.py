"""float32 convolution by three bf16 products, against its twin and float64."""

import pytest
import torch
from comfyui_ltx25.kernels.wide_conv import _check, launch_wide_conv, pack, wide_conv, wide_conv_reference


def inputs(grid, channels, kernel, device="cpu", batch=1):
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
    truth = wide_conv_reference(
        x.double(), weight.double(), bias.double(), past, dilation, None if residual is None else residual.double()
    )
    twin = (wide_conv_reference(x, weight, bias, past, dilation, residual) - truth).abs().max()
    got = launch_wide_conv(x, pack(weight), weight.shape[3], bias, past, dilation, residual)
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
def test_kernel_equals_twin_in_the_interpreter(grid, channels, kernel, past, dilation, add):
    x, weight, bias, residual = inputs(grid, channels, kernel, batch=2)
    assert_float32_accurate(x, weight, bias, past, dilation, residual if add else None)


def test_weights_that_are_not_bf16_numbers_are_not_packed():
    weight = torch.randn(4, 3, 3, 1)
    assert pack(weight) is None
    assert torch.equal(pack(weight.bfloat16().float()).permute(2, 1, 0).float(), weight.bfloat16().float().flatten(2))


def test_without_packed_weights_the_plain_version_runs():
    x, _, bias, residual = inputs((20, 1), (6, 8), (3, 1))
    weight = torch.randn(8, 6, 3, 1)
    assert torch.equal(
        wide_conv(x, weight, None, bias, 1, 1, residual), wide_conv_reference(x, weight, bias, 1, 1, residual)
    )


def test_self_check_passes_here():
    for got, twin, truth in _check(torch.device("cpu"), torch.float32):
        assert (got - truth).abs().max() <= 2 * (twin - truth).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("grid", "channels", "kernel", "past", "dilation"), [*CASES, ((501 * 5, 1), (768, 768), (11, 1), 25, 5)]
)
def test_kernel_on_a_gpu(grid, channels, kernel, past, dilation):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert_float32_accurate(*inputs(grid, channels, kernel, "cuda")[:3], past, dilation, None)
