"""LoRAs: every spelling, the official numbers, dense and stored bases, and the way back to the base."""

import weakref
from collections import Counter
from functools import cache

import pytest
import torch
from comfyui_ltx25.ltx25 import host_spare
from comfyui_ltx25.ltx25.checkpoint import open_file, write_file
from comfyui_ltx25.ltx25.checkpoint.read import _Readers
from comfyui_ltx25.ltx25.config.transformer import read_transformer, transformer_prefix
from comfyui_ltx25.ltx25.dit import DiT
from comfyui_ltx25.ltx25.errors import FileError, InputError
from comfyui_ltx25.ltx25.instrument import Sink, Watch
from comfyui_ltx25.ltx25.lora import DOWNSCALE, TEMPORAL, FactorStore, Lora, apply, factors, reference_factor, targets
from comfyui_ltx25.ltx25.lora.adapter import Adapter
from comfyui_ltx25.ltx25.lora.change import weight_of
from comfyui_ltx25.tests.support import golden_dit as golden
from comfyui_ltx25.tests.support.diffusers_dit import oracle_name
from comfyui_ltx25.tests.support.dit_cases import forward_of, leg_of, plan_of
from comfyui_ltx25.tests.support.files import write_published
from comfyui_ltx25.tests.support.loras import tiny_lora
from comfyui_ltx25.tests.support.memory import OutOfMemoryAt
from comfyui_ltx25.tests.support.quantised import read_all, write_quantised
from comfyui_ltx25.tests.support.renders import CPU, WATCH, off, open_engine, sampled
from comfyui_ltx25.tests.support.tiny import tiny_files

CONNECTORS = ("video_embeddings_connector.", "audio_embeddings_connector.")
OFFICIAL = [name for name in golden.names("lora/") if name.endswith("_fp32")]
# The official code adds in bf16: F32 weights come back bf16-rounded, sums are rounded after every LoRA. Ours adds in float32.
OTHER_RULE = [name for name in golden.names("lora/") if name.endswith("_bf16")]


def opened(path, strength, base):
    return Lora.open(path, strength, base, transformer_prefix(base), CONNECTORS)


def test_every_official_case_is_tested_or_follows_the_rule_we_do_not():
    assert sorted(OFFICIAL + OTHER_RULE) == sorted(golden.names("lora/"))
    assert OTHER_RULE == ["lora/strength_0_bf16", "lora/strength_0.5_bf16", "lora/strength_1_bf16", "lora/two_loras_bf16"]


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_values(name):
    base = golden.header("f32")
    dit = golden.load_dit(base, torch.float32)
    loras = [opened(golden.FOLDER / file, strength, base) for file, strength in golden.inputs(name)["loras"]]
    prefix = transformer_prefix(base)
    with torch.device("meta"):
        blank = DiT(read_transformer(base)[0])
    found = targets(blank, base, prefix, loras)
    apply(dit, found, lambda changes: FactorStore(CPU).fetch(changes, lambda n: None))
    case, want = golden.inputs(name), golden.outputs(name)
    forward, leg = forward_of(dit, case, 0), leg_of(case, 0)
    velocity = forward.run(dit, plan_of(case, leg))[leg]
    for stream in ("video", "audio"):
        golden.check(name, f"{stream}_velocity", getattr(velocity, stream))
    places = {target.name: target.place for target in found}
    fused = [key for key in want if key.startswith("fused/")]
    assert fused
    for key in fused:
        golden.check(name, key, weight_of(dit, places[prefix + key.removeprefix("fused/")]))


# Names


