"""Memory of whole phases: guards before them, smaller ways inside them, nothing behind them."""

import contextlib
import gc
import time
import weakref
from dataclasses import replace

import pytest
import torch
from comfyui_ltx25.ltx25 import engine as module
from comfyui_ltx25.ltx25 import fitting, residency, sizing
from comfyui_ltx25.ltx25.dit.block import Block
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.hdr import CURVES, SDR, to_linear
from comfyui_ltx25.ltx25.instrument import DeviceMeter, Sink, Watch
from comfyui_ltx25.ltx25.instrument.memory import host_now
from comfyui_ltx25.ltx25.optional import OptionalParts
from comfyui_ltx25.ltx25.parts import AUDIO_VAE, TEXT, TRANSFORMER, VIDEO_VAE
from comfyui_ltx25.ltx25.shapes import VideoLatentShape
from comfyui_ltx25.ltx25.working import decoding_bytes, frames_bytes
from comfyui_ltx25.tests.support.engine import CPU, engine, job
from comfyui_ltx25.tests.support.loras import tiny_lora
from comfyui_ltx25.tests.support.memory import living_tensors, peak_bytes_held
from comfyui_ltx25.tests.support.tiny import tiny_files

GB = 1 << 30


class Stop(BaseException):
    """Stands for the host's cancel."""


class Events:
    """A sink that keeps names of phases and notes."""

    wants_preview = False

    def __init__(self):
        self.opens, self.notes = [], []

    def check(self): ...
    def opened(self, phase):
        self.opens.append(phase)

    def ticked(self, phase): ...
    def closed(self, phase): ...
    def noted(self, event, text, facts):
        self.notes.append((event, text))


@pytest.fixture
def failing(monkeypatch):
    """failing(n, engine): the first n runs of the transformer run out of memory in their first step."""

    def make(times, engine):
        runs = []
        run = module.run

        def short(dit, plan, *rest, **more):
            runs.append((plan.batched, engine.opened.parts[TRANSFORMER].streams))
            if len(runs) <= times:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return run(dit, plan, *rest, **more)

        monkeypatch.setattr(module, "run", short)
        return runs

    return make


def test_out_of_memory_goes_on_in_the_next_smaller_way_and_says_so(failing):
    want = engine(legs="sequential").sample(job(engine()), Watch())
    small = engine()
    small.device = CPU
    ways = small._sizing.ways
    small._sizing.ways = lambda ready: [replace(ways(ready)[0], text="legs side by side", batched=True), *ways(ready)]
    runs, events = failing(3, small), Events()
    got = small.sample(job(small), Watch([events]))
    assert runs == [(True, False), (False, False), (True, True), (False, True)], "batched, one after the other, both again streamed"
    assert torch.equal(got.video, want.video) and torch.equal(got.audio, want.audio), "from the start again, with the same noise"
    assert [notice.split(" ran out")[0] for notice in got.notices] == ["transformer"] * 3
    assert "went on with legs one after the other." in got.notices[0] and all("all blocks streamed" in notice for notice in got.notices[1:])
    assert [event for event, _ in events.notes if event == "retry"] == ["retry"] * 3
    assert [phase.name for phase in events.opens].count("sample") == 4


class Failing(Sink):
    """Raises `error` once, and counts when the work begins again how many tensors of the first attempt live on.

    place: "load" (halfway) or "forward" (inside the second block).
    """

    def __init__(self, place, error, part, monkeypatch):
        self.part, self.phase, self.error = part, {"load": "load.read", "forward": "sample"}[place], error
        self.before, self.made, self.left = None, None, None
        if place == "forward":
            forward = Block.forward

            def failing(block, state, text, modulation, following, geometry, legs, number, lanes):
                if number == 1:
                    self.fail()
                return forward(block, state, text, modulation, following, geometry, legs, number, lanes)

            monkeypatch.setattr(Block, "forward", failing)

    def opened(self, phase):
        if phase.name == self.phase and self.made is not None and self.left is None:
            self.left = self.living()
        elif phase.name == self.phase and self.made is None:
            self.before = {id(tensor) for tensor in living_tensors()}

    def ticked(self, phase):
        if phase.name == self.phase == "load.read" and 2 * phase.done >= phase.total:
            self.fail()

    def fail(self):
        if self.made is None:
            slots = self.part._stack.slots if self.part.streams else ()
            apart = [slot.buffer for slot in slots if slot.buffer is not None] + [tensor for slot in slots if slot.content for tensor in slot.content.tensors()]
            apart = {tensor.untyped_storage().data_ptr() for tensor in apart}
            new = (tensor for tensor in living_tensors() if id(tensor) not in self.before)
            self.made = [weakref.ref(tensor) for tensor in new if tensor.untyped_storage().data_ptr() not in apart]  # blocks come and go there
            raise self.error("out of memory")

    def living(self):
        return sum(tensor() is not None for tensor in self.made)


