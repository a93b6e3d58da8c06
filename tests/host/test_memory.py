"""A good guest: memory is shared with the host's other models, given back when asked for, and found again."""

import json
import subprocess

import pytest
from comfyui_ltx25.ltx25.tiny import TinyFiles
from comfyui_ltx25.tests.host.conftest import PACK, comfyui, start

SCRIPT = PACK / "tests" / "host" / "memory_protocol.py"


@pytest.fixture(scope="module")
def protocol(tmp_path_factory):
    folder, python = comfyui()
    run = subprocess.run([python, SCRIPT, folder, PACK], capture_output=True, text=True, cwd=tmp_path_factory.mktemp("protocol"), timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def loaded(state):
    return {name for name, there in state.items() if there is True}


def test_m6_the_text_encoder_leaves_when_the_transformer_needs_its_room(protocol):
    assert loaded(protocol["after text"]) == {"text encoder", "connectors"}
    assert "transformer" in loaded(protocol["transformer evicts the text encoder"])
    assert "text encoder" not in loaded(protocol["transformer evicts the text encoder"])
    assert protocol["ready again"] == protocol["transformer evicts the text encoder"]
    assert protocol["listed once"].count("transformer") == 1


def test_a_native_model_gets_its_memory_from_us_and_we_get_ours_back(protocol):
    assert "transformer" not in loaded(protocol["native takes its room"]) and protocol["native takes its room"]["native"] == 22
    assert "transformer" in loaded(protocol["and gives it back"]) and protocol["and gives it back"]["native"] == 0


def test_a_cancelled_load_leaves_nothing_that_the_host_cannot_evict(protocol):
    after = dict(protocol["cancelled"])
    listed = after.pop("listed")
    assert loaded(after) <= set(listed) and "transformer" not in loaded(after)


def test_freeing_everything_drops_every_part_and_tells_the_engine(protocol):
    after = dict(protocol["everything freed"])
    assert after.pop("listed") == [] and "freed" in after.pop("told")
    assert not loaded(after)
    assert not loaded(protocol["only our phases load"]), "the host alone never brings a part back"


def test_blocks_are_given_back_by_the_gigabyte_and_come_again(protocol):
    assert protocol["blocks whole"] == 44
    given = protocol["blocks given"]
    assert 4 <= given["held"] < 44 and given["listed"] == ["blocks"] and given["native"] == 22 and given["free"] >= 20
    assert protocol["blocks back"] == {"held": 44, "native": 22}, "there is room for both by now"


def test_on_a_small_card_the_tower_keeps_its_blocks_in_host_memory_until_the_host_takes_a_part_for_itself(protocol):
    assert protocol["tower rests"] == {"held": 0, "rests": True, "connectors": True}
    assert protocol["a native model ends the rest"] == {"rests": False, "listed": []}


def test_m5_a_small_card_keeps_what_fits_beside_the_working_memory_and_no_one_leaves_for_more(protocol):
    small = protocol["blocks on a small card"]
    assert 4 < small["held"] < 24 and small["left"] >= 4 and small["room"] >= 23
    assert small["size"] == small["held"], "what streams is content: others may stay"
    assert protocol["stays"] == small["held"]


def test_m5_lowvram_and_novram_keep_what_fits_as_without_them(protocol):
    """Those states make the host hand out less for weights; a part that streams knows better what it needs."""
    small = protocol["blocks on a small card"]["held"]
    assert protocol["LOW_VRAM"] == protocol["NO_VRAM"] == small


def test_nodes_of_others_may_copy_and_ask_the_patcher_of_a_guider(protocol):
    """They do so with any guider's model; what the engine has not is said in a sentence."""
    used = protocol["as others use it"]
    assert used.pop("refused").startswith("the LTX-2.5 engine has no model_sampling for other nodes")
    assert used == {"same model": True, "weights": [{}, {}, {}, []], "patched": True, "held": 0, "dtype": None}


def test_latents_that_the_host_keeps_on_the_card_meet_what_is_made_beside_them_on_the_cpu(protocol):
    """--gpu-only. Where masks were on the card, an extension was a crash of two devices."""
    assert protocol["taken to"] == {"before": "cuda:0", "after": ["cpu"]}


def test_parked_weights_leave_what_the_hosts_cache_of_outputs_wants_free(protocol):
    """Less, and the host would forget a finished clip's latent: the next prompt samples it again."""
    assert protocol["host memory left"] == [4, 12, 4, 4, 4]


def emptied(host):
    """Whether all models left. The host frees between two prompts, and the one that asks may come first."""
    return models(host) == [] or models(host) == []


def models(host):
    return json.loads(host.run({"m": {"class_type": "ProbeModels", "inputs": {}}}).outputs["m"]["models"][0])


def tensor_bytes(host):
    return host.run({"m": {"class_type": "ProbeModels", "inputs": {}}}).outputs["m"]["tensors"][0]


@pytest.mark.parametrize("residency", ["resident", "stream"])
def test_free_brings_memory_back_to_what_it_was_before_the_prompt(host, api, find, residency):
    """Host memory is this server's device memory, too. Two stages with a LoRA, so that all that may be kept was there once.

    What the process has beside tensors goes up and down by 25 MiB from round to round (24 of them: no trend); what is kept
    would not come down again.
    """
    prompt = api("two_stage_hq_tiny")
    prompt[find(prompt, "LoadLTX25Checkpoint")]["inputs"]["residency"] = residency
    rounds = []
    for seed in range(601, 606):
        for key in [key for key, node in prompt.items() if node["class_type"] == "LTX25Sampler"]:
            prompt[key]["inputs"]["seed"] = seed
        assert host.run(prompt).ok
        used = tensor_bytes(host)
        host.free()
        tensor_bytes(host)  # a prompt that comes at once may run before the host does what was asked
        rounds.append((used, tensor_bytes(host), host.rss()))
        if len(rounds) > 1 and rounds[-1][2] <= rounds[0][2] + (32 << 20):
            break
    baseline = rounds[0][1]
    for used, after, _ in rounds[1:]:  # after the first, which imports and compiles
        assert used > baseline + (3 << 20), "weights and clips were there"
        assert after <= baseline + (64 << 10)
    assert rounds[-1][2] <= rounds[0][2] + (32 << 20), [rss >> 20 for _, _, rss in rounds]
    assert models(host) == []


def test_free_unloads_the_engine_and_the_next_prompt_works(host, api, find):
    prompt = api("text_to_video_distilled_tiny")
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = 301
    assert host.run(prompt).ok
    held = models(host)
    assert {"transformer", "text encoder", "connectors", "video VAE", "audio VAE"} <= {entry["name"] for entry in held}
    assert all(entry["bytes"] == entry["size"] > 0 for entry in held)
    host.free(unload_models=True, free_memory=False)
    assert emptied(host)
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = 302
    again = host.run(prompt)
    assert again.ok and [text for _, text in again.texts() if text.startswith("load.read transformer ")]


def test_m7_h6_a_queue_of_prompts_does_not_grow(host, api, find):
    prompt = api("text_to_video_distilled_tiny")
    sizes = []
    for seed in range(400, 408):
        prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = seed
        assert host.run(prompt).ok
        sizes.append(host.rss())
    assert sizes[-1] - sizes[2] < 64 << 20, sizes
    assert len(models(host)) == len({entry["name"] for entry in models(host)}), "no part is listed twice"


def test_without_a_node_cache_files_are_read_once_and_results_stay_the_same(tiny, host, api, find, inspect):
    prompt = api("text_to_video_distilled_tiny")
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = 303
    seen = inspect(prompt, find(prompt, "LTX25Sampler"))
    cached = seen(host.run(prompt))
    two = other_engine(prompt, find, TinyFiles.below(tiny).transformer.name)
    with start(tiny, args=["--cache-none"]) as bare:
        runs = [bare.run(prompt) for _ in range(2)]
        assert [seen(run) for run in runs] == [cached] * 2
        assert "LoadLTX25Checkpoint" in [prompt[key]["class_type"] for key in runs[1].executed], "this host forgets"
        assert parts_read(runs[0]) and not parts_read(runs[1])
        pairs = [bare.run(two) for _ in range(2)]
        assert seen(pairs[0]) == seen(pairs[1]) != cached
        assert parts_read(pairs[0]) == ["transformer"] and not parts_read(pairs[1]), "the first engine is still there, and two are held"
        again = bare.run(prompt)
        assert seen(again) == cached and not parts_read(again)
        bare.free()
        assert emptied(bare)
        assert parts_read(bare.run(prompt)) == parts_read(runs[0])


def other_engine(prompt, find, transformer):
    """A copy of `prompt` whose sampling is done by an engine of its own, with another transformer."""
    loader, guider = find(prompt, "LoadLTX25Checkpoint"), find(prompt, "LTX25Guider")
    node = {**prompt[loader], "inputs": {**prompt[loader]["inputs"], "transformer": transformer}}
    return {**prompt, "second": node, guider: {**prompt[guider], "inputs": {**prompt[guider]["inputs"], "engine": ["second", 0]}}}


def parts_read(run):
    """Names of the parts that were read from their files, each once for the run."""
    assert run.ok, run.error and run.error["exception_message"]
    names = ("text encoder", "connectors", "transformer", "video VAE", "audio VAE")
    told = [text.removeprefix("load.read ") for _, text in run.texts() if text.startswith("load.read ")]
    return [name for name in names if any(text.startswith(name) for text in told)]


def test_c4_another_setting_of_the_loader_does_not_read_the_text_encoder_again(host, api, find):
    """Contexts belong to text and encoders, not to the engine that made them; cache=off makes them anew."""
    prompt = api("text_to_video_distilled_tiny")
    loader = prompt[find(prompt, "LoadLTX25Checkpoint")]["inputs"]
    prompt[find(prompt, "EncodeGemmaText")]["inputs"]["text"] = "a kite, first seen here"
    assert host.run(prompt).ok
    for changes, reads in (({"legs": "sequential"}, False), ({"precision": "bf16", "residency": "stream"}, False), ({"cache": "off"}, True)):
        loader.update(changes)
        got = parts_read(host.run(prompt))
        assert ("text encoder" in got) == ("connectors" in got) == reads and "transformer" in got, changes


def test_the_engine_of_a_checkpoint_that_was_switched_away_from_is_gone(tiny, host, api, find):
    files = TinyFiles.below(tiny)
    prompt = api("text_to_video_distilled_tiny")
    for file in (files.transformer, files.distilled, files.transformer, files.distilled):
        prompt[find(prompt, "LoadLTX25Checkpoint")]["inputs"]["transformer"] = file.name
        assert host.run(prompt).ok
    names = [entry["name"] for entry in models(host)]
    assert sorted(names) == sorted(set(names)), "weights of an engine that nobody can reach"


def test_free_between_prompts_leaves_a_server_that_works_with_and_without_cached_nodes(host, api, find):
    prompt = api("text_to_video_distilled_tiny")
    for seed, free_memory in ((501, True), (502, True), (503, False), (504, True)):
        prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = seed
        assert host.run(prompt, timeout=60).ok
        host.free(unload_models=True, free_memory=free_memory)
        assert emptied(host)
    assert "free_memory(1e30" not in host.log(), "the host's own unloading failed"


def test_streaming_from_a_prompt_gives_the_resident_clip(host, api, find, inspect):
    prompt = api("text_to_video_distilled_tiny")
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = 305
    seen = inspect(prompt, find(prompt, "LTX25Sampler"))
    resident = seen(host.run(prompt))
    prompt[find(prompt, "LoadLTX25Checkpoint")]["inputs"].update(residency="stream", cache="off")
    streamed = host.run(prompt)
    assert seen(streamed) == resident
    sizes = {entry["name"]: entry for entry in models(host)}
    assert all(entry["bytes"] <= entry["size"] for entry in sizes.values()) and "transformer" in sizes


@pytest.mark.parametrize("flags", [["--reserve-vram", "1", "--cache-classic"], ["--disable-smart-memory", "--cache-lru", "2"]])
def test_m5_memory_flags_of_the_host_start_and_render(tiny, host, api, find, inspect, flags):
    prompt = api("text_to_video_distilled_tiny")
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = 306
    seen = inspect(prompt, find(prompt, "LTX25Sampler"))
    wanted = seen(host.run(prompt))
    with start(tiny, args=flags) as other:
        assert seen(other.run(prompt)) == wanted
        other.free()
        assert emptied(other)
