import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import Kind, identify, read_header
from comfyui_ltx25.ltx25.config.pairing import check_pairing
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.tiny import TinyFiles, ready, write, write_tiny
from comfyui_ltx25.ltx25.tiny.metadata import LORA_RANK
from comfyui_ltx25.tests.support.files import fixture
from comfyui_ltx25.tests.support.tiny import tiny_files
from safetensors.torch import load_file

# Which published file each tiny one is the small copy of.
PUBLISHED = {
    "transformer": ("ltx-2.5-22b-dev-transformer-bf16", Kind.TRANSFORMER),
    "distilled": ("ltx-2.5-22b-distilled-transformer-bf16", Kind.TRANSFORMER),
    "text_encoder": ("gemma4-12b-with-proj-ltx-2.5-bf16", Kind.TEXT_ENCODER),
    "video_vae": ("ltx-2.5-video-vae-conv-bf16", Kind.VIDEO_VAE_CONV),
    "video_vae_diffusion": ("ltx-2.5-video-vae-bf16", Kind.VIDEO_VAE_DIFFUSION),
    "audio_vae": ("ltx-2.5-audio-vae-bf16", Kind.AUDIO_VAE),
    "spatial_upscaler": ("ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0", Kind.UPSCALER),
    "temporal_upscaler": ("ltx-2.5-latent-temporal-upscaler-x2-bf16-1.0", Kind.UPSCALER),
    "duration_head": ("ltx-2.5-duration-head-bf16", Kind.DURATION_HEAD),
    "distilled_lora": ("ltx-2.5-22b-distilled-lora-450-bf16", Kind.LORA),
}
FOLDERS = {
    "transformer": "diffusion_models",
    "distilled": "diffusion_models",
    "text_encoder": "text_encoders",
    "spatial_upscaler": "latent_upscale_models",
    "temporal_upscaler": "latent_upscale_models",
    "duration_head": "model_patches",
    "distilled_lora": "loras",
}
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}


def header(part):
    return read_header(getattr(tiny_files(), part))


def test_the_set_is_the_published_one():
    assert set(PUBLISHED) == set(vars(tiny_files()))
    for part, (name, _) in PUBLISHED.items():
        folder = FOLDERS.get(part, "vae")
        path = getattr(tiny_files(), part)
        assert path.parent.name == folder
        assert path.stem == re.sub("22b|12b", "tiny", name).replace("-450-", f"-{LORA_RANK}-") or path.stem == name.replace("ltx-2.5-", "ltx-2.5-tiny-")


@pytest.mark.parametrize("part", PUBLISHED)
def test_tensor_names_dtypes_and_ranks_are_the_published_ones(part):
    """Every name is a published one; every published kind of name, whatever its block number, is there."""
    published = fixture(PUBLISHED[part][0])["tensors"]
    ours = header(part).tensors
    assert set(ours) <= set(published)

    def kinds(tensors):
        return {(re.sub(r"\.\d+(?=\.|$)", ".#", name), dtype, rank) for name, dtype, rank in tensors}

    assert kinds((n, DTYPES[t.dtype], len(t.shape)) for n, t in ours.items()) == kinds((n, t["dtype"], len(t["shape"])) for n, t in published.items())


@pytest.mark.parametrize("part", PUBLISHED)
def test_files_are_told_apart_like_published_ones(part):
    assert identify(header(part)) is PUBLISHED[part][1]


@pytest.mark.parametrize("part", PUBLISHED)
def test_metadata_has_the_published_keys(part):
    published = fixture(PUBLISHED[part][0])["__metadata__"]
    metadata = header(part).metadata
    assert set(metadata) == set(published)
    if "model_version" in published:
        assert metadata["model_version"] == published["model_version"]
    if "license" in published:
        assert "nothing of a published weight" in metadata["license"]
    if "config" in published:
        assert keys_of(json.loads(metadata["config"])) == keys_of(json.loads(published["config"]))


def keys_of(config, where=""):
    """Every path of object keys inside a config; lists count as values."""
    found = set()
    for key, value in config.items():
        found.add(f"{where}.{key}")
        if isinstance(value, dict):
            found |= keys_of(value, f"{where}.{key}")
    return found


def test_text_metadata_has_the_published_text_keys():
    ours, published = (
        json.loads(m["gemma_config"])["text_config"] for m in (header("text_encoder").metadata, fixture(PUBLISHED["text_encoder"][0])["__metadata__"])
    )
    assert keys_of(ours) == keys_of(published)
    same = set(published) - {
        "global_head_dim", "head_dim", "hidden_size", "intermediate_size", "layer_types", "num_attention_heads",
        "num_hidden_layers", "num_key_value_heads", "vocab_size", "vocab_size_per_layer_input",
    }  # fmt: skip
    assert {key: ours[key] for key in same} == {key: published[key] for key in same}
    assert ours["layer_types"] == published["layer_types"][:6]