@pytest.mark.parametrize("residency", ["auto", "stream"])
@pytest.mark.parametrize("place", ["load", "forward"])
def test_m7_nothing_of_an_attempt_that_ran_out_of_memory_is_alive_when_the_next_one_begins(place, residency, monkeypatch, uncollected):
    small = engine(residency=residency)
    ways = small._sizing.ways
    small._sizing.ways = lambda ready: [replace(ways(ready)[0], text="legs side by side", batched=True), *ways(ready)]
    sink = Failing(place, torch.OutOfMemoryError, small.opened.parts[TRANSFORMER], monkeypatch)
    got = small.sample(job(small), Watch([sink], DeviceMeter(CPU)))
    assert len(got.notices) == 1 and sink.made and sink.left == 0


@pytest.mark.parametrize("residency", ["auto", "stream"])
@pytest.mark.parametrize("place", ["load", "forward"])
def test_i3_nothing_of_a_cancelled_attempt_is_alive_behind_it(place, residency, monkeypatch, uncollected):
    small = engine(residency=residency)
    sink = Failing(place, Stop, small.opened.parts[TRANSFORMER], monkeypatch)
    with contextlib.suppress(Stop):
        small.sample(job(small), Watch([sink], DeviceMeter(CPU)))
    assert sink.made and sink.living() == 0


def test_m7_when_nothing_smaller_is_left_the_error_passes_with_numbers_and_the_next_prompt_works(failing, monkeypatch):
    small = engine()
    want = small.sample(job(small), Watch())
    runs = failing(99, small)
    with pytest.raises(torch.OutOfMemoryError, match=r"transformer ran out of memory even with .*all blocks streamed; .* can be had: make the clip smaller"):
        small.sample(job(small), Watch())
    assert len(runs) == 2 and not small.opened.parts[TRANSFORMER].held
    monkeypatch.undo()
    assert torch.equal(small.sample(job(small), Watch()).video, want.video)


def test_a_setting_that_was_asked_for_is_kept(failing):
    small = engine(legs="batched", residency="resident")
    runs = failing(99, small)
    with pytest.raises(torch.OutOfMemoryError, match="another setting than residency=resident and legs=batched"):
        small.sample(job(small), Watch())
    assert runs == [(True, False)]


def test_another_error_is_not_taken_for_a_lack_of_memory(monkeypatch):
    small = engine()

    def broken(*_, **__):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(module, "run", broken)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        small.sample(job(small), Watch())


def test_the_text_encoder_streams_when_it_ran_out_of_memory(monkeypatch):
    want = engine().encode("a lamp", Watch())
    small, runs = engine(), []
    encode = module.TextEncoder.encode

    def short(self, text, watch):
        runs.append(small.opened.parts[TEXT].streams)
        if len(runs) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(self, text, watch)

    monkeypatch.setattr(module.TextEncoder, "encode", short)
    got = small.encode("a lamp", Watch())
    assert runs == [False, True] and torch.equal(got.video, want.video)
    assert "ran out of memory" in got.told[0] and not small.encode("a lamp", Watch()).told, "told once"


