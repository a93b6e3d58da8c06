"""Reading the text-encoder file: published header, tiny files, files that lost their metadata, and refusals."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import check, read_header
from comfyui_ltx25.ltx25.config.text import FeatureConfig, TowerConfig
from comfyui_ltx25.ltx25.config.text_layout import PROJECTION, TOKENIZER, TextLayout
from comfyui_ltx25.ltx25.errors import FileError
from comfyui_ltx25.ltx25.text import FeatureProjection, Tower
from comfyui_ltx25.tests.support.files import fixture, write_published, write_sparse
from comfyui_ltx25.tests.support.golden import Golden

PUBLISHED = "gemma4-12b-with-proj-ltx-2.5-bf16"
TINY = Golden("text").folder / "text_encoder.bf16.safetensors"


def tiny():
    """(tensors as {"dtype", "shape"}, metadata) of the tiny file, to be changed and written again."""
    header = read_header(TINY)
    names = {torch.bfloat16: "BF16", torch.uint8: "U8"}
    return {name: {"dtype": names[info.dtype], "shape": list(info.shape)} for name, info in header.tensors.items()}, dict(header.metadata)


def config_of(folder, change=None, outer=None, tensors=None):
    own, metadata = tiny()
    gemma = json.loads(metadata["gemma_config"])
    gemma["text_config"] |= change or {}
    gemma |= outer or {}
    kept = {key: value for key, value in gemma["text_config"].items() if value is not ...}
    metadata["gemma_config"] = json.dumps(gemma | {"text_config": kept})
    return TowerConfig.read(read_header(write_sparse(folder / "changed.safetensors", tensors or own, metadata)))


def test_published_file_loads_on_meta_with_nothing_missing_or_left_over(tmp_path):
    header = read_header(write_published(PUBLISHED, tmp_path))
    layout, config = TextLayout.read(header), TowerConfig.read(header)
    features = FeatureConfig.read(header, config)
    layout.check(header)
    with torch.device("meta"):
        tower, projection = Tower(config), FeatureProjection(features)
    used = check(tower, header, layout.tower, layout.unused) | check(projection, header, PROJECTION)
    assert len(used) == 666 + 4
    unused = sorted(set(header.tensors) - set(used))
    assert unused == [
        "audio_projector.embedding_projection.weight",
        "hf_asset__chat_template.jinja",
        "hf_asset__generation_config.json",
        "hf_asset__processor_config.json",
        "hf_asset__tokenizer_config.json",
        "multi_modal_projector.embedding_projection.weight",
        TOKENIZER,  # not a module's, but the tokenizer's
        "vision_model.patch_dense.bias",
        "vision_model.patch_dense.weight",
        "vision_model.patch_ln1.bias",
        "vision_model.patch_ln1.weight",
        "vision_model.patch_ln2.bias",
        "vision_model.patch_ln2.weight",
        "vision_model.pos_embedding",
        "vision_model.pos_norm.bias",
        "vision_model.pos_norm.weight",
    ]
    assert sum(t.numel() for t in tower.state_dict().values()) == 11_907_350_320
    assert sum(t.numel() for t in projection.state_dict().values()) == 1_156_061_184


def test_published_settings_are_the_documented_ones(tmp_path):
    header = read_header(write_published(PUBLISHED, tmp_path))
    config = TowerConfig.read(header)
    assert config == TowerConfig(
        vocabulary=262144,
        hidden=3840,
        intermediate=15360,
        full=tuple(i % 6 == 5 for i in range(48)),
        heads=16,
        kv_heads=8,
        head_dim=256,
        full_kv_heads=1,
        full_head_dim=512,
        window=1024,
        eps=1e-6,
        theta=1e4,
        full_theta=1e6,
        rotated=0.25,
        bos=2,
        pad=0,
        gemma_version="gemma4-12b-ltx-v1",
    )
    assert FeatureConfig.read(header, config) == FeatureConfig(hidden=3840, states=49, video_width=4096, audio_width=2048)


@pytest.mark.parametrize("path", [None, TINY], ids=["published", "tiny"])
def test_l5_without_metadata_the_same_sizes_come_from_the_tensors_with_one_log_line(tmp_path, caplog, path):
    if path is None:
        tensors, metadata = (fixture(PUBLISHED)[key] for key in ("tensors", "__metadata__"))
    else:
        tensors, metadata = tiny()
    known = TowerConfig.read(read_header(write_sparse(tmp_path / "known.safetensors", tensors, metadata)))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        inferred = TowerConfig.read(read_header(write_sparse(tmp_path / "bare.safetensors", tensors, None)))
    assert inferred == replace(known, gemma_version=None)
    assert len(caplog.records) == 1 and "bare.safetensors has no gemma_config metadata" in caplog.text


def widened(tensors, name, shape):
    return tensors | {name: {"dtype": "BF16", "shape": shape}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: widened(t, "model.layers.2.self_attn.q_norm.weight", [8]), "sliding head widths differ between layers"),
        (lambda t: widened(t, "model.layers.1.mlp.gate_proj.weight", [40, 32]), "MLP widths differ between layers"),
        (lambda t: {n: v for n, v in t.items() if n != "model.layers.3.self_attn.k_proj.weight"}, "no usable model.layers.3.self_attn.k_proj"),
        (lambda t: {n: v for n, v in t.items() if n != "model.embed_tokens.weight"}, "no usable model.embed_tokens.weight"),
        (lambda t: {n: v for n, v in t.items() if ".v_proj." not in n}, "sliding head widths are in no layer"),
        (lambda t: widened(t, "model.layers.5.self_attn.v_proj.weight", [32, 32]), "sliding head widths differ"),
        (lambda t: {n: v for n, v in t.items() if "layers." not in n}, "head widths are in no layer"),
    ],
)
def test_l5_ambiguous_shapes_without_metadata_are_refused(tmp_path, change, message):
    path = write_sparse(tmp_path / "bare.safetensors", change(tiny()[0]), None)
    with pytest.raises(FileError, match=message):
        TowerConfig.read(read_header(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_k_eq_v", False),
        ("attention_k_eq_v", ...),
        ("attention_bias", True),
        ("hidden_activation", "silu"),
        ("hidden_size_per_layer_input", 256),
        ("enable_moe_block", True),
        ("num_experts", 8),
        ("num_kv_shared_layers", 2),
        ("use_bidirectional_attention", "all"),
        ("use_double_wide_mlp", True),
        ("model_type", "gemma4_text"),
        ("hidden_size", ...),
        ("sliding_window", "1024"),
        ("some_new_feature", True),
        ("layer_types", ["sliding_attention"] * 6),
        ("layer_types", ["full_attention"] * 5),
        ("layer_types", ["sliding_attention"] * 4 + ["chunked_attention", "full_attention"]),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("intermediate_size", 0),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}, "sliding_attention": {}}),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 2.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}),
    ],
)
def test_settings_the_engine_does_not_implement_are_refused_by_name(tmp_path, key, value):
    with pytest.raises(FileError) as refused:
        config_of(tmp_path, {key: value})
    named = {"num_key_value_heads": "3 key heads", "head_dim": "heads of 15", "intermediate_size": "intermediate is 0", "rope_parameters": "r"}.get(key, key)
    assert named in str(refused.value)


@pytest.mark.parametrize("key", ["use_cache", "initializer_range", "final_logit_softcapping", "max_position_embeddings", "torch_dtype"])
def test_inert_settings_may_have_any_value(tmp_path, key):
    assert config_of(tmp_path, {key: "whatever"}) == config_of(tmp_path)


def test_another_gemma_is_refused(tmp_path):
    with pytest.raises(FileError, match="family 'gemma3', and LTX-2.5 needs 'gemma4_unified'"):
        config_of(tmp_path, outer={"model_type": "gemma3"})


def test_l4_missing_projections_are_named(tmp_path):
    tensors, metadata = tiny()
    stock = {name: value for name, value in tensors.items() if not name.startswith(PROJECTION)}
    header = read_header(write_sparse(tmp_path / "stock.safetensors", stock, metadata))
    with pytest.raises(FileError) as refused:
        FeatureConfig.read(header, TowerConfig.read(header))
    for name in ("video", "audio"):
        assert f"text_embedding_projection.{name}_aggregate_embed.weight" in str(refused.value)
    assert "stock Gemma" in str(refused.value) and "gemma4-12b-with-proj-ltx-2.5" in str(refused.value)


def test_projections_for_another_number_of_states_are_refused(tmp_path):
    tensors, metadata = tiny()
    tensors = widened(tensors, "text_embedding_projection.video_aggregate_embed.weight", [32, 192])
    header = read_header(write_sparse(tmp_path / "short.safetensors", tensors, metadata))
    with pytest.raises(FileError, match=r"7 hidden states of 32 need 224 columns"):
        FeatureConfig.read(header, TowerConfig.read(header))


def test_hugging_face_names_are_read_as_well(tmp_path):
    tensors, metadata = tiny()
    renames = {"vision_model.": "model.vision_embedder.", "multi_modal_projector.": "model.embed_vision.", "audio_projector.": "model.embed_audio."}
    nested = {}
    for name, value in tensors.items():
        for flat, theirs in ({"model.": "model.language_model."} | renames).items():
            if name.startswith(flat):
                name = theirs + name.removeprefix(flat)
                break
        nested[name] = value
    header = read_header(write_sparse(tmp_path / "nested.safetensors", nested, metadata))
    layout = TextLayout.read(header)
    layout.check(header)
    assert layout == TextLayout("model.language_model.", ())
    with torch.device("meta"):
        assert len(check(Tower(TowerConfig.read(header)), header, layout.tower, layout.unused)) == len([n for n in tensors if n.startswith("model.")])


def test_flat_tower_with_hugging_face_eyes_and_ears_is_read(tmp_path):
    """Some published files flattened the language model only."""
    tensors, metadata = tiny()
    mixed = {name.replace("vision_model.", "model.vision_embedder.").replace("audio_projector.", "model.embed_audio."): value for name, value in tensors.items()}
    header = read_header(write_sparse(tmp_path / "mixed.safetensors", mixed, metadata))
    layout = TextLayout.read(header)
    layout.check(header)
    with torch.device("meta"):
        check(Tower(TowerConfig.read(header)), header, layout.tower, layout.unused)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.v_norm.weight", "text_embedding_projection.aggregate_embed.weight", "something.else"])
def test_n7_a_tensor_nobody_takes_is_refused_by_name(tmp_path, name):
    tensors, metadata = tiny()
    header = read_header(write_sparse(tmp_path / "more.safetensors", widened(tensors, name, [4]), metadata))
    layout, config = TextLayout.read(header), TowerConfig.read(header)
    with pytest.raises(FileError, match=name), torch.device("meta"):
        layout.check(header)
        check(Tower(config), header, layout.tower, layout.unused)
        check(FeatureProjection(FeatureConfig.read(header, config)), header, PROJECTION)


def test_merged_rows_land_in_file_order(tmp_path):
    """q, k and v (or q and k), gate and up are stacked: the golden values would not tell k from v of equal statistics."""
    from comfyui_ltx25.tests.support.text import load_tower
    from safetensors.torch import load_file

    stored, tower = load_file(TINY), load_tower(TINY)
    for index in (0, 5):
        layer, lead = tower.layers[index], f"model.layers.{index}."
        names = ["q_proj", "k_proj", "v_proj"] if index == 0 else ["q_proj", "k_proj"]
        want = torch.cat([stored[f"{lead}self_attn.{name}.weight"] for name in names])
        assert torch.equal(layer.self_attn.qkv_proj.weight, want.float())
        want = torch.cat([stored[f"{lead}mlp.{name}_proj.weight"] for name in ("gate", "up")])
        assert torch.equal(layer.mlp.gate_up_proj.weight, want.float())
