"""Wrong files and wrong inputs: one sentence each, before heavy work, and the server goes on."""

import shutil

import pytest
from comfyui_ltx25.ltx25.tiny import TinyFiles
from comfyui_ltx25.tests.support.comfyui_host import Rejected
from comfyui_ltx25.tests.support.contract import NODES
from safetensors import safe_open
from safetensors.torch import save_file

SLOTS = {"transformer": "diffusion_models", "text_encoder": "text_encoders", "video_vae": "vae", "audio_vae": "vae"}


@pytest.fixture(scope="module")
def broken(tiny, host):
    """Every tiny file in every folder, and broken ones, as `wrong-*`; the host's combos are read anew for each prompt."""
    files = TinyFiles.below(tiny)
    kinds = {slot: getattr(files, slot) for slot in SLOTS}
    for folder in set(SLOTS.values()):
        place = host.base / "models" / folder
        for slot, path in kinds.items():
            shutil.copy(path, place / f"wrong-{slot}.safetensors")
        whole = files.video_vae.read_bytes()
        for name, data in {
            "empty": b"",
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 42018190584\n",
            "cut-header": whole[:100],
            "cut-data": whole[:-1000],
            "text": b"not a model at all, but long enough to look at",
        }.items():
            (place / f"wrong-{name}.safetensors").write_bytes(data)
    with safe_open(files.text_encoder, "pt") as file:
        names = [name for name in file.keys() if not name.startswith("text_embedding_projection.")]  # noqa: SIM118
        stock = {name: file.get_tensor(name) for name in names}
        save_file(stock, host.base / "models" / "text_encoders" / "wrong-stock.safetensors", metadata=file.metadata())
    return host


def loaded(host, api, find, slot, file):
    prompt = api("text_to_video_distilled_tiny")
    prompt[find(prompt, "LoadLTX25Checkpoint")]["inputs"][slot] = file
    run = host.run(prompt)
    assert run.status == "error" and prompt[run.error["node_id"]]["class_type"] == "LoadLTX25Checkpoint"
    message = run.error["exception_message"].strip()
    assert "\n" not in message and message.endswith("."), message
    return message


@pytest.mark.parametrize("slot,other", [(slot, other) for slot in SLOTS for other in SLOTS if slot != other])
def test_l2_every_slot_refuses_every_other_kind_by_name(broken, api, find, slot, other):
    message = loaded(broken, api, find, slot, f"wrong-{other}.safetensors")
    assert slot in message and f"wrong-{other}" in message and "wanted" in message


@pytest.mark.parametrize(
    "name,word", [("empty", "empty"), ("pointer", "Git-LFS"), ("cut-header", "header"), ("cut-data", "cut off"), ("text", "neither a safetensors nor a GGUF")]
)
@pytest.mark.parametrize("slot", SLOTS)
def test_l11_a_broken_file_is_told_from_a_slow_one(broken, api, find, slot, name, word):
    assert word in loaded(broken, api, find, slot, f"wrong-{name}.safetensors")


def test_l4_a_stock_gemma_is_refused_by_the_missing_projection(broken, api, find):
    message = loaded(broken, api, find, "text_encoder", "wrong-stock.safetensors")
    assert "text_embedding_projection" in message and "gemma4-12b-with-proj" in message


def test_l10_a_file_the_user_lacks_is_refused_before_anything_runs(host, api, find):
    prompt = api("text_to_video")
    with pytest.raises(Rejected) as refused:  # the host checks inputs in no fixed order, and the text is cut: the data is not
        host.run(prompt)
    lacking = {error["extra_info"]["received_value"] for node in refused.value.node_errors.values() for error in node["errors"]}
    assert "ltx-2.5-22b-dev-transformer-bf16.safetensors" in lacking


def changed(api, find, kind, name="text_to_video_tiny", **inputs):
    prompt = api(name)
    prompt[find(prompt, kind)]["inputs"].update(inputs)
    return prompt


