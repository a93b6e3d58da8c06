"""The Gemma-4 tower against official values and against transformers' own class."""

import json

import pytest
import torch
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.text.tower import rope, sliding_mask
from comfyui_ltx25.tests.support.golden import Golden
from comfyui_ltx25.tests.support.text import load_tower
from safetensors.torch import save_file

GOLDEN = Golden("text")
CASES = GOLDEN.names("tower/")


@pytest.fixture(scope="module", params=["bf16", "f32"])
def tower(request):
    return load_tower(GOLDEN.folder / f"text_encoder.{request.param}.safetensors")


def valid_ids(case):
    row = case.split("/")[1]
    index = GOLDEN.input("tokenize", "names").index(row)
    mask = GOLDEN.output("tokenize", "mask")[index].bool()
    return GOLDEN.output("tokenize", "ids")[index][mask].long()


def packed(tower, ids):
    with Watch().phase("text.tower", total=tower.config.layers, unit="layer") as phase:
        return tower(ids, phase.tick), phase


def states(tower, ids):
    """Every state (n, H), and the packed rows they were written to beside."""
    config = tower.config
    rows = torch.full((len(ids), config.hidden, config.states), float("nan"), dtype=tower.embed_tokens.weight.dtype)
    return list(tower.states(ids, rows)), rows


@pytest.mark.parametrize("case", CASES)
def test_golden_states_and_packed_rows(tower, case):
    ids = valid_ids(case)
    rows = GOLDEN.output(case, "rows").long() - (1024 - len(ids))  # of the padded row -> of the valid tokens
    assert rows.min() >= 0
    GOLDEN.check(case, "hidden", torch.stack(states(tower, ids)[0])[:, rows])
    GOLDEN.check(case, "packed", packed(tower, ids)[0][rows])


def test_one_tick_per_layer_in_order(tower):
    texts = []

    class Sink:
        wants_preview = False

        def check(self): ...
        def opened(self, phase): ...
        def closed(self, phase): ...
        def ticked(self, phase):
            texts.append((phase.done, phase.text))

    with Watch([Sink()]).phase("text.tower", total=6, unit="layer") as phase:
        tower(valid_ids("tower/short"), phase.tick)
    assert texts == [(i, f"layer {i}/6") for i in range(1, 7)]


def test_cancel_takes_effect_within_a_layer(tower):
    class Cancel(Exception):
        pass

    class Sink:
        wants_preview = False
        seen = 0

        def check(self):
            if self.seen == 3:
                raise Cancel

        def opened(self, phase): ...
        def closed(self, phase): ...
        def ticked(self, phase):
            self.seen = phase.done

    sink = Sink()
    with pytest.raises(Cancel), Watch([sink]).phase("text.tower", total=6, unit="layer") as phase:
        tower(valid_ids("tower/short"), phase.tick)
    assert sink.seen == 3
    again, _ = packed(tower, valid_ids("tower/short"))
    assert torch.equal(again, packed(tower, valid_ids("tower/short"))[0])


def test_states_land_where_the_projection_expects_them(tower):
    """Channel d of state s must be column d * S + s: the published weights' own order, layer fastest."""
    ids = valid_ids("tower/unicode")
    every, rows = states(tower, ids)
    hidden, count = tower.config.hidden, tower.config.states
    got = packed(tower, ids)[0]
    assert torch.equal(got, rows.flatten(1)) and got.shape == (len(ids), hidden * count)
    for channel, state in ((0, 0), (3, 1), (hidden - 1, count - 1), (17, 4)):
        want = every[state] * every[state].square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        torch.testing.assert_close(got[:, channel * count + state], want[:, channel])


@pytest.mark.parametrize("tokens", [1, 7, 128])
def test_tokens_that_follow_change_nothing_but_rounding(tower, tokens):
    """What lets a prompt run at a longer length, with pads behind it."""
    ids = torch.randint(1, 64, (tokens,), generator=torch.Generator().manual_seed(tokens))
    alone, _ = packed(tower, ids)
    for pads in (torch.zeros(128, dtype=torch.long), torch.full((3,), 63)):
        together, _ = packed(tower, torch.cat((ids, pads)))
        assert (together[:tokens] - alone).abs().max() < 2e-5
        assert together.isfinite().all()


