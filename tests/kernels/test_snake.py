"""The fused anti-aliased activation against its twin and float64: ends, lengths around a program's reach, both layouts."""

import pytest
import torch
from comfyui_ltx25.kernels.snake import ROWS, TAPS, _check, launch_snake, snake_reference


def inputs(batch, channels, length, device="cpu"):
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(batch, channels, length, generator=generator)
    alpha, beta = torch.randn(2, channels, generator=generator)
    up, down = torch.rand(2, TAPS, generator=generator) / TAPS
    return [t.to(device) for t in (x, alpha, beta, up, down)]


def assert_no_worse_than_twice_the_twin(arguments):
    truth = snake_reference(*(t.double() for t in arguments))
    twin = (snake_reference(*arguments) - truth).abs().max()
    got = launch_snake(*arguments)
    assert got.shape == arguments[0].shape
    assert (got - truth).abs().max() <= 2 * twin + 5e-7 * truth.abs().max()


@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 7, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 3])
def test_kernel_equals_twin_in_the_interpreter(length):
    assert_no_worse_than_twice_the_twin(inputs(2, 5, length))


def test_channels_last_memory_gives_the_same_numbers_in_the_same_memory():
    x, *rest = inputs(2, 40, 50)
    last = x.transpose(1, 2).contiguous().transpose(1, 2)
    got = launch_snake(last, *rest)
    assert got.stride() == last.stride() and torch.equal(got, launch_snake(x, *rest))


def test_the_definition_zero_stuffing_and_cropping():
    """The twin's phases against the plain definition: stuffed with zeros, filtered, cropped; and back."""
    x, alpha, beta, up, down = (t.double() for t in inputs(1, 3, 11))
    wide = torch.nn.functional.pad(x, (5, 5), mode="replicate")
    wide = 2 * torch.nn.functional.conv_transpose1d(wide, up.expand(3, 1, 12), stride=2, groups=3)[..., 15:-15]
    wide = wide + torch.sin(wide * alpha.exp()[:, None]) ** 2 / (beta.exp()[:, None] + 1e-9)
    wide = torch.nn.functional.pad(wide, (5, 6), mode="replicate")
    want = torch.nn.functional.conv1d(wide, down.expand(3, 1, 12), stride=2, groups=3)
    assert (snake_reference(x, alpha, beta, up, down) - want).abs().max() < 1e-13


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "length"), [(768, 501), (24, 16033), (3, 7)])
def test_kernel_on_a_gpu(channels, length):
    assert_no_worse_than_twice_the_twin(inputs(1, channels, length, "cuda"))


def test_self_check_passes_here():
    for got, twin, truth in _check(torch.device("cpu"), torch.float32):
        assert (got - truth).abs().max() <= 2 * (twin - truth).abs().max()
