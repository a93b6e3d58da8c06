"""precision=fp8: the transformer's inner blocks rounded to rows of e4m3 while they are read, and everything that follows from that.

A CPU has no fp8 products, and there the engine refuses: what runs here is the twins' arithmetic on the same stored numbers.
"""

import pytest
import torch
from comfyui_ltx25.kernels import fp8_linear
from comfyui_ltx25.kernels import quantise as rows
from comfyui_ltx25.ltx25 import engine as engines
from comfyui_ltx25.ltx25 import host_spare, piece
from comfyui_ltx25.ltx25 import part as parts
from comfyui_ltx25.ltx25 import parts as opening
from comfyui_ltx25.ltx25.dit import fp8_layers
from comfyui_ltx25.ltx25.engine import Engine, Files, Options
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.formats import Dense, Fp8, Stacked
from comfyui_ltx25.ltx25.formats.weights import Fp8Weight
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.linear import RowwiseE4M3
from comfyui_ltx25.ltx25.lora import Sided
from comfyui_ltx25.ltx25.lora.adapter import Adapter
from comfyui_ltx25.tests.support.engine import engine as card_engine
from comfyui_ltx25.tests.support.engine import job
from comfyui_ltx25.tests.support.loras import tiny_lora
from comfyui_ltx25.tests.support.quantised import write_quantised
from comfyui_ltx25.tests.support.renders import CPU, WATCH, off, open_engine, sampled
from comfyui_ltx25.tests.support.tiny import tiny_files

STEP = 2.0**-4  # the most by which e4m3 with its three bits after the point moves a number, relative
# Weights and activations are both rounded: no product of two is further off than that. In a sum such errors partly cancel,
# and the residual stream and the outermost blocks carry none: a whole clip stays below what a single pair may reach.
FAR = 2 * STEP


@pytest.fixture(scope="module")
def plain():
    """(contexts of a prompt, the clip of bf16 weights)."""
    engine = open_engine("bf16")
    contexts = engine.encode("A cat on a table.", WATCH)
    return contexts, sampled(engine, conditioning=contexts)


@pytest.fixture(scope="module")
def fp8(plain):
    """(engine, its clip)."""
    engine = open_engine("fp8", "resident")
    return engine, sampled(engine, conditioning=plain[0])


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    return tiny_lora(tmp_path_factory.mktemp("lora") / "style.safetensors")


def dit_part(engine):
    return engine.opened.parts["transformer"]


def same(one, other):
    return torch.equal(one.video, other.video) and torch.equal(one.audio, other.audio)


def stored(engine):
    """Path -> storage of the layers that hold their weight otherwise than dense."""
    return {path: layer.storage for path, layer in dit_part(engine)["dit"].named_modules() if getattr(layer, "storage", None) is not None}


def far(one, other):
    return max(off(one.video, other.video), off(one.audio, other.audio))


# The clip


def test_a_clip_in_fp8_is_that_of_bf16_within_what_e4m3_rounds(plain, fp8):
    assert STEP / 20 < far(fp8[1], plain[1]) < FAR  # 0.019 when this was written


def test_the_same_seed_gives_the_same_bits_also_from_another_load(plain, fp8):
    engine, clip = fp8
    assert same(sampled(engine, conditioning=plain[0]), clip)
    engine.detach()
    assert all(part.held == 0 for part in engine.parts)
    assert same(sampled(engine, conditioning=plain[0]), clip)


def test_bf16_after_fp8_is_bf16_bit_for_bit(plain, fp8):
    assert same(sampled(open_engine("bf16"), conditioning=plain[0]), plain[1])


def test_inner_blocks_but_text_attention_are_e4m3(fp8):
    layers = stored(fp8[0])
    assert {path.split(".")[1] for path in layers} == {"1", "2"}
    assert all(isinstance(storage, RowwiseE4M3) for storage in layers.values())
    assert not any(".attn2." in path or ".audio_attn2." in path for path in layers) and len(layers) == 2 * 14
    assert fp8[0].opened.precision == "fp8 products"


# Memory


