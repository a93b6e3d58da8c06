"""Audio decoding at the published sizes, random weights: pytest -s tests/bench/audio.py. One JSON line per case.

Latents on the device to samples on the host. Also the signal-to-noise ratio against float64, fused and plain: both are
meant to be float32.
"""

import json
import statistics
import subprocess
import time
from pathlib import Path

import pytest
import torch
from comfyui_ltx25.ltx25.audio.decode import SoundDecoder, decode_audio
from comfyui_ltx25.ltx25.audio.layers import KEPT_GRAPHS
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.config.audio import read_audio_config
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.precision import full_precision
from comfyui_ltx25.ltx25.replay import Replay
from comfyui_ltx25.tests.bench.by_pytest import refuse
from comfyui_ltx25.tests.support.files import write_published
from comfyui_ltx25.tests.support.random_weights import fill_random

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLIPS = {"1s": 26, "5s": 126, "20s": 500}  # latent frames
REPEATS = 15


def silent(n=1):
    pass


def revision():
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def report(**case):
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    print(
        json.dumps({"bench": "audio", **case, "device": name, "torch": torch.__version__, "revision": revision()}),
        flush=True,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = read_audio_config(
        read_header(write_published("ltx-2.5-audio-vae-bf16", tmp_path_factory.mktemp("published")))
    )
    with torch.device("meta"):
        model = SoundDecoder(config)
    model = fill_random(model, DEVICE, torch.bfloat16).float()  # bf16 numbers, as in the file
    kaiser = torch.kaiser_window(12, periodic=False, beta=4.6638) * torch.sinc((torch.arange(-6, 6) + 0.5) / 2)
    for name, tensor in model.named_buffers():
        if name.endswith("filter"):
            tensor.copy_((kaiser / kaiser.sum()).bfloat16())
        elif name.endswith(("mel_basis", "std-of-means")):
            tensor.abs_()
    for generator in (model.vocoder.vocoder, model.vocoder.bwe_generator):
        generator.conv_post.weight.data.mul_(0.1)  # below clipping
    return model.eval()


def forget(model):
    for net in (model, model.audio_vae.decoder, model.vocoder.vocoder, model.vocoder.bwe_generator):
        net._replay = Replay("the net", KEPT_GRAPHS)


def timed(run):
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_decode(model, clip, kernels, monkeypatch):
    if kernels == "reference":
        monkeypatch.setenv("LTX25_KERNELS", kernels)
    forget(model)
    latent = torch.randn(1, 8, CLIPS[clip], 16, device=DEVICE)
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    first, second = (timed(lambda: decode_audio(model, latent, Watch())) for _ in range(2))
    times = [timed(lambda: decode_audio(model, latent, Watch())) for _ in range(REPEATS)]
    peak = torch.cuda.max_memory_allocated() - before if DEVICE.type == "cuda" else None
    report(
        case=f"decode {clip}", kernels=kernels, median_s=round(statistics.median(times), 5), first_s=round(first, 4),
        second_s=round(second, 4), activation_bytes=peak,
    )  # fmt: skip


@pytest.mark.parametrize("part", ["mel", "stage1", "bandwidth"])
def test_parts(model, part):
    frames = {"mel": 126, "stage1": 501, "bandwidth": 1002}[part]
    if part == "mel":
        net, x = model.audio_vae.decoder, torch.randn(1, 8, frames, 16, device=DEVICE)
    else:
        net = model.vocoder.vocoder if part == "stage1" else model.vocoder.bwe_generator
        x = torch.randn(1, 2, 64, frames, device=DEVICE)
    with torch.no_grad(), full_precision():
        for _ in range(3):
            net._replay(net, (x,), silent, 0)
        times = [timed(lambda: net._replay(net, (x,), silent, 0)) for _ in range(REPEATS)]
    report(case=f"part {part}", median_s=round(statistics.median(times), 5))


def test_accuracy(model, monkeypatch):
    latent = torch.randn(1, 8, 26, 16, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))

    def decode():
        forget(model)
        with torch.no_grad(), full_precision():
            mel = model.audio_vae.decoder(latent.to(next(model.parameters()).dtype), silent)
            narrow = model.vocoder.vocoder(mel.transpose(2, 3), silent)
            return narrow.double(), model.vocoder(mel, silent).double()

    fused = decode()
    monkeypatch.setenv("LTX25_KERNELS", "reference")
    plain = decode()
    model.double()
    exact = decode()
    model.float()
    ratios = {}
    for name, got in (("fused", fused), ("plain", plain)):
        for stage, a, b in zip(("stage1", "wave"), got, exact, strict=True):
            ratios[f"{name}_{stage}_db"] = round(
                10 * torch.log10(b.square().mean() / (a - b).square().mean()).item(), 1
            )
    report(case="accuracy against float64", peak=round(exact[1].abs().max().item(), 3), **ratios)
    if DEVICE.type == "cuda":
        assert ratios["fused_wave_db"] >= ratios["plain_wave_db"] - 1


if __name__ == "__main__":
    refuse(__file__)
