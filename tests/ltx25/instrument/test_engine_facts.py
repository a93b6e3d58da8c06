"""What the engine tells the instrument: facts of a sample phase before it runs, back ends chosen, a traced step."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfyui_ltx25.ltx25 import engine as module
from comfyui_ltx25.ltx25.conditions import AttentionStrength, Image
from comfyui_ltx25.ltx25.engine import Conditioning, Engine, Files, Options, SampleJob
from comfyui_ltx25.ltx25.exr import write_exr
from comfyui_ltx25.ltx25.guidance import Bins, Guidance
from comfyui_ltx25.ltx25.instrument import RunRecord, TextSink, Watch, profile
from comfyui_ltx25.ltx25.instrument.costs import HOW
from comfyui_ltx25.ltx25.instrument.history import read_run
from comfyui_ltx25.ltx25.instrument.report import steps_text
from comfyui_ltx25.ltx25.instrument.selftest import Speed
from comfyui_ltx25.ltx25.mux import write_video
from comfyui_ltx25.ltx25.preparing import facts_of, prepare
from comfyui_ltx25.ltx25.tiny import write_tiny

OFF = Guidance(1.0, 0.0, 1.0, 0.0, frozenset(), 0)
CFG = Guidance(3.0, 0.0, 1.0, 0.0, frozenset(), 0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    files = write_tiny(tmp_path_factory.mktemp("tiny"))
    paths = Files(files.transformer, files.text_encoder, files.video_vae, files.audio_vae)
    return Engine.open(paths, Options("auto", "auto", "auto", "memory"), torch.device("cpu"))


@pytest.fixture(scope="module")
def job(engine):
    config = engine.opened.dit
    text = Conditioning(torch.zeros(1, 1024, config.width), torch.zeros(1, 1024, config.audio_width), ())
    return SampleJob(
        video=torch.zeros(1, config.in_channels, 2, 2, 3), audio=torch.zeros(1, 8, 9, 16), video_mask=None, audio_mask=None, frame_rate=24.0, seed=5,
        positive=text, negative=text, video_guidance=Bins.constant(CFG), audio_guidance=Bins.constant(OFF), sigmas=(1.0, 0.7, 0.4, 0.0), schedule=None, sampler="euler", eta=1.0,
        conditions=(), add_noise=True,
    )  # fmt: skip


def test_facts_before_anything_is_loaded_are_those_of_the_run(engine, job, tmp_path):
    facts = engine.facts(job)
    assert not any(part.loaded for part in engine.parts)
    assert facts["tokens"] == {"video": 12, "audio": 9} and facts["steps"] == 3 and facts["forwards"] == 6
    assert facts["legs"] == ["cond", "uncond"] and facts["text"] == 1024 and facts["precision"] == "float32"
    with RunRecord(tmp_path, {}) as record:
        engine.sample(job, Watch([record]))
    run = read_run(record.path)
    opened = next(event for event in run.of("phase") if event["name"] == "sample" and event["state"] == "open")
    assert opened["facts"] == {**facts}
    assert [(forward["first"], forward["last"]) for forward in run.forwards] == [(1, 2), (3, 4), (5, 6)]
    (work,) = facts["work"]
    assert (work["legs"], work["groups"]) == ("cond+uncond", 3) and all(forward["legs"] == work["legs"] for forward in run.forwards)


@pytest.mark.parametrize(
    ("precision", "streams", "strength", "adapted"),
    [("float32", False, 1.0, False), ("float32", True, 1.0, True), ("fp8", False, 1.0, True), ("fp8", False, 0.0, False), ("fp8+nvfp4", True, None, False)],
)
def test_loras_that_cost_every_forward_something_are_told_apart(engine, job, precision, streams, strength, adapted):
    """One that was added to the weights costs nothing; beside weights kept as stored, or on blocks that come anew, it does."""
    ready = prepare(job, engine.opened, False, ())
    loras = [] if strength is None else [SimpleNamespace(strength=strength)]
    facts = facts_of(ready, 0, replace(engine.opened, precision=precision), torch.device("cpu"), streams, loras)
    assert facts.get("adapted", False) == adapted and "masked" not in facts


def test_attention_masks_are_told(engine, job):
    image = Image(torch.rand(1, engine.opened.dit.in_channels, 1, 2, 3), 4, 1.0)
    plain, masked = (engine.facts(replace(job, conditions=(item,))) for item in (image, AttentionStrength(image, 0.5)))
    assert masked == {**plain, "masked": True}


def test_a_run_without_kernels_on_a_card_says_so_where_series_are_told_apart(engine, job, monkeypatch):
    cuda = torch.device("cuda")
    assert "kernels" not in facts_of(engine._prepare(job), 0, engine.opened, cuda, False, ())
    monkeypatch.setenv("LTX25_KERNELS", "reference")
    assert facts_of(engine._prepare(job), 0, engine.opened, cuda, False, ())["kernels"] == "reference" and "kernels" in HOW
    assert "kernels" not in engine.facts(job), "on a CPU there are none"


def test_steps_with_other_legs_than_the_first_are_told(engine, job, tmp_path):
    """Guided in the middle alone: the first step, of one leg, speaks for no other."""
    windowed = replace(job, video_guidance=Bins.window(CFG, 0.8, 0.1), sigmas=(1.0, 0.9, 0.7, 0.4, 0.0))
    assert engine.facts(windowed)["legs"] == ["cond", "uncond"]
    with RunRecord(tmp_path, {}) as record:
        engine.sample(windowed, Watch([record]))
    assert steps_text(read_run(record.path)) == "4 steps: 2 of cond, 2 of cond+uncond"


def test_phases_around_the_forwards_say_the_size_they_work_on(engine, tmp_path):
    """A graph may have clips of several sizes in one record, and a sound is none of a clip."""
    with RunRecord(tmp_path, {}) as record:
        watch = Watch([record])
        engine.encode_video(torch.rand(11, 64, 96, 3), watch)
        engine.encode_audio(torch.rand(2, 1, 16000), 16000, watch)
        frames = engine.decode_video(torch.randn(2, engine.opened.dit.in_channels, 2, 2, 3), 0, "auto", watch)
        sound = engine.decode_audio(torch.randn(2, 8, 9, 16), None, watch)
        write_video(tmp_path / "x.mp4", frames[:9], sound[0], 12.5, {}, watch)
        write_exr(tmp_path / "x", frames[:1], None, 24.0, {}, watch)
    told = [(row["name"], {name: value for name, value in row["facts"].items() if isinstance(value, (int, float))}) for row in read_run(record.path).phases]
    assert [phase for phase in told if phase[0] != "load.read"] == [
        ("encode.video", {"width": 96, "height": 64, "frames": 9, "batch": 1}),
        ("encode.audio", {"latent_frames": 26, "batch": 2}),
        ("decode.video", {"width": 96, "height": 64, "frames": 9, "batch": 2}),
        ("decode.audio", {"latent_frames": 9, "batch": 2}),
        ("mux", {"width": 96, "height": 64, "frames": 9, "frame_rate": 12.5}),
        ("mux", {"width": 96, "height": 64, "frames": 1, "frame_rate": 24.0}),
    ]


def work_of(**groups):
    return [{"legs": legs, "kind": "", "groups": n, "linear": 1.0, "attention": 1.0} for legs, n in groups.items()]


@pytest.mark.parametrize(
    ("header", "facts", "said"),
    [
        ({"steps": 4, "legs": ["cond"]}, {}, "4 steps of cond"),  # a record without the arithmetic
        ({}, {"steps": 1, "work": work_of(cond=1)}, "1 step of cond"),
        ({}, {"steps": 4, "work": work_of(cond=8)}, "4 steps, 8 groups of cond"),  # two calls a step, as res_2s makes
        ({}, {"steps": 4, "work": work_of(cond=2)}, "4 steps, 2 groups of cond"),  # two steps skipped
        ({}, {"steps": 4, "work": [*work_of(cond=2), {**work_of(cond=2)[0], "kind": "video only"}]}, "4 steps: 2 of cond, 2 of cond (video only)"),  # by the sound alone
        ({}, {"steps": 4, "work": work_of(cond=2) + work_of(cond=2)}, "4 steps of cond"),  # in two kinds
        ({}, {"steps": 5, "work": work_of(cond=1, uncond=2)}, "5 steps, 3 groups: 1 of cond, 2 of uncond"),  # two steps skipped
        ({}, {"steps": None, "work": None}, "no steps"),
    ],
)
def test_steps_and_legs_in_one_phrase(tmp_path, header, facts, said):
    told = {"tokens": {"video": 1}, **facts} if facts else {}
    lines = ({"event": "run", "t": 0, "format": 1, **header}, {"event": "phase", "t": 0, "state": "open", "id": 1, "name": "sample", "facts": told})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert steps_text(read_run(tmp_path / "a.jsonl")) == said


def test_the_forecast_is_shown_before_the_first_forward(engine, job):
    texts = []

    class Texts:
        wants_preview = False

        def check(self): ...
        def opened(self, phase): ...
        def closed(self, phase): ...
        def ticked(self, phase):
            texts.append(phase.text)

    engine.forecast = lambda facts: f"about 9 s predicted for {facts['forwards']}"
    try:
        engine.sample(job, Watch([Texts()]))
    finally:
        engine.forecast = lambda facts: ""
    first = next(text for text in texts if text.startswith("step"))
    assert first == "step 1/3 - forward 1-2/6 (cond+uncond) - about 9 s predicted for 6"


def test_a_forecast_that_fails_costs_no_render(engine, job, caplog):
    def fails(facts):
        raise OverflowError("math range error")

    engine.forecast = fails
    try:
        assert engine.sample(job, Watch([])).video.shape == job.video.shape
    finally:
        engine.forecast = lambda facts: ""
    assert [told.getMessage() for told in caplog.records] == ["The time of this render is not predicted (OverflowError: math range error); the render goes on."]


def test_back_ends_chosen_by_timing_are_in_the_record(engine, job, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "choices", lambda: {"4x1344 by 1344, 128 wide": "cudnn"})
    with RunRecord(tmp_path, {}) as record:
        engine.sample(job, Watch([record]))
    (choice,) = read_run(record.path).of("choice")
    assert choice["attention"] == {"4x1344 by 1344, 128 wide": "cudnn"}


def test_a_profiled_run_gives_the_same_latents_and_a_split(engine, job, tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "self_test", lambda device: Speed("float32", 1e12, 1e10, None))
    plain, texts = engine.sample(job, Watch()), []
    with RunRecord(tmp_path, {}) as record:
        traced = engine.sample(job, Watch([record, TextSink(texts.append)]), profile=True)
    assert torch.equal(plain.video, traced.video) and torch.equal(plain.audio, traced.audio)
    assert plain.profiles == () and len(traced.profiles) == 1
    (event,) = read_run(record.path).of("profile")
    lines = [text for text in texts if " - last " in text]
    assert [n for n, text in enumerate(lines) if " under the profiler" in text] == [event["group"]]
    assert sum(event["seconds"].values()) == pytest.approx(event["wall"], rel=0.02)
