"""Free host memory as each platform tells it. Their structures are written here byte by byte, as their headers lay them out."""

import ctypes
import mmap
import struct
from types import SimpleNamespace

import pytest
from comfyui_ltx25.ltx25.instrument import memory

GIB = 1 << 30


def windows(monkeypatch, available, commit, answers=1):
    def status(pointer):
        told = pointer._obj
        assert struct.unpack_from("=I", bytes(told)) == (64,), "the structure says its size first"
        data = struct.pack("=IIQQQQQQQ", 64, 50, 32 * GIB, available, 40 * GIB, commit, 1 << 47, 1 << 46, 0)
        ctypes.memmove(ctypes.addressof(told), data, len(data))
        return answers

    monkeypatch.setattr(memory.sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "WinDLL", lambda name, use_last_error: SimpleNamespace(GlobalMemoryStatusEx=status), raising=False)


def macos(monkeypatch, free, inactive, code=0):
    def statistics(host, flavor, pointer, count):
        assert (host.value, flavor, count._obj.value) == (9, 4, 38)
        data = struct.pack("=IIII9QII4QIIIIQ", free, 11, inactive, 13, *[0] * 9, 7, 7, *[0] * 4, *[5] * 4, 0)
        assert ctypes.sizeof(pointer._obj) == len(data)
        ctypes.memmove(ctypes.addressof(pointer._obj), data, len(data))
        return code

    monkeypatch.setattr(memory.sys, "platform", "darwin")
    monkeypatch.setattr(memory, "_macos_host", lambda: 9)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(host_statistics64=statistics))


@pytest.mark.parametrize(("available", "commit", "free"), [(5 * GIB, 9 * GIB, 5 * GIB), (5 * GIB, 2 * GIB, 2 * GIB)])
def test_windows_has_what_nobody_needs_and_no_more_than_may_be_committed(monkeypatch, available, commit, free):
    windows(monkeypatch, available, commit)
    assert memory.host_free() == free


def test_macos_has_its_free_and_its_idle_pages_and_not_all_of_its_memory(monkeypatch):
    macos(monkeypatch, 1000, 300)
    assert memory.host_free() == 1300 * mmap.PAGESIZE


def test_what_a_platform_does_not_say_is_not_known(monkeypatch):
    windows(monkeypatch, GIB, GIB, answers=0)
    monkeypatch.setattr(ctypes, "get_last_error", lambda: 5, raising=False)
    monkeypatch.setattr(ctypes, "WinError", lambda code: OSError(code), raising=False)
    assert memory.host_free() is None
    macos(monkeypatch, 1000, 300, code=1)
    assert memory.host_free() is None
    monkeypatch.setattr(memory.sys, "platform", "sunos5")
    assert memory.host_free() is None
