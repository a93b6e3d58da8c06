"""The text side at its published size on a CUDA device, random weights, bf16: held against float64 beside plain bf16."""

import copy
import logging
import time

import pytest
import torch
import torch.nn.functional as F
from comfyui_ltx25.ltx25.config.connector import ConnectorStream
from comfyui_ltx25.ltx25.config.text import FeatureConfig
from comfyui_ltx25.ltx25.connector import Connector
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.text import FeatureProjection, Tower, working_bytes
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


def packed(tower, tokens):
    with Watch().phase("text.tower") as phase:
        return tower(tokens, phase)


@torch.no_grad()
def exact_states(tower, tokens):
    """Every state in float64, one widened layer on the device at a time."""
    x = tower.embed_tokens(tokens).double() * tower._embedding_scale()
    states = [x]
    for index, layer in enumerate(tower.layers, start=1):
        x = copy.deepcopy(layer).double()(x, tower._rope(len(tokens), layer.full, x.device), None)
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
    for index, (ours, plain, want) in enumerate(zip(tower.states(tokens), theirs, exact_states(tower, tokens), strict=True)):
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
        got = connector(features, [200], 1024, phase)
        want = exact(features.double(), [200], 1024, phase)
        torch.cuda.synchronize()
        started = time.perf_counter()
        connector(features, [200], 1024, phase)
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
