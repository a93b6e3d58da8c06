"""Parts of an engine: modules that one phase needs together, and where their weights are.

A part is loaded whole, or, where it has a stack of blocks and the device has no room for all of them, with as many blocks
on the device as fit and the others taking turns (streaming.py). A part that has to give memory back gives whole blocks.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase

import torch
from torch import nn

from ..kernels.quantise import matrix_workspace
from .checkpoint import check, decode, fill, held_bytes, read_tensors, stored_parameters
from .content import ALIGNED, Packed
from .device import release
from .host_spare import host_has_room
from .instrument import Phase, Watch
from .linear import announce_e4m3, e4m3_bytes
from .piece import BlocksFile, Changes, Piece, block_prefix
from .streaming import SLOTS, BlockStack

log = logging.getLogger(__name__)


class Part:
    """A loadable group of modules, at most one of which has blocks that may be streamed.

    bytes: what it holds on the device when all of it is there; least: when its blocks take turns, slots included.
    making: what it takes beside that while it is loaded, where blocks are rounded one after the other.
    read_bytes: of its files. residency: "resident" never streams, "stream" keeps no block, "auto" keeps what fits.
    adapter: changes what is filled; None: nothing does.
    """

    def __init__(self, name: str, pieces: Sequence[Piece], device: torch.device, residency: str = "auto") -> None:
        """Builds on meta and checks names and shapes against the files; raises FileError. Reads no weights."""
        self.name = name
        self.device = device
        self.pieces = tuple(pieces)
        self.residency = residency
        self.adapter: Changes | None = None
        self.unloading: list[Callable[[], None]] = []  # called before weights go: who built on their addresses
        self.bytes = 0
        self.making = 0
        self.read_bytes = 0
        self._block_bytes: tuple[int, ...] = ()
        self._block_read: tuple[int, ...] = ()
        self._slots_bytes = 0
        self._stored: set[str] = set()  # parameters that are not dense once filled
        self._beside: tuple[int, ...] = ()  # bytes that stand beside a block in its slot
        self._altered: frozenset[int] = frozenset()  # blocks of which dense parameters are changed
        self._bare: tuple[int, tuple[int, ...], tuple[int, ...]]  # bytes, of blocks, of their slots, with nothing beside them
        self._modules: dict[str, nn.Module] = {}
        self._stack: BlockStack | None = None
        self._blocks_file: BlocksFile | None = None
        self._resting: dict[int, Packed] = {}  # blocks in host memory of a part that left the device
        self._loaded = False
        slots: tuple[int, ...] = ()
        for piece in self.pieces:
            module = piece.on_meta()
            places = check(module, piece.header, piece.prefix, piece.unused)
            self.read_bytes += sum(map(piece.header.bytes_of, places))
            self.bytes += held_bytes(module, piece.header, places, piece.dtype, piece.held)
            self._stored |= stored_parameters(module, piece.header, places, piece.held)
            if piece.blocks is not None:
                slots = self._measure(piece, module)
        self._bare = self.bytes, self._block_bytes, slots
        self.carry({})

    def carry(self, beside: Mapping[str, Sequence[int]], passing: int = 0) -> None:
        """Count what stands beside stored weights: parameter -> bytes of tensors. Dense ones take in what would stand there.

        passing: bytes on the device while a block in its slot is changed.
        """
        whole, blocks, slots = self._bare
        own, room = list(blocks), list(slots)
        self._altered = frozenset(self.block_of(name) for name in beside.keys() - self._stored) - {None}
        for name in self._stored & beside.keys():
            sizes, number = beside[name], self.block_of(name)
            whole += sum(sizes)
            if number is not None:
                own[number] += sum(sizes)
                room[number] += sum(sizes) + ALIGNED * len(sizes)
        self.bytes, self._block_bytes = whole, tuple(own)
        self._beside = tuple(with_it - bare for with_it, bare in zip(room, slots, strict=True))
        rounding = max(0, self.making - max(room, default=0))  # of a block out of its file, while another one runs
        self._slots_bytes = min(SLOTS, len(room)) * max(room, default=0) + max(passing, rounding)

    def block_of(self, name: str) -> int | None:
        """Which block a parameter of the part's blocks belongs to."""
        for piece in self.pieces:
            lead = None if piece.blocks is None else f"{piece.blocks.path}."
            if lead and name.startswith(lead):
                return int(name.removeprefix(lead).split(".", 1)[0])
        return None

    @property
    def loaded(self) -> bool:
        """Whether a phase may use it now."""
        return self._loaded

    @property
    def streams(self) -> bool:
        """Whether blocks take turns on the device."""
        return self._stack is not None and self._stack.streams

    @property
    def least(self) -> int:
        """Bytes on the device of the smallest form its residency allows."""
        if self.residency == "resident" or not self._block_bytes:
            return self.bytes
        return self.bytes - sum(self._block_bytes) + self._slots_bytes

    @property
    def wanted(self) -> int:
        """Bytes on the device of the largest form its residency allows."""
        return self.least if self.residency == "stream" else self.bytes

    @property
    def held(self) -> int:
        """Bytes on the device now."""
        if not self._modules:
            return 0
        if self._stack is None:
            return self.bytes
        away = sum(size for block, size in enumerate(self._block_bytes) if block not in self._stack.kept)
        return self.bytes - away + (max(self._slots_bytes, self._stack.slot_bytes) if self.streams else 0)

    def __getitem__(self, name: str) -> nn.Module:
        """A module of a loaded part."""
        if not self._loaded:
            raise RuntimeError(f"part {self.name} is not loaded; the arbiter must make it ready first")
        return self._modules[name]

    @property
    def there(self) -> bool:
        """Whether any of it is on the device."""
        return bool(self._modules)

    @property
    def whole(self) -> bool:
        """Whether all of it is on the device, and no block in a slot."""
        return self.there and (self._stack is None or len(self._stack.kept) == len(self._stack))

    def holds(self, name: str) -> bool:
        """Whether the parameter `name` of the module with blocks is on the device and not in a slot."""
        block = self.block_of(name)
        return block is None or block in self._stack.kept

    def parked(self, name: str) -> torch.Tensor | None:
        """A dense parameter of a block as its file has it, where host memory holds that."""
        block = self.block_of(name)
        return None if block is None else self._stack.parked_parameter(block, name.split(f".{block}.", 1)[1])

    def standing(self, name: str) -> nn.Module:
        """A module whose blocks take no turns until the part is loaded again, to be changed where it is."""
        if self.streams:
            self._stack.end()
            self._loaded = False
        return self._modules[name]

    def back_up(self) -> None:
        """Keep copies in host memory, where that has room, of blocks on the device that are about to be changed."""
        for block in sorted(self._altered & self._stack.kept - self._stack.parked):
            if host_has_room(self._block_bytes[block], self.device):
                self._stack.back_up(block)

    def load(self, watch: Watch, budget: int | None = None) -> None:
        """Read the weights onto the device, at most `budget` bytes of them where that is possible; None: all.

        A part that is loaded stays as it is, unless it streams and now fits whole. A cancel or error inside leaves the part
        unloaded and its memory free.
        """
        kept = self._fitting(budget)
        if self._loaded and not (self.streams and kept == len(self._block_bytes)):
            return
        try:
            if self._modules or self._resting or kept < len(self._block_bytes) or self.making:  # block by block, what is rounded fits where all of it would not
                self._load_blocks(kept, watch)
            else:
                self._load_whole(watch)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold what was read for as long as someone handles the error
            self.unload()
            release(self.device)
            raise
        self._loaded = True

    def shrink(self, size: int) -> int:
        """Take at least `size` bytes of blocks off the device and return how many, or return 0 where that cannot be.

        The part is to be loaded again before its next use, which then reads what is missing, or lets blocks take turns.
        """
        kept = [] if self._stack is None or self.residency == "resident" else sorted(self._stack.kept)
        going = []
        while kept and sum(self._block_bytes[block] for block in going) < size:
            going.append(kept.pop())
        freed = sum(self._block_bytes[block] for block in going)
        if freed < size:
            return 0
        self.forget()
        self._stack.end()
        for block in going:
            self._stack.drop(block)
        self._loaded = False
        release(self.device)
        return freed

    def forget(self) -> None:
        """Have everything dropped that was built on the weights, and what was kept to change them."""
        self.moved()
        if self.adapter is not None:
            self.adapter.forget()

    def moved(self) -> None:
        """Have everything dropped that was built on the addresses of the weights."""
        for forget in self.unloading:
            forget()

    def unload(self) -> None:
        """Drop the weights; device memory returns to the allocator and from there to the device."""
        self._resting = {}
        self._leave()
        if self.adapter is not None:
            self.adapter.let_go()

    def _leave(self) -> None:
        if not self.there and self._stack is None:  # a load that broke off has a stack before it has modules
            return
        self.forget()
        if self._stack is not None:
            self._stack.end()
        self._stack, self._modules, self._loaded = None, {}, False
        release(self.device)

    def rest(self) -> None:
        """Leave the device as `unload` does, but keep the blocks that are parked in host memory for the next `load`."""
        resting = self._resting if self._stack is None else self._stack.parked_blocks()
        self._leave()
        self._resting = resting

    @property
    def rests(self) -> bool:
        """Whether host memory holds blocks of it while it is not on the device."""
        return bool(self._resting)

    @contextlib.contextmanager
    def at_its_least(self) -> Iterator[None]:
        """Inside, no block is kept on the device; it starts unloaded."""
        self.unload()
        residency, self.residency = self.residency, "stream"
        try:
            yield
        finally:
            self.residency = residency

    def during(self, watch: Watch, phase: Phase | None = None) -> AbstractContextManager[None]:
        """To be open while the part is used: what was streamed is told to `phase`, or noted, and a cancel acts on waits."""
        return self._stack.during(watch, phase) if self.streams else nullcontext()

    # How

    def _measure(self, piece: Piece, module: nn.Module) -> tuple[int, ...]:
        """Take the sizes of blocks; returns what a slot needs for each."""
        held, read, slots = [], [], []
        blocks = module.get_submodule(piece.blocks.path)
        for number, block in enumerate(blocks):
            places = check(block, piece.header, block_prefix(piece, number))
            whole = held_bytes(block, piece.header, places, piece.dtype, piece.held)
            rounded = {f"{path}.weight": layer.weight for path, layer in piece.blocks.rounded(block, number, len(blocks)).items()}
            rest = held_bytes(block, piece.header, places, piece.dtype, piece.held, rounded)
            held.append(rest + sum(e4m3_bytes(*weight.shape) for weight in rounded.values()))
            self.bytes += held[-1] - whole
            self.making = max((self.making, *(whole + matrix_workspace(weight) for weight in rounded.values())))
            read.append(sum(map(piece.header.bytes_of, places)))
            slots.append(held[-1] + ALIGNED * len(places))
            self._stored |= {f"{piece.blocks.path}.{number}.{name}" for name in rounded}
        self._block_bytes, self._block_read = tuple(held), tuple(read)
        return tuple(slots)

    def _fitting(self, budget: int | None) -> int:
        """How many blocks may stay on the device."""
        blocks = len(self._block_bytes)
        if blocks == 0 or self.residency == "resident":
            return blocks
        if self.residency == "stream":
            return 0
        if budget is None or budget >= self.bytes:
            return blocks
        there = frozenset() if self._stack is None else self._stack.kept
        for count in range(blocks - 1, 0, -1):
            if self.least + sum(self._block_bytes[block] for block in _staying(range(blocks), there, count)) <= budget:
                return count
        return 0

    def _load_whole(self, watch: Watch) -> None:
        more = 0 if self.adapter is None else self.adapter.bytes
        with watch.phase("load.read", total=self.read_bytes + more, unit="byte", part=self.name, residency="resident") as phase:
            read = self._reader(phase)
            for piece in self.pieces:
                module = piece.on_meta()
                if piece.blocks is not None:
                    self._stack = self._stacked(piece, module)
                    self._stack.keep(range(len(self._stack)))
                fill(module, piece.header, piece.prefix, self.device, piece.dtype, read, piece.unused, piece.keep, piece.held)
                if self.adapter is not None:
                    self.adapter.changed(piece, module, "", read)
                self._modules[piece.name] = module.eval()

    def _load_blocks(self, kept: int, watch: Watch) -> None:
        """Fill what is missing, with `kept` blocks on the device in the end and the others elsewhere."""
        every = range(len(self._block_bytes))
        stay = _staying(every, frozenset() if self._stack is None else self._stack.kept, kept)
        turns = [block for block in every if block not in stay]
        parked = frozenset(self._resting) if self._stack is None else self._stack.parked
        parking = host_has_room(sum(self._block_bytes[block] for block in turns if block not in parked), self.device)
        facts = {"residency": "stream", "kept_blocks": kept, "source": "host memory" if parking else "file"} if turns else {"residency": "resident"}
        there = parked if self._stack is None else self._stack.kept | parked
        reading = sum(self._block_read[block] for block in every if block not in there and (parking or block in stay))
        if not self._modules:
            reading += self.read_bytes - sum(self._block_read)
        reading += (bringing := sum(self._lacking(block) for block in turns))
        staged = 0 if reading else sum(self._block_bytes[block] for block in (stay & parked) - self._stack.kept)
        with watch.phase("load.read" if reading else "load.stage", total=reading or staged, unit="byte", part=self.name, **facts) as phase:
            read = self._reader(phase)
            if not self._modules:
                for piece in self.pieces:
                    self._modules[piece.name] = self._without_blocks(piece, read).eval()
            self._stack.end()
            self._blocks_file.adapter, self._blocks_file.beside = self.adapter, self._beside  # which may be younger than the blocks
            with self._blocks_file.told(read):
                for block in turns:
                    if block in self._stack.kept:
                        self._stack.drop(block)
                for block in every:
                    if block in stay and block not in self._stack.kept:
                        altered = block in self._altered and self._stays_parked(block)
                        self._stack.fetch(block, altered)
                        if not reading and block in parked:
                            read(self._block_bytes[block])
                    elif block in turns and parking and block not in self._stack.parked:
                        parking = self._stack.park(block)
                        if not parking:
                            self._go_on_from_file(block, turns, phase)
            if bringing and not all(self._bring_changes(block, read) for block in turns):
                phase.total = phase.done  # the rest comes from the file, whenever its block does
        if turns:
            self._stack.begin()

    def _go_on_from_file(self, block: int, turns: Sequence[int], phase: Phase) -> None:
        """Host memory ended at `block`, whatever was free before: blocks of `turns` behind it are read when their turn comes."""
        left = [other for other in turns if other not in self._stack.parked]
        phase.total -= sum(self._block_read[other] for other in left if other > block)
        phase.facts["source"] = f"file, {len(turns) - len(left)} of {len(turns)} blocks from host memory"
        text = f"{self.name}: host memory ran out, and {len(left)} blocks are read from the file each time their turn comes; close other programs, or use a smaller quantised file."
        log.warning("%s", text)
        phase.watch.note("parking", text, part=self.name, blocks=len(left))

    def _lacking(self, block: int) -> int:
        """Bytes of what changes a block that are still to come to host memory."""
        return 0 if self.adapter is None else sum(self.adapter.lacking(piece, path) for piece, path in self._places_of(block))

    def _bring_changes(self, block: int, read: Callable[[int], None]) -> bool:
        return all(self.adapter.bring(piece, path, read) for piece, path in self._places_of(block))

    def _places_of(self, block: int) -> Iterator[tuple[Piece, str]]:
        """The piece with blocks, and where in it `block` is."""
        for piece in self.pieces:
            if piece.blocks is not None:
                yield piece, f"{piece.blocks.path}.{block}."

    def _without_blocks(self, piece: Piece, read: Callable[[int], None]) -> nn.Module:
        """The module filled but for what of its blocks may leave the device."""
        module = piece.on_meta()
        if piece.blocks is None:
            fill(module, piece.header, piece.prefix, self.device, piece.dtype, read, piece.unused, piece.keep, piece.held)
            self._change(piece, module, read)
            return module
        above, _, name = piece.blocks.path.rpartition(".")
        owner, blocks = module.get_submodule(above), module.get_submodule(piece.blocks.path)
        setattr(owner, name, nn.ModuleList())
        fill(module, piece.header, piece.prefix, self.device, piece.dtype, read, (*piece.unused, f"{piece.blocks.path}.*"), piece.keep, piece.held)
        self._change(piece, module, read)
        setattr(owner, name, blocks)
        self._fill_staying(piece, blocks)
        for number, block in enumerate(blocks):
            announce_e4m3(piece.blocks.rounded(block, number, len(blocks)).values())
        self._stack = self._stacked(piece, module)
        return module

    def _change(self, piece: Piece, module: nn.Module, read: Callable[[int], None]) -> None:
        if self.adapter is not None:
            self.adapter.changed(piece, module, "", lambda n: read(0))

    def _fill_staying(self, piece: Piece, blocks: nn.ModuleList) -> None:
        """Read the parameters of blocks that never leave the device: few, and as they are stored or, where quantised, decoded."""
        places: dict[str, tuple[nn.Module, str]] = {}
        for number, block in enumerate(blocks):
            for name, _ in block.named_parameters():
                if any(fnmatchcase(name, pattern) for pattern in piece.blocks.stay):
                    path, _, leaf = name.rpartition(".")
                    places[block_prefix(piece, number) + name] = (block.get_submodule(path), leaf)
        infos = {name: piece.header.tensors[name] for name in places}
        tensors = {name: torch.empty(info.shape, dtype=info.dtype, device=self.device) for name, info in infos.items()}
        read_tensors(piece.header, {name: tensor for name, tensor in tensors.items() if name not in piece.header.stored}, lambda n: None, finite=True)
        decode(piece.header, {name: tensor for name, tensor in tensors.items() if name in piece.header.stored}, lambda n: None)
        for name, (owner, leaf) in places.items():
            owner._parameters[leaf] = nn.Parameter(tensors[name], requires_grad=False)

    def _stacked(self, piece: Piece, module: nn.Module) -> BlockStack:
        self._blocks_file = BlocksFile(piece, self.device)
        lanes = piece.blocks.lanes
        file, blocks = self._blocks_file, module.get_submodule(piece.blocks.path)
        parked, self._resting = self._resting, {}
        return BlockStack(blocks, self.device, piece.blocks.stay, file.read, lambda: lanes(module), file.needed, file.changed, file.room_beside, parked)

    def _reader(self, phase: Phase) -> Callable[[int], None]:
        started = time.monotonic()

        def read(n: int) -> None:
            done = phase.done + n
            rate = done / max(time.monotonic() - started, 1e-9)
            phase.tick(n, f"{self.name} {done / 1e9:.2f}/{phase.total / 1e9:.2f} GB - {rate / 1e9:.1f} GB/s")

        return read

    def _stays_parked(self, block: int) -> bool:
        return block in self._stack.parked or host_has_room(self._block_bytes[block], self.device)


def _staying(every: Sequence[int], there: frozenset[int], count: int) -> frozenset[int]:
    """`count` of the blocks to keep on the device, best of those that are there already."""
    if len(there) >= count:
        return frozenset(_spread(sorted(there), count))
    return there | frozenset(_spread([block for block in every if block not in there], count - len(there)))


def _spread(blocks: Sequence[int], count: int) -> list[int]:
    """`count` of `blocks`, evenly: while one that stays runs, the next one that does not has time to come."""
    return [block for at, block in enumerate(blocks) if (at + 1) * count // len(blocks) > at * count // len(blocks)]