def test_h3_what_cannot_fit_is_refused_before_anything_is_read(monkeypatch):
    small, events = engine(), Events()
    monkeypatch.setattr(residency, "device_free", lambda device: 1 << 20)
    with pytest.raises(InputError, match=r"transformer needs .* of host memory \(.* for weights, .* to work with .*\), and 1.0 MiB can be had; free"):
        small.sample(job(small), Watch([events]))
    assert not events.opens and not small.opened.parts[TRANSFORMER].held
    with pytest.raises(InputError, match="text encoder needs"):
        engine().encode("a lamp", Watch([events]))


def test_h3_on_a_card_the_host_needs_room_to_read(monkeypatch):
    part = engine().opened.parts[TRANSFORMER]
    part.device = torch.device("cuda")
    monkeypatch.setattr(fitting, "host_free", lambda: 200 << 20)
    with pytest.raises(InputError, match=r"Reading transformer needs 1.0 GiB of host memory for a while, and 200.0 MiB are free"):
        fitting.check_host(part)


def test_frames_that_the_host_cannot_hold_are_refused_and_the_latent_is_kept(monkeypatch):
    small = engine()
    latent = torch.zeros(1, small.opened.dit.in_channels, 3, 4, 4)
    monkeypatch.setattr(sizing.Sizing, "one_memory", False)
    monkeypatch.setattr(sizing, "host_free", lambda: 2 * 128 * 128 * 3 * 4)
    with pytest.raises(InputError, match=r"decoding 17 frames of 128 x 128 px needs 3.2 MiB of host memory, and 384.0 KiB are free; use at most 1 frame at this size.*; a latent that was made is kept."):
        small.decode_video(latent, 0, "auto", Watch())
    assert not any(part.held for part in small.parts)


def test_on_a_cpu_frames_decoder_and_its_work_share_one_memory(monkeypatch):
    small, events = engine(), Events()
    latent = torch.zeros(1, small.opened.dit.in_channels, 3, 4, 4)
    part = small.opened.parts[VIDEO_VAE]
    least = decoding_bytes(small.opened.video.decoder, VideoLatentShape(*latent.shape[1:]), 4, "cpu", 0)
    enough = frames_bytes(small.video_shape(latent), 1) + part.least + least
    want = small.decode_video(latent, 0, "auto", Watch())
    monkeypatch.setattr(residency, "device_free", lambda device: enough - 1 - part.held)
    with pytest.raises(InputError, match=r"decoding 17 frames of 128 x 128 px needs .* of host memory, and .* are free; use at most 9 frames"):
        small.decode_video(latent, 0, "auto", Watch([events]))
    assert not events.opens
    monkeypatch.setattr(residency, "device_free", lambda device: enough - part.held)
    assert (small.decode_video(latent, 0, "auto", Watch()) - want).abs().max() < 2e-6  # in smaller chunks


def wide(*shape):
    """A latent of any size that takes no memory: all its cells are one value."""
    return torch.zeros(1).expand(shape)


def test_h3_latents_that_cannot_be_sampled_are_refused_before_they_are_copied():
    small, events = engine(), Events()
    channels = small.opened.dit.in_channels
    for what in ({"video": wide(64, channels, 1025, 256, 256)}, {"audio": wide(1, 8, 10**11, 16), "video": None}):
        with pytest.raises(InputError, match=r"^sampling this latent needs .* of host memory, and .* are free; make the clip smaller or shorter, to about \d+ % of its size\.$"):
            small.sample(job(small, **what), Watch([events]))
    assert not events.opens


def test_h3_sound_that_memory_cannot_hold_is_refused_before_its_vae_is_read():
    small, events = engine(), Events()
    with pytest.raises(InputError, match=r"^decoding 40000000 s of sound needs .* of host memory, and .* are free; make the clip at most \d+ s long\.$"):
        small.decode_audio(wide(1, 8, 10**9, 16), None, Watch([events]))
    with pytest.raises(InputError, match="audio encoder needs .* make this sound smaller or shorter"):
        small.encode_audio(wide(1, 2, 10**12), 48000, Watch([events]))
    with pytest.raises(InputError, match="sample rate of -5 Hz, wanted 1 to"):  # not a word of memory
        small.encode_audio(wide(1, 2, 10**12), -5, Watch([events]))
    assert not events.opens


