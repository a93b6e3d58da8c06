import dataclasses

import pytest
import torch
from comfyui_ltx25.kernels.head_norm_rope import rotate
from comfyui_ltx25.kernels.neighborhood_attention import na3d_reference
from comfyui_ltx25.ltx25.checkpoint import check, read_header
from comfyui_ltx25.ltx25.config.video import read_video_config
from comfyui_ltx25.ltx25.config.video_layout import DiffusionDecoderConfig, Resample
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.instrument import Sink, Watch
from comfyui_ltx25.ltx25.shapes import VideoLatentShape, VideoShape
from comfyui_ltx25.ltx25.video import DECODER_UNUSED, DiffusionDecoder, decode_video, diffusion_decoder
from comfyui_ltx25.ltx25.video.canvas import Crop, size_floor
from comfyui_ltx25.ltx25.video.diffusion_plan import SLACK, reach_cells
from comfyui_ltx25.ltx25.video.frames import Given
from comfyui_ltx25.ltx25.video.na_blocks import EPS
from comfyui_ltx25.ltx25.video.noise import DrawnNoise
from comfyui_ltx25.ltx25.video.rope import rope, rope_split
from comfyui_ltx25.ltx25.video.tiling import Tile, spans
from comfyui_ltx25.tests.support.files import write_published
from comfyui_ltx25.tests.support.given_noise import GivenNoise
from comfyui_ltx25.tests.support.golden import Golden
from comfyui_ltx25.tests.support.loading import load
from comfyui_ltx25.tests.support.memory import peak_bytes_held
from comfyui_ltx25.tests.support.random_weights import fill_random
from comfyui_ltx25.tests.support.video_oracle import diffusion_vae, write_diffusion_vae
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

GOLDEN = Golden("video_vae")
FILE = GOLDEN.folder / "video_vae.bf16.safetensors"
NOT_OURS = {
    "diffusion_decode/official_chunked_eager",  # information: the official default differs from its own plain attention
    "diffusion_decode/tiled",  # official tiles with halos far below the receptive field
}
MODULATION = "diffusion_decode/modulation"
CASES = [case for case in GOLDEN.names("diffusion_decode/") if case not in NOT_OURS | {MODULATION}]
# Windows small against the clip, so that slabs and tiles matter; three stages.
TINY = DiffusionDecoderConfig(
    latent_channels=3,
    patch=2,
    head_dim=8,
    channels=(16, 8, 8),
    depths=(1, 1, 2),
    kernels=((3, 3, 3), (3, 3, 3), (5, 3, 3)),
    upsamples=(Resample((2, 2, 2), 2), Resample((1, 2, 2), 1)),
    time_width=8,
    time_scale=1000.0,
    steps=1,
    output="x0",
    gates=False,
)


def loaded(path, **changes):
    header = read_header(path)
    config = read_video_config(header)
    return load(lambda: DiffusionDecoder(dataclasses.replace(config.decoder, **changes)), header, config.prefix, DECODER_UNUSED)


def made(dtype=torch.float64, **changes):
    with torch.device("meta"):
        module = DiffusionDecoder(dataclasses.replace(TINY, **changes))
    return fill_random(module, "cpu", dtype)


def streamed(decoder, latent, noise, **changes):
    """(1, 3, F, H, W) as the official code lays frames out."""
    plan = decoder.plan(VideoLatentShape(*latent.shape[1:]), "off", None)
    if "slab" in changes:
        changes = {"first": min(changes["slab"], 3), **changes}
    plan = dataclasses.replace(plan, **changes)
    return torch.cat([part.pixels for part in decoder.stream(latent, GivenNoise(noise[0]), plan, lambda: None)]).permute(3, 0, 1, 2)[None]


def normal(shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 3, shape.frames, shape.height, shape.width, generator=generator, dtype=torch.float64)


def official_noise(case):
    given = GOLDEN.index[case]["inputs"]
    return torch.randn(given["noise_shape"]["value"], generator=torch.Generator().manual_seed(given["noise_seed"]["value"]))


