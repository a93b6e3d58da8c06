"""Video decoding at the published sizes, random weights, bf16: pytest -s tests/bench/decode.py. One JSON line per case.

Latents on the device to frames on the host, through `decode_video`, untiled. Peak device memory is that of the decode
alone; `estimate_gib` is what the plan expected. Peers in the same process, where they are installed: diffusers' conv decoder
with the same weights, comfy-kitchen's windowed attention on the same tensors. `comfyui_s` is what ComfyUI 0.33 took untiled
on another H200: compare it only there.
"""

import json
import statistics
import subprocess
import time
from pathlib import Path

import pytest
import torch
from comfyui_ltx25.kernels.neighborhood_attention import Place, na3d
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.config.video import read_video_config
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.shapes import VideoLatentShape
from comfyui_ltx25.ltx25.video import build_decoder, decode_video
from comfyui_ltx25.tests.bench.by_pytest import refuse
from comfyui_ltx25.tests.bench.sizes import Geometry
from comfyui_ltx25.tests.support.files import write_published
from comfyui_ltx25.tests.support.random_weights import fill_random
from comfyui_ltx25.tests.support.video_oracle import published_conv_vae, share_conv_decoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CASES = [
    # file, geometry, bytes the decoder may use (None: all), ComfyUI in s
    ("ltx-2.5-video-vae-conv-bf16", Geometry(768, 448, 25), None, 0.110),
    ("ltx-2.5-video-vae-conv-bf16", Geometry(1024, 576, 121), None, 0.689),
    ("ltx-2.5-video-vae-conv-bf16", Geometry(1280, 704, 121), None, 1.308),
    ("ltx-2.5-video-vae-bf16", Geometry(768, 448, 25), None, 0.536),
    ("ltx-2.5-video-vae-bf16", Geometry(1024, 576, 121), None, 4.135),
    ("ltx-2.5-video-vae-bf16", Geometry(1280, 704, 121), None, 6.288),
    ("ltx-2.5-video-vae-bf16", Geometry(1920, 1088, 121), 23 << 30, None),
    ("ltx-2.5-video-vae-bf16", Geometry(1920, 1088, 121), 11 << 30, None),
]
REPEATS = 3


def report(**case):
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "revision": revision or None}
    print(json.dumps({"bench": "decode", **case, **versions}), flush=True)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    made = {}

    def decoder(name):
        if name not in made:
            config = read_video_config(read_header(write_published(name, tmp_path_factory.mktemp("published"))))
            with torch.device("meta"):
                module = build_decoder(config.decoder)
            made[name] = fill_random(module, "cuda", torch.bfloat16)
        return made[name]

    return decoder


@pytest.mark.parametrize(("name", "geometry", "free", "comfyui"), CASES)
def test_decode(decoders, name, geometry, free, comfyui):
    decoder = decoders(name)
    latent = torch.randn(1, 128, *geometry.grid, device="cuda")
    plan = decoder.plan(VideoLatentShape(128, *geometry.grid), "auto", free)
    seconds = []
    for repeat in range(REPEATS + 1):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, begin = torch.cuda.memory_allocated(), time.perf_counter()
        images = decode_video(decoder, latent, tiling="auto", seed=0, watch=Watch(), free=free)
        if repeat:
            seconds.append(time.perf_counter() - begin)
        else:
            first = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() - before
    assert images.shape == (geometry.frames, geometry.height, geometry.width, 3)
    report(
        file=name,
        geometry=geometry.name,
        plan=plan.text,
        seconds=round(statistics.median(seconds), 4),
        first_seconds=round(first, 2),
        comfyui_s=comfyui,
        peak_gib=round(peak / 2**30, 2),
        estimate_gib=round(plan.bytes / 2**30, 2),
    )


@pytest.mark.parametrize("geometry", [Geometry(768, 448, 25), Geometry(1280, 704, 121)], ids=lambda g: g.name)
@torch.inference_mode()
def test_conv_decode_of_diffusers(decoders, geometry):
    """The peer as it is, untiled, to float32 frames on the host."""
    pytest.importorskip("diffusers")
    with torch.device("meta"):
        peer = published_conv_vae()
    share_conv_decoder(peer, decoders("ltx-2.5-video-vae-conv-bf16"))
    latent = torch.randn(1, 128, *geometry.grid, device="cuda", dtype=torch.bfloat16)
    seconds = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, begin = torch.cuda.memory_allocated(), time.perf_counter()
        peer.decoder(latent)[0].float().cpu()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() - before
    report(peer="diffusers conv decoder", geometry=geometry.name, seconds=round(statistics.median(seconds[1:]), 4), peak_gib=round(peak / 2**30, 2))


@pytest.mark.parametrize(
    ("grid", "heads", "window"),
    [((16, 176, 320), 4, (11, 11, 11)), ((21, 56, 96), 8, (3, 5, 5)), ((6, 28, 48), 16, (3, 7, 7))],
)
def test_windowed_attention(grid, heads, window):
    """A short clip in the last stage, and the other stages' shapes; TFLOP/s count what the windows ask for."""
    q, k, v = (torch.randn(1, *grid, heads, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    flop = 4 * q.numel() * window[0] * window[1] * window[2]
    ways = {"ours": lambda: na3d(q, k, v, window, 0.125, Place(0, 0, grid[0]), 30.0)}
    try:
        import comfy_kitchen
    except ImportError:
        pass
    else:
        ways["comfy-kitchen"] = lambda: comfy_kitchen.na3d(q, k, v, list(window), None, 0.125)
    for way, run in ways.items():
        run()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
        for event in events:
            run()
            event.record()
        torch.cuda.synchronize()
        ms = statistics.median(a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True))
        report(op="na3d", way=way, grid=grid, heads=heads, window=window, ms=round(ms, 3), tflops=round(flop / ms / 1e9, 1))
    if len(ways) > 1:
        ours, theirs = (run().float() for run in ways.values())
        assert (ours - theirs).norm() / theirs.norm() < 1e-2


if __name__ == "__main__":
    refuse(__file__)
