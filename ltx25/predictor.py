"""The guided x0 prediction of every model call of a denoise: its legs, its place in the schedule, masks, preview."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from ..kernels.guided_step import Guided, Keep, euler, guided_step
from .dit.kept_text import KeptTexts, StepTexts
from .dit.modality import Contexts, Leg, LegPlan, Stream, Velocity
from .flight import TELL, Flight, Pause
from .guidance import OFF, Bins, Guidance, TextRule, combine, plan_legs, pulls
from .instrument import Forwards, Group, Phase
from .instrument.work import group_kind
from .shapes import AudioLatentShape, VideoLatentShape

Tokens = dict[str, torch.Tensor]  # by stream name, "video" before "audio": (B, T, C)
Draw = Callable[[str], Tokens]  # noise for the tokens of all streams, for a "step" or a "substep"


class Transformer(Protocol):
    """What a denoise needs of the model (ltx25.dit)."""

    def prepare(self, video: Stream | None, audio: Stream | None, device: torch.device, dtype: torch.dtype) -> Any: ...

    def schedule_tables(self, geometry: Any, sigmas: Sequence[tuple[float, float]], told: Callable[[int], None]) -> Sequence[Any]: ...

    def __call__(
        self,
        video: torch.Tensor | None,
        audio: torch.Tensor | None,
        geometry: Any,
        tables: Any,
        positive: Contexts,
        negative: Contexts | None,
        plan: LegPlan,
        batched: bool,
        pause: Pause,
        kept: StepTexts | None = None,
    ) -> Mapping[Leg, Velocity]: ...


@dataclass(frozen=True)
class Call:
    """One call of the model. step: counted from 0, as shown; guided_as: the step and sigma that skip_step and bins go by."""

    sigma: float
    step: int
    guided_as: tuple[int, float]


@dataclass(frozen=True, eq=False)
class StreamState:
    """One stream as the sampler gets it: clean tokens (B, T, C) float32, its facts, its clip's shape (for the preview)."""

    clean: torch.Tensor
    stream: Stream
    shape: VideoLatentShape | AudioLatentShape


class Sampler(Protocol):
    """Goes from noise to latents by calls of the model (ltx25.sampler)."""

    uncond: bool  # reads the negative leg's own x0 at every call
    standard_noise: bool  # wants noise of mean 0 and deviation 1 in every sample (steps.standardise)
    unscaled: bool  # noise that is left stands in its result as it is, and is still to be written as the host writes it

    def calls(self, sigmas: Sequence[float]) -> tuple[Call, ...]:
        """The calls of a run over `sigmas`, in order."""

    def run(self, predict: Predictor, x: Tokens, sigmas: Sequence[float], draw: Draw) -> Tokens:
        """From the noised state to the result."""


@dataclass(frozen=True, eq=False)
class Course:
    """The model calls of a denoise and the legs of each, which need no latents: a plan reads them as a render does.

    guidance: by name of the streams that are there; frozen: names of those that are kept as given.
    """

    sampler: Sampler
    sigmas: tuple[float, ...]
    guidance: Mapping[str, Bins]
    frozen: frozenset[str]

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        return self.sampler.calls(self.sigmas)

    @cached_property
    def guided(self) -> tuple[dict[str, Guidance], ...]:
        """Per call. A frozen stream's x0 is its latent in every leg, so it has no guidance, as in the official audio-to-video pipeline.
        (The official guided retake leaves it on, and the other stream sees a kept one that is perturbed in the STG leg.)
        """
        return tuple(
            {name: OFF if name in self.frozen else bins.at(call.guided_as[1]) for name, bins in self.guidance.items()}
            for call in self.calls
        )

    @cached_property
    def plans(self) -> tuple[LegPlan | None, ...]:
        """Per call; None where no model runs because every stream that is made skips the step. What is kept needs no velocity."""
        return tuple(
            plan and replace(plan, read=plan.read - self.frozen, kept=False)
            for plan in (self._plan(call.guided_as[0], guided) for call, guided in zip(self.calls, self.guided, strict=True))
        )

    def _plan(self, step: int, guided: Mapping[str, Guidance]) -> LegPlan | None:
        """A frozen stream never skips, and alone it needs no forward. (The official audio-to-video loop runs one and reads nothing of it.)"""
        if all(guidance.skips(step) for name, guidance in guided.items() if name not in self.frozen):
            return None
        return plan_legs(guided.get("video"), guided.get("audio"), step, self.sampler.uncond)

    @property
    def forwards(self) -> int:
        return sum(len(plan.legs) for plan in self.plans if plan is not None)


