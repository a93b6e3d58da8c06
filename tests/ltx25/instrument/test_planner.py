import random
import re
from dataclasses import fields, replace

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.conditions import Frozen
from comfyui_ltx25.ltx25.config.upscaler import read_upscaler_config
from comfyui_ltx25.ltx25.config.video import read_video_config
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.instrument import RunRecord, Sink, Watch
from comfyui_ltx25.ltx25.instrument.flops import group_flops
from comfyui_ltx25.ltx25.instrument.footprint import (
    DEVICE_BOUNDS,
    GRAIN,
    HOST_BOUNDS,
    PARTS,
    WRITING,
    Footprint,
    device_lines,
    host_lines,
    line_of,
)
from comfyui_ltx25.ltx25.instrument.forecast import Forecast, forecaster
from comfyui_ltx25.ltx25.instrument.header import device_name
from comfyui_ltx25.ltx25.instrument.history import read_newest, read_run, read_runs
from comfyui_ltx25.ltx25.instrument.memory import host_free, host_now
from comfyui_ltx25.ltx25.instrument.models import PUBLISHED_UPSCALER, Enlarging, Models, published
from comfyui_ltx25.ltx25.instrument.plan import Budget
from comfyui_ltx25.ltx25.instrument.plan_text import (
    frames_of,
    largest_text,
    parse_bytes,
    parse_seconds,
    parse_size,
    plan_text,
)
from comfyui_ltx25.ltx25.instrument.planner import Planner
from comfyui_ltx25.ltx25.instrument.report import clip_text, steps_text
from comfyui_ltx25.ltx25.instrument.selftest import Speed
from comfyui_ltx25.ltx25.parts import Files, open_parts
from comfyui_ltx25.ltx25.preparing import prepare
from comfyui_ltx25.ltx25.request import Request
from comfyui_ltx25.ltx25.residency import Standalone
from comfyui_ltx25.ltx25.sampler import SAMPLERS
from comfyui_ltx25.ltx25.schedule import SCHEDULES
from comfyui_ltx25.ltx25.shapes import AudioLatentShape, VideoLatentShape
from comfyui_ltx25.ltx25.stages import first_request, refinement
from comfyui_ltx25.ltx25.upscaler import working_bytes as upscaling_bytes
from comfyui_ltx25.ltx25.video.output import copying_bytes
from comfyui_ltx25.ltx25.working import wave_bytes
from comfyui_ltx25.tests.support.engine import engine, job
from comfyui_ltx25.tests.support.files import write_published
from comfyui_ltx25.tests.support.records import GUIDED, HOST, PER_TOKEN, PUBLISHED, Clock, Memory, law_seconds, render

CPU = torch.device("cpu")
CARD = torch.device("cuda")  # only its name is asked for: plans touch no device
SPEED = Speed("bfloat16", 700e12, 4e12, 5e10)
NO_GUIDANCE = {f"{stream}_{scale}": value for stream in ("video", "audio") for scale, value in (("cfg", 1.0), ("stg", 0.0), ("modality", 1.0))}
NO_LIMIT = Budget(None, None, None)
SIZES = ((768, 448, 25), (1024, 576, 49), (1024, 576, 97))


def request(width=1280, height=704, frames=121, **more):
    return Request(prompt="plan", width=width, height=height, frames=frames, **more)


@pytest.fixture
def planner(tmp_path, monkeypatch):
    """With the records of three geometries."""
    clock = Clock(monkeypatch)
    for n, size in enumerate(SIZES):
        render(tmp_path, clock, *size, noise=0.02, seed=n, device=device_name(CARD))
    return Planner(published(CARD), CARD, read_runs(tmp_path)[0], True, SPEED)


@pytest.fixture
def bare():
    """A device without records."""
    return Planner(published(CARD), CARD, [], True, SPEED)


def test_published_sizes_are_those_of_the_published_files(tmp_path):
    names = ("ltx-2.5-22b-dev-transformer-bf16", "gemma4-12b-with-proj-ltx-2.5-bf16", "ltx-2.5-video-vae-conv-bf16", "ltx-2.5-audio-vae-bf16")
    files = Files(*(write_published(name, tmp_path) for name in names))
    for device, precision in ((CARD, "auto"), (CARD, "fp8"), (torch.device("cpu"), "auto")):
        ours, theirs = published(device, precision == "fp8"), Models.of(open_parts(files, device, precision))
        for field in fields(Models):
            if field.name != "name":
                assert getattr(ours, field.name) == getattr(theirs, field.name), field.name


def test_time_of_a_geometry_not_seen_within_15_percent(planner):
    plan = planner.plan(request(1024, 704, 73))
    flops = group_flops(PUBLISHED, GUIDED, *plan.tokens, 1024)
    truth = 30 * law_seconds(flops.linear / 1e12, flops.attention / 1e12) + 2.0  # the first group takes 2 s more
    sample = next(phase for phase in plan.phases if phase.name == "sample")
    assert sample.seconds == pytest.approx(truth, rel=0.15) and not sample.extrapolated
    assert "law of 3 geometries, within" in sample.basis
    decode = next(phase for phase in plan.phases if phase.name == "decode.video")
    assert decode.seconds == pytest.approx(0.2 + 4e-9 * 1024 * 704 * 73, rel=0.05) and not decode.extrapolated
    assert plan.forwards == 120


def test_two_stages_are_planned_as_their_samplings_and_what_lies_between(planner, tmp_path):
    """Stage 1 with its guidance at half the size, stage 2 with one leg at the whole one."""
    two = Planner(published(CARD), CARD, read_runs(tmp_path)[0], True, SPEED, enlarging=PUBLISHED_UPSCALER)
    asked = request(1280, 704, 121)
    plan, small, large = two.plan(asked), planner.plan(request(640, 352, 121)), planner.plan(request(1280, 704, 121, schedule="distilled_stage2", negative=None, **NO_GUIDANCE))
    samplings = [[phase.seconds for phase in one.phases if phase.name == "sample"] for one in (plan, small, large)]
    assert samplings[0] == samplings[1] + samplings[2]
    names = [phase.name for phase in plan.phases]
    assert names[names.index("sample") :][:3] == ["sample", "upscale", "sample"]
    assert (plan.tokens, plan.forwards, plan.first) == (large.tokens, small.forwards + 3, (640, 352))
    upscaler = 2 * PUBLISHED_UPSCALER.numbers  # bytes on a card, from its phase on
    assert large.device + upscaler == plan.device < planner.plan(asked).device  # which runs four legs of the large clip
    assert "123 forwards in two stages, the first at 640x352, with" in plan_text(plan, two.models, NO_LIMIT)
    assert all(found.request.width % 64 == found.request.height % 64 == 0 for found in two.largest(asked, Budget(60.0, None, None)))