SPELLINGS = {
    "official": (lambda name: f"diffusion_model.{name}", (".lora_A.weight", ".lora_B.weight")),
    "unprefixed": (lambda name: name, (".lora_A.weight", ".lora_B.weight")),
    "whole prefix": (lambda name: f"model.diffusion_model.{name}", (".lora_A.weight", ".lora_B.weight")),
    "kohya": (lambda name: "lora_unet_" + name.replace(".", "_"), (".lora_down.weight", ".lora_up.weight")),
    "transformer": (lambda name: f"transformer.{name}", (".lora_A.weight", ".lora_B.weight")),
    "up and down": (lambda name: f"diffusion_model.{name}", (".lora_down.weight", ".lora_up.weight")),
    "diffusers": (lambda name: "transformer." + oracle_name(name + ".").removesuffix("."), (".lora_A.weight", ".lora_B.weight")),
    "old diffusers": (lambda name: name, (".lora.down.weight", ".lora.up.weight")),
    "peft": (lambda name: f"base_model.model.{name}", (".lora_A.default.weight", ".lora_B.default.weight")),
    "peft of a whole": (lambda name: f"base_model.model.diffusion_model.{name}", (".lora_A.weight", ".lora_B.weight")),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_matches_every_layer(spelling, tmp_path):
    spell, ends = SPELLINGS[spelling]
    base = open_file(tiny_files().transformer)
    wanted = opened(tiny_lora(tmp_path / "official.safetensors"), 1.0, base)
    got = opened(tiny_lora(tmp_path / "x.safetensors", spell=spell, ends=ends), 1.0, base)
    assert got.unmatched == () and got.pairs.keys() == wanted.pairs.keys() and len(got.pairs) == 2 * 34 + 28
    assert str(got) == "LoRA x.safetensors at strength 1: 96 of 96 layers matched."


def test_the_published_lora_matches_its_transformer(tmp_path):
    base = open_file(write_published("ltx-2.5-22b-dev-transformer-bf16", tmp_path))
    lora = opened(write_published("ltx-2.5-22b-distilled-lora-450-bf16", tmp_path), 1.0, base)
    assert len(lora.pairs) == 1660 and not lora.unmatched and max(pair.a.shape[0] for pair in lora.pairs.values()) == 450
    assert {pair.scale for pair in lora.pairs.values()} == {1.0}  # `lora_alpha` is in its metadata
    with torch.device("meta"):
        blank = DiT(read_transformer(base)[0])
    assert len(targets(blank, base, transformer_prefix(base), [lora])) == 1660


def test_alpha_counts_where_it_is_a_tensor_and_nowhere_else(tmp_path):
    base = open_file(tiny_files().transformer)
    lora = opened(tiny_lora(tmp_path / "a.safetensors", rank=4, alpha=2.0), 1.0, base)
    assert all(pair.scale == 2.0 / pair.a.shape[0] for pair in lora.pairs.values())
    lora = opened(tiny_lora(tmp_path / "b.safetensors", metadata={"lora_alpha": "450", "lora_rank": "4"}), 1.0, base)
    assert {pair.scale for pair in lora.pairs.values()} == {1.0}


def test_unmatched_layers_are_counted_and_named(tmp_path):
    extra = {"diffusion_model.extra.lora_A.weight": torch.ones(2, 8), "diffusion_model.extra.lora_B.weight": torch.ones(8, 2), "other.diff": torch.ones(3)}
    lora = opened(tiny_lora(tmp_path / "x.safetensors", extra=extra), 0.5, open_file(tiny_files().transformer))
    assert str(lora) == "LoRA x.safetensors at strength 0.5: 96 of 98 layers matched; not used: diffusion_model.extra, other.diff."


def test_k3_a_lora_that_cannot_act_is_an_error(tmp_path):
    base = open_file(tiny_files().transformer)

    def refused(tensors, word, strength=1.0):
        write_file(tmp_path / "x.safetensors", tensors, {})
        with pytest.raises(FileError) as caught:
            opened(tmp_path / "x.safetensors", strength, base)
        assert word in str(caught.value) and "x.safetensors" in str(caught.value)

    layer = "diffusion_model.proj_out"
    a, b = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
    out, inner = base.tensors["model.diffusion_model.proj_out.weight"].shape
    good = {a: torch.ones(2, inner), b: torch.ones(out, 2)}
    refused({"unet.down_blocks.0.lora_A.weight": torch.ones(2, 4), "unet.down_blocks.0.lora_B.weight": torch.ones(4, 2)}, "none of its 1 layers")
    refused({"weight": torch.ones(2, 4)}, "something this pack does not know, wanted a LoRA like")
    refused({**good, a: torch.ones(2, inner + 1)}, "do not fit")
    refused({**good, b: torch.ones(out, 3)}, "do not fit")
    refused({a: good[a]}, "has only")
    refused({**good, a: good[a].to(torch.float8_e4m3fn)}, "stored as torch.float8_e4m3fn, wanted")
    refused({**good, f"{layer}.dora_scale": torch.ones(out, 1)}, "DoRA")
    refused({**good, "lora_unet_proj_out.lora_down.weight": good[a], "lora_unet_proj_out.lora_up.weight": good[b]}, "twice")
    refused({**good, f"{layer}.lora_down.weight": 5 * good[a], f"{layer}.lora_up.weight": good[b]}, f"twice, as {a} and as {layer}.lora_down.weight")
    refused({**good, f"{layer}.lora_A.default.weight": 5 * good[a]}, "twice")
    with pytest.raises(InputError, match="strength is nan"):
        opened(tiny_lora(tmp_path / "y.safetensors"), float("nan"), base)
    with pytest.raises(FileError, match="audio-vae-bf16.safetensors is an audio VAE with vocoder, wanted a LoRA like"):
        opened(tiny_files().audio_vae, 1.0, base)
    with pytest.raises(FileError, match="does not exist"):
        opened(tmp_path / "missing.safetensors", 1.0, base)


OTHER_KINDS = {
    "dora_scale": "DoRA", "lora_magnitude_vector": "DoRA", "lora_mid.weight": "three factors", "diff": "difference", "set_weight": "set anew",
    "reshape_weight": "reshapes", "lokr_w1": "LoKr", "lokr_w2_a": "LoKr", "hada_w1_a": "LoHa", "hada_w2_b": "LoHa",
}  # fmt: skip


@pytest.mark.parametrize("ending", OTHER_KINDS)
@pytest.mark.parametrize("alone", [False, True], ids=["beside a pair", "alone"])
def test_k3_what_changes_a_weight_otherwise_than_by_a_pair_is_refused_by_name(ending, alone, tmp_path):
    """Its pair alone would be applied and counted as matched."""
    name = f"diffusion_model.proj_out.{ending}"
    path = tmp_path / "x.safetensors"
    if alone:
        write_file(path, {name: torch.ones(2)}, {})
    else:
        tiny_lora(path, extra={name: torch.ones(2)})
    with pytest.raises(FileError, match=f"x.safetensors: diffusion_model.proj_out is a .*{OTHER_KINDS[ending]}.*{name}.*not supported"):
        opened(path, 1.0, open_file(tiny_files().transformer))


DROPPED = {
    "proj_out.diff_b": "difference of the bias", "proj_out.lora_B.bias": "LoRA with a bias", "proj_out.lora_up.bias": "LoRA with a bias",
    "proj_out.lora_B.default.bias": "LoRA with a bias", "proj_out.bias.diff": "difference", "scale_shift_table.diff": "difference",
    "transformer_blocks.1.attn1.q_norm.w_norm": "norm's weight", "transformer_blocks.1.attn1.k_norm.b_norm": "norm's bias",
    "transformer_blocks.1.scale_shift_table.set_weight": "set anew", "proj_out.bias": "way that this version does not know",
    "transformer_blocks.1.attn1.q_norm.weight": "way that this version does not know", "proj_out.anything": "way that this version does not know",
}  # fmt: skip


@pytest.mark.parametrize("what", DROPPED)
@pytest.mark.parametrize("spelling", ["diffusion_model.", "base_model.model.", "lora_unet_"])
def test_k3_nothing_that_changes_a_layer_of_the_model_is_left_out_in_silence(what, spelling, tmp_path):
    """Biases, norms, tables and tensors kept whole, beside pairs that all match."""
    layer = what.partition(".lora_")[0] if ".lora_" in what else what.rpartition(".")[0]
    name = spelling + (layer.replace(".", "_") if spelling.endswith("_") else layer) + what.removeprefix(layer)
    path = tiny_lora(tmp_path / "x.safetensors", extra={name: torch.ones(2)})
    with pytest.raises(FileError, match="^x.safetensors: .*; use a plain LoRA.$") as caught:
        opened(path, 1.0, open_file(tiny_files().transformer))
    assert name in str(caught.value) and DROPPED[what] in str(caught.value)


def test_what_changes_parts_that_are_not_the_transformers_is_told_and_not_used(tmp_path):
    extra = {f"diffusion_model.{CONNECTORS[0]}transformer_1d_blocks.0.attn1.to_q.diff_b": torch.ones(2), "lora_te_layers_0.diff": torch.ones(2)}
    lora = opened(tiny_lora(tmp_path / "x.safetensors", extra=extra), 1.0, open_file(tiny_files().transformer))
    assert len(lora.unmatched) == 2 and len(lora.pairs) == 96


@pytest.mark.parametrize(("strength", "alpha"), [(1e300, None), (-1e30, None), (1.0, 1e38), (100.0, 1e4), (1e-3, -1e30)])
def test_a_strength_or_alpha_out_of_all_proportion_is_refused_in_one_sentence(strength, alpha, tmp_path):
    base = open_file(tiny_files().transformer)
    path = tiny_lora(tmp_path / "x.safetensors", rank=4, alpha=alpha)
    with pytest.raises(InputError, match=r"^x.safetensors at strength \S+ changes model.diffusion_model.[\w.]+ by \S+ times its product, and beyond 10000 .* again\.$"):
        opened(path, strength, base)
    assert opened(path, 0.0, base).strength == 0  # changes nothing, whatever the file says
    assert opened(tiny_lora(tmp_path / "y.safetensors", rank=4, alpha=64.0), -100.0, base).pairs


@pytest.mark.parametrize("residency", ["resident", "stream"])
def test_a_factor_beyond_what_it_is_used_in_is_refused_by_name(residency, contexts, tmp_path):
    """Of a float64 file: as numbers they are finite, and the clip came out finite and wrong."""
    path = tiny_lora(tmp_path / "x.safetensors")
    tensors, metadata = read_all(path)
    name = next(name for name in tensors if "transformer_blocks.1.attn1.to_q.lora_A" in name)
    write_file(path, {**tensors, name: tensors[name].double() * 1e200}, metadata)
    engine = open_engine("auto", residency)
    with pytest.raises(FileError, match=f"^x.safetensors: {name} holds NaN or infinity"):
        sampled(engine.with_loras([(path, 1.0)]), conditioning=contexts)


def test_what_a_lora_at_too_high_a_strength_leads_to_names_it(lora, contexts, tmp_path):
    clip = sampled(open_engine().with_loras([(lora, 100.0), (lora, 0.0)]), conditioning=contexts)
    assert clip.notices[-1].endswith("a normalised latent's by about 1: is LoRA style.safetensors (100) too strong?")
    huge = tiny_lora(tmp_path / "huge.safetensors", size=1e30)
    with pytest.raises(InputError, match=r"not finite numbers; lower the strength of LoRA huge.safetensors \(-1\), or lower the guidance"):
        sampled(open_engine().with_loras([(huge, -1.0)]), conditioning=contexts)


def test_a_lora_whose_alpha_is_0_says_that_it_changes_nothing(tmp_path):
    lora = opened(tiny_lora(tmp_path / "x.safetensors", alpha=0.0), 1.0, open_file(tiny_files().transformer))
    assert str(lora) == "LoRA x.safetensors at strength 1: 96 of 96 layers matched, and its alpha is 0, so it changes nothing."


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64])
def test_alpha_may_be_any_plain_number(dtype, tmp_path):
    extra = {"diffusion_model.proj_out.alpha": torch.tensor(2, dtype=dtype)}
    lora = opened(tiny_lora(tmp_path / "x.safetensors", rank=4, extra=extra), 1.0, open_file(tiny_files().transformer))
    assert lora.pairs["model.diffusion_model.proj_out.weight"].scale == 0.5


