"""What `ltx25 render` tells a clip beside its prompt: pictures at frames, sound of one's own, LoRAs. Read before any work."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image as Picture
from PIL import ImageCms, ImageOps, UnidentifiedImageError

from ..audio.mel import stereo
from ..audio.resample import resample
from ..conditions import Condition, Frozen, Image, ReferenceAudio, pixel_frame
from ..engine import Engine, SampleJob
from ..errors import InputError
from ..image import CRF, WORST_CRF, prepare_images
from ..instrument import Watch
from ..moments import fit_latent, fit_wave
from ..request import Request
from ..shapes import OUTPUT_RATE, VideoShape, clip_samples

MODES = ("soundtrack", "voice")

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Pinned:
    """A picture (1, H, W, 3) in 0..1 at pixel frame `frame`, negative from the clip's end."""

    picture: torch.Tensor
    frame: int
    strength: float


@dataclass(frozen=True, eq=False)
class Sound:
    """wave (1, channels, N) at `rate` Hz. voice: the clip shall speak like it; else it is the clip's soundtrack."""

    wave: torch.Tensor
    rate: int
    voice: bool


@dataclass(frozen=True, eq=False)
class Told:
    """crf: the compression that pictures go through first."""

    pictures: tuple[Pinned, ...]
    sound: Sound | None
    crf: int

    @staticmethod
    def read(images: Sequence[str], crf: int | None, audio: Path | None, mode: str | None) -> Told:
        """`images` as FILE@FRAME:STRENGTH; crf, mode: None where not said. Raises InputError for texts and files that cannot be
        read, and for what was said of a picture or a sound that is not there."""
        if crf is not None and not images:
            raise InputError(f"--crf {crf} is for pictures, and none was given; add --image or leave --crf out.")
        if mode is not None and audio is None:
            raise InputError(f"--audio-mode {mode} is for a sound of your own, and none was given; add --audio or leave --audio-mode out.")
        crf = CRF if crf is None else crf
        if not 0 <= crf <= WORST_CRF:
            raise InputError(f"crf {crf} is out of range, wanted 0 to {WORST_CRF}; 18 is that of the model's training.")
        return Told(tuple(map(_pinned, images)), None if audio is None else _sound(audio, mode == "voice"), crf)

    def check(self, request: Request) -> None:
        """Raise InputError for a picture at a frame that the clip does not have, or that has one already."""
        frames = [pixel_frame(pinned.frame, request.frames) for pinned in self.pictures]
        twice = next((frame for frame in frames if frames.count(frame) > 1), None)
        if twice is not None:
            raise InputError(f"frame {twice} was given {frames.count(twice)} pictures and can have one; give each --image its own frame.")

    def pictures_at(self, clip: VideoShape, engine: Engine, watch: Watch) -> tuple[Condition, ...]:
        """The pictures as conditions of a clip of this size."""
        prepared = [(prepare_images(pinned.picture, clip.height, clip.width, self.crf), pinned) for pinned in self.pictures]
        return tuple(Image(engine.encode_video(picture, watch), pinned.frame, pinned.strength) for picture, pinned in prepared)

    def sound_of(self, request: Request, job: SampleJob, engine: Engine, watch: Watch) -> tuple[torch.Tensor, tuple[Condition, ...]]:
        """The job's sound latent, or one's own in its place, and the conditions on it."""
        if self.sound is None:
            return job.audio, ()
        wave, rate = self.sound.wave, self.sound.rate
        if self.sound.voice:
            return job.audio, (ReferenceAudio(engine.encode_audio(wave, rate, watch), 1.0),)
        fitted = engine.encode_audio(fit_wave(wave, rate, request.frames, request.frame_rate), rate, watch)
        return fit_latent(fitted, request.frames, request.frame_rate).expand_as(job.audio), (Frozen("audio"),)

    def soundtrack(self, request: Request) -> torch.Tensor | None:
        """One's own sound as it goes into the file, (1, 2, N) at 48 kHz: better than any decoded one. None: the clip's is new."""
        if self.sound is None or self.sound.voice:
            return None
        wave = resample(stereo(self.sound.wave), self.sound.rate, OUTPUT_RATE)
        wanted = clip_samples(request.frames, request.frame_rate)
        return torch.nn.functional.pad(wave, (0, max(0, wanted - wave.shape[-1])))[..., :wanted]


