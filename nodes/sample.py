"""LTX25Sampler: a guider and a latent -> a clip's latent, and the table of what ran."""

from __future__ import annotations

from collections import Counter
from typing import Any

from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker

from ..ltx25.conditions import HeldTo, KeyframeSlots
from ..ltx25.engine import Engine, Sampled, SampleJob
from ..ltx25.errors import InputError
from ..ltx25.instrument.units import path_text
from ..ltx25.sampler import SAMPLERS
from ..ltx25.schedule import SCHEDULES, sigmas_of
from .bridge import Latents, finished, join, keyframes_out, split
from .condition import Clip
from .followers import check_followers
from .guider import apart_by, clock_notices, own_guider
from .run import NodeRun, node_run

# Keys of the latent that the sampler has used up, or that describe an empty latent only.
CONSUMED = ("conditions", "downscale_ratio_spacial", "downscale_ratio_temporal")


class LTX25Sampler(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25Sampler",
            display_name="LTX-2.5 Sampler",
            category="LTX-2.5",
            description="Noise, schedule and guided steps, all on the device. Shows every forward while it runs.",
            search_aliases=["KSampler", "LTX sampler", "LTXV sampler", "SamplerCustomAdvanced", "denoise", "generate video"],
            inputs=[
                io.Guider.Input("guider", tooltip="From LTX-2.5 Guider."),
                io.Latent.Input(
                    "latent",
                    tooltip="What to denoise: video and audio, video alone or audio alone. A noise mask says what is kept (0) and made (1).",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="The same seed gives the same clip, sound included. Clip i of a batch uses seed + i.",
                ),
                io.Combo.Input(
                    "schedule",
                    options=list(SCHEDULES),
                    default="ltx2",
                    tooltip="ltx2: for the dev file. distilled: 8 steps, for the distilled file. distilled_stage2: 3 steps that refine "
                    "an upscaled latent.",
                ),
                io.Int.Input(
                    "steps",
                    default=30,
                    min=1,
                    max=1000,
                    tooltip="Steps of the ltx2 schedule. The distilled schedules have their own number.",
                ),
                io.Combo.Input(
                    "sampler",
                    options=list(SAMPLERS),
                    default="auto",
                    tooltip="auto: ancestral Euler with the distilled schedule, Euler with the others, as the official pipelines do. res_2s: two "
                    "forwards per step, for few steps of high quality. euler_cfg_pp: CFG++, needs a negative prompt.",
                ),
                io.Sigmas.Input(
                    "sigmas", optional=True, tooltip="Noise levels from 1 down to 0 of your own. They win over schedule and steps."
                ),
                io.Float.Input(
                    "frame_rate",
                    default=0.0,
                    min=0.0,
                    max=240.0,
                    step=0.001,
                    tooltip="Frames per second the motion is made for. 0: the latent's own, else the conditioning's, else 24.",
                ),
                io.Float.Input(
                    "eta",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    tooltip="How much fresh noise euler_ancestral and euler_cfg_pp add back at each step. 0: none. res_2s: at the end of a step; in its middle it always adds some.",
                ),
                io.Boolean.Input(
                    "profile", default=False, tooltip="Traces one step and adds to the report where its time goes. Costs a few seconds."
                ),
                io.Boolean.Input(
                    "token_shift",
                    optional=True,
                    default=False,
                    tooltip="ltx2: noise levels by the number of tokens of the clip, as the official HQ pipeline does, instead of the same for every size.",
                ),
                io.Boolean.Input(
                    "add_noise",
                    optional=True,
                    default=True,
                    tooltip="Off: the latent has noise already, of a sampler before this one whose sigmas ended where these begin.",
                ),
            ],
            outputs=[
                io.Latent.Output("latent", tooltip="The clip, for the decode nodes. Carries its frame rate and seed."),
                io.String.Output("report", tooltip="Seconds and memory of every phase, and the forwards that ran."),
                io.Latent.Output("keyframes", tooltip="The frames made for LTX-2.5 Keyframe Slots, as clips of one frame; decode them like any latent."),
            ],
        )

    @classmethod
    def execute(
        cls,
        guider,
        latent,
        seed=0,
        schedule="ltx2",
        steps=30,
        sampler="auto",
        sigmas=None,
        frame_rate=0.0,
        eta=1.0,
        profile=False,
        token_shift=False,
        add_noise=True,
    ) -> io.NodeOutput:
        engine, parts = own_guider(guider).handle.engine, split(latent)
        _check_clock(engine, parts, frame_rate)
        if sigmas is not None:
            schedule, levels = None, tuple(float(sigma) for sigma in sigmas)
        else:
            levels = sigmas_of(schedule, steps, parts.video[0, 0].numel()) if token_shift and parts.video is not None else sigmas_of(schedule, steps)
        with node_run(engine, bar="sample", previews=True) as run:
            job = guider.job(parts, frame_rate, seed, levels, schedule, sampler, eta, run.watch, add_noise)
            for slots in _slots(parts):
                check_followers(slots.frames, Clip.of(engine, latent), job.frame_rate)
            run.record.describe(**_facts(engine, job))
            sampled = engine.sample(job, run.watch, profile)
            run.tell((*sampled.notices, *clock_notices(engine, parts, job.frame_rate)))
        whole = job.sigmas[-1] == 0  # with noise left, the rest of the steps needs the mask and the conditions
        out = {key: value for key, value in (finished(latent) if whole else latent).items() if key not in CONSUMED or (key == "conditions" and not whole)}
        if not whole and add_noise and parts.masked:
            out["conditions"] = (*job.conditions, *(HeldTo(name, grid) for name, grid in (("video", parts.video), ("audio", parts.audio)) if grid is not None))
        out.update(samples=join(sampled.video, sampled.audio), frame_rate=job.frame_rate, seed=seed)
        return io.NodeOutput(out, report(sampled, run), _keyframes(sampled, parts, out))


