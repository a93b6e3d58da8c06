"""Golden denoises and loops: their drafts, guidance and noise as our types, and a run of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ...ltx25 import conditions
from ...ltx25.denoise import ModelShape, drafts_of, job_of
from ...ltx25.dit import Contexts, Leg, Stream, Velocity
from ...ltx25.guidance import OFF, Bins, Guidance
from ...ltx25.instrument import Sink, Watch
from ...ltx25.latents import Draft
from ...ltx25.predictor import Denoise, StreamState
from ...ltx25.sampler import Euler, EulerAncestral, EulerCfgPlusPlus, GradientEstimation, Outcome, Res2s, denoise
from ...ltx25.shapes import PUBLISHED_COMPRESSION, AudioLatentShape, VideoLatentShape
from .golden_dit import value

CPU = torch.device("cpu")
TINY = ModelShape(12, 8, 2)
STREAMS = ("video", "audio")


def guidance_of(params: dict[str, Any]) -> Guidance:
    return Guidance(
        cfg=params["cfg_scale"],
        stg=params["stg_scale"],
        modality=params["modality_scale"],
        rescale=params["rescale_scale"],
        stg_blocks=frozenset(params.get("stg_blocks", ())),
        skip_step=params.get("skip_step", 0),
    )


def bins_of(case: dict[str, Any], stream: str) -> Bins:
    if f"{stream}_bins" in case:
        return Bins.of({float(bound): guidance_of(params) for bound, params in case[f"{stream}_bins"].items()})
    return Bins.constant(guidance_of(case[f"{stream}_guider"])) if f"{stream}_guider" in case else Bins.constant(OFF)


def sampler_of_case(spec: dict[str, Any]):
    return {
        "euler": lambda: Euler(),
        "euler_ancestral": lambda: EulerAncestral(spec["eta"], spec["s_noise"]),
        "gradient_estimation": lambda: GradientEstimation(spec["gamma"]),
        "euler_cfg_pp": lambda: EulerCfgPlusPlus(spec["eta"], spec["s_noise"]),
        "res_2s": lambda: Res2s(spec["eta"]),
    }[spec["name"]]()


def condition_of(item: dict[str, Any], stream: str, case: dict[str, Any]):
    strength = item.get("strength")
    match item["type"]:
        case "latent_index":
            return conditions.LatentIndex(value(item["latent"]), item["latent_idx"], strength)
        case "keyframe_index":
            return conditions.KeyframeIndex(value(item["latent"]), item["frame_idx"], strength, item["num_pixel_frames"])
        case "reference":
            return conditions.Reference(value(item["latent"]), strength, item["downscale_factor"], item["temporal_scale_factor"])
        case "attention_strength":
            return conditions.AttentionStrength(condition_of(item["item"], stream, case), item["attention"])
        case "reference_audio":
            return conditions.ReferenceAudio(case["reference_audio_latent"], strength)
        case "temporal_region":
            return conditions.TemporalRegions(stream, ((item["start_time"], item["end_time"]),))
        case "keep_mask":
            return conditions.KeepMask(value(item["latent"]), value(item["mask"])[0], strength)
        case "keyframe_slots":
            initial = item.get("initial_keyframes")
            return conditions.KeyframeSlots(tuple(item["pixel_frame_indices"]), None if initial is None else value(initial))
    raise AssertionError(f"unknown condition {item['type']}")


def drafts_of_case(case: dict[str, Any]) -> dict[str, Draft]:
    geometry, latents = case["geometry"], {}
    grids = {"video": (1, TINY.video_channels, *geometry["grid"]), "audio": (1, TINY.audio_channels, geometry["audio_tokens"], TINY.audio_bins)}
    items = []
    for stream in STREAMS:
        if f"{stream}_noise" not in case:
            latents[stream] = None
            continue
        latents[stream] = case.get(f"{stream}_initial_latent", torch.zeros(grids[stream]))
        items += [condition_of(item, stream, case) for item in case[f"{stream}_items"]]
        items += [conditions.Frozen(stream)] if case[f"{stream}_frozen"] else []
    return drafts_of(latents["video"], latents["audio"], TINY, geometry["fps"], PUBLISHED_COMPRESSION, conditions=items)


def start_of_case(case: dict[str, Any], drafts: dict[str, Draft]) -> dict[str, torch.Tensor]:
    return {name: draft.noised(case[f"{name}_noise"], case[f"{name}_noise_scale"]) for name, draft in drafts.items()}


def job_of_case(case: dict[str, Any], drafts: dict[str, Draft], batched: bool = False) -> Denoise:
    negative = None
    if "video_context_negative" in case or "audio_context_negative" in case:
        negative = Contexts(case.get("video_context_negative"), case.get("audio_context_negative"))
    return job_of(
        drafts,
        Contexts(case.get("video_context"), case.get("audio_context")),
        negative,
        {name: bins_of(case, name) for name in STREAMS},
        tuple(case["sigmas"].tolist()),
        sampler_of_case(case["sampler"]),
        blocks=4,
        batched=batched,
    )


def toy_job(case: dict[str, Any]) -> Denoise:
    """A loop case: tokens without geometry, cfg on where the sampler needs the negative leg."""
    states = {}
    for name in STREAMS:
        x = case[f"{name}_latent"]
        mask = case.get(f"{name}_denoise_mask", torch.ones(1, x.shape[1], 1))[0, :, 0]
        clean = case.get(f"{name}_clean_latent", torch.zeros_like(x))
        shape = VideoLatentShape(12, 3, 2, 4) if name == "video" else AudioLatentShape(8, 18, 2)
        states[name] = StreamState(clean, toy_stream(mask), shape)
    return Denoise(
        states,
        Contexts(None, None),
        Contexts(None, None) if case["sampler"]["name"] == "euler_cfg_pp" else None,
        {name: Bins.constant(OFF) for name in STREAMS},
        tuple(case["sigmas"].tolist()),
        sampler_of_case(case["sampler"]),
        blocks=3,
        batched=False,
    )


def toy_stream(mask: torch.Tensor) -> Stream:
    return Stream(torch.zeros(1, mask.shape[0], 2), mask, None, False, None)


class Toy:
    """x0 = 0.4 x + 0.6 target, negative leg 0.5 x + 0.3 target, as a velocity. Keeps what it was called with."""

    def __init__(self, targets: dict[str, torch.Tensor], blocks: int = 3, before: Callable[[int], None] = lambda call: None) -> None:
        self.targets, self.blocks, self.before = targets, blocks, before
        self.sigmas: list[float] = []
        self.seen: list[dict[str, torch.Tensor]] = []
        self.plans: list[Any] = []
        self.pauses: list[Any] = []

    def prepare(self, video, audio, device, dtype):
        return {"video": video, "audio": audio}

    def schedule_tables(self, geometry, sigmas, told):
        assert all(video == audio for video, audio in sigmas)
        return [sigma for sigma, _ in sigmas]

    def __call__(self, video, audio, geometry, sigma, positive, negative, plan, batched, pause, kept=None):
        self.before(len(self.seen))
        self.sigmas.append(sigma)
        self.seen.append({"video": video, "audio": audio})
        self.plans.append(plan)
        self.pauses.append(pause)
        for block in range(self.blocks):
            pause(block)
        return {leg: Velocity(*(self._velocity(name, x, geometry[name], sigma, leg) for name, x in (("video", video), ("audio", audio)))) for leg in plan.legs}

    def _velocity(self, name, x, stream, sigma, leg):
        if x is None:
            return None
        a, b = (0.5, 0.3) if leg is Leg.UNCOND else (0.4, 0.6)
        t = stream.mask[:, None] * sigma
        v = (x - (a * x + b * self.targets[name])) / torch.where(t > 0, t, torch.ones_like(t))
        return v


def draws_of(case: dict[str, Any]) -> Callable[[str], dict[str, torch.Tensor]]:
    """The case's own noise, in its order; asking for more than there is fails."""
    left = [case[name] for name in sorted(case) if name.startswith("draw_")]
    streams = [name for name in STREAMS if f"{name}_noise" in case or f"{name}_latent" in case]

    def draw(use: str) -> dict[str, torch.Tensor]:
        return {name: left.pop(0).float() for name in streams}

    draw.left = left
    return draw


class Recorder(Sink):
    """Keeps what a phase tells."""

    def __init__(self, wants_preview: bool = False, cancel_after: int | None = None) -> None:
        self.wants_preview = wants_preview
        self.cancel_after = cancel_after
        self.clock = time.monotonic
        self.told: list[tuple[int, str]] = []
        self.at: list[float] = []  # s of `clock`, per word
        self.previews: list[torch.Tensor] = []
        self.error: BaseException | None = None

    def check(self) -> None:
        if self.cancel_after is not None and len(self.told) >= self.cancel_after:
            raise KeyboardInterrupt("cancelled")

    def ticked(self, phase) -> None:
        self.told.append((phase.done, phase.text))
        self.at.append(self.clock())

    def closed(self, phase) -> None:
        self.error = phase.error

    def preview(self, latent: torch.Tensor) -> None:
        self.previews.append(latent)


def run_job(dit, job: Denoise, x, draw, sink: Recorder | None = None) -> Outcome:
    with Watch([sink] if sink else []).phase("sample", total=job.forwards, unit="forward") as phase:
        return denoise(dit, job, x, draw, phase, CPU, torch.float32)
