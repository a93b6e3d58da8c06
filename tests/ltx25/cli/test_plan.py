import pytest
import torch
from comfyui_ltx25.ltx25 import cli
from comfyui_ltx25.ltx25.cli.render import TINY_DEFAULTS
from comfyui_ltx25.ltx25.instrument import history, planner
from comfyui_ltx25.ltx25.instrument.header import device_name
from comfyui_ltx25.ltx25.instrument.selftest import Speed
from comfyui_ltx25.ltx25.request import Request
from comfyui_ltx25.tests.support.records import Clock, render
from comfyui_ltx25.tests.support.tiny import tiny_files


@pytest.fixture
def plan(tmp_path, capsys, monkeypatch):
    """Run `ltx25 plan ...` on the CPU against the records in tmp_path / "runs": (exit code, printed)."""
    monkeypatch.setattr(planner, "self_test", lambda device, seconds: Speed("float32", 1e12, 2e10, None))

    def command(*arguments):
        code = cli.main(["plan", "--device", "cpu", "--runs", str(tmp_path / "runs"), *arguments])
        return code, capsys.readouterr()

    return command


def test_plan_of_the_published_files_needs_no_files_and_no_records(plan):
    code, shown = plan("--seconds", "5", "--size", "1280x704", "--host-memory", "1T")
    assert code == 0
    assert "1280x704, 121 frames at 24/s: 14080 + 126 tokens, 120 forwards, with the published LTX-2.5 files in bf16" in shown.out
    assert "No records of 48 blocks" in shown.out and "it fits" in shown.out
    assert [line.split()[0] for line in shown.out.splitlines()[4:12]] == [
        "load.read", "text.tower", "text.project", "text.connect", "sample", "decode.video", "decode.audio", "mux",
    ]  # fmt: skip


def test_a_budget_tells_the_largest_that_fits_and_ends_in_1_when_the_request_does_not(plan):
    code, shown = plan("--seconds", "5", "--size", "1280x704", "--budget", "10h", "--host-memory", "1T")
    assert code == 1
    assert "it does not fit: it takes about" in shown.out and "10 h 0 min are given" in shown.out
    assert "the largest that fits (pixels and frames trade freely, only tokens count):" in shown.out
    assert "  1280x704, " in shown.out and ", 121 frames (5.0 s)" in shown.out


def test_nothing_fits_is_said_with_the_reason(plan):
    code, shown = plan("--budget", "1s", "--host-memory", "8G")
    assert code == 1 and "nothing fits, not even 32x32, 1 frame" in shown.out and "8.0 GiB are given" in shown.out


def test_on_a_cpu_memory_is_a_limit_too(plan):
    code, shown = plan("--tiny", "--size", "256x160", "--frames", "49", "--steps", "8", "--memory", "100M")
    assert code == 1 and "it does not fit: it needs" in shown.out and "of host memory, and 100.0 MiB are given" in shown.out
    code, shown = plan("--tiny", "--size", "256x160", "--frames", "49", "--steps", "8", "--memory", "1T", "--host-memory", "100M")
    assert code == 1 and "100.0 MiB are given" in shown.out


