"""What a clip is told beside its prompt: images, frames, references, masks, kept streams. Items of a latent's `conditions`.

Items act on a stream's Draft, each with the semantics of ltx_core.conditioning. In place: LatentIndex, KeepMask,
TemporalRegions, Frozen, HeldTo. Behind the clip's tokens: KeyframeIndex, Reference, KeyframeSlots, ReferenceAudio; these are dropped
after sampling because only the clip's own tokens are read back. strength in [0, 1]: 1 keeps the given content, 0 lets it
be made anew; a token's denoise mask is 1 - strength. Latents are normalised grids, batch 1 or the clip's.

Several together mean the same in any order (`apply`): no item frees what another keeps, a stretch to make anew adds to the
others of its stream, and what cannot both be is refused. Officially the last mask replaces those before it.
Items are equal only to themselves: they hold tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from .dit.patchify import patchify_audio, patchify_video
from .errors import InputError
from .finite import all_finite
from .latents import Draft, Slots, attend, audio_positions, video_positions
from .shapes import AudioLatentShape, VideoLatentShape

REFERENCE_GAP = 0.04  # s between the end of a reference voice and the start of the clip
PICTURE = "a picture is to stand in its place at the start"


class Condition(Protocol):
    """One item. `stream` is "video" or "audio"."""

    @property
    def stream(self) -> str: ...

    @property
    def makes(self) -> str | None:
        """In words, what of the stream it makes or puts something in the place of; None: it shows something beside it."""

    def apply(self, draft: Draft) -> Draft:
        """The draft with this item in it; raises InputError where it does not fit."""


def apply(conditions: Sequence[Condition], drafts: Mapping[str, Draft]) -> dict[str, Draft]:
    """Apply items to the streams they name, in order, but those with an attention strength behind the others, as the official
    pipelines have them: else it would depend on the order which others see each other. Stretches to make anew come last and as one.

    Raises InputError as `check_together`, for an item that does not fit, and where nothing is left to make.
    """
    drafts = dict(drafts)
    items = [item.at(drafts[item.stream]) if isinstance(item, Image) and item.stream in drafts else item for item in conditions if item.stream in drafts or not isinstance(item, HeldTo)]
    check_together(items, drafts)
    standing = [item for item in items if not isinstance(item, TemporalRegions)]
    for item in (*sorted(standing, key=lambda item: isinstance(item, AttentionStrength)), *_united(items)):
        drafts[item.stream] = item.apply(drafts[item.stream])
    if not any(draft.makes for draft in drafts.values()):
        raise InputError(f"nothing is left to make: masks and conditions keep all of the {' and the '.join(drafts)}; leave one of them out, or free more of the clip.")
    return drafts


def check_together(conditions: Sequence[Condition], streams: Collection[str]) -> None:
    """Raise InputError for items of other streams than a latent has, or that cannot be together on it. Looks at no tensor."""
    for item in conditions:
        if item.stream not in streams and not isinstance(item, HeldTo):  # its stream was taken away: nothing is left to hold
            raise InputError(f"a condition for the {item.stream} was given, but the latent has no {item.stream}; use an audio and video latent.")
    kept = {item.stream for item in conditions if isinstance(item, Frozen)}
    if kept and kept >= set(streams):
        raise InputError(f"nothing is left to make: the {' and the '.join(streams)} {'is' if len(streams) == 1 else 'are'} to stay exactly as given; leave one of these conditions out, or sample the clip between them.")
    for item in conditions:
        if item.stream in kept and item.makes:
            raise InputError(f"the {item.stream} is to stay exactly as it is, and {item.makes}; leave one of the two out, or sample the clip between them.")
    if sum(isinstance(item, KeyframeSlots) for item in conditions) > 1:
        raise InputError("keyframe slots were given twice; put all of their frames into one item.")
    pictures = [item.frame for item in conditions if isinstance(item, Image) and item.strength]
    for frame in pictures:
        if pictures.count(frame) > 1:  # in place the last one would be the only one
            raise InputError(f"frame {frame} was given {pictures.count(frame)} pictures and can have one; give each its own frame, -1 is the last.")
    placed = [item for item in conditions if isinstance(item, LatentIndex) and item.strength]
    for one, other in itertools.combinations(placed, 2):
        if one.index < other.index + other.latent.shape[2] and other.index < one.index + one.latent.shape[2]:
            raise InputError(f"latent frame {max(one.index, other.index)} was given content twice and can hold it once; leave one of the two out.")


def _united(items: Sequence[Condition]) -> list[TemporalRegions]:
    """The stretches of each stream as one item: of two retakes in a row both are made."""
    windows: dict[str, tuple[tuple[float, float], ...]] = {}
    for item in items:
        if isinstance(item, TemporalRegions):
            windows[item.stream] = (*windows.get(item.stream, ()), *item.windows)
    return [TemporalRegions(stream, of) for stream, of in windows.items()]


@dataclass(frozen=True, eq=False)
class Image:
    """One encoded image (B, C, 1, h, w) at pixel frame `frame`, negative from the clip's end: frame 0 in place, others appended."""

    latent: torch.Tensor
    frame: int
    strength: float
    stream = "video"

    @property
    def makes(self) -> str | None:
        return PICTURE if self.frame == 0 and self.strength else None

    def at(self, draft: Draft) -> LatentIndex | KeyframeIndex:
        """What it is in a clip. Raises InputError for a frame the clip does not have."""
        frame = _frame(self.frame, draft)
        return KeyframeIndex(self.latent, frame, self.strength, 1) if frame else LatentIndex(self.latent, 0, self.strength)

    def apply(self, draft: Draft) -> Draft:
        return self.at(draft).apply(draft)


