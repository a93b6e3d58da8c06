"""Log mel -> wave: a generator makes 16 kHz, a second one adds what lies above 8 kHz.

Everything here is float32 on every device: rounding adds up over a hundred convolutions in a row, and in bf16 it costs
half of the spectral accuracy (the official code does the same).
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ...kernels.snake import REACH, TAPS, factors, snake
from ..config.audio import CHANNELS, AudioConfig, BandwidthConfig, GeneratorConfig
from ..instrument import Tick
from ..replay import Replay
from .layers import KEPT_GRAPHS, Conv1d, Derived, Upsample1d
from .resample import sinc_kernel, upsample_held
from .spans import spans

CHUNK_SECONDS = 5.12  # of sound, generated at once
LOG_FLOOR = 1e-5


class Vocoder(nn.Module):
    """Log mel (B, 2, T, bins) -> wave (B, 2, samples) in [-1, 1] at the bandwidth stage's output rate."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.vocoder = Generator(config.vocoder)
        self.mel_stft = CausalMel(config.bandwidth)
        self.bwe_generator = Generator(config.bandwidth.generator)
        self._frames = round(CHUNK_SECONDS * config.vae.rate / config.vae.hop)
        self._bandwidth_frames = round(CHUNK_SECONDS * config.bandwidth.input_rate / config.bandwidth.hop)
        # Not in the file. Its phases are the output samples per input sample.
        self._kernel, self._kernel_reach = sinc_kernel(config.bandwidth.input_rate, config.bandwidth.output_rate)
        self._kernel_there: torch.Tensor | None = None

    def forward(self, mel: torch.Tensor, tick: Tick) -> torch.Tensor:
        narrow = self.narrow(mel, tick)
        residual = self.bwe_generator.generate(self.mel_stft(narrow), self._bandwidth_frames, tick)
        return (residual + self.skip(narrow)).clamp(-1, 1)

    def narrow(self, mel: torch.Tensor, tick: Tick) -> torch.Tensor:
        """The first stage alone: (B, 2, T, bins) -> (B, 2, hop * T) at its own rate."""
        return self.vocoder.generate(mel.transpose(2, 3), self._frames, tick)

    def skip(self, narrow: torch.Tensor) -> torch.Tensor:
        """The first stage's wave at the output rate: (B, 2, N) -> (B, 2, 3 N)."""
        there = self._kernel_there
        if there is None or there.dtype != narrow.dtype or there.device != narrow.device:
            self._kernel_there = there = self._kernel.to(narrow.dtype).to(narrow.device)
        return upsample_held(narrow, there, self._kernel_reach)

    def ticks(self, mel_frames: int) -> int:
        """Ticks of a whole `forward` over that many frames."""
        ratio = self._bandwidth_frames / self._frames
        chunks = -(-mel_frames // self._frames)
        return (
            chunks * self.vocoder.ticks
            + -(-round(mel_frames * ratio) // self._bandwidth_frames) * self.bwe_generator.ticks
        )


class Generator(nn.Module):
    """Log mel (B, C, bins, frames) -> samples (B, 2, frames * product of the strides)."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.final = config.final
        self.hop = math.prod(config.rates)
        self.rates = config.rates
        self.branches = len(config.block_kernels)
        widths = [config.channels >> i for i in range(len(config.rates) + 1)]
        self.conv_pre = Conv1d(config.inputs, widths[0], 7)
        self.ups = nn.ModuleList(
            Upsample1d(wide, narrow, kernel, rate)
            for wide, narrow, kernel, rate in zip(widths, widths[1:], config.up_kernels, config.rates, strict=False)
        )
        self.resblocks = nn.ModuleList(
            ResidualBlock(width, kernel, dilations)
            for width in widths[1:]
            for kernel, dilations in zip(config.block_kernels, config.dilations, strict=True)
        )
        self.act_post = AntiAliasedSnake(widths[-1])
        self.conv_post = nn.Conv1d(widths[-1], CHANNELS, 7, padding=3, bias=False)
        self._replay = Replay("the vocoder", KEPT_GRAPHS)

    @property
    def ticks(self) -> int:
        """Ticks per chunk."""
        return sum(block.ticks for block in self.resblocks)

    @property
    def reach(self) -> int:
        """Frames on either side that a frame's samples depend on."""
        samples = self.conv_post.padding[0] + REACH  # at the output rate, then towards the input
        for i in reversed(range(len(self.rates))):
            samples += max(block.reach for block in self.resblocks[i * self.branches : (i + 1) * self.branches])
            samples = -(-(samples + self.ups[i].padding[0]) // self.rates[i]) + 1
        return samples + self.conv_pre.padding[0]

    def generate(self, mel: torch.Tensor, size: int, tick: Tick) -> torch.Tensor:
        """`forward` in bounded memory, `size` frames at a time; every sample sees all the frames it depends on."""
        frames = mel.shape[3]
        pieces = []
        for span in spans(frames, size, self.reach, self.reach):
            samples = self._replay(self, (mel[..., span.first : span.last],), tick, self.ticks)
            pieces.append(samples[..., (span.start - span.first) * self.hop : (span.stop - span.first) * self.hop])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def forward(self, mel: torch.Tensor, tick: Tick) -> torch.Tensor:
        x = self.conv_pre(channels_last(mel.flatten(1, 2)))  # left channel's bins, then the right one's
        for i, up in enumerate(self.ups):
            x = channels_last(up(x))
            blocks = self.resblocks[i * self.branches : (i + 1) * self.branches]
            total = blocks[0](x, tick)
            for block in blocks[1:]:
                total = total + block(x, tick)
            x = total / self.branches
        x = self.conv_post(self.act_post(x))
        if self.final == "tanh":
            return torch.tanh(x)
        return x.clamp(-1, 1) if self.final == "clamp" else x


class ResidualBlock(nn.Module):
    """For each dilation: x + conv(act(dilated conv(act(x)))), (B, C, L)."""

    def __init__(self, width: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        half = kernel // 2
        self.convs1 = nn.ModuleList(Conv1d(width, width, kernel, dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(Conv1d(width, width, kernel) for _ in dilations)
        self.acts1 = nn.ModuleList(AntiAliasedSnake(width) for _ in dilations)
        self.acts2 = nn.ModuleList(AntiAliasedSnake(width) for _ in dilations)
        self.reach = sum(half * (d + 1) + 2 * REACH for d in dilations)
        self.ticks = 2 * len(dilations)

    def forward(self, x: torch.Tensor, tick: Tick) -> torch.Tensor:
        for conv1, conv2, act1, act2 in zip(self.convs1, self.convs2, self.acts1, self.acts2, strict=True):
            h = conv1(act1(x))
            tick()
            x = conv2(act2(h), residual=x)
            tick()
        return x


class AntiAliasedSnake(nn.Module):
    """SnakeBeta at twice the rate, its filters stored in the file."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(width))
        self.beta = nn.Parameter(torch.empty(width))
        self.register_buffer("up", torch.empty(1, 1, TAPS))
        self.register_buffer("down", torch.empty(1, 1, TAPS))
        self._factors = Derived(factors)

    def checkpoint_sources(self) -> dict[str, tuple[str, ...]]:
        return {"alpha": ("act.alpha",), "beta": ("act.beta",), "up": ("upsample.filter",), "down": ("downsample.lowpass.filter",)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return snake(x, *self._factors.of(self.alpha, self.beta), self.up, self.down)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """(B, C, L) with channels adjacent in memory: what the GPU kernels read fastest. On a CPU as it is."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.is_cuda else x


class CausalMel(nn.Module):
    """Wave (B, 2, N) -> natural-log mel (B, 2, bins, N / hop); frame i sees nothing after sample hop * (i + 1).

    Window, transform and mel filters are taken from the file: the generator was trained on their rounded values.
    """

    def __init__(self, config: BandwidthConfig) -> None:
        super().__init__()
        bins = config.fft // 2 + 1
        self.hop = config.hop
        self.past = config.fft - config.hop
        self.stft_fn = nn.Module()
        self.stft_fn.register_buffer("forward_basis", torch.empty(2 * bins, 1, config.fft))
        self.register_buffer("mel_basis", torch.empty(config.mel_bins, bins))

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        batch, channels, length = wave.shape
        padded = F.pad(wave.reshape(batch * channels, 1, length), (self.past, 0))
        real, imaginary = F.conv1d(padded, self.stft_fn.forward_basis, stride=self.hop).chunk(2, dim=1)
        magnitude = (real.square() + imaginary.square()).sqrt()
        mel = torch.matmul(self.mel_basis, magnitude)
        return mel.clamp(min=LOG_FLOOR).log().view(batch, channels, mel.shape[1], -1)