@dataclass(frozen=True, eq=False)
class Denoise:
    """One denoise, complete but for noise and device: what is sampled, guided how, over which sigmas.

    states and guidance by stream name ("video", "audio"), for the streams that are there. sigmas fall from s0 in (0, 1].
    positive, negative: contexts on the model's device. negative: None where every cfg is 1. blocks: of the transformer.
    batched: legs as rows of one batch; else one after the other, bit for bit as if alone. loras: those on the transformer, as
    an error names them.
    """

    states: Mapping[str, StreamState]
    positive: Contexts
    negative: Contexts | None
    guidance: Mapping[str, Bins]
    sigmas: tuple[float, ...]
    sampler: Sampler
    blocks: int
    batched: bool
    loras: tuple[str, ...] = ()

    @cached_property
    def course(self) -> Course:
        return Course(self.sampler, self.sigmas, {name: self.guidance[name] for name in self.states}, self.frozen)

    @property
    def calls(self) -> tuple[Call, ...]:
        return self.course.calls

    @cached_property
    def frozen(self) -> frozenset[str]:
        return frozenset(name for name, state in self.states.items() if state.stream.frozen)

    @property
    def guided(self) -> tuple[dict[str, Guidance], ...]:
        return self.course.guided

    @property
    def plans(self) -> tuple[LegPlan | None, ...]:
        return self.course.plans

    @property
    def forwards(self) -> int:
        """What the sample phase counts."""
        return self.course.forwards


@dataclass(frozen=True, eq=False)
class Prediction:
    """x0: guided, kept tokens blended in. uncond: the negative leg's own x0, where the sampler reads it. stepped: the state
    after an Euler step, where one was asked for. Float32 tokens by stream.
    """

    x0: Tokens
    uncond: Tokens
    stepped: Tokens


