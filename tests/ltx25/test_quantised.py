"""The published files and the tiny ones in every storage: all tensors find their place, and the clip is that of bf16 within an error."""

import json
import math
import re
import struct

import pytest
import torch
from comfyui_ltx25.kernels import nvfp4_linear
from comfyui_ltx25.ltx25.checkpoint import check, held_bytes, open_file, write_file
from comfyui_ltx25.ltx25.config.connector import AUDIO, VIDEO
from comfyui_ltx25.ltx25.config.text import FeatureConfig, TowerConfig
from comfyui_ltx25.ltx25.config.text_layout import PROJECTION, TextLayout
from comfyui_ltx25.ltx25.config.transformer import CONNECTOR_TENSORS, read_transformer, transformer_prefix
from comfyui_ltx25.ltx25.connector import Connector
from comfyui_ltx25.ltx25.dit import DiT
from comfyui_ltx25.ltx25.errors import FileError
from comfyui_ltx25.ltx25.formats import Fp8, Held, Int8, Nvfp4, Stacked
from comfyui_ltx25.ltx25.formats.weights import Nvfp4Weight
from comfyui_ltx25.ltx25.text import FeatureProjection, Tower
from comfyui_ltx25.tests.support import nvfp4 as hardware
from comfyui_ltx25.tests.support.files import fixture, fixture_names, write_sparse
from comfyui_ltx25.tests.support.quantised import SAFETENSORS, read_all, write_gguf, write_quantised
from comfyui_ltx25.tests.support.renders import WATCH, off, open_engine, sampled
from comfyui_ltx25.tests.support.tiny import tiny_files

TRANSFORMERS = [name for name in fixture_names() if "transformer" in name]
ENCODERS = [name for name in fixture_names() if name.startswith("gemma")]
MARK = json.dumps({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}).encode()


def published(name, folder):
    """A sparse file with real marks: 72 bytes each, as published."""
    whole = fixture(name)
    path = write_sparse(folder / f"{name}.safetensors", whole["tensors"], whole["__metadata__"])
    end = path.stat().st_size
    from comfyui_ltx25.ltx25.checkpoint import read_header

    header = read_header(path)
    with path.open("r+b") as file:
        for tensor in header.tensors.values():
            if tensor.name.endswith(".comfy_quant"):
                assert tensor.end - tensor.begin == len(MARK) == 72
                file.seek(tensor.begin)
                file.write(MARK)
    assert path.stat().st_size == end
    return open_file(path)


def on_meta(build):
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_published_transformers_have_every_tensor_in_its_place(name, tmp_path):
    header = published(name, tmp_path)
    formats = {"int8": ("int8",), "nvfp4": ("nvfp4",)}
    kind = next((key for key in formats if key in name), None)
    assert header.formats == formats.get(kind, ())
    assert len(header.stored) == {"int8": 1440, "nvfp4": 1176, None: 0}[kind]
    assert len(header.tensors) == 4349 - (name.endswith("nvfp4"))  # the launch file lacks the keyframe embedding
    config, connectors = read_transformer(header)
    prefix = transformer_prefix(header)
    dit = on_meta(lambda: DiT(config))
    places = check(dit, header, prefix, CONNECTOR_TENSORS)
    for lead, stream in ((VIDEO, connectors.video), (AUDIO, connectors.audio)):
        places |= check(on_meta(lambda stream=stream: Connector(stream)), header, prefix + lead)
    assert places.keys() == header.tensors.keys()
    if kind == "int8":
        assert all(stored.format == Int8(256) for stored in header.stored.values())
        own = check(dit, header, prefix, CONNECTOR_TENSORS)
        assert held_bytes(dit, header, own, torch.bfloat16, Held.FAST) < 0.52 * held_bytes(dit, header, own, torch.bfloat16, Held.DENSE)