@pytest.mark.parametrize("slab", [7, 1000])
@pytest.mark.parametrize("case", CASES)
def test_frames_are_the_official_ones(case, slab):
    if slab == 1000 and "steps" in case:
        pytest.skip("several steps are checked in slabs, which is the harder way")
    decoder = loaded(FILE, steps=GOLDEN.input(case, "steps"), output=GOLDEN.input(case, "model_output_type"))
    frames = streamed(decoder, GOLDEN.input(case, "latent"), official_noise(case), slab=slab)
    GOLDEN.check(case, "frames", frames)
    if "last_frame_row" in GOLDEN.index[case]["outputs"]:
        GOLDEN.check(case, "last_frame_row", frames[:, :, -1, -1])


@pytest.mark.parametrize("case", [case for case in CASES if "steps" not in case])
def test_the_context_is_the_official_one(case):
    decoder = loaded(FILE)
    decoder._prepare()
    crop = _crop(decoder, GOLDEN.input(case, "latent"))
    features = decoder._features(decoder._padded(GOLDEN.input(case, "latent"), crop), lambda: None)
    kept = GOLDEN.index[case]["outputs"]["stage4_input"]["shape"][1]
    GOLDEN.check(case, "stage4_input", features[None, :kept])
    context = decoder._grown(3, Given(features), 5, Tile.whole(*features.shape[1:3]), lambda: None)
    GOLDEN.check(case, "context", context.advance(GOLDEN.index[case]["outputs"]["context"]["shape"][1], 0, 0)[None])


def _crop(decoder, latent):
    return Crop.of(decoder.config, VideoLatentShape(*latent.shape[1:]))


def test_the_modulation_is_the_official_one():
    network = loaded(FILE).decoder
    embedding = network.t_embedder(torch.tensor(GOLDEN.input(MODULATION, "timestep")))
    GOLDEN.check(MODULATION, "t_emb", embedding)
    GOLDEN.check(MODULATION, "chunks", network.shared_adaln(embedding))


def test_noise_is_drawn_for_the_padded_canvas(monkeypatch):
    decoder, latent = made(torch.float32), torch.randn(1, 3, 1, 1, 4)
    drawn = []
    monkeypatch.setattr(diffusion_decoder, "DrawnNoise", lambda shape, *rest, **more: drawn.append(shape) or DrawnNoise(shape, *rest, **more))
    decode_video(decoder, latent, tiling="auto", seed=0, watch=Watch(), free=None)
    assert drawn == [VideoShape(frames=5, height=24, width=32)]


def test_no_official_case_is_left_out():
    assert NOT_OURS | {MODULATION} | set(CASES) == set(GOLDEN.names("diffusion_decode/"))


def test_the_attention_module_is_the_official_one():
    given = {name: GOLDEN.input("na3d/module", name) for name in GOLDEN.index["na3d/module"]["inputs"]}
    x = given["x"][0]
    q, k, v = (x.new_empty(*x.shape[:3], 2, 16) for _ in range(3))
    angles = rope(tuple(x.shape[:3]), (0, 0, 0), 16, x.device)
    # the module starts after the block's norm: q, k, v of x itself
    plain = torch.nn.functional.linear(x, given["qkv.weight"], given["qkv.bias"]).unflatten(-1, (3, 2, 16))
    for out, part, gain in ((q, 0, given["q_norm.weight"] / 4), (k, 1, given["k_norm.weight"])):
        y = plain[..., part, :, :]
        out.copy_(rotate(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * gain, angles))
    v.copy_(plain[..., 2, :, :])
    made = na3d_reference(q[None], k[None], v[None], tuple(given["kernel"]), 1.0).flatten(-2)
    GOLDEN.check("na3d/module", "out", torch.nn.functional.linear(made, given["proj.weight"], given["proj.bias"]))


@pytest.mark.parametrize("case", GOLDEN.names("rope3d/"))
def test_rope_is_the_official_one(case):
    x, width = GOLDEN.input(case, "x"), GOLDEN.input(case, "head_dim")
    assert list(rope_split(width)) == GOLDEN.index[case]["outputs"]["split"]["value"]
    GOLDEN.check(case, "y", rotate(x[0], rope(tuple(x.shape[1:4]), (0, 0, 0), width, x.device))[None])


def test_the_size_floor_is_the_official_one(tmp_path):
    want = GOLDEN.index["tiling/latent_floor"]["outputs"]
    assert list(size_floor(read_video_config(read_header(FILE)).decoder)) == want["this_checkpoint"]["value"]
    published = read_video_config(read_header(write_published("ltx-2.5-video-vae-bf16", tmp_path))).decoder
    assert list(size_floor(published)) == want["published"]["value"]


