"""What one clip fixes for a whole denoise: where tokens are, which timestep levels they have, which are marked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config.dit import DiTConfig
from ..errors import InputError
from .modality import Stream
from .rope import Rope, rope


@dataclass(frozen=True)
class StreamGeometry:
    """One stream of T tokens, on the device unless said otherwise."""

    tokens: int
    made: tuple[int, int]  # [first, stop): tokens outside of it have mask 0; all of them where every token has
    levels: torch.Tensor  # (K,) float32, on the CPU: distinct mask values; a level's timestep is level * sigma
    index: torch.Tensor | None  # (T,) int64, each token's level; None where K is 1
    mask: torch.Tensor  # (1, T, 1) float32
    marks: torch.Tensor | None  # (T, 1) 0 or 1 in the activation dtype: gets the keyframe embedding
    bias: torch.Tensor | None  # (T, T) in the activation dtype, added to self-attention scores
    frozen: bool
    rope: Rope
    cross_rope: Rope  # temporal, between the streams

    def sigma(self, sigma: float) -> float:
        """The stream's scalar sigma at a step of `sigma`: a given (frozen) stream stays at 0."""
        return 0.0 if self.frozen else float(sigma)


@dataclass(frozen=True)
class Geometry:
    """Both streams of a clip; None: not there."""

    video: StreamGeometry | None
    audio: StreamGeometry | None


def prepare(config: DiTConfig, video: Stream | None, audio: Stream | None, device: torch.device, dtype: torch.dtype) -> Geometry:
    """Build the tables of a clip. `dtype` is the activations'. Raises InputError where a stream's parts do not fit."""
    if video is None and audio is None:
        raise InputError("Neither a video nor an audio latent was given; the sampler needs at least one.")
    cross = max(config.max_position[0], config.audio_max_position)
    parts = []
    for name, stream, width, largest in (
        ("video", video, config.width, config.max_position),
        ("audio", audio, config.audio_width, (config.audio_max_position,)),
    ):
        if stream is None:
            parts.append(None)
            continue
        _check(name, stream, len(largest))
        own = rope(stream.positions, width, config.rope_theta, largest, device)
        # The audio stream turns alike in both places; its table is kept once.
        same = width == config.audio_width and largest == (cross,)
        between = own if same else rope(stream.positions[:1], config.audio_width, config.rope_theta, (cross,), device)
        parts.append(_stream(stream, own, between, device, dtype))
    return Geometry(*parts)


def timestep_of_tokens(stream: StreamGeometry, sigma: float) -> torch.Tensor:
    """(1, T, 1) float32, mask * sigma: the t of x0 = x - t * v. 0 everywhere in a frozen stream."""
    return stream.mask * stream.sigma(sigma)


def timestep_of_levels(stream: StreamGeometry, sigma: float) -> torch.Tensor:
    """(K,) float32 on the CPU: the distinct values of `timestep_of_tokens`."""
    return stream.levels * stream.sigma(sigma)


def _stream(stream: Stream, own: Rope, between: Rope, device: torch.device, dtype: torch.dtype) -> StreamGeometry:
    mask = stream.mask.detach().to("cpu", torch.float32)
    levels, index = torch.unique(mask, return_inverse=True)
    moving = mask.nonzero().flatten().tolist() or [0, len(mask) - 1]
    bias = None if stream.bias is None else stream.bias.to(device).clamp(min=torch.finfo(dtype).min).to(dtype)
    return StreamGeometry(
        tokens=len(mask),
        made=(moving[0], moving[-1] + 1),
        levels=levels,
        index=index.to(device) if len(levels) > 1 else None,
        mask=mask.to(device).view(1, -1, 1),
        marks=None if stream.marked is None else stream.marked.to(device, dtype).unsqueeze(-1),
        bias=bias,
        frozen=stream.frozen,
        rope=own,
        cross_rope=between,
    )


def _check(name: str, stream: Stream, axes: int) -> None:
    tokens = stream.mask.shape[0]
    if stream.mask.ndim != 1 or stream.positions.shape != (axes, tokens, 2):
        raise InputError(f"{name}: a mask of shape {tuple(stream.mask.shape)} and positions {tuple(stream.positions.shape)}, wanted (T,) and ({axes}, T, 2).")
    if tokens == 0:
        raise InputError(f"{name}: the latent has no tokens; give one of at least one frame.")
    for part, value, shape in (("marked", stream.marked, (tokens,)), ("bias", stream.bias, (tokens, tokens))):
        if value is not None and tuple(value.shape) != shape:
            raise InputError(f"{name}: {part} has shape {tuple(value.shape)}, wanted {shape}.")
    if not bool(((stream.mask >= 0) & (stream.mask <= 1)).all()):
        raise InputError(f"{name}: the denoise mask has values outside 0 to 1 (or not a number); 1 generates, 0 keeps.")