@dataclass(frozen=True, eq=False)
class LatentIndex:
    """Content (B, C, f, h, w) for latent frames `index` to `index + f - 1`; the frames stay the clip's own.

    Strength 0 changes nothing. A mask that keeps these cells goes on keeping them, with the new content in them; stretches
    to make anew elsewhere do not keep them.
    """

    latent: torch.Tensor
    index: int
    strength: float
    stream = "video"

    @property
    def makes(self) -> str | None:
        return PICTURE if self.strength else None

    def apply(self, draft: Draft) -> Draft:
        tokens = _tokens(self.latent, draft, same_size=True)
        last = self.index + self.latent.shape[2]
        if not 0 <= self.index < last <= draft.shape.frames:
            raise InputError(f"content for latent frames {self.index} to {last - 1} does not fit a clip of {draft.shape.frames}; shorten it or start it earlier.")
        if _strength(self.strength) == 0:
            return draft
        first = self.index * draft.shape.tokens_per_frame
        here = slice(first, first + tokens.shape[1])
        clean, mask, pinned = draft.clean.clone(), draft.mask.clone(), draft.pinned.clone()
        clean[:, here], pinned[here] = tokens, True
        mask[here] = mask[here].clamp(max=1 - self.strength)
        return replace(draft, clean=clean, mask=mask, pinned=pinned)


@dataclass(frozen=True, eq=False)
class KeyframeIndex:
    """Content (B, C, f, h, w) appended at pixel frame `frame`; negative counts from the clip's end, -1 is its last frame.

    pixel_frames: how many frames the content was encoded from. One: it stands at [frame, frame + 1). More: its latent
    frames follow each other in full steps from `frame` on, with the short first one only at frame 0.
    """

    latent: torch.Tensor
    frame: int
    strength: float
    pixel_frames: int
    stream = "video"
    makes = None

    def apply(self, draft: Draft) -> Draft:
        tokens = _tokens(self.latent, draft, same_size=True)
        frame = _frame(self.frame, draft)
        positions = video_positions(VideoLatentShape(*self.latent.shape[1:]), draft.compression, 1.0, causal=frame == 0)  # frames
        positions[0] += frame
        if self.pixel_frames == 1:
            positions[0, :, 1] = positions[0, :, 0] + 1
        positions[0] /= draft.frame_rate
        return draft.append(tokens, 1 - _strength(self.strength), positions)


