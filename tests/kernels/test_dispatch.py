import contextlib
import logging
import re

import pytest
import torch
from comfyui_ltx25.kernels import dispatch
from comfyui_ltx25.kernels.dispatch import Op

ONE = torch.ones(3)


class OnCard:
    """Stands for a tensor on a card in the one place that looks at its device and dtype."""

    device = torch.device("cuda", 7)
    dtype = torch.float32


@pytest.fixture(autouse=True)
def triton_is_there(monkeypatch):
    monkeypatch.setattr(dispatch, "triton", object())
    monkeypatch.delenv("LTX25_KERNELS", raising=False)


def test_w4_a_kernel_that_fails_its_first_use_is_off_by_name_with_one_line(caplog):
    calls = []

    def check(device, dtype):
        calls.append(device)
        return [(ONE + 1e-3, ONE, ONE.double())]

    op = Op("wobbly", check)
    with caplog.at_level(logging.WARNING):
        assert not op.runs(OnCard())
        assert not op.runs(OnCard())
    assert len(calls) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "kernel wobbly is off for torch.float32 on cuda:7, its plain version runs: its error is 0.001, allowed 0"
    ]


@pytest.mark.parametrize("result", [float("nan"), float("inf")])
def test_a_kernel_whose_result_is_not_finite_is_off(result):
    assert not Op("broken", lambda device, dtype: [(torch.full((3,), result), ONE, ONE.double())]).runs(OnCard())


def test_w2_a_kernel_that_does_not_compile_is_off(caplog):
    def check(device, dtype):
        raise RuntimeError("PTX assembly aborted")

    assert not Op("uncompiled", check).runs(OnCard())
    assert caplog.messages[-1].endswith("plain version runs: PTX assembly aborted")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), RuntimeError("Triton Error [CUDA]: out of memory")])
def test_a_kernel_whose_first_use_ran_out_of_memory_is_checked_again(error, caplog):
    """The engine answers with a smaller way, in which the kernel is as right as ever."""
    short = [error]

    def check(device, dtype):
        if short:
            raise short.pop()
        return [(ONE, ONE, ONE.double())]

    op = Op("short", check)
    with pytest.raises(type(error), match=re.escape(str(error))):
        op.runs(OnCard())
    assert op.runs(OnCard()) and not caplog.messages


@pytest.mark.parametrize("error", [None, RuntimeError("no such instruction"), torch.OutOfMemoryError("Tried to allocate 2.00 GiB")])
def test_the_op_on_its_first_use_is_known_for_as_long_as_that_lasts(error):
    seen = []

    def inner(device, dtype):
        seen.append(dispatch.preparing())
        return [(ONE, ONE, ONE.double())]

    def outer(device, dtype):
        Op("inner", inner).runs(OnCard())
        seen.append(dispatch.preparing())
        if error is not None:
            raise error
        return [(ONE, ONE, ONE.double())]

    with pytest.raises(torch.OutOfMemoryError) if isinstance(error, torch.OutOfMemoryError) else contextlib.nullcontext():
        Op("outer", outer).runs(OnCard())
    assert seen == ["inner", "outer"] and dispatch.preparing() is None


def test_a_right_kernel_runs():
    assert Op("right", lambda device, dtype: [(ONE, ONE, ONE.double())]).runs(OnCard())


def test_one_switch_turns_all_kernels_off(monkeypatch):
    monkeypatch.setenv("LTX25_KERNELS", "reference")
    assert not Op("right", lambda device, dtype: [(ONE, ONE, ONE.double())]).runs(OnCard())


def test_without_triton_or_on_a_cpu_no_kernel_is_even_checked(monkeypatch):
    def check(device, dtype):
        raise AssertionError

    assert not Op("any", check).runs(ONE)
    monkeypatch.setattr(dispatch, "triton", None)
    assert not Op("any", check).runs(OnCard())


def test_float64_goes_to_the_twin():
    double = OnCard()
    double.dtype = torch.float64
    assert not Op("right", lambda device, dtype: [(ONE, ONE, ONE.double())]).runs(double)