def job_of(request, e, frozen=()):
    """What a render of `request` runs, but for its prompts."""
    video, audio = request.guidance_by_sigma(e.blocks)
    sigmas, schedule = request.noise_levels()
    guided = {"video_guidance": video, "audio_guidance": audio, "sigmas": sigmas, "schedule": schedule, "sampler": request.sampler, "eta": request.eta}
    made = job(e, conditions=tuple(Frozen(name) for name in sorted(frozen)), **guided)
    return made if request.negative is not None else replace(made, negative=None)


def asked_at_random(chance):
    """A request, and the streams of it that are given."""

    def scale(off):
        return chance.choice((off, off, 0.0, 1.0, 3.0))

    scales = {f"{stream}_{name}": scale(off) for stream in ("video", "audio") for name, off in (("cfg", 1.0), ("stg", 0.0), ("modality", 1.0))}
    levels = chance.sample((0.97, 0.9, 0.75, 0.5, 0.2, 0.05), chance.randint(0, 3))
    asked = {
        **scales,
        "schedule": chance.choice(SCHEDULES),
        "sampler": chance.choice(SAMPLERS),
        "steps": chance.randint(1, 9),
        "sigmas": chance.choice((None, None, (1.0, 0.8, 0.3, 0.0), (0.7, 0.2))),
        "skip_step": chance.choice((0, 0, 1, 2)),
        "stg_blocks": chance.choice(("", "1", "0,1")),
        "guidance_start": chance.choice((1.0, 1.0, 0.95, 0.6)),
        "guidance_end": chance.choice((0.0, 0.0, 0.1, 0.5)),
        "bins": "; ".join(f"{level}: {name}={scale(1.0)}" for level in levels for name in chance.sample(sorted(scales), 1)),
        "negative": chance.choice(("", "", "", None)),
    }
    return asked, frozenset(chance.choice(((), (), (), ("audio",), ("video",))))


def test_forwards_planned_are_the_forwards_of_the_job_whatever_is_asked_for():
    e, chance, counts = engine(), random.Random(0), set()
    models, two = Models.of(e.opened), replace(PUBLISHED_UPSCALER, config=replace(PUBLISHED_UPSCALER.config, channels=e.opened.dit.in_channels))

    def refused(call):
        try:
            return call()
        except InputError as error:
            return str(error)

    for _ in range(200):
        asked, frozen = asked_at_random(chance)
        made = refused(lambda asked=asked: request(128, 64, 9, compression=e.compression, **asked))
        if isinstance(made, str):  # no render of it either
            continue
        work = refused(lambda made=made, frozen=frozen: prepare(job_of(made, e, frozen), e.opened, False, ()).job)
        plan = refused(lambda made=made, frozen=frozen: Planner(models, CPU, [], False, SPEED, frozen=frozen).plan(made))
        if isinstance(work, str):
            assert plan == work
            continue
        counts.add(plan.forwards)
        assert plan.forwards == work.forwards, (asked, frozen)
        small = refused(lambda made=made: first_request(made, two.config))
        staged = refused(lambda made=made, frozen=frozen: Planner(models, CPU, [], False, SPEED, frozen=frozen, enlarging=two).plan(made))
        if isinstance(small, str):  # noise levels that do not end in 0: no clip to enlarge
            assert staged == small
            continue
        first = job_of(small, e, frozen)
        forwards = work.forwards + prepare(refinement(first, first.video, first.audio, first.conditions), e.opened, False, ()).job.forwards
        assert staged.forwards == forwards, (asked, frozen)
    assert len(counts) > 20


def test_the_published_upscaler_is_the_published_file(tmp_path):
    header = read_header(write_published("ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0", tmp_path))
    assert PUBLISHED_UPSCALER.config == read_upscaler_config(header) and header.size == pytest.approx(PUBLISHED_UPSCALER.read, rel=1e-3)
    assert Enlarging.of(header, PUBLISHED_UPSCALER.config).numbers == PUBLISHED_UPSCALER.numbers


def test_enlarging_may_be_what_takes_the_most_memory(bare):
    """A small card lets the other parts go; then the upscaler stands alone with what it works in."""
    two = Planner(bare.models, CARD, [], True, SPEED, enlarging=PUBLISHED_UPSCALER)
    working = upscaling_bytes(PUBLISHED_UPSCALER.config, 16, 11, 20, 2)
    phases = {}
    for phase, part, clip in two._holding(*(Footprint(VideoLatentShape(128, 16, *size), AudioLatentShape(8, 126, 16), 1, 1, upscaler=PUBLISHED_UPSCALER.config) for size in ((11, 20), (22, 40)))):
        phases.setdefault(phase, []).append((part, clip.latent.height, clip.working(phase, two.models, "cuda", None)["device"]))
    assert phases["upscale"] == [("upscaler", 11, working)]
    assert [height for _, height, _ in phases["sample"]] == [11, 22] and [height for _, height, _ in phases["decode.video"]] == [22]


def test_the_upscaler_of_a_record_on_a_cpu_is_no_memory_of_the_phases_after_it(tmp_path, monkeypatch):
    lines = []
    for n, files in enumerate(({}, {"upscaler": {"name": "u", "bytes": 200 << 20, "header": "0"}})):
        record = render(tmp_path / str(n), Clock(monkeypatch), *SIZES[0], grown=200 << 30, device=device_name(CPU))
        run = read_run(record.path)
        run.header |= {"device_type": "cpu", "files": files}
        lines.append(host_lines([run], published(CPU), again=False)["decode.video"])
    assert lines[0].fixed - lines[1].fixed == 400 << 20  # float32 of a bfloat16 file


def test_an_extrapolation_is_marked(planner):
    plan = planner.plan(request())
    sample = next(phase for phase in plan.phases if phase.name == "sample")
    assert sample.extrapolated and "extrapolated from 1370 to 7589 tokens" in sample.basis
    flops = group_flops(PUBLISHED, GUIDED, *plan.tokens, 1024)
    assert sample.seconds == pytest.approx(30 * law_seconds(flops.linear / 1e12, flops.attention / 1e12), rel=0.15)


