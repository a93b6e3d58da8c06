import logging

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import check, read_header
from comfyui_ltx25.ltx25.config.video import read_video_config
from comfyui_ltx25.ltx25.config.video_layout import EncoderConfig, Resample, ResStack
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.video import DECODER_UNUSED, ENCODER_UNUSED, ConvDecoder, Encoder
from comfyui_ltx25.tests.support.files import write_published
from comfyui_ltx25.tests.support.golden import Golden
from comfyui_ltx25.tests.support.loading import load
from comfyui_ltx25.tests.support.memory import peak_bytes_held
from comfyui_ltx25.tests.support.random_weights import fill_random
from comfyui_ltx25.tests.support.video_oracle import conv_vae, write_conv_vae
from hypothesis import given, settings
from hypothesis import strategies as st

GOLDEN = Golden("video_vae")
TILED = {"encode/tiled_time"}  # official temporal tiles: a streamed encode needs none
CASES = [case for case in GOLDEN.names("encode/") if case not in TILED]
TINY = EncoderConfig(
    latent_channels=3,
    width=4,
    patch=2,
    blocks=(ResStack(1), Resample((1, 2, 2), 2), ResStack(1), Resample((2, 1, 1), 1), Resample((2, 2, 2), 2), ResStack(1)),
)


def loaded(path):
    header = read_header(path)
    config = read_video_config(header)
    return load(lambda: Encoder(config.encoder), header, config.prefix, ENCODER_UNUSED)


@pytest.fixture(scope="module")
def encoder():
    return loaded(GOLDEN.folder / "video_vae.bf16.safetensors")


def made(dtype=torch.float64):
    with torch.device("meta"):
        module = Encoder(TINY)
    return fill_random(module, "cpu", dtype)


def images(frames, height=16, width=24):
    return torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(frames))


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_latents_are_the_official_ones(encoder, case, chunk):
    given = GOLDEN.index[case]["inputs"]
    height, width = (given[side]["value"] if side in given else None for side in ("height", "width"))
    clip = GOLDEN.input(case, "clip_u8")[0, :, : GOLDEN.input(case, "frames"), :height, :width]
    GOLDEN.check(case, "latent", encoder.encode(clip.permute(1, 2, 3, 0).float() / 255, Watch(), chunk))


def test_the_encoder_of_the_convolutional_file_reads_alike():
    case = "encode/f9"  # equal weights in both files
    clip = GOLDEN.input(case, "clip_u8")[0, :, :9].permute(1, 2, 3, 0).float() / 255
    GOLDEN.check(case, "latent", loaded(GOLDEN.folder / "video_vae_conv.bf16.safetensors").encode(clip, Watch()))


def test_no_official_case_is_left_out():
    assert TILED | set(CASES) == set(GOLDEN.names("encode/"))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    pytest.importorskip("diffusers")
    model = conv_vae()
    path = write_conv_vae(model, tmp_path_factory.mktemp("oracle") / "conv.safetensors")
    header = read_header(path)
    config = read_video_config(header)
    return model, loaded(path), load(lambda: ConvDecoder(config.decoder), header, config.prefix, DECODER_UNUSED)


@pytest.mark.parametrize("frames", [1, 9, 17])
def test_agrees_with_diffusers(oracle, frames):
    model, encoder, _ = oracle
    clip = images(frames, 64, 96)
    with torch.no_grad():
        raw = model.encode(clip.permute(3, 0, 1, 2)[None] * 2 - 1).latent_dist.mode()
    want = (raw - model.latents_mean.view(1, -1, 1, 1, 1)) / model.latents_std.view(1, -1, 1, 1, 1)
    torch.testing.assert_close(encoder.encode(clip, Watch(), 1), want, atol=1e-5, rtol=0)


