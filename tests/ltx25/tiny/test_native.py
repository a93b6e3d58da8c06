"""ComfyUI's own loaders read the tiny files: what other packs' nodes make of them in one graph with ours."""

import os
import subprocess
import sys

import pytest
import torch
from comfyui_ltx25.ltx25.engine import Engine, Files, Options
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.tests.support.tiny import tiny_files
from safetensors.torch import load_file, save_file

HOST = os.environ.get("COMFYUI_DIR")

# Runs in the host's own Python: one load per file, decodes of the latents given, everything the host logs on stderr.
SCRIPT = """
import sys
host, transformer, distilled, conv, diffusion, audio, latents, out = sys.argv[1:]
sys.path.insert(0, host)
sys.argv = ["native", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import logging
logging.basicConfig(level=logging.INFO)
import comfy.sd, comfy.utils, torch
from safetensors.torch import load_file, save_file

for path in (transformer, distilled):
    model = comfy.sd.load_diffusion_model(path).model
    print(type(model).__name__, len(model.diffusion_model.transformer_blocks), model.diffusion_model.keyframes_abs_pos_embedding is not None)
given, made = load_file(latents), {}
for name, path in (("conv", conv), ("diffusion", diffusion), ("audio", audio)):
    weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    vae = comfy.sd.VAE(sd=weights, metadata=metadata)
    vae.throw_exception_if_invalid()
    print(type(vae.first_stage_model).__name__)
    with torch.inference_mode():
        made[name] = vae.first_stage_model.decode(given["audio"]) if name == "audio" else vae.decode(given["video"])
save_file({name: value.float().contiguous() for name, value in made.items()}, out)
"""


@pytest.mark.host
@pytest.mark.skipif(not HOST, reason="needs a ComfyUI checkout (COMFYUI_DIR, COMFYUI_PYTHON)")
def test_the_hosts_own_loaders_read_transformers_and_vaes_and_decode_as_we_do(tmp_path):
    files = tiny_files()
    noise = torch.Generator().manual_seed(0)
    latents = {"video": torch.randn(1, 128, 3, 6, 8, generator=noise), "audio": torch.randn(1, 8, 26, 16, generator=noise)}
    save_file(latents, tmp_path / "latents.safetensors")
    paths = [files.transformer, files.distilled, files.video_vae, files.video_vae_diffusion, files.audio_vae]
    done = subprocess.run(
        [os.environ.get("COMFYUI_PYTHON", sys.executable), "-c", SCRIPT, HOST, *map(str, paths), tmp_path / "latents.safetensors", tmp_path / "out.safetensors"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path / "pycache")},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-5:] == ["LTXAV 4 True", "LTXAV 4 True", "VideoVAE", "CausalDiffusionVAE", "AudioVAE"]
    complaints = [line for line in done.stderr.lower().splitlines() if "missing" in line or "unexpected" in line or "left over" in line]
    assert not [line for line in complaints if "type_emb" not in line], complaints  # the one tensor no version of the decoder reads
    native = load_file(tmp_path / "out.safetensors")
    engine = Engine.open(Files(files.transformer, files.text_encoder, files.video_vae, files.audio_vae), Options("auto", "auto", "auto", "off"), torch.device("cpu"))
    ours = engine.decode_video(latents["video"], 0, "off", Watch())
    assert (native["conv"][0] - ours).abs().max() < 1e-4
    sound = engine.decode_audio(latents["audio"], None, Watch())
    assert (native["audio"] - sound).abs().max() < 1e-4
    assert native["diffusion"].std() > 0.02
