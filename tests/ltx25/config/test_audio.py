"""What an audio VAE file's metadata must say, and what its shapes say when there is none."""

import copy
import json
import logging

import pytest
import torch
from comfyui_ltx25.ltx25.audio.decode import UNUSED as DECODER_UNUSED
from comfyui_ltx25.ltx25.audio.decode import SoundDecoder
from comfyui_ltx25.ltx25.audio.encode import UNUSED as ENCODER_UNUSED
from comfyui_ltx25.ltx25.audio.encode import SoundEncoder
from comfyui_ltx25.ltx25.checkpoint import check, read_header
from comfyui_ltx25.ltx25.config.audio import read_audio_config
from comfyui_ltx25.ltx25.errors import FileError
from comfyui_ltx25.tests.support.audio import GOLDEN_FILE
from comfyui_ltx25.tests.support.files import fixture, write_published, write_sparse

PUBLISHED = "ltx-2.5-audio-vae-bf16"


def changed(tmp_path, change):
    """The published header with its config changed in place by `change`."""
    published = fixture(PUBLISHED)
    config = json.loads(published["__metadata__"]["config"])
    change(config)
    return read_header(
        write_sparse(tmp_path / "changed.safetensors", published["tensors"], {"config": json.dumps(config)})
    )


def test_published_file_loads_with_nothing_missing_and_nothing_left_over(tmp_path):
    header = read_header(write_published(PUBLISHED, tmp_path))
    config = read_audio_config(header)
    with torch.device("meta"):
        decoder, encoder = SoundDecoder(config), SoundEncoder(config)
    used = check(decoder, header, "", DECODER_UNUSED).keys() | check(encoder, header, "", ENCODER_UNUSED).keys()
    assert header.tensors.keys() - used == {"vocoder.mel_stft.stft_fn.inverse_basis"}
    assert sum(p.numel() for p in decoder.audio_vae.decoder.parameters()) == pytest.approx(31.9e6, rel=0.01)
    assert config.vae.latent_bins == 16 and config.vae.latent_channels == 8


def test_l8_published_file_without_metadata_reads_the_same_from_shapes(tmp_path, caplog):
    whole = read_audio_config(read_header(write_published(PUBLISHED, tmp_path)))
    bare = read_header(write_sparse(tmp_path / "bare.safetensors", fixture(PUBLISHED)["tensors"], None))
    with caplog.at_level(logging.WARNING):
        assert read_audio_config(bare) == whole
    assert len(caplog.records) == 1 and "bare.safetensors" in caplog.text


def test_l8_shapes_that_do_not_tell_the_strides_are_refused(tmp_path):
    tensors = {
        name: {"dtype": "BF16", "shape": list(info.shape)} for name, info in read_header(GOLDEN_FILE).tensors.items()
    }
    bare = read_header(write_sparse(tmp_path / "bare.safetensors", tensors, None))
    with pytest.raises(
        FileError, match=r"kernels \[12, 11, 8, 4\] .* do not tell the strides; use the file as published"
    ):
        read_audio_config(bare)


def test_l8_a_file_of_another_kind_without_metadata_is_refused_by_the_tensor_it_lacks(tmp_path):
    bare = read_header(write_sparse(tmp_path / "bare.safetensors", {"x": {"dtype": "F32", "shape": [1]}}, None))
    with pytest.raises(FileError, match="neither metadata nor the tensor audio_vae"):
        read_audio_config(bare)


def net(config):
    return config["audio_vae"]["model"]["params"]["ddconfig"]


@pytest.mark.parametrize(
    "message, change",
    [
        ("norm_type is 'group', and only 'pixel'", lambda c: net(c).update(norm_type="group")),
        ("attn_resolutions is missing, and only", lambda c: net(c).pop("attn_resolutions")),
        ("mid_block_add_attention is True", lambda c: net(c).update(mid_block_add_attention=True)),
        ("in_channels is 1, and only 2", lambda c: net(c).update(in_channels=1)),
        ("ch_mult is 4, wanted list", lambda c: net(c).update(ch_mult=4)),
        ("ch_mult is \\[1, 2, 0\\], wanted whole numbers above 0", lambda c: net(c).update(ch_mult=[1, 2, 0])),
        ("keys this version does not know: extra", lambda c: net(c).update(extra=1)),
        ("keys this version does not know: more", lambda c: c.update(more={})),
        ("has no key 'vocoder'", lambda c: c.pop("vocoder")),
        ("activation is 'snake'", lambda c: c["vocoder"]["bwe"].update(activation="snake")),
        ("apply_final_activation is True", lambda c: c["vocoder"]["bwe"].update(apply_final_activation=True)),
        ("use_bias_at_final is True", lambda c: c["vocoder"]["vocoder"].update(use_bias_at_final=True)),
        ("4 levels for 64 mel bins", lambda c: net(c).update(ch_mult=[1, 2, 4, 4])),
        ("hop 128 at 16000 Hz", lambda c: c["audio_vae"]["preprocessing"]["stft"].update(hop_length=128)),
        (
            "vocoder strides \\(4, 2, 2, 2, 2, 2\\) for hop 160",
            lambda c: c["vocoder"]["vocoder"].update(upsample_rates=[4, 2, 2, 2, 2, 2]),
        ),
        ("from 16000 to 44100 Hz", lambda c: c["vocoder"]["bwe"].update(output_sampling_rate=44100)),
        ("upsampling kernels", lambda c: c["vocoder"]["vocoder"].update(upsample_kernel_sizes=[11, 4, 4, 4, 4, 5])),
        ("block kernels \\(3, 7\\)", lambda c: c["vocoder"]["bwe"].update(resblock_kernel_sizes=[3, 7])),
        (
            "resblock_dilation_sizes is \\[1, 3, 5\\]",
            lambda c: c["vocoder"]["bwe"].update(resblock_dilation_sizes=[1, 3, 5]),
        ),
    ],
)
def test_what_is_not_implemented_is_refused_in_one_sentence(tmp_path, message, change):
    with pytest.raises(FileError, match=message) as error:
        read_audio_config(changed(tmp_path, change))
    assert "changed.safetensors" in str(error.value) and str(error.value).count(".\n") == 0


def test_keys_that_change_nothing_may_hold_anything(tmp_path):
    plain = read_audio_config(changed(tmp_path, lambda c: None))

    def inert(config):
        net(config).update(resolution=1, dropout=0.5, downsample_time=True)
        config["audio_vae"]["preprocessing"]["audio"] = {"stereo": False}
        config["audio_vae"]["preprocessing"]["mel"].update(mel_fmax=1)
        config["vocoder"]["bwe"].update(win_size=1, use_tanh_at_final=True)

    assert read_audio_config(changed(tmp_path, inert)) == plain


def test_keys_left_out_by_other_writers_have_the_official_defaults(tmp_path):
    plain = read_audio_config(changed(tmp_path, lambda c: None))

    def less(config):
        del config["audio_vae"]["model"]["params"]["sampling_rate"]
        del config["audio_vae"]["preprocessing"]["stft"]["causal"]
        del config["vocoder"]["bwe"]["apply_final_activation"]

    assert read_audio_config(changed(tmp_path, less)) == plain
    tanh = read_audio_config(changed(tmp_path, lambda c: c["vocoder"]["vocoder"].pop("use_tanh_at_final")))
    assert (plain.vocoder.final, tanh.vocoder.final) == ("clamp", "tanh")


def test_the_config_object_is_immutable():
    config = read_audio_config(read_header(GOLDEN_FILE))
    with pytest.raises(AttributeError):
        config.vae.width = 1
    assert copy.deepcopy(config) == config
