"""Blocks that take turns on the device: a stack of layers of which some stay there and the others come when their turn is.

The model's code does not know: hooks around each block put its weights in place before it runs and take them away after
it. Weights come from a pinned copy in host memory, or, where the host has no room for one, from the file each time. Copies
are of what the file holds: what changes weights (a LoRA) does so in the slot, each time, and may be exchanged for another
while the copies stay. Weights go through a few slots: while one block runs, the next one is on its way, on a stream and a thread of their own. A run goes
through the stack in order, over and over, so after the last block the first one is fetched again. Every block crosses once
per run of the stack, whatever is computed in it, and the numbers are those of a resident model: the same kernels read the
same bytes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from .content import Content, Packed, pack_for, packed_bytes
from .device import Mark, copied
from .errors import InputError
from .instrument import Phase, Watch

SLOTS = 2  # one block runs, one comes: more would hold memory and hide nothing
CHECK = 0.1  # s between looks for a cancel while a block is awaited

Needs = Callable[[int, Content], object]
Change = Callable[[int, Content, object], tuple[Content, int]]


def _nothing(block: int, content: Content) -> None:
    return None


def _unchanged(block: int, content: Content, needed: object) -> tuple[Content, int]:
    return content, 0


@dataclass(eq=False)
class _Slot:
    """Device memory of one block, and what may still read it.

    buffer: what a block comes into from host memory. content: a block out of its file, in the memory that reading it took.
    """

    buffer: torch.Tensor | None = None
    content: Content | None = None
    read: tuple[Mark, ...] = ()

    @property
    def bytes(self) -> int:
        return (0 if self.buffer is None else self.buffer.nbytes) + (0 if self.content is None else packed_bytes(self.content))


@dataclass(eq=False)
class _Coming:
    """A block on its way into a slot."""

    block: int
    slot: _Slot
    arrival: Future[_Arrival]


@dataclass(frozen=True)
class _Arrival:
    content: Content
    begun: Mark
    ready: Mark
    bytes: int


@dataclass
class _Log:
    """What crossed during one phase. waits: (asked for, ready) of each block."""

    bytes: int = 0
    copies: list[tuple[Mark, Mark]] = field(default_factory=list)
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)


class BlockStack:
    """The blocks of one module, in the order they run. A block is kept on the device, parked in host memory, or in its file."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        device: torch.device,
        stay: Sequence[str],
        fill: Callable[[int], nn.Module],
        lanes: Callable[[], Sequence[torch.cuda.Stream]],
        needs: Needs = _nothing,
        change: Change = _unchanged,
        beside: Callable[[int], int] = lambda block: 0,
        parked: Mapping[int, Packed] = MappingProxyType({}),
    ) -> None:
        """stay: patterns of parameters of `blocks` that never leave the device and are filled elsewhere.

        fill(i): read block i onto the device, in any thread, on its current stream: a module like block i that holds it.
        lanes(): the streams blocks run on beside the current one. needs(i, content): what the change of block i, which holds
        tensors as `content` does, wants to have on the device; called as `fill` is, before the block comes. change(i, content, needed):
        what block i runs with, made of its content on the device, which may be written to, and the bytes that had to come for
        it; called as `fill` is, but where something was needed on another stream, which that has to outlive.
        beside(i): the most bytes that such a change adds to what is in the slot. parked: blocks that host memory holds.
        Raises InputError when there is nothing to stream.
        """
        if not blocks:
            raise InputError("residency 'stream' was asked for a model without blocks, which has nothing to stream; choose residency resident.")
        self.device = device
        self.slots: list[_Slot] = []
        self._blocks = tuple(blocks)
        self._stay = tuple(stay)
        self._fill = fill
        self._lanes = lanes
        self._needs = needs
        self._change = change
        self._beside = beside
        self._kept: set[int] = set()
        self._parked = dict(parked)
        self._order: list[int] = []  # blocks that take turns
        self._coming: deque[_Coming] = deque()
        self._free: deque[_Slot] = deque()
        self._running: tuple[_Slot, Content, int] | None = None
        self._next = 0  # in _order: what is fetched next
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None  # of copies
        self._changing: torch.cuda.Stream | None = None  # of what is done to a block that came: the next one comes meanwhile
        self._watch: Watch | None = None  # while blocks run for someone
        self._log = _Log()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def kept(self) -> frozenset[int]:
        """Blocks whose weights are on the device now, apart from slots."""
        return frozenset(self._kept)

    @property
    def parked(self) -> frozenset[int]:
        return frozenset(self._parked)

    def parked_blocks(self) -> dict[int, Packed]:
        """Their contents as the file has them, for a stack of the same blocks."""
        return dict(self._parked)

    @property
    def streams(self) -> bool:
        """Whether blocks take turns."""
        return bool(self._hooks)

    @property
    def slot_bytes(self) -> int:
        return sum(slot.bytes for slot in self.slots)

    # Where blocks are

    def keep(self, blocks: Iterable[int]) -> None:
        """These were filled on the device, and stay there."""
        self._kept.update(blocks)

    def fetch(self, block: int, back_up: bool) -> None:
        """Bring a block to the device, from the host if it is parked there, and keep it.

        back_up: a copy of it stays parked, or is, where the host has memory for one.
        """
        parked = self._parked.get(block)
        if parked is None:
            content = self._filled(block)
            if back_up:
                self._pack(block, content)
        else:
            buffer = torch.empty(parked.buffer.numel(), dtype=torch.uint8, device=self.device)
            content = parked.content.placed(copied(parked.buffer, buffer))
            if not back_up:
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()  # the host copy goes now
                del self._parked[block]
        content, _ = self._change(block, content, self._needs(block, content))
        content.put(self._blocks[block])
        self._kept.add(block)

    def back_up(self, block: int) -> None:
        """Park a copy of a block that is on the device and stays there, unchanged so far, where the host has memory for it."""
        self._pack(block, Content.of(self._blocks[block], self._stay))

    def parked_parameter(self, block: int, name: str) -> torch.Tensor | None:
        """A dense parameter of a block as its file has it, in host memory; None where that holds none."""
        return self._parked[block].content.parameters().get(name) if block in self._parked else None

    def park(self, block: int) -> bool:
        """Put a block that is not on the device into host memory. False: the host has none left, and the block stays in its file."""
        content = self._filled(block)
        content.take_from(self._blocks[block])
        return self._pack(block, content)

    def _pack(self, block: int, content: Content) -> bool:
        packed = pack_for(content, self.device)
        if packed is not None:
            self._parked[block] = packed
        return packed is not None

    def drop(self, block: int) -> None:
        """Forget the weights of a block that is on the device; its file has them."""
        Content.of(self._blocks[block], self._stay).take_from(self._blocks[block])
        self._kept.discard(block)

    def _filled(self, block: int) -> Content:
        return Content.of(self._fill(block), self._stay)

    # Taking turns

    def begin(self) -> None:
        """From here on blocks that are not kept come by turns."""
        self._order = [block for block in range(len(self)) if block not in self._kept]
        self.slots = [_Slot() for _ in range(min(SLOTS, len(self._order)))]
        self._free = deque(self.slots)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ltx25-stream")
        if self.device.type == "cuda":
            self._stream, self._changing = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        stack = weakref.ref(self)  # a hook that held it would be a cycle through all weights
        for number in self._order:
            block = self._blocks[number]
            self._hooks.append(block.register_forward_pre_hook(partial(_enter, stack, number), prepend=True))
            self._hooks.append(block.register_forward_hook(partial(_leave, stack)))

    def end(self) -> None:
        """Slots and hooks go; blocks stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._release()
        self._recall()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._stream is not None:
            torch.cuda.synchronize(self.device)  # slots may still be read or written
            self._stream = self._changing = None
        self.slots, self._free = [], deque()

    @contextlib.contextmanager
    def during(self, watch: Watch, phase: Phase | None = None) -> Iterator[None]:
        """While blocks run: a cancel acts while one is awaited, and in the end `phase` learns what crossed; None: a note does.

        Facts: streamed_bytes, streamed_blocks, kept_blocks, copy_seconds, stalled_seconds (blocks ready later than they were
        asked for) and overlap, the share of copying that was hidden.
        """
        self._watch, self._log = watch, _Log()
        try:
            yield
        finally:
            self._watch = None
            self._release()
            facts = self._facts()
            if phase is not None:
                phase.facts.update(facts)
            else:
                watch.note("stream", f"{self._log.bytes / 1e9:.1f} GB of {len(self)} blocks streamed", **facts)

    def enter(self, block: int) -> None:
        """Put the weights of `block` in place, and wait, on the device, until they are there."""
        self._release()  # nothing to do unless the last run ended inside a block
        if not self._coming or self._coming[0].block != block:
            self._recall()  # a run that broke off, or the first
            self._next = self._order.index(block)
            self._ahead()
        asked = Mark(self.device)
        coming = self._coming.popleft()
        try:
            while not wait([coming.arrival], CHECK).done:
                if self._watch is not None:
                    self._watch.check()
            arrival = coming.arrival.result()
        except BaseException:
            self._coming.appendleft(coming)  # `_recall` waits for it
            self._recall()
            raise
        for stream in self._streams():
            arrival.ready.before(stream)
        arrival.content.put(self._blocks[block])
        self._running = (coming.slot, arrival.content, block)
        self._log.bytes += arrival.bytes
        self._log.waits.append((asked, arrival.ready))
        self._log.copies.append((arrival.begun, arrival.ready))
        if self._watch is not None and self._watch.current is not None and self.device.type != "cpu":
            self._watch.current.moved(h2d=arrival.bytes)

    def leave(self) -> None:
        """The block that ran last is queued to its end: its slot is free from there on."""
        self._release()
        self._ahead()

    def _release(self) -> None:
        if self._running is None:
            return
        slot, content, block = self._running
        self._running = None
        content.take_from(self._blocks[block])
        slot.read = tuple(self._mark(stream) for stream in self._streams()) if self._stream is not None else ()
        self._free.append(slot)

    def _ahead(self) -> None:
        """Let the next blocks come into what is free."""
        while self._free and len(self._coming) < len(self._order):
            block = self._order[self._next]
            self._next = (self._next + 1) % len(self._order)
            slot = self._free.popleft()
            self._coming.append(_Coming(block, slot, self._thread.submit(self._bring, block, slot)))

    def _recall(self) -> None:
        """Wait for what is on its way, and forget it."""
        for coming in self._coming:
            wait([coming.arrival])
            self._free.append(coming.slot)
        self._coming.clear()

    def _bring(self, block: int, slot: _Slot) -> _Arrival:
        """In the stack's own thread: queue one block's way into `slot` behind the last reader of that."""
        where = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), where:
            for mark in slot.read:
                mark.before(self._stream)
            begun = Mark(self.device)
            parked = self._parked.get(block)
            slot.content = None  # all of this stream's memory: what takes its place is written behind its readers
            if parked is None:
                slot.buffer = None  # or there would be a third block while this one is read
                content = self._filled(block)
                content, came = self._change(block, content, self._needs(block, content))
                slot.content, size = content, packed_bytes(content)
                ready = Mark(self.device)
            else:
                size = parked.buffer.numel()
                memory = self._memory(slot, size + self._beside(block))
                needed = self._needs(block, parked.content)  # first, so that the change begins when the block is there: behind it, this would wait for the next one
                content = parked.content.placed(copied(parked.buffer, memory[:size]))
                content, came, ready = self._changed(block, content, needed, memory, size)
                size += came
            slot.read = (ready,)  # should nobody run it: what comes next is written behind its change
            return _Arrival(content, begun, ready, size)

    def _changed(self, block: int, content: Content, needed: object, memory: torch.Tensor, used: int) -> tuple[Content, int, Mark]:
        """What `block` runs with, in `memory` whose first `used` bytes hold what came; the bytes that had to come besides; when it is ready."""
        where: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._changing is not None and needed is not None:
            Mark(self.device).before(self._changing)
            where = torch.cuda.stream(self._changing)
        with where:
            content, came = self._change(block, content, needed)
            return content.gathered(memory, used), came, Mark(self.device)

    def _memory(self, slot: _Slot, size: int) -> torch.Tensor:
        if slot.buffer is None or slot.buffer.numel() < size:
            for mark in slot.read:
                mark.wait()
            slot.buffer = None
            slot.buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        return slot.buffer[:size]

    def _streams(self) -> list[torch.cuda.Stream]:
        return [] if self._stream is None else [torch.cuda.current_stream(self.device), *self._lanes()]

    def _mark(self, stream: torch.cuda.Stream) -> Mark:
        with torch.cuda.stream(stream):
            return Mark(self.device)

    def _facts(self) -> dict[str, object]:
        facts: dict[str, object] = {"streamed_bytes": self._log.bytes, "streamed_blocks": len(self._log.waits), "kept_blocks": len(self._kept)}
        marks = [mark for pair in (*self._log.copies, *self._log.waits) for mark in pair]
        if marks and all(mark.done() for mark in marks):
            copying = sum(ready.seconds_since(begun) for begun, ready in self._log.copies)
            stalled = sum(max(0.0, ready.seconds_since(asked)) for asked, ready in self._log.waits)
            facts |= {"copy_seconds": round(copying, 4), "stalled_seconds": round(stalled, 4)}
            facts["overlap"] = round(max(0.0, 1 - stalled / copying), 3) if copying else 1.0
        return facts


def _enter(stack: weakref.ref[BlockStack], number: int, *_: object) -> None:
    stack().enter(number)


def _leave(stack: weakref.ref[BlockStack], *_: object) -> None:
    stack().leave()