@pytest.mark.parametrize(
    "alpha", [torch.tensor([2.0]).to(torch.float8_e4m3fn), torch.tensor(True), torch.ones(2), torch.tensor(float("nan")), torch.tensor(float("inf"))]
)
def test_an_alpha_that_is_no_plain_number_is_refused_by_name(alpha, tmp_path):
    path = tiny_lora(tmp_path / "x.safetensors", extra={"diffusion_model.proj_out.alpha": alpha})
    with pytest.raises(FileError, match="x.safetensors: diffusion_model.proj_out.alpha is .*wanted"):
        opened(path, 1.0, open_file(tiny_files().transformer))


# What an IC-LoRA says about its reference


def asking(tmp_path, strength=1.0, **metadata):
    name = "-".join(metadata.values()) or "silent"
    return opened(tiny_lora(tmp_path / f"ic-{name}.safetensors", metadata=metadata), strength, open_file(tiny_files().transformer))


def test_reference_factors_come_from_the_metadata_and_are_1_without(tmp_path):
    """Keys and default per ltx_pipelines.iclora_utils."""
    silent, both = asking(tmp_path), asking(tmp_path, reference_downscale_factor="2", reference_temporal_scale_factor="4")
    for loras, downscale, temporal in (((), 1, 1), ((silent,), 1, 1), ((both,), 2, 4), ((silent, both), 2, 4), ((both, both), 2, 4)):
        assert (reference_factor(loras, DOWNSCALE), reference_factor(loras, TEMPORAL)) == (downscale, temporal)