def parse_lora(text: str) -> tuple[Path, float]:
    """FILE or FILE:STRENGTH. A strength that is no number belongs to the file's name. Raises InputError where no file is named."""
    name, strength = _strength(text)
    if not name.strip() or name.startswith(":"):
        raise InputError(f"'{text}' names no file; write it like style.safetensors or style.safetensors:0.7.")
    return Path(name), strength


def _pinned(text: str) -> Pinned:
    name, at, place = text.rpartition("@")
    if not at or Path(text).is_file():  # an @ may belong to the file's name
        name, place = text, "0"
    if not name.strip():
        raise InputError(f"image '{text}': no file was given; write it like picture.png@0 or picture.png@-1:0.8.")
    frame, strength = _strength(place)
    try:
        number = int(frame)
    except ValueError:
        raise InputError(f"image '{text}' stands at '{frame}', which is no frame; write it like picture.png@0 or picture.png@-1:0.8.") from None
    if not 0.0 <= strength <= 1.0:
        raise InputError(f"image '{text}' has strength {strength:g}, wanted 0 to 1.")
    return Pinned(_picture(Path(name)), number, strength)


def _strength(text: str) -> tuple[str, float]:
    name, colon, number = text.rpartition(":")
    try:
        return (name, float(number)) if colon and name else (text, 1.0)
    except ValueError:
        return text, 1.0


def _picture(path: Path) -> torch.Tensor:
    try:
        with Picture.open(path) as opened:
            turned = ImageOps.exif_transpose(opened)
            if turned.mode == "F":
                raise InputError(f"image {path} holds floating-point values, which have no highest one; save it as a PNG of 8 or 16 bits.")
            wide = turned.mode.startswith("I")  # grey of 16 bits, as depth maps are: convert would hold it at 255
            values = np.asarray(turned)[..., None].repeat(3, -1) if wide else np.asarray(_coloured(turned, path))
    except FileNotFoundError:
        raise InputError(f"image {path} does not exist; check its name.") from None
    except Picture.DecompressionBombError:
        raise InputError(f"image {path} has more than {2 * Picture.MAX_IMAGE_PIXELS / 1e6:.0f} megapixels, which is not read; make it smaller.") from None
    except (UnidentifiedImageError, OSError, SyntaxError):
        raise InputError(f"image {path} is no picture that can be read; use a PNG or JPEG file.") from None
    return torch.from_numpy(values.astype(np.float32) / (65535 if wide else 255))[None]


def _coloured(picture: Picture.Image, path: Path) -> Picture.Image:
    """In sRGB by the profile that the file brings, as officially: pictures of phones are often in Display P3. Alpha is dropped.

    A profile that is damaged, or of other channels than the picture, is left out with a warning.
    """
    solid = picture.convert(picture.mode.removesuffix("A")) if picture.mode in ("RGBA", "LA") else picture
    profile = picture.info.get("icc_profile")
    if profile:
        try:
            return ImageCms.profileToProfile(solid, ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB"), outputMode="RGB")
        except (ImageCms.PyCMSError, ImportError, OSError, ValueError) as error:  # ImportError: a Pillow without LittleCMS
            log.warning("image %s has a colour profile that cannot be applied (%s); its colours are taken for sRGB.", path, error)
    return solid.convert("RGB")


def _sound(path: Path, voice: bool) -> Sound:
    if not path.exists():
        raise InputError(f"audio {path} does not exist; check its name.")
    try:
        with av.open(str(path)) as container:
            if not container.streams.audio:
                raise InputError(f"audio {path} has no sound; use a file that has some.")
            rate = container.streams.audio[0].rate
            resampler = av.AudioResampler(format="fltp", rate=rate)
            frames = [made.to_ndarray() for frame in container.decode(audio=0) for made in resampler.resample(frame)]
            frames += [made.to_ndarray() for made in resampler.resample(None)]
    except av.FFmpegError:
        raise InputError(f"audio {path} cannot be read; use a WAV, FLAC, MP3, M4A or video file.") from None
    if not frames or not sum(frame.shape[-1] for frame in frames):
        raise InputError(f"audio {path} has no sound; use a file that has some.")
    return Sound(torch.from_numpy(np.concatenate(frames, axis=-1)).float()[None], rate, voice)
