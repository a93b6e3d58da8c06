import time

import pytest
import torch
from comfyui_ltx25.ltx25.cli.render import chosen_device
from comfyui_ltx25.ltx25.device import Mark, copied
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.tests.support.engine import engine, job


def test_work_on_the_cpu_is_done_when_it_returns():
    first = Mark(torch.device("cpu"))
    time.sleep(0.01)
    second = Mark(torch.device("cpu"))
    assert first.done() and second.done()
    assert 0.01 <= second.seconds_since(first) < 1


class Far:
    """Stands for a tensor on some device in the one place that copies."""

    def __init__(self, kind):
        self.is_cuda, self.queued = kind == "cuda", None

    def copy_(self, source, non_blocking):
        self.queued = non_blocking
        return self


@pytest.mark.parametrize(("source", "target", "queued"), [("cpu", "mps", False), ("mps", "cpu", False), ("cpu", "cuda", True), ("cuda", "cpu", True)])
def test_a_copy_is_queued_where_cuda_makes_it_and_done_elsewhere(source, target, queued):
    assert copied(Far(source), Far(target)).queued is queued
    here = torch.zeros(2)
    assert copied(torch.ones(2), here) is here and here.tolist() == [1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_work_on_a_gpu_is_done_when_it_is():
    device = torch.device("cuda")
    torch.cuda._sleep(1000)  # loads what the first launch loads
    torch.cuda.synchronize()
    first = Mark(device)
    torch.cuda._sleep(400_000_000)  # cycles: some tenths of a second
    second = Mark(device)
    assert not second.done()
    while not second.done():
        time.sleep(0.001)
    assert first.done() and 0.05 < second.seconds_since(first) < 2


def test_an_engine_is_opened_for_the_current_card_alone(monkeypatch):
    """Events, streams and kernels go to the current one, whatever tensors are on."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device.index))
    with pytest.raises(InputError, match=r"asked for cuda:1 while cuda:0 is current; call torch.cuda.set_device\('cuda:1'\) before"):
        engine(device=torch.device("cuda:1"))
    monkeypatch.setattr(torch, "zeros", lambda *_, device: torch.ones(1))
    assert chosen_device("cuda:1") == torch.device("cuda:1") and current == [1]
    assert chosen_device("cuda") == torch.device("cuda") and current == [1]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("residency", ["resident", "stream"])
def test_every_card_gives_the_same_clip_and_the_others_stay_untouched(residency):
    clips = []
    try:
        for number in (0, 1):
            with torch.cuda.device(0):
                device = chosen_device(f"cuda:{number}")
                before = [torch.cuda.memory_allocated(other) for other in range(2)]
                made = engine(device=device, residency=residency)
                clips.append([made.sample(job(made, frames=12, steps=4), Watch()) for _ in range(3)][-1])
                assert torch.cuda.memory_allocated(1 - number) <= before[1 - number], "what went meanwhile is of the engine before"
    finally:
        torch.cuda.set_device(0)
    assert torch.equal(clips[0].video, clips[1].video) and torch.equal(clips[0].audio, clips[1].audio)