def test_reference_factors_of_a_lora_that_does_not_act_do_not_count(tmp_path):
    assert reference_factor([asking(tmp_path, 0.0, reference_downscale_factor="2")], DOWNSCALE) == 1


def test_reference_factors_that_contradict_or_are_none_are_refused(tmp_path):
    two, three = asking(tmp_path, reference_downscale_factor="2"), asking(tmp_path, reference_downscale_factor="3")
    with pytest.raises(InputError, match="ic-2.safetensors wants reference_downscale_factor 2 and ic-3.safetensors 3; use one"):
        reference_factor([two, three], DOWNSCALE)
    assert reference_factor([two, three], TEMPORAL) == 1
    for text in ("0", "-1", "half", "1.5", ""):
        with pytest.raises(FileError, match="wanted a whole number from 1"):
            reference_factor([asking(tmp_path, reference_temporal_scale_factor=text)], TEMPORAL)


# On an engine


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    return tiny_lora(tmp_path_factory.mktemp("lora") / "style.safetensors")


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    return tiny_lora(tmp_path_factory.mktemp("lora") / "second.safetensors", rank=2, spell=lambda name: name, size=-0.07)


@pytest.fixture(scope="module")
def contexts():
    return open_engine().encode("A cat on a table.", WATCH)


def weights_of(engine):
    module = engine.opened.parts["transformer"]["dit"]
    dense = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    stored = {path: layer.storage.dense(torch.float32) for path, layer in module.named_modules() if getattr(layer, "storage", None) is not None}
    return dense | stored


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same(one, other):
    return torch.equal(one.video, other.video) and torch.equal(one.audio, other.audio)


