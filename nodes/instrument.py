"""PlanLTX25Render and LTX25RunReport: what a render will cost, and what it did."""

from __future__ import annotations

from pathlib import Path

import comfy.model_management as mm
import numpy as np
import torch
from comfy_api.latest import io

from ..ltx25.instrument.history import find_run, read_newest
from ..ltx25.instrument.memory import device_free, device_now, host_free, host_now
from ..ltx25.instrument.models import PUBLISHED_UPSCALER, Models
from ..ltx25.instrument.plan_text import (
    frames_of,
    largest_text,
    parse_bytes,
    parse_seconds,
    plan_text,
    usual_stg_blocks,
)
from ..ltx25.instrument.planner import Planner
from ..ltx25.instrument.plot import plot_run
from ..ltx25.instrument.report import record_text
from ..ltx25.request import Request
from ..ltx25.sampler import SAMPLERS
from ..ltx25.schedule import SCHEDULES
from .load import EngineType
from .registry import stamp
from .run import RECORDS, node_watch, prompt_id, runs_folder


class PlanLTX25Render(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="PlanLTX25Render",
            display_name="Plan LTX-2.5 Render",
            category="LTX-2.5",
            description="Predicts seconds and memory of a render on this machine before anything is loaded, and the largest clip that fits.",
            search_aliases=["estimate", "how long", "time left", "out of memory", "budget", "LTX plan"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint. Only the headers of its files are read."),
                io.Int.Input("width", default=768, min=32, max=8192, step=32, tooltip="Width in px."),
                io.Int.Input("height", default=512, min=32, max=8192, step=32, tooltip="Height in px."),
                io.Float.Input("seconds", default=5.0, min=0.04, max=340.0, step=0.01, tooltip="Length of the clip; the nearest legal number of frames is planned."),
                io.Float.Input("frame_rate", default=24.0, min=1.0, max=240.0, step=0.001, tooltip="Frames per second."),
                io.Combo.Input("schedule", options=list(SCHEDULES), default="ltx2", tooltip="As on the sampler."),
                io.Int.Input("steps", default=30, min=1, max=1000, tooltip="Of schedule ltx2, as on the sampler."),
                io.Combo.Input("sampler", options=list(SAMPLERS), default="auto", tooltip="As on the sampler."),
                io.Boolean.Input("guidance", default=True, tooltip="On: the guider's four legs. Off: one leg, as the distilled file wants it."),
                io.Int.Input("batch_size", default=1, min=1, max=64, tooltip="Clips made together."),
                io.String.Input("time_budget", default="", tooltip="Time there is: 90s, 10m, 1.5h. Empty: no limit."),
                io.String.Input("memory_budget", default="", tooltip="Device memory there is: 24G. Empty: what is free now."),
                io.Boolean.Input(
                    "two_stages",
                    optional=True,
                    default=False,
                    tooltip="On: made at half the size, enlarged by the published spatial upscaler and refined in three unguided steps. Width and height are then multiples of 64.",
                ),
            ],
            outputs=[
                io.String.Output("plan", tooltip="Phases with their predicted seconds and what each number rests on, memory, and what fits."),
                io.Boolean.Output("fits", tooltip="Whether the request fits time and memory."),
                io.Int.Output("width", tooltip="Of the largest clip of this shape and length that fits; as asked for when that fits. With two_stages of the finished clip: Empty LTX-2.5 Latent has half."),
                io.Int.Output("height", tooltip="As width."),
                io.Int.Output("frames", tooltip="Of the request. At this size, the text also tells the longest clip that fits."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **_):
        return _NEWS.now()

    @classmethod
    def execute(
        cls,
        engine,
        width=768,
        height=512,
        seconds=5.0,
        frame_rate=24.0,
        schedule="ltx2",
        steps=30,
        sampler="auto",
        guidance=True,
        batch_size=1,
        time_budget="",
        memory_budget="",
        two_stages=False,
    ) -> io.NodeOutput:
        model = engine.engine
        models = Models.of(model.opened)
        held = sum(part.held for part in model.parts) if model.device.type == "cpu" else 0
        outside = max(0, (host_now() or 0) - held)
        enlarging = PUBLISHED_UPSCALER if two_stages else None
        loras = any(lora.strength for lora in model.loras)
        with node_watch(bar="plan.read", idle="no run records yet") as watch:
            runs, _ = read_newest(runs_folder(), watch)
        planner = Planner(models, model.device, runs, model.batched, writes=False, enlarging=enlarging, outside=outside, loras=loras)
        seconds_there = parse_seconds(time_budget) if time_budget.strip() else None
        budget = planner.budget(seconds_there, parse_bytes(memory_budget) if memory_budget.strip() else None, None)
        request = Request(
            prompt="plan",
            width=width,
            height=height,
            frames=frames_of(seconds, frame_rate, models.compression),
            frame_rate=frame_rate,
            schedule=schedule,
            steps=steps,
            sampler=sampler,
            compression=models.compression,
            stg_blocks=usual_stg_blocks(models.dit.layers),
            **({} if guidance else _UNGUIDED),
        )
        plan = planner.plan(request, batch_size, budget)
        _NEWS.planned(not any(phase.extrapolated for phase in plan.phases if phase.name == "sample"))
        lines, best = [plan_text(plan, models, budget)], request
        if plan.beyond(budget):
            lines.append(largest_text(planner, request, budget, batch_size))
            same_length = [p.request for p in planner.largest(request, budget, batch_size) if p.request.frames == request.frames]
            best = same_length[-1] if same_length else request
        return io.NodeOutput("\n".join(lines), not plan.beyond(budget), best.width, best.height, request.frames)


class LTX25RunReport(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25RunReport",
            display_name="LTX-2.5 Run Report",
            category="LTX-2.5",
            description="Draws a run record: phases and forwards along the time, how busy the device was, and memory.",
            search_aliases=["timeline", "benchmark", "profile", "run record", "how long did it take"],
            inputs=[
                io.String.Input(
                    "record",
                    default="last",
                    tooltip="last, last-1, or part of a record's name. Records are in ltx25_runs in the output folder.",
                ),
                io.AnyType.Input("after", optional=True, tooltip="Connect what must be done first, such as the images of Decode Video VAE: then its run is drawn."),
            ],
            outputs=[
                io.Image.Output("image", tooltip="The timeline, 1280 px wide."),
                io.String.Output("text", tooltip="The record as text: phase table, estimate, profile."),
            ],
            not_idempotent=True,
        )

    @classmethod
    def fingerprint_inputs(cls, record="last", **_):
        return float("nan")  # "last" means another record after every run

    @classmethod
    def execute(cls, record="last", after=None) -> io.NodeOutput:
        run = find_run(runs_folder(), record)
        image = torch.from_numpy(np.asarray(plot_run(run), dtype=np.float32) / 255)[None]
        return io.NodeOutput(image, record_text(run))


class _News:
    """What plans rest on besides their inputs: the newest record, and memory that is free or held by this process.

    What is linked to a plan runs again with it, up to a whole render. So memory counts when it is another by more than CHANGED, and
    the record that a plan's own prompt went on to write does not where the plan had measured forwards: a prompt that is queued
    once more unchanged would render for ever.
    """

    CHANGED = 1 / 8

    def __init__(self) -> None:
        self._prompt = ""  # the last with a plan in it, run or cached
        self._own: Path | None = None  # the last record that such a prompt wrote
        self._sure = False
        self._record: tuple = ()
        self._room = [0, 0]  # bytes: device, host

    def now(self) -> tuple:
        """Another one when plans are to be made again; the same for all plans of a prompt."""
        if prompt_id() != self._prompt or not self._prompt:
            self._own = RECORDS.path_of(self._prompt) or self._own
            self._prompt = prompt_id()
            self._look()
        return *self._record, *self._room

    def planned(self, sure: bool) -> None:
        """A plan was made; sure: it had measured forwards."""
        self._sure = sure

    def _look(self) -> None:
        newest = max(runs_folder().glob("*.jsonl"), key=lambda path: path.name, default=None)
        if newest is not None and not (self._sure and newest == self._own):
            self._record = stamp(newest)
        device = mm.get_torch_device()
        for place, (free, held) in enumerate(((device_free(device), device_now(device)), (host_free(), host_now()))):
            room = (free or 0) + (held or 0)
            if abs(room - self._room[place]) > self.CHANGED * self._room[place]:
                self._room[place] = room


_NEWS = _News()

_UNGUIDED = {
    "negative": None,
    "video_cfg": 1.0,
    "video_stg": 0.0,
    "video_modality": 1.0,
    "audio_cfg": 1.0,
    "audio_stg": 0.0,
    "audio_modality": 1.0,
}