@pytest.mark.parametrize("residency", ["resident", "stream"])
def test_l10_the_part_says_what_it_holds(residency, plain):
    engine = open_engine("fp8", residency)
    part, wide = dit_part(engine), dit_part(open_engine("bf16"))
    sampled(engine, conditioning=plain[0])
    dit = part["dit"]
    held = sum(tensor.nbytes for tensor in dit.state_dict().values() if not tensor.is_meta)
    blocks = [block for number, block in enumerate(dit.transformer_blocks) if number in part._stack.kept]
    held += sum(layer.storage.nbytes for block in blocks for layer in block.modules() if getattr(layer, "storage", None) is not None)
    if residency == "resident":
        assert part.held == part.bytes == held < wide.bytes
    else:
        assert part.streams and held + part._stack.slot_bytes <= part.held <= part.least < part.bytes
    inner, other = part._block_bytes[1], wide._block_bytes[1]
    assert 0.25 < inner / other < 0.5  # float32 beside it here; text attention stays that
    assert part._block_bytes[0] == wide._block_bytes[0]


def test_blocks_are_rounded_one_after_the_other_so_that_bf16_need_never_fit_whole(monkeypatch):
    """At most one block is there unrounded at any time, and what that takes is said beforehand."""
    engine = open_engine("fp8", "resident")
    part, seen = dit_part(engine), []
    store = piece.store_e4m3

    def watched(layers):
        layers = list(layers)
        blocks = part._modules["dit"].transformer_blocks[1:-1]
        there = [layer for number, block in enumerate(blocks) for layer in fp8_layers(block, number + 1, 4).values()]
        dense = sum(layer.weight is not None and not layer.weight.is_meta for layer in there)
        seen.append((len(layers), dense, sum(layer.storage is not None and not layer.storage.dense(torch.float32).is_meta for layer in there)))
        return store(layers)

    monkeypatch.setattr(piece, "store_e4m3", watched)
    part.load(WATCH)
    assert seen == [(0, 0, 0), (14, 0, 0), (14, 0, 14), (0, 0, 28)]
    assert part.making > part._block_bytes[0] and dit_part(open_engine("bf16")).making == 0


def test_blocks_of_unequal_size_stay_as_many_as_fit():
    """The outermost blocks are twice as large as those in fp8: what counts is what would stay, not the largest of all."""
    part = dit_part(open_engine("fp8"))
    part._block_bytes, part.bytes, part._slots_bytes = (8, *[4] * 22, 8), 1000, 20
    every = range(24)
    for budget in range(part.least, part.bytes):
        count = part._fitting(budget)
        sizes = [sum(part._block_bytes[block] for block in parts._staying(every, frozenset(), n)) for n in (count, count + 1)]
        assert part.least + sizes[0] <= budget and (count == 23 or part.least + sizes[1] > budget), budget
    assert part._fitting(part.least + 44) >= 10


@pytest.mark.parametrize("how", ["parked", "file"])
def test_streamed_blocks_give_the_resident_clip(how, plain, fp8, monkeypatch):
    """Parked blocks are rounded once, into the copy in host memory; blocks that come from the file, each time they come."""
    engine = open_engine("fp8", "stream")
    part = dit_part(engine)
    if how == "file":
        monkeypatch.setattr(host_spare, "host_free", lambda: 0)
        monkeypatch.setattr("comfyui_ltx25.ltx25.fitting.host_free", lambda: None)
    assert same(sampled(engine, conditioning=plain[0]), fp8[1])
    assert part.streams and len(part._stack.parked) == {"parked": 4, "file": 0}[how]