def test_records_of_this_device_are_used(plan, tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    for size in ((768, 448, 25), (1024, 576, 49), (1024, 576, 97)):
        render(tmp_path / "runs", clock, *size, device=device_name(torch.device("cpu")))
    (tmp_path / "runs" / "notes.jsonl").write_text("hello")
    code, shown = plan("--frames", "73", "--size", "1024x576", "--legs", "batched", "--host-memory", "1T")
    assert code == 0 and "law of 3 geometries" in shown.out
    assert "plan.read: begins, 4 records" in shown.err and "notes.jsonl is not a run record" in shown.err
    monkeypatch.setattr(history, "NEWEST", 2)  # of these the other file is one
    code, shown = plan("--frames", "73", "--size", "1024x576", "--legs", "batched", "--host-memory", "1T")
    assert code == 0 and "1 geometry, in another precision, in proportion" in shown.out and "plan.read: begins, 2 records" in shown.err


def test_the_tiny_checkpoint_can_be_planned(plan):
    code, shown = plan("--tiny", "--size", "256x160", "--frames", "49", "--steps", "8")
    assert code == 0 and "280 + 51 tokens, 32 forwards" in shown.out and "tiny" in shown.out


@pytest.mark.parametrize(
    ("arguments", "forwards"),
    [
        (["--steps", "4", "--guidance-start", "0.9", "--guidance-end", "0.5"], 10),
        (["--steps", "4", "--bins", "0.9: video_cfg=1, audio_cfg=1; 0.5: video_stg=0,audio_stg=0"], 12),
        (["--steps", "8", "--guidance-start", "0.3", "--guidance-end", "0.2"], 8),
        (["--steps", "4", "--sampler", "euler_cfg_pp", *(f"--{stream}-{scale}={off}" for stream in ("video", "audio") for scale, off in (("cfg", 1), ("stg", 0), ("modality", 1)))], 8),
        (["--steps", "4", "--soundtrack", "--video-stg", "0", "--video-modality", "1"], 8),
    ],
)
def test_guidance_of_some_noise_levels_or_of_one_stream_takes_forwards_there_alone(plan, arguments, forwards):
    code, shown = plan("--tiny", "--size", "64x64", "--frames", "9", *arguments)
    assert code == 0 and f", {forwards} forwards" in shown.out and ("decode.audio" in shown.out) != ("--soundtrack" in arguments)


def test_two_stages_are_planned_by_a_file_or_by_the_published_upscaler(plan):
    code, shown = plan("--tiny", "--size", "128x64", "--frames", "9", "--upscaler", str(tiny_files().spatial_upscaler))
    assert code == 0 and "16 + 9 tokens, 35 forwards in two stages, the first at 64x32" in shown.out and "\nupscale " in shown.out
    code, shown = plan("--size", "1280x704", "--upscaler", "--host-memory", "1T")
    assert code == 0 and "123 forwards in two stages, the first at 640x352" in shown.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "1280x736", "--upscaler"], "height 736 px is not a multiple of 64 (use 704 or 768)"),
        (["--upscaler", str(tiny_files().temporal_upscaler)], "use the published spatial upscaler"),
        (["--size", "1280"], "1280x704"),
        (["--size", "100x100"], "96 or 128"),
        (["--seconds", "5", "--frames", "121"], "one of them"),
        (["--seconds", "0"], "no length"),
        (["--frames", "10"], "9 or 17"),
        (["--steps", "0"], "steps"),
        (["--tiny", "--stg-blocks", "99"], "99"),
        (["--sampler", "euler_cfg_pp", "--skip-step", "1"], "euler_cfg_pp"),
        (["--transformer", "only-this.safetensors"], "name all four files"),
    ],
)
def test_wrong_input_is_one_sentence_and_code_2(plan, arguments, words):
    code, shown = plan(*arguments)
    assert code == 2 and words in shown.err and shown.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--budget", "soon"], ["--memory", "8x"], ["--memory", "0G"]])
def test_a_budget_nobody_can_read_is_refused_with_an_example(plan, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        plan(*arguments)
    assert ended.value.code == 2 and "write it like" in capsys.readouterr().err


def test_a_batch_of_nothing_is_refused(plan):
    code, shown = plan("--batch-size", "0")
    assert code == 2 and "batch_size 0" in shown.err and not shown.out


def test_fp8_is_refused_where_the_device_has_none(plan):
    code, shown = plan("--precision", "fp8")
    assert code == 2 and "precision fp8 needs a card" in shown.err and not shown.out


def test_token_shift_is_a_switch_as_it_is_in_a_render(plan, capsys):
    code, shown = plan("--tiny", "--token-shift")
    assert code == 0 and "it fits" in shown.out
    with pytest.raises(SystemExit) as ended:
        plan("--token-shift", "foo")
    assert ended.value.code == 2 and "foo" in capsys.readouterr().err
    assert cli.parser().parse_args(["plan", "--token-shift"]).token_shift is True
    assert cli.parser().parse_args(["plan"]).token_shift is None


def test_a_tiny_plan_is_of_the_clip_that_a_tiny_render_makes_unless_told_otherwise(plan):
    """`ltx25 render` without files and without flags is what `ltx25 plan --tiny` plans."""
    made = Request(prompt="a cat", **TINY_DEFAULTS)
    code, shown = plan("--tiny")
    assert code == 0
    assert shown.out.startswith(f"plan for {made.width}x{made.height}, {made.frames} frames at 24/s: 280 + 51 tokens, {4 * made.steps} forwards")
    code, shown = plan("--tiny", "--size", "64x96", "--seconds", "1", "--steps", "3")
    assert shown.out.startswith("plan for 64x96, 25 frames at 24/s") and ", 12 forwards" in shown.out
    code, shown = plan("--steps", "3", "--host-memory", "1T")
    assert shown.out.startswith("plan for 768x512, 121 frames at 24/s") and ", 12 forwards" in shown.out