@pytest.fixture(scope="module", params=["bf16", "int8", "fp8-weight_scale"])
def base(request, tmp_path_factory):
    if request.param == "bf16":
        return tiny_files().transformer
    return write_quantised(tiny_files().transformer, tmp_path_factory.mktemp("base") / f"{request.param}.safetensors", request.param)


@pytest.mark.parametrize("spare", [0, 1 << 60], ids=["base kept", "base read again"])
def test_k3_k4_strength_0_is_the_base_and_removal_restores_it(base, spare, lora, second, contexts):
    engine = open_engine(transformer=base)
    engine.opened.parts["transformer"].adapter = adapter = Adapter(engine.opened.parts["transformer"].pieces[0], CPU, spare)
    plain = sampled(engine, conditioning=contexts)
    before = weights_of(engine)
    assert same(sampled(engine.with_loras([(lora, 0.0)]), conditioning=contexts), plain) and adapter.fuses == 0
    changed = sampled(engine.with_loras([(lora, 1.0)]), conditioning=contexts)
    assert off(changed.video, plain.video) > 0.02 and off(changed.audio, plain.audio) > 0.02
    both = sampled(engine.with_loras([(lora, 1.0)]).with_loras([(second, 0.5)]), conditioning=contexts)
    assert off(both.video, changed.video) > 0.005
    assert same(sampled(engine, conditioning=contexts), plain)
    assert equal(weights_of(engine), before)
    assert same(sampled(engine.with_loras([(lora, 1.0)]), conditioning=contexts), changed)
    assert same(sampled(engine, conditioning=contexts), plain) and equal(weights_of(engine), before)


def test_k5_stages_with_and_without_a_lora_compute_it_once(base, lora, contexts):
    engine = open_engine(transformer=base)
    engine.opened.parts["transformer"].adapter = adapter = Adapter(engine.opened.parts["transformer"].pieces[0], CPU, 0)
    styled = engine.with_loras([(lora, 0.8)])
    first = [sampled(stage, conditioning=contexts) for stage in (engine, styled)]
    assert adapter.fuses == 1
    again = [sampled(stage, conditioning=contexts) for stage in (engine, styled, styled)]
    assert adapter.fuses == 1 and same(again[0], first[0]) and same(again[1], first[1]) and same(again[2], first[1])


def test_a_lora_from_the_first_load_and_one_put_on_later_are_the_same(base, lora, contexts):
    late = open_engine(transformer=base)
    sampled(late, conditioning=contexts)
    wanted = sampled(late.with_loras([(lora, 0.7)]), conditioning=contexts)
    assert same(sampled(open_engine(transformer=base).with_loras([(lora, 0.7)]), conditioning=contexts), wanted)


