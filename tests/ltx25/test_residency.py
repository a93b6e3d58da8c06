"""Parts that load, shrink and stream, and the arbiter that decides about them, with a pretended device."""

import re
import threading

import pytest
import torch
from comfyui_ltx25.ltx25 import host_spare, residency
from comfyui_ltx25.ltx25 import part as parts
from comfyui_ltx25.ltx25.checkpoint.read import _Readers
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.parts import AUDIO_VAE, CONNECTORS, TEXT, TRANSFORMER, VIDEO_VAE, open_parts
from comfyui_ltx25.ltx25.residency import Part, Standalone
from comfyui_ltx25.tests.support.engine import CPU, engine, files, job
from comfyui_ltx25.tests.support.memory import living_tensors


class Stop(BaseException):
    """Stands for the host's cancel."""


class Phases:
    """A sink that keeps what was told, and cancels after `most` ticks."""

    wants_preview = False

    def __init__(self, most=None):
        self.phases, self.ticks, self.most = [], 0, most

    def check(self):
        if self.most is not None and self.ticks >= self.most:
            raise Stop

    def opened(self, phase):
        self.phases.append(phase)

    def ticked(self, phase):
        self.ticks += 1

    def closed(self, phase): ...


@pytest.fixture
def opened():
    return open_parts(files(), CPU)


@pytest.fixture
def card(monkeypatch):
    """card(total, *parts): a device of so many bytes, of which the parts take what they hold."""

    def make(total, *held):
        monkeypatch.setattr(residency, "device_free", lambda device: total - sum(part.held for part in held))

    return make


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_what_a_part_says_it_holds_is_what_it_holds(opened):
    for part in opened.parts.values():
        part.load(Watch())
        held = sum(t.nbytes for piece in part.pieces for t in part[piece.name].state_dict().values())
        assert part.held == part.bytes == held, part.name


def test_a_streaming_part_holds_what_it_says(opened):
    part = opened.parts[TEXT]
    part.load(Watch(), part.least)
    with torch.inference_mode(), Watch().phase("text.tower") as phase:
        part["tower"](torch.tensor([2, 5, 7]), phase.tick)
    there = sum(t.nbytes for piece in part.pieces for t in part[piece.name].state_dict().values() if not t.is_meta)
    assert there + part._stack.slot_bytes <= part.held <= part.least < part.bytes


def test_loading_tells_bytes_and_speed_from_the_first_second_on_however_slow_the_disk_is(opened, monkeypatch):
    """The disk gives nothing until something was told."""
    told, waited, read = threading.Event(), [], _Readers._read

    class Told(Phases):
        def ticked(self, phase):
            told.set()
            self.text = phase.text

    def slow(self, piece):
        waited.append(told.wait(1.0))
        read(self, piece)

    monkeypatch.setattr(_Readers, "_read", slow)
    sink = Told()
    opened.parts[TRANSFORMER].load(Watch([sink]))
    assert all(waited)
    assert re.fullmatch(r"transformer (\d+\.\d\d)/\1 GB - \d+\.\d GB/s", sink.text), sink.text


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_whole_blocks_are_given_back_at_least_as_much_as_asked_for(opened, blocks):
    part, told = opened.parts[TRANSFORMER], []
    part.unloading.append(lambda: told.append("graphs"))
    part.load(Watch())
    before, one = weights(part["dit"]), part._block_bytes[0]
    assert part.shrink((blocks - 1) * one + 1) == blocks * one
    assert not part.loaded and part.held == part.bytes - blocks * one and told == ["graphs"]
    sink = Phases()
    part.load(Watch([sink]))
    (phase,) = sink.phases
    assert part.loaded and not part.streams and part.held == part.bytes
    assert phase.done == phase.total == sum(part._block_read[-blocks:]), "only what was given is read again"
    assert all(torch.equal(tensor, before[name]) for name, tensor in part["dit"].state_dict().items())


def test_more_than_all_blocks_cannot_be_given(opened):
    part = opened.parts[TRANSFORMER]
    assert part.shrink(1) == 0
    part.load(Watch())
    assert part.shrink(sum(part._block_bytes) + 1) == 0 and part.loaded
    assert opened.parts[VIDEO_VAE].shrink(1) == 0


