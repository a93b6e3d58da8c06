"""Guidance: which forwards a step needs, and how their x0 predictions mix. Per stream, as ltx_core's MultiModalGuider.

    guided = c + (cfg - 1)(c - u) + stg (c - p) + (modality - 1)(c - m);  guided *= rescale * std(c) / std(guided) + 1 - rescale

c positive text, u negative text, p self-attention perturbed in some blocks (STG), m streams isolated from each other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch

from ..kernels.guided_step import mixed
from .dit.modality import BOTH, Leg, LegPlan
from .errors import InputError


class TextRule(Enum):
    """How the text term is formed from c - u. The pipelines use CFG; the others are ltx_core's further guiders."""

    CFG = "cfg"
    STAR = "cfg_star"  # u is first scaled to its projection on c
    APG = "apg"  # the part of c - u along c is weighted by apg_eta, the norm of c - u is held below apg_norm


@dataclass(frozen=True)
class Guidance:
    """The guidance of one stream. cfg and modality 1, stg and rescale 0 mean off.

    stg_blocks: 0-based blocks whose self-attention of this stream is perturbed; none: the stream is not perturbed.
    skip_step: n > 0: only every (n + 1)th step is computed, the others use its guided x0 again.
    apg_eta, apg_norm: read by TextRule.APG alone; a norm of 0 is no limit.
    """

    cfg: float
    stg: float
    modality: float
    rescale: float
    stg_blocks: frozenset[int]
    skip_step: int
    rule: TextRule = TextRule.CFG
    apg_eta: float = 1.0
    apg_norm: float = 0.0

    @property
    def needs_uncond(self) -> bool:
        return not math.isclose(self.cfg, 1.0)

    @property
    def needs_stg(self) -> bool:
        return not math.isclose(self.stg, 0.0)

    @property
    def needs_isolated(self) -> bool:
        return not math.isclose(self.modality, 1.0)

    @property
    def guides(self) -> bool:
        """Whether it asks for any forward beside the first."""
        return self.needs_uncond or self.needs_stg or self.needs_isolated

    def skips(self, step: int) -> bool:
        """Whether step `step` (from 0) uses the last guided x0 again."""
        return self.skip_step > 0 and step % (self.skip_step + 1) != 0


OFF = Guidance(cfg=1.0, stg=0.0, modality=1.0, rescale=0.0, stg_blocks=frozenset(), skip_step=0)

# ltx_pipelines.utils.constants, row "2.4 and 2.5", and the HQ preset (three legs, for res_2s).
VIDEO = Guidance(cfg=3.0, stg=1.0, modality=3.0, rescale=0.7, stg_blocks=frozenset({28}), skip_step=0)
AUDIO = replace(VIDEO, cfg=7.0)
HQ_VIDEO = Guidance(cfg=3.0, stg=0.0, modality=3.0, rescale=0.45, stg_blocks=frozenset(), skip_step=0)
HQ_AUDIO = replace(HQ_VIDEO, cfg=7.0, rescale=1.0)


@dataclass(frozen=True)
class Bins:
    """Guidance of one stream by noise level: (upper bound, guidance), bounds falling; a bin is (next bound, bound].

    A sigma above every bound belongs to the first bin (ltx_core MultiModalGuiderFactory).
    """

    bins: tuple[tuple[float, Guidance], ...]

    @staticmethod
    def constant(guidance: Guidance) -> Bins:
        return Bins(((math.inf, guidance),))

    @staticmethod
    def of(by_sigma: Mapping[float, Guidance]) -> Bins:
        """From a mapping of upper bounds; raises InputError when empty."""
        if not by_sigma:
            raise InputError("guidance by sigma has no entries; give at least one, for example {1.0: guidance}.")
        return Bins(tuple(sorted(by_sigma.items(), key=lambda item: item[0], reverse=True)))

    @staticmethod
    def window(guidance: Guidance, start: float, end: float) -> Bins:
        """`guidance` for sigma in (end, start], none outside. Raises InputError unless 0 <= end < start."""
        if not 0.0 <= end < start:
            raise InputError(f"guidance from sigma {start:g} down to {end:g} is an empty window; start must be above end, for example 1.0 and 0.2.")
        return Bins(((math.inf, OFF), (start, guidance), (end, OFF)))

    def at(self, sigma: float) -> Guidance:
        return [guidance for bound, guidance in self.bins if bound >= sigma][-1] if self.bins[0][0] >= sigma else self.bins[0][1]

    def __iter__(self):
        return (guidance for _, guidance in self.bins)