@pytest.mark.parametrize(("rank", "columns"), [(4, 4), (56, 64), (64, 64)])
def test_streamed_blocks_are_changed_by_rows_with_zeros_behind_them_as_resident_ones_are_without(base, rank, columns, contexts, tmp_path):
    """Zeros that the kernel wants are in the copy already, where they are few."""
    path = tiny_lora(tmp_path / "style.safetensors", rank)
    resident, stream = (open_engine("auto", residency, transformer=base).with_loras([(path, 1.0)]) for residency in ("resident", "stream"))
    assert same(sampled(stream, conditioning=contexts), sampled(resident, conditioning=contexts))
    adapter = stream.opened.parts["transformer"].adapter
    changes = [change for change in adapter._changes_at("transformer_blocks.0.") if change[1].a.shape[0] == rank]
    found = adapter._factors.fetch(changes, pytest.fail, "transformer_blocks.0.")
    widths = {found[lora.file, pair.b.name].shape[1] for lora, pair in changes}
    assert changes and widths == {columns}
    assert not any(found[lora.file, pair.b.name][:, rank:].any() for lora, pair in changes)


def test_streamed_blocks_carry_their_lora(base, lora, contexts, monkeypatch):
    """Their factors are in host memory, or read again, where at first there is no more of it."""
    asked = []

    def short(size):
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8) if len(asked) % 2 else None

    monkeypatch.setattr(factors, "host_memory", short)
    resident, stream = (open_engine("auto", residency, transformer=base) for residency in ("resident", "stream"))
    plain = sampled(resident, conditioning=contexts)
    wanted = sampled(resident.with_loras([(lora, 1.0)]), conditioning=contexts)
    assert same(sampled(stream.with_loras([(lora, 1.0)]), conditioning=contexts), wanted)
    assert same(sampled(stream, conditioning=contexts), plain)
    assert len(asked) > 2


@pytest.fixture
def file_reads(monkeypatch):
    """Path -> bytes of it that were read since the last look."""
    counted = Counter()
    start = _Readers.start

    def counting(self, piece):
        counted[self._header.path] += piece.size
        start(self, piece)

    monkeypatch.setattr(_Readers, "start", counting)

    def look():
        seen = dict(counted)
        counted.clear()
        return seen

    return look


@pytest.fixture(scope="module")
def sequence(lora, second, contexts, tmp_path_factory):
    """Storage -> its file, and [(LoRAs, the clip of a fresh resident engine with them)]: strengths change, a second one joins, one goes, both go."""
    sets = ([(lora, 0.25)], [(lora, 0.5)], [(lora, 0.5), (second, 0.3)], [(second, 0.3)], [], [(lora, 0.25)])

    @cache
    def of(storage):
        base = tiny_files().transformer
        if storage != "bf16":
            base = write_quantised(base, tmp_path_factory.mktemp("sequence") / f"{storage}.safetensors", storage)
        made = [sampled(open_engine("auto", "resident", transformer=base).with_loras(loras), conditioning=contexts) for loras in sets[:-1]]
        return base, list(zip(sets, [*made, made[0]], strict=True))

    return of


@pytest.mark.parametrize(("storage", "where"), [*(("bf16", where) for where in ("resident", "stream", "partly", "file")), ("int8", "stream")])
def test_k5_other_loras_and_strengths_do_not_read_the_base_again(storage, where, lora, sequence, contexts, file_reads, monkeypatch):
    """Wherever blocks are, and to the bit what an engine gives that never had another LoRA."""
    base, clips = sequence(storage)
    engine = open_engine("auto", {"resident": "resident", "stream": "stream"}.get(where, "auto"), transformer=base)
    part = engine.opened.parts["transformer"]
    part.adapter = Adapter(part.pieces[0], CPU, 0 if where in ("resident", "file") else 1 << 60)
    if where == "file":
        monkeypatch.setattr(host_spare, "host_free", lambda: 0)
    if where in ("partly", "file"):  # room for one block besides the slots, or for none
        monkeypatch.setattr(part, "_fitting", lambda budget: 1 if where == "partly" else 0)
    for number, (loras, wanted) in enumerate(clips):
        handle = engine.with_loras(loras)
        file_reads()
        handle._adapted(WATCH)
        handle.arbiter.ready([part], 0, WATCH)
        switching = file_reads()
        assert (base in switching) == (number == 0), "once, at the first load"
        assert same(sampled(handle, conditioning=contexts), wanted), loras
        for coming in part._stack._coming:
            coming.arrival.result()
        running = file_reads()
        assert (base in running) == (where == "file"), "each time a block comes, where host memory has no copy"
        if where in ("stream", "partly"):
            assert lora not in running, "what changes blocks comes to host memory in a load, which tells of it, and not in a step"
        if where == "stream" and number in (1, 2):
            assert switching.get(lora, 0) + running.get(lora, 0) < 0.5 * lora.stat().st_size, "what blocks need of it is in host memory"
    if where != "resident":
        assert part.streams and part._stack.slot_bytes <= part._slots_bytes
        assert len(part._stack.kept) == (where == "partly")
        assert len(part._stack.parked - part._stack.kept) == {"stream": 4, "partly": 3, "file": 0}[where]


