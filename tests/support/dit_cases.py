"""One forward of a golden case through the transformer: streams, contexts and plan from the case's inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...ltx25.dit import Contexts, DiT, Geometry, Leg, LegPlan, StepTables, Stream, Velocity


@dataclass(frozen=True)
class Forward:
    """Arguments of DiT.forward for one batch row of a case."""

    video: torch.Tensor | None
    audio: torch.Tensor | None
    geometry: Geometry
    tables: StepTables
    positive: Contexts

    def run(self, dit: DiT, plan: LegPlan, negative: Contexts | None = None, batched: bool = False) -> dict[Leg, Velocity]:
        return dit(
            self.video, self.audio, self.geometry, self.tables, self.positive, negative, plan, batched, lambda _: None
        )


def forward_of(dit: DiT, case: dict[str, Any], row: int = 0) -> Forward:
    """Row `row` of a case's batch, as a batch of one."""
    dtype = dit.patchify_proj.weight.dtype
    streams = {name: stream_of(case, name, row) for name in ("video", "audio")}
    geometry = dit.prepare(streams["video"], streams["audio"], torch.device("cpu"), dtype)
    sigmas = [float(case[f"{name}_sigma"][row]) if f"{name}_sigma" in case else 0.0 for name in ("video", "audio")]
    part = {name: case[name][row : row + 1] if name in case else None for name in ("video_latent", "audio_latent", "video_context", "audio_context")}
    return Forward(
        part["video_latent"],
        part["audio_latent"],
        geometry,
        dit.tables(geometry, *sigmas),
        Contexts(part["video_context"], part["audio_context"]),
    )


def stream_of(case: dict[str, Any], name: str, row: int = 0) -> Stream | None:
    """The stream whose mask * sigma are the case's timesteps; an attention strength becomes its logarithm."""
    if f"{name}_latent" not in case:
        return None
    sigma, timesteps = case[f"{name}_sigma"][row], case[f"{name}_timesteps"][row, :, 0]
    mask = _mask(timesteps, sigma)
    marked, strength = case.get(f"{name}_keyframes_mask"), case.get(f"{name}_attention_mask")
    return Stream(
        positions=case[f"{name}_positions"][row],
        mask=mask,
        marked=None if marked is None else marked[row, :, 0] > 0,
        frozen=bool(sigma == 0),
        bias=None if strength is None else torch.log(strength[row]).clamp(min=torch.finfo(torch.float32).min),
    )


def _mask(timesteps: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The float32 mask whose product with sigma is exactly `timesteps`."""
    if sigma == 0:
        assert not timesteps.any()
        return torch.zeros_like(timesteps)
    mask = timesteps / sigma
    for step in (torch.inf, -torch.inf):
        other = torch.nextafter(mask, torch.full_like(mask, step))
        mask = torch.where((mask * sigma != timesteps) & (other * sigma == timesteps), other, mask)
    assert torch.equal(mask * sigma, timesteps)
    return mask


def plan_of(case: dict[str, Any], leg: Leg) -> LegPlan:
    """The plan that runs `leg` alone, perturbed as the case says."""
    perturbation = case.get("perturbation", {})
    return LegPlan(
        legs=(leg,),
        stg_video_blocks=frozenset(perturbation.get("skip_video_self_attn_blocks", ())),
        stg_audio_blocks=frozenset(perturbation.get("skip_audio_self_attn_blocks", ())),
        video=case.get("video_enabled", True),
        audio=case.get("audio_enabled", True),
    )


def leg_of(case: dict[str, Any], row: int = 0) -> Leg:
    """Which of our legs a batch row of the case is."""
    perturbation = case.get("perturbation")
    if perturbation is None or (perturbation["samples"] != "all" and row not in perturbation["samples"]):
        return Leg.COND
    return Leg.ISOLATED if perturbation["skip_a2v_and_v2a_everywhere"] else Leg.STG