def plan_legs(video: Guidance | None, audio: Guidance | None, step: int, uncond: bool = False) -> LegPlan | None:
    """The forwards of step `step` (from 0); None when both streams use their last guided x0 again.

    video, audio: None for a stream that is not there; without a second stream there is nothing to isolate from, and the
    isolated leg, equal to COND bit for bit, is left out. uncond: run that leg at cfg 1 too (CFG++).
    A leg runs when a stream that is not skipped has a use for it. STG is left out when it would perturb nothing: the
    official code runs it for an empty block list, equal to COND bit for bit. The isolated leg is run for the streams that
    use it: the other one is not seen there.
    """
    here = {name: guidance for name, guidance in (("video", video), ("audio", audio)) if guidance is not None}
    active = {name: guidance for name, guidance in here.items() if not guidance.skips(step)}
    if not active:
        return None
    perturbed = {name: g.stg_blocks if g.needs_stg else frozenset() for name, g in active.items()}
    legs = [Leg.COND]
    if uncond or any(g.needs_uncond for g in active.values()):
        legs.append(Leg.UNCOND)
    if any(perturbed.values()):
        legs.append(Leg.STG)
    isolated = BOTH
    if len(here) == 2 and any(g.needs_isolated for g in active.values()):
        legs.append(Leg.ISOLATED)
        isolated = frozenset(name for name, g in active.items() if g.needs_isolated)
    return LegPlan(
        legs=tuple(legs),
        stg_video_blocks=perturbed.get("video", frozenset()),
        stg_audio_blocks=perturbed.get("audio", frozenset()),
        video="video" in active or video is None,
        audio="audio" in active or audio is None,
        isolated=isolated,
    )


def combine(guidance: Guidance, x0: Mapping[Leg, torch.Tensor]) -> torch.Tensor:
    """Mix the x0 predictions (B, T, C) of one stream's legs; float32, or float64 when they are.

    A leg that did not run has no part. The deviations of the rescale are taken per sample over all tokens, conditioning
    tokens included; the official code takes one over the whole batch, which differs only for batch > 1 and would make
    an item depend on its neighbours. No leg but COND: COND, unscaled.
    """
    wide = {leg: value if value.dtype == torch.float64 else value.float() for leg, value in x0.items()}
    cond = wide[Leg.COND]
    terms = []
    for leg, weight in pulls(guidance, wide):
        plain = leg is not Leg.UNCOND or guidance.rule is TextRule.CFG
        terms.append(weight * (cond - wide[leg]) if plain else _text_term(guidance, cond, wide[leg]))
    return mixed(cond, terms, guidance.rescale)


def pulls(guidance: Guidance, legs: Collection[Leg]) -> list[tuple[Leg, float]]:
    """Which of the `legs` that ran have a part beside COND, in the order they are summed, and how much of (c - leg)."""
    every = (
        (Leg.UNCOND, guidance.needs_uncond, guidance.cfg - 1),
        (Leg.STG, guidance.needs_stg, guidance.stg),
        (Leg.ISOLATED, guidance.needs_isolated, guidance.modality - 1),
    )
    return [(leg, weight) for leg, needed, weight in every if needed and leg in legs]


def _text_term(guidance: Guidance, cond: torch.Tensor, uncond: torch.Tensor) -> torch.Tensor:
    """Of the rules that are no multiple of c - u."""
    if guidance.rule is TextRule.STAR:
        return (guidance.cfg - 1) * (cond - _projection(cond, uncond) * uncond)
    delta = cond - uncond
    if guidance.apg_norm > 0:
        norm = torch.linalg.vector_norm(delta, dim=(-2, -1), keepdim=True)
        delta = delta * (guidance.apg_norm / norm).clamp(max=1.0)
    along = _projection(delta, cond) * cond
    return (guidance.cfg - 1) * (guidance.apg_eta * along + (delta - along))