@pytest.mark.parametrize(
    ("name", "budget", "most"), [(TRANSFORMER, "least", 3), (TRANSFORMER, "one", 3), (TRANSFORMER, "whole", 3), (TEXT, "least", 3), (VIDEO_VAE, "whole", 1)]
)
def test_i3_a_cancelled_load_leaves_nothing(opened, monkeypatch, name, budget, most):
    part, there = opened.parts[name], []
    size = {"least": part.least, "one": part.least + max(part._block_bytes, default=0), "whole": part.bytes}[budget]
    made = {id(tensor) for tensor in living_tensors()}
    monkeypatch.setattr(parts, "release", lambda device: there.append(sum(id(tensor) not in made for tensor in living_tensors())))
    with pytest.raises(Stop):
        part.load(Watch([Phases(most)]), size)
    assert there[-1] == 0, "memory goes back to the device when nothing is in it any more, whoever still handles the cancel"
    assert not part.loaded and part.held == 0 and not part.streams
    sink = Phases()
    part.load(Watch([sink]), size)
    assert part.loaded and part.held <= size
    assert all(phase.done == phase.total for phase in sink.phases), "all is read again, and told"


@pytest.mark.parametrize("first", ["whole", "stream"])
def test_a_load_of_another_form_behind_a_cancelled_one_counts_what_it_reads(opened, first):
    part, sink = opened.parts[TRANSFORMER], Phases()
    sizes = [part.bytes, part.least] if first == "whole" else [part.least, part.bytes]
    with pytest.raises(Stop):
        part.load(Watch([Phases(most=3)]), sizes[0])
    part.load(Watch([sink]), sizes[1])
    (phase,) = sink.phases
    assert phase.done == phase.total == part.read_bytes


