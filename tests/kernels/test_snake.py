"""The fused anti-aliased activation against its twin and float64: ends, lengths around a program's reach, both layouts."""

import pytest
import torch
from comfyui_ltx25.kernels.snake import ROWS, TAPS, _check, factors, launch_snake, snake_reference

DEVICE = (
    "cuda" if torch.cuda.is_available() else "cpu"
)  # where there is no card, Triton's interpreter (tests/conftest.py)


def inputs(batch, channels, length, device=DEVICE):
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(batch, channels, length, generator=generator)
    alpha, beta = torch.randn(2, channels, generator=generator)
    up, down = torch.rand(2, TAPS, generator=generator) / TAPS
    return [t.to(device) for t in (x, *factors(alpha, beta), up, down)]


def assert_no_worse_than_twice_the_twin(arguments):
    arguments = [t.cpu() for t in arguments]
    truth = snake_reference(*(t.double() for t in arguments))
    twin = (snake_reference(*arguments) - truth).abs().max()
    got = launch_snake(*(t.to(DEVICE) for t in arguments)).cpu()
    assert got.shape == arguments[0].shape
    assert (got - truth).abs().max() <= 2 * twin + 5e-7 * truth.abs().max()


@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 7, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 3])
def test_kernel_equals_twin(length):
    assert_no_worse_than_twice_the_twin(inputs(2, 5, length))


def test_channels_last_memory_gives_the_same_numbers_in_the_same_memory():
    x, *rest = inputs(2, 10, 50)
    last = x.transpose(1, 2).contiguous().transpose(1, 2)
    got = launch_snake(last, *rest)
    assert got.stride() == last.stride() and torch.equal(got, launch_snake(x, *rest))


def test_the_definition_zero_stuffing_and_cropping():
    """The twin's phases against the plain definition: stuffed with zeros, filtered, cropped; and back."""
    x, frequency, weight, up, down = (t.double() for t in inputs(1, 3, 11, "cpu"))
    wide = torch.nn.functional.pad(x, (5, 5), mode="replicate")
    wide = 2 * torch.nn.functional.conv_transpose1d(wide, up.expand(3, 1, 12), stride=2, groups=3)[..., 15:-15]
    wide = wide + weight[:, None] * torch.sin(wide * frequency[:, None]) ** 2
    wide = torch.nn.functional.pad(wide, (5, 6), mode="replicate")
    want = torch.nn.functional.conv1d(wide, down.expand(3, 1, 12), stride=2, groups=3)
    assert (snake_reference(x, frequency, weight, up, down) - want).abs().max() < 1e-13


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "length"), [(768, 501), (24, 16033), (3, 7)])
def test_kernel_on_a_gpu(channels, length):
    assert_no_worse_than_twice_the_twin(inputs(1, channels, length))


def test_self_check_passes_here():
    for got, twin, truth in _check(torch.device(DEVICE), torch.float32):
        assert (got.cpu() - truth).abs().max() <= 2 * (twin - truth).abs().max()


def test_large_arguments_of_the_sine_stay_accurate():
    """Frequencies up to exp(6): hundreds of turns, where a sine without range reduction is noise."""
    x, _, weight, up, down = inputs(1, 8, 64, "cpu")
    assert_no_worse_than_twice_the_twin([x * 3, torch.linspace(1, 400, 8), weight, up, down])
