"""Streaming under a cap: guided steps and a text encode with less device memory than the weights need.

    python tests/bench/published_files.py DIR
    python tests/bench/stream.py DIR --cap-gib 12 [--size 768x448 --frames 25] [--steps 4] [--resident] [--lora FILE] [--skip-text]

One JSON line per case: seconds of a step, bytes that crossed in it, the link's measured rate, bytes / rate, how much longer
than the larger of that and the resident step the streamed one takes (resident with --resident: before the cap, needs all the
memory), peaks of device and host. --lora: with it on the transformer, resident and streamed. Files of the published sizes; weights are random, so times hold and pictures do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  registers the checkout as comfyui_ltx25
from comfyui_ltx25.ltx25.cli.arguments import Parser, parsed  # noqa: E402
from comfyui_ltx25.ltx25.connector import Conditioning  # noqa: E402
from comfyui_ltx25.ltx25.engine import Engine, Files, Options, SampleJob  # noqa: E402
from comfyui_ltx25.ltx25.guidance import Bins, Guidance  # noqa: E402
from comfyui_ltx25.ltx25.instrument import DeviceMeter, Sink, Watch  # noqa: E402
from comfyui_ltx25.ltx25.instrument.memory import host_now  # noqa: E402
from comfyui_ltx25.ltx25.instrument.plan_text import parse_size  # noqa: E402
from comfyui_ltx25.ltx25.latents import empty_latents  # noqa: E402
from comfyui_ltx25.ltx25.shapes import VideoShape  # noqa: E402
from comfyui_ltx25.tests.bench.program import need_card, program  # noqa: E402
from comfyui_ltx25.tests.bench.published_files import FILES  # noqa: E402

GIB = 1 << 30


class Phases(Sink):
    """Keeps closed phases by name, the last of each, and the most that the device held in any."""

    def __init__(self) -> None:
        self.phases = {}
        self.notes = []
        self.peak = 0

    def closed(self, phase) -> None:
        self.phases[phase.name] = phase
        self.peak = max(self.peak, phase.peak_device or 0)

    def noted(self, event, text, facts) -> None:
        self.notes.append({"event": event, **facts})


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cap-gib", type=float, required=True)
    parser.add_argument("--size", type=parsed(parse_size), default=(768, 448))
    parser.add_argument("--frames", type=int, default=25)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--residency", default="auto", choices=("auto", "stream"))
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--lora", type=Path)
    parser.add_argument("--skip-text", action="store_true")
    options = parser.parse_args()
    need_card()
    device = torch.device("cuda")
    link = link_rate(device)
    resident = None
    if options.resident:
        resident, row, engine = sample(options, device, "resident")
        print(json.dumps({"bench": "stream", "case": "sample resident", **row}), flush=True)
        engine.detach()
        del engine
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(options.cap_gib * GIB / total)
    step, row, engine = sample(options, device, options.residency)
    row["link_gb_per_s"] = round(link / 1e9, 2)
    row["bytes_over_link_s"] = round(row["streamed_gb_per_step"] * 1e9 / link, 4)
    row["times_the_bound"] = round(step / max(row["bytes_over_link_s"], resident or 0.0), 3)
    print(json.dumps({"bench": "stream", "case": f"sample {options.cap_gib:g} GiB", **row}), flush=True)
    if not options.skip_text:
        print(json.dumps({"bench": "stream", "case": f"text {options.cap_gib:g} GiB", **text(engine)}), flush=True)


def sample(options: argparse.Namespace, device: torch.device, residency: str) -> tuple[float, dict[str, object], Engine]:
    paths = {slot: options.folder / folder / f"{name}.safetensors" for slot, (folder, name) in FILES.items()}
    files = Files(paths["transformer"], paths["text_encoder"], paths["video_vae"], paths["audio_vae"])
    engine = Engine.open(files, Options("auto", residency, "auto", "off"), device)
    if options.lora:
        engine = engine.with_loras([(options.lora, 0.5)])
    sink = Phases()
    before, started = host_now(), time.perf_counter()
    clip = engine.sample(job(engine, options), Watch([sink], DeviceMeter(device)))
    seconds = time.perf_counter() - started
    phase, load = sink.phases["sample"], sink.phases["load.read"]
    step = statistics.median(clip.seconds[1:])
    row = {
        "size": "{}x{}".format(*options.size),
        "frames": options.frames,
        "tokens": phase.facts["tokens"],
        "legs": len(clip.legs[0]),
        "batched": phase.facts["batched"],
        "step_s": round(step, 4),
        "steps_s": [round(one, 3) for one in clip.seconds],
        "whole_s": round(seconds, 2),
        "load_s": round(load.elapsed, 2),
        "load_gb": round(load.done / 1e9, 2),
        "source": load.facts.get("source"),
        "kept_blocks": phase.facts.get("kept_blocks"),
        "streamed_gb_per_step": round(phase.facts.get("streamed_bytes", 0) / 1e9 / len(clip.seconds), 3),
        "copy_s": phase.facts.get("copy_seconds"),
        "stalled_s": phase.facts.get("stalled_seconds"),
        "overlap": phase.facts.get("overlap"),
        "peak_gib": round(sink.peak / GIB, 2),
        "host_gib": round((host_now() - before) / GIB, 2),
        "notices": list(clip.notices),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
    }
    return step, row, engine


def text(engine: Engine) -> dict[str, object]:
    """The first prompt loads the tower, the second runs it."""
    sink, seconds = Phases(), []
    for prompt in ("a lighthouse at dawn, waves and a distant bell " * 8, "a train crosses a bridge in the rain " * 8):
        started = time.perf_counter()
        engine.encode(prompt, Watch([sink], DeviceMeter(engine.device)))
        seconds.append(round(time.perf_counter() - started, 3))
    tower = sink.phases["text.tower"]
    return {
        "seconds": seconds,
        "tower_s": round(tower.elapsed, 3),
        "tokens": tower.facts["tokens"],
        "streamed": [note for note in sink.notes if note["event"] == "stream"][-1:],
        "peak_gib": round(sink.peak / GIB, 2),
    }


def job(engine: Engine, options: argparse.Namespace) -> SampleJob:
    width, height = options.size
    video, audio = empty_latents(VideoShape(options.frames, height, width), 24.0, 1, engine.compression)
    contexts = [Conditioning(*(torch.randn(1, 1024, size) for size in engine.context_widths), ()) for _ in range(2)]
    guided = [Bins.constant(Guidance(cfg, 1.0, 3.0, 0.7, frozenset([28]), 0)) for cfg in (3.0, 7.0)]
    sigmas = tuple(1 - step / options.steps for step in range(options.steps + 1))
    return SampleJob(video, audio, None, None, 24.0, 0, *contexts, *guided, sigmas, None, "euler", 1.0, (), True)


def link_rate(device: torch.device) -> float:
    """bytes/s from pinned host memory."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    rates = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(host.nbytes / (time.perf_counter() - started))
    return statistics.median(rates)


if __name__ == "__main__":
    program(main)
