"""What phases say they need beside the weights, against what they hold on the CPU."""

import pytest
import torch
from comfyui_ltx25.ltx25.connector import Conditioning
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.residency import Standalone
from comfyui_ltx25.tests.support.engine import engine
from comfyui_ltx25.tests.support.memory import peak_bytes_held
from comfyui_ltx25.tests.support.tiny import tiny_files


@pytest.fixture(scope="module")
def asked():
    """An engine, and `run(work)`: the bytes the work asked its arbiter for and the bytes it held, once its weights are there."""
    small = engine()
    wanted = []

    class Asked(Standalone):
        def ready(self, parts, working, watch):
            wanted.append(working)
            super().ready(parts, working, watch)

    small.arbiter = Asked(small.parts)

    def run(work):
        work(small)
        held = peak_bytes_held(lambda: [work(small)])
        return wanted[-1], held

    return run


def test_encoding_frames_asks_for_more_the_larger_they_are(asked):
    """How much, at the published size: video/test_estimates.py; on the CPU convolutions hold workspaces of their own."""
    clips = [torch.rand(count, side, side, 3) for count, side in ((1, 64), (33, 64), (33, 128))]
    said = [asked(lambda e, clip=clip: e.encode_video(clip, Watch()))[0] for clip in clips]
    assert 0 < said[0] < said[1] < said[2]


@pytest.mark.parametrize(("seconds", "rate"), [(1, 48000), (10, 44100), (60, 16000), (60, 48000)])
def test_encoding_sound_holds_no_more_than_it_asked_for(asked, seconds, rate):
    wave = torch.rand(1, 2, seconds * rate) - 0.5
    said, held = asked(lambda e: e.encode_audio(wave, rate, Watch()))
    assert held < said
    assert seconds < 60 or held > 0.5 * said


@pytest.mark.parametrize("tokens", [256, 1024])
def test_reading_a_length_holds_no_more_than_it_asked_for(asked, tokens):
    def work(e):
        contexts = (torch.zeros(1, tokens, width) for width in e.context_widths)
        e.predict_seconds(Conditioning(*contexts, ()), tiny_files().duration_head, Watch())

    said, held = asked(work)
    assert 0.5 * said < held < said


@pytest.mark.parametrize("seconds", [1, 6])
def test_decoding_sound_holds_no_more_than_it_asked_for(asked, seconds):
    latent = torch.randn(1, 8, 25 * seconds + 1, 16)
    said, held = asked(lambda e: e.decode_audio(latent, None, Watch()))
    assert 0.5 * said < held < said
