"""Prompts kept in memory and on disk: right, bounded, and never in the way."""

import os
from dataclasses import replace

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import read_header, write_file
from comfyui_ltx25.ltx25.connector import Conditioning
from comfyui_ltx25.ltx25.engine import Engine, Options
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.parts import CONNECTORS, TEXT
from comfyui_ltx25.ltx25.prompt_cache import IN_MEMORY, PromptCache, PromptMemory, disk_limit, identity_of
from comfyui_ltx25.tests.support.engine import CPU, engine, files
from comfyui_ltx25.tests.support.quantised import read_all
from comfyui_ltx25.tests.support.tiny import tiny_files


def conditioning(seed=0, length=128, notices=("cut.",)):
    draw = torch.Generator().manual_seed(seed)
    return Conditioning(*(torch.randn(1, length, width, generator=draw).bfloat16().float() for width in (8, 4)), notices)


def same(a, b):
    return a is not None and torch.equal(a.video, b.video) and torch.equal(a.audio, b.audio) and a.notices == b.notices


def disk(folder, identity="me", limit=1 << 30):
    return PromptCache(None, folder, identity, limit, (8, 4))


def memory(identity="me", shared=None):
    return PromptCache(PromptMemory() if shared is None else shared, None, identity, 0, (8, 4))


def test_an_entry_comes_back_bit_for_bit_from_memory_and_from_disk(tmp_path):
    for cache in (memory(), disk(tmp_path)):
        assert cache.get("a") is None
        cache.put("a", conditioning())
        assert same(cache.get("a"), conditioning())
    exact = Conditioning(torch.full((1, 128, 8), 1 / 3), torch.zeros(1, 128, 4), ())
    disk(tmp_path).put("b", exact)
    assert same(disk(tmp_path).get("b"), exact), "what bf16 cannot hold is kept as float32"
    assert disk(tmp_path).get("a").video.dtype == torch.float32


def test_c4_an_entry_belongs_to_text_and_identity(tmp_path):
    cache = disk(tmp_path)
    cache.put("same length", conditioning(1))
    assert cache.get("other words") is None and cache.get("same length ") is None
    assert disk(tmp_path, "another encoder").get("same length") is None
    assert same(disk(tmp_path).get("same length"), conditioning(1))


def test_identity_covers_files_and_dtype(tmp_path):
    a, b = read_header(files().text_encoder), read_header(files().transformer)
    copy = tmp_path / a.name
    copy.write_bytes(a.path.read_bytes())
    os.utime(copy, ns=(a.mtime_ns, a.mtime_ns + 1))
    made = [identity_of(*arguments) for arguments in (([a, b], torch.float32), ([a, b], torch.bfloat16), ([b], torch.float32), ([read_header(copy), b], torch.float32), ([a, b], torch.float32, "lora"))]
    assert len(set(made)) == len(made)
    assert made[0] == identity_of([a, b], torch.float32)


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_c4_files_that_differ_in_their_weights_alone_do_not_share_prompts(cache, tmp_path, monkeypatch):
    """Dev and distilled: equal headers and sizes, and out of one archive equal dates. Their connectors differ."""
    monkeypatch.setenv("LTX25_CACHE", str(tmp_path / "cache"))
    shared, made = PromptMemory(), []
    for path in (tiny_files().transformer, tiny_files().distilled):
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes())
        os.utime(copy, (1e9, 1e9))
        made.append(Engine.open(replace(files(), transformer=copy), Options("auto", "auto", "auto", cache), CPU, shared).encode("a lamp", Watch()))
    assert not torch.equal(made[0].video, made[1].video)
    own = Engine.open(replace(files(), transformer=copy), Options("auto", "auto", "auto", "off"), CPU).encode("a lamp", Watch())
    assert torch.equal(made[1].video, own.video) and torch.equal(made[1].audio, own.audio)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_corrupt_entry_is_a_miss_and_goes(tmp_path, damage):
    disk(tmp_path).put("a", conditioning())
    (path,) = tmp_path.glob("*.safetensors")
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        raw = raw[:-3]
    elif damage == "flipped":
        raw[-5] ^= 1
    elif damage == "empty":
        raw = bytearray()
    else:
        raw = bytearray(files().audio_vae.read_bytes())
    path.write_bytes(raw)
    cache = disk(tmp_path)
    assert cache.get("a") is None and not path.exists()
    cache.put("a", conditioning())
    assert same(cache.get("a"), conditioning())


def test_the_folder_is_bounded_and_what_was_used_longest_ago_goes_first(tmp_path):
    disk(tmp_path).put("0", conditioning(0))
    (path,) = tmp_path.glob("*.safetensors")
    limit = int(3.5 * path.stat().st_size)
    cache = disk(tmp_path, limit=limit)
    for number in range(1, 3):
        cache.put(str(number), conditioning(number))
    for number, age in (("0", 30), ("1", 20), ("2", 10)):
        entry = cache._path(number)
        os.utime(entry, (1e9 - age, 1e9 - age))
    assert cache.get("0") is not None  # used now
    cache.put("3", conditioning(3))
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= limit
    assert [name for name in "0123" if cache.get(name) is not None] == ["0", "2", "3"]


