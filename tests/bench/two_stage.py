"""Distilled two stages end to end: a prompt that is known already, all resident, to frames and sound on the host.

    python tests/bench/published_files.py DIR --only distilled text_encoder video_vae video_vae_diffusion audio_vae spatial_upscaler
    python tests/bench/two_stage.py DIR [--size 1280x704 --frames 121] [--runs RUNS] [--repeat 3]
    python tests/bench/two_stage.py DIR --rounds 1 --repeat 2   # with the temporal_upscaler in DIR
    python tests/bench/two_stage.py --tiny

Stage 1 runs 8 steps at half the size, the upscaler doubles it, stage 2 runs 3 more steps, and both decoders follow. With
--rounds it is diffusion fidelity rendering: both stages make keyframes, stage 2 sees the small clip, and rounds follow that
double the frame rate. One JSON line per video decoder: seconds of each repeat from the first to the last, by phase for the
last one. The first repeat loads, compiles and captures; each leaves a run record.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  registers the checkout as comfyui_ltx25
from comfyui_ltx25.ltx25.cli.arguments import Parser, parsed  # noqa: E402
from comfyui_ltx25.ltx25.conditions import KeyframeSlots, Reference  # noqa: E402
from comfyui_ltx25.ltx25.connector import Conditioning  # noqa: E402
from comfyui_ltx25.ltx25.dfr import Canvas, Keyframes, refine  # noqa: E402
from comfyui_ltx25.ltx25.engine import Engine, Files, Options, SampleJob  # noqa: E402
from comfyui_ltx25.ltx25.errors import InputError  # noqa: E402
from comfyui_ltx25.ltx25.guidance import OFF, Bins  # noqa: E402
from comfyui_ltx25.ltx25.instrument import DeviceMeter, RunRecord, Sink, Watch, files_facts, machine  # noqa: E402
from comfyui_ltx25.ltx25.instrument.plan_text import parse_size  # noqa: E402
from comfyui_ltx25.ltx25.latents import empty_latents  # noqa: E402
from comfyui_ltx25.ltx25.schedule import DISTILLED  # noqa: E402
from comfyui_ltx25.ltx25.shapes import VideoShape, clip_samples  # noqa: E402
from comfyui_ltx25.ltx25.stages import first_size, refinement  # noqa: E402
from comfyui_ltx25.tests.bench.program import program  # noqa: E402
from comfyui_ltx25.tests.bench.published_files import FILES  # noqa: E402
from comfyui_ltx25.tests.support.tiny import tiny_files  # noqa: E402

DECODERS = ["video_vae", "video_vae_diffusion"]
PROMPT, RATE = "a lighthouse at dawn, waves and a distant bell", 24.0
UNKNOWN = Conditioning(torch.zeros(0), torch.zeros(0), ())  # until the prompt is encoded


class Seconds(Sink):
    """Wall of every phase, in the order they end; a name that comes again gets its number."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    def closed(self, phase) -> None:
        again = sum(name.split(" ")[0] == phase.name for name in self.of)
        self.of[f"{phase.name} {again + 1}" if again else phase.name] = round(phase.elapsed, 3)


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--tiny", action="store_true", help="the tiny checkpoint; then the clip is 128x64, 9 frames, and once, unless told")
    parser.add_argument("--size", type=parsed(parse_size), default=None, help="default 1280x704")
    parser.add_argument("--frames", type=int, default=None, help="default 121")
    parser.add_argument("--repeat", type=int, default=None, help="default 3")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--decoders", nargs="*", choices=DECODERS, default=DECODERS)
    parser.add_argument("--runs", type=Path, default=Path("ltx25_runs"))
    options = parser.parse_args()
    if options.tiny == (options.folder is not None):
        raise InputError("give either the folder of the files, as published_files.py fills it, or --tiny.")
    for name, usual, small in (("size", (1280, 704), (128, 64)), ("frames", 121, 9), ("repeat", 3, 1)):
        if getattr(options, name) is None:
            setattr(options, name, small if options.tiny else usual)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for decoder in options.decoders:
        paths = vars(tiny_files()) if options.tiny else {slot: options.folder / place / f"{name}.safetensors" for slot, (place, name) in FILES.items()}
        files = Files(paths["distilled"], paths["text_encoder"], paths[decoder], paths["audio_vae"])
        engine = Engine.open(files, Options("auto", "auto", "auto", "memory"), device)
        line = {"bench": "two_stage", "decoder": decoder, "size": "{}x{}".format(*options.size), "frames": options.frames, "rounds": options.rounds, **_repeats(engine, paths, options)}
        print(json.dumps({**line, **machine(device)}), flush=True)
        engine.detach()


