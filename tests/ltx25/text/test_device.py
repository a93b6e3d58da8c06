"""The text side at its published size on a CUDA device, random weights, bf16: held against float64 beside plain bf16."""

import copy
import logging
import time

import pytest
import torch
import torch.nn.functional as F
from comfyui_ltx25.ltx25.config.connector import ConnectorStream
from comfyui_ltx25.ltx25.config.text import FeatureConfig
from comfyui_ltx25.ltx25.connector import Connector, Connectors
from comfyui_ltx25.ltx25.instrument import Sink, Watch
from comfyui_ltx25.ltx25.replay import Replay
from comfyui_ltx25.ltx25.text import SHORT, FeatureProjection, TextEncoder, TokenCount, Tower, run_length, working_bytes
from comfyui_ltx25.tests.support.published import PUBLISHED_TOWER as PUBLISHED
from comfyui_ltx25.tests.support.random_weights import fill_random

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

log = logging.getLogger(__name__)

def built(module, seed=0):
    return fill_random(module, "cuda", torch.bfloat16, seed).eval()


@pytest.fixture(scope="module")
def tower():
    with torch.device("meta"):
        tower = Tower(PUBLISHED)
    built(tower)
    for layer in tower.layers:
        layer.layer_scalar.add_(1.0)  # near 1: around 0 every layer would wipe out the ones before
        # Attention has no 1 / sqrt(d) of its own. Scores 16 times wider would pick single keys at random, and rounding
        # would decide which: two right models would then agree in nothing.
        layer.self_attn.q_norm.weight.div_(layer.self_attn.head_dim**0.5)
    return tower


def ids(n):
    return torch.randint(0, PUBLISHED.vocabulary, (n,), generator=torch.Generator().manual_seed(n)).cuda()


def room(tokens):
    return torch.empty(len(tokens), PUBLISHED.hidden, PUBLISHED.states, dtype=torch.bfloat16, device="cuda")


def packed(tower, tokens):
    with Watch().phase("text.tower") as phase:
        return tower(tokens, phase.tick)


@torch.no_grad()
def exact_states(tower, tokens):
    """Every state in float64, one widened layer on the device at a time."""
    x = tower.embed_tokens(tokens).double() * tower._embedding_scale()
    states = [x]
    for index, layer in enumerate(tower.layers, start=1):
        x = copy.deepcopy(layer).double()(x, tower._rope(len(tokens), layer.full, x.device), None, None)
        states.append(copy.deepcopy(tower.norm).double()(x) if index == len(tower.layers) else x)
    return states


def rms(x):
    return x.double().square().mean().sqrt().item()


@torch.no_grad()
def test_w3_states_on_a_card_are_within_twice_the_error_of_plain_bf16(tower):
    transformers = pytest.importorskip("transformers", minversion="5.8", reason="the plain bf16 model is transformers' own")
    tokens = ids(200)
    oracle = plain_bf16(transformers, tower)
    theirs = oracle(input_ids=tokens[None], output_hidden_states=True, use_cache=False).hidden_states
    del oracle
    torch.cuda.empty_cache()
    worst = 0.0
    for index, (ours, plain, want) in enumerate(zip(tower.states(tokens, room(tokens)), theirs, exact_states(tower, tokens), strict=True)):
        got, allowed = rms(ours - want) / rms(want), rms(plain[0] - want) / rms(want)
        worst = max(worst, got / allowed if allowed else 0.0)
        assert allowed < 0.2, "the random model amplifies rounding so much that no comparison means anything"
        assert got <= 2 * allowed, (index, got, allowed)
        if index in (1, 6, 24, 48):
            log.info("state %d: rms error %.2e of the state, plain bf16 %.2e", index, got, allowed)
    log.info("worst ratio to plain bf16 %.2f", worst)


