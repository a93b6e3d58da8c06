"""Reading the connectors' part of a transformer file."""

import json
import logging

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import check, read_header
from comfyui_ltx25.ltx25.config.connector import AUDIO, VIDEO, ConnectorConfig, ConnectorStream, connector_prefix
from comfyui_ltx25.ltx25.config.keys import Keys
from comfyui_ltx25.ltx25.connector import Connector
from comfyui_ltx25.ltx25.errors import FileError
from comfyui_ltx25.tests.support.files import fixture, write_published, write_sparse
from comfyui_ltx25.tests.support.golden import Golden
from comfyui_ltx25.tests.support.text import connector_config

TINY = Golden("text").folder / "transformer_connectors.bf16.safetensors"
PUBLISHED = ConnectorConfig(
    video=ConnectorStream(layers=8, heads=32, head_dim=128, max_position=4096, ff_bias=True),
    audio=ConnectorStream(layers=8, heads=32, head_dim=64, max_position=4096, ff_bias=True),
)


def keys(**changes):
    values = json.loads(read_header(TINY).metadata["config"])["transformer"] | changes
    return Keys({key: value for key, value in values.items() if value is not ...}, "x: config.transformer")


@pytest.mark.parametrize("name", ["ltx-2.5-22b-dev-transformer-bf16", "ltx-2.5-22b-distilled-transformer-bf16"])
def test_published_connectors_load_on_meta_with_nothing_missing_or_left_over(tmp_path, name):
    header = read_header(write_published(name, tmp_path))
    config, prefix = connector_config(header), connector_prefix(header)
    assert config == PUBLISHED and prefix == "model.diffusion_model."
    used, parameters = {}, []
    for stream, lead in ((config.video, VIDEO), (config.audio, AUDIO)):
        with torch.device("meta"):
            connector = Connector(stream)
        used |= check(connector, header, prefix + lead)
        parameters.append(sum(t.numel() for t in connector.state_dict().values()))
    assert set(used) == {tensor for tensor in header.tensors if "embeddings_connector." in tensor} and len(used) == 258
    assert parameters == [1_612_546_304, 403_620_096]


def test_only_connector_keys_are_taken():
    before = json.loads(read_header(TINY).metadata["config"])["transformer"]
    opened = keys()
    ConnectorConfig.take(opened)
    for name in before:
        mine = name.startswith(("connector_", "audio_connector_"))
        assert opened.has(name) is not mine, name


def test_defaults_of_keys_the_published_files_leave_out():
    assert ConnectorConfig.take(keys(connector_num_layers=5)).audio.layers == 5
    assert ConnectorConfig.take(keys(audio_connector_num_layers=3)).audio.layers == 3
    assert ConnectorConfig.take(keys()).video.ff_bias is True
    assert ConnectorConfig.take(keys(connector_ff_bias=False)).audio.ff_bias is False


def test_what_the_official_code_never_reads_may_have_any_value():
    ignored = {"connector_num_learnable_registers": 8, "connector_norm_output": False, "connector_learnable_registers_std": 0.02}
    assert ConnectorConfig.take(keys(**ignored)) == ConnectorConfig.take(keys())


@pytest.mark.parametrize(
    "changes",
    [
        {"connector_apply_gated_attention": False},
        {"connector_apply_gated_attention": ...},
        {"connector_num_layers": ...},
        {"connector_num_layers": 0},
        {"connector_attention_head_dim": 7},
        {"audio_connector_num_attention_heads": "4"},
        {"connector_positional_embedding_max_pos": ...},  # the official default of 1 is never what a file means
        {"connector_positional_embedding_max_pos": [20, 2048]},
        {"connector_positional_embedding_max_pos": [0]},
    ],
)
def test_connectors_the_engine_does_not_implement_are_refused(changes):
    with pytest.raises(FileError, match="x: config.transformer"):
        ConnectorConfig.take(keys(**changes))


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", ""])
def test_l5_without_metadata_the_same_sizes_come_from_the_tensors_with_one_log_line(tmp_path, caplog, prefix):
    tensors = {
        prefix + name.removeprefix("model.diffusion_model."): value
        for name, value in fixture("ltx-2.5-22b-dev-transformer-bf16")["tensors"].items()
    }
    header = read_header(write_sparse(tmp_path / "bare.safetensors", tensors, None))
    with caplog.at_level(logging.WARNING):
        assert ConnectorConfig.infer(header) == PUBLISHED
    assert connector_prefix(header) == prefix and len(caplog.records) == 1


def test_l5_quantised_transformers_tell_the_same_sizes(tmp_path):
    published = fixture("ltx-2.5-22b-dev-transformer-comfy-int8-convrot")
    assert ConnectorConfig.infer(read_header(write_sparse(tmp_path / "int8.safetensors", published["tensors"], None))) == PUBLISHED


def test_a_file_without_connectors_is_refused(tmp_path):
    header = read_header(write_sparse(tmp_path / "vae.safetensors", {"decoder.x": {"dtype": "BF16", "shape": [2]}}, None))
    with pytest.raises(FileError, match="vae.safetensors has no video_embeddings_connector.learnable_registers"):
        connector_prefix(header)


def test_heads_that_cannot_be_told_without_metadata_are_refused(tmp_path):
    tensors = {"video_embeddings_connector.learnable_registers": {"dtype": "BF16", "shape": [128, 32]}}
    header = read_header(write_sparse(tmp_path / "bare.safetensors", tensors, None))
    with pytest.raises(FileError, match="no usable video_embeddings_connector.transformer_1d_blocks.0.attn1.to_gate_logits.weight"):
        ConnectorConfig.infer(header)
