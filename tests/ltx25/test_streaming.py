"""Blocks that take turns give what a resident model gives, through a bounded number of slots, once per run of the stack."""

import gc
import threading
import time
import weakref

import pytest
import torch
from comfyui_ltx25.kernels.quantise import quantise_matrix
from comfyui_ltx25.ltx25 import content, host_spare, streaming
from comfyui_ltx25.ltx25.content import Content, pack_for, packed_bytes
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.instrument import Sink, Watch
from comfyui_ltx25.ltx25.linear import Linear, RowwiseE4M3
from comfyui_ltx25.ltx25.parts import TEXT, TRANSFORMER
from comfyui_ltx25.ltx25.streaming import SLOTS, BlockStack
from comfyui_ltx25.tests.support.engine import CPU, engine, job
from comfyui_ltx25.tests.support.loras import tiny_lora
from torch import nn

WEIGHTS = torch.Generator().manual_seed(3)


class Stop(BaseException):
    """Stands for the host's cancel."""


class Stack(nn.Module):
    """Six layers; `run` counts what of them holds numbers meanwhile."""

    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6))

    def forward(self, x, seen=None):
        for block in self.blocks:
            x = block(x)
            if seen is not None:
                seen.append([number for number, other in enumerate(self.blocks) if not other[0].weight.is_meta])
        return x


@pytest.fixture
def resident():
    return Stack()


@pytest.fixture
def made(resident):
    """(model, stack): a twin on meta whose blocks are read from `resident`."""
    with torch.device("meta"):
        model = Stack()
    reads, there, alive, slots = [], [], [], []

    def fill(number):
        reads.append(number)
        twin = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        twin.load_state_dict(resident.blocks[number].state_dict())
        there.append(weakref.ref(twin[0].weight))
        alive.append(sum(weight() is not None for weight in there))
        slots.append(stack.slot_bytes)
        return twin

    stack = BlockStack(model.blocks, CPU, (), fill, lambda: ())
    stack.reads, stack.alive, stack.held = reads, alive, slots
    yield model, stack
    stack.end()


@pytest.mark.parametrize("kept", [(), (0,), (1, 3, 5), (0, 1, 2, 3)])
@pytest.mark.parametrize("parked", [True, False], ids=["host memory", "file"])
@torch.inference_mode()
def test_m3_streamed_equals_resident_bit_for_bit_with_a_bounded_number_of_buffers(made, resident, kept, parked):
    model, stack = made
    for block in range(6):
        if block in kept:
            stack.fetch(block, back_up=False)
        elif parked:
            stack.park(block)
    stack.begin()
    x, seen = torch.randn(4, 8, generator=WEIGHTS), []
    for _ in range(3):
        assert torch.equal(model(x, seen), resident(x))
    turns = [block for block in range(6) if block not in kept]
    size = packed_bytes(Content.of(resident.blocks[0]))
    assert len(stack.slots) <= SLOTS and stack.slot_bytes <= SLOTS * size
    assert max(stack.alive) <= len(kept) + (1 if parked else SLOTS) and max(stack.held) <= (SLOTS - 1) * size, "none is made beside its slot"
    assert all(len(there) <= len(kept) + 1 for there in seen), "beside kept blocks only the running one holds numbers"
    if parked:
        assert stack.reads == sorted(stack.reads) and len(stack.reads) == 6, "the file is read once"
    else:
        runs = [block for block in stack.reads if block in turns]
        assert runs[: 3 * len(turns)] == turns * 3, "in order, each block once per run"
        assert len(runs) <= 3 * len(turns) + SLOTS


@torch.inference_mode()
def test_what_crossed_is_told_to_the_phase(made):
    model, stack = made
    for block in range(6):
        stack.park(block)
    stack.begin()
    watch = Watch()
    with watch.phase("sample") as phase, stack.during(watch, phase):
        model(torch.randn(4, 8))
        model(torch.randn(4, 8))
    size = packed_bytes(Content.of(Stack().blocks[0]))
    assert phase.facts["streamed_blocks"] == 12 and phase.facts["streamed_bytes"] == 12 * size and phase.facts["kept_blocks"] == 0
    assert 0 <= phase.facts["overlap"] <= 1 and phase.facts["copy_seconds"] >= 0