@pytest.mark.parametrize("name", ENCODERS)
def test_published_text_encoders_have_every_tensor_in_its_place(name, tmp_path):
    header = published(name, tmp_path)
    assert len(header.stored) == (328 if "int8" in name else 0) and len(header.tensors) == 686
    tower = TowerConfig.read(header)
    layout = TextLayout.read(header)
    layout.check(header)
    check(on_meta(lambda: Tower(tower)), header, layout.tower, layout.unused)
    check(on_meta(lambda: FeatureProjection(FeatureConfig.read(header, tower))), header, PROJECTION)


# End to end

# Largest distance from the bf16 file, relative by norm, of the prompt's contexts and of the sampled latents: about twice what
# was measured. The formats themselves round weights by 0.7 % (int8, q8_0), 1 % (q6_k), 2.6 % (fp8), 5 % (e5m2, q4_k), 9 % (nvfp4).
CLIP = {"int8": 0.015, "nvfp4": 0.22, "fp8": 0.08, "fp8-e5m2": 0.18}
GGUF = {"Q4_K": 0.12, "Q5_K": 0.06, "Q6_K": 0.035}


def limit_of(storage):
    return CLIP.get(storage) or CLIP[storage.split("-")[0]]


@pytest.fixture(scope="module")
def plain():
    engine = open_engine()
    return engine.encode("A cat on a table.", WATCH), sampled(engine)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised")

    def make(slot, storage):
        pytest.importorskip("comfy_kitchen" if storage.startswith("nvfp4") else "torch")
        path = folder / f"{slot}-{storage}.safetensors"
        return path if path.exists() else write_quantised(getattr(tiny_files(), slot), path, storage)

    return make


@pytest.mark.parametrize("storage", SAFETENSORS)
def test_n16_l9_a_clip_of_a_quantised_transformer_is_that_of_bf16(storage, plain, made):
    """Scales are far from 1: whoever forgets them makes noise. L9: fp8 files hold fp8 connectors, plain and scaled."""
    contexts, clip = plain
    path = made("transformer", storage)
    header = open_file(path)
    assert header.formats == (storage.split("-")[0],)
    engine = open_engine(transformer=path)
    encoded = engine.encode("A cat on a table.", WATCH)
    got = sampled(engine, conditioning=encoded)
    limit = limit_of(storage)
    distances = (off(encoded.video, contexts.video), off(encoded.audio, contexts.audio), off(got.video, clip.video), off(got.audio, clip.audio))
    assert max(distances) < limit, distances
    assert max(distances) > limit / 20, distances  # it was quantised at all


@pytest.mark.parametrize("storage", ["int8", "fp8", "fp8-scale_weight"])
def test_a_quantised_text_encoder_gives_the_contexts_of_bf16(storage, plain, made):
    engine = open_engine(text_encoder=made("text_encoder", storage))
    encoded = engine.encode("A cat on a table.", WATCH)
    assert 1e-4 < off(encoded.video, plain[0].video) < {"int8": 0.006}.get(storage, 0.04)


@pytest.mark.parametrize("coarse", ["Q4_K", "Q5_K", "Q6_K"])
def test_a_gguf_transformer_and_text_encoder(coarse, plain, tmp_path):
    pytest.importorskip("gguf")
    files = {slot: write_gguf(getattr(tiny_files(), slot), tmp_path / f"{slot}.gguf", coarse) for slot in ("transformer", "text_encoder")}
    header = open_file(files["transformer"])
    assert header.formats == (f"GGUF {coarse}", "GGUF Q8_0")
    assert header.metadata["config"] == open_file(tiny_files().transformer).metadata["config"]
    engine = open_engine(**files)
    encoded = engine.encode("A cat on a table.", WATCH)
    got = sampled(engine, conditioning=encoded)
    assert max(off(encoded.video, plain[0].video), off(encoded.audio, plain[0].audio)) < GGUF[coarse]
    assert max(off(got.video, plain[1].video), off(got.audio, plain[1].audio)) < GGUF[coarse]


