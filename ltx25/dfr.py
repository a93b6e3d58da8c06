"""Diffusion fidelity rendering: where its keyframes stand, and the rounds that double the frame rate in tiles.

A base clip is made with keyframe slots at the end of every segment of 24 or 32 frames (`Canvas`), enlarged and refined.
Each round (`refine`) doubles its frames, cuts the clip into tiles that meet at keyframes, denoises every tile with the
keyframes in it and a new slot in the middle of each segment, and joins the tiles.

Source: ltx_pipelines.dfr_layout and dfr_pipeline. On purpose otherwise: a picture stays at its moment, so its frame number
doubles with every round, and a tile sees the pictures in its own stretch alone (officially numbers stay as they are, and
the first tile is given all pictures).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from .conditions import Condition, Image, KeyframeIndex, KeyframeSlots, pixel_frame
from .errors import InputError
from .guidance import OFF, Bins
from .instrument import Watch
from .job import Sampled, SampleJob
from .schedule import DISTILLED, check_sigmas
from .shapes import MAX_RATE, Compression, VideoLatentShape

SEGMENTS = (24, 32)  # pixel frames
ROUNDS = 2  # at most
SIGMAS = check_sigmas(DISTILLED[4:])  # of a round
ETA = 0.5  # of its ancestral Euler
ANCHOR_STRENGTH = 0.95  # just short of clean, so that a tile can still settle its seam
FASTEST = 60.0  # frames/s a tile is denoised at: beyond, the frames inside one latent frame are too close for the model
SEED_OF_ROUND = 1000  # added to the seed for every round, and 1 for every tile: tiles are alike, their noise must not be


class Engine(Protocol):
    """What a round needs of the engine."""

    @property
    def compression(self) -> Compression: ...

    def sample(self, job: SampleJob, watch: Watch) -> Sampled: ...

    def upscale(self, latent: torch.Tensor, file: Path, watch: Watch) -> torch.Tensor: ...


@dataclass(frozen=True)
class Canvas:
    """`frames` pixel frames in whole segments of `segment`; the clip asked for may be shorter."""

    frames: int
    segment: int

    @staticmethod
    def of(frames: int) -> Canvas:
        """For a clip of `frames`: the segment that pads it least, the longer one where they are equal."""
        if frames < 2:
            raise InputError(f"a clip of {frames} frame has no room for keyframes; the least is 9.")
        padded = {segment: -(frames - 1) % segment for segment in SEGMENTS}
        segment = min(SEGMENTS, key=lambda one: (padded[one], -one))
        return Canvas(frames + padded[segment], segment)

    @property
    def keyframes(self) -> tuple[int, ...]:
        """The end of every segment: frame 0 is a single frame to the model anyway, the last frame is not."""
        return tuple(range(self.segment, self.frames, self.segment))


@dataclass(frozen=True, eq=False)
class Keyframes:
    """Single frames of a clip: (B, C, count, h, w), each encoded as a clip of one frame, at pixel frames `frames`."""

    latent: torch.Tensor
    frames: tuple[int, ...]


@dataclass(frozen=True)
class Tile:
    """One stretch of a round: pixel frames `start` to `end`, both inclusive, latent frames [first, last).

    anchors: keyframes in it that are known; slots: frames it makes. dropped: latent frames at its head that the tile
    before keeps: its lead-in of one segment, in which it finds its way, and the latent frame that ends on their seam.
    """

    start: int
    end: int
    first: int
    last: int
    anchors: tuple[int, ...]
    slots: tuple[int, ...]
    dropped: int


def tiles_of(seams: Sequence[int], count: int, compression: Compression) -> list[Tile]:
    """`count` tiles, or as many as there are segments, over a clip whose keyframes `seams` end with its last frame.

    Segments are shared out in order, the first tiles taking one more. Raises InputError for seams that do not rise by at
    least two latent frames.
    """
    edges, step = (0, *seams), compression.frames
    spans = [end - start for start, end in zip(edges, edges[1:], strict=False)]
    if not spans or any(span % step or span < 2 * step for span in spans):
        raise InputError(f"keyframes at {list(seams)} do not cut a clip into tiles; they must rise by multiples of {step}, {2 * step} at least.")
    count = min(count, len(spans))
    share, more = divmod(len(spans), count)
    tiles, own = [], 0
    for number in range(count):
        until = own + share + (number < more)
        lead = own - 1 if number else 0
        first = edges[lead] // step
        tiles.append(
            Tile(
                start=edges[lead],
                end=edges[until],
                first=first,
                last=edges[until] // step + 1,
                anchors=tuple(edge for edge in edges[lead : until + 1] if edge),
                slots=tuple((edges[i] + edges[i + 1]) // 2 for i in range(lead, until)),
                dropped=edges[own] // step - first + 1 if number else 0,
            )
        )
        own = until
    return tiles


def rounds_of(keyframes: Sequence[int], rounds: int, compression: Compression) -> list[list[Tile]]:
    """The tiles of every round: 2 in the first, 4 in the second. Frames double, and what a round makes are seams of the next."""
    plans, seams = [], list(keyframes)
    for number in range(1, rounds + 1):
        seams = [2 * frame for frame in seams]
        plans.append(tiles_of(seams, 2**number, compression))
        seams = sorted({*seams, *(frame for tile in plans[-1] for frame in tile.slots)})
    return plans


def stitch(latents: Sequence[torch.Tensor], tiles: Sequence[Tile]) -> torch.Tensor:
    """The clip (B, C, t, h, w) of its tiles' latents: nothing is blended, each gives what it owns."""
    return torch.cat([latent[:, :, tile.dropped :] for latent, tile in zip(latents, tiles, strict=True)], 2)


