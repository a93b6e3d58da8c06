"""`ltx25 render`: a prompt to an MP4 with sound, or to linear light in EXR files, without a host. Flags are named like the inputs of the nodes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import torch

from ...kernels.cache_folder import cache_folder
from ..engine import Conditioning, Engine, Files, Options, SampleJob
from ..errors import InputError
from ..guidance import TextRule
from ..guidance_text import EXAMPLE, parse_bins
from ..hdr import SDR, TRANSFERS
from ..image import CRF
from ..instrument import RunRecord, Watch, files_facts, machine
from ..instrument.forecast import forecaster
from ..instrument.units import path_text
from ..kept import Kept
from ..latents import empty_latents
from ..request import Request, parse_sigmas
from ..sampler import SAMPLERS, sampler_of
from ..schedule import SCHEDULES
from ..shapes import clip_samples
from ..tiny import DIT_BLOCKS, ready
from .arguments import parsed, path_of
from .finish import FIRST_STAGE, checked_output, clip_paths, finish, keeping, recorded, tell
from .runs import DEFAULT_RUNS, runs_folder
from .second_stage import SecondStage
from .told import MODES, Told, parse_lora

SLOTS = tuple(field.name for field in fields(Files))
DEFAULTS = {field.name: field.default for field in fields(Request) if field.default is not MISSING}
# What a render with the tiny checkpoint asks for unless told otherwise: seconds on two cores.
TINY_DEFAULTS = {"width": 256, "height": 160, "frames": 49, "steps": 8, "stg_blocks": str(DIT_BLOCKS // 2)}

# Flags of a request: type and what the help says; the order is that of the nodes they belong to.
FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "negative": (str, "what to steer away from"),
    "width": (int, "px, a multiple of 32"),
    "height": (int, "px, a multiple of 32"),
    "frames": (int, "8 n + 1"),
    "frame_rate": (float, "frames/s"),
    "video_cfg": (float, "how strongly the picture follows the prompt; 1 is off"),
    "video_stg": (float, "guidance away from the picture without self-attention in stg_blocks; 0 is off"),
    "video_modality": (float, "guidance away from the picture made without the sound; 1 is off"),
    "video_rescale": (float, "0 to 1, against overexposure by guidance"),
    "audio_cfg": (float, "the same four for the sound"),
    "audio_stg": (float, ""),
    "audio_modality": (float, ""),
    "audio_rescale": (float, ""),
    "stg_blocks": (str, "blocks perturbed for stg, with commas, from 0"),
    "skip_step": (int, "n: compute every (n + 1)th step only"),
    "rule": (str, f"how the negative pulls: {', '.join(rule.value for rule in TextRule)}"),
    "apg_eta": (float, "apg: the share kept of the pull along the prediction itself"),
    "apg_norm": (float, "apg: the longest pull; 0 is no limit"),
    "guidance_start": (float, "noise level at which guidance begins"),
    "guidance_end": (float, "noise level at which guidance ends"),
    "bins": (str, f"other values below a noise level, like '{EXAMPLE}'"),
    "seed": (int, "of the noise"),
    "schedule": (str, f"{', '.join(SCHEDULES)}"),
    "steps": (int, "of schedule ltx2"),
    "sampler": (str, f"{', '.join(SAMPLERS)}"),
    "sigmas": (parsed(parse_sigmas), "noise levels of your own, with commas; win over schedule and steps"),
    "eta": (float, "fresh noise of euler_ancestral, euler_cfg_pp and the end of a res_2s step, 0 to 1"),
    "token_shift": (bool, "noise levels of ltx2 by the number of tokens of the clip"),
}
OPTIONS = {
    "precision": ("auto", "bf16", "fp8"),
    "residency": ("auto", "resident", "stream"),
    "legs": ("auto", "batched", "sequential"),
    "cache": ("memory", "disk", "off"),
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "render",
        help="render a prompt to an MP4 with sound",
        description="Render a prompt to an MP4 with sound. Without model files the tiny checkpoint is used: random weights, "
        "a few MB, written to a cache folder on first use.",
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE.mp4", help="with an HDR transfer: a new folder")
    models = parser.add_argument_group("model files (all four, or none for the tiny checkpoint)")
    for slot in SLOTS:
        models.add_argument(flag(slot), type=path_of, metavar="FILE")
    models.add_argument("--lora", action="append", default=[], type=parsed(parse_lora), metavar="FILE[:STRENGTH]", help="on the transformer, strength 1 unless given; may be repeated")
    models.add_argument("--tiny", action="store_true", help="the tiny checkpoint: the default when no file is named")
    request = parser.add_argument_group("the clip (defaults of the tiny checkpoint in brackets)")
    for name, (kind, text) in FLAGS.items():
        request.add_argument(flag(name), help=_help(name, text), **flag_takes(name, kind))
    request.add_argument("--batch-size", type=int, default=1, metavar="N", help="clips with seed, seed + 1, ... (default 1)")
    told = parser.add_argument_group("what the clip is told beside its prompt")
    told.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE@FRAME[:STRENGTH]",
        help="a picture at a frame, 0 the first and -1 the last; without @FRAME the first; may be repeated",
    )
    told.add_argument("--crf", type=int, help=f"video compression that pictures go through first, 0 is off; default {CRF}")
    told.add_argument("--audio", type=path_of, metavar="FILE", help="sound of your own, any rate and layout")
    told.add_argument("--audio-mode", choices=MODES, help=f"soundtrack: the clip's sound, which the video follows; voice: new sound resembles it; default {MODES[0]}")
    stages = parser.add_argument_group("two stages: the clip is made at half its size, enlarged, and refined in three unguided steps")
    stages.add_argument("--upscaler", type=path_of, metavar="FILE", help="the spatial upscaler; width and height are then multiples of 64")
    stages.add_argument(
        "--stage2-lora",
        action="append",
        default=[],
        type=parsed(parse_lora),
        metavar="FILE[:STRENGTH]",
        help="on the transformer in stage 2 alone, beside those of --lora: the distilled LoRA where stage 1 is guided; the sound is then that of stage 1; may be repeated",
    )
    engine = parser.add_argument_group("how it runs")
    for name, choices in OPTIONS.items():
        engine.add_argument(flag(name), choices=choices, default=choices[0], help=f"default {choices[0]}")
    engine.add_argument("--tiling", choices=("auto", "off"), default="auto", help="of the video decode, default auto")
    engine.add_argument(
        "--transfer",
        choices=TRANSFERS,
        default=SDR,
        help=f"default {SDR}; the others, for a model with an HDR LoRA in its file, write linear light as EXR frames with the sound beside them",
    )
    engine.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps, ...; default auto")
    engine.add_argument("--runs", type=path_of, metavar="DIR", help=f"where run records go; default LTX25_RUNS, else {DEFAULT_RUNS}")
    engine.add_argument("--profile", action="store_true", help="trace one step, of stage 1 where there are two, and say where its time goes")
    engine.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    output = checked_output(arguments.output, arguments.transfer)
    files, tiny = chosen_files(arguments)
    request = _request(arguments, tiny)
    told = Told.read(arguments.image, arguments.crf, arguments.audio, arguments.audio_mode)
    told.check(request)
    device = chosen_device(arguments.device)
    engine = Engine.open(files, Options(**{name: getattr(arguments, name) for name in OPTIONS}), device)
    folder = runs_folder(arguments.runs)
    engine.forecast = forecaster(folder, device)
    engine = engine.with_loras(arguments.lora) if arguments.lora else engine
    request = replace(request, compression=engine.compression)
    second = SecondStage.of(arguments.upscaler, arguments.stage2_lora, engine)
    job = _job(engine, request if second is None else second.first(request), request, arguments.batch_size)
    for path in clip_paths(output, arguments.batch_size):
        checked_output(path, arguments.transfer)
    prompts = {"prompt": request.prompt, **({} if request.negative is None else {"negative": request.negative})}
    record = RunRecord(folder, _facts(engine, request, job, second), prompts, os.environ.get("LTX25_RECORD_PROMPTS") == "1")
    return recorded(record, device, arguments.quiet, lambda watch: _render(engine, request, job, second, told, arguments, output, record, watch))


def _render(
    engine: Engine, request: Request, job: SampleJob, second: SecondStage | None, told: Told, how: argparse.Namespace, output: Path, record: RunRecord, watch: Watch
) -> list[str]:
    """Encode, sample, decode and write; returns a line about each file."""
    positive = engine.encode(request.prompt, watch)
    negative = None if request.negative is None else engine.encode(request.negative, watch)
    audio, heard = told.sound_of(request, job, engine, watch)
    seen = told.pictures_at(engine.video_shape(job.video), engine, watch)
    again = () if second is None else told.pictures_at(request.video, engine, watch)
    job = replace(job, audio=audio, conditions=(*seen, *heard), positive=positive, negative=negative)
    made_by = (told.soundtrack(request), request.frame_rate, request.seed, chosen_files(how)[0], how.transfer, path_text(record.path))
    clip = engine.sample(job, watch, how.profile)
    if second is not None:
        with keeping(Kept(clip.video, clip.audio, *made_by), output, FIRST_STAGE):
            clip = second.refine(job, clip, (*again, *heard), watch)
    for notice in dict.fromkeys((*positive.told, *(negative.told if negative else ()), *clip.notices)):
        record.note("warning", text=notice)
        tell(f"note: {notice}")
    kept = Kept(clip.video, clip.audio, *made_by)
    with keeping(kept, output):
        return finish(engine, kept, how.tiling, output, record, watch)


def _job(engine: Engine, first: Request, whole: Request, batch: int) -> SampleJob:
    """The job of the first stage, checked as far as it can be before a prompt is encoded: `engine.facts` checks the rest."""
    engine.check_frames(whole.video.latent(engine.compression), max(batch, 1))
    engine.check_sound(clip_samples(whole.frames, whole.frame_rate), max(batch, 1))
    video, audio = empty_latents(first.video, first.frame_rate, batch, engine.compression)
    guidance = first.guidance_by_sigma(engine.blocks)
    sigmas, schedule = first.noise_levels()
    nothing = Conditioning(torch.zeros(0), torch.zeros(0), ())
    return SampleJob(
        video=video,
        audio=audio,
        video_mask=None,
        audio_mask=None,
        frame_rate=first.frame_rate,
        seed=first.seed,
        positive=nothing,
        negative=None if first.negative is None else nothing,
        video_guidance=guidance[0],
        audio_guidance=guidance[1],
        sigmas=sigmas,
        schedule=schedule,
        sampler=first.sampler,
        eta=first.eta,
        conditions=(),
        add_noise=True,
    )


def chosen_files(arguments: argparse.Namespace) -> tuple[Files, bool]:
    """The four files, and whether they are the tiny ones."""
    named = {slot: getattr(arguments, slot) for slot in SLOTS}
    missing = [flag(slot) for slot, path in named.items() if path is None]
    if len(missing) == len(SLOTS):
        tiny = ready(cache_folder() / "tiny")
        return Files(**{slot: getattr(tiny, slot) for slot in SLOTS}), True
    if arguments.tiny:
        raise InputError("--tiny brings its own files; leave out either it or the paths.")
    if missing:
        raise InputError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: name all four files, or none for the tiny checkpoint.")
    return Files(**named), False


def _request(arguments: argparse.Namespace, tiny: bool) -> Request:
    given = {name: getattr(arguments, name) for name in FLAGS if getattr(arguments, name) is not None}
    values = {**(TINY_DEFAULTS if tiny else {}), **given}
    if "negative" not in values and not reads_negative(values):
        values["negative"] = None
    return Request(prompt=arguments.prompt, **values)


def reads_negative(values: Mapping[str, Any]) -> bool:
    """Whether a render with these flags has a use for a negative prompt."""
    later = [value for named in parse_bins(values.get("bins", "")).values() for name, value in named.items() if name.endswith("_cfg")]
    return any(cfg != 1.0 for cfg in (values.get("video_cfg"), values.get("audio_cfg"), *later)) or sampler_of(values.get("sampler", "auto"), None).uncond


def _facts(engine: Engine, request: Request, job: SampleJob, second: SecondStage | None) -> dict[str, object]:
    """The run record's header: machine, files, options, geometry, what will run, settings. Prompts go their own way."""
    geometry = ("width", "height", "frames", "frame_rate")
    settings = {name: getattr(request, name) for name in FLAGS if name not in ("negative", *geometry)}
    headers, more = engine.headers, {}
    if second is not None:
        headers, more = {**headers, "upscaler": second.header}, {"stage2": second.facts(request, job)}
        settings |= second.settings
    return {
        **machine(engine.device),
        "files": files_facts(headers),
        "options": vars(engine.options),
        "geometry": {**{name: getattr(request, name) for name in geometry}, "batch": len(job.audio)},
        **engine.facts(job),
        **more,
        "settings": settings,
    }


def chosen_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # not only made: the meta device has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).split("\n", 1)[0].rstrip(".")
        raise InputError(f"device '{name}' cannot be used ({reason}); use auto or cpu.") from None
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def flag_takes(name: str, kind: Callable[[str], Any]) -> dict[str, Any]:
    """For add_argument: a switch where the setting is one, else a value. None where it is not given."""
    if kind is bool:
        return {"action": "store_true", "default": None}
    return {"type": kind, "metavar": name.split("_")[-1].upper()}


def _help(name: str, text: str) -> str:
    if DEFAULTS[name] is False:
        return text
    if name == "negative":
        return f"{text}; the default names common flaws, see the README"
    default = "" if DEFAULTS[name] in (None, "") else f"default {DEFAULTS[name]}"
    if name in TINY_DEFAULTS:
        default += f" [{TINY_DEFAULTS[name]}]"
    return "; ".join(part for part in (text, default) if part)