@pytest.mark.parametrize(("coarse", "stays"), [("Q8_0", True), ("Q6_K", False)])
@pytest.mark.parametrize("residency", ["resident", "stream"])
def test_matrices_that_a_gguf_cut_into_other_rows_are_what_they_were(coarse, stays, residency, plain, tmp_path):
    """Also merged with others. Kept as stored where their own rows are whole blocks, and decoded where they are not."""
    pytest.importorskip("gguf")
    path = write_gguf(tiny_files().transformer, tmp_path / "flat.gguf", coarse, flat=True)
    header = open_file(path)
    name = "transformer_blocks.0.attn1.to_q.weight"
    assert header.tensors[name].shape[1] % 256 and header.stored[name].format.stays(Held.EXACT) is stays
    kept, decoded = (sampled(open_engine(precision, residency, transformer=path), conditioning=plain[0]) for precision in ("auto", "bf16"))
    assert off(kept.video, decoded.video) < 1e-5 and off(kept.audio, decoded.audio) < 1e-5
    assert off(kept.video, plain[1].video) < GGUF["Q6_K"]
    every = [stored.format for stored in header.stored.values() if stored.format.name == f"GGUF {coarse}"]
    count = sum(not one.stays(Held.EXACT) for one in every)
    told = [notice for notice in kept.notices if "decoded" in notice]
    assert len(told) == (count > 0) and all(f"{count} of its {len(every)} GGUF {coarse} weights are decoded to float32" in one for one in told)


@pytest.mark.parametrize("storage", ["int8", "fp8-weight_scale"])
def test_weights_stay_as_stored_and_bf16_decodes_them(storage, made):
    path = made("transformer", storage)
    kept, dense = open_engine(transformer=path), open_engine("bf16", transformer=path)
    part, other = kept.opened.parts["transformer"], dense.opened.parts["transformer"]
    assert part.bytes < 0.6 * other.bytes  # float32 on the CPU
    part.load(WATCH)
    other.load(WATCH)
    block, wide = part["dit"].transformer_blocks[0], other["dit"].transformer_blocks[0]
    assert block.attn1.qkvg.weight is None and wide.attn1.qkvg.weight is not None
    for name in ("attn1.qkvg", "attn2.kv", "ff.net.2"):
        torch.testing.assert_close(block.get_submodule(name).storage.dense(torch.float32), wide.get_submodule(name).weight)
    if storage == "int8":
        assert isinstance(block.attn1.qkvg.storage, Stacked)  # the gate's rows are not quantised
    stored = sum(tensor.nbytes for module in part["dit"].modules() for tensor in module._parameters.values() if tensor is not None)
    stored += sum(module.storage.nbytes for module in part["dit"].modules() if getattr(module, "storage", None) is not None)
    assert stored <= part.bytes


def test_streamed_blocks_of_a_quantised_file_give_the_resident_clip(made):
    path = made("transformer", "int8")
    one, other = (sampled(open_engine("auto", residency, transformer=path)) for residency in ("resident", "stream"))
    assert torch.equal(one.video, other.video) and torch.equal(one.audio, other.audio)


def test_quantised_tables_of_streamed_blocks_are_decoded_as_those_of_resident_ones(plain, tmp_path):
    tensors, metadata = read_all(tiny_files().transformer)
    tables = [name for name in tensors if ".transformer_blocks." in name and "scale_shift_table" in name]
    assert tables
    for name in tables:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    write_file(tmp_path / "tables.safetensors", tensors, metadata)
    one, other = (sampled(open_engine("auto", residency, transformer=tmp_path / "tables.safetensors"), conditioning=plain[0]) for residency in ("resident", "stream"))
    assert torch.equal(one.video, other.video) and torch.equal(one.audio, other.audio)
    assert off(one.video, plain[1].video) < CLIP["fp8"]


