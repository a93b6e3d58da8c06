"""What a render is asked for: prompt, size, seed, schedule and guidance, checked before anything heavy starts.

The defaults are those of the nodes, so that a workflow and a command line that say nothing ask for the same clip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import InputError
from .guidance import Bins, Guidance, TextRule, check_guidance, parse_stg_blocks
from .guidance_text import by_sigma
from .sampler import sampler_of
from .schedule import check_sigmas, sigmas_of
from .shapes import PUBLISHED_COMPRESSION, AudioLatentShape, Compression, VideoShape, check_frame_rate

MOST_STEPS = 1000
MOST_SEED = 2**64 - 1

DEFAULT_NEGATIVE = (
    "blurry, out of focus, low resolution, compression artefacts, overexposed, washed-out colours, flicker, jitter, "
    "stutter, frozen picture, warped anatomy, extra fingers, distorted face, unreadable text, subtitles, captions, logo, "
    "watermark, frame border, split screen, muffled sound, clipping, hiss, hum, echo, robotic voice, speech out of sync"
)


@dataclass(frozen=True)
class Request:
    """One clip. Making one checks it: raises InputError with what was got, what is wanted and the nearest legal value.

    width, height: px; frames: a count; frame_rate: frames/s; eta: share of fresh noise per ancestral step, 0 to 1.
    negative: None means that there is none, which cfg other than 1 does not allow; "" is a prompt like any other.
    sigmas: falling noise levels that win over schedule and steps. stg_blocks: block numbers with commas, from 0; how
    many there are only the file tells, so they are checked by `guidance`. rule, apg_eta, apg_norm: see guidance.TextRule;
    guidance_start, guidance_end, bins: see guidance_text. token_shift: ltx2's levels by the clip's own number of tokens.
    """

    prompt: str
    negative: str | None = DEFAULT_NEGATIVE
    width: int = 768
    height: int = 512
    frames: int = 121
    frame_rate: float = 24.0
    seed: int = 0
    schedule: str = "ltx2"
    steps: int = 30
    sampler: str = "auto"
    sigmas: tuple[float, ...] | None = None
    eta: float = 1.0
    video_cfg: float = 3.0
    video_stg: float = 1.0
    video_modality: float = 3.0
    video_rescale: float = 0.7
    audio_cfg: float = 7.0
    audio_stg: float = 1.0
    audio_modality: float = 3.0
    audio_rescale: float = 0.7
    stg_blocks: str = "28"
    skip_step: int = 0
    rule: str = TextRule.CFG.value
    apg_eta: float = 1.0
    apg_norm: float = 0.0
    guidance_start: float = 1.0
    guidance_end: float = 0.0
    bins: str = ""
    token_shift: bool = False
    compression: Compression = PUBLISHED_COMPRESSION

    def __post_init__(self) -> None:
        _check_text("prompt", self.prompt)
        if self.negative is not None:
            _check_text("negative", self.negative)
        for name in ("width", "height", "frames"):
            _check_whole(name, getattr(self, name), None, None)
        self.video.check(self.compression)
        _check_number("frame_rate", self.frame_rate, -math.inf, math.inf)
        check_frame_rate(self.frame_rate)
        _check_whole("seed", self.seed, 0, MOST_SEED)
        _check_whole("steps", self.steps, 1, MOST_STEPS)
        _check_number("eta", self.eta, 0.0, 1.0)
        sampler_of(self.sampler, self.schedule)
        self.noise_levels()
        for stream in ("video", "audio"):
            for scale in ("cfg", "stg", "modality", "rescale"):
                _check_number(f"{stream}_{scale}", getattr(self, f"{stream}_{scale}"), 0.0, 1.0 if scale == "rescale" else 100.0)
        _check_whole("skip_step", self.skip_step, 0, MOST_STEPS)
        if self.rule not in [rule.value for rule in TextRule]:
            raise InputError(f"rule '{self.rule}' is not one of {', '.join(rule.value for rule in TextRule)}.")
        _check_number("apg_eta", self.apg_eta, -10.0, 10.0)
        _check_number("apg_norm", self.apg_norm, 0.0, 100000.0)
        for name in ("guidance_start", "guidance_end"):
            _check_number(name, getattr(self, name), 0.0, 1.0)
        check_guidance(*self._by_sigma(self._guidance(frozenset())), self.negative is not None)

    @property
    def video(self) -> VideoShape:
        return VideoShape(self.frames, self.height, self.width)

    @property
    def audio(self) -> AudioLatentShape:
        return AudioLatentShape.of_clip(self.frames, self.frame_rate)

    def noise_levels(self) -> tuple[tuple[float, ...], str | None]:
        """The sigmas to run, and the schedule they are of: None for the user's own."""
        if self.sigmas is not None:
            return check_sigmas(self.sigmas), None
        if not self.token_shift:
            return sigmas_of(self.schedule, self.steps), self.schedule
        return sigmas_of(self.schedule, self.steps, self.video.latent(self.compression).tokens), self.schedule

    def guidance(self, blocks: int) -> tuple[Guidance, Guidance]:
        """How video and audio are guided in a model of `blocks` blocks; raises InputError when stg_blocks names another."""
        return self._guidance(parse_stg_blocks(self.stg_blocks, blocks))

    def guidance_by_sigma(self, blocks: int) -> tuple[Bins, Bins]:
        """`guidance` with its window and bins."""
        return self._by_sigma(self.guidance(blocks))

    def _by_sigma(self, guidance: tuple[Guidance, Guidance]) -> tuple[Bins, Bins]:
        video, audio = (
            by_sigma(one, name, self.bins, self.guidance_start, self.guidance_end) for name, one in zip(("video", "audio"), guidance, strict=True)
        )
        return video, audio

    def _guidance(self, stg_blocks: frozenset[int]) -> tuple[Guidance, Guidance]:
        shared = (stg_blocks, self.skip_step, TextRule(self.rule), self.apg_eta, self.apg_norm)
        return (
            Guidance(self.video_cfg, self.video_stg, self.video_modality, self.video_rescale, *shared),
            Guidance(self.audio_cfg, self.audio_stg, self.audio_modality, self.audio_rescale, *shared),
        )


def parse_sigmas(text: str) -> tuple[float, ...]:
    """Noise levels out of "1, 0.725, 0.42, 0". Raises InputError when one of them is not a number."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"sigmas '{text}' is not a list of numbers; write them like 1,0.725,0.42,0.") from None


def _check_text(name: str, value: str) -> None:
    if not isinstance(value, str):
        raise InputError(f"{name} is {type(value).__name__}, wanted text.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} holds half a character at position {error.start}; remove it or send the text as UTF-8.") from None


def _check_whole(name: str, value: int, least: int | None, most: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, wanted a whole number.")
    if (least is not None and value < least) or (most is not None and value > most):
        nearest = least if value < (least or 0) else most
        rule = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} {value} is out of range, wanted a whole number {rule}; use {nearest}.")


def _check_number(name: str, value: float, least: float, most: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise InputError(f"{name} is {value!r}, wanted a finite number.")
    if not least <= value <= most:
        raise InputError(f"{name} {value:g} is out of range, wanted {least:g} to {most:g}; use {least if value < least else most:g}.")
