"""`ltx25 decode`: a latent that a render kept, because its decode failed, to an MP4 with sound."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..engine import Engine, Options
from ..instrument import RunRecord, files_facts, machine
from ..kept import SUFFIX, Kept
from .arguments import path_of
from .finish import checked_output, clip_paths, finish, recorded
from .render import SLOTS, chosen_device, chosen_files
from .runs import DEFAULT_RUNS, runs_folder


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `decode`; the parsed arguments carry the function to call as `run`."""
    parser = subparsers.add_parser(
        "decode",
        help="decode a latent that a render kept",
        description=f"Decode a latent (*{SUFFIX}) to what its render would have written. A render keeps it where decoding or writing fails. The latent stays.",
    )
    parser.add_argument("latent", type=path_of, metavar=f"FILE{SUFFIX}")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE.mp4", help="with an HDR transfer: a new folder")
    models = parser.add_argument_group("model files (all four; none: those the latent was made with)")
    for slot in SLOTS:
        models.add_argument("--" + slot.replace("_", "-"), type=path_of, metavar="FILE")
    parser.add_argument("--tiny", action="store_true", help="the tiny checkpoint")
    parser.add_argument("--tiling", choices=("auto", "off"), default="auto", help="of the video decode, default auto")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps, ...; default auto")
    parser.add_argument("--runs", type=path_of, metavar="DIR", help=f"where run records go; default LTX25_RUNS, else {DEFAULT_RUNS}")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    kept = Kept.read(arguments.latent)
    output = checked_output(arguments.output, kept.transfer)
    for path in clip_paths(output, len(kept.video)):
        checked_output(path, kept.transfer)
    named = arguments.tiny or any(getattr(arguments, slot) is not None for slot in SLOTS)
    files = chosen_files(arguments)[0] if named else kept.files
    device = chosen_device(arguments.device)
    options = Options("auto", "auto", "auto", "off")
    engine = Engine.open(files, options, device)
    clip = engine.video_shape(kept.video)
    geometry = {"width": clip.width, "height": clip.height, "frames": clip.frames, "frame_rate": kept.frame_rate, "batch": len(kept.audio)}
    facts = {**machine(device), "files": files_facts(engine.headers), "options": vars(options), "geometry": geometry, "settings": {"seed": kept.seed}}
    record = RunRecord(runs_folder(arguments.runs), facts)
    return recorded(record, device, arguments.quiet, lambda watch: finish(engine, kept, arguments.tiling, output, record, watch))
