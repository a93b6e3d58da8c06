"""Pictures and videos that a clip is told beside its prompt: LTX25ImageCondition, LTX25VideoCondition, LTX25KeyframeSlots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from comfy_api.latest import io

from ..ltx25.conditions import (
    AttentionStrength,
    Frozen,
    Image,
    KeyframeIndex,
    KeyframeSlots,
    Reference,
    check_slots,
    pixel_frame,
)
from ..ltx25.dfr import Canvas
from ..ltx25.engine import Engine
from ..ltx25.errors import InputError
from ..ltx25.extend import extend, settled
from ..ltx25.image import CRF, WORST_CRF, every_other, prepare_images
from ..ltx25.lora import DOWNSCALE, TEMPORAL, reference_factor
from ..ltx25.moments import parse_frames
from ..ltx25.shapes import Compression, VideoShape, evenly_spaced_frames
from .bridge import EXTENSION, FRAME_RATE, Latents, join, keyframes_in, split, whole_mask, with_conditions
from .encode import pictures_of
from .load import EngineType
from .run import node_run

MODES = ("guide", "reference", "keep")
GRIDS = ("even", "segments")


class LTX25ImageCondition(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25ImageCondition",
            display_name="LTX-2.5 Image Condition",
            category="LTX-2.5",
            description="Pins a picture to a frame of the clip. Chain as many as you like, in any order.",
            search_aliases=["image to video", "first frame", "last frame", "keyframe", "LTXVImgToVideo", "LTXVAddGuide", "start image", "end image"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.Latent.Input("latent", tooltip="The clip, for example from Empty LTX-2.5 Latent. Its size is what the picture is fitted to."),
                io.Image.Input("image", tooltip="Any size: scaled to cover the clip and cut at the edges, never squeezed. One picture, or one for each clip of the batch."),
                io.Int.Input(
                    "frame",
                    default=0,
                    min=-8193,
                    max=8192,
                    tooltip="The frame of the video it stands at, from 0. Negative counts from the end: -1 is the last frame.",
                ),
                io.Float.Input("strength", default=1.0, min=0.0, max=1.0, step=0.01, tooltip="1: the frame is this picture. Lower: it may be changed. 0: at frame 0 no effect; elsewhere a free frame is made beside the clip, which sees it."),
                io.Int.Input(
                    "crf",
                    default=CRF,
                    min=0,
                    max=WORST_CRF,
                    tooltip=f"Video compression the picture goes through first, as in training: too clean a picture freezes the video. {CRF} for LTX-2.5, 0: off.",
                ),
            ],
            outputs=[io.Latent.Output("latent", tooltip="The clip with this picture noted, for the next condition or LTX-2.5 Sampler.")],
        )

    @classmethod
    def execute(cls, engine, latent, image, frame=0, strength=1.0, crf=CRF) -> io.NodeOutput:
        clip, image = Clip.of(engine.engine, latent), pictures_of(image)
        at = pixel_frame(frame, clip.size.frames)
        if len(image) not in (1, clip.batch):
            raise InputError(f"{len(image)} pictures were given for {clip.batch} clip(s), wanted one, or one for each; use LTX-2.5 Video Condition for the frames of a video.")
        pictures = prepare_images(image, clip.size.height, clip.size.width, crf)
        with node_run(engine.engine, bar="encode.video") as run:
            encoded = torch.cat([engine.engine.encode_video(picture, run.watch) for picture in pictures.split(1)])
        return io.NodeOutput(with_conditions(latent, Image(encoded, at, strength)))  # of this clip, however long it becomes


class LTX25VideoCondition(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25VideoCondition",
            display_name="LTX-2.5 Video Condition",
            category="LTX-2.5",
            description="Shows the model a video: as a guide at a place in the clip, as the reference of an IC-LoRA, or kept whole to make its sound.",
            search_aliases=["LTXVAddGuide", "IC-LoRA", "control video", "reference video", "video to audio", "foley", "depth", "pose", "canny"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.Latent.Input("latent", tooltip="The clip that is made. Frames are fitted to its size."),
                io.Image.Input("images", tooltip="The frames of the video, at the clip's frame rate. The last ones are left out where the clip ends before them or their number is not 8 n + 1; the node says so."),
                io.Combo.Input(
                    "mode",
                    options=list(MODES),
                    default="guide",
                    tooltip="guide: these frames from `frame` on. reference: the whole video beside the clip, for an IC-LoRA. keep: the video "
                    "stays exactly as it is and only the sound is made.",
                ),
                io.Int.Input("frame", default=0, min=-8193, max=8192, tooltip="guide: where the frames begin, from 0; negative counts from the end of the clip."),
                io.Float.Input("strength", default=1.0, min=0.0, max=1.0, step=0.01, tooltip="guide, reference: 1 shows the video as it is, lower as a noisier memory of it. 0 shows nothing of it: free frames are made in its place, which the clip sees."),
                io.Float.Input(
                    "attention",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="guide, reference: how much the clip looks at these frames. 1: fully, at full speed. Below 1 attention needs a mask and is slower.",
                ),
                io.Int.Input("downscale", default=0, min=0, max=16, tooltip="reference: how many times smaller than the clip the IC-LoRA wants it. 0: what the file of the engine's LoRA says, else 1."),
                io.Int.Input("temporal", default=0, min=0, max=16, tooltip="reference: every how many frames one is shown. 0: what the file of the engine's LoRA says, else 1."),
            ],
            outputs=[io.Latent.Output("latent", tooltip="The clip with this video noted. The sampler's result has the clip's own length.")],
        )

    @classmethod
    def execute(cls, engine, latent, images, mode="guide", frame=0, strength=1.0, attention=1.0, downscale=0, temporal=0) -> io.NodeOutput:
        clip, images = Clip.of(engine.engine, latent), pictures_of(images)
        with node_run(engine.engine, bar="encode.video") as run:
            encode = _Encoder(engine.engine, run)
            if mode == "keep":
                return io.NodeOutput(_kept(latent, clip, encode(_whole(images, clip), clip.size, clip.size.frames)))
            if mode == "reference":
                loras = engine.engine.loras
                downscale, temporal = downscale or reference_factor(loras, DOWNSCALE), temporal or reference_factor(loras, TEMPORAL)
                size = _smaller(clip.size, downscale, engine.engine.compression.side)
                shown = every_other(images[: clip.size.frames], temporal)
                item = Reference(encode(shown, size, 1 + len(images[1::temporal]), temporal), strength, downscale, temporal)
            else:
                at = pixel_frame(frame, clip.size.frames)
                encoded = encode(images[: clip.size.frames - at], clip.size, len(images))
                pixels = engine.engine.video_shape(encoded).frames
                item = KeyframeIndex(encoded, at, strength, pixels)
        return io.NodeOutput(with_conditions(latent, item if attention == 1.0 else AttentionStrength(item, attention)))


class LTX25KeyframeSlots(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25KeyframeSlots",
            display_name="LTX-2.5 Keyframe Slots",
            category="LTX-2.5",
            description="Lets the model make single, sharp frames beside the clip; they come out of LTX-2.5 Sampler as keyframes.",
            search_aliases=["generated keyframes", "DFR", "diffusion fidelity rendering", "keyframes"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.Latent.Input("latent", tooltip="The clip."),
                io.Int.Input("count", default=3, min=0, max=64, tooltip="How many, evenly spread between the ends of the clip. Not read when frames are named."),
                io.String.Input("frames", default="", tooltip="The frames to make, from 0, with commas: 24, 48. Empty: `count` evenly spread ones."),
                io.Latent.Input("keyframes", optional=True, tooltip="What they start from: the keyframes of a smaller render, upscaled."),
                io.Combo.Input(
                    "grid",
                    optional=True,
                    options=list(GRIDS),
                    default="even",
                    tooltip="even: as count or frames say. segments: one at the end of every 24 or 32 frames, for diffusion fidelity rendering; a clip "
                    "that is no whole number of them is made longer and cut back when it is decoded. count and frames are not read.",
                ),
            ],
            outputs=[io.Latent.Output("latent", tooltip="The clip with the slots noted, for LTX-2.5 Sampler.")],
        )

    @classmethod
    def execute(cls, engine, latent, count=3, frames="", keyframes=None, grid="even") -> io.NodeOutput:
        clip = Clip.of(engine.engine, latent)
        at = slots_at(clip, count, frames, grid)
        if not at:
            return io.NodeOutput(latent)
        told = with_conditions(latent, KeyframeSlots(at, _seeds(keyframes, clip, at)))
        return io.NodeOutput(_padded(told, clip, at[-1] + 1, engine.engine.compression) if grid == "segments" else told)


@dataclass(frozen=True)
class Clip:
    """The video of a LATENT that conditions are fitted to: its size in pixels, its batch.

    whole: its frames with the padding that `size` leaves out.
    """

    parts: Latents
    size: VideoShape
    whole: int
    batch: int

    @staticmethod
    def of(engine: Engine, latent: dict[str, Any]) -> Clip:
        parts = split(latent)
        video = _video(parts)
        shape = engine.video_shape(video)
        return Clip(parts, replace(shape, frames=parts.frames(shape.frames)), shape.frames, len(video))


def _video(parts: Latents) -> torch.Tensor:
    if parts.video is None:
        raise InputError("The latent holds audio only, and a picture needs a video to stand in; use Empty LTX-2.5 Latent.")
    return parts.video


def slots_at(clip: Clip, count: int, frames: str, grid: str) -> tuple[int, ...]:
    """Where LTX-2.5 Keyframe Slots puts slots into a clip. Raises InputError for frames that it does not have or take."""
    if grid == "segments":
        return Canvas.of(clip.whole).keyframes
    return check_slots(parse_frames(frames), clip.size.frames) if frames.strip() else evenly_spaced_frames(count, clip.size.frames)


def check_seeds(stand: tuple[int, ...], at: tuple[int, ...], rate: float = FRAME_RATE, clip_rate: float = FRAME_RATE) -> None:
    """Raise InputError where keyframes at frames `stand` are of other moments than slots at frames `at`; rates: of both clips."""
    if len(stand) != len(at) or any(abs(one / rate - other / clip_rate) * clip_rate > 0.5 for one, other in zip(stand, at, strict=True)):
        raise InputError(f"the keyframes are of frames {list(stand)} and the slots stand at {list(at)}; use the same grid, count and frames in both stages.")


def _seeds(keyframes: dict[str, Any] | None, clip: Clip, at: tuple[int, ...]) -> torch.Tensor | None:
    """What slots at frames `at` start from, (B, C, count, h, w). Raises InputError for keyframes of other moments."""
    if keyframes is None:
        return None
    check_seeds(keyframes.get("keyframes", at), at, split(keyframes).frame_rate or FRAME_RATE, clip.parts.frame_rate or FRAME_RATE)
    return keyframes_in(keyframes, clip.batch, len(at))


def _padded(latent: dict[str, Any], clip: Clip, frames: int, compression: Compression) -> dict[str, Any]:
    """The clip with room for `frames`, what is added to be made; how many were asked for is noted. A kept sound stays as it is."""
    if frames == clip.whole:
        return latent
    parts = split(latent)
    rate = parts.frame_rate or FRAME_RATE
    kept = settled(parts.conditions, parts.video, parts.audio, parts.video_mask, parts.audio_mask, clip.size.frames, rate, compression)
    video_mask, audio_mask = (
        whole_mask(grid) if grid is not None and mask is None else mask for grid, mask in ((parts.video, kept.video_mask), (parts.audio, kept.audio_mask))
    )
    longer = extend(parts.video, parts.audio, video_mask, audio_mask, frames - clip.whole, rate, compression)
    out = {**latent, "samples": join(longer.video, longer.audio), "clip_frames": clip.size.frames, "conditions": kept.conditions}
    masked = len(kept.conditions) < len(parts.conditions)
    if masked or "noise_mask" in latent:
        out["noise_mask"] = join(longer.video_mask, longer.audio_mask)
        if masked or latent["noise_mask"] is latent.get(EXTENSION):  # of LTX-2.5 Extend: it goes when the clip is sampled
            out[EXTENSION] = out["noise_mask"]
    return out


class _Encoder:
    """Frames of any size to a latent of `size`, and a word about those that do not fit the grid."""

    def __init__(self, engine: Engine, run: Any) -> None:
        self._engine, self._run = engine, run

    def __call__(self, images: torch.Tensor, size: VideoShape, given: int, step: int = 1) -> torch.Tensor:
        """`images` are those of `given` frames that end before the clip does; of the video they are one in `step`."""
        latent = self._engine.encode_video(prepare_images(images, size.height, size.width, 0), self._run.watch)
        frames = self._engine.video_shape(latent).frames
        if frames != given:
            behind = [f"the clip ends after {len(images)}"] if len(images) != given else []
            uneven = [f"{len(images)} are not 8 n + 1"] if frames != len(images) else []
            shown = f", one in {step} of the video," if step > 1 else ""
            self._run.tell([f"of {given} frames{shown} {frames} {'is' if frames == 1 else 'are'} used: {' and '.join(behind + uneven)}."])
        return latent


def _whole(images: torch.Tensor, clip: Clip) -> torch.Tensor:
    if len(images) < clip.size.frames:
        raise InputError(f"the video has {len(images)} frames and the clip {clip.size.frames}; set frames of the latent to {max(1, (len(images) - 1) // 8 * 8 + 1)}, or bring a longer video.")
    return images[: clip.size.frames]


def _kept(latent: dict[str, Any], clip: Clip, video: torch.Tensor) -> dict[str, Any]:
    if clip.parts.audio is None:
        raise InputError("The video is kept, so only its sound can be made, and the latent holds none; use Empty LTX-2.5 Latent.")
    kept = with_conditions(latent, Frozen("video"))
    kept["samples"] = join(video.expand(clip.batch, -1, -1, -1, -1), clip.parts.audio)
    return kept


def _smaller(size: VideoShape, factor: int, side: int) -> VideoShape:
    if size.height % (factor * side) or size.width % (factor * side):
        raise InputError(
            f"a reference {factor} times smaller than {size.width} x {size.height} px is not a multiple of {side} px; "
            f"use a clip whose sides are multiples of {factor * side}."
        )
    return VideoShape(size.frames, size.height // factor, size.width // factor)