@dataclass(frozen=True, eq=False)
class Reference:
    """A whole reference video (B, C, f, h, w) appended, as IC-LoRAs are trained with.

    downscale: clip size over reference size. temporal: clip frame rate over that of the reference, whose last frame is
    laid on the clip's. Both come from the LoRA's metadata (reference_downscale_factor, reference_temporal_scale_factor).
    """

    latent: torch.Tensor
    strength: float
    downscale: int
    temporal: int
    stream = "video"
    makes = None

    def apply(self, draft: Draft) -> Draft:
        if self.downscale < 1 or self.temporal < 1:
            raise InputError(f"reference factors {self.downscale} (size) and {self.temporal} (time) must be 1 or more; the LoRA's metadata has the right ones.")
        tokens = _tokens(self.latent, draft, same_size=False)
        positions = video_positions(VideoLatentShape(*self.latent.shape[1:]), draft.compression, draft.frame_rate / self.temporal)
        if self.temporal != 1:
            frame = draft.positions[0, 0, 1]  # s, the end of the clip's first frame
            positions[0] = (positions[0] - (self.temporal - 1) * frame).clamp(min=0)
        positions[1:] *= self.downscale
        return draft.append(tokens, 1 - _strength(self.strength), positions)


@dataclass(frozen=True, eq=False)
class KeyframeSlots:
    """Single frames for the model to make at pixel frames `frames` (rising), beside the clip; one item per clip.

    initial: what they start from before noise (B, C, count, h, w), each encoded as a clip of one frame; None for nothing.
    """

    frames: tuple[int, ...]
    initial: torch.Tensor | None
    stream = "video"
    makes = "keyframes of it are to be made"

    def apply(self, draft: Draft) -> Draft:
        check_slots(self.frames, draft.shape.pixels(draft.compression).frames)
        shape, count = replace(draft.shape, frames=1), len(self.frames)
        positions = torch.cat([_slot_positions(shape, frame, draft) for frame in self.frames], 1)
        empty = torch.zeros(1, count * shape.tokens, draft.latent.shape[2])
        seeded = None
        if self.initial is not None:
            seeded = _tokens(self.initial, draft, same_size=True)
            if self.initial.shape[2] != count:
                raise InputError(f"{self.initial.shape[2]} keyframes were given for {count} slots; give one per slot.")
        slots = Slots(draft.tokens, count, shape.tokens)
        return replace(draft.append(empty, 1.0, positions, marked=True, latent=seeded), slots=slots)


def check_slots(frames: tuple[int, ...], clip: int) -> tuple[int, ...]:
    """Return the frames, or raise InputError where slots cannot stand at them in a clip of `clip` frames."""
    if not frames or list(frames) != sorted(set(frames)) or frames[0] < 0 or frames[-1] >= clip:
        raise InputError(f"keyframe slots at frames {list(frames)}, wanted rising numbers from 0 to {clip - 1}.")
    return frames


def _slot_positions(shape: VideoLatentShape, frame: int, draft: Draft) -> torch.Tensor:
    positions = video_positions(shape, draft.compression, 1.0)
    positions[0, :, 0], positions[0, :, 1] = frame, frame + 1
    positions[0] /= draft.frame_rate
    return positions


@dataclass(frozen=True, eq=False)
class ReferenceAudio:
    """A reference voice (B, c, n, bins) appended before time 0: it ends 0.04 s before the clip starts."""

    latent: torch.Tensor
    strength: float
    stream = "audio"
    makes = None

    def apply(self, draft: Draft) -> Draft:
        tokens = _tokens(self.latent, draft, same_size=False)
        positions = audio_positions(AudioLatentShape(*self.latent.shape[1:]))
        return draft.append(tokens, 1 - _strength(self.strength), positions - float(positions[0, -1, 1]) - REFERENCE_GAP)


@dataclass(frozen=True, eq=False)
class KeepMask:
    """Keep the cells of `latent` (B, C, t, h, w) where `mask` (t, h, w) is 1, make the others; between is a blend."""

    latent: torch.Tensor
    mask: torch.Tensor
    strength: float
    stream = "video"
    makes = "parts of it are to be made anew"

    def apply(self, draft: Draft) -> Draft:
        tokens = _tokens(self.latent, draft, same_size=True)
        shape = draft.shape
        if self.latent.shape[2] != shape.frames or tuple(self.mask.shape) != (shape.frames, shape.height, shape.width):
            raise InputError(f"the kept latent and its mask {tuple(self.mask.shape)} must cover the clip's {shape.frames} x {shape.height} x {shape.width} cells.")
        keep = self.mask.detach().to("cpu", torch.float32).reshape(-1)
        clean, mask, clip = draft.clean.clone(), draft.mask.clone(), shape.tokens
        clean[:, :clip] = clean[:, :clip] * (1 - keep[:, None]) + tokens * keep[:, None]
        mask[:clip] = mask[:clip] * (1 - keep) + (1 - _strength(self.strength)) * keep
        return replace(draft, clean=clean, mask=mask)