def test_every_state_of_every_token_has_its_own_statistic(tower):
    row = packed(tower, valid_ids("tower/unicode"))[0].unflatten(1, (tower.config.hidden, tower.config.states))
    torch.testing.assert_close(row.square().mean(1), torch.ones(row.shape[0], row.shape[2]), atol=2e-3, rtol=0)


def test_full_layers_rotate_the_first_quarter_of_their_pairs_only():
    cos, sin = rope(5, 512, 1e6, 0.25, torch.device("cpu"))
    assert cos.shape == (5, 256)
    assert (sin[1:, :64] != 0).all() and (sin[:, 64:] == 0).all() and (cos[:, 64:] == 1).all()
    assert sin[1, 1].item() == pytest.approx(torch.tensor(1e6 ** (-2 / 512)).sin().item(), rel=1e-6)  # steps of the whole head


@pytest.mark.parametrize(("n", "window"), [(1, 1), (4, 4), (1024, 1024)])
def test_a_window_that_reaches_every_key_needs_no_mask(n, window):
    assert sliding_mask(n, window, torch.device("cpu")) is None


def test_a_window_of_four_shows_four_keys_itself_included():
    mask = sliding_mask(8, 4, torch.device("cpu"))
    assert [i for i, seen in enumerate(mask[7].tolist()) if seen] == [4, 5, 6, 7]
    assert [i for i, seen in enumerate(mask[1].tolist()) if seen] == [0, 1]


def test_embedding_scale_is_rounded_to_bf16_weights_only(tower):
    tower = load_tower(GOLDEN.folder / "text_encoder.bf16.safetensors", torch.bfloat16)
    assert tower._embedding_scale() == torch.tensor(32**0.5).bfloat16().item() != 32**0.5
    first = states(tower, torch.tensor([2, 5]))[0][0]
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, tower.embed_tokens.weight[[2, 5]] * torch.tensor(32**0.5).bfloat16())


def test_runs_in_float64(tower):
    ids = valid_ids("tower/short")
    exact = load_tower(GOLDEN.folder / "text_encoder.f32.safetensors", torch.float64)
    got, _ = packed(exact, ids)
    assert got.dtype == torch.float64
    assert (got - packed(tower, ids)[0]).abs().max() < 1e-4


@pytest.mark.parametrize(("n", "window"), [(1, 1024), (37, 1024), (37, 8)])
def test_all_states_equal_those_of_transformers(tmp_path, n, window):
    transformers = pytest.importorskip("transformers", minversion="5.24", reason="the oracle needs Python 3.11 and transformers")
    oracle, path = make_oracle(transformers, tmp_path, window)
    tower = load_tower(path)
    ids = torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(n))
    with torch.no_grad():
        want = oracle(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
    got, _ = states(tower, ids)
    assert len(got) == len(want) == 7
    for state, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert (ours - theirs[0]).abs().max().item() <= 1e-4, state
        assert theirs.std() > 0.05  # nothing died out, so every layer is compared


def make_oracle(transformers, folder, window):
    """A random Gemma-4 with random norms and layer scalars, and the same weights as a file in the published layout."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": window,
        "max_position_embeddings": 4096,
        "final_logit_softcapping": 30.0,
    }
    config = transformers.Gemma4UnifiedTextConfig(**sizes)
    config._attn_implementation = "eager"
    oracle = transformers.Gemma4UnifiedTextModel(config).float().eval()
    generator = torch.Generator().manual_seed(5)
    state = oracle.state_dict()
    for name, tensor in state.items():
        if tensor.ndim == 2:
            tensor.normal_(0.0, 1.0 if "embed" in name else 1.5 * tensor.shape[1] ** -0.5, generator=generator)
        else:
            tensor.uniform_(0.6, 1.4, generator=generator)
    assert sum(name.endswith("layer_scalar") for name in state) == 6 and not any("layers.5.self_attn.v_proj" in name for name in state)
    text = sizes | {
        "model_type": "gemma4_unified_text",
        "rms_norm_eps": 1e-6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    }
    gemma = {"model_type": "gemma4_unified", "gemma_version": "made-for-a-test", "text_config": text}
    path = folder / "oracle.safetensors"
    save_file({"model." + name: tensor.clone() for name, tensor in state.items()}, path, {"gemma_config": json.dumps(gemma)})
    return oracle, path
