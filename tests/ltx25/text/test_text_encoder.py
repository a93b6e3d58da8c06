"""The whole text side on tiny official files: prompt -> features -> contexts, with its phases."""

import pytest
import torch
from comfyui_ltx25.ltx25.connector import context_length
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.text import TextEncoder
from comfyui_ltx25.tests.support.golden import Golden
from comfyui_ltx25.tests.support.text import load_connectors, load_projection, load_tokenizer, load_tower

GOLDEN = Golden("text")


class Recorder:
    wants_preview = False

    def __init__(self):
        self.events = []

    def check(self): ...

    def opened(self, phase):
        self.events.append((phase.name, "opened"))

    def ticked(self, phase):
        self.events.append((phase.name, phase.done, phase.total, phase.text))

    def closed(self, phase):
        self.events.append((phase.name, "closed"))


@pytest.fixture(scope="module", params=["bf16", "f32"])
def parts(request):
    path = GOLDEN.folder / f"text_encoder.{request.param}.safetensors"
    encoder = TextEncoder(load_tokenizer(path), load_tower(path), load_projection(path), None)
    return encoder, load_connectors(GOLDEN.folder / f"transformer_connectors.{request.param}.safetensors")


def contexts(parts, prompt):
    encoder, connectors = parts
    features = encoder.encode(prompt, Watch())
    with Watch().phase("text.connect", total=connectors.blocks, unit="block") as phase:
        got = connectors.forward(features.video, features.audio, [features.tokens.used], context_length(features.tokens.used), phase)
    assert phase.done == phase.total == 4
    return features, got


@pytest.mark.parametrize("case", GOLDEN.names("contexts/"))
def test_golden_contexts(parts, case):
    features, (video, audio) = contexts(parts, GOLDEN.input(case, "prompt"))
    assert features.tokens.used == GOLDEN.output(case, "n_valid")
    assert video.shape[:2] == audio.shape[:2] == (1, GOLDEN.output(case, "mask_sum"))
    rows = GOLDEN.output(case, "rows").long()
    GOLDEN.check(case, "video_context", video[0, rows])
    GOLDEN.check(case, "audio_context", audio[0, rows])


def test_every_golden_case_of_the_text_side_has_a_test():
    """tokenize: test_tokenizer; tower/*: test_tower and test_features; contexts/*: here; connectors/*: test_connector."""
    assert {name.split("/")[0] for name in GOLDEN.index} == {"tokenize", "tower", "contexts", "connectors"}


@pytest.mark.parametrize("prompt", ["", " ", "fox " * 5000, "\U0001f98a\u200d\u2744\ufe0f", "\u0645\u0631\u062d\u0628\u0627", "a\x00b", "(fox:1.3)"])
def test_e4_any_prompt_gives_finite_features_of_its_valid_tokens(parts, prompt):
    encoder, _ = parts
    features = encoder.encode(prompt, Watch())
    n = features.tokens.used
    assert features.video.shape == (1, n, 32) and features.audio.shape == (1, n, 16)
    assert features.video.isfinite().all() and features.audio.isfinite().all()
    assert n == min(1024, features.tokens.prompt + 1)


def test_e4_two_prompts_differ_and_the_same_prompt_repeats_bit_for_bit(parts):
    encoder, _ = parts
    first, other, again = (encoder.encode(text, Watch()).video for text in ("a red fox", "a red cat", "a red fox"))
    assert torch.equal(first, again)
    assert (first[:, :2] - other[:, :2]).abs().max() < 1e-5  # the shared beginning: attention is causal
    assert (first[:, -1] - other[:, -1]).abs().max() > 1e-2


def test_e4_phases_tell_the_counts_of_a_cut_prompt_and_every_layer(parts):
    recorder = Recorder()
    parts[0].encode("fox " * 5000, Watch([recorder]))
    names = [name for name, *event in recorder.events if event == ["opened"]]
    assert names == ["text.tokenize", "text.tower", "text.project"]
    (_, _, _, told) = recorder.events[1]
    assert told.startswith("prompt has ") and told.endswith(" tokens, the first 1023 + BOS are used")
    layers = [event[1:] for event in recorder.events if event[0] == "text.tower" and len(event) == 4]
    assert layers == [(i, 6, f"layer {i}/6") for i in range(1, 7)]


def test_nothing_is_kept_for_a_backward_pass(parts):
    features = parts[0].encode("fox", Watch())
    assert not features.video.requires_grad and not features.audio.requires_grad