def test_nvfp4_stays_as_stored_where_the_device_multiplies_it(plain, made, monkeypatch):
    """A pretended device: its products written out, or found wrong at the first use, when weights are decoded for each."""
    path = made("transformer", "nvfp4-bare")  # as published
    decoded = open_engine(transformer=path)
    wanted = sampled(decoded, conditioning=plain[0])
    assert decoded.opened.precision == "float32"
    monkeypatch.setattr("comfyui_ltx25.ltx25.parts.multiplies_nvfp4", lambda device: True)
    clips = {}
    for residency in ("resident", "stream"):
        engine = open_engine("auto", residency, transformer=path)
        part, other = (one.opened.parts["transformer"] for one in (engine, decoded))
        clips[residency] = sampled(engine, conditioning=plain[0])
        assert off(clips[residency].video, wanted.video) < 1e-5 and engine.opened.precision == "nvfp4"
        assert part.bytes < 0.6 * other.bytes and part.held == (part.bytes if residency == "resident" else part.least)
    assert torch.equal(clips["stream"].video, clips["resident"].video)
    engine = open_engine(transformer=path)
    part = engine.opened.parts["transformer"]
    part.load(WATCH)
    storages = [layer.storage for layer in part["dit"].modules() if getattr(layer, "storage", None) is not None]
    assert sum(kept.nbytes for kept in storages) + sum(t.nbytes for t in part["dit"].state_dict().values()) == part.bytes
    kept = [one for kept in storages for one in getattr(kept, "weights", (kept,)) if isinstance(one, Nvfp4Weight)]
    header = open_file(path)
    rows = sum(header.tensors[name].shape[0] for name in header.stored if "_connector." not in name)
    assert sum(one.rows for one in kept) == rows and all(one.x_scale is not None for one in kept)
    calls = []
    monkeypatch.setattr("comfyui_ltx25.ltx25.formats.weights.runs", lambda packed, like: nvfp4_linear.fits(packed))
    monkeypatch.setattr(nvfp4_linear, "_multiply", lambda *args: calls.append(args) or hardware.multiply(*args))
    for one in kept:
        one.x_scale = None  # the test's file has made-up ones
    got = sampled(engine, conditioning=plain[0])
    assert len(calls) == 2 * sum(map(nvfp4_linear.fits, (one.values for one in kept)))
    assert off(got.video, wanted.video) > 0.01 and off(got.video, plain[1].video) < 1.5 * CLIP["nvfp4"]


def test_l10_weights_that_are_decoded_on_load_are_told_once_with_the_run(plain, made):
    nvfp4 = {slot: made(slot, "nvfp4-bare") for slot in ("transformer", "text_encoder")}
    engine = open_engine(**nvfp4)
    encoded = engine.encode("A cat on a table.", WATCH)
    end = "its nvfp4 weights are decoded to float32 when they are loaded, not multiplied as stored."
    assert encoded.told == (f"text_encoder-nvfp4-bare.safetensors: {end}",)
    assert f"transformer-nvfp4-bare.safetensors: {end}" in sampled(engine, conditioning=encoded).notices
    again = engine.encode("A dog.", WATCH), engine.encode("A cat on a table.", WATCH)
    assert not any(one.told for one in again) and not any("decoded" in notice for notice in sampled(engine.with_loras([]), conditioning=encoded).notices)
    int8 = made("transformer", "int8")
    kept, dense = (sampled(open_engine(precision, transformer=int8), conditioning=plain[0]).notices for precision in ("auto", "bf16"))
    assert not any("decoded" in notice for notice in kept) and any("its int8 weights are decoded" in notice for notice in dense)


@pytest.mark.parametrize("storage", ["int8", "fp8-weight_scale", "nvfp4-bare"])
def test_l5_a_quantised_file_without_metadata_has_the_widths_of_its_tensors(storage, plain, tmp_path):
    if storage.startswith("nvfp4"):
        pytest.importorskip("comfy_kitchen")
    path = write_quantised(tiny_files().transformer, tmp_path / "bare.safetensors", storage, metadata=False)
    header = open_file(path)
    assert not header.metadata
    config, connectors = read_transformer(header)
    wanted = read_transformer(open_file(tiny_files().transformer))
    assert (config.width, config.audio_width, config.layers) == (wanted[0].width, wanted[0].audio_width, wanted[0].layers)
    assert connectors.video.width == wanted[1].video.width
    got = sampled(open_engine(transformer=path), conditioning=plain[0])
    assert off(got.video, plain[1].video) < limit_of(storage)


