"""Layouts, what consumes which weight, and inputs that do not fit."""

from dataclasses import replace

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import check, expected, read_header
from comfyui_ltx25.ltx25.config.transformer import CONNECTOR_TENSORS, read_transformer, transformer_prefix
from comfyui_ltx25.ltx25.dit import Contexts, DiT, Leg, LegPlan, Stream
from comfyui_ltx25.ltx25.errors import FileError, InputError
from comfyui_ltx25.tests.support import golden_dit as golden
from comfyui_ltx25.tests.support.dit_cases import forward_of, plan_of
from comfyui_ltx25.tests.support.files import fixture, write_published, write_sparse
from comfyui_ltx25.tests.support.random_weights import fill_random

CPU = torch.device("cpu")
BF16_FILES = ("ltx-2.5-22b-dev-transformer-bf16", "ltx-2.5-22b-distilled-transformer-bf16")


@pytest.mark.parametrize("name", BF16_FILES)
def test_published_file_loads_with_nothing_missing_and_nothing_left(name, tmp_path):
    header = read_header(write_published(name, tmp_path))
    config, _ = read_transformer(header)
    with torch.device("meta"):
        dit = DiT(config)
    places = check(dit, header, transformer_prefix(header), CONNECTOR_TENSORS)
    assert len(places) == 4091
    assert sum(p.numel() for p in dit.parameters()) == 18_987_859_200
    rest = header.tensors.keys() - places.keys()
    assert len(rest) == 258 and all("_embeddings_connector." in tensor for tensor in rest)


def test_a_file_without_the_keyframe_embedding_is_known_by_the_tensor_not_by_its_config(tmp_path):
    published = fixture(BF16_FILES[0])
    assert published["tensors"].pop("model.diffusion_model.keyframes_abs_pos_embedding")
    header = read_header(write_sparse(tmp_path / "a.safetensors", published["tensors"], published["__metadata__"]))
    config, _ = read_transformer(header)
    assert not config.keyframe_embedding
    with torch.device("meta"):
        check(DiT(config), header, transformer_prefix(header), CONNECTOR_TENSORS)


@pytest.fixture(scope="module")
def poked():
    """A transformer of our own to write to."""
    return golden.load_dit(golden.header(), torch.float32)


def outputs(dit, forward, negative=None, legs=(Leg.COND,)):
    plan = LegPlan(legs, frozenset({2}), frozenset({2}), True, True)
    return torch.cat([torch.cat((v.video.flatten(), v.audio.flatten())) for v in forward.run(dit, plan, negative).values()])


def test_n7_every_tensor_of_the_file_changes_the_result(poked):
    """Each file tensor (a part of a merged parameter, too) and, for tables, each row."""
    forward = forward_of(poked, golden.inputs("dit/two_sigmas"))
    before = outputs(poked, forward)
    assert torch.equal(outputs(poked, replace(forward, tables=poked.tables(forward.geometry, 0.725, 0.3))), before)
    parameters = poked.state_dict(keep_vars=True)
    silent = []
    for name, place in expected(poked, golden.header(), "model.diffusion_model.").items():
        if name.startswith(("transformer_blocks.0.", "transformer_blocks.1.", "transformer_blocks.2.")):
            continue  # the last block stands for all: what nothing reads there nothing reads anywhere
        whole = parameters[place.name]
        part = whole if place.rows is None else whole[place.start : place.start + place.rows]
        for piece in part if "scale_shift_table" in name else [part]:
            saved = piece.detach().clone()
            with torch.no_grad():
                piece += 0.5
                again = replace(forward, tables=poked.tables(forward.geometry, 0.725, 0.3)) if "adaln" in name else forward
                changed = (outputs(poked, again) - before).abs().max()
                piece.copy_(saved)
            if not changed > 1e-4:
                silent.append((name, float(changed)))
    assert not silent
    assert torch.equal(outputs(poked, forward), before)


def test_n7_keyframe_embedding_enters_through_marked_tokens_only(poked):
    case = golden.inputs("dit/t2v_cond")
    entered = []
    hook = poked.transformer_blocks[0].register_forward_pre_hook(lambda module, args: entered.append(args[0].video.x.row(0).clone()))
    saved = poked.keyframes_abs_pos_embedding.detach().clone()
    try:
        base = outputs(poked, forward_of(poked, case))
        with torch.no_grad():
            poked.keyframes_abs_pos_embedding.fill_(10.0)
        assert (outputs(poked, forward_of(poked, case)) - base).abs().max() > 1e-2
    finally:
        hook.remove()
        with torch.no_grad():
            poked.keyframes_abs_pos_embedding.copy_(saved)
    first_frame = case["video_keyframes_mask"][0, :, 0] > 0
    moved = (entered[0] != entered[1]).any(-1)[0]
    assert torch.equal(moved, first_frame) and 0 < int(first_frame.sum()) < len(first_frame)