def plain_bf16(transformers, tower):
    config = transformers.Gemma4UnifiedTextConfig(
        vocab_size=PUBLISHED.vocabulary,
        hidden_size=PUBLISHED.hidden,
        intermediate_size=PUBLISHED.intermediate,
        num_hidden_layers=PUBLISHED.layers,
        num_attention_heads=PUBLISHED.heads,
        num_key_value_heads=PUBLISHED.kv_heads,
        head_dim=PUBLISHED.head_dim,
        global_head_dim=PUBLISHED.full_head_dim,
        num_global_key_value_heads=PUBLISHED.full_kv_heads,
        attention_k_eq_v=True,
        sliding_window=PUBLISHED.window,
    )
    config._attn_implementation = "eager"
    with torch.device("cuda"):
        oracle = transformers.Gemma4UnifiedTextModel(config).eval()
    oracle.to(torch.bfloat16)
    state = dict(tower.state_dict())
    for index, layer in enumerate(tower.layers):
        lead = f"layers.{index}."
        merged = state.pop(lead + "self_attn.qkv_proj.weight").split(layer.self_attn.rows)
        state |= {f"{lead}self_attn.{name}.weight": part for name, part in zip(layer.self_attn.sources, merged, strict=True)}
        gate, up = state.pop(lead + "mlp.gate_up_proj.weight").chunk(2)
        state |= {f"{lead}mlp.gate_proj.weight": gate, f"{lead}mlp.up_proj.weight": up}
    oracle.load_state_dict(state, strict=True)
    return oracle


@torch.no_grad()
def test_projections_are_within_twice_the_error_of_plain_bf16(tower):
    with torch.device("meta"):
        projection = FeatureProjection(FeatureConfig(hidden=3840, states=49, video_width=4096, audio_width=2048))
    built(projection)
    rows = packed(tower, ids(100))
    for linear, got in zip((projection.video_aggregate_embed, projection.audio_aggregate_embed), projection(rows), strict=True):
        factor = (linear.out_features / 3840) ** 0.5
        want = torch.cat([F.linear(rows.double() * factor, w.double()) for w in linear.weight.split(512)], dim=1) + linear.bias.double()
        plain = F.linear(rows * factor, linear.weight, linear.bias)
        assert rms(got - want) <= 2 * rms(plain - want)
        log.info("projection to %d: rms error %.2e, plain bf16 %.2e", linear.out_features, rms(got - want), rms(plain - want))


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 200, 1024])
def test_memory_stays_within_the_estimate_and_a_prompt_is_quick(tower, n):
    tokens = ids(n)
    packed(tower, tokens)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, started = torch.cuda.memory_allocated(), time.perf_counter()
    rows = packed(tower, tokens)
    torch.cuda.synchronize()
    seconds, needed = time.perf_counter() - started, torch.cuda.max_memory_allocated() - before
    log.info("%d tokens: %.1f ms, %.0f MB working memory, %.0f MB estimated", n, 1e3 * seconds, needed / 1e6, working_bytes(PUBLISHED, n, 2) / 1e6)
    assert rows.isfinite().all()
    assert needed <= working_bytes(PUBLISHED, n, 2)
    assert seconds < 2


class Ids:
    """Stands where a tokenizer does: a prompt is the number of its tokens."""

    def encode(self, text):
        n = int(text)
        return ids(n).tolist(), TokenCount(n - 1, n)


class Listener(Sink):
    def __init__(self):
        self.done = {}

    def ticked(self, phase):
        self.done[phase.name] = phase.done


def test_a_prompt_has_the_same_bits_eager_captured_and_replayed(tower):
    """Also that graphs are bounded, go when they are dropped, and cost memory within what a long prompt may take."""
    with torch.device("meta"):
        projection = FeatureProjection(FeatureConfig(hidden=3840, states=49, video_width=4096, audio_width=2048))
    built(projection)
    plain, replay = TextEncoder(Ids(), tower, projection, None), Replay("the text encoder", 2)
    graphed = TextEncoder(Ids(), tower, projection, replay)
    wants = {n: plain.encode(str(n), Watch()) for n in (1, 100, 200, 256, 400, 512, 700)}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    for n in (200, 200, 256, 100, 1, 200, 400, 512, 512, 400, 700, 700, 200, 200):
        listener = Listener()
        got, want = graphed.encode(str(n), Watch([listener])), wants[n]
        assert torch.equal(got.video, want.video) and torch.equal(got.audio, want.audio), n
        assert listener.done["text.tower"] == PUBLISHED.layers
    assert replay.captured == 2
    torch.cuda.synchronize()
    log.info("peak with graphs %.0f MB above the weights", (torch.cuda.max_memory_reserved() - before) / 1e6)
    assert torch.cuda.max_memory_reserved() - before <= 2 * working_bytes(PUBLISHED, 1024, 2)
    replay.drop()
    del got
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (64 << 20)  # a workspace of the matrix library


