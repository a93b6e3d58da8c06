import pytest
import torch
from comfyui_ltx25.kernels.neighborhood_attention import Place, na3d, na3d_reference
from comfyui_ltx25.tests.support.golden import Golden
from comfyui_ltx25.tests.support.memory import peak_bytes_held
from hypothesis import given, settings
from hypothesis import strategies as st

GOLDEN = Golden("video_vae")
MODULE = {"na3d/module", "na3d/module_refuses"}  # of the block around it: tests/ltx25/video/test_diffusion_decoder.py
CASES = [case for case in GOLDEN.names("na3d/") if case not in MODULE]


def explicit(q, k, v, window, scale):
    """Every query against every key, the window written out as a mask."""
    grid = q.shape[1:4]
    place = torch.cartesian_prod(*(torch.arange(n) for n in grid)).view(-1, 3)
    seen = torch.ones(len(place), len(place), dtype=torch.bool)
    for axis, (length, size) in enumerate(zip(grid, window, strict=True)):
        size = min(size, length)
        start = (place[:, axis] - size // 2).clamp(0, length - size)[:, None]
        seen &= (place[None, :, axis] >= start) & (place[None, :, axis] < start + size)
    q, k, v = (x.flatten(1, 3).transpose(1, 2).double() for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).unflatten(1, grid)


def random(shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_official_values(case):
    q, k, v = (GOLDEN.input(case, name) for name in "qkv")
    scale = GOLDEN.input(case, "scale")
    GOLDEN.check(case, "out", na3d_reference(q, k, v, tuple(GOLDEN.input(case, "kernel")), q.shape[-1] ** -0.5 if scale is None else scale))


@settings(max_examples=40, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 9), st.integers(1, 11), st.integers(1, 11)),
    window=st.tuples(st.sampled_from([1, 3, 5, 11]), st.sampled_from([3, 5, 7]), st.sampled_from([3, 5, 11])),
)
def test_borders_odd_sizes_and_windows_longer_than_the_axis(grid, window):
    q, k, v = random((2, *grid, 2, 4), dtype=torch.float64)
    torch.testing.assert_close(na3d_reference(q, k, v, window, 0.5), explicit(q, k, v, window, 0.5), atol=1e-12, rtol=0)


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 20), window=st.sampled_from([1, 3, 11]), data=st.data())
def test_some_frames_of_a_clip_give_what_the_whole_clip_gives(length, window, data):
    q, k, v = random((1, length, 3, 4, 1, 4), dtype=torch.float64)
    first = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(first + 1, length))
    size = min(window, length)
    low, high = (min(max(frame - size // 2, 0), length - size) for frame in (first, stop - 1))
    low = data.draw(st.integers(0, low))
    high = data.draw(st.integers(high + size, length))
    part = na3d_reference(q[:, first:stop], k[:, low:high], v[:, low:high], (window, 3, 3), 1.0, Place(first, low, length))
    torch.testing.assert_close(part, na3d_reference(q, k, v, (window, 3, 3), 1.0)[:, first:stop], atol=1e-12, rtol=0)


def test_agrees_with_comfy_kitchen():
    kitchen = pytest.importorskip("comfy_kitchen")
    if not hasattr(kitchen, "na3d"):
        pytest.skip("this comfy-kitchen has no na3d")
    q, k, v = random((1, 6, 9, 10, 2, 16))
    torch.testing.assert_close(na3d(q, k, v, (3, 5, 5), 0.25), kitchen.na3d(q, k, v, (3, 5, 5), scale=0.25), atol=1e-5, rtol=0)


def test_memory_does_not_follow_the_number_of_boxes():
    """64 times the volume takes no more room for masks and scores."""

    def peak(grid):
        q, k, v = random((1, *grid, 1, 4))
        return peak_bytes_held(lambda: na3d_reference(q, k, v, (3, 5, 5), 1.0))

    assert peak((32, 64, 64)) < 3 * peak((16, 48, 48)) < 2 << 30
