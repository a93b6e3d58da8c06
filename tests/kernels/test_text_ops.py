"""The ops of the text tower: the seam between its halves, grouped heads, the gated MLP."""

import pytest
import torch
from comfyui_ltx25.kernels import gelu_gate, grouped_heads, sandwich_norm
from comfyui_ltx25.kernels.rms_adaln import rms
from comfyui_ltx25.tests.support.kernels import CUDA, PLACES, random
from comfyui_ltx25.tests.support.tolerance import assert_no_worse_than, poisoned_memory

pytest.importorskip("triton")

ROWS = [(1, 8), (7, 72), (3, 3840)] + ([(256, 3840), (1023, 3840)] if CUDA else [])


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_sandwich_norm_stays_within_twice_the_twins_error(device, dtype, shape):
    x, y = random(shape, dtype, 1), random(shape, dtype, 2, 3.0)
    gain, following = random((2, shape[1]), dtype, 3)
    scale = random((1,), dtype, 4)
    packed = torch.full((*shape, 5), 7.0, dtype=dtype, device=device)
    with poisoned_memory():
        z, normed = sandwich_norm._launch(*(part.to(device) for part in (x, y, gain, scale, following)), packed[..., 3], 1e-6, 1e-6)
    twin, _ = sandwich_norm.sandwich_norm_reference(x, y, gain, scale, None, None, 1e-6, 1e-6)
    true, _ = sandwich_norm.sandwich_norm_reference(*(part.double() for part in (x, y, gain, scale)), None, None, 1e-6, 1e-6)
    assert_no_worse_than(z, twin, true)
    # Norms read the rounded sum: their own, wherever that differs from the twin's in the last bit.
    read = z.cpu()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exact = rms(read.double(), 1e-6)
    assert_no_worse_than(normed, (rms(read, 1e-6) * following.to(wide)).to(dtype), exact * following.double())
    assert_no_worse_than(packed[..., 3], rms(read, 1e-6).to(dtype), exact)
    assert bool((packed[..., [0, 1, 2, 4]] == 7).all())  # the other states are not touched


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_sandwich_norm_gives_the_same_bits_whatever_else_it_writes(device, dtype):
    x, y = (random((4, 48), dtype, seed).to(device) for seed in (1, 2))
    gain, following = random((2, 48), dtype, 3).to(device)
    scale = torch.ones(1, dtype=dtype, device=device)
    z, normed = sandwich_norm._launch(x, y, gain, scale, following, torch.empty_like(x), 1e-6, 1e-6)
    alone, nothing = sandwich_norm._launch(x, y, gain, None, None, None, 1e-6, 1e-6)
    assert nothing is None and torch.equal(alone, z)
    assert torch.equal(sandwich_norm._launch(x, y, gain, None, following, None, 1e-6, 1e-6)[1], normed)


def test_sandwich_norm_refuses_rows_that_do_not_pair_up():
    with pytest.raises(ValueError, match=r"\(3, 8\) and \(2, 8\)"):
        sandwich_norm._launch(torch.zeros(3, 8), torch.zeros(2, 8), torch.ones(8), None, None, None, 1e-6, 1e-6)


HEADS = [(1, 2, 1, 4), (5, 6, 2, 24), (3, 16, 8, 256), (3, 16, 1, 512)] + ([(256, 16, 8, 256), (1023, 16, 1, 512)] if CUDA else [])


@pytest.mark.parametrize("values", [True, False], ids=["own values", "lent keys"])
@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_grouped_heads_stays_within_twice_the_twins_error(device, dtype, shape, values):
    tokens, heads, kv_heads, width = shape
    every = (heads + (2 if values else 1) * kv_heads) * width
    qkv = random((tokens, every + 3), dtype, 1, 2.0)[:, :every]  # rows of something wider
    gains = (1 + random((2, width), torch.float32, 2, 0.3)).to(dtype)
    angle = random((tokens, width // 2), torch.float32, 3, 3.0)
    with poisoned_memory():
        got = grouped_heads._launch(qkv.to(device), *gains.to(device), angle.cos().to(device), angle.sin().to(device), heads, kv_heads, 1e-6)
    twin = grouped_heads.grouped_heads_reference(qkv, *gains, angle.cos(), angle.sin(), heads, kv_heads, 1e-6)
    truth = grouped_heads.grouped_heads_reference(qkv.double(), *gains.double(), angle.cos().double(), angle.sin().double(), heads, kv_heads, 1e-6)
    for mine, plain, true, count in zip(got, twin, truth, (heads, kv_heads, kv_heads), strict=True):
        assert mine.shape == (tokens, count, width) and mine.is_contiguous()
        assert_no_worse_than(mine, plain, true)


def test_lent_values_are_keys_before_gain_and_rotation():
    qkv = random((2, 3 * 4), torch.float32, 1)
    gain, angle = torch.full((4,), 5.0), torch.ones(2, 2)
    _, k, v = grouped_heads.grouped_heads(qkv, gain, gain, angle.cos(), angle.sin(), 2, 1, 1e-6)
    torch.testing.assert_close(v[:, 0], rms(qkv[:, 8:], 1e-6))
    torch.testing.assert_close(k.norm(dim=-1), 5 * v.norm(dim=-1))


def test_grouped_heads_refuses_a_width_that_is_neither_with_nor_without_values():
    with pytest.raises(ValueError, match="2 queries and 1 keys"):
        grouped_heads._launch(torch.zeros(2, 20), torch.ones(4), torch.ones(4), torch.ones(2, 2), torch.ones(2, 2), 2, 1, 1e-6)


@pytest.mark.parametrize("shape", [(1, 2), (7, 2 * 72), (2, 2 * 1500)] + ([(256, 2 * 15360)] if CUDA else []))
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_gelu_gate_stays_within_twice_the_twins_error(device, dtype, shape):
    x = random(shape, dtype, 1, 3.0)
    x[0, 0] = -80.0  # e^160 is beyond float32
    with poisoned_memory():
        got = gelu_gate._launch(x.to(device))
    assert_no_worse_than(got, gelu_gate.gelu_gate_reference(x), gelu_gate.gelu_gate_reference(x.double()))


def test_gelu_gate_refuses_halves_of_two_widths():
    with pytest.raises(ValueError, match="rows of 7"):
        gelu_gate._launch(torch.zeros(2, 7))


@pytest.mark.parametrize("module", [sandwich_norm, grouped_heads, gelu_gate], ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_the_first_use_check_passes(device, dtype, module):
    assert module._OP._first_use(device, dtype)
