import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import check, read_header
from comfyui_ltx25.ltx25.config.video import read_video_config
from comfyui_ltx25.ltx25.config.video_layout import ConvDecoderConfig, Resample, ResStack
from comfyui_ltx25.ltx25.shapes import VideoLatentShape
from comfyui_ltx25.ltx25.video import DECODER_UNUSED, ConvDecoder
from comfyui_ltx25.ltx25.video.conv_plan import conv_plan, peak_bytes
from comfyui_ltx25.tests.support.files import write_published
from comfyui_ltx25.tests.support.golden import Golden
from comfyui_ltx25.tests.support.loading import load
from comfyui_ltx25.tests.support.memory import peak_bytes_held
from comfyui_ltx25.tests.support.random_weights import fill_random
from comfyui_ltx25.tests.support.video_oracle import conv_vae, write_conv_vae
from hypothesis import given, settings
from hypothesis import strategies as st

GOLDEN = Golden("video_vae")
TILED = {  # official outputs with visible seams: a streamed decode needs no tiles
    "conv_decode/tiled_time_80_24",
    "conv_decode/tiled_space",
}
CASES = [name for name in GOLDEN.names("conv_decode/") if name not in TILED]
TINY = ConvDecoderConfig(
    latent_channels=4,
    width=3,
    patch=2,
    blocks=(
        ResStack(1),
        Resample((2, 2, 2), 2),
        Resample((1, 2, 2), 1),
        ResStack(2),
        Resample((2, 1, 1), 2),
        ResStack(1),
    ),
)


def loaded(path):
    header = read_header(path)
    config = read_video_config(header)
    return load(lambda: ConvDecoder(config.decoder), header, config.prefix, DECODER_UNUSED)


@pytest.fixture(scope="module")
def decoder():
    return loaded(GOLDEN.folder / "video_vae_conv.bf16.safetensors")


@pytest.fixture(scope="module")
def tiny():
    with torch.device("meta"):
        module = ConvDecoder(TINY)
    return fill_random(module, "cpu", torch.float32)


@pytest.fixture(scope="module")
def exact():
    with torch.device("meta"):
        module = ConvDecoder(TINY)
    return fill_random(module, "cpu", torch.float64)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """diffusers' decoder at 1/8 width, and ours from a file of its weights."""
    pytest.importorskip("diffusers")
    model = conv_vae()
    return model, loaded(write_conv_vae(model, tmp_path_factory.mktemp("oracle") / "conv.safetensors"))


def whole(decoder, latent, chunk=10**6):
    """(1, 3, F, H, W) as the official code lays frames out."""
    return torch.cat([frames for _, frames in decoder.stream(latent, chunk)]).permute(3, 0, 1, 2)[None]


@pytest.mark.parametrize("case", CASES)
def test_frames_are_the_official_ones(decoder, case):
    frames = whole(decoder, GOLDEN.input(case, "latent"), chunk=8)
    GOLDEN.check(case, "frames", frames)
    if "first_row" in GOLDEN.index[case]["outputs"]:
        GOLDEN.check(case, "first_row", frames[:, :, :, 0])
        GOLDEN.check(case, "last_frame_row", frames[:, :, -1, -1])


def test_no_official_case_is_left_out():
    assert TILED | set(CASES) == set(GOLDEN.names("conv_decode/"))


@pytest.mark.parametrize("shape", [(1, 16, 1, 1, 2), (1, 16, 3, 2, 3)])
def test_agrees_with_diffusers(oracle, shape):
    model, decoder = oracle
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    raw = latent * model.latents_std.view(1, -1, 1, 1, 1) + model.latents_mean.view(1, -1, 1, 1, 1)
    with torch.no_grad():
        want = model.decode(raw).sample
    torch.testing.assert_close(whole(decoder, latent, chunk=5), want, atol=1e-5, rtol=0)


