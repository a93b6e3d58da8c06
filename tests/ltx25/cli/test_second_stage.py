"""`ltx25 render --upscaler`: both stages of one command, by what the engine is asked for, what is written and what is recorded."""

import json
from dataclasses import dataclass, field

import pytest
import torch
from comfyui_ltx25.ltx25.cli import main
from comfyui_ltx25.ltx25.conditions import Frozen, Image
from comfyui_ltx25.ltx25.engine import Engine, Sampled, SampleJob
from comfyui_ltx25.ltx25.guidance import OFF, Bins
from comfyui_ltx25.ltx25.instrument.history import read_run
from comfyui_ltx25.ltx25.instrument.report import steps_text
from comfyui_ltx25.ltx25.schedule import STEPS, sigmas_of
from comfyui_ltx25.tests.ltx25.cli.test_render import files, frames_of, here, refused, rendered
from comfyui_ltx25.tests.ltx25.cli.test_told import PLAIN, UNGUIDED, picture, voice
from comfyui_ltx25.tests.support.loras import tiny_lora
from comfyui_ltx25.tests.support.tiny import tiny_files

__all__ = ["here", "picture", "voice"]
LARGE = ["--width", "128", "--height", "192", "--frames", "9", "--steps", "1"]
TWO = ["--upscaler", str(tiny_files().spatial_upscaler)]


@dataclass
class Seen:
    """What the engine was asked for, in order; `loras` of each sampling by strength, `heard`: sound that was decoded."""

    jobs: list[SampleJob] = field(default_factory=list)
    clips: list[Sampled] = field(default_factory=list)
    loras: list[list[float]] = field(default_factory=list)
    large: list[torch.Tensor] = field(default_factory=list)
    heard: list[torch.Tensor] = field(default_factory=list)


@pytest.fixture
def seen(monkeypatch):
    found, sample, upscale, decode_audio = Seen(), Engine.sample, Engine.upscale, Engine.decode_audio

    def sampled(engine, job, *rest):
        found.jobs.append(job)
        found.loras.append([lora.strength for lora in engine.loras])
        found.clips.append(sample(engine, job, *rest))
        return found.clips[-1]

    def enlarged(engine, latent, *rest):
        found.large.append(upscale(engine, latent, *rest))
        return found.large[-1]

    def decoded(engine, latent, *rest):
        found.heard.append(latent)
        return decode_audio(engine, latent, *rest)

    monkeypatch.setattr(Engine, "sample", sampled)
    monkeypatch.setattr(Engine, "upscale", enlarged)
    monkeypatch.setattr(Engine, "decode_audio", decoded)
    return found


def test_r3_stage_two_refines_the_enlarged_clip_with_its_pictures_anew_at_the_size_asked_for(here, picture, seen, capsys):
    distilled = files(transformer=tiny_files().distilled)
    path = rendered(here, *LARGE, *UNGUIDED, "--schedule", "distilled", *distilled, *TWO, "--image", f"{picture}@0", "--image", f"{picture}@-1:0.5", "--seed", "7", "--stg-blocks", "2")
    assert frames_of(path).shape == (9, 192, 128, 3)
    first, second = seen.jobs
    assert (first.video.shape, second.video.shape) == ((1, 128, 2, 3, 2), (1, 128, 2, 6, 4))
    assert (first.sigmas, second.sigmas) == (sigmas_of("distilled", STEPS), sigmas_of("distilled_stage2", STEPS)) and (first.sampler, second.sampler) == ("auto", "auto")
    assert second.video is seen.large[0] and second.audio is seen.clips[0].audio and second.positive is first.positive
    assert (first.seed, second.seed) == (7, 8) and second.video_guidance == second.audio_guidance == Bins.constant(OFF)
    for job in seen.jobs:
        assert [(type(item), item.frame, item.strength) for item in job.conditions] == [(Image, 0, 1.0), (Image, -1, 0.5)]
        assert all(item.latent.shape[3:] == job.video.shape[3:] for item in job.conditions)
    assert torch.equal(seen.clips[1].video[:, :, :1], second.conditions[0].latent)  # strength 1: the full-size picture, to the bit
    assert seen.heard[0] is seen.clips[1].audio  # one distilled file in both stages: the sound of the second
    assert "note:" not in capsys.readouterr().err
    lines = [json.loads(line) for line in next((here / "runs").glob("*.jsonl")).read_text().splitlines()]
    (header, *_), facts = lines, [line["facts"] for line in lines if line["event"] == "phase" and line["name"] == "sample" and line["state"] == "open"]
    assert (header["geometry"]["width"], header["geometry"]["height"]) == (128, 192)
    assert (header["steps"], header["stage2"]["steps"], header["files"]["upscaler"]["name"]) == (8, 3, tiny_files().spatial_upscaler.name)
    assert (header["tokens"]["video"], header["stage2"]["tokens"]["video"]) == (12, 48)
    assert [one["tokens"]["video"] for one in facts] == [12 + 6, 48 + 24]  # with the picture beside the clip
    assert header["settings"]["upscaler"] == tiny_files().spatial_upscaler.name  # another request than in one stage
    assert steps_text(read_run(next((here / "runs").glob("*.jsonl")))) == "8 steps of cond + 3 steps of cond"


