"""Frames and sound into an MP4 that any browser plays: H.264 (yuv420p, BT.709, limited range) and AAC at 48 kHz.

Video and audio are fed in step, so that memory does not grow with the clip. The file appears under its name only when
it is whole: a cancelled or failed run leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .errors import InputError
from .finite import all_finite
from .instrument import Watch
from .shapes import OUTPUT_RATE, check_frame_rate

if TYPE_CHECKING:
    from av.container import OutputContainer

BT709 = 1  # H.273 code point of the matrix, the primaries and the transfer curve alike
LIMITED_RANGE = 1  # libav's AVCOL_RANGE_MPEG
AAC_SAMPLES = 1024  # one AAC frame
QUALITY = {"crf": "17", "preset": "fast"}


def write_video(
    path: str | Path,
    frames: torch.Tensor,
    audio: torch.Tensor | None,
    frame_rate: float,
    metadata: Mapping[str, str],
    watch: Watch,
) -> Path:
    """Write `frames` (F, H, W, 3) in [0, 1] and `audio` (2, N) in [-1, 1] at 48 kHz, or no sound, to the MP4 `path`.

    frame_rate in frames/s; 23.976 and its like become the NTSC fractions. `metadata` goes into the container as it is.
    Raises InputError for a path that cannot be written and for tensors of another shape or with non-finite values.
    """
    path = check_output(path)
    rate = as_fraction(frame_rate)
    unfinished = _unfinished(path)
    import av

    _check_shape(frames)
    size = {"width": frames.shape[2], "height": frames.shape[1], "frames": len(frames), "frame_rate": frame_rate}
    try:
        with watch.phase("mux", total=len(frames), unit="frame", **size) as phase:
            if not all(map(all_finite, frames)):
                raise InputError("frames hold NaN or infinite values, so nothing was written; the decode went wrong.")
            if audio is not None:
                _check_audio(audio)
            with av.open(f"file:{unfinished}", "w", format="mp4", options={"movflags": "+faststart+use_metadata_tags"}) as container:
                container.metadata.update(metadata)
                for done in _feed(container, frames, audio, rate):
                    phase.tick(1, f"frame {done} of {len(frames)}")
            os.replace(unfinished, path)
    except OSError as error:  # PyAV's errors are OSErrors, too; a disk can fill up at any frame
        raise InputError(f"{path} could not be written ({error.strerror or error}); make room or choose another folder.") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def check_output(path: str | Path) -> Path:
    """The path, its folder made; raises InputError when no MP4 can be written there. Call it before the work, too."""
    import av

    path = Path(path)
    if not path.name:
        raise InputError("the output has no file name; give one that ends in .mp4, such as out.mp4.")
    if "libx264" not in av.codecs_available:
        raise InputError("the installed PyAV has no H.264 encoder; install the one from PyPI with 'pip install --force-reinstall av'.")
    if path.suffix.lower() != ".mp4":
        raise InputError(f"{path} does not end in .mp4, the only format written; use {path.with_suffix('.mp4')}.")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a file name in it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path.parent} cannot be made ({error.strerror}); choose another folder.") from None
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path.parent} is not writable; choose another folder.")
    trial = _unfinished(path)
    try:  # names can be too long, and some folders only look writable
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); choose another name or folder.") from None
    return path


def _unfinished(path: Path) -> Path:
    """Where a clip is written until it is whole."""
    return path.with_name(f".{path.name}.part")


def as_fraction(frame_rate: float) -> Fraction:
    """frames/s as containers write it: 24 -> 24, 23.976 -> 24000/1001, 12.5 -> 25/2."""
    rate = check_frame_rate(frame_rate)
    ntsc = Fraction(round(rate * 1.001) * 1000, 1001)
    if abs(float(ntsc) - rate) < 5e-4:
        return ntsc
    return Fraction(rate).limit_denominator(1001)


def _feed(container: OutputContainer, frames: torch.Tensor, audio: torch.Tensor | None, rate: Fraction) -> Iterator[int]:
    """Encode and mux everything; yields the number of video frames done after each."""
    video = container.add_stream("libx264", rate=rate, options=dict(QUALITY))
    video.height, video.width = frames.shape[1:3]
    video.pix_fmt = "yuv420p"
    context = video.codec_context
    context.time_base = 1 / rate
    context.color_range = LIMITED_RANGE
    context.colorspace = context.color_primaries = context.color_trc = BT709
    sound = None if audio is None else container.add_stream("aac", rate=OUTPUT_RATE, layout="stereo", options={"b": "192k"})
    spoken = 0
    for index, frame in enumerate(frames):
        container.mux(video.encode(_picture(frame, index, rate)))
        if sound is not None:
            until = audio.shape[1] if index == len(frames) - 1 else min(audio.shape[1], round((index + 1) / rate * OUTPUT_RATE))
            while spoken < until:
                piece = audio[:, spoken : spoken + AAC_SAMPLES]
                container.mux(sound.encode(_sound(piece, spoken)))
                spoken += piece.shape[1]
        yield index + 1
    container.mux(video.encode(None))
    if sound is not None:
        container.mux(sound.encode(None))


def _picture(frame: torch.Tensor, index: int, rate: Fraction):
    """(H, W, 3) in [0, 1] -> a yuv420p frame at time index / rate."""
    import av

    levels = frame.detach().to("cpu", torch.float32).mul(255).round_().clamp_(0, 255).to(torch.uint8)
    rgb = av.VideoFrame.from_ndarray(levels.contiguous().numpy(), format="rgb24")
    picture = rgb.reformat(format="yuv420p", dst_colorspace=BT709, dst_color_range=LIMITED_RANGE)
    picture.pts, picture.time_base = index, 1 / rate
    return picture


def _sound(piece: torch.Tensor, start: int):
    """(2, n) in [-1, 1] -> an audio frame that starts at sample `start`."""
    import av

    samples = piece.detach().to("cpu", torch.float32).clamp(-1, 1).contiguous().numpy()
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
    frame.sample_rate, frame.pts, frame.time_base = OUTPUT_RATE, start, Fraction(1, OUTPUT_RATE)
    return frame


def _check_shape(frames: torch.Tensor) -> None:
    if frames.dim() != 4 or frames.shape[0] < 1 or frames.shape[3] != 3:
        raise InputError(f"frames have shape {tuple(frames.shape)}, wanted (count, height, width, 3).")
    if frames.shape[1] % 2 or frames.shape[2] % 2:
        raise InputError(f"frames are {frames.shape[2]} x {frames.shape[1]} px, and H.264 needs even sides; crop one row or column.")


def _check_audio(audio: torch.Tensor) -> None:
    if audio.dim() != 2 or audio.shape[0] != 2:
        raise InputError(f"audio has shape {tuple(audio.shape)}, wanted (2, samples) at {OUTPUT_RATE} Hz.")
    if not all_finite(audio):
        raise InputError("audio holds NaN or infinite values, so nothing was written; the decode went wrong.")
