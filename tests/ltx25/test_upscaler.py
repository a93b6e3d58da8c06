"""Latent upscalers: official values, diffusers, published layouts, and what is refused."""

from fractions import Fraction

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import fill, read_header
from comfyui_ltx25.ltx25.checkpoint.fill import check
from comfyui_ltx25.ltx25.config.upscaler import UpscalerConfig, read_upscaler_config
from comfyui_ltx25.ltx25.errors import FileError, InputError
from comfyui_ltx25.ltx25.instrument import Sink, Watch
from comfyui_ltx25.ltx25.shapes import PUBLISHED_COMPRESSION
from comfyui_ltx25.ltx25.upscaler import BlurDown, LatentUpscaler, shuffle, upscale
from comfyui_ltx25.ltx25.video.statistics import ChannelStatistics
from comfyui_ltx25.tests.support.files import write_published
from comfyui_ltx25.tests.support.golden import Golden
from torch.nn import functional as F

GOLDEN = Golden("upscale")
KINDS = ("spatial_x2", "temporal_x2", "rational_1.5")
CLIPS = [name for kind in KINDS for name in GOLDEN.names(f"upsample/{kind}/")]
PIECES = ["upsample/initial_m128", "upsample/pixel_shuffle", "upsample/blur_down2"]
PUBLISHED = {"spatial": (2, 1, 1024), "temporal": (1, 2, 512)}


def load(path, dtype=torch.float32):
    header = read_header(path)
    with torch.device("meta"):
        model = LatentUpscaler(read_upscaler_config(header))
    fill(model, header, "", torch.device("cpu"), dtype, lambda n: None)
    return model


def golden_model(kind):
    return load(GOLDEN.folder / f"upsampler_{kind}.bf16.safetensors")


def statistics(mean, std):
    held = ChannelStatistics(len(mean))
    held._buffers["mean-of-means"], held._buffers["std-of-means"] = mean, std
    return held


def test_every_official_case_is_tested():
    assert sorted(CLIPS + PIECES) == sorted(GOLDEN.names("upsample/"))


@pytest.mark.parametrize("case", CLIPS)
def test_official_values(case):
    model, latent = golden_model(case.split("/")[1]), GOLDEN.input(case, "latent")
    before = latent.clone()
    GOLDEN.check(case, "core", model(latent))
    stats = statistics(GOLDEN.input(case, "mean_of_means"), GOLDEN.input(case, "std_of_means"))
    up = upscale(model, stats, latent, PUBLISHED_COMPRESSION, Watch())
    GOLDEN.check(case, "latent_up", up)
    assert torch.equal(latent, before)
    assert tuple(up.shape[2:]) == model.config.size(*latent.shape[2:])


def test_official_first_layer_with_groups_of_four():
    case = "upsample/initial_m128"
    model = LatentUpscaler(UpscalerConfig(4, 128, 0, Fraction(2), 1, False))
    for name in ("initial_conv.weight", "initial_conv.bias", "initial_norm.weight", "initial_norm.bias"):
        model.get_parameter(name).data = GOLDEN.input(case, name)
    GOLDEN.check(case, "y", model.start(GOLDEN.input(case, "latent")))


def test_official_shuffles():
    case = "upsample/pixel_shuffle"
    x = GOLDEN.input(case, "x")
    GOLDEN.check(case, "spatial", F.pixel_shuffle(x[0].movedim(1, 0), 2))
    GOLDEN.check(case, "temporal", shuffle(x, 2, 1))
    GOLDEN.check(case, "both", shuffle(x, 2, 2))


@pytest.mark.parametrize("stride, name", [(2, "y"), (4, "y4")])
def test_official_blur(stride, name):
    row = torch.tensor([1.0, 4, 6, 4, 1])
    blur = BlurDown(stride)
    blur.kernel = torch.outer(row, row)[None, None] / 256
    GOLDEN.check("upsample/blur_down2", name, blur(GOLDEN.input("upsample/blur_down2", "x")))


@pytest.mark.parametrize("spatial, temporal, rational", [(True, False, False), (False, True, False), (True, True, False), (True, False, True)])
def test_agrees_with_diffusers(spatial, temporal, rational):
    pytest.importorskip("diffusers")
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    torch.manual_seed(0)
    theirs = LTX2LatentUpsamplerModel(
        in_channels=16, mid_channels=32, num_blocks_per_stage=2, dims=3, spatial_upsample=spatial, temporal_upsample=temporal,
        rational_spatial_scale=2.0, use_rational_resampler=rational,
    )  # fmt: skip
    ours = LatentUpscaler(UpscalerConfig(16, 32, 2, Fraction(2 if spatial else 1), 2 if temporal else 1, rational))
    ours.load_state_dict(theirs.state_dict())
    latent = torch.randn(2, 16, 3, 4, 5)
    want = theirs(latent)
    assert (ours(latent) - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_file_is_filled_whole(tmp_path, kind):
    header = read_header(write_published(f"ltx-2.5-latent-{kind}-upscaler-x2-bf16-1.0", tmp_path))
    config = read_upscaler_config(header)
    space, time, width = PUBLISHED[kind]
    assert config == UpscalerConfig(128, width, 4, Fraction(space), time, False)
    with torch.device("meta"):
        assert len(check(LatentUpscaler(config), header, "", ())) == 72


@pytest.mark.parametrize("kind", KINDS)
def test_widths_are_read_off_the_tensors_without_metadata(kind):
    header = read_header(GOLDEN.folder / f"upsampler_{kind}.bf16.safetensors")
    with_metadata = read_upscaler_config(header)
    header.metadata.clear()
    assert read_upscaler_config(header) == with_metadata


def test_items_of_a_batch_do_not_see_each_other():
    model, latent = golden_model("spatial_x2"), torch.randn(2, 4, 3, 2, 3)
    stats = statistics(torch.randn(4), torch.rand(4) + 0.5)
    said = {}

    class Size(Sink):
        def opened(self, phase):
            said.update(phase.facts)

    both = upscale(model, stats, latent, PUBLISHED_COMPRESSION, Watch([Size()]))
    assert said == {"width": 192, "height": 128, "frames": 17, "batch": 2}  # px, of what comes out
    assert torch.equal(both[1:], upscale(model, stats, latent[1:], PUBLISHED_COMPRESSION, Watch()))


@pytest.mark.parametrize("latent, words", [(torch.zeros(1, 5, 1, 2, 2), "wanted .batch, 4, t, h, w."), (torch.full((1, 4, 1, 2, 2), torch.nan), "not finite")])
def test_wrong_latents_are_refused(latent, words):
    with pytest.raises(InputError, match=words):
        upscale(golden_model("spatial_x2"), statistics(torch.zeros(4), torch.ones(4)), latent, PUBLISHED_COMPRESSION, Watch())


def test_unknown_settings_are_refused():
    header = read_header(GOLDEN.folder / "upsampler_spatial_x2.bf16.safetensors")
    header.metadata["config"] = header.metadata["config"].replace('"dims": 3', '"dims": 2')
    with pytest.raises(FileError, match="dims is 2, and only 3"):
        read_upscaler_config(header)