def refine(engine: Engine, job: SampleJob, keyframes: Keyframes, upscaler: Path, rounds: int, clip_frames: int, watch: Watch) -> Sampled:
    """Double the frame rate of a finished clip `rounds` times; returns video alone, (clip_frames - 1) * 2^rounds + 1 frames.

    job: the clip (its video, batch and prompts as for a sampling; sigmas, sampler, sound and masks are not read), with
    pictures as its only conditions, at frames of this clip. keyframes: of this clip, the last one at its last frame.
    upscaler: a latent upscaler file that doubles time. clip_frames: how many frames of the clip are wanted; the rest is padding.
    Raises InputError before anything is sampled.
    """
    compression = engine.compression
    frames = VideoLatentShape(*job.video.shape[1:]).pixels(compression).frames
    pictures = _check(job, keyframes, rounds, frames, clip_frames)
    job = replace(job, **_of_pictures(job))
    clip, known, runs = job.video, dict(zip(keyframes.frames, keyframes.latent.split(1, 2), strict=True)), []
    plans = rounds_of(keyframes.frames, rounds, compression)
    with watch.phase("refine", total=sum(map(len, plans)), unit="tile") as phase:
        for number, tiles in enumerate(plans, 1):
            clip = _doubled(engine, clip, upscaler, watch)
            known = {2 * frame: latent for frame, latent in known.items()}
            here = replace(job, audio=None, audio_mask=None, video_mask=None, frame_rate=min(job.frame_rate * 2**number, FASTEST), sigmas=SIGMAS)
            here = replace(here, schedule=None, sampler="euler_ancestral", eta=ETA, add_noise=True)
            moved = [replace(picture, frame=picture.frame * 2**number) for picture in pictures]
            made: dict[int, torch.Tensor] = {}
            latents = []
            for index, tile in enumerate(tiles):
                video = clip[:, :, tile.first : tile.last]
                asked = replace(here, video=video, seed=job.seed + SEED_OF_ROUND * number + index, conditions=tile_conditions(tile, video, known, moved, compression))
                runs.append(engine.sample(asked, watch))
                latents.append(runs[-1].video)
                for frame, latent in zip(tile.slots, runs[-1].keyframes.split(1, 2), strict=True):
                    made.setdefault(frame, latent)  # in a lead-in the tile before has made it already
                phase.tick(1, f"round {number} of {rounds}, tile {index + 1} of {len(tiles)}")
            clip, known = stitch(latents, tiles), known | made
    wanted = compression.latent_frames((clip_frames - 1) * 2**rounds + 1)
    return Sampled(
        video=clip[:, :, :wanted].contiguous(),
        audio=None,
        keyframes=None,
        legs=tuple(group for run in runs for group in run.legs),
        seconds=tuple(second for run in runs for second in run.seconds),
        notices=tuple(dict.fromkeys(notice for run in runs for notice in run.notices)),
        profiles=(),
    )