def _repeats(engine: Engine, paths: Mapping[str, Path], options: argparse.Namespace) -> dict[str, object]:
    upscaler = paths["spatial_upscaler"]
    width, height = options.size
    seconds, records = [], []
    for seed in range(options.repeat):
        first = _job(engine, first_size(VideoShape(options.frames, height, width), engine.upscaler(upscaler)[1], engine.compression), seed)
        keyframes = Canvas.of(options.frames).keyframes if options.rounds else ()
        geometry = {"width": width, "height": height, "frames": options.frames, "frame_rate": RATE, "batch": 1}
        record = RunRecord(options.runs, {**machine(engine.device), "files": files_facts(engine.headers), "geometry": geometry, **engine.facts(first)}, {}, False)
        phases = Seconds()
        with record:
            watch = Watch([record, phases], DeviceMeter(engine.device))
            try:
                begin = time.perf_counter()
                prompt = engine.encode(PROMPT, watch)
                first = replace(first, positive=prompt, conditions=(KeyframeSlots(keyframes, None),) if keyframes else ())
                small = engine.sample(first, watch)
                large, told = engine.upscale(small.video, upscaler, watch), ()
                if keyframes:
                    told = (Reference(small.video, 1.0, 2, 1), KeyframeSlots(keyframes, _upscaled(engine, small.keyframes, upscaler, watch)))
                clip = engine.sample(refinement(first, large, small.audio, told), watch)
                video, audio = clip.video, clip.audio
                if keyframes:
                    plain = replace(first, video=video, audio=None, conditions=())
                    video = refine(engine, plain, Keyframes(clip.keyframes, keyframes), paths["temporal_upscaler"], options.rounds, options.frames, watch).video
                frames = engine.decode_video(video, seed, "auto", watch)
                sound = engine.decode_audio(audio, clip_samples(options.frames, RATE), watch)
                seconds.append(round(time.perf_counter() - begin, 3))
            finally:
                watch.finish()
        assert frames.shape == ((options.frames - 1) * 2**options.rounds + 1, height, width, 3) and sound.shape[-1] == clip_samples(options.frames, RATE)
        records.append(str(record.path))
        del frames, sound  # giving back a gigabyte takes a tenth of a second, and is not the next repeat's
    print(record.table(), file=sys.stderr, flush=True)
    return {"seconds": seconds, "phases": phases.of, "record": records[-1]}


def _upscaled(engine: Engine, keyframes: torch.Tensor, upscaler: Path, watch: Watch) -> torch.Tensor:
    """Keyframes (B, C, count, h, w) are clips of one frame each."""
    return torch.cat([engine.upscale(one.contiguous(), upscaler, watch) for one in keyframes.split(1, 2)], 2)


def _job(engine: Engine, shape: VideoShape, seed: int) -> SampleJob:
    video, audio = empty_latents(shape, RATE, 1, engine.compression)
    plain = Bins.constant(OFF)
    return SampleJob(video, audio, None, None, RATE, seed, UNKNOWN, None, plain, plain, DISTILLED, "distilled", "auto", 1.0, (), True)


if __name__ == "__main__":
    program(main)
