"""The transformer against the official values: every case of dit/, rope/, patchify/, adaln/ and text_kv/."""

import pytest
import torch
from comfyui_ltx25.kernels.qk_norm_rope import spread
from comfyui_ltx25.ltx25.dit import (
    Leg,
    patchify_audio,
    patchify_video,
    tables,
    timestep_of_tokens,
    unpatchify_audio,
    unpatchify_video,
)
from comfyui_ltx25.ltx25.dit.adaln import sinusoid
from comfyui_ltx25.ltx25.dit.rope import frequencies, rope
from comfyui_ltx25.tests.support import golden_dit as golden
from comfyui_ltx25.tests.support.dit_cases import forward_of, leg_of, plan_of

CPU = torch.device("cpu")
BF16 = [name for name in golden.names("dit/bf16_file_") if name.endswith("_bf16")]
FP32 = [name for name in golden.names("dit/") if name not in BF16]


def run_row(dit, case, row):
    forward, leg = forward_of(dit, case, row), leg_of(case, row)
    return forward, forward.run(dit, plan_of(case, leg))[leg]


@pytest.mark.parametrize("name", FP32)
def test_forward(name):
    case, want = golden.inputs(name), golden.outputs(name)
    dit = golden.tiny_dit(golden.INDEX[name]["checkpoint"])
    batch = next(case[key] for key in ("video_latent", "audio_latent") if key in case).shape[0]
    checked = set()
    for row in range(batch):
        forward, velocity = run_row(dit, case, row)
        for stream in ("video", "audio"):
            v = getattr(velocity, stream)
            assert (v is None) == (f"{stream}_velocity" not in want)
            if v is None:
                continue
            sigma = float(case[f"{stream}_sigma"][row])
            t = timestep_of_tokens(getattr(forward.geometry, stream), sigma)
            assert torch.equal(t, case[f"{stream}_timesteps"][row : row + 1])
            golden.close(name, f"{stream}_velocity", v, want[f"{stream}_velocity"][row : row + 1])
            golden.close(name, f"{stream}_x0", getattr(forward, stream) - t * v, want[f"{stream}_x0"][row : row + 1])
            checked |= {f"{stream}_velocity", f"{stream}_x0"}
    inner = set(want) - checked
    assert not inner or name == "dit/t2v_cond"  # whose inner states have a test of their own


def test_inner_states():
    """Projected tokens, block 0's eight sub-layers before their gates, and the residual streams after every block."""
    name = "dit/t2v_cond"
    dit = golden.load_dit(golden.header(), torch.float32)
    seen = {}

    def keep(key):
        def hook(module, args, output):
            tensor = output if torch.is_tensor(output) else output.row(0)
            seen[key] = tensor.clone()

        return hook

    dit.patchify_proj.register_forward_hook(keep("video_patchify"))
    dit.audio_patchify_proj.register_forward_hook(keep("audio_patchify"))
    layers = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn", "ff", "audio_ff")
    for layer in layers:
        getattr(dit.transformer_blocks[0], layer).register_forward_hook(keep(f"block_0_{layer}"))
    for i, block in enumerate(dit.transformer_blocks):
        block.register_forward_hook(lambda module, args, state, i=i: keep(f"video_after_block_{i}")(module, args, state.video.x))
        block.register_forward_hook(lambda module, args, state, i=i: keep(f"audio_after_block_{i}")(module, args, state.audio.x))
    run_row(dit, golden.inputs(name), 0)
    wanted = {key for key in golden.outputs(name) if not key.endswith(("_velocity", "_x0"))}
    assert wanted == seen.keys()
    for key in wanted:
        golden.check(name, key, seen[key])


@pytest.mark.parametrize("name", BF16)
def test_forward_in_bf16_is_as_close_to_float64_as_the_official_one(name):
    case, want, limits = golden.inputs(name), golden.outputs(name), golden.INDEX[name]["tolerance"]
    dit = golden.tiny_dit("bf16", torch.bfloat16)
    assert dit.scale_shift_table.dtype == torch.float32
    _, velocity = run_row(dit, case, 0)
    for stream in ("video", "audio"):
        got = getattr(velocity, stream)
        assert got.dtype == torch.bfloat16
        error = got.double() - want[f"{stream}_velocity_f64"]
        assert error.abs().max() <= limits[f"{stream}_max_abs"]
        assert error.square().mean().sqrt() <= limits[f"{stream}_rms"]