# Half-supported and broken marks


def written(tmp_path, change):
    tensors, metadata = read_all(write_quantised(tiny_files().transformer, tmp_path / "whole.safetensors", "int8"))
    change(tensors, metadata)
    write_file(tmp_path / "changed.safetensors", tensors, metadata)
    return tmp_path / "changed.safetensors"


def mark_of(**fields):
    return torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)


LAYER = "model.diffusion_model.transformer_blocks.0.attn1.to_q"
GOOD = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}


def set_mark(**fields):
    return lambda tensors, _: tensors.update({f"{LAYER}.comfy_quant": mark_of(**fields)})


CHANGES = {
    "unknown format": (set_mark(format="convrot_w4a4"), "convrot_w4a4"),
    "unknown field": (set_mark(**GOOD, zero_point=True), "zero_point"),
    "group that does not divide": (set_mark(**{**GOOD, "convrot_groupsize": 256}), "256"),
    "group that is no power of 4": (set_mark(**{**GOOD, "convrot_groupsize": 32}), "32"),
    "mark of another dtype": (set_mark(format="float8_e4m3fn"), "float8_e4m3fn"),
    "mark that is not JSON": (lambda t, _: t.update({f"{LAYER}.comfy_quant": torch.ones(5, dtype=torch.uint8)}), "not JSON"),
    "scale missing": (lambda t, _: t.pop(f"{LAYER}.weight_scale"), "weight_scale"),
    "scale of another length": (lambda t, _: t.update({f"{LAYER}.weight_scale": torch.ones(3, 1)}), "[3, 1]"),
    "int8 without a mark": (lambda t, _: t.pop(f"{LAYER}.comfy_quant"), "no mark"),
    "mark without a weight": (lambda t, _: t.update({f"{LAYER[:-1]}x.comfy_quant": mark_of(**GOOD)}), "not in the file"),
    "scale that belongs to nothing": (lambda t, _: t.update({"model.diffusion_model.proj_out.weight_scale": torch.ones(1)}), "proj_out.weight_scale"),
    "mark that is nested without end": (lambda t, _: t.update({f"{LAYER}.comfy_quant": torch.full((100_000,), ord("["), dtype=torch.uint8)}), "not JSON"),
    "format that is a list": (set_mark(format=["int8_tensorwise"]), f"{LAYER} has ['int8_tensorwise'] for a format"),
    "format that is a table": (set_mark(format={}), "has {} for a format"),
    "no format": (set_mark(convrot=True), "has None for a format"),
    "turned by a word": (set_mark(**{**GOOD, "convrot": "false"}), "convrot 'false'"),
    "metadata with a list for a format": (lambda t, m: m.update(_quantization_metadata=json.dumps({"layers": {"model.diffusion_model.proj_out": {"format": ["x"]}}})), "has ['x'] for a format"),
    "metadata of an unknown format": (lambda t, m: m.update(_quantization_metadata=json.dumps({"layers": {"model.diffusion_model.proj_out": {"format": "mxfp8"}}})), "mxfp8"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_marks_that_are_not_understood_are_refused_by_name(what, tmp_path):
    change, word = CHANGES[what]
    path = written(tmp_path, change)
    with pytest.raises(FileError) as caught:
        open_file(path)
    message = str(caught.value)
    assert word in message and message.startswith("changed.safetensors") and "\n" not in message and message.count(". ") == 0


SCALED = {
    ("int8", "weight_scale"): float("nan"), ("fp8-weight_scale", "weight_scale"): float("inf"), ("fp8-scale_weight", "scale_weight"): float("nan"),
    ("nvfp4-bare", "weight_scale"): float("nan"), ("nvfp4-bare", "weight_scale_2"): float("inf"),
}  # fmt: skip
BELOW = {("int8", "weight_scale"): 0.0, ("fp8-weight_scale", "weight_scale"): -0.25, ("fp8-scale_weight", "scale_weight"): 0.0, ("nvfp4-bare", "weight_scale_2"): -1.0}


@pytest.mark.parametrize("precision", ["auto", "bf16"])
@pytest.mark.parametrize("residency", ["resident", "stream"])
@pytest.mark.parametrize(("storage", "ending", "bad"), [(*key, bad) for table in (SCALED, BELOW) for key, bad in table.items()])
def test_a_scale_that_is_not_finite_or_not_above_0_is_refused_by_name_when_it_is_read(storage, ending, bad, residency, precision, plain, made, tmp_path):
    """It may come out as a finite clip of noise. Weights kept as stored, decoded, and read block by block."""
    tensors, metadata = read_all(made("transformer", storage))
    name = f"{LAYER}.{ending}"
    wide = tensors[name].float()
    wide.view(-1)[-1] = bad
    tensors[name] = wide.to(tensors[name].dtype)
    write_file(tmp_path / "bad.safetensors", tensors, metadata)
    engine = open_engine(precision, residency, transformer=tmp_path / "bad.safetensors")
    told = "0 or less" if math.isfinite(bad) else "NaN or infinity"
    with pytest.raises(FileError, match=f"^bad.safetensors: {name} holds {told}"):
        sampled(engine, conditioning=plain[0])


BAD = {
    "transformer": "model.diffusion_model.transformer_blocks.2.attn1.to_k.weight", "text_encoder": "layers.1.self_attn.k_proj.weight",
    "video_vae": "decoder", "audio_vae": "vocoder",
}  # fmt: skip


@pytest.mark.parametrize("residency", ["resident", "stream"])
@pytest.mark.parametrize("slot", BAD)
def test_a_weight_that_is_no_number_is_refused_by_name_whatever_file_it_is_in(slot, residency, plain, tmp_path):
    """Of keys that are NaN an attention on a CPU makes zeros: without a look at the file the clip is finite, and of nothing."""
    if residency == "stream" and slot.endswith("vae"):
        pytest.skip("decoders have no blocks to stream")
    tensors, metadata = read_all(getattr(tiny_files(), slot))
    name = next(name for name, tensor in tensors.items() if BAD[slot] in name and tensor.is_floating_point() and tensor.ndim > 1)
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[tensors[name].numel() // 2] = float("nan")
    path = tmp_path / f"bad-{slot}.safetensors"
    write_file(path, tensors, metadata)
    engine = open_engine("auto", residency, **{slot: path})
    with pytest.raises(FileError, match=f"^{path.name}: {re.escape(name)} holds NaN or infinity, wanted finite numbers; download the file again.$"):
        if slot == "text_encoder":
            engine.encode("A cat on a table.", WATCH)
        elif slot == "video_vae":
            engine.decode_video(plain[1].video, 0, "auto", WATCH)
        elif slot == "audio_vae":
            engine.decode_audio(plain[1].audio, None, WATCH)
        else:
            sampled(engine, conditioning=plain[0])
    assert not any(part.loaded for part in engine.parts if part.name == slot.replace("_", " "))


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_a_gguf_block_whose_factor_is_no_number_is_refused_by_name(precision, plain, tmp_path):
    pytest.importorskip("gguf")
    path = write_gguf(tiny_files().transformer, tmp_path / "bad.gguf", "Q4_K")
    header = open_file(path)
    name, stored = next((name, stored) for name, stored in header.stored.items() if "transformer_blocks.2.attn1.to_k" in name and "connector" not in name)
    with path.open("r+b") as file:
        file.seek(stored.parts["weight"].end - stored.format.kind.size + stored.format.kind.halves[-1])
        file.write(struct.pack("<e", float("nan")))
    with pytest.raises(FileError, match=f"^bad.gguf: {re.escape(name)} holds NaN or infinity"):
        sampled(open_engine(precision, transformer=path), conditioning=plain[0])


FP8_LAYERS = {"transformer": LAYER, "text_encoder": "model.layers.1.self_attn.k_proj"}
FP8_MARK = {"format": "float8_e4m3fn"}
LOST = {
    "weight_scale": ("fp8-weight_scale", lambda x, t, _: t.pop(f"{x}.weight_scale"), "is fp8 like .* which has a scale"),
    "scale_weight": ("fp8-scale_weight", lambda x, t, _: t.pop(f"{x}.scale_weight"), "that scaled_fp8 marks as scaled"),
    "all of a marked file": ("fp8-scale_weight", lambda x, t, _: [t.pop(name) for name in list(t) if name.endswith("scale_weight")], "that scaled_fp8 marks as scaled"),
    "of a marked layer": ("fp8", lambda x, t, _: t.update({f"{x}.comfy_quant": mark_of(**FP8_MARK)}), "is marked as 'float8_e4m3fn'"),
    "of a layer in a table": ("fp8", lambda x, _, m: m.update(_quantization_metadata=json.dumps({"layers": {x: FP8_MARK}})), "is marked as 'float8_e4m3fn'"),
}


@pytest.mark.parametrize("slot", FP8_LAYERS)
@pytest.mark.parametrize("what", LOST)
def test_an_fp8_weight_that_lost_its_scale_is_refused_by_name(what, slot, made, tmp_path):
    storage, change, word = LOST[what]
    tensors, metadata = read_all(made(slot, storage))
    change(FP8_LAYERS[slot], tensors, metadata)
    write_file(tmp_path / "lost.safetensors", tensors, metadata)
    named = r"[\w.]+" if what.startswith("all") else FP8_LAYERS[slot]
    with pytest.raises(FileError, match=f"^lost.safetensors: {named}.weight .*{word}.*weight_scale is not in the file: .* or use another one.$"):
        open_file(tmp_path / "lost.safetensors")


def test_fp8_without_scales_beside_layers_in_16_bits_and_vectors_in_fp8_stays_what_it_says(made, tmp_path):
    """Published community files: some layers left in bf16, and all that is no matrix cast as it is."""
    tensors, metadata = read_all(made("transformer", "fp8-weight_scale"))
    tensors.pop(f"{LAYER}.weight_scale")
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].bfloat16()
    vector = f"{LAYER.removesuffix('to_q')}q_norm.weight"
    tensors[vector] = tensors[vector].to(torch.float8_e4m3fn)
    write_file(tmp_path / "mixed.safetensors", tensors, metadata)
    header = open_file(tmp_path / "mixed.safetensors")
    assert f"{LAYER}.weight" not in header.stored and header.stored[vector].parts.keys() == {"weight"}
    assert not any(stored.parts.keys() - {"weight"} for stored in open_file(made("transformer", "fp8")).stored.values())


def test_parameters_of_a_mark_may_be_nested(tmp_path):
    path = written(tmp_path, set_mark(format="int8_tensorwise", params={"convrot": True, "convrot_groupsize": 16}))
    assert open_file(path).stored[f"{LAYER}.weight"].format == Int8(16)
    path = written(tmp_path, set_mark(format="int8_tensorwise", full_precision_matrix_mult=True))
    assert open_file(path).stored[f"{LAYER}.weight"].format == Int8(None)


def test_files_that_are_not_quantised_open_unchanged():
    from comfyui_ltx25.ltx25.checkpoint import read_header

    for path in vars(tiny_files()).values():
        assert open_file(path) == read_header(path)


def test_formats_are_named():
    assert [f.name for f in (Int8(256), Fp8(), Nvfp4())] == ["int8", "fp8", "nvfp4"]
