"""What a user sees while a prompt runs."""

import io
import itertools

import pytest
from PIL import Image

BARS = {  # class -> phase that its bar counts
    "EncodeGemmaText": "text.tower",
    "LTX25Sampler": "sample",
    "DecodeVideoVAE": "decode.video",
    "DecodeAudioVAE": "decode.audio",
}


@pytest.fixture(scope="module")
def fresh(host, api, find):
    """A prompt and its run, in which every node of ours works: nothing cached, nothing loaded."""
    host.free()
    prompt = api()
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = 101
    run = host.run(prompt)
    assert run.ok, run.error
    return prompt, run


def test_h1_h2_every_working_node_names_its_phases_and_counts_to_its_total(fresh):
    prompt, run = fresh
    for key, node in prompt.items():
        if node["class_type"] not in BARS:
            continue
        values = [(value, most) for _, value, most in run.progress(key)]
        assert [v for v, _ in values] == sorted(v for v, _ in values), "the bar never goes back"
        assert values[-1][0] == values[-1][1] > 1, "the last value is the total"
        texts = [text for _, text in run.texts(key)]
        assert any(text.startswith(f"{BARS[node['class_type']]} ") for text in texts), texts
        start = run.span(key)[0]
        assert run.texts(key)[0][0] - start < 1.0, "the first word comes within a second"


def test_n5_forwards_reported_are_forwards_run(host, api, find, inspect):
    host.free()
    prompt = api()
    sampler = find(prompt, "LTX25Sampler")
    prompt[sampler]["inputs"]["seed"] = 102
    report = inspect(prompt, sampler, 1)
    run = host.run(prompt)
    assert run.progress(sampler)[-1][1:] == (16, 16) and "forwards of this node: 16 " in report(run)
    texts = [text for _, text in run.texts(sampler)]
    assert any("step 4/4 - forward 13-16/16 (cond+uncond+stg+mod) - last " in text for text in texts), texts
    assert any("left (from 1 step)" in text or "left (from 2 steps)" in text for text in texts), texts


def test_loading_inside_a_node_shows_as_text_while_the_bar_stands_still(fresh, find):
    prompt, run = fresh
    sampler = find(prompt, "LTX25Sampler")
    loading = [t for t, text in run.texts(sampler) if text.startswith("load.read transformer ")]
    assert loading
    assert all(value == 0 for t, value, _ in run.progress(sampler) if t <= loading[-1])
    assert any(text.startswith("load.read transformer ") and text.endswith("B/s") for _, text in run.texts(sampler))


def test_no_silence_of_a_second_from_the_first_node_to_the_last(fresh):
    _, run = fresh
    times = [event.t for event in run.events]
    assert max(b - a for a, b in itertools.pairwise(times)) < 1.0


def test_messages_are_few_enough_for_the_servers_one_loop(host, api, find):
    prompt = api("text_to_video_distilled_tiny")
    audio = find(prompt, "DecodeAudioVAE")
    host.free()
    run = host.run(prompt)
    begin, end = run.span(audio)
    assert len([t for t, _ in run.texts(audio)]) < 20 * (end - begin) + 12  # 12: edges of the phases are always told


def test_v1_v2_a_picture_of_the_video_half_comes_once_per_step_when_previews_are_on(host, api, find):
    prompt = api()
    sampler = find(prompt, "LTX25Sampler")
    for seed, method, wanted in ((105, "latent2rgb", 4), (106, "auto", 4), (107, "taesd", 4), (108, "none", 0)):
        prompt[sampler]["inputs"]["seed"] = seed
        run = host.run(prompt, preview_method=method, targets=[find(prompt, "PreviewAny")])
        assert run.ok
        assert [preview.node for preview in run.previews] == [sampler] * wanted, method
        for preview in run.previews:
            picture = Image.open(io.BytesIO(preview.image))
            assert picture.mode == "RGB" and picture.width > picture.height  # 96 x 64


def test_v2_no_picture_of_a_clip_that_is_sound_alone(host, api, find):
    prompt = api("text_to_video_distilled_tiny")
    prompt["latent"] = {"class_type": "ProbeLatent", "inputs": {"audio": "[1, 8, 18, 16]", "fill": "zeros"}}
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["latent"] = ["latent", 0]
    run = host.run(prompt, preview_method="latent2rgb", targets=[find(prompt, "PreviewAny")])
    assert run.ok and not run.previews


def test_e4_a_text_that_is_too_long_is_cut_and_the_node_says_by_how_much(host, api, find):
    prompt = api("text_to_video_distilled_tiny")
    text = find(prompt, "EncodeGemmaText")
    prompt[text]["inputs"]["text"] = "harbour " * 5000
    run = host.run(prompt)
    assert run.ok
    last = run.texts(text)[-1][1]
    assert "has 25000 tokens" in last and "first 1023" in last, last


def test_e3_e4_a_negative_prompt_without_effect_is_noticed(host, api, find, inspect):
    prompt = api()
    prompt[find(prompt, "LTX25Guider")]["inputs"].update(video_cfg=1.0, audio_cfg=1.0)
    report = inspect(prompt, find(prompt, "LTX25Sampler"), 1)
    assert "no effect" in report(host.run(prompt))
