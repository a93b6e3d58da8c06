"""What plans expect against what the decoders hold, counted on meta tensors at the published sizes.

Kernels are replaced by what they allocate: on meta their plain versions would run, which hold more. On an H200 the peak of
the convolutional decoder at 1280 x 704 x 121 was the counted one.
"""

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.config.video import read_video_config
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.shapes import VideoLatentShape
from comfyui_ltx25.ltx25.video import Encoder, attended, build_decoder, frames
from comfyui_ltx25.ltx25.video.conv_plan import largest_tensor
from comfyui_ltx25.ltx25.video.diffusion_plan import LARGEST_TENSOR
from comfyui_ltx25.ltx25.video.encoder import CHUNK, countable_chunk
from comfyui_ltx25.ltx25.working import seeing_bytes
from comfyui_ltx25.tests.support.files import write_published
from comfyui_ltx25.tests.support.given_noise import GivenNoise
from comfyui_ltx25.tests.support.memory import HeldOnMeta

GIB = 1 << 30
SHORT, MIDDLE, LARGE, FULL_HD = (4, 14, 24), (16, 18, 32), (16, 22, 40), (16, 34, 60)  # 768x448x25f to 1920x1088x121f
LONG = (61, 22, 40)  # 1280x704x481f
ULTRA_HD = (16, 68, 120)  # 3840x2176x121f


@pytest.fixture(autouse=True)
def kernels_as_allocations(monkeypatch):
    monkeypatch.setattr(attended, "na3d", lambda q, *rest: q)
    monkeypatch.setattr(attended, "add_rms_norm", lambda x, *rest: torch.empty_like(x))
    monkeypatch.setattr(attended, "head_norm_rope", lambda *all_in_place: None)
    monkeypatch.setattr(attended, "gated", lambda x, gate, up: x.new_empty(x.shape[0], gate.shape[0]))
    monkeypatch.setattr(frames, "pixel_norm_silu", lambda *in_place: None)
    # meta convolutions do not keep channels-last memory, and would be copied
    monkeypatch.setattr(frames.FrameConv, "forward", lambda conv, x: x.new_empty(x.shape[0] - 2, *x.shape[1:3], conv.made))


def decoder(name, folder):
    config = read_video_config(read_header(write_published(name, folder)))
    with torch.device("meta"):
        module = build_decoder(config.decoder).to(torch.bfloat16)
    module._prepare()
    return module


def counted(module, grid, work, *given):
    latent = torch.empty(1, 128, *grid, device="meta")
    with HeldOnMeta([*module.parameters(), *module.buffers(), latent, *given]) as memory:
        for _ in work(latent):
            pass
    return memory


@pytest.mark.parametrize("grid", [SHORT, MIDDLE, LARGE, FULL_HD])
def test_the_convolutional_decoders_estimate_is_within_10_percent(tmp_path, grid):
    module = decoder("ltx-2.5-video-vae-conv-bf16", tmp_path)
    shape = VideoLatentShape(128, *grid)
    plan = module._plan(shape, None, 32)
    memory = counted(module, grid, lambda latent: module.stream(latent, plan.chunk))
    assert plan.bytes == pytest.approx(memory.peak, rel=0.1)
    assert 1 <= largest_tensor(module.config, shape, plan.chunk) / (memory.largest // 2) < 1.1


def test_no_convolution_meets_more_elements_than_libraries_index(tmp_path):
    """Nor does a clip get smaller chunks than that asks for."""
    module = decoder("ltx-2.5-video-vae-conv-bf16", tmp_path)
    for grid, chunk in ((FULL_HD, 32), (ULTRA_HD, 16), ((4, 68, 120), 32), ((16, 74, 130), 8), ((16, 135, 240), 1)):
        shape = VideoLatentShape(128, *grid)
        assert module._plan(shape, None, 32).chunk == chunk
        assert chunk == 1 or largest_tensor(module.config, shape, chunk) <= LARGEST_TENSOR
        assert chunk == 32 or largest_tensor(module.config, shape, 2 * chunk) > LARGEST_TENSOR
    memory = counted(module, (4, *ULTRA_HD[1:]), lambda latent: module.stream(latent, 16))
    assert memory.largest // 2 <= LARGEST_TENSOR
    config = read_video_config(read_header(write_published("ltx-2.5-video-vae-bf16", tmp_path))).encoder
    assert [countable_chunk(config, VideoLatentShape(128, *grid), CHUNK) for grid in (FULL_HD, ULTRA_HD, (16, 1000, 1000))] == [CHUNK, CHUNK // 2, 1]


@pytest.mark.parametrize(
    ("grid", "free"),
    [(SHORT, None), (LARGE, None), (LARGE, 11), (FULL_HD, None), (FULL_HD, 23), (FULL_HD, 11), (LONG, None)],
)
def test_the_diffusion_decoders_estimate_is_within_10_percent(tmp_path, grid, free):
    module = decoder("ltx-2.5-video-vae-bf16", tmp_path)
    t, h, w = grid
    plan = module.plan(VideoLatentShape(128, *grid), "auto", free and free * GIB)
    noise = torch.empty(3, 8 * (t - 1) + 1, 32 * h, 32 * w, device="meta", dtype=torch.bfloat16)
    memory = counted(module, grid, lambda latent: module.stream(latent, GivenNoise(noise), plan, lambda: None), noise)
    assert plan.bytes == pytest.approx(memory.peak, rel=0.1)


def test_the_largest_target_fits_into_20_gib_untiled(tmp_path):
    module = decoder("ltx-2.5-video-vae-bf16", tmp_path)
    plan = module.plan(VideoLatentShape(128, *LARGE), "auto", 100 * GIB)
    weights = sum(parameter.nbytes for parameter in module.parameters())
    assert plan.tiles == 1 and plan.bytes + weights < 20 * GIB


@pytest.mark.parametrize("grid", [(1, 22, 40), SHORT, MIDDLE, LARGE, FULL_HD])
def test_the_encoder_holds_no_more_than_its_estimate_and_not_much_less(tmp_path, grid):
    config = read_video_config(read_header(write_published("ltx-2.5-video-vae-bf16", tmp_path))).encoder
    with torch.device("meta"):
        module = Encoder(config).to(torch.bfloat16)
    module._prepare()
    t, h, w = grid
    images = torch.empty(8 * (t - 1) + 1, 32 * h, 32 * w, 3, device="meta")
    held = HeldOnMeta([*module.parameters(), *module.buffers(), images])
    with Watch().phase("encode.video", total=t, unit="chunk") as phase, torch.no_grad(), held as memory:
        module._means(images, CHUNK, phase)
    assert (0.2 if t == 1 else 0.7) < memory.peak / seeing_bytes(config, VideoLatentShape(128, *grid), 2) < 1.05