def test_t4_a_round_trip_adds_nothing_over_the_reference(oracle):
    """A checker clip through encoder and decoder, ours against diffusers'."""
    model, encoder, decoder = oracle
    checker = (torch.arange(64)[:, None] // 4 + torch.arange(64) // 4) % 2
    clip = checker[None, :, :, None].expand(9, -1, -1, 3).float()
    with torch.no_grad():
        want = model.decode(model.encode(clip.permute(3, 0, 1, 2)[None] * 2 - 1).latent_dist.mode()).sample
    got = torch.cat([frames for _, frames in decoder.stream(encoder.encode(clip, Watch()), 8)])
    assert (got.permute(3, 0, 1, 2)[None] - want).abs().max() <= 1e-5 * max(1.0, want.abs().max().item())


@settings(max_examples=25, deadline=None)
@given(latents=st.integers(1, 6), extra=st.integers(0, 3), chunk=st.integers(1, 7))
def test_t2_a_streamed_encode_equals_a_whole_one(latents, extra, chunk):
    encoder, clip = made(), images(4 * (latents - 1) + 1 + extra).double()
    got = encoder.encode(clip, Watch(), chunk)
    assert got.shape == (1, 3, latents, 2, 3)
    torch.testing.assert_close(got, encoder.encode(clip, Watch(), 100), atol=2e-6, rtol=0)


def test_latent_k_does_not_depend_on_later_frames():
    encoder, clip = made(), images(17).double()
    whole = encoder.encode(clip, Watch())
    for latents in range(1, 5):
        torch.testing.assert_close(encoder.encode(clip[: 4 * (latents - 1) + 1], Watch()), whole[:, :, :latents], atol=2e-6, rtol=0)


def test_memory_does_not_grow_with_the_clip():
    encoder = made(torch.float32)
    clips = {frames: images(frames) for frames in (41, 161)}
    peaks = {frames: peak_bytes_held(lambda clip=clip: [encoder.encode(clip, Watch(), 2)]) for frames, clip in clips.items()}
    grown = 30 * 2 * 3 * 3 * 4 * 4  # 30 more latents, a few copies
    assert peaks[161] <= peaks[41] + grown


@pytest.mark.parametrize("name", ["ltx-2.5-video-vae-bf16", "ltx-2.5-video-vae-conv-bf16"])
def test_the_published_files_have_nothing_missing_and_nothing_left_over(tmp_path, name):
    header = read_header(write_published(name, tmp_path))
    config = read_video_config(header)
    with torch.device("meta"):
        module = Encoder(config.encoder)
    used = set(check(module, header, config.prefix, ENCODER_UNUSED))
    assert {n for n in header.tensors if n not in used} == {n for n in header.tensors if n.startswith("decoder.")}
    assert sum(p.numel() for p in module.encoder.parameters()) == 318_936_897


def test_grids_are_those_of_the_published_architecture(tmp_path):
    config = read_video_config(read_header(write_published("ltx-2.5-video-vae-bf16", tmp_path))).encoder
    with torch.device("meta"):
        encoder = Encoder(config).to(torch.bfloat16)
        clip = torch.empty(25, 448, 768, 3)
    grids = {}
    for name, block in encoder.encoder.named_modules():
        if hasattr(block, "made") and not hasattr(block, "stride"):
            block.register_forward_hook(lambda _, inputs, made, name=name: grids.update({name: tuple(made.shape)}))
    from comfyui_ltx25.ltx25.video.encoder import _Pictures

    with torch.no_grad():
        latent = encoder._chain(_Pictures(clip, 4, encoder.encoder.conv_in.conv.weight)).advance(4, 0, 0)
    assert grids["conv_in"] == (25, 112, 192, 128)
    assert grids["down_blocks.2.res_blocks.0.conv1"] == (25, 56, 96, 256)
    assert grids["down_blocks.3.conv"] == (26, 56, 96, 256)
    assert grids["down_blocks.4.res_blocks.0.conv1"] == (13, 56, 96, 512)
    assert grids["down_blocks.6.res_blocks.0.conv1"] == (7, 28, 48, 1024)
    assert grids["down_blocks.8.res_blocks.0.conv1"] == (4, 14, 24, 1024)
    assert tuple(latent.shape) == (4, 14, 24, 129)


def test_out_of_memory_goes_on_with_fewer_frames_and_says_so(monkeypatch, caplog):
    encoder, clip = made(), images(41).double()
    want, chain = encoder.encode(clip, Watch()), encoder._chain
    tries = []

    def reluctant(stage):
        tries.append(stage)
        if len(tries) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return chain(stage)

    monkeypatch.setattr(encoder, "_chain", reluctant)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(encoder.encode(clip, Watch(), 4), want, atol=2e-6, rtol=0)
    assert [record.getMessage() for record in caplog.records] == [
        "encode.video ran out of memory with 4 latent frames at a time; going on with 2.",
        "encode.video ran out of memory with 2 latent frames at a time; going on with 1.",
    ]


@pytest.mark.parametrize("shape", [(9, 16, 24), (9, 16, 24, 4), (0, 16, 24, 3)])
def test_other_than_rgb_frames_are_refused(shape):
    with pytest.raises(InputError, match=r"the images have shape .*, wanted \(frames, height, width, 3\)"):
        made().encode(torch.zeros(shape), Watch())


def test_sides_off_the_grid_are_refused_with_the_nearest_legal_ones():
    with pytest.raises(InputError, match="width 20 px is not a multiple of 8 .*use 16 or 24"):
        made().encode(torch.zeros(1, 16, 20, 3), Watch())


def test_images_that_are_not_finite_are_an_error_that_names_the_phase():
    with pytest.raises(InputError, match="encode.video made values that are not finite"):
        made().encode(torch.full((1, 16, 24, 3), float("nan")), Watch())


@pytest.mark.parametrize(("value", "words"), [(0.0, "made the same of every part"), (float("nan"), "not finite")])
def test_n17_a_device_that_encodes_to_nothing_is_told_before_anything_is_sampled(encoder, monkeypatch, value, words):
    """Zeros of a broken convolution are not zeros any more with a bias, and once they are normalised."""
    with monkeypatch.context() as patch:
        patch.setattr("comfyui_ltx25.ltx25.video.frames.FrameConv.forward", lambda conv, x: x.new_full((x.shape[0] - 2, *x.shape[1:3], conv.made), value))
        with pytest.raises(InputError, match=words):
            encoder.encode(torch.rand(1, 64, 64, 3), Watch())
    assert encoder.encode(torch.zeros(1, 64, 64, 3), Watch()).std() > 0  # a black picture is content