@settings(max_examples=30, deadline=None)
@given(t=st.integers(1, 7), h=st.integers(1, 3), w=st.integers(1, 3), chunk=st.integers(1, 40))
def test_a_streamed_decode_does_the_sums_of_an_unstreamed_one(exact, t, h, w, chunk):
    """In float64, where the order of a sum does not hide a wrong term."""
    latent = torch.randn(1, 4, t, h, w, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    pieces = list(exact.stream(latent, chunk))
    frames = 4 * (t - 1) + 1
    assert [(first, piece.shape[0]) for first, piece in pieces] == [(k, min(chunk, frames - k)) for k in range(0, frames, chunk)]
    torch.testing.assert_close(torch.cat([piece for _, piece in pieces])[None].permute(0, 4, 1, 2, 3), whole(exact, latent), atol=1e-12, rtol=0)


@pytest.mark.parametrize("chunk", [1, 8, 32])
def test_streamed_equals_unstreamed_to_2e_6_in_float32(oracle, chunk):
    """Relative to the largest value: these random weights make pixels beyond 1."""
    latent = torch.randn(1, 16, 6, 2, 3, generator=torch.Generator().manual_seed(2))
    want = whole(oracle[1], latent)
    assert (whole(oracle[1], latent, chunk) - want).abs().max() <= 2e-6 * want.abs().max()


def test_two_streams_of_one_decoder_do_not_disturb_each_other(tiny):
    a, b = torch.randn(1, 4, 3, 1, 1), torch.randn(1, 4, 3, 1, 1)
    both = list(zip(tiny.stream(a, 2), tiny.stream(b, 2), strict=True))
    torch.testing.assert_close(torch.cat([x for (_, x), _ in both]), torch.cat([x for _, x in tiny.stream(a, 2)]), atol=0, rtol=0)
    torch.testing.assert_close(torch.cat([y for _, (_, y) in both]), torch.cat([y for _, y in tiny.stream(b, 2)]), atol=0, rtol=0)


def test_memory_does_not_grow_with_the_clip(tiny):
    short, long = (peak_bytes_held(lambda t=t: tiny.stream(torch.zeros(1, 4, t, 4, 4), 8)) for t in (24, 96))
    latents = 4 * 4 * 4 * 4 * (96 - 24)  # bytes of latent the longer clip brings along, un-normalised once
    assert long <= short + 2 * latents, (short, long)
    assert peak_bytes_held(lambda: tiny.stream(torch.zeros(1, 4, 96, 4, 4), 10**6)) > 4 * long


def test_the_published_file_has_nothing_missing_and_nothing_left_over(tmp_path):
    header = read_header(write_published("ltx-2.5-video-vae-conv-bf16", tmp_path))
    config = read_video_config(header)
    with torch.device("meta"):
        module = ConvDecoder(config.decoder)
    used = set(check(module, header, config.prefix, DECODER_UNUSED))
    assert {name for name in header.tensors if name not in used} == {name for name in header.tensors if name.startswith("encoder.")}
    assert sum(p.numel() for p in module.decoder.parameters()) == 407_169_072


def test_grids_are_those_of_the_published_architecture(tmp_path):
    """768 x 448 x 25 frames, stage by stage, on meta (channels last)."""
    config = read_video_config(read_header(write_published("ltx-2.5-video-vae-conv-bf16", tmp_path))).decoder
    with torch.device("meta"):
        decoder = ConvDecoder(config).to(torch.bfloat16)
    grids = {}
    for name, block in decoder.decoder.named_modules():
        if name.endswith("conv"):
            continue
        if hasattr(block, "made"):
            block.register_forward_hook(lambda _, inputs, made, name=name: grids.update({name: tuple(made.shape)}))
    frames = torch.cat([f for _, f in decoder.stream(torch.empty(1, 128, 4, 14, 24, device="meta"), 25)])
    assert grids["conv_in"] == (4, 14, 24, 1024)
    assert grids["up_blocks.2.res_blocks.0.conv1"] == (7, 28, 48, 512)
    assert grids["up_blocks.4.res_blocks.0.conv1"] == (13, 56, 96, 512)
    assert grids["up_blocks.6.res_blocks.0.conv1"] == (25, 56, 96, 256)
    assert grids["up_blocks.8.res_blocks.0.conv1"] == (25, 112, 192, 128)
    assert grids["conv_out"] == (25, 112, 192, 48)
    assert tuple(frames.shape) == (25, 448, 768, 3)


def test_chunks_shrink_until_they_fit():
    shape = VideoLatentShape(4, 30, 20, 20)
    plans = [conv_plan(TINY, shape, free, 4, 32) for free in (None, 10**12, 2 * 10**7, 1)]
    assert [plan.chunk for plan in plans][:2] == [32, 32]
    assert 1 < plans[2].chunk < 32 and peak_bytes(TINY, shape, plans[2].chunk, 4) <= 2 * 10**7
    assert plans[3].chunk == 1 and plans[3].bytes > 1  # the least there is
    assert plans[0].units == -(-(4 * 29 + 1) // 32)


def test_constant_and_ramp_latents_show_no_seam_between_chunks(exact):
    """A seam would be a jump at a chunk border that the unstreamed decode does not have."""
    for latent in (torch.full((1, 4, 6, 2, 2), 0.3), torch.linspace(-1, 1, 6).view(1, 1, 6, 1, 1).expand(1, 4, 6, 2, 2)):
        torch.testing.assert_close(whole(exact, latent.double(), chunk=5), whole(exact, latent.double()), atol=1e-12, rtol=0)
