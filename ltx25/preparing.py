"""From a job to a checked plan of its steps, and what can be told of it before any weight is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .conditions import HeldTo
from .config.dit import KEYFRAMES
from .connector import Conditioning, context_length
from .denoise import ModelShape, drafts_of, job_of
from .dit.modality import Contexts, Leg
from .errors import InputError
from .guidance import check_guidance
from .instrument.work import is_adapted, sample_work
from .job import SampleJob
from .latents import COPIES, Draft
from .lora import Lora
from .parts import Opened
from .plausible import doubts
from .predictor import Denoise
from .replay import graphs_wanted
from .room import check_host_room
from .sampler import check_job, sampler_of
from .schedule import STAGE_2, check_sigmas

REFINES = 0.97  # first noise levels below it keep something of the latent; those of rounds, the highest official ones, begin at 0.975


@dataclass(frozen=True)
class Prepared:
    """A checked job: drafts by stream, the denoise with contexts still on the CPU, what to tell the user."""

    drafts: dict[str, Draft]
    job: Denoise
    notices: tuple[str, ...]

    @property
    def tokens(self) -> dict[str, int]:
        """By stream."""
        return {name: draft.tokens for name, draft in self.drafts.items()}

    @property
    def batch(self) -> int:
        return len(next(iter(self.drafts.values())).latent)

    def doubts(self, video: torch.Tensor | None) -> tuple[str, ...]:
        """About a result that was made whole: from noise to the end, nothing of it given."""
        draft, sigmas = self.drafts.get("video"), self.job.sigmas
        whole = draft is not None and not draft.frozen and sigmas[-1] == 0 and bool((draft.mask[: draft.shape.tokens] == 1).all())
        return doubts(video, self.job.loras) if whole and video is not None else ()

    def on(self, device: torch.device, dtype: torch.dtype, batched: bool) -> Prepared:
        """The same with its contexts on a device, to run legs side by side or not."""
        job = self.job

        def move(contexts: Contexts | None) -> Contexts | None:
            if contexts is None:
                return None
            return Contexts(*(None if c is None else c.to(device, dtype) for c in (contexts.video, contexts.audio)))

        return replace(self, job=replace(job, positive=move(job.positive), negative=move(job.negative), batched=batched))


def prepare(job: SampleJob, opened: Opened, batched: bool, loras: Sequence[Lora]) -> Prepared:
    """Check a job for a model with `loras`.

    Raises InputError for one that the files' model cannot run, or whose latents the host has no room to copy.
    """
    _check_latents(job)
    config, vae = opened.dit, opened.audio.vae
    model = ModelShape(config.in_channels, vae.latent_channels, vae.latent_bins)
    drafts = drafts_of(
        job.video, job.audio, model, job.frame_rate, opened.video.compression, job.video_mask, job.audio_mask, job.conditions
    )
    guidance = {name: getattr(job, f"{name}_guidance") for name in drafts}
    frozen = [name for name, draft in drafts.items() if draft.frozen]
    sampler = sampler_of(job.sampler, job.schedule, job.eta) if isinstance(job.sampler, str) else job.sampler
    notices = check_guidance(guidance.get("video"), guidance.get("audio"), job.negative is not None, frozen, sampler.uncond)
    plan = job_of(
        drafts,
        _contexts_of(job.positive, drafts),
        None if job.negative is None else _contexts_of(job.negative, drafts),
        guidance,
        check_sigmas(job.sigmas),
        sampler,
        config.layers,
        batched,
    )
    plan = replace(plan, loras=tuple(f"{lora.header.name} ({lora.strength:g})" for lora in loras if lora.strength))
    check_job(plan)
    _check_parts(drafts, plan, job)
    if not config.keyframe_embedding and any(draft.slots is not None for draft in drafts.values()):  # as officially: it could not tell slots from the clip
        raise InputError(f"{opened.headers['transformer'].name} has no {KEYFRAMES}, without which no keyframes are made; use the published file, or leave LTX-2.5 Keyframe Slots out.")
    prompts = (*job.positive.notices, *(f"negative {notice}" for notice in (job.negative.notices if job.negative else ())))
    return Prepared(drafts, plan, (*prompts, *notices, *_recipe_notices(opened.headers["transformer"].name, job, plan, loras), *_unreached(plan), *_nothing_to_refine(drafts, plan), *_noise_left(plan)))


def facts_of(ready: Prepared, seed: int, opened: Opened, device: torch.device, streams: bool, loras: Sequence[Lora]) -> dict[str, object]:
    """Tokens, steps, legs (those that some step runs), forwards and the arithmetic of each kind of group. streams: blocks take turns on the device."""
    plan = ready.job
    text = next((context.shape[1] for context in (plan.positive.video, plan.positive.audio) if context is not None and context.dim() == 3), 0)
    ran = {leg for legs in plan.plans if legs is not None for leg in legs.legs}
    how = {
        "precision": opened.precision,
        "residency": "stream" if streams else "resident",
        "batched": plan.batched,
        "graphs": graphs_wanted(device) and not streams,
        **({"kernels": "reference"} if device.type == "cuda" and os.environ.get("LTX25_KERNELS") == "reference" else {}),
        **({"loras": [str(lora) for lora in loras]} if loras else {}),
        **({"adapted": True} if is_adapted(any(lora.strength for lora in loras), streams, opened.precision) else {}),
        **({"masked": True} if any(draft.attention is not None for draft in ready.drafts.values()) else {}),
    }
    return {
        "tokens": ready.tokens,
        "steps": len(plan.sigmas) - 1,
        "legs": [leg.value for leg in Leg if leg in ran],
        "forwards": plan.forwards,
        "sampler": type(plan.sampler).__name__,
        "seed": seed,
        **sample_work(opened.dit, plan.plans, ready.tokens, text or context_length(0), ready.batch, **how),
    }


def _check_latents(job: SampleJob) -> None:
    """Raise InputError where the host has no room for what sampling makes of the latents."""
    latents = [latent for latent in (job.video, job.audio) if latent is not None]

    def advice(share: float) -> str:
        return f"make the clip smaller or shorter, to about {100 * share:.0f} % of its size"

    check_host_room("sampling this latent", COPIES * 4 * sum(latent.numel() for latent in latents), advice)


def _check_parts(drafts: Mapping[str, Draft], plan: Denoise, job: SampleJob) -> None:
    """Raise InputError for what would be lost between the parts of a sampling: the state of keyframes, and what a mask between
    0 and 1 holds the clip to, where nothing brings it along (HeldTo); and for a part that has none before it."""
    if (plan.sigmas[-1] > 0 or not job.add_noise) and any(draft.slots is not None for draft in drafts.values()):
        raise InputError("keyframes are made in one sampling: let the noise levels end with 0 and add_noise on, or leave LTX-2.5 Keyframe Slots out.")
    if not job.add_noise and plan.sigmas[0] == 1.0:
        raise InputError("add_noise is off and the noise levels begin at 1, where nothing of a latent is left to go on from; begin them where those of the sampler before ended, or turn add_noise on.")
    for name, draft in drafts.items():
        if not job.add_noise and draft.makes and not bool(draft.latent[:, : draft.shape.tokens].any()):
            raise InputError(f"add_noise is off and the {name} of the latent is empty, so there is no noise in it to go on from; connect what a sampler left whose noise levels ended above 0, or turn add_noise on.")
        held = draft.mask[: draft.shape.tokens]
        brought = any(isinstance(item, HeldTo) and item.stream == name for item in job.conditions)
        if not job.add_noise and not draft.frozen and not brought and bool(((held > 0) & (held < 1) & ~draft.pinned).any()):
            raise InputError(
                f"the noise mask of the {name} has values between 0 and 1, and the clip that they hold to is no longer there once noise is left in it; "
                "let LTX-2.5 Sampler run the first part as well, or one sampler all noise levels."
            )


def _contexts_of(conditioning: Conditioning, drafts: Mapping[str, Draft]) -> Contexts:
    return Contexts(conditioning.video if "video" in drafts else None, conditioning.audio if "audio" in drafts else None)


def _unreached(plan: Denoise) -> list[str]:
    """Of guidance whose window lies between two noise levels: it costs nothing and does nothing. One of levels that another part
    of the sampling has is not meant for this one."""
    first, last = plan.sigmas[0], plan.sigmas[-1]
    names = [
        name
        for name, bins in plan.course.guidance.items()
        if name not in plan.frozen and any(bins.at(min(bound, first)).guides for bound, _ in bins.bins if bound > last) and not any(at[name].guides for at in plan.guided)
    ]
    if not names:
        return []
    return [f"the guidance of the {' and the '.join(names)} has no effect, because no step begins at a noise level for which it is set; see guidance_start, guidance_end and bins, or use more steps."]


def _nothing_to_refine(drafts: Mapping[str, Draft], plan: Denoise) -> list[str]:
    """Levels that begin below 1 take over the rest from the latent: of zeros nothing but a pale clip comes out. (Without fresh
    noise not even that: _check_parts refuses it.)"""
    if plan.sigmas[0] >= REFINES:
        return []
    begin, notices = f"the noise levels begin at {plan.sigmas[0]:.3g}, as for a clip that is refined, and", []
    empty = [name for name, draft in drafts.items() if draft.makes and not bool(draft.latent[:, : draft.shape.tokens].any())]
    if empty:
        notices.append(f"{begin} the {' and the '.join(empty)} of the latent {'is' if len(empty) == 1 else 'are'} empty: connect a latent that holds {'it' if len(empty) == 1 else 'them'}, or begin at 1, with schedule ltx2 or distilled.")
    slots = [draft.latent[:, one.first : one.first + one.count * one.tokens] for draft in drafts.values() if (one := draft.slots) is not None]
    if any(not bool(start.any()) for start in slots):
        notices.append(f"{begin} its keyframe slots start from nothing: connect the keyframes of the first stage to LTX-2.5 Keyframe Slots.")
    return notices


def _noise_left(plan: Denoise) -> list[str]:
    if plan.sigmas[-1] == 0 or not plan.sampler.unscaled:  # a host's sampler has its own chain
        return []
    return [f"the noise levels end at {plan.sigmas[-1]:g}: that much noise is left in the clip; go on with a sampler whose levels begin there and whose add_noise is off, or end them with 0."]


def _recipe_notices(name: str, job: SampleJob, plan: Denoise, loras: Sequence[Lora]) -> list[str]:
    """Dev and distilled files differ in nothing but their weights: only the file's name tells that the recipe is the other's."""
    if "distilled" not in name:
        refines = job.schedule == STAGE_2 and not any(lora.strength for lora in loras)
        return [f"{name} is a dev file by its name, and schedule '{STAGE_2}' is for the distilled file, or for this one with the distilled LoRA."] if refines and "-dev-" in name else []
    notices = []
    if job.schedule == "ltx2":
        notices.append(f"{name} is a distilled file by its name: schedule 'distilled' is its own, 'ltx2' is for the dev file.")
    if any(legs is not None and len(legs.legs) > 1 for legs in plan.plans):
        notices.append(f"{name} is a distilled file by its name and wants no guidance: set cfg and modality to 1 and stg to 0.")
    return notices