def _of_pictures(job: SampleJob) -> dict[str, Any]:
    """What of a first stage's guidance is for pictures alone, as tiles are. The rest has done its work there: of that the engine
    would tell that it has no effect, and ask for a change that the first stage is not to have."""
    guidance = Bins(tuple((bound, replace(one, modality=OFF.modality)) for bound, one in job.video_guidance.bins))
    negative = job.negative if any(one.needs_uncond for one in guidance) else None
    return {"video_guidance": guidance, "negative": negative}


def tile_conditions(
    tile: Tile, video: torch.Tensor, known: Mapping[int, torch.Tensor], pictures: Sequence[Image], compression: Compression
) -> tuple[Condition, ...]:
    """What a tile is told, at frames of its own: the pictures and keyframes in it, and its slots.

    video: the tile before it is noised (B, C, t, h, w); a slot starts from the latent frame nearest to it.
    """
    there = [replace(picture, frame=picture.frame - tile.start) for picture in pictures if tile.start <= picture.frame <= tile.end]
    anchors = [KeyframeIndex(known[frame], frame - tile.start, ANCHOR_STRENGTH, 1) for frame in tile.anchors]
    slots = tuple(frame - tile.start for frame in tile.slots)
    nearest = [min(round(frame / compression.frames), video.shape[2] - 1) for frame in slots]
    return (*there, *anchors, KeyframeSlots(slots, video[:, :, nearest]))


def _doubled(engine: Engine, clip: torch.Tensor, upscaler: Path, watch: Watch) -> torch.Tensor:
    doubled = engine.upscale(clip, upscaler, watch)
    if doubled.shape != (*clip.shape[:2], 2 * clip.shape[2] - 1, *clip.shape[3:]):
        raise InputError(f"{upscaler.name} makes {tuple(doubled.shape)} of a latent {tuple(clip.shape)}; use an upscaler that doubles time and keeps the size.")
    return doubled


def check_rounds(rounds: int, frame_rate: float) -> None:
    """Raise InputError for a number of rounds, or one that makes more frames a second of `frame_rate` than a clip may have."""
    if not 0 <= rounds <= ROUNDS:
        raise InputError(f"{rounds} rounds, wanted 0 to {ROUNDS}.")
    if frame_rate * 2**rounds > MAX_RATE:
        raise InputError(f"{rounds} round(s) make {frame_rate * 2**rounds:g} frames a second of {frame_rate:g}, and {MAX_RATE:g} are the most; ask for fewer rounds or a lower frame rate.")


def check_keyframes(stand: Sequence[int], frames: int) -> None:
    """Raise InputError where keyframes at frames `stand` do not end with the last frame of a clip of `frames`."""
    if not stand or stand[-1] != frames - 1:
        raise InputError(
            f"keyframes stand at {list(stand)} of a clip of {frames} frames, and the last one must stand at frame {frames - 1}; "
            "make them with LTX-2.5 Keyframe Slots, grid=segments."
        )


def _check(job: SampleJob, keyframes: Keyframes, rounds: int, frames: int, clip_frames: int) -> list[Image]:
    """The pictures of the job, at frames from 0. Raises InputError for what no round can be made of."""
    check_rounds(rounds, job.frame_rate)
    if not 1 <= clip_frames <= frames:
        raise InputError(f"{clip_frames} frames are wanted of a clip of {frames}; ask for 1 to {frames}.")
    check_keyframes(keyframes.frames, frames)
    if keyframes.latent.shape[2] != len(keyframes.frames) or keyframes.latent.shape[3:] != job.video.shape[3:]:
        raise InputError(
            f"keyframes of shape {tuple(keyframes.latent.shape)} for {len(keyframes.frames)} frames of a clip {tuple(job.video.shape)}; "
            "take them from the sampling that made the clip."
        )
    others = [type(item).__name__ for item in job.conditions if not isinstance(item, Image)]
    if others:
        raise InputError(f"rounds take pictures only, and the clip carries {', '.join(others)}; give them to the stages before.")
    return [replace(item, frame=pixel_frame(item.frame, clip_frames)) for item in job.conditions]