def test_the_first_step_of_blocks_that_never_came_yet_is_the_resident_models(plain, monkeypatch):
    """In bf16, as on a card: a row that is rounded to bf16 before it is quantised is another one."""
    monkeypatch.setattr(engines, "compute_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(opening, "compute_dtype", lambda device: torch.bfloat16)
    resident, stream = (open_engine("fp8", residency) for residency in ("resident", "stream"))
    monkeypatch.setattr(host_spare, "host_free", lambda: 0)
    one = {"conditioning": plain[0], "sigmas": (1.0, 0.0)}
    assert same(sampled(stream, **one), sampled(resident, **one)) and dit_part(stream).streams


def test_blocks_given_back_come_again_as_they_were(plain, fp8):
    engine = open_engine("fp8")
    part = dit_part(engine)
    part.load(WATCH)
    assert part.shrink(part._block_bytes[3] + 1) == part._block_bytes[3] + part._block_bytes[2] == part.bytes - part.held
    assert same(sampled(engine, conditioning=plain[0]), fp8[1]) and part.held == part.bytes


class Stop(BaseException):
    """Stands for the host's cancel."""


class After:
    """A sink that cancels at the n-th tick."""

    wants_preview = False

    def __init__(self, ticks):
        self.left = ticks

    def check(self):
        if self.left <= 0:
            raise Stop

    def opened(self, phase): ...

    def ticked(self, phase):
        self.left -= 1

    def closed(self, phase): ...


@pytest.mark.parametrize("residency", ["resident", "stream"])
@pytest.mark.parametrize("ticks", [1, 3])
def test_i3_a_cancel_while_blocks_are_rounded_leaves_nothing_and_the_next_run_is_right(residency, ticks, plain, fp8):
    engine = open_engine("fp8", residency)
    with pytest.raises(Stop):
        dit_part(engine).load(Watch([After(ticks)]))
    assert dit_part(engine).held == 0 and not dit_part(engine).loaded
    assert same(sampled(engine, conditioning=plain[0]), fp8[1])


# LoRA


@pytest.mark.parametrize("spare", [0, 1 << 60], ids=["base kept", "base read again"])
def test_k4_a_lora_stands_beside_e4m3_weights_and_leaves_them_bit_for_bit(spare, plain, fp8, lora):
    engine = open_engine("fp8")
    dit_part(engine).adapter = Adapter(dit_part(engine).pieces[0], CPU, spare)
    assert same(sampled(engine, conditioning=plain[0]), fp8[1])
    styled = engine.with_loras([(lora, 1.0)])
    changed = sampled(styled, conditioning=plain[0])
    assert any(isinstance(storage, Sided) and isinstance(storage.base, RowwiseE4M3) for storage in stored(engine).values())
    assert far(changed, fp8[1]) > 0.02
    part = dit_part(engine)
    held = sum(t.nbytes for t in part["dit"].state_dict().values()) + sum(storage.nbytes for storage in stored(engine).values())
    assert part.held == part.bytes == held > dit_part(fp8[0]).bytes
    assert same(sampled(engine, conditioning=plain[0]), fp8[1])
    assert same(sampled(styled, conditioning=plain[0]), changed)


def test_k2_a_lora_acts_as_on_bf16_whenever_and_wherever_it_is_put_on(plain, lora):
    """From the first load, later, and on streamed blocks: the same bits; and no further from bf16 than fp8 is."""
    late = open_engine("fp8")
    sampled(late, conditioning=plain[0])
    wanted = sampled(late.with_loras([(lora, 1.0)]), conditioning=plain[0])
    for residency in ("resident", "stream"):
        first = open_engine("fp8", residency).with_loras([(lora, 1.0)])
        assert same(sampled(first, conditioning=plain[0]), wanted), residency
        part = dit_part(first)
        assert part.held == part.wanted
        assert part.bytes == dit_part(late).bytes and (residency == "resident" or part._stack.slot_bytes <= part._slots_bytes)
    wide = sampled(open_engine("bf16").with_loras([(lora, 1.0)]), conditioning=plain[0])
    assert far(wanted, wide) < FAR


# Files that are quantised already


@pytest.mark.parametrize("storage", ["fp8", "fp8-weight_scale", "fp8-e5m2", "int8"])
def test_weights_are_rounded_once_and_e4m3_ones_not_again(storage, plain, tmp_path):
    """An fp8 file keeps its bits where it is e4m3; all others are decoded to what bf16 loads, then rounded."""
    path = write_quantised(tiny_files().transformer, tmp_path / "x.safetensors", storage)
    engine, wide = (open_engine(precision, transformer=path) for precision in ("fp8", "bf16"))
    got, want = (sampled(one, conditioning=plain[0]) for one in (engine, wide))
    assert STEP / 20 < far(got, want) < FAR
    dense = dict(dit_part(wide)["dit"].named_modules())
    layers = {path: kept for path, kept in stored(engine).items() if isinstance(kept, RowwiseE4M3)}
    assert len(layers) == 2 * 14
    for path, kept in layers.items():
        exact = torch.equal(kept.dense(torch.float32), dense[path].weight)
        assert exact == (storage in ("fp8", "fp8-weight_scale")), path
    others = {path: kept for path, kept in stored(engine).items() if path not in layers}
    assert all(isinstance(kept, Fp8Weight) for kept in others.values()) and bool(others) == storage.startswith("fp8")
    part = dit_part(engine)
    held = sum(t.nbytes for t in part["dit"].state_dict().values()) + sum(kept.nbytes for kept in stored(engine).values())
    assert held <= part.held == part.bytes < dit_part(wide).bytes


def test_rows_of_several_weights_are_rounded_each_by_itself():
    draw = torch.Generator().manual_seed(1)
    values, scale = torch.randn(3, 32, generator=draw).to(torch.float8_e4m3fn), torch.rand(3, 1, generator=draw)
    loose, whole = torch.randn(2, 32, generator=draw), Fp8().weight([{"weight": values, "scale": scale}], exact=True)
    got = Stacked([whole, Dense(loose), Fp8().weight([{"weight": values}], exact=True)]).e4m3()
    want = rows.quantise_reference(loose[None])
    assert got.shape == (1, 8, 32)
    assert torch.equal(got.values[0, :3].float(), values.float()) and torch.equal(got.scale[0, :3], scale)
    assert torch.equal(got.values[0, 3:5].float(), want.values[0].float()) and torch.equal(got.scale[0, 3:5], want.scale[0])
    assert torch.equal(got.values[0, 5:].float(), values.float()) and bool((got.scale[0, 5:] == 1).all())


def test_a_weight_rounded_in_runs_of_rows_is_the_weight_rounded_whole(monkeypatch):
    weight = torch.randn(37, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    want = rows.quantise_reference(weight[None])
    for at_once in (1, 100, 37 * 48):
        monkeypatch.setattr(rows, "_WIDE_AT_ONCE", at_once)
        got = rows.quantise_matrix(weight)
        assert torch.equal(got.values.float(), want.values.float()) and torch.equal(got.scale, want.scale)


# Where it cannot be


def test_fp8_is_refused_before_a_file_is_looked_at_where_the_device_has_none(tmp_path):
    nowhere = Files(*[tmp_path / "nowhere.safetensors"] * 4)
    with pytest.raises(InputError, match=r"^precision fp8 needs a card.*'cpu' has none; choose precision=bf16\.$"):
        Engine.open(nowhere, Options("fp8", "auto", "auto", "memory"), CPU)


def test_an_unknown_precision_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"precision 'fp4' does not exist; choose auto or bf16 or fp8\.$"):
        Options("fp4", "auto", "auto", "memory").check()


def test_widths_that_a_cards_product_does_not_take_run_in_plain_arithmetic(monkeypatch):
    monkeypatch.setattr(fp8_linear, "supported", lambda device: True)
    monkeypatch.setattr(fp8_linear._OP, "runs", lambda like: True)
    monkeypatch.setattr(fp8_linear, "_launch", lambda *_: "on the card")
    for inner, outer, there in ((32, 48, True), (32, 50, False), (40, 48, False)):
        x, weight = (rows.quantise_reference(torch.randn(1, n, inner)) for n in (3, outer))
        got = fp8_linear.fp8_linear(x, weight, None, torch.empty(0))
        assert (got == "on the card") if there else torch.equal(got, fp8_linear.fp8_linear_reference(x, weight, None, torch.float32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_card_streamed_fp8_is_resident_fp8_and_near_bf16():
    """What the tiny model's narrow layers do not give a card's product runs in plain arithmetic, inside the same graphs."""
    cuda = torch.device("cuda")
    if not fp8_linear.supported(cuda):
        pytest.skip("this card has no e4m3 products")
    wide, whole, small = (card_engine(device=cuda, precision=precision, residency=residency) for precision, residency in (("bf16", "auto"), ("fp8", "resident"), ("fp8", "stream")))
    clips = [one.sample(job(one, frames=12, steps=6), Watch()) for one in (wide, whole, small, whole)]
    assert same(clips[1], clips[2]) and same(clips[1], clips[3])
    assert STEP / 20 < far(clips[1], clips[0]) < 2 * FAR  # six guided steps: guidance enlarges differences
    assert dit_part(small).streams and dit_part(small)._stack.parked
    for one in (wide, whole, small):
        one.detach()
    torch._C._cuda_clearCublasWorkspaces()  # 32 MiB a stream, the process's and not the engine's; no graph is left that reads them
    assert torch.cuda.memory_allocated() < 64 << 20