def test_memory_of_a_geometry_not_seen_within_10_percent(planner):
    models = published(CARD)
    for size in ((1024, 704, 73), (1280, 704, 121)):
        plan = planner.plan(request(*size))
        resident = models.held["text encoder"] + models.held["connectors"] + models.held["transformer"]
        assert plan.device == pytest.approx(resident + PER_TOKEN * sum(plan.tokens), rel=0.10)
        pixels = size[0] * size[1] * size[2]
        assert plan.host == pytest.approx(HOST + 12 * pixels, rel=0.10)


def host_plan(folder, size, **how):
    return Planner(published(CARD), CARD, read_runs(folder)[0], True, SPEED, **how).plan(request(*size))


@pytest.mark.parametrize("size", [(1024, 704, 73), (1280, 704, 121), (1920, 1088, 121)])
def test_host_memory_has_a_part_that_grows_with_the_clip_and_one_that_does_not(tmp_path, monkeypatch, size):
    """The last one is extrapolated, and says so."""
    clock = Clock(monkeypatch)
    for seen in SIZES:
        render(tmp_path, clock, *seen, grown=700 << 20, device=device_name(CARD))
    plan = host_plan(tmp_path, size, writes=False)
    assert plan.host == pytest.approx(HOST + (700 << 20) + 12 * size[0] * size[1] * size[2], rel=0.02)
    assert plan.on_host.basis.startswith("in decode.video, by 3 phases of 3 sizes measured here, within ")
    assert plan.on_host.basis.endswith("extrapolated") == (size[0] > 1024)


def test_one_record_tells_what_does_not_grow_and_arithmetic_the_rest(tmp_path, monkeypatch):
    render(tmp_path, Clock(monkeypatch), *SIZES[0], grown=700 << 20, device=device_name(CARD))
    assert host_plan(tmp_path, (1280, 704, 121), writes=False).host == pytest.approx(HOST + (700 << 20) + 12 * 1280 * 704 * 121, rel=0.02)


def test_memory_that_no_record_tells_is_called_arithmetic(bare):
    plan = bare.plan(request())
    assert plan.on_device.basis == "in sample, by arithmetic" and plan.on_host.basis == "in mux, by arithmetic"
    assert "(in mux, by arithmetic)" in plan_text(plan, bare.models, NO_LIMIT)


@pytest.mark.parametrize("measured", [0, 1 << 20, 300 << 30])
@pytest.mark.parametrize(("bounds", "more"), [(DEVICE_BOUNDS, 0), (HOST_BOUNDS, 1 << 30)])
def test_records_of_hidden_or_wild_memory_do_not_carry_the_plan_away(bounds, more, measured):
    for pairs in ([(1 << 30, measured)], [(n << 30, measured * n * n) for n in (1, 2, 4)], [(n << 30, measured / n) for n in (1, 2, 4)]):
        for plain in (1 << 28, 5 << 30, 60 << 30):
            assert bounds[0] * plain * 0.999 <= line_of(pairs, bounds).at(plain) <= bounds[1] * plain + more


MIB = 1 << 20


def test_fewer_than_three_sizes_tell_not_how_far_off_memory_may_be():
    for pairs in ([(100 * MIB, 130 * MIB)], [(100 * MIB, 130 * MIB), (300 * MIB, 390 * MIB)]):
        line = line_of(pairs, HOST_BOUNDS)
        for size in (100 * MIB, 200 * MIB, 900 * MIB):
            assert not line.is_known(size) and "how far off is not known" in line.basis(size) and "within" not in line.basis(size)
        assert line.at(pairs[0][0]) == pairs[0][1]


def test_memory_of_a_size_seen_is_what_it_took_within_its_repeats():
    line = line_of([(100 * MIB, 150 * MIB), (100 * MIB, 156 * MIB), (100 * MIB, 154 * MIB), (300 * MIB, 400 * MIB)], HOST_BOUNDS)
    assert line.at(100 * MIB) == 154 * MIB and line.open(100 * MIB) == 2 * 6 * MIB  # three repeats
    assert line.is_known(100 * MIB) and not line.is_known(300 * MIB)
    assert line_of([(100 * MIB, 150 * MIB), (100 * MIB, 156 * MIB)], HOST_BOUNDS).open(300 * MIB) == 6 * MIB * 3  # twice its size away from the only one