@torch.inference_mode()
def test_i3_a_cancel_acts_while_a_block_is_awaited_and_the_next_run_is_right(made, resident, monkeypatch):
    model, stack = made
    stack.begin()
    monkeypatch.setattr(streaming, "CHECK", 0.02)
    gate, fill = threading.Event(), stack._fill

    def slow(number):
        if number == 3:
            gate.wait(10)
        return fill(number)

    stack._fill = slow

    class Cancel:
        wants_preview = False

        def check(self):
            if 3 in [coming.block for coming in stack._coming] or stack._running is None and stack.reads[-1:] == [2]:
                gate.set()
                raise Stop

        def opened(self, phase): ...
        def closed(self, phase): ...
        def ticked(self, phase): ...

    x = torch.randn(4, 8, generator=WEIGHTS)
    watch = Watch()
    watch.sinks = (Cancel(),)
    with pytest.raises(Stop), stack.during(watch):
        model(x)
    gate.set()
    assert all(block[0].weight.is_meta for block in model.blocks)
    with stack.during(Watch()):
        assert torch.equal(model(x), resident(x))


@torch.inference_mode()
def test_i4_a_run_that_breaks_off_inside_a_block_leaves_the_next_one_right(made, resident):
    model, stack = made
    for block in range(6):
        stack.park(block)
    stack.begin()
    x = torch.randn(4, 8, generator=WEIGHTS)
    broken = model.blocks[2][1]
    breaking = broken.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Stop()))
    with pytest.raises(Stop):
        model(x)
    breaking.remove()
    assert torch.equal(model(x), resident(x))
    assert len(stack.slots) <= SLOTS


@torch.inference_mode()
def test_a_block_that_cannot_be_read_is_an_error_and_not_noise(made, resident):
    model, stack = made
    stack.begin()
    fill = stack._fill

    def gone(number):
        if number == 4:
            raise InputError("the file is gone")
        return fill(number)

    stack._fill = gone
    with pytest.raises(InputError, match="gone"):
        model(torch.randn(4, 8))
    stack._fill = fill
    x = torch.randn(4, 8, generator=WEIGHTS)
    assert torch.equal(model(x), resident(x))


def test_m8_streaming_without_blocks_is_an_error():
    with pytest.raises(InputError, match="without blocks"):
        BlockStack([], CPU, (), lambda number: None, lambda: ())


def test_weights_kept_as_stored_move_with_the_block():
    block = nn.Sequential(Linear(32, 16), Linear(16, 8, bias=False))
    for parameter in block.parameters():
        nn.init.normal_(parameter, generator=WEIGHTS)
    block[0].store(RowwiseE4M3(quantise_matrix(block[0].weight.detach())))
    held = Content.of(block)
    packed = pack_for(held, CPU)
    twin = nn.Sequential(Linear(32, 16), Linear(16, 8, bias=False))
    packed.content.put(twin)
    x = torch.randn(1, 3, 32, generator=WEIGHTS)
    assert torch.equal(block(x), twin(x)) and twin[0].quantised
    start, end = packed.buffer.data_ptr(), packed.buffer.data_ptr() + packed.buffer.numel()
    assert all(start <= tensor.data_ptr() <= end and tensor.data_ptr() % 16 == 0 for tensor in packed.content.tensors() if tensor.numel())
    packed.content.take_from(twin)
    assert twin[0].quantised and twin[1].weight.is_meta, "how a layer wants its input is known while it is away"


@pytest.mark.parametrize("how", ["stream", "partly", "file"])
def test_a_streamed_render_equals_a_resident_one_bit_for_bit(how, monkeypatch):
    whole, small = engine(residency="resident"), engine(residency="stream" if how == "stream" else "auto")
    text, dit = (small.opened.parts[name] for name in (TEXT, TRANSFORMER))
    if how == "file":
        monkeypatch.setattr(host_spare, "host_free", lambda: 0)
        monkeypatch.setattr("comfyui_ltx25.ltx25.fitting.host_free", lambda: None)
    if how != "stream":
        for part in (text, dit):
            load = part.load
            monkeypatch.setattr(part, "load", lambda watch, budget, part=part, load=load: load(watch, part.least + (0 if how == "file" else max(part._block_bytes))))
    a, b = whole.encode("a lamp", Watch()), small.encode("a lamp", Watch())
    assert torch.equal(a.video, b.video) and torch.equal(a.audio, b.audio) and text.streams
    for legs in ("batched", "sequential"):
        first, second = (one.sample(job(one), Watch()) for one in (_with(whole, legs), _with(small, legs)))
        assert torch.equal(first.video, second.video) and torch.equal(first.audio, second.audio), legs
        assert first.legs == second.legs
    assert dit.streams and len(dit._stack.kept) == (1 if how == "partly" else 0)
    assert len(dit._stack.parked) == (0 if how == "file" else 4 - len(dit._stack.kept))
    assert dit.held <= dit.least + (max(dit._block_bytes) if how == "partly" else 0)