def test_n11_masks_act_on_tokens_also_where_tokens_and_width_are_equal():
    """T = D = 64: one token is conditioned (and one marked); every token row that enters block 0 is what it should be."""
    dit, case = golden.tiny_dit(), golden.inputs("dit/tokens_equal_width")
    tokens = case["video_latent"].shape[1]
    assert tokens == dit.config.width and case["audio_latent"].shape[1] == dit.config.audio_width
    for stream, at in (("video", 5), ("audio", 7)):
        changed = dict(case, **{f"{stream}_timesteps": case[f"{stream}_timesteps"].clone()})
        changed[f"{stream}_timesteps"][0, at] *= 0.25
        forward = forward_of(dit, changed)
        index = getattr(forward.geometry, stream).index
        levels = getattr(forward.geometry, stream).levels
        assert (levels[index] != 1).nonzero().flatten().tolist() == [at]
        got = forward.run(dit, plan_of(case, Leg.COND))[Leg.COND]
        want = shuffled(dit, changed, stream)
        torch.testing.assert_close(getattr(got, stream), want, atol=1e-5, rtol=1e-5)


def shuffled(dit, case, stream):
    """The same tokens in another order, put back: a mask read along the width would not follow."""
    torch.manual_seed(0)
    order = torch.randperm(case[f"{stream}_latent"].shape[1])
    parts = {f"{stream}_latent": 1, f"{stream}_timesteps": 1, f"{stream}_positions": 2, f"{stream}_keyframes_mask": 1}
    moved = case | {name: case[name].index_select(axis, order) for name, axis in parts.items() if name in case}
    result = getattr(forward_of(dit, moved).run(dit, plan_of(case, Leg.COND))[Leg.COND], stream)
    return result[:, order.argsort()]