def test_memory_is_known_as_far_as_sizes_left_out_were_missed_and_repeats_differ():
    """A curve that is no line, with repeats that differ: what is left open is the larger of both, and grows outside."""
    sizes = (100 * MIB, 200 * MIB, 400 * MIB, 800 * MIB)
    pairs = [(size, size + 30 * MIB * (size // (100 * MIB)) ** 0.5) for size in sizes]
    line = line_of(pairs, HOST_BOUNDS)
    for size, took in pairs:
        missed = abs(line_of([pair for pair in pairs if pair[0] != size], HOST_BOUNDS).at(size) - took)
        assert GRAIN < missed <= line.off + 1 and line.open(size) >= missed - 1
    noisy = line_of([*pairs, (sizes[1], pairs[1][1] + 90 * MIB)], HOST_BOUNDS)
    assert noisy.open(300 * MIB) >= noisy.off >= 90 * MIB
    inside, near, far = (line.open(size) for size in (300 * MIB, 900 * MIB, 8000 * MIB))
    assert inside < near < far and line.basis(8000 * MIB).endswith("extrapolated")


def test_one_record_makes_no_plan_that_is_sure_to_fit_and_three_sizes_ask_for_what_they_leave_open(tmp_path, monkeypatch):
    clock, roomy = Clock(monkeypatch), Budget(None, 1 << 40, 1 << 40)
    for n, size in enumerate(SIZES):
        record = render(tmp_path, clock, *size, grown=n * n * (40 << 20), device=device_name(CARD))
        planner = Planner(published(CARD), CARD, read_runs(tmp_path)[0], True, SPEED, writes=False)
        text = plan_text(planner.plan(request(*size)), planner.models, roomy)
        assert ("it fits by these numbers; how far off the memory may be is not known" in text) == (n < 2)
        assert (" up to " in text) == (n == 2)
        seen = max(row["peak_host"] for row in read_run(record.path).phases)
        assert planner.plan(request(*size)).host == pytest.approx(seen, rel=1e-6)
    other = planner.plan(request(1024, 704, 73)).on_host
    assert other.known and not planner.plan(request(1024, 704, 73)).beyond(Budget(None, None, other.need))
    assert planner.plan(request(1024, 704, 73)).beyond(Budget(None, None, other.need - 1)) and other.need > other.bytes + (10 << 20)


def test_what_an_earlier_clip_left_in_a_process_tells_nothing_of_a_new_one(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    render(tmp_path, clock, *SIZES[2], device=device_name(CARD))
    expected = host_plan(tmp_path, SIZES[1]).host
    for size in SIZES:
        render(tmp_path, clock, *size, held=3 << 30, device=device_name(CARD))
    assert host_plan(tmp_path, SIZES[1]).host == expected


def test_a_process_that_renders_in_a_row_is_predicted_from_its_like(tmp_path, monkeypatch):
    """What its first render took for good is there already; what it holds is there too."""
    clock = Clock(monkeypatch)
    render(tmp_path, clock, *SIZES[0], grown=700 << 20, device=device_name(CARD))
    for number, size in enumerate(SIZES):
        render(tmp_path, clock, *size, held=(number + 1) << 30, device=device_name(CARD))
    plan = host_plan(tmp_path, (1024, 704, 73), writes=False, outside=HOST + (4 << 30))
    assert plan.host == pytest.approx(HOST + (4 << 30) + 12 * 1024 * 704 * 73, rel=0.02)
    assert "on top of what this process holds, by 3 phases of 3 sizes measured here" in plan.on_host.basis


def test_in_a_process_that_holds_more_the_clip_comes_on_top(planner):
    new, usual, crowded = (
        Planner(planner.models, CARD, planner._runs, True, SPEED, writes=False, outside=outside).plan(request()).host for outside in (None, HOST, 20 << 30)
    )
    assert new == usual
    assert crowded == pytest.approx((20 << 30) + 12 * 1280 * 704 * 121, rel=0.02)


def test_writing_the_clip_takes_host_memory_that_a_hosts_graph_counts_elsewhere(planner, bare):
    whole, graph = (Planner(bare.models, CARD, [], True, SPEED, writes).plan(request()).host for writes in (True, False))
    assert whole - graph > 40 << 20  # 138 MB were measured, less what the decoder's copies took before


def test_what_fits_is_never_refused_by_the_engine():
    """Records may measure less than the engine asks for before a phase: the plan says no where the engine would."""
    e = engine()
    asked = {}

    class Asked(Standalone):
        def room(self, device):
            return 1 << 60

        def ready(self, parts, working, watch):
            super().ready(parts, working, watch)
            asked[parts[0].name] = parts[0].least + working

    e.arbiter = Asked(e.parts)
    e.encode("a cat", Watch())
    clip = e.sample(job(e), Watch())
    e.decode_video(clip.video, 0, "auto", Watch())
    e.decode_audio(clip.audio, None, Watch())
    planner = Planner(Models.of(e.opened), e.device, [], e.batched, SPEED)
    planner._lines["host"] = dict.fromkeys((*PARTS, WRITING), line_of([(1, 0)], (0.0, 0.0, 0)))  # records that measured nothing at all
    planner._baseline = 1 << 20
    plan = planner.plan(request(96, 64, 9, steps=2, stg_blocks="1", compression=e.compression))
    assert len(asked) == 5 and plan.host < plan.on_host.need >= planner._baseline + max(asked.values())
    assert plan.beyond(Budget(None, None, plan.on_host.need - 1)) and not plan.beyond(Budget(None, None, plan.on_host.need))


def test_runs_whose_blocks_took_turns_do_not_count_for_those_that_stay(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    for size in SIZES:
        render(tmp_path, clock, *size, grown=900 << 20, streams=True, device=device_name(CARD))
    runs = read_runs(tmp_path)[0]
    assert host_lines(runs, published(CARD), again=False) == {} == device_lines(runs, published(CARD))


def test_a_stage_is_measured_by_its_own_tokens_and_legs(tmp_path, monkeypatch):
    """A render in two stages: the clip of the record is the large one, its first sampling had a quarter of the tokens."""
    clock, memory = Clock(monkeypatch), Memory()
    clip = {"width": 1280, "height": 704, "frames": 121, "frame_rate": 24.0, "batch": 1}
    with RunRecord(tmp_path, {"device": "Toy card", "device_type": "cuda", "geometry": clip}) as record:
        watch = Watch([record], memory)
        for video, legs in ((3520, ["cond", "uncond"]), (14080, ["cond"])):
            with watch.phase("sample", total=1, unit="forward", tokens={"video": video, "audio": 126}, legs=legs, batched=True) as phase:
                clock.sleep(1.0)
                phase.peak_device = PER_TOKEN * video
            clock.sleep(1.0)
    small, large = VideoLatentShape(128, 16, 11, 20), VideoLatentShape(128, 16, 22, 40)
    alone = [Footprint(shape, AudioLatentShape(8, 126, 16), rows, 1).working("sample", published(CARD), "cuda", None)["device"] for shape, rows in ((small, 2), (large, 1))]
    residuals = [PER_TOKEN * video - size for video, size in zip((3520, 14080), alone, strict=True)]
    line = device_lines(read_runs(tmp_path)[0], published(CARD))["sample"]
    assert (line.samples, line.least, line.most, line.fixed) == (2, min(alone), max(alone), sum(residuals) / 2)
    assert line.off == pytest.approx(abs(residuals[0] - residuals[1]) / 2)


def test_a_clip_of_several_in_a_run_is_measured_by_its_own_size_beside_what_was_decoded_before(tmp_path, monkeypatch):
    """A graph keeps the frames of its earlier clips. Its header tells a sound alone."""
    clock, memory, models = Clock(monkeypatch), Memory(), published(CARD)
    process = {"first": HOST, "now": HOST}
    with RunRecord(tmp_path, {"device": "Toy card", "device_type": "cuda", "process": process, "geometry": {"width": None, "frame_rate": 24.0}}) as record:
        watch, held = Watch([record], memory), 0
        for width, height, frames in (*SIZES, (256, 256, 9)):
            with watch.phase("decode.video", total=1, unit="chunk", width=width, height=height, frames=frames, batch=1) as phase:
                clock.sleep(1.0)
                held += 12 * width * height * frames
                phase.peak_host = HOST + held + (64 << 20)
                phase.peak_device = 5000 * width * height
            with watch.phase("decode.audio", total=1, unit="layer", latent_frames=frames, batch=1) as phase:
                phase.peak_host = HOST + held
    (run,) = read_runs(tmp_path)[0]
    device, host = device_lines([run], models)["decode.video"], host_lines([run], models, again=False)
    alone = [Footprint(VideoLatentShape(128, (frames - 1) // 8 + 1, height // 32, width // 32), None, 1, 1).working("decode.video", models, "cuda", None) for width, height, frames in SIZES]
    assert (device.least, device.most) == (min(size["device"] for size in alone), max(size["device"] for size in alone))
    waves = [wave_bytes(AudioLatentShape.of_latents(size[2]).samples, 1) for size in (*SIZES, (256, 256, 9))]
    assert host["decode.video"].seen == {held + sum(waves[:3]) + copying_bytes(256, 256): [held + (64 << 20)]}  # the highest of the four
    assert host["decode.audio"].seen == {held + sum(waves): [held]}


def test_phases_too_small_to_measure_correct_nothing(tmp_path, monkeypatch):
    render(tmp_path, Clock(monkeypatch), 768, 448, 25)
    runs = read_runs(tmp_path)[0]
    assert device_lines(runs, published(CARD))
    monkeypatch.setattr("comfyui_ltx25.ltx25.instrument.footprint.MEASURABLE", 1 << 50)
    assert not device_lines(runs, published(CARD))


def test_without_records_the_plan_says_that_it_is_arithmetic(bare):
    plan = bare.plan(request())
    assert not bare.has_records
    assert "No records of 48 blocks of 4096/2048" in plan.notes[0] and "FLOP model" in plan.notes[0]
    sample = next(phase for phase in plan.phases if phase.name == "sample")
    assert sample.seconds == pytest.approx(30 * 1766e12 / (0.6 * 700e12), rel=0.01) and "no record of this device" in sample.basis
    assert all(phase.extrapolated for phase in plan.phases)
    assert "700 TFLOP/s" in plan_text(plan, bare.models, NO_LIMIT)


def test_records_of_another_model_or_device_do_not_count(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    render(tmp_path, clock, 768, 448, 25, device="another card")
    models = published(CARD)
    runs = read_runs(tmp_path)[0]
    assert not Planner(models, CARD, runs, True, SPEED).has_records
    clock = Clock(monkeypatch)
    render(tmp_path, clock, 768, 448, 25, device=device_name(CARD))
    runs = read_runs(tmp_path)[0]
    assert Planner(models, CARD, runs, True, SPEED).has_records
    smaller = replace(models, dit=replace(models.dit, layers=40))
    assert not Planner(smaller, CARD, runs, True, SPEED).has_records


def test_one_or_two_geometries_scale_but_are_no_law(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    render(tmp_path, clock, 1024, 576, 49, device=device_name(CARD))
    plan = Planner(published(CARD), CARD, read_runs(tmp_path)[0], True, SPEED).plan(request(1024, 576, 57))
    sample = next(phase for phase in plan.phases if phase.name == "sample")
    assert "1 geometry in proportion, not a law" in sample.basis and sample.extrapolated
    flops = group_flops(PUBLISHED, GUIDED, *plan.tokens, 1024)
    assert sample.seconds == pytest.approx(30 * law_seconds(flops.linear / 1e12, flops.attention / 1e12), rel=0.15)


@pytest.mark.parametrize("seen", [[(256, 160, 9)], [(256, 160, 9), (256, 192, 9)]])
def test_one_or_two_tiny_records_scale_at_their_rate_and_say_how_far_off_that_can_be(tmp_path, monkeypatch, seen):
    """40 tokens take 0.06 s a group, a third of it launching, which does not grow: the truth lies between all of it and none."""
    clock = Clock(monkeypatch)
    for n, size in enumerate(seen):
        render(tmp_path, clock, *size, noise=0.02, seed=n, device=device_name(CARD))
    planner = Planner(published(CARD), CARD, read_runs(tmp_path)[0], True, SPEED)
    plan = planner.plan(request())
    phases = {phase.name: phase for phase in plan.phases}
    flops = group_flops(PUBLISHED, GUIDED, *plan.tokens, 1024)
    truth = 30 * law_seconds(flops.linear / 1e12, flops.attention / 1e12) + 2.0
    least, most = phases["sample"].between
    assert least < truth < phases["sample"].seconds <= most
    near = group_flops(PUBLISHED, GUIDED, *planner.plan(request(*seen[-1])).tokens, 1024)
    rate = law_seconds(near.linear / 1e12, near.attention / 1e12) / (near.total / 1e12)
    assert phases["sample"].seconds == pytest.approx(30 * rate * flops.total / 1e12 + 2.0, rel=0.05)
    shown = plan_text(plan, planner.models, NO_LIMIT)
    assert re.search(r"sample +\d+ min \d+ s +[\d.]+ s to \d+ min \d+ s +\d geometr\w+ in proportion, not a law", shown)


def test_a_geometry_seen_is_told_with_the_spread_of_its_groups(tmp_path, monkeypatch):
    render(tmp_path, Clock(monkeypatch), 1024, 576, 49, noise=0.1, steps=12, device=device_name(CARD))
    plan = Planner(published(CARD), CARD, read_runs(tmp_path)[0], True, SPEED).plan(request(1024, 576, 49))
    sample = next(phase for phase in plan.phases if phase.name == "sample")
    least, most = sample.between
    assert sample.basis == "this geometry, measured" and least < sample.seconds < most < 1.5 * least


def test_a_geometry_seen_for_one_group_has_no_spread(tmp_path, monkeypatch):
    render(tmp_path, Clock(monkeypatch), 1024, 576, 49, steps=1, device=device_name(CARD))
    plan = Planner(published(CARD), CARD, read_runs(tmp_path)[0], True, SPEED).plan(request(1024, 576, 49))
    sample = next(phase for phase in plan.phases if phase.name == "sample")
    assert sample.basis == "this geometry, measured" and sample.between is None


def test_a_phase_seen_at_one_size_is_certain_of_nothing_but_its_repeats(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    for times in (1, 2):
        render(tmp_path, clock, 1024, 576, 49, device=device_name(CARD))
        planner = Planner(published(CARD), CARD, read_runs(tmp_path)[0], True, SPEED)
        for size, known in (((1024, 576, 49), times == 2), ((1024, 576, 57), False)):
            plan = planner.plan(request(*size))
            decode = next(phase for phase in plan.phases if phase.name == "decode.video")
            assert (decode.between is not None) == known and plan.between is None
            line = next(line for line in plan_text(plan, planner.models, NO_LIMIT).splitlines() if line.startswith("decode.video"))
            assert ("not known" in line) != known


def test_without_records_nothing_is_said_to_be_known(bare):
    plan = bare.plan(request())
    assert plan.between is None and all(phase.between is None for phase in plan.phases)
    assert plan_text(plan, bare.models, NO_LIMIT).count("not known") == len(plan.phases) + 2


def test_the_sentence_before_the_first_forward_says_how_far_off_it_can_be(tmp_path, monkeypatch):
    record = render(tmp_path, Clock(monkeypatch), 256, 160, 9, device=device_name(CARD))
    facts = next(event["facts"] for event in read_run(record.path).of("phase") if event["name"] == "sample")
    near = forecaster(tmp_path, CARD)(facts)
    assert re.fullmatch(r"about \d+ s predicted \(this geometry, measured\)", near)
    large = {**facts, "work": [{**work, "linear": 100 * work["linear"], "attention": 100 * work["attention"]} for work in facts["work"]]}
    assert re.fullmatch(r"about \d+ s predicted, \d+ s to \d+ s possible \(1 geometry in proportion, not a law\)", forecaster(tmp_path, CARD)(large))


def test_a_clip_that_another_node_writes_is_planned_without_its_writing(planner):
    """No run of a host's graph has a mux phase: a plan that waited for its records would never know its range."""
    runs, models = planner._runs, planner.models
    whole, graph = (Planner(models, CARD, runs, True, SPEED, writes).plan(request(1024, 576, 49)) for writes in (True, False))
    assert [phase.name for phase in whole.phases] == [*(phase.name for phase in graph.phases), "mux"]
    assert graph.seconds == pytest.approx(whole.seconds - whole.phases[-1].seconds)


def test_other_legs_serve_where_these_have_no_record(planner):
    distilled = request(1024, 576, 49, schedule="distilled", negative=None, video_cfg=1.0, audio_cfg=1.0, video_stg=0.0, audio_stg=0.0,
                        video_modality=1.0, audio_modality=1.0)  # fmt: skip
    plan = planner.plan(distilled)
    sample = next(phase for phase in plan.phases if phase.name == "sample")
    assert plan.forwards == 8 and "of other legs" in sample.basis and sample.extrapolated
    assert 0.5 < sample.seconds - 2.0 < 8 * 0.35


@pytest.mark.parametrize("budget", [Budget(60.0, None, None), Budget(None, 75 << 30, None), Budget(45.0, 74 << 30, 4 << 30)])
def test_the_largest_that_fits_fits_and_one_more_does_not(planner, budget):
    wanted = request()
    longer, larger = planner.largest(wanted, budget)
    assert (longer.request.width, longer.request.height) == (1280, 704)
    assert larger.request.frames == 121
    for plan in (longer, larger):
        assert not plan.beyond(budget)
    assert planner.plan(replace(wanted, frames=longer.request.frames + 8), budget=budget).beyond(budget)
    more = larger.request.height + 32
    assert planner.plan(replace(wanted, height=more, width=round(more / 32 * 1280 / 704) * 32), budget=budget).beyond(budget)


def test_only_tokens_count(planner):
    """Half the pixels and twice the latent frames are the same tokens, and the forwards take the same time."""
    small, large = planner.plan(request(1024, 576, 105)), planner.plan(request(1024, 1152, 49))
    assert small.tokens[0] == large.tokens[0] == 14 * 32 * 18
    seconds = [next(phase.seconds for phase in plan.phases if phase.name == "sample") for plan in (small, large)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.02)  # audio tokens differ


def test_nothing_fits_is_refused_with_reasons(planner):
    budget = Budget(1.0, 2 << 30, None)
    wanted = request()
    reasons = planner.plan(wanted, budget=budget).beyond(budget)
    assert len(reasons) == 2 and "2.0 GiB are given" in reasons[1] and "1 s are given" in reasons[0]
    assert planner.largest(wanted, budget) == []
    text = largest_text(planner, wanted, budget, 1)
    assert "nothing fits, not even 32x32, 1 frame: it takes" in text and "device memory" in text


@pytest.mark.parametrize(
    ("asked", "batch", "host", "said"),
    [
        ((1280, 704, 121), 10**8, 16, "32x32, 1 frame, 100000000 clips together: it needs "),
        ((8192, 8192, 8193), 64, 16, "8192x8192, 1 frame, 64 clips together: it needs "),  # shorter or smaller alone does not help
    ],
)
def test_a_batch_that_cannot_fit_is_told_as_one_with_fewer_clips_as_the_way_out(bare, asked, batch, host, said):
    budget = Budget(None, None, host << 30)
    text = largest_text(bare, request(*asked), budget, batch)
    assert f"nothing fits, not even {said}" in text and "of host memory, and" in text and "\nmake fewer clips together, " in text


def test_parts_that_do_not_fit_together_are_not_counted_together(bare):
    models = published(CARD)
    plan = bare.plan(request(768, 448, 25), budget=Budget(None, 48 << 30, None))
    assert models.held["transformer"] < plan.device < models.held["transformer"] + models.held["text encoder"]


def test_a_model_that_does_not_fit_whole_is_planned_with_blocks_that_take_turns(bare):
    """A card of 24 GiB renders with a transformer of 35: what is away waits in host memory, where that has room."""
    card, models = 24 << 30, bare.models
    roomy, tight = (bare.plan(request(), budget=Budget(None, card, host)) for host in (128 << 30, 16 << 30))
    for plan in (roomy, tight):
        assert not plan.beyond(Budget(None, card, None)) and plan.device <= card
        assert any(note.startswith("The transformer does not fit whole") for note in plan.notes)
    assert roomy.host > models.held["transformer"] - card and tight.host < 12 << 30
    assert not bare.plan(request(), budget=Budget(None, 100 << 30, None)).notes[1:]


def test_a_decoder_that_adapts_is_planned_as_it_will_run(tmp_path):
    """The diffusion decoder tiles where the clip does not fit whole: its plan must not be refused for what it avoids."""
    header = read_header(write_published("ltx-2.5-video-vae-bf16", tmp_path))
    models = replace(published(CARD), video=read_video_config(header).decoder)
    large = Footprint(VideoLatentShape(128, 61, 34, 60), AudioLatentShape(8, 501, 16), 1, 1)
    free = large.working("decode.video", models, "cuda", None)["device"]
    tight = large.working("decode.video", models, "cuda", free // 2)["device"]
    assert tight <= free // 2 < free


def test_cpu_plans_count_everything_as_host_memory():
    cpu = torch.device("cpu")
    plan = Planner(published(cpu), cpu, [], None, SPEED).plan(request(768, 448, 25))
    assert plan.device is None and plan.host > 2 * 38e9


def test_a_cpu_plan_that_no_measurement_bounds_needs_more_than_it_predicts(tmp_path, monkeypatch):
    """What an allocator keeps of freed memory differs from run to run; on a CPU nothing else gives way."""
    cpu, known = torch.device("cpu"), []
    for size in (None, *SIZES):
        if size is not None:
            render(tmp_path, Clock(monkeypatch), *size, device=device_name(cpu), grown=1 << 30)
        planner = Planner(published(cpu), cpu, read_runs(tmp_path)[0], None, SPEED, writes=False)
        plan = planner.plan(request(1024, 576, 97), budget=Budget(None, None, 1 << 40))
        peak, text = plan.on_host, plan_text(plan, planner.models, Budget(None, None, 1 << 40))
        known.append(peak.known)
        assert peak.known or peak.need > peak.bytes + (1 << 30)
        assert (" to be safe, of " in text) != (" up to " in text) == peak.known
    assert not any(known[:3])


def test_on_a_cpu_the_device_is_the_host_and_either_limit_holds():
    cpu = torch.device("cpu")
    planner = Planner(published(cpu), cpu, [], None, SPEED)
    for given in ((8 << 30, None), (None, 8 << 30), (8 << 30, 1 << 40), (1 << 40, 8 << 30)):
        assert planner.budget(None, *given) == Budget(None, None, 8 << 30)
    assert planner.budget(None, None, None).host == pytest.approx(host_free() + host_now(), rel=0.05)
    card = Planner(published(CARD), CARD, [], None, SPEED)
    assert card.budget(60.0, 24 << 30, 32 << 30) == Budget(60.0, 24 << 30, 32 << 30)


def test_where_device_and_host_are_one_memory_both_must_fit_in_it_together(bare, monkeypatch):
    for name, value in (("device_free", 100 << 30), ("device_now", 2 << 30), ("host_free", 100 << 30), ("host_now", 1 << 30)):
        monkeypatch.setattr(f"comfyui_ltx25.ltx25.instrument.planner.{name}", lambda *_, value=value: value)
    for unified, together in ((False, None), (True, 103 << 30)):
        monkeypatch.setattr("comfyui_ltx25.ltx25.instrument.planner.is_unified", lambda _, unified=unified: unified)
        assert bare.budget(None, None, None) == Budget(None, 102 << 30, 101 << 30, together)
    plan = bare.plan(request())
    both = plan.on_device.need + plan.on_host.need
    assert not plan.beyond(Budget(None, both, both, both))
    (reason,) = plan.beyond(Budget(None, both, both, both - 1))
    assert "that device and host share" in reason


def test_a_cpu_plan_counts_parts_that_leave_for_each_other_where_memory_is_short():
    cpu = torch.device("cpu")
    planner = Planner(published(cpu), cpu, [], None, SPEED)
    held = planner.models.held
    whole, short = (planner.plan(request(768, 448, 25), budget=Budget(None, None, size)).host for size in (1 << 40, 100 << 30))
    assert whole > held["transformer"] + held["text encoder"] > short > held["transformer"]


def test_sentence_before_the_first_forward(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    for size in SIZES:
        render(tmp_path, clock, *size, device=device_name(CARD))
    (tmp_path / "notes.jsonl").write_text("hello")
    run = read_run(next(path for path in sorted(tmp_path.glob("*.jsonl")) if path.name != "notes.jsonl"))
    facts = next(event["facts"] for event in run.of("phase") if event["name"] == "sample")
    sentence = forecaster(tmp_path, CARD)(facts)
    assert re.fullmatch(r"about \d+ s predicted \(law of 3 geometries, within \d+ %\)", sentence)
    assert float(sentence.split()[1]) == pytest.approx(6 * law_seconds(facts["work"][0]["linear"], facts["work"][0]["attention"]) + 2, abs=0.6)


RESIDENT = {"residency": "resident", "graphs": True}


def test_a_render_is_predicted_by_records_of_its_like_and_others_are_named_without_a_claim(tmp_path, monkeypatch):
    """Three streamed geometries make a law: it must not stand before one resident geometry, nor say how far off it is of that."""
    clock = Clock(monkeypatch)
    for size in SIZES:
        record = render(tmp_path, clock, *size, slower=6.0, streams=True, how={"graphs": False}, device=device_name(CARD))
    said = next(event["facts"] for event in read_run(record.path).of("phase") if event["name"] == "sample")
    asked = {**said, **RESIDENT}
    assert "(law of 3 geometries, within 5 %)" in forecaster(tmp_path, CARD)(said)
    assert forecaster(tmp_path, CARD)(asked).endswith("(law of 3 geometries, streamed)")
    streamed = Planner(published(CARD), CARD, read_runs(tmp_path)[0], True, SPEED)
    for budget, own in ((NO_LIMIT, False), (Budget(None, 24 << 30, None), True)):  # there the blocks take turns
        sample = next(phase for phase in streamed.plan(request(*SIZES[1]), budget=budget).phases if phase.name == "sample")
        assert ("within" in sample.basis, "streamed" in sample.basis, sample.extrapolated, sample.between is None) == (own, not own, not own, not own)
    render(tmp_path, clock, *SIZES[2], how=RESIDENT, device=device_name(CARD))
    assert forecaster(tmp_path, CARD)(asked).endswith("(this geometry, measured)")
    assert float(forecaster(tmp_path, CARD)(asked).split()[1]) == pytest.approx(6 * law_seconds(*(said["work"][0][name] for name in ("linear", "attention"))) + 2, abs=0.6)
    assert forecaster(tmp_path, CARD)({**asked, "graphs": False}).endswith("(1 geometry, with graphs, in proportion, not a law)")


@pytest.mark.parametrize(("name", "words"), [("adapted", "a LoRA"), ("masked", "attention masks")])
def test_what_costs_a_forward_more_has_records_of_its_own(tmp_path, monkeypatch, name, words):
    clock = Clock(monkeypatch)
    for slower, how in ((1.0, {}), (1.5, {name: True})):
        record = render(tmp_path, clock, *SIZES[0], slower=slower, warm_up=0.0, how=how, device=device_name(CARD))
        facts = next(event["facts"] for event in read_run(record.path).of("phase") if event["name"] == "sample")
        if how:
            (work,) = facts["work"]
            plain = {key: value for key, value in facts.items() if key != name}
            both = Forecast(read_runs(tmp_path)[0], device_name(CARD), facts["model"])
            one, other = (both.group(work["legs"], work["kind"], work["linear"], work["attention"], 1370, asked) for asked in (plain, facts))
            assert one.basis == other.basis == "this geometry, measured" and other.seconds == pytest.approx(1.5 * one.seconds)
        else:
            assert f"(1 geometry, without {words}, in proportion" in forecaster(tmp_path, CARD)({**facts, name: True})


def test_a_model_that_always_streams_or_has_a_lora_beside_its_weights_is_planned_as_such(tmp_path, monkeypatch):
    render(tmp_path, Clock(monkeypatch), *SIZES[0], how={"residency": "resident", "precision": "fp8 products"}, device=device_name(CARD))
    models, runs = published(CARD, in_fp8=True), read_runs(tmp_path)[0]
    for made, loras, said in ((models, False, "this geometry, measured"), (models, True, "without a LoRA"), (replace(models, streamed=True), False, "not streamed")):
        plan = Planner(made, CARD, runs, True, SPEED, loras=loras).plan(request(*SIZES[0]))
        assert said in next(phase.basis for phase in plan.phases if phase.name == "sample")


def test_reading_records_is_told_one_by_one_and_stops_at_a_cancel(tmp_path, monkeypatch):
    class Host(Sink):
        told = ()

        def ticked(self, phase):
            self.told = (*self.told, (phase.name, phase.done, phase.total))

        def check(self):
            if len(self.told) == 2:
                raise InterruptedError

    host = Host()
    for _ in range(3):
        render(tmp_path, Clock(monkeypatch), *SIZES[0])
    with pytest.raises(InterruptedError):
        read_newest(tmp_path, Watch([host]))
    assert host.told == (("plan.read", 1, 3), ("plan.read", 2, 3))
    monkeypatch.setattr("comfyui_ltx25.ltx25.instrument.history.NEWEST", 2)
    assert [run.path for run in read_newest(tmp_path, Watch())[0]] == sorted(tmp_path.iterdir())[1:]


def test_the_first_render_on_a_device_is_predicted_by_arithmetic_and_says_so(tmp_path, monkeypatch):
    record = render(tmp_path, Clock(monkeypatch), *SIZES[1], device=device_name(CARD))
    facts = next(event["facts"] for event in read_run(record.path).of("phase") if event["name"] == "sample")
    (work,) = facts["work"]
    seconds = work["groups"] * (work["linear"] + work["attention"]) / (0.6 * 100)
    said = f"about {round(seconds)} s predicted (guess: 60 % of 100 TFLOP/s, no record of this device)"
    assert Forecast([read_run(record.path)], "another card", facts["model"]).sentence(facts, lambda: 1e14) == said
    monkeypatch.setattr("comfyui_ltx25.ltx25.instrument.forecast.quick_product", lambda device: 1e14)
    assert forecaster(tmp_path / "nothing", CARD)(facts) == said
    assert forecaster(tmp_path, CARD)(facts).endswith("(this geometry, measured)")  # now there is one
    assert Forecast([], "any", facts["model"]).sentence(facts, lambda: None) == ""  # no room to measure in


@pytest.mark.parametrize(("seconds", "rate", "frames"), [(5, 24, 121), (1, 24, 25), (0.04, 24, 1), (10, 25, 249), (5, 23.976, 121)])
def test_frames_of_a_length(seconds, rate, frames):
    assert frames_of(seconds, rate) == frames


@pytest.mark.parametrize(("text", "value"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_times_people_write(text, value):
    assert parse_seconds(text) == value


@pytest.mark.parametrize(("text", "value"), [("24G", 24 << 30), ("24GiB", 24 << 30), ("512M", 512 << 20), ("1.5gb", 3 << 29)])
def test_memory_sizes_people_write(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(("parse", "text"), [(parse_seconds, "soon"), (parse_seconds, "0"), (parse_bytes, "24"), (parse_bytes, "0G"), (parse_size, "704"), (parse_size, "axb")])
def test_what_cannot_be_read_is_refused_with_an_example(parse, text):
    with pytest.raises(InputError, match="write it like"):
        parse(text)


@pytest.mark.parametrize(("seconds", "rate"), [(0, 24.0), (-1, 24.0), (float("nan"), 24.0), (float("inf"), 24.0), (1, float("nan")), (1, float("inf")), (1, 0.0)])
def test_no_length_and_no_rate_is_refused(seconds, rate):
    with pytest.raises(InputError, match="^(seconds|frame_rate) "):  # by the name of the node's input, too
        frames_of(seconds, rate)


def test_records_of_the_same_precision_go_first_and_others_are_named(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    for n, size in enumerate(SIZES):
        render(tmp_path, clock, *size, seed=n, device=device_name(CARD))
    for path in list(tmp_path.glob("*.jsonl")):
        text = path.read_text()
        assert '"precision":"bfloat16"' in text
        halved = re.sub(r'"seconds":([\d.e-]+)', lambda found: f'"seconds":{float(found[1]) / 2}', text)
        (path.parent / f"{path.stem}-fp8.jsonl").write_text(halved.replace("bfloat16", "fp8 products"))
    runs = read_runs(tmp_path)[0]
    fast, plain = (Planner(published(CARD, in_fp8), CARD, runs, True, SPEED).plan(request(*SIZES[1])) for in_fp8 in (True, False))
    seconds = [next(phase for phase in plan.phases if phase.name == "sample").seconds for plan in (fast, plain)]
    assert seconds[0] == pytest.approx(seconds[1] / 2, rel=0.1)
    only = [run for run in runs if "fp8" not in run.path.name]
    other = next(phase for phase in Planner(published(CARD, True), CARD, only, True, SPEED).plan(request(*SIZES[1])).phases if phase.name == "sample")
    assert other.seconds == pytest.approx(seconds[1]) and "in another precision" in other.basis and other.extrapolated


def test_one_is_one_frame_one_step_and_one_forward(bare, tmp_path, monkeypatch):
    single = request(64, 64, 1, steps=1, negative=None, video_cfg=1.0, audio_cfg=1.0, video_stg=0.0, audio_stg=0.0, video_modality=1.0, audio_modality=1.0)
    assert plan_text(bare.plan(single), bare.models, NO_LIMIT).startswith("plan for 64x64, 1 frame at 24/s: 4 + 1 tokens, 1 forward, with ")
    run = read_run(render(tmp_path, Clock(monkeypatch), 64, 64, 1, steps=1).path)
    assert clip_text(run) == "64x64, 1 frame at 24/s" and steps_text(run) == "1 step of cond+uncond+stg+mod"
