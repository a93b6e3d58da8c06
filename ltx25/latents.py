"""Latents on the way into the sampler: grids to tokens, masks, positions, marks, noise; and back.

A latent is a grid: video (B, C, t, h, w), audio (B, c, n, bins). The sampler works on tokens (B, T, C): one per video cell
(frames outermost, columns innermost) or audio frame (feature = channel * bins + bin), tokens of conditions behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional

from .dit.modality import Stream
from .dit.patchify import patchify_audio, patchify_video, unpatchify_audio, unpatchify_video
from .errors import InputError
from .finite import count_not_finite
from .room import check_host_room, smaller_clip
from .shapes import (
    MEL_HOP,
    MEL_PER_LATENT,
    MEL_RATE,
    AudioLatentShape,
    Compression,
    VideoLatentShape,
    VideoShape,
    check_frame_rate,
)

STEP_SEED = 10_000  # added to the seed for the noise of sampler steps, as the official distilled pipeline does
SUBSTEP_SEED = 20_000  # for the midpoints of res_2s
APPENDED_SEED = 1_000_000  # for tokens of conditions, so that the clip's own noise does not depend on them
COPIES = 4  # of a latent on the host beside it while it is sampled: its draft, two of noise, what comes back
TABLES = 4  # (T, T) that live at once: the weights before and after, the bias and what it is made of


@dataclass(frozen=True)
class Slots:
    """Where generated keyframes are among the tokens: `count` single frames of `tokens` tokens each, from token `first`."""

    first: int
    count: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Draft:
    """One stream before it is noised. The first `shape.tokens` tokens are the clip, the rest belongs to conditions.

    latent: (B, T, C) float32 CPU, what noise is added to. clean: (B, T, C), what tokens of mask < 1 are pulled to.
    mask: (T,) float32, 1 = generate, 0 = keep. positions: (axes, T, 2) float32, see Stream. marked: (T,) bool or None.
    attention: (T, T) float32 in [0, 1], row = query, or None for 1 everywhere.
    pinned: (T of the clip,) bool, tokens that a condition has put content in the place of.
    frame_rate: frames/s, None for audio. frozen: given as a whole, kept bit for bit, still seen by the other stream.
    """

    shape: VideoLatentShape | AudioLatentShape
    compression: Compression | None
    frame_rate: float | None
    latent: torch.Tensor
    clean: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    marked: torch.Tensor | None
    attention: torch.Tensor | None
    slots: Slots | None
    pinned: torch.Tensor
    frozen: bool

    @property
    def tokens(self) -> int:
        return self.latent.shape[1]

    @property
    def makes(self) -> bool:
        """Whether anything of it comes back other than it was given."""
        return not self.frozen and (self.slots is not None or bool(self.mask[: self.shape.tokens].any()))

    def stream(self) -> Stream:
        """The facts the transformer needs. Attention 0 becomes float32's lowest value, as in the official code."""
        bias = None
        if self.attention is not None:
            lowest = torch.finfo(torch.float32).min
            bias = torch.where(self.attention > 0, self.attention.clamp(min=1e-38).log(), lowest)
        mask = torch.zeros_like(self.mask) if self.frozen else self.mask
        return Stream(self.positions, mask, self.marked, self.frozen, bias)

    def to(self, device: torch.device) -> Draft:
        """With latent, clean and mask on a device, for `noised`."""
        latent = self.latent.to(device)
        clean = latent if self.clean is self.latent else self.clean.to(device)
        return replace(self, latent=latent, clean=clean, mask=self.mask.to(device))

    def noised(self, noise: torch.Tensor, scale: float) -> torch.Tensor:
        """(B, T, C) float32: the latent moved to `noise` by `scale` (a sigma), then clean moved to that by the mask.

        A frozen stream is noised like any other here, as in the official code; give it scale 0 to start from its latent.
        """
        return torch.lerp(self.clean, torch.lerp(self.latent, noise, scale), self.mask[:, None])

    def going_on(self, noise: torch.Tensor, scale: float) -> torch.Tensor:
        """(B, T, C): as `noised`, but the clip's own tokens are what `left` made of a state at `scale`; conditions' are new."""
        clip = self.shape.tokens
        state = self.noised(noise, scale)
        state[:, :clip] = self.latent[:, :clip] * (1 - scale * self.mask[:clip, None])
        return state

    def left(self, tokens: torch.Tensor, scale: float) -> torch.Tensor:
        """All tokens (B, T, C) of a state at `scale` as the host writes one with noise left: x / (1 - sigma), each by its mask."""
        return tokens / (1 - scale * self.mask.to(tokens)[:, None])

    def grid(self, tokens: torch.Tensor) -> torch.Tensor:
        """The clip's latent grid from all tokens (B, T, C): those of conditions are dropped."""
        clip = tokens[:, : self.shape.tokens]
        if isinstance(self.shape, AudioLatentShape):
            return unpatchify_audio(clip, self.shape.bins).contiguous()
        return unpatchify_video(clip, (self.shape.frames, self.shape.height, self.shape.width)).contiguous()

    def keyframes(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """The generated keyframes (B, C, count, h, w), each a clip of one frame of its own; None without slots."""
        if self.slots is None:
            return None
        span = tokens[:, self.slots.first : self.slots.first + self.slots.count * self.slots.tokens]
        return unpatchify_video(span, (self.slots.count, self.shape.height, self.shape.width)).contiguous()

    def append(self, clean: torch.Tensor, mask: float, positions: torch.Tensor, marked: bool = False, latent: torch.Tensor | None = None) -> Draft:
        """Add tokens (B or 1, K, C) behind all others. Their latent is 0 unless given."""
        clean = clean.to(self.latent).expand(self.latent.shape[0], -1, -1)
        start = torch.zeros_like(clean) if latent is None else latent.to(self.latent).expand_as(clean)
        count = clean.shape[1]
        return replace(
            self,
            latent=torch.cat([self.latent, start], 1),
            clean=torch.cat([self.clean, clean], 1),
            mask=torch.cat([self.mask, torch.full((count,), mask)]),
            positions=torch.cat([self.positions, positions], 1),
            marked=None if self.marked is None else torch.cat([self.marked, torch.full((count,), marked)]),
            attention=None if self.attention is None else attend(self.attention, self.shape.tokens, torch.ones(count)),
        )


def attend(attention: torch.Tensor, clip: int, weight: torch.Tensor) -> torch.Tensor:
    """Grow (T, T) by K tokens of weights (K,) in [0, 1]: clip and new tokens see each other by the weight, the new ones
    see themselves fully and no tokens of other conditions (ltx_core.conditioning.mask_utils). Raises InputError where the
    host has no memory for it."""
    old, new = attention.shape[0], weight.shape[0]
    check_host_room(
        f"weighing the attention of {old + new} tokens", TABLES * 4 * (old + new) ** 2, lambda share: "use an attention strength of 1, or a smaller or shorter clip"
    )
    grown = torch.zeros(old + new, old + new)
    grown[:old, :old] = attention
    grown[old:, old:] = 1
    grown[:clip, old:] = weight[None, :]
    grown[old:, :clip] = weight[:, None]
    return grown


def empty_latents(clip: VideoShape, frame_rate: float, batch: int, compression: Compression, channels: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros: video (B, C, t, h, w) and audio (B, 8, n, 16), float32 CPU.

    Raises InputError off the grid, for batch < 1, and where the host has no memory to sample such a latent.
    """
    if batch < 1:
        raise InputError(f"batch_size {batch} makes nothing; the least is 1.")
    video, audio = clip.latent(compression, channels), AudioLatentShape.of_clip(clip.frames, frame_rate)
    values = batch * (channels * video.tokens + audio.channels * audio.bins * audio.frames)
    what = f"the latent of {clip.width} x {clip.height} px and {clip.frames} frames{f', {batch} times,' if batch > 1 else ''} with its noise"
    check_host_room(what, (1 + COPIES) * 4 * values, partial(smaller_clip, clip, compression, batch, latents=True))
    return (
        torch.zeros(batch, video.channels, video.frames, video.height, video.width),
        torch.zeros(batch, audio.channels, audio.frames, audio.bins),
    )


def video_draft(
    latent: torch.Tensor, frame_rate: float, compression: Compression, channels: int, noise_mask: torch.Tensor | None = None, frozen: bool = False
) -> Draft:
    """A video latent (B, C, t, h, w) and its noise mask (see mask_tokens) as a Draft. Copies: the input is never written to.

    Raises InputError for another number of axes or channels than the model's `channels`, and for values that are not finite.
    """
    if latent.ndim != 5 or latent.shape[1] != channels or 0 in latent.shape:
        raise InputError(f"the video latent is {_by(latent)}, wanted (batch, {channels}, frames, rows, columns): use an LTX-2.5 latent, for example from EmptyLTX25Latent.")
    shape = VideoLatentShape(*latent.shape[1:])
    marked = torch.zeros(shape.tokens, dtype=torch.bool)
    marked[: shape.tokens_per_frame] = True  # the causal encoder's first latent frame is a single pixel frame
    positions = video_positions(shape, compression, check_frame_rate(frame_rate))
    return _draft("video", latent, shape, noise_mask, frozen, positions, compression=compression, frame_rate=float(frame_rate), marked=marked)


def audio_draft(latent: torch.Tensor, channels: int, bins: int, noise_mask: torch.Tensor | None = None, frozen: bool = False) -> Draft:
    """An audio latent (B, c, n, bins) and its noise mask as a Draft; errors as video_draft."""
    if latent.ndim != 4 or latent.shape[1] != channels or latent.shape[3] != bins or 0 in latent.shape:
        raise InputError(f"the audio latent is {_by(latent)}, wanted (batch, {channels}, frames, {bins}): use an LTX-2.5 latent, for example from EmptyLTX25Latent.")
    shape = AudioLatentShape(*latent.shape[1:])
    return _draft("audio", latent, shape, noise_mask, frozen, audio_positions(shape), compression=None, frame_rate=None, marked=None)


def _draft(name: str, latent: torch.Tensor, shape, noise_mask, frozen: bool, positions: torch.Tensor, **facts) -> Draft:
    bad = count_not_finite(latent)
    if bad:
        raise InputError(f"the {name} latent has {bad} values of {latent.numel()} that are not finite numbers; make or encode it again.")
    rows = (patchify_video if name == "video" else patchify_audio)(latent.detach().to("cpu", torch.float32))
    tokens = rows.clone(memory_format=torch.contiguous_format)
    mask = torch.ones(shape.tokens) if noise_mask is None else mask_tokens(noise_mask, shape, facts["compression"])
    pinned = torch.zeros(shape.tokens, dtype=torch.bool)
    return Draft(shape=shape, latent=tokens, clean=tokens, mask=mask, positions=positions, attention=None, slots=None, pinned=pinned, frozen=frozen, **facts)


def mask_tokens(mask: torch.Tensor, shape: VideoLatentShape | AudioLatentShape, compression: Compression | None) -> torch.Tensor:
    """A host noise mask (1 = generate, 0 = keep) as (T,) float32, one value per token.

    Video: (B, 1, t, h, w), rows and columns 1 wide or of another size (pixels: resized like the host does), frames 1, latent
    ones or those of the clip (see _latent_frames), or (.., H, W) as image masks are. Audio: (B, 1, n, bins), any axis 1 wide or of
    another size. Of values that differ over a token's channels or bins the largest counts: a token is one unit to the model.
    Raises InputError for values outside 0 to 1, for items of a batch that differ, and for a video's mask that moves and is of another
    length: stretched, it would keep other moments. compression: of a video.
    """
    video = isinstance(shape, VideoLatentShape)
    size = (shape.frames, shape.height, shape.width) if video else (shape.frames, shape.bins)
    mask = mask.detach().to("cpu", torch.float32)
    if mask.ndim < 2 or mask.ndim > 2 + len(size) or 0 in mask.shape:
        raise InputError(f"a noise_mask of shape {_by(mask)} fits no {'video' if video else 'audio'} latent; make it with SetLatentNoiseMask or a mask node of this pack.")
    if not bool(((mask >= 0) & (mask <= 1)).all()):  # also refuses NaN
        raise InputError(f"noise_mask goes from {float(mask.min()):g} to {float(mask.max()):g}, wanted 0 (keep) to 1 (generate).")
    cells = mask.ndim == 2 + len(size)  # of the latent's own axes, not an image mask
    if not cells:
        mask = mask.reshape(1, 1, -1, *mask.shape[-2:]) if video else mask.reshape(-1, 1, *mask.shape[-2:])
    if video:
        mask = _latent_frames(mask, shape, compression)
    if mask.shape[0] > 1 and not bool((mask == mask[:1]).all()):
        raise InputError("the noise_mask differs between the items of the batch; sample the items one at a time.")
    mask = mask[:1].amax(1, keepdim=True)
    if any(had not in (1, want) for had, want in zip(mask.shape[2:], size, strict=True)):
        mask = functional.interpolate(mask, size=size, mode="trilinear" if video else "bilinear")
    mask = mask[0, 0].expand(size)
    return mask.reshape(-1).contiguous() if video else mask.amax(1).contiguous()


def _latent_frames(mask: torch.Tensor, shape: VideoLatentShape, compression: Compression) -> torch.Tensor:
    """A mask (B, C, frames, rows, columns) with the clip's latent frames, or one for all, as where it is the same at every frame.

    One with the pixel frames of the clip, or with those that encoding it left out behind them, gives each latent frame the
    largest value of the frames it holds: what a mask touches is made anew, as with TemporalRegions. (The host stretches them evenly,
    as if the first latent frame, which holds one frame, held as many as the others.)
    """
    frames = mask.shape[2]
    if frames in (1, shape.frames):
        return mask
    if bool((mask == mask[:, :, :1]).all()):  # a still mask, however often it was repeated
        return mask[:, :, :1]
    once = next((n for n in range(shape.frames, frames // 2 + 1) if _repeats(mask, n) and shape.frames in (n, compression.latent_frames(n))), None)
    if once:  # the host's Repeat Latent Batch says a mask again for each clip, one after the other
        return _latent_frames(mask[:, :, :once], shape, compression)
    if compression.latent_frames(frames) != shape.frames:
        raise InputError(f"the noise_mask has {frames} frames and the video {shape.pixels(compression).frames}, or {shape.frames} latent ones; cut the clip before it is given a mask, or set the mask anew.")
    spans = [compression.frame_span(index, causal=True) for index in range(shape.frames)]
    return torch.stack([mask[:, :, start:end].amax(2) for start, end in spans], 2)


def _repeats(mask: torch.Tensor, frames: int) -> bool:
    """Whether a mask is its first `frames` frames, some times over."""
    return mask.shape[2] % frames == 0 and bool((mask.unflatten(2, (-1, frames)) == mask[:, :, None, :frames]).all())


def video_positions(shape: VideoLatentShape, compression: Compression, frame_rate: float, causal: bool = True) -> torch.Tensor:
    """(3, T, 2) float32: [start, end) of every token in seconds, pixel rows and pixel columns."""
    frames = torch.tensor([compression.frame_span(index, causal) for index in range(shape.frames)], dtype=torch.float32) / frame_rate
    rows, columns = (torch.tensor([(i * compression.side, (i + 1) * compression.side) for i in range(n)], dtype=torch.float32) for n in (shape.height, shape.width))
    size = (shape.frames, shape.height, shape.width, 2)
    axes = (frames[:, None, None], rows[None, :, None], columns[None, None, :])
    return torch.stack([axis.expand(size) for axis in axes]).reshape(3, shape.tokens, 2)


def audio_positions(shape: AudioLatentShape) -> torch.Tensor:
    """(1, T, 2) float32: [start, end) of every token in seconds; the first latent frame of the causal encoder is one mel frame."""
    edges = torch.arange(shape.frames + 1, dtype=torch.float32) * MEL_PER_LATENT
    seconds = (edges + 1 - MEL_PER_LATENT).clamp(min=0) * MEL_HOP / MEL_RATE
    return torch.stack([seconds[:-1], seconds[1:]], -1)[None]


class Noise:
    """Gaussian noise for the tokens of a denoise. Item i of a batch draws what a batch-1 run with seed + i draws.

    Per item one CPU generator in float32 gives the video grid, then the audio grid, as the host's RandomNoise does: the
    official code draws bfloat16 tokens on the device instead, so its clip of a seed is another one. Tokens of conditions
    have a generator of their own, dealt out by time and place, so that the order of the conditions is none of the clip's
    facts. Every draw continues the sequence.
    """

    def __init__(self, seed: int, drafts: Mapping[str, Draft], device: torch.device, offset: int = 0) -> None:
        """`drafts` by stream name ("video", "audio"); `offset` moves the seed, for the noise of sampler steps."""
        self._drafts = {name: drafts[name] for name in ("video", "audio") if name in drafts}
        self._device = device
        batch = next(iter(self._drafts.values())).latent.shape[0]
        self._items = [(_generator(seed + item + offset), _generator(seed + item + offset + APPENDED_SEED)) for item in range(batch)]
        self._ranks = {name: _ranks(draft) for name, draft in self._drafts.items()}

    def draw(self) -> dict[str, torch.Tensor]:
        """(B, T, C) float32 per stream, on the device; the copy there is asynchronous."""
        rows: dict[str, list[torch.Tensor]] = {name: [] for name in self._drafts}
        for clip, appended in self._items:
            for name, draft in self._drafts.items():
                rows[name].append(_clip_noise(draft.shape, clip))
            for name, draft in self._drafts.items():
                more = draft.tokens - draft.shape.tokens
                if more:
                    dealt = torch.randn((1, more, draft.latent.shape[2]), generator=appended)[:, self._ranks[name]]
                    rows[name].append(torch.cat([rows[name].pop(), dealt], 1))
        return {name: self._sent(parts) for name, parts in rows.items()}

    def _sent(self, items: list[torch.Tensor]) -> torch.Tensor:
        """Items (1, T, C) of any strides as one (B, T, C) on the device."""
        cuda = self._device.type == "cuda"
        drawn = torch.empty(len(items), *items[0].shape[1:], pin_memory=cuda)
        torch.cat(items, out=drawn)
        return drawn.to(self._device, non_blocking=cuda)


def _ranks(draft: Draft) -> torch.Tensor:
    """(K,) of the appended tokens: which comes first in time, then by rows and columns, then those that are kept more.

    Tokens of one condition are in this order already.
    """
    clip = draft.shape.tokens
    keys = [*draft.positions[:, clip:, 0], draft.positions[0, clip:, 1], draft.mask[clip:]]
    order = torch.arange(draft.tokens - clip)
    for key in reversed(keys):  # the least significant first: each sort keeps what the ones before decided
        order = order[torch.argsort(key[order], stable=True)]
    return torch.argsort(order)


def _clip_noise(shape: VideoLatentShape | AudioLatentShape, generator: torch.Generator) -> torch.Tensor:
    if isinstance(shape, AudioLatentShape):
        return patchify_audio(torch.randn((1, shape.channels, shape.frames, shape.bins), generator=generator))
    return patchify_video(torch.randn((1, shape.channels, shape.frames, shape.height, shape.width), generator=generator))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed % 2**64)


def _by(tensor: torch.Tensor) -> str:
    return " x ".join(str(side) for side in tensor.shape)
