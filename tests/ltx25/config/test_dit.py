import json
import logging

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import check, read_header
from comfyui_ltx25.ltx25.config.dit import DiTConfig
from comfyui_ltx25.ltx25.config.transformer import CONNECTOR_TENSORS, read_transformer, transformer_prefix
from comfyui_ltx25.ltx25.dit import DiT
from comfyui_ltx25.ltx25.errors import FileError
from comfyui_ltx25.tests.support.files import fixture, write_sparse

DEV = "ltx-2.5-22b-dev-transformer-bf16"
PUBLISHED = DiTConfig(
    layers=48,
    heads=32,
    head_dim=128,
    audio_head_dim=64,
    in_channels=128,
    out_channels=128,
    audio_in_channels=128,
    audio_out_channels=128,
    norm_eps=1e-6,
    rope_theta=10000.0,
    max_position=(20, 2048, 2048),
    audio_max_position=20,
    timestep_scale=1000.0,
    cross_timestep_scale=1000.0,
    ff_bias=False,
    audio_ff_bias=True,
    prompt_adaln=True,
    keyframe_embedding=True,
)


def write(folder, published, metadata="keep"):
    return read_header(write_sparse(folder / "t.safetensors", published["tensors"], published["__metadata__"] if metadata == "keep" else metadata))


def with_config(folder, change):
    """The published file with its transformer block changed by `change`."""
    published = fixture(DEV)
    config = json.loads(published["__metadata__"]["config"])
    change(config)
    published["__metadata__"]["config"] = json.dumps(config)
    return write(folder, published)


@pytest.mark.parametrize(
    "name",
    [
        DEV,
        "ltx-2.5-22b-distilled-transformer-bf16",
        "ltx-2.5-22b-dev-transformer-comfy-int8-convrot",
        "ltx-2.5-22b-distilled-transformer-comfy-int8-convrot",
        "ltx-2.5-22b-distilled-transformer-nvfp4.rev-b",
    ],
)
def test_published_config(name, tmp_path):
    config, connector = read_transformer(write(tmp_path, fixture(name)))
    assert config == PUBLISHED
    assert (config.width, config.audio_width) == (connector.video.width, connector.audio.width) == (4096, 2048)


def test_the_launch_revision_of_nvfp4_declares_an_embedding_it_does_not_hold(tmp_path):
    config, _ = read_transformer(write(tmp_path, fixture("ltx-2.5-22b-distilled-transformer-nvfp4")))
    assert not config.keyframe_embedding and config.prompt_adaln


def test_without_metadata_the_shapes_tell(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        header = write(tmp_path, fixture(DEV), None)
        config, _ = read_transformer(header)
    assert config == PUBLISHED
    assert len([record for record in caplog.records if "shapes" in record.getMessage()]) == 1
    with torch.device("meta"):
        check(DiT(config), header, transformer_prefix(header), CONNECTOR_TENSORS)


@pytest.mark.parametrize(
    "break_it, said",
    [
        (lambda t: t.pop("model.diffusion_model.proj_out.weight"), "proj_out.weight"),
        (lambda t: [t.pop(name) for name in list(t) if ".transformer_blocks.5." in name], "without a gap"),
        (lambda t: t["model.diffusion_model.transformer_blocks.0.attn1.to_gate_logits.weight"].update(shape=[33, 4096]), "33 heads"),
    ],
)
def test_ambiguous_shapes_without_metadata_are_an_error(break_it, said, tmp_path):
    published = fixture(DEV)
    break_it(published["tensors"])
    with pytest.raises(FileError, match=said):
        read_transformer(write(tmp_path, published, None))


def test_half_of_the_prompt_producers_is_an_error(tmp_path):
    published = fixture(DEV)
    del published["tensors"]["model.diffusion_model.audio_prompt_adaln_single.linear.weight"]
    with pytest.raises(FileError, match="prompt_adaln_single"):
        read_transformer(write(tmp_path, published))


@pytest.mark.parametrize("key", ["num_layers", "cross_attention_dim", "positional_embedding_theta", "rope_type", "audio_out_channels"])
def test_a_missing_key_is_named(key, tmp_path):
    with pytest.raises(FileError, match=key):
        read_transformer(with_config(tmp_path, lambda config: config["transformer"].pop(key)))


@pytest.mark.parametrize(
    "key, value",
    [
        ("rope_type", "interleaved"),
        ("frequencies_precision", "float32"),
        ("apply_gated_attention", False),
        ("cross_attention_adaln", False),
        ("caption_proj_before_connector", False),
        ("caption_projection_first_linear", True),
        ("audio_num_attention_heads", 16),
        ("cross_attention_dim", 2048),
        ("audio_cross_attention_dim", 4096),
        ("activation_fn", "gelu"),
        ("qk_norm", "layer_norm"),
        ("dropout", 0.1),
        ("share_ff", True),
        ("text_encoder_norm_type", "PER_LAYER"),
        ("num_layers", 0),
        ("num_layers", 48.5),
        ("num_layers", True),
        ("positional_embedding_max_pos", [20, 2048]),
        ("positional_embedding_max_pos", [20, 2048, 0]),
        ("audio_positional_embedding_max_pos", [20, 20]),
        ("norm_eps", "1e-6"),
        ("temporal_magic", 1),
    ],
)
def test_what_is_not_built_is_refused_by_name(key, value, tmp_path):
    with pytest.raises(FileError, match=key.replace("num_layers", "layers")):
        read_transformer(with_config(tmp_path, lambda config: config["transformer"].update({key: value})))


def test_heads_that_do_not_halve_are_refused(tmp_path):
    odd = {"attention_head_dim": 127, "cross_attention_dim": 32 * 127}
    with pytest.raises(FileError, match="head width 127"):
        read_transformer(with_config(tmp_path, lambda config: config["transformer"].update(odd)))


def test_an_unknown_block_beside_the_transformer_is_refused(tmp_path):
    with pytest.raises(FileError, match="mystery"):
        read_transformer(with_config(tmp_path, lambda config: config.update(mystery={})))


@pytest.mark.parametrize("key", ["audio_in_channels", "audio_ff_bias", "use_prompt_adaln_single"])
def test_keys_the_published_files_leave_out(key, tmp_path):
    published = json.loads(fixture(DEV)["__metadata__"]["config"])["transformer"]
    assert key not in published
    said = {"audio_in_channels": 128, "audio_ff_bias": True, "use_prompt_adaln_single": True}[key]
    config, _ = read_transformer(with_config(tmp_path, lambda config: config["transformer"].update({key: said})))
    assert config == PUBLISHED


def test_the_gate_scale_is_not_the_timestep_scale_by_default(tmp_path):
    """Absent, the official code takes 1: a gate driven by a thousandth of sigma."""
    config, _ = read_transformer(with_config(tmp_path, lambda config: config["transformer"].pop("av_ca_timestep_scale_multiplier")))
    assert (config.cross_timestep_scale, config.timestep_scale) == (1.0, 1000.0)


def test_a_file_without_a_transformer_says_so(tmp_path):
    header = read_header(write_sparse(tmp_path / "x.safetensors", {"a": {"dtype": "F32", "shape": [1]}}, None))
    with pytest.raises(FileError, match="x.safetensors holds no LTX transformer"):
        read_transformer(header)