@dataclass(frozen=True, eq=False)
class TemporalRegions:
    """Make only what lies in the windows [start, end) s anew and keep the rest of the given latent.

    A token that touches any of them is made. A window that touches none is refused: it would cost a whole sampling and
    change nothing. Other masks still hold inside the windows, and content put in place (LatentIndex) has its own strength.
    (The official item has one window and replaces all masks; alone, as its pipeline uses it, it is equal.)
    """

    stream: str
    windows: tuple[tuple[float, float], ...]
    makes = "stretches of it are to be made anew"

    def apply(self, draft: Draft) -> Draft:
        clip = draft.shape.tokens
        mask = draft.mask.clone()
        mask[:clip] *= (self.touched(draft.positions[:, :clip]) | draft.pinned).float()
        return replace(draft, mask=mask)

    def touched(self, positions: torch.Tensor) -> torch.Tensor:
        """(T,) bool: which of a clip's own tokens, at positions (axes, T, 2), are made. Raises InputError."""
        first, last = positions[0].unbind(-1)
        touched = torch.zeros(len(first), dtype=torch.bool)
        for start, end in self.windows:
            check_window(self.stream, start, end, float(last.max()))
            touched |= (last > start) & (first < end)
        return touched


def check_window(stream: str, start: float, end: float, length: float) -> None:
    """Raise InputError for a window [start, end) s that is empty, or touches nothing of a stream of `length` s."""
    if not start < end:
        raise InputError(f"the window from {start:g} s to {end:g} s is empty; the end must be after the start.")
    if start >= length or end <= 0:
        nearest = "later" if end <= 0 else "earlier"
        raise InputError(f"the window from {start:g} s to {end:g} s touches nothing of the {stream}, which ends at {length:.2f} s; choose one that begins {nearest}.")


@dataclass(frozen=True, eq=False)
class AttentionStrength:
    """`item`, whose appended tokens and the clip see each other with weight `attention` in [0, 1], not at all at 0.

    attention: one number, or one per appended token (K,). Tokens of other items do not see these.
    """

    item: Condition
    attention: float | torch.Tensor

    @property
    def stream(self) -> str:
        return self.item.stream

    @property
    def makes(self) -> str | None:
        return self.item.makes

    def apply(self, draft: Draft) -> Draft:
        applied = self.item.apply(draft)
        new = applied.tokens - draft.tokens
        if new == 0:
            return applied
        weight = torch.as_tensor(self.attention, dtype=torch.float32).detach().cpu()
        if weight.ndim > 1 or (weight.ndim == 1 and weight.shape[0] != new):
            raise InputError(f"attention strength of shape {tuple(weight.shape)} for {new} appended tokens; give one number or one per token.")
        if not bool(((weight >= 0) & (weight <= 1)).all()):
            raise InputError(f"attention strength goes from {float(weight.min()):g} to {float(weight.max()):g}, wanted 0 (ignore) to 1 (full).")
        if draft.attention is None:
            if draft.tokens == draft.shape.tokens and bool((weight == 1).all()):
                return applied  # full attention everywhere: no (T, T) table for nothing
            before = torch.ones(draft.tokens, draft.tokens)
        else:
            before = draft.attention
        return replace(applied, attention=attend(before, draft.shape.tokens, weight.expand(new)))


@dataclass(frozen=True, eq=False)
class Frozen:
    """The whole stream is given: it is kept bit for bit, its sigma is 0 at every step, the other stream sees it."""

    stream: str
    makes = None

    def apply(self, draft: Draft) -> Draft:
        return replace(draft, frozen=True)