def test_as_many_blocks_stay_as_the_budget_allows_and_never_more(opened):
    part, kept = opened.parts[TRANSFORMER], []
    for budget in range(part.least, part.bytes + 1, part._block_bytes[0] // 2):
        part.load(Watch(), budget)
        assert part.held <= budget
        kept.append(len(part._stack.kept))
        part.unload()
    assert kept == sorted(kept) and kept[0] == 0 and kept[-1] >= 1


def test_a_streaming_part_becomes_whole_when_there_is_room(opened):
    part = opened.parts[TRANSFORMER]
    part.load(Watch(), part.least)
    assert part.streams
    part.load(Watch(), part.bytes - 1)
    assert part.streams, "not for less"
    sink = Phases()
    part.load(Watch([sink]), part.bytes)
    assert not part.streams and part.held == part.bytes
    (phase,) = sink.phases
    assert (phase.name, phase.done, phase.total) == ("load.stage", *[sum(part._block_bytes)] * 2), "out of host memory, not the file"
    whole = open_parts(files(), CPU).parts[TRANSFORMER]
    whole.load(Watch())
    assert all(torch.equal(a, b) for a, b in zip(part["dit"].state_dict().values(), whole["dit"].state_dict().values(), strict=True))


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_part_that_rests_comes_back_without_reading_the_blocks_that_host_memory_holds(opened, blocks):
    part = opened.parts[TRANSFORMER]
    budget = part.least + blocks * part._block_bytes[0]
    part.load(Watch(), budget)
    part.rest()
    assert (part.held, part.loaded, part.streams, part.rests) == (0, False, False, True)
    sink = Phases()
    part.load(Watch([sink]), budget)
    (phase,) = sink.phases
    again = part.read_bytes - sum(read for block, read in enumerate(part._block_read) if block not in part._stack.kept)
    assert phase.name == "load.read" and phase.done == phase.total == again
    assert part.streams and not part.rests and len(part._stack.kept) == blocks
    part.rest()
    part.load(Watch())
    fresh = open_parts(files(), CPU).parts[TRANSFORMER]
    fresh.load(Watch())
    assert not part.streams and all(torch.equal(part["dit"].state_dict()[name], value) for name, value in weights(fresh["dit"]).items())
    part.rest()
    assert not part.rests and not part.held, "of a part that was whole nothing is in host memory"


def test_prompts_on_a_small_card_read_the_tower_once(opened, card, monkeypatch):
    """Tower and connectors do not fit together, and take turns for every prompt."""
    monkeypatch.setattr(residency, "evict", Part.rest)  # as on a card: the pretended one is host memory
    text, connectors = opened.parts[TEXT], opened.parts[CONNECTORS]
    arbiter, sink = Standalone((text, connectors)), Phases()
    for part in (text, connectors) * 2:
        card(part.least + 1000, text, connectors)
        arbiter.ready([part], 1000, Watch([sink]))
    reads = [phase.done for phase in sink.phases if phase.facts["part"] == TEXT]
    assert reads == [text.read_bytes, text.read_bytes - sum(text._block_read)] and not text.held and text.rests


@pytest.mark.parametrize("room", [True, False])
def test_a_resting_part_leaves_host_memory_to_one_that_is_about_to_stream(opened, monkeypatch, room):
    text, dit = opened.parts[TEXT], opened.parts[TRANSFORMER]
    text.load(Watch(), text.least)
    text.rest()
    monkeypatch.setattr(host_spare, "host_free", lambda: host_spare.HOST_SPARE + (dit.bytes if room else dit.bytes - 1))
    residency.make_host_room([dit], [text, dit])
    assert text.rests == room


def test_on_a_device_that_is_host_memory_an_evicted_part_keeps_nothing(opened):
    part = opened.parts[TRANSFORMER]
    part.load(Watch(), part.least)
    residency.evict(part)
    assert not part.held and not part.rests


def test_m2_blocks_are_parked_only_where_the_host_has_room_to_spare(opened, monkeypatch):
    part, blocks = opened.parts[TRANSFORMER], sum(opened.parts[TRANSFORMER]._block_bytes)
    wanted, more = host_spare.HOST_SPARE, host_spare.HOST_SPARE + (2 << 30)
    for asked, free, parked in ((0, wanted, 0), (0, wanted + blocks, 4), (more, wanted + blocks, 0), (more, more + blocks, 4), (wanted // 2, wanted, 0)):
        monkeypatch.setattr(host_spare, "_asked", [])
        host_spare.ask_host_spare(lambda: 0)  # the last one that asks counts
        host_spare.ask_host_spare(lambda asked=asked: asked)
        monkeypatch.setattr(host_spare, "host_free", lambda free=free: free)
        part.load(Watch(), part.least)
        assert len(part._stack.parked) == parked
        part.unload()
    monkeypatch.setattr(host_spare, "is_unified", lambda device: True)
    part.load(Watch(), part.least)
    assert not part._stack.parked, "where device and host are one memory a copy would gain nothing"


def test_the_largest_idle_part_leaves_first_and_only_when_it_must(opened, card):
    text, connectors, dit, vae = (opened.parts[name] for name in (TEXT, CONNECTORS, TRANSFORMER, VIDEO_VAE))
    arbiter = Standalone(tuple(opened.parts.values()))
    card(vae.bytes + dit.bytes + connectors.bytes + 1000, *opened.parts.values())
    for part in (connectors, vae, dit):
        arbiter.ready([part], 1000, Watch())
    assert connectors.loaded and vae.loaded and dit.loaded
    arbiter.ready([text], 0, Watch())
    assert text.loaded and not vae.loaded and dit.loaded and connectors.loaded


def test_m6_a_part_that_cannot_be_whole_streams_and_leaves_the_working_memory(opened, card):
    dit, vae = opened.parts[TRANSFORMER], opened.parts[VIDEO_VAE]
    arbiter = Standalone(tuple(opened.parts.values()))
    total = dit.least + dit._block_bytes[0] + 5000
    card(total, *opened.parts.values())
    arbiter.ready([dit], 5000, Watch())
    assert dit.streams and total - dit.held >= 5000 and len(dit._stack.kept) == 1
    assert arbiter.room(CPU) == total
    arbiter.ready([dit], 5000, Watch())
    assert len(dit._stack.kept) == 1, "ready again changes nothing"
    arbiter.ready([dit], 5000 + dit._block_bytes[0], Watch())
    assert dit.loaded and total - dit.held >= 5000 + dit._block_bytes[0], "a larger clip takes a block's room"
    card(dit.bytes + vae.bytes + 5000, *opened.parts.values())
    arbiter.ready([dit], 5000, Watch())
    assert not dit.streams


def test_m5_the_smallest_setting_renders_on_a_card_that_holds_little_more_than_two_blocks(card, monkeypatch):
    small = engine(legs="sequential")
    dit = small.opened.parts[TRANSFORMER]
    wanted = engine(legs="sequential").sample(job(small), Watch())
    working = small._sizing.sampling(small._prepare(job(small)), False)
    monkeypatch.setattr(residency, "device_free", lambda device: dit.least + working - sum(part.held for part in small.parts))
    got = small.sample(job(small), Watch())
    assert dit.streams and torch.equal(got.video, wanted.video) and torch.equal(got.audio, wanted.audio)


def test_a_part_used_while_away_is_a_mistake_told_by_name(opened):
    with pytest.raises(RuntimeError, match="part audio VAE is not loaded"):
        opened.parts[AUDIO_VAE]["decoder"]