def test_w1_no_float64_off_the_cpu(monkeypatch):
    """Everything that reaches the device is made on it or moved to it; here the device is meta, which refuses nothing."""
    made = []
    original = torch.Tensor.to

    def to(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        made.append(result)
        return result

    monkeypatch.setattr(torch.Tensor, "to", to)
    with torch.device("meta"):
        dit = DiT(golden.config()).to(torch.bfloat16)
    case = golden.inputs("dit/i2v_fraction")
    streams = [stream_for(case, name) for name in ("video", "audio")]
    geometry = dit.prepare(*streams, torch.device("meta"), torch.bfloat16)
    tables = dit.tables(geometry, 0.5, 0.5)
    text = Contexts(*(case[f"{name}_context"].to("meta") for name in ("video", "audio")))
    plan = LegPlan((Leg.COND, Leg.STG), frozenset({1}), frozenset(), True, True)
    got = dit(case["video_latent"].to("meta"), case["audio_latent"].to("meta"), geometry, tables, text, None, plan, True, lambda _: None)
    assert got[Leg.STG].video.dtype == torch.bfloat16 and got[Leg.STG].video.is_meta
    assert any(tensor.is_meta for tensor in made)
    assert not [tensor.shape for tensor in made if tensor.is_meta and tensor.dtype == torch.float64]
    held = [geometry.video.rope.cos, geometry.video.mask, geometry.video.index, geometry.audio.rope.sin, tables.video.rows]
    assert all(tensor.is_meta and tensor.dtype != torch.float64 for tensor in held)


def stream_for(case, name):
    mask = torch.ones(case[f"{name}_latent"].shape[1])
    mask[:3] = 0.5
    marked = torch.zeros(len(mask), dtype=torch.bool) if name == "video" else None
    return Stream(case[f"{name}_positions"][0], mask, marked, False, None)


def test_a_frozen_stream_counts_as_sigma_0(poked):
    case = golden.inputs("dit/audio_frozen")
    streams = [stream_for(case, "video"), replace(stream_for(case, "audio"), frozen=True)]
    geometry = poked.prepare(*streams, CPU, torch.float32)
    given, zero = poked.tables(geometry, 0.7, 0.7), poked.tables(geometry, 0.7, 0.0)
    assert torch.equal(given.audio.rows, zero.audio.rows) and torch.equal(given.audio.prompt, zero.audio.prompt)
    assert torch.equal(given.video.cross_gate, zero.video.cross_gate)


def test_tables_of_a_schedule_are_the_tables_of_its_steps(poked, monkeypatch):
    case = golden.inputs("dit/i2v_fraction")
    geometry = poked.prepare(stream_for(case, "video"), stream_for(case, "audio"), CPU, torch.float32)
    sigmas = [(1.0, 1.0), (0.6, 0.3), (0.1, 0.0)]
    together = poked.schedule_tables(geometry, sigmas)
    counts = []
    monkeypatch.setattr("comfyui_ltx25.ltx25.dit.tables._ROWS_AT_ONCE", 0)
    pieces = poked.schedule_tables(geometry, sigmas, counts.append)
    assert counts == [1, 2, 3]
    monkeypatch.setattr("comfyui_ltx25.ltx25.dit.tables._ROWS_KEPT", 0)
    one_by_one = poked.schedule_tables(geometry, sigmas)
    assert len(together) == len(one_by_one) == 3
    for i, pair in enumerate(sigmas):
        step = poked.tables(geometry, *pair)
        for stream in ("video", "audio"):
            for name, want in vars(getattr(step, stream)).items():
                assert torch.equal(getattr(getattr(one_by_one[i], stream), name), want)
                assert torch.equal(getattr(getattr(pieces[i], stream), name), want)
                torch.testing.assert_close(getattr(getattr(together[i], stream), name), want, atol=1e-6, rtol=1e-5)


def test_modulation_is_made_for_as_many_blocks_as_fit(poked, monkeypatch):
    forward = forward_of(poked, golden.inputs("dit/per_token_random"))
    together = outputs(poked, forward)
    monkeypatch.setattr("comfyui_ltx25.ltx25.dit.model._MODULATION_BYTES", 1)
    assert torch.equal(outputs(poked, forward), together)


def test_prompt_producers_may_be_missing(poked):
    """Files whose text keys and values do not depend on sigma: only the blocks' own tables modulate the context."""
    with torch.device("meta"):
        dit = DiT(replace(golden.config(), prompt_adaln=False))
    fill_random(dit, "cpu", torch.float32)
    forward = forward_of(dit, golden.inputs("dit/t2v_cond"))
    assert forward.tables.video.prompt is None
    before = outputs(dit, forward)
    with torch.no_grad():
        dit.transformer_blocks[1].prompt_scale_shift_table += 0.5
    assert (outputs(dit, forward) - before).abs().max() > 1e-4


def test_wrong_inputs_are_refused_in_one_sentence(poked):
    case = golden.inputs("dit/t2v_cond")
    forward = forward_of(poked, case)
    cond = LegPlan((Leg.COND,), frozenset(), frozenset(), True, True)
    with pytest.raises(InputError, match=r"\(24, 11\).*\(24, 12\)"):
        replace(forward, video=forward.video[..., :11]).run(poked, cond)
    with pytest.raises(InputError, match="None"):
        replace(forward, audio=None).run(poked, cond)
    with pytest.raises(InputError, match="blocks 0 to 3"):
        forward.run(poked, replace(cond, stg_video_blocks=frozenset({99})))
    with pytest.raises(InputError, match="no leg"):
        forward.run(poked, replace(cond, legs=()))
    with pytest.raises(InputError, match="no audio context"):
        replace(forward, positive=Contexts(forward.positive.video, None)).run(poked, cond)
    for shape in ((1, 17, 63), (17, 64), (2, 17, 64)):
        with pytest.raises(InputError, match="video context has shape"):
            replace(forward, positive=Contexts(torch.zeros(shape), forward.positive.audio)).run(poked, cond)
    with pytest.raises(InputError, match="2 clips and the audio latent 1"):
        replace(forward, video=forward.video.repeat(2, 1, 1)).run(poked, cond)
    video = stream_for(case, "video")
    for broken in (
        replace(video, mask=video.mask + 1),
        replace(video, mask=video.mask * float("nan")),
        replace(video, mask=video.mask[:-1]),
        replace(video, marked=video.marked[:-1]),
        replace(video, bias=torch.zeros(3, 3)),
        replace(video, positions=video.positions[:1]),
        Stream(torch.zeros(3, 0, 2), torch.zeros(0), None, False, None),
    ):
        with pytest.raises(InputError, match="^video: "):
            poked.prepare(broken, None, CPU, torch.float32)
    with pytest.raises(InputError, match="at least one"):
        poked.prepare(None, None, CPU, torch.float32)


def test_a_missing_tensor_is_named(tmp_path):
    published = fixture(BF16_FILES[0])
    gone = "model.diffusion_model.transformer_blocks.7.attn2.to_v.bias"
    del published["tensors"][gone]
    header = read_header(write_sparse(tmp_path / "a.safetensors", published["tensors"], published["__metadata__"]))
    with torch.device("meta"):
        dit = DiT(read_transformer(header)[0])
    with pytest.raises(FileError, match=gone):
        check(dit, header, transformer_prefix(header), CONNECTOR_TENSORS)
