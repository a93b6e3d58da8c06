"""Registering host memory, with a pretended driver: what it refuses costs speed, and never a render."""

import logging

import pytest
import torch
from comfyui_ltx25.ltx25 import pinned
from comfyui_ltx25.ltx25.pinned import Pins

CARD = torch.device("cuda", 0)


class Driver:
    """Registers at most `most` runs of memory. `last`: the error it keeps of a call that failed, which the next kernel raises."""

    def __init__(self, most):
        self.most, self.held, self.asked, self.last = most, set(), 0, 0

    def cudaHostRegister(self, address, size, flags):
        self.asked += 1
        if len(self.held) >= self.most:
            self.last = 2
        else:
            self.held.add(address)
        return self.last

    def cudaHostUnregister(self, address):
        if address in self.held:
            self.held.remove(address)
        else:
            self.last = 713
        return self.last

    def kernel(self, device):
        error, self.last = self.last, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


class Owner:
    def __init__(self):
        self.buffer = torch.empty(4096, dtype=torch.uint8)


@pytest.fixture
def driver(monkeypatch):
    def make(most):
        made = Driver(most)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
        monkeypatch.setattr(pinned, "_run_something", made.kernel)
        return made

    return make


def test_memory_is_registered_until_its_owner_goes(driver):
    card, owner = driver(9), Owner()
    Pins().pin(owner, owner.buffer, CARD)
    assert card.held == {owner.buffer.data_ptr()}
    del owner
    assert not card.held


def test_a_refusal_leaves_no_error_for_the_next_kernel_and_is_told_once(driver, caplog):
    card, pins, owners = driver(1), Pins(), [Owner() for _ in range(4)]
    with caplog.at_level(logging.INFO):
        for owner in owners:
            pins.pin(owner, owner.buffer, CARD)
            card.kernel(CARD)
    assert card.asked == 2, "not asked again for each block"
    assert len(caplog.messages) == 1 and "pins no more host memory" in caplog.messages[0]
    owners.clear(), caplog.clear()
    del owner
    again = Owner()
    pins.pin(again, again.buffer, CARD)
    assert card.held == {again.buffer.data_ptr()} and not caplog.messages, "what went made room"


def test_an_unregistering_that_fails_leaves_no_error_either(driver):
    card, owner = driver(9), Owner()
    Pins().pin(owner, owner.buffer, CARD)
    card.held.clear()
    del owner
    card.kernel(CARD)


@pytest.mark.parametrize(("device", "size"), [(torch.device("cpu"), 4096), (CARD, 0)])
def test_what_no_card_copies_from_is_not_registered(driver, device, size):
    card, owner = driver(9), Owner()
    Pins().pin(owner, owner.buffer[:size], device)
    assert not card.asked


@pytest.mark.gpu
def test_on_a_card_a_kernel_behind_a_refusal_runs(caplog):
    cuda, owner = torch.device("cuda", torch.cuda.current_device()), Owner()
    Pins().pin(owner, owner.buffer, cuda)
    Pins().pin(owner, owner.buffer, cuda)  # memory that is registered already
    assert torch.ones(3, device=cuda).add(1).tolist() == [2, 2, 2]
    assert len(caplog.messages) == 1 and owner.buffer.is_pinned()
