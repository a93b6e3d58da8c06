"""Text keys and values that a second stage, or another seed, finds made: counted, bit-equal, bounded, and gone in time."""

from dataclasses import replace

import comfyui_ltx25.ltx25.engine as engine_file
import pytest
import torch
from comfyui_ltx25.ltx25.conditions import Frozen
from comfyui_ltx25.ltx25.dit.attention import CrossAttention
from comfyui_ltx25.ltx25.dit.kept_text import KeptTexts
from comfyui_ltx25.ltx25.dit.modality import Contexts
from comfyui_ltx25.ltx25.engine import SampleJob
from comfyui_ltx25.ltx25.guidance import Bins, Guidance
from comfyui_ltx25.ltx25.latents import empty_latents
from comfyui_ltx25.ltx25.schedule import sigmas_of
from comfyui_ltx25.ltx25.shapes import VideoShape
from comfyui_ltx25.tests.support.loras import tiny_lora
from comfyui_ltx25.tests.support.published import PUBLISHED_DIT
from comfyui_ltx25.tests.support.renders import WATCH, open_engine

PLAIN, GUIDED = (Bins.constant(Guidance(cfg, 0.0, 1.0, 0.0, frozenset(), 0)) for cfg in (1.0, 3.0))
BLOCKS = 4  # of the tiny transformer
STAGES = (sigmas_of("distilled", 8), sigmas_of("distilled_stage2", 3))


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(engine_file, "SPARE", 0)  # this machine may have less to spare than a card
    return open_engine()


@pytest.fixture
def made(monkeypatch):
    """How often keys and values of a text were computed since the last `take`."""
    count = [0]
    plain = CrossAttention.keys_values

    def counted(self, context, rope):
        count[0] += rope is None  # those between the streams are rotated
        return plain(self, context, rope)

    monkeypatch.setattr(CrossAttention, "keys_values", counted)

    def take():
        taken, count[0] = count[0], 0
        return taken

    return take


def job(engine, stage, text="A cat on a table.", seed=1, side=64, **changes):
    video, audio = empty_latents(VideoShape(9, side, side), 24.0, 1, engine.compression)
    plain = SampleJob(
        video=video, audio=audio, video_mask=None, audio_mask=None, frame_rate=24.0, seed=seed, positive=engine.encode(text, WATCH), negative=None,
        video_guidance=PLAIN, audio_guidance=PLAIN, sigmas=STAGES[stage], schedule=None, sampler="euler", eta=1.0, conditions=(), add_noise=True,
    )  # fmt: skip
    return replace(plain, **changes)


def same(one, other):
    return torch.equal(one.video, other.video) and torch.equal(one.audio, other.audio)


def test_stage_two_computes_no_text_keys_and_values_and_is_equal_to_the_bit(engine, made):
    alone = engine.sample(job(engine, 1, side=128), WATCH)
    engine.detach()
    made()
    engine.sample(job(engine, 0), WATCH)
    assert made() == 8 * 2 * BLOCKS
    second = engine.sample(job(engine, 1, side=128, seed=1), WATCH)
    assert made() == 0 and same(second, alone)


def test_another_seed_of_a_prompt_computes_those_of_the_other_levels_alone(engine, made):
    for stage in (0, 1):
        engine.sample(job(engine, stage), WATCH)
    made()
    engine.sample(job(engine, 0, seed=2), WATCH)
    assert made() == 5 * 2 * BLOCKS
    engine.sample(job(engine, 1, seed=2), WATCH)
    assert made() == 0


def test_legs_side_by_side_and_alone_find_them_too(engine, made):
    """A guided stage makes rows of its own, for two texts; the plain one behind it is as if it were alone."""
    alone = engine.sample(job(engine, 1), WATCH)
    engine.detach()
    made()
    engine.sample(job(engine, 1, negative=engine.encode("fog", WATCH), video_guidance=GUIDED, audio_guidance=GUIDED), WATCH)
    assert made() == 3 * 2 * 2 * BLOCKS
    assert same(engine.sample(job(engine, 1), WATCH), alone) and made() == 3 * 2 * BLOCKS


def test_another_prompt_other_weights_and_a_host_that_takes_the_memory_back_start_anew(engine, made, tmp_path):
    style = engine.with_loras([(tiny_lora(tmp_path / "style.safetensors"), 1.0)])
    plain, other = (open_engine().sample(job(engine, 1, text), WATCH) for text in ("A cat on a table.", "A dog."))
    with_style = open_engine().with_loras([(tmp_path / "style.safetensors", 1.0)]).sample(job(engine, 1), WATCH)
    made()
    for handle, text, wanted in ((engine, "A cat on a table.", plain), (engine, "A dog.", other), (style, "A cat on a table.", with_style), (engine, "A cat on a table.", plain)):
        assert same(handle.sample(job(engine, 1, text), WATCH), wanted) and made() == 3 * 2 * BLOCKS
    assert same(engine.sample(job(engine, 1), WATCH), plain) and made() == 0
    assert engine._texts.bytes > 0
    engine.detach()
    assert engine._texts.bytes == 0
    assert same(engine.sample(job(engine, 1), WATCH), plain) and made() == 3 * 2 * BLOCKS


def test_a_frozen_sounds_text_is_made_once_for_all_steps(engine, made):
    engine.sample(job(engine, 1, conditions=(Frozen("audio"),)), WATCH)
    assert made() == (3 + 1) * BLOCKS


def test_nothing_is_kept_where_memory_is_not_to_spare(engine, made, monkeypatch):
    monkeypatch.setattr(engine_file, "SPARE", 1 << 62)
    results = [engine.sample(job(engine, 1), WATCH) for _ in range(2)]
    assert same(*results) and made() == 2 * 3 * 2 * BLOCKS and engine._texts.bytes == 0


def test_bytes_are_counted_and_bounded():
    texts = KeptTexts((0.5,), limit=1000)
    prompt = Contexts(torch.ones(1, 2, 3), None)
    texts.begin(prompt, (), spare=1 << 40)
    level = texts.at("video", 0.5)
    assert texts.at("video", 0.4) is None
    keys, values = torch.ones(100), torch.ones(100)
    level.put(0, keys, values)
    assert texts.bytes == 800 and level.get(0)[0] is keys and level.get(0)[1] is values
    level.put(1, keys.clone(), values.clone())
    assert texts.bytes == 800 and level.get(1) is None
    texts.begin(Contexts(torch.ones(1, 2, 3), None), (), spare=0)  # an equal prompt
    level.put(1, torch.ones(10), torch.ones(10))
    assert texts.bytes == 800, "no more, as nothing is to spare"
    product = torch.arange(200.0).view(2, 100)
    texts.begin(prompt, (), spare=1 << 40)
    level.put(2, product[:, :10], product[:, 10:20])
    assert texts.bytes == 960, "views let go of the product"
    assert all(kept.untyped_storage().nbytes() == 80 for kept in level.get(2)) and torch.equal(level.get(2)[1], product[:, 10:20])
    texts.begin(prompt, (), spare=-1)
    assert texts.bytes == 0 and level.get(0) is None


def test_the_limit_holds_stage_two_and_a_frozen_sound_at_the_published_sizes():
    config = PUBLISHED_DIT
    video, audio = (config.layers * 2 * 1024 * width * 2 for width in (config.width, config.audio_width))
    assert 3 * (video + audio) == 3_623_878_656
    assert 3 * (video + audio) + audio <= engine_file.KEPT_TEXTS < 4 * (video + audio)