@torch.no_grad()
def test_pads_behind_a_prompt_change_its_rows_by_rounding_only(tower):
    tokens = ids(200)
    alone = packed(tower, tokens).double()
    padded = torch.cat((tokens, torch.full((run_length(200, tokens.device) - 200,), PUBLISHED.pad, device="cuda")))
    assert len(padded) == 256 and run_length(SHORT + 1, tokens.device) == SHORT + 1
    exact = torch.stack([F.rms_norm(state, (PUBLISHED.hidden,), eps=1e-6) for state in exact_states(tower, tokens)], dim=-1).flatten(1)
    assert rms(packed(tower, padded)[:200] - exact) <= 1.2 * rms(alone - exact)


@torch.no_grad()
def test_contexts_have_the_same_bits_eager_captured_and_replayed():
    with torch.device("meta"):
        both = [Connector(ConnectorStream(8, 32, head_dim, 4096, True)) for head_dim in (128, 64)]
    for connector in both:
        built(connector)
    replay = Replay("the connectors", 1)
    with Watch().phase("text.connect") as phase:
        for n in (200, 7, 1024, 1):
            video, audio = (torch.randn(1, n, connector.width, device="cuda").bfloat16() for connector in both)
            got = Connectors(*both, replay).forward(video, audio, [n], 1024, phase)
            want = Connectors(*both, None).forward(video, audio, [n], 1024, phase)
            assert all(map(torch.equal, got, want)), n
        assert phase.done == 2 * 4 * 16 and replay.captured == 1


@torch.no_grad()
@pytest.mark.parametrize("head_dim", [128, 64], ids=["video", "audio"])
def test_connectors_are_within_twice_the_error_of_plain_bf16(head_dim):
    reference = pytest.importorskip("diffusers.pipelines.ltx2.connectors", reason="the plain bf16 model is diffusers' own")
    config = ConnectorStream(layers=8, heads=32, head_dim=head_dim, max_position=4096, ff_bias=True)
    with torch.device("meta"):
        connector = Connector(config)
    built(connector)
    features = torch.randn(1, 200, config.width, generator=torch.Generator("cuda").manual_seed(2), device="cuda").bfloat16()
    exact = copy.deepcopy(connector).double()
    with Watch().phase("text.connect") as phase:
        rope = connector.rope(1024, features.device)
        got = connector(connector.assemble(features, [200], 1024), rope, phase.tick)
        want = exact(exact.assemble(features.double(), [200], 1024), rope, phase.tick)
        torch.cuda.synchronize()
        started = time.perf_counter()
        connector(connector.assemble(features, [200], 1024), rope, phase.tick)
        torch.cuda.synchronize()
    log.info("connector %d wide: %.1f ms", config.width, 1e3 * (time.perf_counter() - started))
    oracle = reference.LTX2ConnectorTransformer1d(
        num_attention_heads=32,
        attention_head_dim=head_dim,
        num_layers=8,
        num_learnable_registers=128,
        rope_base_seq_len=4096,
        rope_theta=10000.0,
        rope_double_precision=True,
        rope_type="split",
        gated_attention=True,
    )
    state = {}
    for name, tensor in connector.state_dict().items():
        name = name.replace("transformer_1d_blocks", "transformer_blocks").replace("q_norm", "norm_q").replace("k_norm", "norm_k")
        if "to_qkv" in name:
            state |= {name.replace("to_qkv", part): rows for part, rows in zip(("to_q", "to_k", "to_v"), tensor.chunk(3), strict=True)}
        else:
            state[name] = tensor
    oracle.load_state_dict(state, strict=True)
    oracle.to("cuda", torch.bfloat16)
    padded = F.pad(features, (0, 0, 0, 1024 - 200))
    mask = torch.zeros(1, 1, 1, 1024, device="cuda", dtype=torch.bfloat16)
    mask[..., 200:] = torch.finfo(torch.bfloat16).min
    plain, _ = oracle(padded, mask)
    log.info("connector %d wide: rms error %.2e, plain bf16 %.2e", config.width, rms(got - want), rms(plain - want))
    assert rms(got - want) <= 2 * rms(plain - want)