def _check_clock(engine: Engine, parts: Latents, frame_rate: float) -> None:
    """Raise InputError for a frame rate, 0: none, at which picture and sound of the latent are not equally long: one would be cut."""
    if frame_rate and frame_rate != parts.frame_rate and (apart := apart_by(engine, parts, frame_rate)):
        raise InputError(f"{apart}; set frame_rate to 0 here, and to {frame_rate:g} in the node that the latent is from, such as Empty LTX-2.5 Latent or Encode Video VAE.")


def _keyframes(sampled: Sampled, parts: Latents, clip: dict[str, Any]) -> Any:
    if sampled.keyframes is None:
        return ExecutionBlocker("There are no keyframes: none were asked for with LTX-2.5 Keyframe Slots.")
    (slots,) = _slots(parts)
    return keyframes_out(sampled.keyframes, slots.frames, clip["frame_rate"], clip["seed"])


def _slots(parts: Latents) -> list[KeyframeSlots]:
    return [item for item in parts.conditions if isinstance(item, KeyframeSlots)]


def _facts(engine: Engine, job: SampleJob) -> dict[str, Any]:
    """The request for the run record. Tokens, legs and forwards stand in the sample phase's own facts."""
    clip = None if job.video is None else engine.video_shape(job.video)
    guidance = {f"{name}_guidance": str(getattr(job, f"{name}_guidance")) for name in ("video", "audio")}
    return {
        "geometry": {
            "width": clip and clip.width,
            "height": clip and clip.height,
            "frames": clip and clip.frames,
            "frame_rate": job.frame_rate,
            "batch": len(job.audio if job.video is None else job.video),
        },
        "settings": {"seed": job.seed, "schedule": job.schedule, "sampler": job.sampler, "eta": job.eta, "add_noise": job.add_noise, "sigmas": list(job.sigmas), **guidance},
    }


def report(sampled: Sampled, run: NodeRun) -> str:
    """The phase table of a node that sampled, the forwards that ran, and what was noticed."""
    legs = Counter("+".join(group) for group in sampled.legs)
    ran = ", ".join(f"{count} x {group}" for group, count in legs.items())
    return "\n".join(
        [
            run.record.table(),
            "",
            f"forwards of this node: {sampled.forwards} ({ran})",
            *sampled.profiles,
            *run.notices,
            f"record: {path_text(run.record.path) or 'could not be written'}",
        ]
    )
