"""Sizes: pixels and seconds, latents, tokens. The only place where 8, 32, 25 and 480 are known.

A clip is F frames of H x W px at `frame_rate` frames/s. The video VAE folds it into t = (F - 1) / 8 + 1 latent frames of
h = H / 32 by w = W / 32; the audio VAE makes n = round(F / frame_rate * 25) latent frames (banker's rounding, as the
official code) of 8 channels x 16 bins.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InputError

MAX_SIDE = 8192  # px
MAX_FRAMES = 8 * 1024 + 1
MAX_RATE = 240.0  # frames/s


@dataclass(frozen=True)
class Compression:
    """Pixels per latent cell, read from the video VAE file: 8 frames x 32 px x 32 px in the published one."""

    frames: int
    side: int

    def frame_span(self, index: int, causal: bool) -> tuple[int, int]:
        """Pixel frames [start, end) of latent frame `index`. `causal`: the encoder's first latent frame holds one frame."""
        shift = self.frames - 1 if causal else 0
        return max(0, index * self.frames - shift), max(0, (index + 1) * self.frames - shift)

    def latent_frames(self, frames: int) -> int:
        """Latent frames of a clip of `frames` pixel frames on the grid."""
        return (frames - 1) // self.frames + 1

    def snap(self, frames: int) -> int:
        """The longest clip on the grid of at most `frames` (>= 1) pixel frames."""
        return (self.latent_frames(frames) - 1) * self.frames + 1


PUBLISHED_COMPRESSION = Compression(frames=8, side=32)


@dataclass(frozen=True)
class VideoShape:
    """A clip in pixels: `frames` x `height` x `width`."""

    frames: int
    height: int
    width: int

    def check(self, compression: Compression) -> VideoShape:
        """Return self, or raise InputError with the two nearest legal values of every number that is off the grid."""
        wrong = []
        for name, got, step, offset, most in (
            ("width", self.width, compression.side, 0, MAX_SIDE),
            ("height", self.height, compression.side, 0, MAX_SIDE),
            ("frames", self.frames, compression.frames, 1, MAX_FRAMES),
        ):
            least = offset if offset else step
            if got < least or got > most or (got - offset) % step:
                unit = "" if name == "frames" else " px"
                rule = f"a multiple of {step}" if not offset else f"{step} n + {offset}"
                wrong.append(f"{name} {got}{unit} is not {rule} from {least} to {most} (use {_nearest(got, step, offset, least, most)})")
        if wrong:
            raise InputError("; ".join(wrong) + ".")
        return self

    def latent(self, compression: Compression, channels: int = 128) -> VideoLatentShape:
        """The latent grid of this clip; raises InputError off the grid."""
        self.check(compression)
        return VideoLatentShape(
            channels=channels,
            frames=compression.latent_frames(self.frames),
            height=self.height // compression.side,
            width=self.width // compression.side,
        )


def _nearest(got: int, step: int, offset: int, least: int, most: int) -> str:
    below = min(max((got - offset) // step * step + offset, least), most)
    above = min(max(below + step, least), most) if below < got else below
    return str(below) if below == above else f"{below} or {above}"


@dataclass(frozen=True)
class VideoLatentShape:
    """A video latent: (channels, t, h, w)."""

    channels: int
    frames: int
    height: int
    width: int

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    @property
    def tokens_per_frame(self) -> int:
        return self.height * self.width

    def pixels(self, compression: Compression) -> VideoShape:
        return VideoShape(
            frames=(self.frames - 1) * compression.frames + 1,
            height=self.height * compression.side,
            width=self.width * compression.side,
        )


MEL_RATE = 16000  # Hz
MEL_HOP = 160  # samples at MEL_RATE per mel frame
MEL_PER_LATENT = 4
LATENTS_PER_SECOND = MEL_RATE // (MEL_HOP * MEL_PER_LATENT)  # 25
OUTPUT_RATE = 48000  # Hz
SAMPLES_PER_MEL = OUTPUT_RATE // (LATENTS_PER_SECOND * MEL_PER_LATENT)  # 480


@dataclass(frozen=True)
class AudioLatentShape:
    """An audio latent: (channels, n, bins); 25 latent frames a second."""

    channels: int
    frames: int
    bins: int

    @staticmethod
    def of_clip(frames: int, frame_rate: float, channels: int = 8, bins: int = 16) -> AudioLatentShape:
        """The audio latent that goes with `frames` video frames at `frame_rate` frames/s. At least one frame."""
        return AudioLatentShape(channels, max(1, round(frames / check_frame_rate(frame_rate) * LATENTS_PER_SECOND)), bins)

    @property
    def tokens(self) -> int:
        return self.frames

    @staticmethod
    def of_latents(frames: int, channels: int = 8, bins: int = 16) -> AudioLatentShape:
        """The audio latent of so many latent frames."""
        return AudioLatentShape(channels, frames, bins)

    @property
    def seconds(self) -> float:
        return self.frames / LATENTS_PER_SECOND

    @property
    def mel_frames(self) -> int:
        return MEL_PER_LATENT * self.frames - (MEL_PER_LATENT - 1)

    @property
    def samples(self) -> int:
        """Samples at 48 kHz that the decoder makes: 480 (4 n - 3)."""
        return SAMPLES_PER_MEL * self.mel_frames


def clip_samples(frames: int, frame_rate: float) -> int:
    """Samples at 48 kHz of `frames` video frames at `frame_rate` frames/s: what a soundtrack is padded or cut to."""
    return round(frames / check_frame_rate(frame_rate) * OUTPUT_RATE)


def sounding_latents(samples: int) -> int:
    """How many audio latent frames the first `samples` at 48 kHz are decoded from."""
    mel = -(-samples // SAMPLES_PER_MEL)
    return -(-(mel + MEL_PER_LATENT - 1) // MEL_PER_LATENT)


def check_frame_rate(frame_rate: float) -> float:
    """Return `frame_rate` (frames/s) as a float, or raise InputError outside 1 to 240."""
    if not 1.0 <= frame_rate <= MAX_RATE:
        raise InputError(f"frame_rate {frame_rate} frames/s is outside 1 to {MAX_RATE:g}; 24 is what the model was trained for.")
    return float(frame_rate)


def seconds_to_frames(seconds: float, frame_rate: float, least: int, most: int, compression: Compression) -> int:
    """A clip length on the grid for a wish in seconds: rounded to frames, held in [least, most], then snapped down.

    Snapped up where snapping down falls below `least`, and never above `most` (as ltx_pipelines does).
    """
    frames = max(least, min(round(seconds * check_frame_rate(frame_rate)), most))
    below = compression.snap(frames)
    return below if below >= least else min(compression.snap(least + compression.frames - 1), most)


def evenly_spaced_frames(count: int, frames: int) -> tuple[int, ...]:
    """`count` inner pixel frames of a clip of `frames`, evenly spaced and rounded half to even; raises InputError when crowded.

    (Officially in float32, where a half may come out on the other side: one of 47 in 393 frames is a frame later there.)
    """
    if count < 0 or frames < count + 2:
        raise InputError(f"{count} evenly spaced keyframes do not fit between the ends of {frames} frames; ask for 0 to {max(0, frames - 2)}.")
    return tuple(round(index * (frames - 1) / (count + 1)) for index in range(1, count + 1))