def test_a_part_that_makes_room_for_another_comes_back_with_its_lora_out_of_host_memory(lora, sequence, contexts, file_reads):
    base, clips = sequence("bf16")
    engine = open_engine("auto", "stream").with_loras([(lora, 0.25)])
    part = engine.opened.parts["transformer"]
    sampled(engine, conditioning=contexts)
    part.rest()
    file_reads()
    assert same(sampled(engine, conditioning=contexts), clips[0][1])
    reads = file_reads()
    assert reads[base] < part.read_bytes - 0.9 * sum(part._block_read) and reads[lora] < 0.5 * lora.stat().st_size, "what is not of blocks"
    part.unload()
    assert same(sampled(engine, conditioning=contexts), clips[0][1])
    assert file_reads()[lora] > 0.5 * lora.stat().st_size, "nothing is left in host memory"


@pytest.mark.parametrize("spare", [0, 1 << 60], ids=["room", "no room"])
def test_a_resident_transformer_without_room_for_a_copy_reads_what_was_changed_and_no_more(spare, lora, second, contexts, file_reads):
    engine = open_engine("auto", "resident")
    part = engine.opened.parts["transformer"]
    part.adapter = Adapter(part.pieces[0], CPU, spare)
    sampled(engine.with_loras([(lora, 1.0)]), conditioning=contexts)
    file_reads()
    both = sampled(engine.with_loras([(lora, 1.0), (second, 1.0)]), conditioning=contexts)
    header = part.pieces[0].header
    assert file_reads().get(header.path, 0) == (0 if spare == 0 else sum(map(header.bytes_of, opened(lora, 1.0, header).pairs)))
    assert same(sampled(engine, conditioning=contexts), sampled(open_engine(), conditioning=contexts))
    assert off(both.video, sampled(engine.with_loras([(lora, 1.0)]), conditioning=contexts).video) > 0.005


def test_loras_that_alternate_keep_their_memory_bounded(lora, second, contexts):
    """base -> one -> base -> another: the room of the first one's weights serves the second's."""
    engine = open_engine()
    part = engine.opened.parts["transformer"]
    part.adapter = adapter = Adapter(part.pieces[0], CPU, 0)
    sampled(engine, conditioning=contexts)
    kept = []
    for loras in ([(lora, 1.0)], [], [(second, 1.0)], [], [(lora, 0.5)]):
        engine.with_loras(loras)._adapted(WATCH)
        kept.append({name: tensor.data_ptr() for name, tensor in adapter._kept.weights.items()})
    assert all(one == kept[0] for one in kept[1:])


def test_blocks_that_leave_and_come_back_have_the_lora_that_was_put_on_after_the_first_load(base, lora, contexts):
    engine = open_engine(transformer=base)
    sampled(engine, conditioning=contexts)
    styled, part = engine.with_loras([(lora, 1.0)]), engine.opened.parts["transformer"]
    wanted = sampled(styled, conditioning=contexts)
    assert part.shrink(sum(part._block_bytes)) and not part.loaded
    assert same(sampled(styled, conditioning=contexts), wanted)


def test_k2_a_quantised_base_with_a_lora_is_no_further_from_bf16_than_without(lora, contexts, tmp_path):
    """The low-rank product stands beside the quantised one; its own error is that of the base's."""
    base = write_quantised(tiny_files().transformer, tmp_path / "int8.safetensors", "int8")
    wide, narrow = open_engine(), open_engine(transformer=base)
    without = off(sampled(narrow, conditioning=contexts).video, sampled(wide, conditioning=contexts).video)
    got, want = (sampled(engine.with_loras([(lora, 1.0)]), conditioning=contexts) for engine in (narrow, wide))
    assert off(got.video, want.video) < 1.5 * without + 1e-3