@dataclass(frozen=True, eq=False)
class HeldTo:
    """What a stream was before a sampling left noise in it, a grid (B, C, t, h, w) or (B, c, n, bins).

    Where a noise mask lies between 0 and 1 the rest of that sampling goes on holding the clip to this, and not to its noisy
    self. Content put in place (LatentIndex) is held to itself. Where nothing is between, this may be of another clip.
    """

    stream: str
    latent: torch.Tensor
    makes = None

    def apply(self, draft: Draft) -> Draft:
        clip = draft.shape.tokens
        between = (draft.mask[:clip] > 0) & (draft.mask[:clip] < 1) & ~draft.pinned
        if not bool(between.any()):
            return draft
        tokens = _tokens(self.latent, draft, same_size=True)
        if tokens.shape[1] != clip:
            raise InputError(f"the {self.stream} was {self.latent.shape[2]} latent frames long when noise was left in it and is {draft.shape.frames} now; cut or extend the clip before or after it is sampled.")
        clean = draft.clean.clone()
        clean[:, :clip] = torch.where(between[:, None], tokens, clean[:, :clip])
        return replace(draft, clean=clean)


def _tokens(latent: torch.Tensor, draft: Draft, same_size: bool) -> torch.Tensor:
    """A condition's grid as float32 CPU tokens (B or 1, K, C), checked against the clip; never a view of the input."""
    shape, video = draft.shape, isinstance(draft.shape, VideoLatentShape)
    got = " x ".join(str(side) for side in latent.shape)
    wanted = f"(1 or {draft.latent.shape[0]}, {shape.channels}, frames, {f'{shape.height}, {shape.width}' if same_size else 'rows, columns'})" if video else f"(1 or {draft.latent.shape[0]}, {shape.channels}, frames, {shape.bins})"
    fits = latent.ndim == (5 if video else 4) and latent.shape[1] == shape.channels and latent.shape[0] in (1, draft.latent.shape[0]) and 0 not in latent.shape
    if fits and video and same_size:
        fits = tuple(latent.shape[3:]) == (shape.height, shape.width)
    if fits and not video:
        fits = latent.shape[3] == shape.bins
    if not fits:
        raise InputError(f"the latent of a condition is {got}, wanted {wanted}; encode it at the size of the clip.")
    grid = latent.detach().to("cpu", torch.float32, copy=True)
    if not all_finite(grid):
        raise InputError("the latent of a condition has values that are not finite numbers; encode its image or sound again.")
    return patchify_video(grid) if video else patchify_audio(grid)


def _strength(strength: float) -> float:
    if not 0.0 <= strength <= 1.0:
        raise InputError(f"strength {strength:g} of a condition is outside 0 (free) to 1 (kept).")
    return strength


def from_start(item: Condition, frames: int) -> Condition:
    """An item of a clip of `frames`, with a frame that counts from that clip's end counted from its start. Raises InputError."""
    if isinstance(item, AttentionStrength):
        return replace(item, item=from_start(item.item, frames))
    return replace(item, frame=pixel_frame(item.frame, frames)) if isinstance(item, (Image, KeyframeIndex)) and item.frame < 0 else item


def _frame(frame: int, draft: Draft) -> int:
    return pixel_frame(frame, draft.shape.pixels(draft.compression).frames)


def pixel_frame(frame: int, frames: int) -> int:
    """A frame of a clip of `frames`; negative counts from its end. Raises InputError for one it does not have."""
    if not -frames <= frame < frames:
        raise InputError(f"frame {frame} is not in a clip of {frames} frames; use {-frames} to {frames - 1}, -1 is the last.")
    return frame % frames


def of_clips(item: Condition, clips: Sequence[int] | None, batch: int) -> Condition:
    """An item of a batch, for its `clips` (numbers from 0), which are all that `batch` clips are; None: for all of them, in order,
    as often as they are there. Itself where it is one for all, or of another batch than these are of: then it says so where it is put in."""
    if isinstance(item, AttentionStrength):
        return replace(item, item=of_clips(item.item, clips, batch))
    name = "initial" if isinstance(item, KeyframeSlots) else "latent"
    latent = getattr(item, name, None)
    if latent is None or len(latent) in (1, batch):
        return item
    if clips is None:
        clips = [*range(len(latent))] * (batch // len(latent))
    elif len(set(clips)) != len(clips):  # joined of two batches, and the items are of the first alone
        return item
    if len(clips) != batch or not all(0 <= clip < len(latent) for clip in clips):
        return item
    return replace(item, **{name: latent[list(clips)]})