@pytest.mark.parametrize("name", BF16)
def test_forward_in_float64(name, monkeypatch):
    """The float64 run behind the bf16 cases, on the same weights: our only float32 tables are the official ones.

    The frequencies of timesteps are float32 numbers of a CPU's exp, and CPUs differ in its last bit. So the measure is what
    one bit more in all of them makes of the result: a few parts in 1e5.
    """
    case, want = golden.inputs(name), golden.outputs(name)
    case = {key: value.double() if torch.is_tensor(value) and value.dtype == torch.bfloat16 else value for key, value in case.items()}
    _, velocity = run_row(golden.tiny_dit("bf16", torch.float64), case, 0)
    monkeypatch.setattr(tables, "sinusoid", lambda t: sinusoid(t * (1 + 2**-23)))
    _, nudged = run_row(golden.tiny_dit("bf16", torch.float64), case, 0)
    for stream in ("video", "audio"):
        got = getattr(velocity, stream)
        bit = (getattr(nudged, stream) - got).abs().max()
        assert 1e-6 < bit < 2e-4
        assert (got - want[f"{stream}_velocity_f64"]).abs().max() <= bit


@pytest.mark.parametrize("name", golden.names("rope/"))
def test_rope(name):
    case, want, config = golden.inputs(name), golden.outputs(name), golden.config()
    if name.startswith("rope/published_width"):
        axes = case["positions"].shape[1]
        width, largest = (4096, (20, 2048, 2048)) if axes == 3 else (2048, (20,))
        table = rope(case["positions"][0], width, 10000.0, largest, CPU)
        assert torch.equal(frequencies(width // (2 * axes), 10000.0), want["frequencies"])
        check_table(name, table, want["cos"], want["sin"])
        return
    positions = want["positions"]
    positions = positions if positions.ndim == 3 else positions[0]
    largest, width = (config.max_position, config.width) if len(positions) == 3 else ((config.audio_max_position,), config.audio_width)
    check_table(name, rope(positions, width, config.rope_theta, largest, CPU), want["cos"], want["sin"])
    between = rope(positions[:1], config.audio_width, config.rope_theta, (20,), CPU)
    check_table(name, between, want["cross_cos"], want["cross_sin"])
    if len(positions) == 3:
        assert len(between.cos) == case["grid"][0]  # a row per latent frame, not per token


def check_table(name, table, cos, sin):
    for got, want, still in ((table.cos, cos, 1.0), (table.sin, sin, 0.0)):
        heads = want.shape[1]
        got = spread(got, table.rows, heads * want.shape[-1], still)
        golden.close(name, "table", got.unflatten(-1, (heads, -1)).transpose(0, 1)[None], want)


def test_patchify():
    (name,) = golden.names("patchify/")
    case = golden.inputs(name)
    video, audio = patchify_video(case["video"]), patchify_audio(case["audio"])
    golden.check(name, "video_tokens", video)
    golden.check(name, "audio_tokens", audio)
    assert torch.equal(unpatchify_video(video, tuple(case["video"].shape[2:])), case["video"])
    assert torch.equal(unpatchify_audio(audio, case["audio"].shape[3]), case["audio"])


@pytest.mark.parametrize("name", golden.names("adaln/"))
def test_adaln(name):
    want = golden.outputs(name)
    wave = sinusoid(golden.inputs(name)["t"] * 1000)
    if "sinusoid" in want:
        golden.check(name, "sinusoid", wave)
    with torch.no_grad():
        rows, embedded = getattr(golden.tiny_dit(), name.removeprefix("adaln/"))(wave)
    golden.check(name, "modulation", rows.flatten(1))
    golden.check(name, "embedded", embedded)


@pytest.mark.parametrize("name", golden.names("text_kv/"))
def test_text_keys_and_values(name):
    case, want = golden.inputs(name), golden.outputs(name)
    dit = golden.load_dit(golden.header(), torch.float32)
    t2v = golden.inputs("dit/t2v_cond") | {key: case[key] for key in ("video_context", "audio_context")}
    sigma = torch.full((1,), case["sigma"])
    for stream in ("video", "audio"):
        t2v |= {f"{stream}_sigma": sigma, f"{stream}_timesteps": torch.full_like(t2v[f"{stream}_timesteps"], case["sigma"])}
    forward = forward_of(dit, t2v)
    checked = set()
    for number in (0, 3):
        block = dit.transformer_blocks[number]
        for stream, layer in (("video", block.attn2), ("audio", block.audio_attn2)):
            context, keys, values = text_keys_values(dit, forward, number, stream, layer)
            heads_together = {"value": values.flatten(2), "key": keys.flatten(2), "kv_input": context}
            for part in heads_together.keys() & {key.removeprefix(f"block_{number}_{stream}_") for key in want}:
                golden.check(name, f"block_{number}_{stream}_{part}", heads_together[part])
                checked.add(f"block_{number}_{stream}_{part}")
    assert checked == want.keys()


def text_keys_values(dit, forward, number, stream, layer):
    """What a forward computes for one block: the modulated context, its keys and its values."""
    seen = []
    original = layer.keys_values

    def record(context, rope):
        seen.append((context, *original(context, rope)))
        return seen[-1][1:]

    layer.keys_values = record
    forward.run(dit, plan_of({}, Leg.COND))
    del layer.keys_values
    ((context, keys, values),) = seen
    return context, keys, values