class Predictor:
    """Called once per Call, in order. Tables for the whole schedule are made before the first one."""

    def __init__(self, dit: Transformer, job: Denoise, phase: Phase, device: torch.device, dtype: torch.dtype, prediction: str, known: dict[Hashable, float] | None = None, texts: KeptTexts | None = None, traced: Collection[int] = ()) -> None:
        """See sampler.denoise."""
        self._dit, self._job, self._phase, self._device = dit, job, phase, device
        self._negative = _negative(job.positive, job.negative, job.frozen)
        self._clean = {name: state.clean.to(device) for name, state in job.states.items()}
        self._masks = {name: state.stream.mask.to(device)[:, None] for name, state in job.states.items()}
        self._generates_all = {name: bool((state.stream.mask == 1).all()) for name, state in job.states.items()}
        self._texts = texts
        self._last: Tokens = {}
        self._next = 0
        streams = {name: state.stream for name, state in job.states.items()}
        self._geometry = dit.prepare(streams.get("video"), streams.get("audio"), device, dtype)
        self._tables = dit.schedule_tables(self._geometry, [(call.sigma, call.sigma) for call in job.calls], _preparing(phase, job.calls, prediction))
        run = [(call, plan) for call, plan in zip(job.calls, job.plans, strict=True) if plan is not None]
        groups = [Group(call.step + 1, tuple(leg.value for leg in plan.legs), group_kind(plan), n in traced) for n, (call, plan) in enumerate(run)]
        self.legs = tuple(group.legs for group in groups)
        self.flight = Flight(device, Forwards(phase, groups, prediction, max((call.step + 1 for call in job.calls), default=0)), job.blocks, {} if known is None else known)

    def __call__(self, x: Tokens, to: float | None = None) -> Prediction:
        """Predict from the state of the next call; to: also step there, the next sigma, by Euler."""
        index, self._next = self._next, self._next + 1
        plan, step = self._job.plans[index], None if to is None else (self._job.calls[index].sigma, to)
        if plan is None:
            every = {name: self._again(name, tokens, step) for name, tokens in x.items()}
            return _prediction(every, {})
        kind = (plan, self._job.batched, *(tuple(tokens.shape) for tokens in x.values()))
        return self.flight.launch(kind, lambda pause: self._group(index, plan, x, step, pause))

    def blend(self, x: Tokens) -> Tokens:
        """Pull tokens towards the clean ones by their mask: where it is 0 they become them."""
        return {name: self._blend(name, tokens) for name, tokens in x.items()}

    def keep(self, x: Tokens) -> Tokens:
        """Set tokens of mask 0 to the clean ones, bit for bit; the others stay."""
        return {
            name: tokens if self._generates_all[name] else torch.where(self._masks[name] == 0, self._clean[name], tokens)
            for name, tokens in x.items()
        }

    def _group(self, index: int, plan: LegPlan, x: Tokens, step: tuple[float, float] | None, pause: Pause):
        job, sigma = self._job, self._job.calls[index].sigma
        velocities = self._dit(
            x.get("video"), x.get("audio"), self._geometry, self._tables[index], job.positive, self._negative, plan, job.batched, pause, self._kept(sigma)
        )
        every, uncond = {}, {}
        for name, tokens in x.items():
            if name in job.frozen:
                uncond[name] = self._clean[name]
                every[name] = self._again(name, tokens, step)
                continue
            t = self._masks[name] * sigma  # (T, 1)
            run = {leg: getattr(velocities[leg], name) for leg in plan.legs}
            run = {leg: velocity for leg, velocity in run.items() if velocity is not None}
            if getattr(plan, name):
                every[name] = self._guided(name, tokens, t, run, job.guided[index][name], step)
                self._last[name] = every[name].guided
            else:
                every[name] = self._again(name, tokens, step)
            if job.sampler.uncond:
                uncond[name] = tokens - t * run[Leg.UNCOND].to(tokens.dtype)
        made = _prediction(every, uncond)
        return made, self._preview(index, made.x0)

    def _guided(self, name: str, x: torch.Tensor, t: torch.Tensor, run: Mapping[Leg, torch.Tensor], guidance: Guidance, step: tuple[float, float] | None) -> Guided:
        """What the legs of one stream give."""
        parts = pulls(guidance, run)
        if guidance.rule is TextRule.CFG or not guidance.needs_uncond:
            return guided_step(x, t, run[Leg.COND], [(weight, run[leg]) for leg, weight in parts], guidance.rescale, self._keep_of(name), step)
        guided = combine(guidance, {leg: x - t * velocity.to(x.dtype) for leg, velocity in run.items()})
        return self._onward(name, x, guided, step)

    def _again(self, name: str, x: torch.Tensor, step: tuple[float, float] | None) -> Guided:
        """The last guided x0 for the state there is now; of a frozen stream its latent."""
        if name in self._job.frozen:
            clean = self._clean[name]
            return Guided(clean, clean, None if step is None else euler(x, clean, *step))
        return self._onward(name, x, self._last[name], step)

    def _onward(self, name: str, x: torch.Tensor, guided: torch.Tensor, step: tuple[float, float] | None) -> Guided:
        x0 = self._blend(name, guided)
        return Guided(guided, x0, None if step is None else euler(x, x0, *step))

    def _keep_of(self, name: str) -> Keep | None:
        return None if self._generates_all[name] else Keep(self._masks[name], self._clean[name])

    def _kept(self, sigma: float) -> StepTexts | None:
        if self._texts is None:
            return None
        return StepTexts(*(self._texts.at(name, 0.0 if name in self._job.frozen else sigma) for name in ("video", "audio")))

    def _blend(self, name: str, tokens: torch.Tensor) -> torch.Tensor:
        if self._generates_all[name]:
            return tokens
        mask = self._masks[name]
        return tokens * mask + self._clean[name] * (1 - mask)

    def _preview(self, index: int, x0: Tokens):
        """Queue the copy of a step's first video x0 to the host; the returned call hands it on once it is there."""
        watch, calls = self._phase.watch, self._job.calls
        first = index == 0 or calls[index - 1].step != calls[index].step
        if not (first and "video" in x0 and watch.wants_preview):
            return None
        shape = self._job.states["video"].shape
        picture = x0["video"][0, : shape.tokens]
        if self._device.type == "cuda":
            picture = torch.empty(picture.shape, dtype=picture.dtype, pin_memory=True).copy_(picture, non_blocking=True)
            self._phase.moved(d2h=picture.nbytes)
        else:
            picture = picture.cpu()
        return lambda: watch.preview(picture.unflatten(0, (shape.frames, shape.height, shape.width)))


def _preparing(phase: Phase, calls: Sequence[Call], prediction: str) -> Callable[[int], None]:
    """For schedule_tables: tells how many steps are prepared, where that takes a while, and lets a cancel act."""
    told, behind = time.monotonic(), f" - {prediction}" if prediction else ""

    def made(count: int) -> None:
        nonlocal told
        if time.monotonic() - told < TELL:
            phase.watch.check()
            return
        told = time.monotonic()
        phase.within(f"preparing {calls[count - 1].step + 1}/{calls[-1].step + 1} steps{behind}")

    return made


def _prediction(every: Mapping[str, Guided], uncond: Tokens) -> Prediction:
    return Prediction({name: made.x0 for name, made in every.items()}, uncond, {name: made.state for name, made in every.items() if made.state is not None})


def _negative(positive: Contexts, negative: Contexts | None, frozen: frozenset[str]) -> Contexts | None:
    """A frozen stream reads the positive text in the negative leg too, as in the official audio-to-video pipeline (not its retake)."""
    if negative is None:
        return None
    return Contexts(
        positive.video if "video" in frozen or negative.video is None else negative.video,
        positive.audio if "audio" in frozen or negative.audio is None else negative.audio,
    )
