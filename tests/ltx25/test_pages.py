import ctypes
import re
import sys
from pathlib import Path

import pytest
import torch
from comfyui_ltx25.ltx25 import pages
from comfyui_ltx25.ltx25.pages import in_large_pages

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")


@linux
def test_large_pages_are_asked_for_behind_all_of_a_tensor():
    """The kernel marks the mapping `hg`."""
    memory = in_large_pages(torch.empty(64 * MIB, dtype=torch.uint8))
    middle, flags = memory.data_ptr() + 32 * MIB, None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif line.startswith("VmFlags:") and inside:
            flags = line.split()[1:]
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no large pages")
    assert "hg" in flags


def test_values_stay_whatever_is_asked():
    memory = torch.arange(5 * MIB, dtype=torch.int32)
    assert torch.equal(in_large_pages(memory), torch.arange(5 * MIB, dtype=torch.int32))


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_less_than_a_page_is_no_error(size):
    memory = torch.zeros(size, dtype=torch.uint8)
    assert in_large_pages(memory) is memory


@pytest.mark.parametrize("missing", [OSError, AttributeError])
def test_elsewhere_memory_stays_as_it_is(missing, monkeypatch):
    def no_library(name):
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    memory = torch.ones(3 * MIB)
    assert in_large_pages(memory) is memory
    monkeypatch.setattr(pages.sys, "platform", "win32")
    assert in_large_pages(memory) is memory