def test_h3_pictures_and_latents_too_large_to_encode_or_enlarge_are_refused():
    small, events = engine(), Events()
    with pytest.raises(InputError, match="video encoder needs .* make these pictures smaller or shorter"):
        small.encode_video(wide(9, 1 << 20, 1 << 20, 3), Watch([events]))
    with pytest.raises(InputError, match="needs .* make this latent smaller or shorter"):
        small.upscale(wide(1, small.opened.dit.in_channels, 1000, 1000, 1000), tiny_files().spatial_upscaler, Watch([events]))
    assert not events.opens


def test_h3_the_steps_of_a_request_are_held_against_memory_before_a_prompt_is_encoded(monkeypatch):
    small = engine()
    ready = small._prepare(job(small, frames=30))
    part = small.opened.parts[TRANSFORMER]
    fits = part.least + small._sizing.sampling(ready, False)
    monkeypatch.setattr(residency, "device_free", lambda device: fits)
    small.facts(job(small, frames=30))
    monkeypatch.setattr(residency, "device_free", lambda device: fits - 1)
    with pytest.raises(InputError, match=r"transformer needs .* and .* can be had; make the clip smaller or shorter, to about 80 % of its"):
        small.facts(job(small, frames=30))


def test_memory_that_runs_out_in_a_phase_of_one_way_ends_in_one_sentence(monkeypatch):
    """What a CPU's allocator raises is no OutOfMemoryError, and names no way out."""
    small = engine()

    def short(*_, **__):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nmore")

    monkeypatch.setattr(module, "decode_audio", short)
    with pytest.raises(torch.OutOfMemoryError, match=r"^audio VAE ran out of memory even with one clip's sound; .* can be had: close what else") as told:
        small.decode_audio(torch.zeros(1, 8, 9, 16), None, Watch())
    assert "\n" not in str(told.value) and not small.opened.parts[AUDIO_VAE].held
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_linear_light_is_decoded_by_float32_weights_wherever_it_runs(device):
    small = engine()
    part = OptionalParts(small.opened, torch.device(device)).wide_video_decoder()
    assert [piece.dtype for piece in part.pieces] == [torch.float32]
    assert (part is small.opened.parts[VIDEO_VAE]) == (device == "cpu")


def test_a_picture_is_the_same_to_the_bit_before_and_after_linear_light():
    """And the light is the curve of that picture: the two decodes differ in nothing else."""
    small = engine()
    latent = torch.randn(1, small.opened.dit.in_channels, 3, 2, 3, generator=torch.Generator().manual_seed(0))
    picture = small.decode_video(latent, 0, "auto", Watch())
    for curve in CURVES:
        assert torch.equal(small.decode_video(latent, 0, "auto", Watch(), curve), to_linear(picture, curve))
    assert torch.equal(small.decode_video(latent, 0, "auto", Watch(), SDR), picture)
    assert picture.min() >= 0 and picture.max() <= 1


def test_a_transfer_that_does_not_exist_is_refused_before_weights_are_read():
    small = engine()
    with pytest.raises(InputError, match="transfer 'pq' does not exist"):
        small.decode_video(torch.zeros(1, small.opened.dit.in_channels, 1, 2, 2), 0, "auto", Watch(), "pq")
    assert not any(part.held for part in small.parts)


