"""Decoding on a GPU: eager, captured and replayed alike, and as on a CPU."""

import pytest
import torch
from comfyui_ltx25.ltx25.audio.decode import decode_audio
from comfyui_ltx25.ltx25.audio.layers import KEPT_GRAPHS
from comfyui_ltx25.ltx25.instrument import Sink, Watch
from comfyui_ltx25.tests.support.audio import GOLDEN_FILE, load_decoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Listener(Sink):
    def __init__(self):
        self.done, self.total = [], None

    def opened(self, phase):
        self.total = phase.total

    def ticked(self, phase):
        self.done.append(phase.done)


def test_eager_captured_and_replayed_decodes_agree_with_the_cpu():
    model = load_decoder(GOLDEN_FILE)
    card = load_decoder(GOLDEN_FILE).cuda()
    for frames in (3, 6, 3, 6, 3, 1, 2, 4, 5, 1, 2, 4, 5, 3):  # more lengths than graphs are kept
        latent = torch.randn(1, 2, frames, 16, generator=torch.Generator().manual_seed(frames))
        want = decode_audio(model, latent, Watch())
        listener = Listener()
        got = decode_audio(card, latent, Watch([listener]))
        assert (got - want).abs().max() <= 2e-5 + 5e-5
        assert listener.done[-1] == listener.total and listener.done == sorted(listener.done)
    assert card._replay.captured == KEPT_GRAPHS


def test_results_of_replays_are_the_callers_own():
    card = load_decoder(GOLDEN_FILE).cuda()
    first, second = (torch.randn(1, 2, 64, 30, device="cuda") for _ in range(2))
    net = card.vocoder.vocoder
    with torch.no_grad():
        wants = [net(x, lambda n=1: None) for x in (first, second)]
        gots = [net._replay(net, (x,), lambda n=1: None, net.ticks) for x in (first, second, first, second)]
    for got, want in zip(gots, wants * 2, strict=True):
        assert torch.equal(got, want)