def test_agrees_with_diffusers(tmp_path):
    pytest.importorskip("diffusers")
    model = diffusion_vae()
    decoder = loaded(write_diffusion_vae(model, tmp_path / "diffusion.safetensors"))
    latent = torch.randn(1, 8, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    raw = latent * model.latents_std.view(1, -1, 1, 1, 1) + model.latents_mean.view(1, -1, 1, 1, 1)
    with torch.no_grad():
        want = model.decode(raw, generator=torch.Generator().manual_seed(5), return_dict=False)[0]
    noise = torch.randn(1, 3, 9, 48, 48, generator=torch.Generator().manual_seed(5))
    got = streamed(decoder, latent, noise, slab=5)
    assert (got - want).abs().max() <= 1e-5 * max(1.0, want.abs().max().item())


def test_legacy_gates_are_folded(tmp_path):
    with safe_open(FILE, "pt") as file:
        tensors, metadata = {key: file.get_tensor(key).float() for key in file.keys()}, file.metadata()  # noqa: SIM118
    plain = streamed(loaded(FILE), *_small())
    for block in range(2):
        lead = f"decoder.diff_blocks.{block}."
        for gate, linear in (("gate_msa", "attn.proj"), ("gate_mlp", "mlp.w_down"), ("gate_ctx", "context_proj")):
            values = torch.rand(32) + 0.5
            tensors[lead + gate] = values
            for leaf in ("weight", "bias"):
                if f"{lead}{linear}.{leaf}" in tensors:
                    t = tensors[f"{lead}{linear}.{leaf}"]
                    tensors[f"{lead}{linear}.{leaf}"] = t / (values[:, None] if t.ndim == 2 else values)
    save_file(tensors, tmp_path / "gated.safetensors", metadata)
    decoder = loaded(tmp_path / "gated.safetensors")
    torch.testing.assert_close(streamed(decoder, *_small()), plain, atol=2e-5, rtol=0)
    assert not [name for name in decoder.state_dict() if "gate_" in name and "w_gate" not in name]


def _small():
    return torch.randn(1, 4, 1, 5, 5, generator=torch.Generator().manual_seed(0)), torch.randn(1, 3, 17, 160, 160, generator=torch.Generator().manual_seed(1))


@settings(max_examples=15, deadline=None)
@given(t=st.integers(1, 7), h=st.integers(1, 4), w=st.integers(1, 4), slab=st.integers(1, 15), steps=st.sampled_from([1, 2]), resident=st.booleans())
def test_slabs_do_the_sums_of_the_whole(t, h, w, slab, steps, resident):
    """In float64, where the order of a sum does not hide a wrong term."""
    decoder = made(steps=steps)
    latent = torch.randn(1, 3, t, h, w, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    noise = normal(Crop.of(TINY, VideoLatentShape(3, t, h, w)).canvas.pixels(TINY.compression))
    frames = 2 * (t - 1) + 1
    got = streamed(decoder, latent, noise, slab=slab, resident=resident)
    assert got.shape == (1, 3, frames, 8 * h, 8 * w)
    torch.testing.assert_close(got, streamed(decoder, latent, noise, slab=1000, first=1000), atol=1e-11, rtol=0)


def test_memory_does_not_grow_with_the_clip_beyond_its_features():
    """What grows is named: the latent, the noise on the host, and the stage-4 input; not the last stage."""
    decoder = made(torch.float32)

    def peak(t):
        latent, noise = torch.zeros(1, 3, t, 4, 4), torch.zeros(1, 3, 2 * t - 1, 32, 32)
        plan = dataclasses.replace(decoder.plan(VideoLatentShape(3, t, 4, 4), "off", None), slab=4, first=2)
        return peak_bytes_held(lambda: decoder.stream(latent, GivenNoise(noise[0]), plan, lambda: None))

    features = 4 * 8 * 2 * 8 * 8 * (96 - 24)  # (2 t + 3) x 8 x 8 x 8 float32
    assert peak(96) <= peak(24) + 6 * features


def test_the_published_file_has_nothing_missing_and_nothing_left_over(tmp_path):
    header = read_header(write_published("ltx-2.5-video-vae-bf16", tmp_path))
    config = read_video_config(header)
    with torch.device("meta"):
        module = DiffusionDecoder(config.decoder)
    used = set(check(module, header, config.prefix, DECODER_UNUSED))
    left = {name for name in header.tensors if name not in used}
    assert left == {name for name in header.tensors if name.startswith("encoder.")} | {"decoder.type_emb"}
    assert sum(p.numel() for p in module.decoder.parameters()) == 417_133_616


def test_grids_are_those_of_the_published_architecture(tmp_path, monkeypatch):
    """768 x 448 x 25 frames on meta: two ghost frames through the context, then 25 frames of 112 x 192 cells."""
    from comfyui_ltx25.ltx25.video import attended

    seen = []

    def stub(q, k, v, window, scale, place, bound):
        seen.append((tuple(q.shape[1:4]), q.shape[4], window))
        return torch.empty_like(q)

    monkeypatch.setattr(attended, "na3d", stub)
    config = read_video_config(read_header(write_published("ltx-2.5-video-vae-bf16", tmp_path))).decoder
    with torch.device("meta"):
        decoder = DiffusionDecoder(config).to(torch.bfloat16)
        latent, noise = torch.empty(1, 128, 4, 14, 24), torch.empty(1, 3, 25, 448, 768)
    frames = streamed(decoder, latent, noise, slab=1000, first=1000)
    assert seen == (
        [((6, 14, 24), 32, (3, 7, 7))] * 4
        + [((6, 28, 48), 16, (3, 7, 7))] * 6
        + [((11, 28, 48), 8, (3, 5, 5))] * 4
        + [((14, 56, 96), 8, (3, 5, 5)), ((13, 56, 96), 8, (3, 5, 5))]  # of 21: no more than 25 frames of context need
        + [((25, 112, 192), 4, (11, 11, 11))] * 8
    )
    assert tuple(frames.shape) == (1, 3, 25, 448, 768)


@settings(max_examples=6, deadline=None)
@given(h=st.integers(5, 7), w=st.integers(5, 9), rows=st.integers(1, 2), columns=st.integers(1, 3), resident=st.booleans())
def test_t1_t3_tiles_do_the_sums_of_the_whole(h, w, rows, columns, resident):
    """No seam at all: what a cut disturbs is never kept."""
    decoder, shape = made(), VideoLatentShape(3, 2, h, w)
    try:
        cut = tuple(spans(h, rows, reach_cells(TINY))), tuple(spans(w, columns, reach_cells(TINY)))
    except ValueError:
        return
    if min(span.stop - span.start for axis in cut for span in axis) < 3:  # smaller than a window: never planned
        return
    latent = torch.randn(1, 3, 2, h, w, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = normal(Crop.of(TINY, shape).canvas.pixels(TINY.compression))
    plan = dataclasses.replace(decoder.plan(shape, "off", None), rows=cut[0], columns=cut[1], slab=2, first=1, resident=resident)
    got = torch.full((3, 3, 8 * h, 8 * w), float("nan"), dtype=torch.float64)
    for part in decoder.stream(latent, GivenNoise(noise[0]), plan, lambda: None):
        frames, height, width, _ = part.pixels.shape
        area = got[:, part.first : part.first + frames, part.top : part.top + height, part.left : part.left + width]
        assert area.isnan().all()  # written once
        area.copy_(part.pixels.permute(3, 0, 1, 2))
    torch.testing.assert_close(got[None], streamed(decoder, latent, noise, slab=1000, first=1000), atol=1e-11, rtol=0)


@pytest.mark.parametrize("t, h, w", [(1, 1, 1), (2, 1, 3), (3, 5, 1)])
def test_short_clips_and_small_sides_decode(t, h, w):
    latent = torch.randn(2, 3, t, h, w)
    images = decode_video(made(torch.float32), latent, tiling="auto", seed=3, watch=Watch(), free=None)
    assert images.shape == (2 * (2 * (t - 1) + 1), 8 * h, 8 * w, 3)


def test_batch_item_i_is_a_batch_of_one_with_seed_plus_i():
    decoder, latent = made(torch.float32), torch.randn(3, 3, 2, 3, 3)
    both = decode_video(decoder, latent, tiling="auto", seed=7, watch=Watch(), free=None)
    for item in range(3):
        one = decode_video(decoder, latent[item : item + 1], tiling="auto", seed=7 + item, watch=Watch(), free=None)
        torch.testing.assert_close(both[3 * item : 3 * item + 3], one, atol=1e-5, rtol=0)  # a CPU's sums may be split otherwise in another call
    other = decode_video(decoder, latent[:1], tiling="auto", seed=8, watch=Watch(), free=None)
    assert (both[:3] - other).abs().max() > 1e-2, "another seed, another noise"


def test_less_memory_changes_the_plan_and_not_the_frames():
    decoder, latent = made(torch.float64), torch.randn(1, 3, 9, 4, 4)
    shape = VideoLatentShape(3, 9, 4, 4)
    most, least = (decoder.plan(shape, "off", free) for free in (None, 1))
    between = decoder.plan(shape, "off", int((most.bytes + least.bytes) / 2 * SLACK))
    assert most.slab > between.slab > least.slab and between.bytes <= (most.bytes + least.bytes) // 2
    images = [decode_video(decoder, latent, tiling="off", seed=0, watch=Watch(), free=free) for free in (None, 1)]
    torch.testing.assert_close(*images, atol=1e-6, rtol=0)


class Seen(Sink):
    def __init__(self):
        self.ticks, self.texts = [], []

    def ticked(self, phase):
        self.ticks.append((phase.done, phase.total))
        self.texts.append(phase.text)


class Reluctant(DiffusionDecoder):
    """Runs out of memory whenever a plan wants more than `most` bytes."""

    most = 0

    def stream(self, latent, noise, plan, breathe):
        for part in super().stream(latent, noise, plan, breathe):
            if plan.bytes > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            yield part


def test_h1_tiles_are_told_one_by_one_and_show_nowhere():
    decoder, latent, seen = made(torch.float64), torch.randn(1, 3, 2, 8, 12, generator=torch.Generator().manual_seed(0)), Seen()
    plan = decoder.plan(VideoLatentShape(3, 2, 8, 12), "auto", 1)
    assert plan.tiles >= 6
    images = decode_video(decoder, latent, tiling="auto", seed=0, watch=Watch([seen]), free=1)
    ticks = [tick for tick in dict.fromkeys(seen.ticks) if tick[0]]
    assert ticks == [(k, plan.units) for k in range(1, plan.units + 1)]
    assert seen.texts[-1] == f"chunk {plan.units} of {plan.units}"
    torch.testing.assert_close(images, decode_video(decoder, latent, tiling="off", seed=0, watch=Watch(), free=None), atol=1e-6, rtol=0)


def test_m1_out_of_memory_goes_on_down_to_tiles_and_says_so(caplog):
    with torch.device("meta"):
        module = Reluctant(TINY)
    decoder, seen = fill_random(module, "cpu", torch.float32), Seen()
    latent = torch.randn(2, 3, 9, 8, 12, generator=torch.Generator().manual_seed(0))
    shape = VideoLatentShape(3, 9, 8, 12)
    untiled = [plan for plan in decoder._plans(shape, tiled=True) if plan.tiles == 1]
    decoder.most = untiled[-1].bytes - 1
    before = latent.clone()
    with caplog.at_level("WARNING"):
        images = decode_video(decoder, latent, tiling="off", seed=0, watch=Watch([seen]), free=None)
    assert images.shape == (2 * 17, 64, 96, 3) and torch.equal(latent, before)
    assert "in 1 x 2 tiles" in caplog.records[-1].getMessage() or "in 2 x 1 tiles" in caplog.records[-1].getMessage()
    done = [done for done, _ in seen.ticks]
    assert done == sorted(done) and seen.ticks[-1][0] == seen.ticks[-1][1]


def test_w1_no_float64_leaves_the_cpu():
    """A device without float64 (MPS) must run: every tensor made on the decoder's device is float32 or narrower."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watcher(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                    self.seen += 1
                    assert tensor.dtype != torch.float64, func
            return out

    with torch.device("meta"):
        decoder = DiffusionDecoder(TINY).to(torch.bfloat16)
    with Watcher() as watcher:
        for _ in decoder.stream(
            torch.empty(1, 3, 3, 3, 3, device="meta", dtype=torch.bfloat16),
            GivenNoise(torch.zeros(3, 5, 24, 24)),
            decoder.plan(VideoLatentShape(3, 3, 3, 3), "off", None),
            lambda: None,
        ):
            pass
    assert watcher.seen > 100


def test_a_latent_that_is_not_finite_is_refused():
    with pytest.raises(InputError, match="not finite"):
        decode_video(made(), torch.full((1, 3, 1, 1, 1), float("nan")), tiling="auto", seed=0, watch=Watch(), free=None)