def test_products_beside_a_weight_and_sums_in_it_agree(base, lora):
    """The same LoRA: on stored weights as a side path, on the decoded file as a sum."""
    stored, dense = open_engine(transformer=base), open_engine("bf16", transformer=base)
    kept = []
    for engine in (stored, dense):
        engine.opened.parts["transformer"].load(WATCH)
        handle = engine.with_loras([(lora, 0.9)])
        handle._adapted(WATCH)
        kept.append(engine.opened.parts["transformer"]["dit"])
    for (path, layer), (_, other) in zip(kept[0].named_modules(), kept[1].named_modules(), strict=True):
        if getattr(layer, "storage", None) is not None:
            torch.testing.assert_close(layer.storage.dense(torch.float32), other.weight, rtol=1e-5, atol=1e-5, msg=lambda m, path=path: f"{path}: {m}")


@pytest.mark.parametrize(("residency", "fused"), [("resident", 0), ("resident", 50), ("stream", 0), ("stream", 50)])
def test_i4_a_cancel_while_a_lora_is_put_on_leaves_the_base_and_the_lora_as_they_were(residency, fused, lora, contexts, monkeypatch):
    """At the first weight or behind some; of streamed blocks, 50 is inside of one that comes."""
    engine = open_engine("auto", residency)
    plain = sampled(engine, conditioning=contexts)
    import comfyui_ltx25.ltx25.lora.change as module

    calls, fuse = [], module._fuse

    def broken(*arguments):
        calls.append(1)
        if len(calls) > fused:
            raise KeyboardInterrupt
        fuse(*arguments)

    styled = engine.with_loras([(lora, 1.0)])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_fuse", broken)
        sampled(styled, conditioning=contexts)
    assert engine.opened.parts["transformer"].loaded == (residency == "stream" and fused > 28), "what is half changed is dropped; a slot was not the model"
    assert same(sampled(engine, conditioning=contexts), plain)
    assert same(sampled(styled, conditioning=contexts), sampled(open_engine().with_loras([(lora, 1.0)]), conditioning=contexts))


@pytest.mark.parametrize("base", ["bf16", "int8"], indirect=True)
@pytest.mark.parametrize("number", [0, 60], ids=["at once", "half way or at the end"])
def test_m7_out_of_memory_while_loras_change_loads_the_weights_again_with_them(number, base, lora, contexts, monkeypatch, uncollected):
    """As out of memory in a load does: told, noted, and the clip is the one that was asked for. Put on, at another strength, taken off."""
    engine = open_engine(transformer=base)
    part = engine.opened.parts["transformer"]
    steps = [engine, engine.with_loras([(lora, 1.0)]), engine.with_loras([(lora, 0.5)]), engine]
    wanted = [sampled(step, (1.0, 0.0), conditioning=contexts) for step in steps[:3]]
    wanted.append(wanted[0])
    part.unload()
    part.adapter = Adapter(part.pieces[0], CPU, 1 << 60)  # nothing is kept of the base: each change has to read
    real, alive = Adapter._change, []

    def short(self, module, *rest):
        alive.append(weakref.ref(module))
        with OutOfMemoryAt(number):
            real(self, module, *rest)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Adapter, "_change", short)
    for step, clip in zip(steps, wanted, strict=True):
        retries, told = Retries(), bool(step.loras or alive)
        got = sampled(step, (1.0, 0.0), conditioning=contexts, watch=Watch([retries]))
        assert same(got, clip) and part.loaded
        assert [notice for notice in got.notices if "ran out of memory" in notice] == retries.told == [CHANGED] * told
    assert len(alive) == 3 and not any(module() for module in alive), "weights of the change that failed stayed alive beside those loaded again"


class Retries(Sink):
    def __init__(self):
        self.told = []

    def noted(self, event, text, facts):
        self.told += [text] if event == "retry" else []


CHANGED = "transformer ran out of memory while its LoRAs were changed; it went on by loading the weights again."


def test_a_render_says_what_its_loras_matched(lora, contexts):
    clip = sampled(open_engine().with_loras([(lora, 0.25), (lora, 0.0)]), conditioning=contexts)
    assert clip.notices[:2] == (
        "LoRA style.safetensors at strength 0.25: 96 of 96 layers matched.",
        "LoRA style.safetensors at strength 0: 96 of 96 layers matched.",
    )