def _projection(of: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
    """Coefficient (B, 1, 1) of `of` along `onto`, per sample. The official one is [B, 1], right for batch 1 alone."""
    dot = (of * onto).sum(dim=(-2, -1), keepdim=True)
    return dot / ((onto * onto).sum(dim=(-2, -1), keepdim=True) + 1e-8)


def parse_stg_blocks(text: str, blocks: int) -> frozenset[int]:
    """Block numbers from a widget: "28", "0, 28", "" (none). Raises InputError for anything a model of `blocks` blocks lacks."""
    wanted = f"wanted numbers from 0 to {blocks - 1} with commas between, such as {min(28, blocks - 1)}"
    found = set()
    for part in (part.strip() for part in text.split(",")) if text.strip() else ():
        if not (part.isascii() and part.isdigit()):
            raise InputError(f"stg_blocks '{text}' has '{part}' in it; {wanted}.")
        if int(part) >= blocks:
            raise InputError(f"stg_blocks '{text}' names block {int(part)}, which this model does not have; {wanted}.")
        found.add(int(part))
    return frozenset(found)


def check_negative(video: Bins, audio: Bins) -> None:
    """Raise InputError for guidance that needs a negative prompt whichever stream is made, where there is none: what check_guidance
    finds out once the streams are known, before that."""
    needing = [(name, guidance) for name, bins in (("video", video), ("audio", audio)) for guidance in bins if guidance.needs_uncond]
    if len({name for name, _ in needing}) == 2:
        raise _no_negative(*needing[0])


def _no_negative(name: str, guidance: Guidance) -> InputError:
    return InputError(f"{name}_cfg is {guidance.cfg:g} but there is no negative prompt; connect `negative`, or set video_cfg and audio_cfg to 1, in bins as well.")


def check_guidance(video: Bins | None, audio: Bins | None, negative: bool, frozen: Collection[str] = (), uncond: bool = False) -> list[str]:
    """Raise InputError for guidance that cannot be run; return notices about settings that have no effect.

    video, audio: None for a stream that is not there. negative: whether a negative prompt is given. frozen: names of
    streams that are kept as given, to which no guidance applies. uncond: the sampler reads the negative leg whatever cfg is.
    """
    streams = {name: bins for name, bins in (("video", video), ("audio", audio)) if bins is not None}
    every = [(name, guidance) for name, bins in streams.items() if name not in frozen for guidance in bins]
    for name, guidance in every:
        for field in ("cfg", "stg", "modality", "rescale", "apg_eta", "apg_norm"):
            value = getattr(guidance, field)
            if not math.isfinite(value):
                said = field if field.startswith("apg") else f"{name}_{field}"
                raise InputError(f"{said} is {value}, wanted a finite number; {getattr(OFF, field):g} turns it off.")
        if guidance.skip_step < 0:
            raise InputError(f"skip_step is {guidance.skip_step}, wanted 0 (compute every step) or more.")
        if guidance.needs_uncond and not negative:
            raise _no_negative(name, guidance)
    notices = []
    if negative and not uncond and not any(guidance.needs_uncond for _, guidance in every):
        notices.append("The negative prompt has no effect, because cfg is 1; raise video_cfg or audio_cfg to use it.")
    for name in streams:
        mine = [guidance for stream, guidance in every if stream == name and guidance.needs_stg]
        if mine and not any(guidance.stg_blocks for guidance in mine):
            notices.append(f"{name}_stg is {mine[0].stg:g} but stg_blocks is empty, so no attention of the {name} is perturbed; 28 is the usual block of the published model.")
    if len(streams) == 1 and any(guidance.needs_isolated for _, guidance in every):
        (name,) = streams
        notices.append(f"{name}_modality has no effect: there is no second stream to isolate the {name} from.")
    return notices