def test_host_memory_that_ends_while_blocks_are_parked_costs_a_note_and_not_the_render(monkeypatch, caplog):
    whole, small, asked, phases, notes = engine(residency="resident"), engine(residency="stream"), [], [], []

    def short(size):
        asked.append(size)
        return None if len(asked) > 2 else torch.empty(size, dtype=torch.uint8)

    class Told(Sink):
        def opened(self, phase):
            phases.append(phase)

        def noted(self, event, text, facts):
            notes.append((event, text))

    monkeypatch.setattr(content, "host_memory", short)
    got, wanted = small.sample(job(small), Watch([Told()])), whole.sample(job(whole), Watch())
    assert torch.equal(got.video, wanted.video) and torch.equal(got.audio, wanted.audio)
    assert small.opened.parts[TRANSFORMER]._stack.parked == {0, 1} and len(asked) == 3, "not asked again for each block"
    load = phases[0]
    assert load.name == "load.read" and load.done == load.total and load.facts["source"] == "file, 2 of 4 blocks from host memory"
    said = [text for event, text in notes if event == "parking"]
    assert said == caplog.messages and len(said) == 1 and said[0].startswith("transformer: host memory ran out, and 2 blocks are read from the file")


def test_each_block_crosses_once_per_step_whatever_the_legs():
    small, phases = engine(residency="stream", legs="sequential"), []

    class Sink:
        wants_preview = False

        def check(self): ...
        def opened(self, phase): ...
        def ticked(self, phase): ...
        def closed(self, phase):
            phases.append(phase)

    small.sample(job(small, steps=3), Watch([Sink()]))
    facts = next(phase.facts for phase in phases if phase.name == "sample")
    assert facts["residency"] == "stream" and facts["forwards"] == 12
    assert facts["streamed_blocks"] == 3 * small.blocks


def test_a_dropped_engine_takes_its_stream_along():
    small = engine(residency="stream")
    small.sample(job(small), Watch())
    block = weakref.ref(small.opened.parts[TRANSFORMER]["dit"].transformer_blocks[0])
    stack = weakref.ref(small.opened.parts[TRANSFORMER]._stack)
    gc.disable()
    try:
        del small
        until = time.monotonic() + 10  # the thread that brought the last block lets go of it when its turn comes
        while stack() is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert stack() is None and block() is None
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 4, 56], ids=["plain", "lora", "lora with zeros behind its rows"])
@pytest.mark.parametrize("how", ["host memory", "file"])
def test_streamed_equals_resident_on_a_card_whatever_the_lanes_and_however_often(how, rank, monkeypatch, tmp_path):
    """Copies, both lanes, factors of LoRAs and the blocks of the next step overlap: one wait too few and some run differs."""
    cuda = torch.device("cuda")
    told = [(tiny_lora(tmp_path / "style.safetensors", rank), 0.5)] if rank else []
    whole = engine(device=cuda, residency="resident").with_loras(told)
    if how == "file":
        monkeypatch.setattr(host_spare, "host_free", lambda: 0)
        monkeypatch.setattr("comfyui_ltx25.ltx25.fitting.host_free", lambda: None)
    small = engine(device=cuda, residency="stream").with_loras(told)
    wanted, text = whole.sample(job(whole, frames=12, steps=6), Watch()), whole.encode("a lamp", Watch())
    for _ in range(10):
        got = small.sample(job(small, frames=12, steps=6), Watch())
        assert torch.equal(got.video, wanted.video) and torch.equal(got.audio, wanted.audio)
    assert torch.equal(small.encode("a lamp", Watch()).video, text.video)
    dit = small.opened.parts[TRANSFORMER]
    assert dit.streams and bool(dit._stack.parked) == (how == "host memory")
    assert all(packed.buffer.is_pinned() for packed in dit._stack._parked.values())
    small.detach(), whole.detach()
    torch._C._cuda_clearCublasWorkspaces()  # 32 MiB a stream, the process's and not the engine's; no graph is left that reads them
    assert torch.cuda.memory_allocated() < 64 << 20


def _with(engine, legs):
    engine.options = type(engine.options)(engine.options.precision, engine.options.residency, legs, engine.options.cache)
    return engine
