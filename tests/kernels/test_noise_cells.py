"""Noise by place: the kernel gives its twin's values to the bit, and they are normal, independent and of the whole range."""

import math

import pytest
import torch
from comfyui_ltx25.kernels import noise_cells as module
from comfyui_ltx25.kernels.noise_cells import Corner, levels, noise_cells_reference
from comfyui_ltx25.tests.support.kernels import CUDA, PLACES
from comfyui_ltx25.tests.support.tolerance import poisoned_memory

CASES = [
    ((1, 1, 1), Corner(4, 4, 0, 0, 0), 4, 0),
    ((2, 3, 5), Corner(24, 40, 7, 8, 16), 4, 2**63),
    ((3, 2, 130), Corner(4, 600, 0, 0, 0), 2, 2**64 - 1),  # more than one block a row
    ((2, 2, 3), Corner(8192, 8192, 3000, 8000, 64), 1, 11),  # places beyond 32 bits
] + ([((16, 176, 320), Corner(704, 1280, 105, 0, 0), 4, 5)] if CUDA else [])


def drawn(frames, height, width, seed, frame=0):
    """(frames, height, width, 3)"""
    out = torch.empty(frames, height, width, 3)
    noise_cells_reference(out, Corner(height, width, frame, 0, 0), 1, seed, levels())
    return out


@pytest.mark.parametrize(("shape", "corner", "patch", "seed"), CASES)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_kernel_and_twin_agree_to_the_bit(device, dtype, shape, corner, patch, seed):
    pytest.importorskip("triton")
    twin = torch.empty(*shape, 3 * patch * patch, dtype=dtype)
    with poisoned_memory():
        got = torch.empty_like(twin, device=device)
        module._launch(got, corner, patch, seed, levels().to(device))
    noise_cells_reference(twin, corner, patch, seed, levels())
    assert torch.equal(got.cpu(), twin)


def test_bits_are_splitmix64s():
    """Its published outputs for a state of 1234567, which is what the generator adds its step to."""
    states = 1234567 + torch.arange(1, 4) * module._signed(module._STEP)
    made = [bits % 2**64 for bits in module._finalised(states).tolist()]
    assert made == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert module._mixed(1234567) == made[0]


def test_it_is_standard_normal_in_every_moment_and_in_its_tails():
    values = drawn(40, 176, 320, 3).double().flatten()
    n = values.numel()  # 6.8 million
    assert abs(values.mean()) < 4 / math.sqrt(n)
    assert abs(values.square().mean() - 1) < 4 * math.sqrt(2 / n)
    assert abs((values**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / n)
    ordered = values.sort().values
    below = torch.special.ndtr(ordered)
    assert (below - torch.arange(n) / n).abs().max() < 2 / math.sqrt(n)  # Kolmogorov and Smirnov: 1.95 once in a thousand
    for limit in (3.0, 4.0, 4.5):
        expected = n * math.erfc(limit / math.sqrt(2))
        assert abs((values.abs() > limit).sum() - expected) < 4 * math.sqrt(expected)


def test_levels_are_the_quantiles_in_the_middle_of_their_parts():
    table = levels()
    assert len(table) == 98303 and (table.diff() > 0).all()
    for index, beyond in ((0, 0.5 - 0.5**18), (32767, 0.5 - 32767.5 / 2**17), (65534, 1.5 / 2**17), (65535, (1 - 0.5**16) / 2**17), (98302, 0.5**33)):
        assert math.erfc(float(table[index]) / math.sqrt(2)) / 2 == pytest.approx(beyond, rel=1e-5)
    assert 6.2 < table[-1] < 6.4


def test_places_seeds_and_channels_have_nothing_in_common():
    frames = drawn(64, 32, 32, 0).flatten(1)
    assert (torch.corrcoef(frames) - torch.eye(64)).abs().max() < 0.1  # 5.5 deviations of what chance gives
    seeds = torch.stack([drawn(1, 64, 64, seed).flatten() for seed in (0, 1, 2, 2**32, 2**63, 2**64 - 1)])
    assert (torch.corrcoef(seeds) - torch.eye(6)).abs().max() < 0.05
    channels = drawn(4, 64, 64, 0).flatten(0, 2).T
    assert (torch.corrcoef(channels) - torch.eye(3)).abs().max() < 0.04
    assert not torch.equal(drawn(1, 8, 8, 0, frame=0), drawn(1, 8, 8, 0, frame=1))


def test_neighbours_have_nothing_in_common():
    values = drawn(3, 128, 128, 9).squeeze(0)
    for axis in range(3):
        one, other = values.narrow(axis, 0, values.shape[axis] - 1), values.narrow(axis, 1, values.shape[axis] - 1)
        assert abs(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]) < 0.02


def test_an_empty_area_is_left_alone():
    noise_cells_reference(torch.empty(0, 2, 2, 3), Corner(2, 2, 0, 0, 0), 1, 0, levels())
