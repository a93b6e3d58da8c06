"""Ops of the video VAE: the seam between parts of a block, heads before windowed attention, the gated MLP, the pixel norm."""

import pytest
import torch
from comfyui_ltx25.kernels import add_rms_norm, head_norm_rope, neighborhood_attention, pixel_norm_silu, swiglu
from comfyui_ltx25.kernels.head_norm_rope import Rope
from comfyui_ltx25.kernels.neighborhood_attention import Place, na3d_reference
from comfyui_ltx25.tests.support.kernels import CUDA, PLACES, random
from comfyui_ltx25.tests.support.tolerance import assert_no_worse_than, poisoned_memory

pytest.importorskip("triton")


@pytest.mark.parametrize("shape", [(1, 8), (7, 96), (3, 2048)] + ([(100_003, 256), (4033, 2048)] if CUDA else []))
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_add_rms_norm_stays_within_twice_the_twins_error(device, dtype, shape, add):
    x, y = random(shape, dtype, 1, 3.0), random(shape, dtype, 2) if add else None
    gain, shift = random(shape[1:], torch.float32, 3), random(shape[1:], torch.float32, 4) if add else None
    mine, plain, true = x.to(device), x.clone(), x.double()
    with poisoned_memory():
        got = add_rms_norm._launch(mine, *(None if t is None else t.to(device) for t in (y, gain, shift)), 1e-6)
    twin = add_rms_norm.add_rms_norm_reference(plain, y, gain, shift, 1e-6)
    truth = add_rms_norm.add_rms_norm_reference(true, *(None if t is None else t.double() for t in (y, gain, shift)), 1e-6)
    assert_no_worse_than(got, twin, truth)
    assert_no_worse_than(mine, plain, true)


@pytest.mark.parametrize(("grid", "heads", "width"), [((1, 1, 1), 1, 16), ((2, 3, 7), 2, 64)] + ([((5, 40, 64), 4, 64)] if CUDA else []))
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_head_norm_rope_stays_within_twice_the_twins_error(device, dtype, grid, heads, width):
    qkv = random((*grid, 3 * heads * width), dtype, 1)
    gains = [random((width,), torch.float32, seed) for seed in (2, 3)]
    pairs = (width // 8, 3 * width // 16, 3 * width // 16)
    angles = [random((n, p), torch.float32, seed) for n, p, seed in zip(grid, pairs, (4, 5, 6), strict=True)]

    def run(run, device, dtype):
        made = [torch.empty(*grid, heads, width, device=device, dtype=dtype) for _ in range(3)]
        rope = Rope(*(tuple(part(a).to(device) for a in angles) for part in (torch.cos, torch.sin)))
        run(qkv.to(device, dtype), *(gain.to(device) for gain in gains), rope, 1e-6, *made)
        return made

    cpu = torch.device("cpu")
    with poisoned_memory():
        got = run(head_norm_rope._launch, device, dtype)
    twin = run(head_norm_rope.head_norm_rope_reference, cpu, dtype)
    truth = run(head_norm_rope.head_norm_rope_reference, cpu, torch.float64)
    for mine, plain, true in zip(got, twin, truth, strict=True):
        assert_no_worse_than(mine, plain, true)


@pytest.mark.parametrize("shape", [(1, 16, 16), (130, 96, 144)] + ([(4099, 256, 1024), (515, 2048, 8192)] if CUDA else []))
@pytest.mark.parametrize(("device", "dtype"), [PLACES[0], PLACES[2]])  # float32 on a card takes the plain version
def test_the_gated_mlp_stays_within_twice_the_twins_error(device, dtype, shape):
    rows, width, hidden = shape
    x, *weights = random((rows, width), dtype, 1), *(random((hidden, width), dtype, seed, width**-0.5) for seed in (2, 3))
    with poisoned_memory():
        got = swiglu._launch(x.to(device), *(w.to(device) for w in weights))
    assert_no_worse_than(got, swiglu.gated_reference(x, *weights), swiglu.gated_reference(x.double(), *(w.double() for w in weights)))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (2, 3, 5, 96), (0, 3, 5, 96)] + ([(3, 88, 160, 256), (2, 22, 40, 1024)] if CUDA else []))
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_the_pixel_norm_stays_within_twice_the_twins_error(device, dtype, shape, biased):
    x, bias = random(shape, dtype, 1, 3.0), random(shape[-1:], torch.float32, 2) if biased else None
    got, twin, truth = torch.empty_like(x, device=device), torch.empty_like(x), torch.empty_like(x, dtype=torch.float64)
    with poisoned_memory():
        pixel_norm_silu._launch(x.to(device), None if bias is None else bias.to(device), 1e-8, got)
    pixel_norm_silu.pixel_norm_silu_reference(x, bias, 1e-8, twin)
    pixel_norm_silu.pixel_norm_silu_reference(x.double(), None if bias is None else bias.double(), 1e-8, truth)
    if x.numel():
        assert_no_worse_than(got, twin, truth)


WINDOWS = [((5, 7, 9), (3, 5, 5), 16), ((4, 5, 20), (11, 11, 11), 16), ((3, 4, 30), (3, 7, 7), 16), ((1, 1, 5), (3, 3, 3), 16)]
LARGE = [((20, 40, 56), (11, 11, 11), 64), ((7, 22, 40), (3, 7, 7), 64), ((9, 44, 81), (3, 5, 5), 64)]


@pytest.mark.parametrize("bound", [None, 40.0])
@pytest.mark.parametrize(("grid", "window", "width"), WINDOWS + (LARGE if CUDA else []))
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_windowed_attention_stays_within_twice_the_twins_error(device, dtype, grid, window, width, bound):
    q, k, v = (random((*grid, 2, width), dtype, seed) for seed in (1, 2, 3))
    out = torch.empty_like(q, device=device)
    scale = width**-0.5
    with poisoned_memory():
        neighborhood_attention._launch(*(x.to(device) for x in (q, k, v)), window, scale, Place(0, 0, grid[0]), bound, out)
    where = device if device.type == "cuda" else torch.device("cpu")
    twin = na3d_reference(*(x[None].to(where) for x in (q, k, v)), window, scale)[0]
    truth = na3d_reference(*(x[None].to(where).double() for x in (q, k, v)), window, scale)[0]
    assert_no_worse_than(out, twin, truth)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_windowed_attention_of_some_frames_is_that_of_the_clip(device, dtype):
    q, k, v = (random((9, 5, 7, 1, 16), dtype, seed).to(device) for seed in (1, 2, 3))
    whole, part = torch.empty_like(q), torch.empty_like(q[4:7])
    neighborhood_attention._launch(q, k, v, (3, 5, 5), 0.25, Place(0, 0, 9), None, whole)
    neighborhood_attention._launch(q[4:7], k[2:], v[2:], (3, 5, 5), 0.25, Place(4, 2, 9), None, part)
    torch.testing.assert_close(part, whole[4:7], atol=0, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)