def test_m4_the_estimate_grows_with_the_clip_and_says_what_fits(monkeypatch):
    small = engine(legs="sequential")
    sizes = [small._sizing.sampling(small._prepare(job(small, frames=frames)), False) for frames in (1, 2, 5, 30)]
    assert sizes == sorted(set(sizes))
    batched = [small._sizing.sampling(small._prepare(job(small, frames=frames)), True) for frames in (5, 30)]
    assert batched[1] - batched[0] > 2 * (sizes[3] - sizes[2])
    part = small.opened.parts[TRANSFORMER]
    monkeypatch.setattr(residency, "device_free", lambda device: part.least + sizes[-1] // 2 - part.held)
    part.device = small.device = torch.device("cpu", 0)
    with pytest.raises(InputError, match="transformer needs"):
        small.sample(job(small, frames=30), Watch())


@pytest.mark.parametrize("batched", [False, True])
def test_working_memory_of_a_step_stays_below_its_estimate(batched):
    """Per token: what does not grow with the clip is a device's own."""
    small = engine(legs="batched" if batched else "sequential")
    small.sample(job(small), Watch())
    measured, estimated = [], []
    for frames in (20, 80):
        one = job(small, frames=frames, steps=1)
        measured.append(peak_bytes_held(lambda one=one: [small.sample(one, Watch())]))
        estimated.append(small._sizing.sampling(small._prepare(one), batched))
    grown = (measured[1] - measured[0]) / (estimated[1] - estimated[0])
    assert 0.1 < grown < 1.3, grown


def test_m7_h6_twenty_mixed_prompts_do_not_grow_and_do_not_slow_down():
    """Sizes and prompts change, parts leave and come back; after the first round nothing is kept that was not before."""
    small = engine(cache="off")
    tensors, seconds, memory = [], [], []
    for number in range(20):
        frames = 1 + number % 3
        small.encode(f"prompt {number}", Watch())
        if number % 5 == 4:
            small.detach()
        started = time.process_time()  # of this process: others may be busy
        clip = small.sample(job(small, seed=number, frames=frames), Watch())
        seconds.append(time.process_time() - started)
        small.decode_video(clip.video, 0, "auto", Watch())
        if number % 4 == 0:
            small.decode_audio(clip.audio, None, Watch())
        del clip
        gc.collect()
        tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        memory.append(host_now() or 0)
    assert tensors[19] - tensors[4] <= 0.05 * tensors[4] + 20, tensors
    assert min(memory[16:]) - max(memory[5:9]) < 48 << 20, memory
    alike = [seconds[number] for number in range(20) if number % 3 == 1 and number % 5 != 4]
    half = len(alike) // 2  # the least of each half: whatever else runs here only adds
    assert min(alike[half:]) <= 1.5 * min(alike[:half]), seconds


def test_h5_a_second_stage_takes_what_its_size_takes_whatever_ran_before(tmp_path):
    """The same small denoise, alone in an engine and behind others: of another size, of a LoRA, of parts that came between."""

    def seconds(small):
        started = time.process_time()  # of this process: others may be busy
        small.sample(job(small, frames=4), Watch())
        return time.process_time() - started

    alone, used = engine(), engine()
    styled = used.with_loras([(tiny_lora(tmp_path / "style.safetensors"), 0.5)])
    for first in (used, styled):
        first.sample(job(first, frames=2), Watch())
        used.decode_video(first.sample(job(first, frames=3), Watch()).video, 0, "auto", Watch())
        used.encode(f"between {first is used}", Watch())
    turns = [(seconds(used), seconds(alone)) for _ in range(4)][1:]
    behind, fresh = (min(times) for times in zip(*turns, strict=True))
    assert behind < 1.5 * fresh  # the report's was 15 times


def test_h5_the_time_of_a_step_is_forgotten_when_weights_change_their_place():
    """A streamed step is slower: taken for a fast one it would be launched whole, and a cancel could not act inside it."""
    small = engine()
    small.sample(job(small), Watch())
    assert small._group_seconds
    small.opened.parts[TRANSFORMER].shrink(1)
    assert not small._group_seconds


def test_the_tokenizer_is_read_inside_a_phase():
    events = Events()
    engine().encode("a lamp", Watch([events]))
    names = [phase.name for phase in events.opens]
    assert names.count("text.tokenize") == 2 and names[0] == "text.tokenize" and events.opens[0].facts.get("reading")


@pytest.mark.parametrize("name,value", [("residency", "stream"), ("cache", "disk"), ("legs", "sequential")])
def test_options_that_work_are_open(name, value, tmp_path, monkeypatch):
    monkeypatch.setenv("LTX25_CACHE", str(tmp_path))
    small = engine(**{name: value})
    assert small.sample(job(small), Watch()).video.isfinite().all()