def test_a_guided_first_stage_has_a_second_with_its_own_lora_and_keeps_its_sound(here, seen):
    style, fast = (str(tiny_lora(here / f"{name}.safetensors")) for name in ("style", "fast"))
    rendered(here, *LARGE, *TWO, "--lora", f"{style}:0.5", "--stage2-lora", f"{fast}:0.25", "--sampler", "res_2s", "--stg-blocks", "2")
    first, second = seen.jobs
    assert seen.loras == [[0.5], [0.5, 0.25]]
    assert first.video_guidance != second.video_guidance and first.negative is not None and second.negative is None
    assert (first.sampler, second.sampler) == ("res_2s", "res_2s")
    assert seen.heard[0] is seen.clips[0].audio and not torch.equal(seen.clips[1].audio, seen.clips[0].audio)


def test_f8_a_soundtrack_of_ones_own_is_kept_to_the_bit_through_both_stages(here, voice, seen, capsys):
    """By the dev file, which has no business in a second stage without its LoRA: a note."""
    rendered(here, *LARGE, *PLAIN, *TWO, "--audio", str(voice))
    for job, clip in zip(seen.jobs, seen.clips, strict=True):
        assert [type(item) for item in job.conditions] == [Frozen] and torch.equal(clip.audio, seen.jobs[0].audio)
    assert not seen.heard  # the file has the sound itself
    assert "is a dev file by its name, and schedule 'distilled_stage2' is for the distilled file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--upscaler", "{here}/nowhere.safetensors"], "nowhere.safetensors does not exist"),
        (["--upscaler", str(tiny_files().temporal_upscaler)], "use the published spatial upscaler"),
        (["--upscaler", str(tiny_files().audio_vae)], "wanted a latent upscaler"),
        ([*TWO, "--width", "96", "--height", "160"], "width 96 px is not a multiple of 64 (use 64 or 128); height 160 px is not a multiple of 64 (use 128 or 192)"),
        ([*TWO, "--stage2-lora", "{here}/nowhere.safetensors"], "nowhere.safetensors does not exist"),
        ([*TWO, "--stage2-lora", str(tiny_files().audio_vae)], "wanted a LoRA"),
        ([*TWO, "--width", "8192", "--height", "8192", "--frames", "8193"], "frames of 8192 x 8192 px needs"),
        (["--stage2-lora", "x.safetensors"], "--stage2-lora is for the second of two stages; name the upscaler"),
    ],
)
def test_r5_what_stage_two_cannot_use_is_one_sentence_before_stage_one(here, capsys, arguments, words):
    assert words in refused(here, capsys, *LARGE, *(part.format(here=here) for part in arguments))


def test_a_second_stage_that_fails_leaves_the_clip_of_the_first(here, monkeypatch, capsys):
    def short(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("comfyui_ltx25.ltx25.engine.upscale", short)
    assert main(["render", "--prompt", "a", "-o", str(here / "x.mp4"), "--device", "cpu", "--quiet", *LARGE, *PLAIN, *TWO]) == 1
    latent = here / "x.latent.safetensors"
    assert f"the clip of stage 1 is kept, `ltx25 decode {latent} -o {here / 'x.mp4'}` shows it" in capsys.readouterr().err
    assert main(["decode", str(latent), "-o", str(here / "x.mp4"), "--device", "cpu", "--quiet"]) == 0
    assert frames_of(here / "x.mp4").shape == (9, 96, 64, 3)


RENDER = ("render", "--prompt", "a", "-o", "x.mp4")
EMPTY = [(*RENDER, flag) for flag in ("--upscaler", "--audio", "--transformer", "--runs", "--lora", "--stage2-lora")]


@pytest.mark.parametrize("command", [*EMPTY, ("decode", "-o", "x.mp4"), ("tiny",), ("plan", "--video-vae"), ("plan", "--upscaler"), ("runs", "show", "--runs")])
@pytest.mark.parametrize("nothing", ["", " "])
def test_a_path_that_is_empty_is_one_sentence(here, capsys, command, nothing):
    """As of a shell's variable that is not set: it would be the current folder."""
    with pytest.raises(SystemExit) as ended:
        main([*command, nothing])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.count("\n") == 1 and f": '{nothing}' " in shown and "write" in shown