def test_nothing_but_sizes_differs_from_the_published_transformer_config():
    ours, published = (
        json.loads(m["config"])["transformer"] for m in (header("transformer").metadata, fixture(PUBLISHED["transformer"][0])["__metadata__"])
    )
    sizes = {key for key in published if key.endswith(("head_dim", "heads", "num_layers", "attention_dim", "caption_channels"))}
    assert {k: v for k, v in ours.items() if k not in sizes} == {k: v for k, v in published.items() if k not in sizes}


def test_latents_have_the_published_channels():
    assert header("transformer").tensors["model.diffusion_model.patchify_proj.weight"].shape[1] == 128
    assert header("transformer").tensors["model.diffusion_model.audio_patchify_proj.weight"].shape[1] == 8 * 16
    for part in ("video_vae", "video_vae_diffusion"):
        assert header(part).tensors["per_channel_statistics.mean-of-means"].shape == (128,)
    assert header("audio_vae").tensors["audio_vae.per_channel_statistics.std-of-means"].shape == (128,)


def test_streams_are_of_unequal_width():
    tensors = header("transformer").tensors
    assert tensors["model.diffusion_model.patchify_proj.weight"].shape[0] != tensors["model.diffusion_model.audio_patchify_proj.weight"].shape[0]


def test_text_encoder_and_transformers_belong_together():
    for part in ("transformer", "distilled"):
        check_pairing(header(part), header("text_encoder"))


def test_distilled_differs_from_dev_in_its_weights_alone():
    dev, distilled = header("transformer"), header("distilled")
    assert dev.digest == distilled.digest
    a, b = load_file(dev.path), load_file(distilled.path)
    assert all(not torch.equal(a[name], b[name]) for name in a)


def test_both_video_vaes_share_encoder_and_statistics():
    a, b = load_file(tiny_files().video_vae), load_file(tiny_files().video_vae_diffusion)
    shared = [name for name in a if name.startswith(("encoder.", "per_channel_statistics."))]
    assert shared and all(torch.equal(a[name], b[name]) for name in shared)


@pytest.mark.parametrize("part", PUBLISHED)
def test_weights_are_finite_and_none_is_constant(part):
    for name, tensor in load_file(getattr(tiny_files(), part)).items():
        if tensor.dtype != torch.uint8:
            assert tensor.isfinite().all(), name
            assert tensor.numel() == 1 or tensor.float().std() > 0, name


def test_equal_seeds_give_equal_bytes_in_any_process(tmp_path):
    script = (
        "import importlib.util, sys; pack = sys.argv[1]; "
        "spec = importlib.util.spec_from_file_location('comfyui_ltx25', pack + '/__init__.py'); "
        "module = importlib.util.module_from_spec(spec); sys.modules['comfyui_ltx25'] = module; spec.loader.exec_module(module); "
        "from comfyui_ltx25.ltx25.tiny import write_tiny; write_tiny(sys.argv[2])"
    )
    pack = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", script, pack, str(tmp_path)], check=True, cwd=tmp_path, env=environment)
    for part, path in vars(TinyFiles.below(tmp_path)).items():
        assert path.read_bytes() == getattr(tiny_files(), part).read_bytes(), part


def test_another_seed_gives_other_weights(tmp_path):
    other = write_tiny(tmp_path, seed=5)
    assert not torch.equal(
        load_file(other.audio_vae)["audio_vae.decoder.conv_in.conv.weight"], load_file(tiny_files().audio_vae)["audio_vae.decoder.conv_in.conv.weight"]
    )


def test_a_few_megabytes():
    assert sum(path.stat().st_size for path in vars(tiny_files()).values()) < 16e6


def test_ready_writes_once_and_again_after_damage_or_another_seed(tmp_path):
    files = ready(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in vars(files).values()}
    assert ready(tmp_path) == files and all(path.stat().st_mtime_ns == time for path, time in times.items())
    os.truncate(files.audio_vae, 1000)
    assert read_header(ready(tmp_path).audio_vae).tensors
    assert "seed 3" in read_header(ready(tmp_path, seed=3).transformer).metadata["license"]
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".part"]


def test_of_several_that_find_no_set_one_writes_it_and_the_others_wait(tmp_path, monkeypatch):
    """Renders started together on a fresh machine: a set written twice is 'changed on disk' for whoever has opened it."""
    written = []
    monkeypatch.setattr(write, "write_tiny", lambda folder, *rest: (written.append(folder), time.sleep(0.3), write_tiny(folder, *rest)))
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: ready(tmp_path / "tiny"), range(3)))
    assert len(written) == 1 and made[0] == made[1] == made[2] and read_header(made[0].transformer).tensors
    monkeypatch.setattr(write, "lock", lambda fd: False)
    monkeypatch.setattr(write, "LONGEST_WAIT", 0.1)
    assert ready(tmp_path / "tiny", seed=3) and len(written) == 2, "a file system without locks is no reason to wait for ever"


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written.*choose another folder"):
        write_tiny(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written.*set LTX25_CACHE"):  # nobody who renders has named that folder
        ready(tmp_path / "file" / "tiny")
