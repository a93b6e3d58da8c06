"""Sizes come from this pack's own arithmetic: nothing is asked of the host's VAE objects, whose methods come and go."""

import ast
from pathlib import Path

import pytest
from comfyui_ltx25.ltx25.latents import empty_latents
from comfyui_ltx25.ltx25.shapes import PUBLISHED_COMPRESSION, AudioLatentShape, VideoShape, clip_samples

PACK = Path(__file__).resolve().parents[1]
NODES = sorted((PACK / "nodes").glob("*.py"))
# What the host's VAE objects offer for sizes, now or in versions past, and the ways to get such an object.
VAE_METHODS = {
    "num_of_latents_from_frames", "latent_frequency_bins", "latent_channels", "latent_dim", "latents_per_second", "sample_rate", "output_sample_rate",
    "temporal_compression_decode", "spacial_compression_decode", "spacial_compression_encode", "downscale_index_formula", "upscale_index_formula",
    "first_stage_model", "get_sd", "decode_tiled", "encode_tiled", "vae_output_dtype", "process_input", "process_output",
}  # fmt: skip


def host_vae_uses(source):
    """Where a source takes a host VAE in, gets one, or reads something only such an object has."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            through_vae = isinstance(node.value, ast.Name) and node.value.id in ("vae", "audio_vae", "video_vae")
            io_type = isinstance(node.value, ast.Name) and node.value.id == "io" and node.attr == "Vae"
            if node.attr in VAE_METHODS or through_vae or io_type:
                yield f"line {node.lineno}: .{node.attr}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if any(name.startswith(("comfy.sd", "comfy.ldm")) for name in names) or "VAE" in names:
                yield f"line {node.lineno}: {names}"


@pytest.mark.parametrize("path", NODES, ids=lambda path: path.name)
def test_x6_no_node_uses_a_vae_object_of_the_host(path):
    assert not list(host_vae_uses(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "source",
    ["n = audio_vae.num_of_latents_from_frames(121, 24)", "def f(vae):\n    return vae.anything", "io.Vae.Input('vae')", "from comfy.sd import VAE", "import comfy.sd"],
)
def test_x6_the_check_sees_such_a_use(source):
    assert list(host_vae_uses(source))


@pytest.mark.parametrize(("frames", "rate", "latents"), [(1, 24.0, 1), (9, 24.0, 9), (121, 24.0, 126), (121, 25.0, 121), (121, 23.976, 126), (241, 60.0, 100)])
def test_x6_the_length_of_the_sound_needs_no_vae(frames, rate, latents):
    """25 latent frames a second, to the nearest, at least one; 48000 samples a second of what is decoded."""
    video, audio = empty_latents(VideoShape(frames, 512, 768), rate, 2, PUBLISHED_COMPRESSION)
    assert tuple(audio.shape) == (2, 8, latents, 16)
    assert tuple(video.shape) == (2, 128, (frames - 1) // 8 + 1, 16, 24)
    assert AudioLatentShape.of_clip(frames, rate).frames == latents
    assert clip_samples(frames, rate) == round(frames / rate * 48000)


def test_x6_the_empty_latent_node_takes_its_numbers_from_there():
    """It has no engine and no VAE among its inputs, and makes its tensors by nothing but `empty_latents`."""
    tree = ast.parse((PACK / "nodes" / "latent.py").read_text(encoding="utf-8"))
    execute = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "execute")
    assert [argument.arg for argument in execute.args.args] == ["cls", "width", "height", "frames", "frame_rate", "batch_size"]
    called = {ast.unparse(node.func) for node in ast.walk(execute) if isinstance(node, ast.Call)}
    assert "empty_latents" in called
    assert called <= {"empty_latents", "join", "VideoShape", "io.NodeOutput", "float", "samples.to", "mm.intermediate_device"}
