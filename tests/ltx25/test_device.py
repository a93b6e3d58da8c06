import time

import pytest
import torch
from comfyui_ltx25.ltx25.device import Mark


def test_work_on_the_cpu_is_done_when_it_returns():
    first = Mark(torch.device("cpu"))
    time.sleep(0.01)
    second = Mark(torch.device("cpu"))
    assert first.done() and second.done()
    assert 0.01 <= second.seconds_since(first) < 1


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
