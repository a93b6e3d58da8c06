"""Linear light and sound into a folder of files that grading tools open: EXR frames, a WAV, a JSON with the frame rate.

EXR has no place for sound or for frames per second. Frames are float32, exactly as given, losslessly packed; without
chromaticities of their own their primaries are Rec.709, by the format's rule. The folder appears under its name only
when it is whole: a cancelled or failed run leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import shutil
import wave
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .errors import InputError
from .finite import all_finite
from .instrument import Watch
from .shapes import OUTPUT_RATE, check_frame_rate

if TYPE_CHECKING:
    from av.video.codeccontext import VideoCodecContext

PACKED = {"compression": "zip16"}
SOUND, FACTS = "sound.wav", "clip.json"


def write_exr(
    path: str | Path,
    frames: torch.Tensor,
    audio: torch.Tensor | None,
    frame_rate: float,
    metadata: Mapping[str, str],
    watch: Watch,
) -> Path:
    """Write `frames` (F, H, W, 3), linear light from 0 up, as frame_00000.exr and on into the new folder `path`.

    audio: (2, N) in [-1, 1] at 48 kHz, as sound.wav (16 bit), or None. `metadata` and the frame rate go into clip.json.
    Raises InputError for a folder that cannot be made and for tensors of another shape or with non-finite values.
    """
    path = check_folder(path)
    if frames.dim() != 4 or frames.shape[0] < 1 or frames.shape[3] != 3:
        raise InputError(f"frames have shape {tuple(frames.shape)}, wanted (count, height, width, 3).")
    if not all(map(all_finite, frames)):
        raise InputError("frames hold NaN or infinite values, so nothing was written; the decode went wrong.")
    facts = {"frame_rate": check_frame_rate(frame_rate), "frames": len(frames), "light": "scene-linear, Rec.709 primaries", **metadata}
    unfinished = _unfinished(path)
    shutil.rmtree(unfinished, ignore_errors=True)
    size = {"width": frames.shape[2], "height": frames.shape[1], "frames": len(frames), "frame_rate": frame_rate}
    try:
        unfinished.mkdir()
        with watch.phase("mux", total=len(frames), unit="frame", **size) as phase:
            for index, frame in enumerate(frames):
                (unfinished / f"frame_{index:05}.exr").write_bytes(_encoded(frame))
                phase.tick(1, f"frame {index + 1} of {len(frames)}")
            if audio is not None:
                _write_sound(unfinished / SOUND, audio)
            (unfinished / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        if path.is_dir():
            path.rmdir()  # an empty one, as checked
        os.replace(unfinished, path)
    except OSError as error:  # a disk can fill up at any frame
        raise InputError(f"{path} could not be written ({error.strerror or error}); make room or choose another folder.") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path


def check_folder(path: str | Path) -> Path:
    """The path, the folder it is in made; raises InputError when no new folder can be made there. Call it before the work, too."""
    import av

    path = Path(path)
    if not path.name:
        raise InputError("the output has no name; give one for a new folder, such as out.")
    if "exr" not in av.codecs_available:
        raise InputError("the installed PyAV has no EXR encoder; install the one from PyPI with 'pip install --force-reinstall av'.")
    if path.suffix.lower() in (".mp4", ".exr"):
        raise InputError(f"{path} is the name of a file, and linear light is written as a folder of EXR frames; use {path.with_suffix('')}.")
    trial = _unfinished(path)
    try:
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise InputError(f"{path} exists already; choose the name of a new folder.")
        path.parent.mkdir(parents=True, exist_ok=True)
        trial.mkdir(exist_ok=True)
        trial.rmdir()
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); choose another name or folder.") from None
    return path


def _unfinished(path: Path) -> Path:
    """Where the frames are until they are whole."""
    return path.with_name(f".{path.name}.part")


def _encoded(frame: torch.Tensor) -> bytes:
    """(H, W, 3) -> the bytes of an EXR file."""
    import av

    codec: VideoCodecContext = av.CodecContext.create("exr", "w")
    codec.height, codec.width = frame.shape[:2]
    codec.pix_fmt, codec.time_base, codec.options = "gbrpf32le", Fraction(1), dict(PACKED)
    picture = av.VideoFrame.from_ndarray(frame.detach().to("cpu", torch.float32).contiguous().numpy(), format="gbrpf32le")
    return b"".join(bytes(packet) for packet in [*codec.encode(picture), *codec.encode(None)])


def _write_sound(path: Path, audio: torch.Tensor) -> None:
    if audio.dim() != 2 or audio.shape[0] != 2 or not all_finite(audio):
        raise InputError(f"audio has shape {tuple(audio.shape)}, wanted (2, samples) of finite numbers at {OUTPUT_RATE} Hz.")
    levels = audio.detach().to("cpu", torch.float32).mul(32767).round_().clamp_(-32768, 32767).to(torch.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(OUTPUT_RATE)
        file.writeframes(levels.T.contiguous().numpy().tobytes())
