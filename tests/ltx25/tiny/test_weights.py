import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.tiny import weights
from comfyui_ltx25.tests.support.files import GOLDEN
from comfyui_ltx25.tests.support.tiny import tiny_files
from safetensors import safe_open


@pytest.mark.parametrize(
    "name",
    [
        "vocoder.mel_stft.stft_fn.forward_basis",
        "vocoder.vocoder.act_post.upsample.filter",
        "vocoder.bwe_generator.resblocks.0.acts1.0.downsample.lowpass.filter",
    ],
)
def test_filters_and_transforms_are_the_official_ones(name):
    with safe_open(GOLDEN / "audio" / "audio_vae.bf16.safetensors", "pt") as file:
        official = file.get_tensor(name).float()
    ours = weights.make(name, tuple(official.shape), seed=0).float()
    assert (ours - official).abs().max() <= official.abs().max() / 256  # half a bf16 step


def test_mel_filters_are_positive_and_cover_the_band():
    basis = weights.make("vocoder.mel_stft.mel_basis", (64, 65), seed=0).float()
    assert basis.min() >= 0 and (basis.sum(dim=0)[1:-1] > 0).all()


def test_adding_a_tensor_changes_no_other():
    a = weights.make("model.layers.0.mlp.up_proj.weight", (8, 4), seed=0)
    weights.make("model.layers.1.mlp.up_proj.weight", (8, 4), seed=0)
    assert torch.equal(a, weights.make("model.layers.0.mlp.up_proj.weight", (8, 4), seed=0))
    assert not torch.equal(a, weights.make("model.layers.1.mlp.up_proj.weight", (8, 4), seed=0))


def test_a_name_without_a_rule_is_an_error():
    with pytest.raises(ValueError, match="no rule for something.else"):
        weights.make("something.else", (1,), seed=0)


def test_every_filter_of_the_file_sums_to_one():
    header = read_header(tiny_files().audio_vae)
    names = [name for name in header.tensors if name.endswith(".filter")]
    with safe_open(header.path, "pt") as file:
        assert names and all(abs(file.get_tensor(name).float().sum() - 1) < 0.01 for name in names)
