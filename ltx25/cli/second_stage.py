"""The second stage of `ltx25 render --upscaler`: checked before the first one starts, run after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint import Header
from ..conditions import Condition
from ..config.upscaler import UpscalerConfig
from ..engine import Engine, Sampled, SampleJob
from ..errors import InputError
from ..instrument import Watch
from ..latents import empty_latents
from ..request import Request
from ..stages import first_request, refinement


@dataclass(frozen=True)
class SecondStage:
    """engine: the render's, with the LoRAs of this stage. keeps_sound: that of the first stage goes out."""

    engine: Engine
    file: Path
    header: Header
    config: UpscalerConfig
    keeps_sound: bool

    @staticmethod
    def of(upscaler: Path | None, loras: Sequence[tuple[Path, float]], engine: Engine) -> SecondStage | None:
        """None for a render in one stage. Reads headers. Raises FileError for a wrong file, InputError for a LoRA of no stage."""
        if upscaler is None:
            if loras:
                raise InputError("--stage2-lora is for the second of two stages; name the upscaler between them by --upscaler, or use --lora.")
            return None
        header, config = engine.upscaler(upscaler)
        keeps_sound = bool(loras)  # as officially where this stage alone is distilled: the guided sound is the better one
        return SecondStage(engine.with_loras(loras) if loras else engine, upscaler, header, config, keeps_sound)

    def first(self, request: Request) -> Request:
        """What the first stage is asked for, so that the request's size comes out. Raises InputError for a size that cannot."""
        return first_request(request, self.config)

    @property
    def settings(self) -> dict[str, object]:
        """What was asked for beside the settings of a render in one stage, for the record."""
        return {"upscaler": self.header.name, "stage2_loras": [str(lora) for lora in self.engine.loras]}

    def facts(self, request: Request, first: SampleJob) -> dict[str, object]:
        """What this stage will run, as engine.facts; raises InputError as that does, for want of memory, too."""
        video, audio = empty_latents(request.video, request.frame_rate, len(first.audio), request.compression)
        return self.engine.facts(refinement(first, video, audio))

    def refine(self, job: SampleJob, small: Sampled, conditions: tuple[Condition, ...], watch: Watch) -> Sampled:
        """The clip of the first stage, of `job`, at its own size. conditions: of this stage, encoded at that size."""
        large = self.engine.upscale(small.video, self.file, watch)
        clip = self.engine.sample(refinement(job, large, small.audio, conditions), watch)
        sound = small.audio if self.keeps_sound else clip.audio
        return replace(clip, audio=sound, notices=(*small.notices, *clip.notices))
