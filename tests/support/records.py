"""Run records of renders that never ran: the real writer driven by a clock that the test moves."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfyui_ltx25.ltx25.config.dit import DiTConfig
from comfyui_ltx25.ltx25.dit.modality import Leg, LegPlan
from comfyui_ltx25.ltx25.instrument import Forwards, Group, RunRecord, Watch, request_facts
from comfyui_ltx25.ltx25.instrument.work import sample_work

PUBLISHED = DiTConfig(48, 32, 128, 64, 128, 128, 128, 128, 1e-6, 1e4, (20, 2048, 2048), 20, 1000.0, 1000.0, False, True, True, True)
GUIDED = LegPlan(tuple(Leg), frozenset([28]), frozenset([28]), video=True, audio=True)
HOST = 3 << 30  # bytes of the process before it loads
PER_TOKEN = 700_000  # bytes a token of the guided step needs beside the weights
PER_OUTPUT = 12  # bytes of host memory a pixel of a frame needs


class Clock:
    """Stands in for time.monotonic; `sleep` moves it."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Memory:
    """A meter whose device fills as the test says."""

    def __init__(self) -> None:
        self.device, self.host = 0, HOST

    def opened(self, phase) -> None:
        phase.device_memory, phase.host_memory = self.device, self.host

    def ticked(self, phase) -> None:
        phase.device_memory, phase.host_memory = self.device, self.host

    def closed(self, phase) -> None:
        phase.peak_device = max(phase.peak_device or 0, self.device)
        phase.peak_host = max(phase.peak_host or 0, self.host)

    def beat(self, phase) -> None: ...

    def settled(self, wait: bool) -> list:
        return []


def law_seconds(linear: float, attention: float) -> float:
    """The law these renders obey: s of a group with so many TFLOP."""
    return 0.02 + 1.5e-3 * linear + 1.8e-3 * attention


def render(folder: Path, clock: Clock, width: int, height: int, frames: int, *, steps: int = 6, slower: float = 1.0, noise: float = 0.0,
           device: str = "Toy card", warm_up: float = 2.0, stop: int | None = None, seed: int = 0,
           grown: int = 0, held: int = 0, streams: bool = False, how: Mapping[str, Any] | None = None) -> RunRecord:  # fmt: skip
    """One guided render; `stop`: raise RuntimeError in that step (0-based). `slower` multiplies forwards only. how: more facts of the sampling.

    grown: host bytes that a render takes whatever the clip; held: of earlier renders of the process.
    """
    chance = random.Random(seed)
    size = {"width": width, "height": height, "frames": frames, "batch": 1}
    tokens = {"video": ((frames - 1) // 8 + 1) * (height // 32) * (width // 32), "audio": max(1, round(frames / 24 * 25))}
    facts = request_facts(
        width=width, height=height, frames=frames, frame_rate=24.0, batch=1, tokens=tokens, steps=steps, legs=[leg.value for leg in Leg],
        forwards=4 * steps, settings={"seed": seed},
    )  # fmt: skip
    process = {"first": HOST, "now": HOST + held}
    record = RunRecord(folder, {"device": device, "device_type": "cuda", "torch": "2.13", "pack": "0.1.0", "process": process, **facts})
    memory = Memory()
    memory.host += held
    watch = Watch([record], memory)
    work = sample_work(PUBLISHED, [GUIDED] * steps, tokens, 1024, 1, **{"precision": "bfloat16", "batched": True, **({"residency": "stream"} if streams else {}), **(how or {})})
    group = law_seconds(work["work"][0]["linear"], work["work"][0]["attention"])
    with record:
        with watch.phase("load.read", total=40 << 30, unit="byte") as phase:
            clock.sleep(4.0)
            phase.tick(40 << 30)
            memory.device = 30 << 30
        with watch.phase("text.tower", total=48, unit="layer", tokens=200) as phase:
            clock.sleep(0.1)
            phase.tick(48)
        with watch.phase("sample", total=4 * steps, unit="forward", tokens=tokens, steps=steps, legs=[leg.value for leg in Leg], **work) as phase:
            phase.peak_device = memory.device + PER_TOKEN * sum(tokens.values())
            phase.device_span = 0.9 * steps * group
            forwards = Forwards(phase, [Group(step, tuple(leg.value for leg in Leg)) for step in range(1, steps + 1)])
            for step in range(steps):
                if step == stop:
                    raise RuntimeError("device gone")
                seconds = group * slower * (1 + noise * chance.uniform(-1, 1)) + (warm_up if step == 0 else 0.0)
                clock.sleep(seconds)
                forwards.finished(seconds)
        with watch.phase("decode.video", total=2, unit="chunk", **size) as phase:
            for _ in range(2):
                clock.sleep(0.1 + 2e-9 * width * height * frames)
                phase.tick()
            phase.peak_device = memory.device + 2000 * width * height
            phase.peak_host = memory.host + grown + PER_OUTPUT * width * height * frames
        with watch.phase("decode.audio", total=10, unit="layer", latent_frames=tokens["audio"], batch=1) as phase:
            clock.sleep(0.05)
            phase.tick(10)
    clock.sleep(30.0)
    return record
