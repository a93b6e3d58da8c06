import os
import sys

import pytest
import torch
from comfyui_ltx25.ltx25.instrument.memory import host_now
from comfyui_ltx25.ltx25.video import pages
from comfyui_ltx25.ltx25.video.pages import in_large_pages, populate

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")


@linux
def test_memory_is_there_before_it_is_written():
    memory = in_large_pages(torch.empty(200 * MIB, dtype=torch.uint8))
    before = host_now()
    done = populate(memory, lambda: False)
    if not done:
        pytest.skip(f"this kernel does not populate: {os.uname().release}")
    assert done == memory.nbytes and host_now() - before > 190 * MIB


def test_values_stay_whatever_is_asked():
    memory = torch.arange(5 * MIB, dtype=torch.int32)
    in_large_pages(memory)
    populate(memory, lambda: False)
    assert torch.equal(memory, torch.arange(5 * MIB, dtype=torch.int32))


def test_it_stops_when_told():
    asked = []
    assert populate(torch.empty(1 << 30, dtype=torch.uint8), lambda: bool(asked.append(0)) or len(asked) > 1) <= pages._AT_ONCE
    assert len(asked) <= 2


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_less_than_a_page_is_no_error(size):
    memory = torch.zeros(size, dtype=torch.uint8)
    assert in_large_pages(memory) is memory and populate(memory, lambda: False) == size or sys.platform != "linux"


def test_elsewhere_memory_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(pages.sys, "platform", "win32")
    memory = torch.ones(3 * MIB)
    assert in_large_pages(memory) is memory and populate(memory, lambda: False) == 0