def test_memory_is_bounded_for_all_that_share_it_and_what_was_used_longest_ago_goes_first():
    shared = PromptMemory()
    one, other = (memory(identity, shared) for identity in ("one", "other"))
    for number in range(IN_MEMORY):
        one.put(str(number), conditioning(0))
    assert one.get("0") is not None  # used now
    other.put("0", conditioning(1))
    assert len(shared) == IN_MEMORY and one.get("1") is None and one.get("0") is not None and same(other.get("0"), conditioning(1))


@pytest.mark.parametrize("cache", ["memory", "disk", "off"])
def test_c4_engines_of_the_same_encoders_share_prompts_whatever_else_differs(cache, tmp_path, monkeypatch):
    """Other legs, residency, precision: the text is the same. cache=off neither takes nor gives."""
    monkeypatch.setenv("LTX25_CACHE", str(tmp_path))
    shared = PromptMemory()
    made = Engine.open(files(), Options("auto", "auto", "auto", cache), CPU, shared).encode("a lamp", Watch())
    assert len(shared) == (cache != "off")
    for options in (Options("bf16", "stream", "sequential", "memory"), Options("auto", "resident", "batched", "off")):
        other = Engine.open(files(), options, CPU, shared)
        got = other.encode("a lamp", Watch())
        assert torch.equal(got.video, made.video) and torch.equal(got.audio, made.audio)
        assert other.opened.parts[TEXT].there == other.opened.parts[CONNECTORS].there == ("off" in (cache, options.cache))
    assert engine().encode("a lamp", Watch()).video is not made.video, "without a shared memory an engine has its own"


def test_a_disk_that_cannot_be_written_is_no_error(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache = PromptCache(PromptMemory(), blocked / "prompts", "me", 1 << 20, (8, 4))
    cache.put("a", conditioning())
    assert same(cache.get("a"), conditioning()) and "could not be kept" in caplog.text


def test_no_words_are_on_disk(tmp_path):
    disk(tmp_path).put("a very private sentence", conditioning())
    assert all(b"private" not in path.read_bytes() and "private" not in path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("notices", ["5", '"cut."', "{}", '["cut.", 5]', '[["cut."]]', "[" * 100_000, "x", None], ids=lambda text: str(text)[:12])
def test_an_entry_whose_notices_are_no_sentences_is_a_miss_and_goes(tmp_path, notices):
    disk(tmp_path).put("a", conditioning())
    (path,) = tmp_path.glob("*.safetensors")
    tensors, metadata = read_all(path)
    write_file(path, tensors, {key: value for key, value in {**metadata, "notices": notices}.items() if value is not None})
    assert disk(tmp_path).get("a") is None and not path.exists()


BAD = {
    "wider": Conditioning(torch.ones(1, 128, 9), torch.ones(1, 128, 4), ()), "of two": Conditioning(torch.ones(2, 128, 8), torch.ones(2, 128, 4), ()),
    "no whole registers": Conditioning(torch.ones(1, 120, 8), torch.ones(1, 120, 4), ()), "flat": Conditioning(torch.ones(8), torch.ones(4), ()),
    "unlike": Conditioning(torch.ones(1, 256, 8), torch.ones(1, 128, 4), ()), "empty": Conditioning(torch.ones(1, 0, 8), torch.ones(1, 0, 4), ()),
    "NaN": Conditioning(torch.ones(1, 128, 8), torch.full((1, 128, 4), torch.nan), ()),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_an_entry_that_no_encoder_of_this_model_gives_is_a_miss_and_goes_and_none_is_kept(tmp_path, what):
    cache = disk(tmp_path)
    path = cache._path("a")
    cache._write(path, BAD[what])  # whole, and of this text: only what it holds is wrong
    assert cache.get("a") is None and not path.exists()
    for kept in (cache, memory()):
        kept.put("a", BAD[what])
        assert kept.get("a") is None


@pytest.mark.parametrize("text", ["much", "inf", "1e400", "nan", "-1", "2 GB"])
def test_a_limit_that_is_no_size_is_refused(monkeypatch, text):
    monkeypatch.setenv("LTX25_CACHE_GB", text)
    with pytest.raises(InputError, match=f"LTX25_CACHE_GB is '{text}', wanted a number of GB"):
        engine(cache="disk")
    engine(cache="memory")  # has no use for it


def test_limit_of_the_folder(monkeypatch):
    for text, size in (("0.5", 500_000_000), ("0", 0), ("", 2_000_000_000)):
        monkeypatch.setenv("LTX25_CACHE_GB", text)
        assert disk_limit() == size
    monkeypatch.delenv("LTX25_CACHE_GB")
    assert disk_limit() == 2_000_000_000


def test_c3_an_encoder_is_not_loaded_for_a_prompt_another_process_encoded(tmp_path, monkeypatch):
    monkeypatch.setenv("LTX25_CACHE", str(tmp_path))
    first = engine(cache="disk")
    made = {text: first.encode(text, Watch()) for text in ("a lamp", "two lamps")}
    assert not torch.equal(made["a lamp"].video, made["two lamps"].video)
    second = engine(cache="disk")
    for text, want in made.items():
        got = second.encode(text, Watch())
        assert torch.equal(got.video, want.video) and torch.equal(got.audio, want.audio) and got.video.device.type == "cpu"
    assert not second.opened.parts[TEXT].loaded and not second.opened.parts[CONNECTORS].loaded
    assert engine(cache="off").encode("a lamp", Watch()).video.equal(made["a lamp"].video)
