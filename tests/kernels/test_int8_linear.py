"""The int8 product on a device against its twin and against float64."""

from types import SimpleNamespace

import pytest
import torch
from comfyui_ltx25.kernels import int8_linear as int8
from comfyui_ltx25.kernels.int8_linear import (
    _check,
    _product_launch,
    _tile,
    int8_linear,
    multiply,
    quantise_rows_reference,
    rescale_reference,
    rotate,
)
from comfyui_ltx25.ltx25.formats.int8 import dequantise_int8
from comfyui_ltx25.tests.support.kernels import PLACES

SHAPES = [(1, 4096, 4096), (24, 4096, 12288), (1000, 16384, 4096), (333, 2048, 2080), (18, 256, 36)]  # rows, in, out


def made(rows, inputs, outputs, device, dtype):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator)
    x[:, 3] *= 30  # an outlier channel, which the rotation spreads
    turned = rotate(torch.randn(outputs, inputs, generator=generator) / inputs**0.5, 256)
    scale = turned.abs().amax(1, keepdim=True) / 127
    weight = (turned / scale).round().to(torch.int8)
    bias = torch.randn(outputs, generator=generator)
    return (part.to(device) for part in (x.to(dtype), weight, scale, bias.to(dtype)))


def distance(got, x, weight, scale, bias):
    truth = x.double() @ dequantise_int8(weight.cpu(), scale.cpu(), 256, torch.float64).to(x.device).t() + bias.double()
    return ((got.double() - truth).norm() / truth.norm()).item()


def test_twin_on_the_cpu_is_as_close_as_eight_bits_are():
    x, weight, scale, bias = made(64, 512, 96, "cpu", torch.float32)
    assert distance(int8_linear(x, weight, scale, bias, 256, torch.float32), x, weight, scale, bias) < 0.012


def test_rows_of_zeros_stay_zeros():
    values, scale = quantise_rows_reference(torch.zeros(2, 8))
    assert not values.any() and torch.isfinite(scale).all()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 16, 8), (17, 130, 70), (130, 256, 136)], ids=str)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_kernel_is_the_library_product_rescaled_but_for_a_contracted_sum(device, dtype, shape, biased):
    """Sums of whole numbers have one value; a compiler may round the bias in with the last product."""
    pytest.importorskip("triton")
    rows, inputs, outputs = shape
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randint(-128, 128, (n, inputs), generator=generator, dtype=torch.int8).to(device) for n in (rows, outputs))
    x_scale, scale = (torch.rand(n, 1, generator=generator).to(device) for n in (rows, outputs))
    bias = torch.randn(outputs, generator=generator).to(device, dtype) if biased else None
    got = _product_launch(x, weight, x_scale, scale, bias, dtype)
    want = rescale_reference(multiply(x, weight), x_scale, scale, bias, dtype)
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=4 * torch.finfo(torch.float32).eps * float(want.abs().max()))


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_kernels_pass_their_first_use_check_which_meets_every_tile(device, dtype, monkeypatch):
    pytest.importorskip("triton")
    tiles = set()
    monkeypatch.setattr(int8, "_tile", lambda rows, device: tiles.add(rows > 64) or _tile(rows, device))
    for got, twin, truth in _check(device, dtype):
        allowed = 2 * (twin.double() - truth).abs().max()
        assert (got.cpu().double() - truth).abs().max() <= allowed
    assert tiles == {False, True}


def test_a_card_that_does_not_tell_its_shared_memory_gets_the_tile_that_fits_every_card(monkeypatch):
    """ROCm's properties lack the number."""
    for properties, tile in ((SimpleNamespace(), (128, 128, 64, 8)), (SimpleNamespace(shared_memory_per_block_optin=227 << 10), (128, 256, 128, 8))):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        assert _tile(1000, torch.device("cuda")) == tile


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_device_the_product_is_as_close_as_the_twin(shape):
    x, weight, scale, bias = made(*shape, "cuda", torch.bfloat16)
    got = distance(int8_linear(x, weight, scale, bias, 256, torch.bfloat16), x, weight, scale, bias)
    cpu = [part.cpu() for part in (x, weight, scale, bias)]
    twin = distance(int8_linear(*cpu, 256, torch.float32), *cpu)
    assert got < 1.3 * twin + 2e-3, (got, twin)