@pytest.mark.parametrize(
    "kind,inputs,words",
    [
        ("EmptyLTX25Latent", {"width": 100, "height": 100, "frames": 10}, ["96 or 128", "9 or 17"]),
        ("EmptyLTX25Latent", {"width": 8192, "height": 8192, "frames": 8193, "batch_size": 64}, ["8192 x 8192 px", "of host memory", "are free", "use batch_size 1 and at most"]),
        ("LTX25Guider", {"stg_blocks": "99"}, ["99", "0 to 3"]),
        ("LTX25Guider", {"stg_blocks": "abc"}, ["abc"]),
        ("LTX25Guider", {"stg_blocks": "-1"}, ["-1"]),
        ("LTX25Sampler", {"frame_rate": 0.5}, ["0.5", "1 to 240"]),
        ("LoadLTX25Checkpoint", {"precision": "fp8"}, ["fp8"]),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_what_can(host, api, find, kind, inputs, words):
    run = host.run(changed(api, find, kind, **inputs))
    assert run.status == "error", run.status
    assert all(word in run.error["exception_message"] for word in words), run.error["exception_message"]
    assert not [text for _, text in run.texts() if text.startswith("sample ")], "no forward ran"


@pytest.mark.parametrize(
    "kind,latent,words",
    [
        ("LTX25Sampler", {"video": "[64, 128, 1025, 256, 256]"}, ["sampling this latent", "make the clip smaller"]),
        ("DecodeVideoVAE", {"video": "[1, 128, 1025, 256, 256]"}, ["decoding 8193 frames of 8192 x 8192 px", "use at most"]),
        ("DecodeAudioVAE", {"audio": "[1, 8, 1000000000, 16]"}, ["s of sound", "make the clip at most"]),
    ],
)
def test_h3_a_latent_that_memory_cannot_hold_is_refused_with_what_can(host, api, find, kind, latent, words):
    """Sizes that no machine has the memory for; the latent itself takes none."""
    prompt = api("text_to_video_distilled_tiny")
    prompt["wide"] = {"class_type": "ProbeLatent", "inputs": {**latent, "fill": "wide"}}
    prompt[find(prompt, kind)]["inputs"]["latent"] = ["wide", 0]
    run = host.run(prompt)
    message = run.error["exception_message"].strip()
    assert prompt[run.error["node_id"]]["class_type"] == kind
    assert all(word in message for word in [*words, "of host memory", "are free"]) and "\n" not in message, message


@pytest.mark.parametrize(
    "kind,inputs",
    [
        ("EmptyLTX25Latent", {"width": 0}),
        ("EmptyLTX25Latent", {"height": -64}),
        ("EmptyLTX25Latent", {"width": 1 << 20}),
        ("EmptyLTX25Latent", {"frames": 0}),
        ("EmptyLTX25Latent", {"frame_rate": 0}),
        ("LTX25Sampler", {"steps": 0}),
        ("LTX25Sampler", {"schedule": "karras"}),
        ("LTX25Guider", {"skip_step": -1}),
    ],
)
def test_the_host_itself_rejects_what_a_widget_does_not_allow(host, api, find, kind, inputs):
    with pytest.raises(Exception, match="|".join(inputs)):
        host.run(changed(api, find, kind, **inputs))


@pytest.mark.parametrize("node", NODES)
def test_inputs_that_all_come_over_links_are_left_to_the_run(host, inspect, node):
    """What comes over a link is not known before the prompt runs: the host asks about it with None."""
    prompt = {"value": {"class_type": "ProbeValue", "inputs": {}}, "node": {"class_type": node, "inputs": {name: ["value", 0] for name, _, _ in NODES[node][0]}}}
    inspect(prompt, "node")
    run = host.run(prompt)
    assert run.error["node_id"] == "value", run.error


@pytest.mark.parametrize(
    "node, slot, name, other",
    [
        ("LTX25LoRA", "lora_name", "tiny-style.safetensors", "no-lora.safetensors"),
        ("LTX25LatentUpscale", "upscale_model", "", "nowhere.safetensors"),
    ],
)
def test_a_file_name_over_a_link_is_checked_when_the_node_runs(host, tiny, api, find, inspect, node, slot, name, other):
    prompt = api("text_to_video_distilled_tiny")
    load = find(prompt, "LoadLTX25Checkpoint")
    latent = {} if node == "LTX25LoRA" else {"latent": ["latent", 0]}
    prompt = {load: prompt[load], "latent": {"class_type": "ProbeLatent", "inputs": {"video": "[1, 128, 2, 2, 2]"}}}
    prompt["name"] = {"class_type": "ProbeValue", "inputs": {"text": name or next(path.name for path in (tiny / "latent_upscale_models").iterdir() if "spatial" in path.name)}}
    prompt["node"] = {"class_type": node, "inputs": {"engine": [load, 0], slot: ["name", 0], **latent, **({} if latent else {"strength": 1.0})}}
    inspect(prompt, "node")
    assert (run := host.run(prompt)).ok, run.error
    prompt["name"]["inputs"]["text"] = other
    run = host.run(prompt)
    assert run.error["node_id"] == "node" and other in run.error["exception_message"], run.error


@pytest.mark.parametrize("blocks", ["", "0,2", " 1 , 3 "])
def test_legal_stg_blocks_run(host, api, find, blocks):
    assert host.run(changed(api, find, "LTX25Guider", stg_blocks=blocks)).ok


@pytest.mark.parametrize("text", ["", "   ", "\U0001f431 \U0001f3ac", "قطة على حصيرة", "a\x00b", "(a:1.3) {b|c}", "\r\n\ttabs"])
def test_e1_e4_any_text_is_a_prompt(host, api, find, text):
    run = host.run(changed(api, find, "EncodeGemmaText", name="text_to_video_distilled_tiny", text=text))
    assert run.ok, run.error and run.error["exception_message"]


def test_n6_a_missing_negative_with_cfg_is_refused(host, api, find):
    prompt = api()
    del prompt[find(prompt, "LTX25Guider")]["inputs"]["negative"]
    run = host.run(prompt)
    assert run.status == "error" and "negative" in run.error["exception_message"]


def test_n6_a_missing_negative_of_a_second_stage_is_found_out_before_the_first(host, api, find):
    """As LTX-2.5 Guider is when it is new: guided, without a negative prompt."""
    prompt = api("two_stage_guided_tiny")
    guider = find(prompt, "LTX25Guider", "Stage 2")
    prompt[guider]["inputs"].update(video_cfg=3.0, audio_cfg=7.0)
    run = host.run(prompt)
    assert run.error["node_id"] == guider and "video_cfg is 3 but there is no negative prompt" in run.error["exception_message"]
    assert not [text for _, text in run.texts() if text.startswith("sample")]


def test_guidance_on_a_file_whose_name_says_distilled_is_a_warning(host, api, find, inspect, tiny):
    prompt = changed(api, find, "LoadLTX25Checkpoint", transformer=TinyFiles.below(tiny).distilled.name)
    report = inspect(prompt, find(prompt, "LTX25Sampler"), 1)
    assert "distilled" in report(host.run(prompt))


def sampled(api, find, **latent):
    prompt = api("text_to_video_distilled_tiny")
    prompt["latent"] = {"class_type": "ProbeLatent", "inputs": latent}
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["latent"] = ["latent", 0]
    return prompt


@pytest.mark.parametrize(
    "latent,word",
    [
        ({"video": "[1, 64, 3, 2, 3]", "audio": "[1, 8, 18, 16]"}, "64"),
        ({"video": "[1, 16, 3, 2]"}, "16"),
        ({"video": "[2, 128, 3, 2, 3]", "audio": "[1, 8, 18, 16]"}, "2 items"),
        ({"video": "[1, 128, 3, 2, 3]", "audio": "[1, 8, 18, 16]", "fill": "nan"}, "not finite"),
    ],
)
def test_a_latent_that_is_not_one_is_refused(host, api, find, latent, word):
    run = host.run(sampled(api, find, **latent))
    assert run.status == "error" and word in run.error["exception_message"], run.error


@pytest.mark.parametrize(
    "how,word",
    [
        ("twice", "2 conditioning entries"),
        ("narrow", "features"),
        ('{"area": [1, 1, 0, 0]}', "area"),
        ('{"hooks": 1}', "hooks"),
        ('{"start_percent": 0.5}', "range"),
        ('{"keyframe_idxs": 1}', "guide"),
    ],
)
def test_conditioning_that_asks_for_more_than_one_prompt_is_refused(host, api, find, how, word):
    prompt = api("text_to_video_distilled_tiny")
    guider = prompt[find(prompt, "LTX25Guider")]["inputs"]
    prompt["changed"] = {"class_type": "ProbeConditioning", "inputs": {"conditioning": guider["positive"], "how": how}}
    guider["positive"] = ["changed", 0]
    run = host.run(prompt)
    assert run.status == "error" and word in run.error["exception_message"], run.error


def test_a_guider_of_another_model_is_refused_with_the_way_out(host, api, find):
    prompt = api("text_to_video_distilled_tiny")
    prompt["foreign"] = {"class_type": "ProbeForeignGuider", "inputs": {}}
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["guider"] = ["foreign", 0]
    run = host.run(prompt)
    assert run.status == "error"
    assert "CFGGuider" in run.error["exception_message"] and "LTX-2.5 Guider" in run.error["exception_message"]


def test_a_file_that_changed_on_disk_is_opened_anew(host, tiny, api, find, inspect):
    files = TinyFiles.below(tiny)
    place = host.base / "models" / "diffusion_models" / "changing.safetensors"
    shutil.copy(files.distilled, place)
    prompt = changed(api, find, "LoadLTX25Checkpoint", name="text_to_video_distilled_tiny", transformer=place.name)
    seen = inspect(prompt, find(prompt, "LTX25Sampler"))
    first = seen(host.run(prompt))["samples"]["nested"][0]["digest"]
    shutil.copy(files.transformer, place)
    assert seen(host.run(prompt))["samples"]["nested"][0]["digest"] != first
    shutil.copy(files.distilled, place)
    assert seen(host.run(prompt))["samples"]["nested"][0]["digest"] == first
