"""Connectors against official values and against diffusers on ragged batches."""

import json

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.config.connector import ConnectorStream
from comfyui_ltx25.ltx25.config.text import FeatureConfig
from comfyui_ltx25.ltx25.connector import Connectors, context_length, rotary
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.text import FeatureProjection
from comfyui_ltx25.tests.support.golden import Golden
from comfyui_ltx25.tests.support.loading import load
from comfyui_ltx25.tests.support.text import load_connectors
from safetensors.torch import load_file, save_file

TEXT = Golden("text")
DIT = TEXT.folder.parent / "dit"

# The golden file keeps one tensor `mask` for this case, the outgoing one (all ones), where the incoming one belongs too.
# These are the incoming masks that give the official outputs, which no other count or padding side does.
RAGGED = [(1, "left"), (130, "right"), (128, "left"), (256, "none")]


@pytest.fixture(scope="module", params=["bf16", "f32"])
def connectors(request):
    return load_connectors(TEXT.folder / f"transformer_connectors.{request.param}.safetensors")


def connect(connectors, video, audio, counts, length):
    with Watch().phase("text.connect", total=connectors.blocks, unit="block") as phase:
        got = connectors.forward(video, audio, counts, length, phase)
    assert phase.done == phase.total
    return got


def one(connector, features, counts, length):
    with Watch().phase("text.connect") as phase:
        return connector(connector.assemble(features, counts, length), connector.rope(length, features.device), phase.tick)


def valid_first(features, mask):
    """Rows whose mask is set moved to the front, in order; and how many they are."""
    order = torch.argsort(mask.int(), dim=1, descending=True, stable=True)
    return torch.gather(features, 1, order[..., None].expand_as(features)), mask.sum(1).tolist()


def test_every_golden_case_of_the_connectors_has_a_test():
    assert TEXT.names("connectors/") == ["connectors/" + name for name in ("ragged", "video_all_valid", "audio_all_valid", "rope", "block0")]


def test_golden_ragged_batch(connectors):
    case = "connectors/ragged"
    assert TEXT.input(case, "mask").bool().all()  # see RAGGED
    mask = torch.zeros(4, 256, dtype=torch.bool)
    for row, (count, side) in enumerate(RAGGED):
        mask[row, slice(256 - count, None) if side == "left" else slice(count)] = True
    video, counts = valid_first(TEXT.input(case, "video_features"), mask)
    audio, _ = valid_first(TEXT.input(case, "audio_features"), mask)
    assert counts == [count for count, _ in RAGGED]
    got = connect(connectors, video, audio, counts, 256)
    TEXT.check(case, "video_context", got[0])
    TEXT.check(case, "audio_context", got[1])


@pytest.mark.parametrize("stream", ["video", "audio"])
def test_golden_no_register_used(connectors, stream):
    case = f"connectors/{stream}_all_valid"
    TEXT.check(case, "context", one(getattr(connectors, stream), TEXT.input(case, "features"), [128] * 4, 128))


def test_golden_first_block(connectors):
    x = TEXT.input("connectors/block0", "x")
    block = connectors.video.transformer_1d_blocks[0]
    TEXT.check("connectors/block0", "y", block(x, rotary(connectors.video.config, x.shape[1], x.device)))


def test_golden_rotary_tables():
    case = "connectors/rope"
    heads, dim, max_pos = (TEXT.input(case, name) for name in ("heads", "dim", "max_pos"))
    positions = TEXT.input(case, "positions").long()
    assert TEXT.input(case, "theta") == 1e4
    stream = ConnectorStream(layers=1, heads=heads, head_dim=dim // heads, max_position=max_pos, ff_bias=True)
    for name, table in zip(("cos", "sin"), rotary(stream, int(positions.max()) + 1, torch.device("cpu")), strict=True):
        TEXT.check(case, name, table[positions].unflatten(1, (heads, -1)).transpose(0, 1)[None])


def test_golden_of_the_transformer_left_padded_prompt():
    case = json.loads((DIT / "index.json").read_text())["connectors/left_padded"]
    tensors = load_file(DIT / "cases.safetensors")
    value = {name: tensors[v["tensor"]] for name, v in (case["inputs"] | case["outputs"]).items()}
    mask = value["mask"].bool()
    video, counts = valid_first(value["video_features"], mask)
    audio, _ = valid_first(value["audio_features"], mask)
    connectors = load_connectors(DIT / "transformer_f32.safetensors")
    got = connect(connectors, video, audio, counts, 128)
    assert value["mask_out"].all()
    for name, context in zip(("video_context", "audio_context"), got, strict=True):
        torch.testing.assert_close(context, value[name], atol=case["tolerance"]["atol"], rtol=case["tolerance"]["rtol"])


def test_n8_tokens_come_first_and_registers_fill_by_absolute_position(connectors):
    video = connectors.video
    features = torch.randn(2, 7, 32)
    x = video.assemble(features, [5, 0], 256)
    registers = video.learnable_registers
    assert torch.equal(x[0, :5], features[0, :5])
    assert torch.equal(x[0, 5:128], registers[5:]) and torch.equal(x[0, 128:], registers)
    assert torch.equal(x[1], registers.repeat(2, 1))


def test_n8_five_tokens_padded_to_128_depend_on_their_order_and_on_no_padding(connectors):
    features, audio = torch.randn(1, 5, 32), torch.randn(1, 5, 16)
    want = connect(connectors, features, audio, [5], 128)
    noise = torch.cat((features, 100 * torch.randn(1, 3, 32)), 1), torch.cat((audio, 100 * torch.randn(1, 3, 16)), 1)
    for a, b in zip(want, connect(connectors, *noise, [5], 128), strict=True):
        assert torch.equal(a, b)
    swapped = one(connectors.video, features.flip(1), [5], 128)
    assert (swapped.flip(1) - want[0].flip(1)).abs().max() > 1e-2


def test_registers_are_attended_to(connectors):
    features = torch.randn(1, 5, 32)
    want = one(connectors.video, features, [5], 128)
    last = connectors.video.learnable_registers[127].clone()
    try:
        connectors.video.learnable_registers[127] += 1.0
        assert (one(connectors.video, features, [5], 128)[:, :5] - want[:, :5]).abs().max() > 1e-4
    finally:
        connectors.video.learnable_registers[127] = last


@pytest.mark.parametrize(("tokens", "length"), [(1, 1024), (1023, 1024), (1024, 1024), (1025, 1152), (1152, 1152), (2000, 2048)])
def test_n9_contexts_are_at_least_1024_long_and_a_multiple_of_128(tokens, length):
    assert context_length(tokens) == length


@pytest.mark.parametrize("tokens", [1, 130, 1030])
def test_unprocessed_conditioning_of_the_host_gives_the_same_contexts(connectors, tokens):
    video, audio = torch.randn(1, tokens, 32), torch.randn(1, tokens, 16)
    want = connect(connectors, video, audio, [tokens], context_length(tokens))
    with Watch().phase("text.connect") as phase:
        got = connectors.unprocessed(torch.cat((video, audio), -1), phase)
    assert got[0].shape == (1, context_length(tokens), 32) and got[1].shape[-1] == 16
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(1, 4, 47), (2, 4, 48), (1, 0, 48), (4, 48)])
def test_unprocessed_conditioning_of_another_model_is_refused(connectors, shape):
    with Watch().phase("text.connect") as phase, pytest.raises(InputError, match=r"wanted \(1, tokens, 48\)"):
        connectors.unprocessed(torch.zeros(shape), phase)


def test_features_of_another_width_are_refused_before_any_product(connectors):
    with pytest.raises(InputError, match="video text features are 33 wide and this model reads 32"):
        connect(connectors, torch.zeros(1, 4, 33), torch.zeros(1, 4, 16), [4], 128)


def test_batch_rows_do_not_see_each_other(connectors):
    video, audio = torch.randn(3, 40, 32), torch.randn(3, 40, 16)
    together = connect(connectors, video, audio, [40, 3, 17], 128)
    for row, count in enumerate((40, 3, 17)):
        alone = connect(connectors, video[row : row + 1], audio[row : row + 1], [count], 128)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[row : row + 1], b, atol=2e-6, rtol=0)


def test_runs_in_float64_close_to_float32(connectors):
    exact = load_connectors(TEXT.folder / "transformer_connectors.f32.safetensors", torch.float64)
    features = torch.randn(1, 9, 32)
    got = one(exact.video, features.double(), [9], 128)
    assert got.dtype == torch.float64
    assert (got - one(connectors.video, features, [9], 128)).abs().max() < 1e-5


@pytest.mark.parametrize("counts", [[5], [40, 130], [1, 256, 128], [0, 17]])
def test_projections_and_connectors_equal_diffusers_on_ragged_batches(tmp_path, counts):
    reference = pytest.importorskip("diffusers.pipelines.ltx2.connectors", reason="the oracle needs Python 3.11 and diffusers")
    oracle = make_oracle(reference)
    connectors, projection = from_official_files(tmp_path, oracle)
    length, batch = 256, len(counts)
    generator = torch.Generator().manual_seed(7)
    stack = torch.randn(batch, length, 16, 7, generator=generator)  # (B, T, C, S)
    mask = torch.zeros(batch, length, dtype=torch.long)
    for row, count in enumerate(counts):  # left padding in even rows, right in odd ones
        mask[row, slice(length - count, None) if row % 2 == 0 else slice(count)] = 1
    with torch.no_grad():
        want_video, want_audio, want_mask = oracle(stack, mask)
    assert want_mask.bool().all()
    normed = torch.nn.functional.rms_norm(stack.transpose(2, 3), (16,), eps=1e-6).transpose(2, 3).flatten(2)  # C * S, S fastest
    with torch.no_grad():
        video, audio = (features.unflatten(0, (batch, length)) for features in projection(normed.flatten(0, 1)))
    got = connect(connectors, valid_first(video, mask.bool())[0], valid_first(audio, mask.bool())[0], counts, length)
    assert (got[0] - want_video).abs().max().item() <= 1e-5
    assert (got[1] - want_audio).abs().max().item() <= 1e-5


def make_oracle(reference):
    torch.manual_seed(3)
    stream = {"num_attention_heads": 4, "num_layers": 2, "num_learnable_registers": 128, "gated_attn": None}
    settings = {f"{name}_connector_{key}": value for name in ("video", "audio") for key, value in stream.items() if value is not None}
    oracle = reference.LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=7,
        video_connector_attention_head_dim=8,
        audio_connector_attention_head_dim=4,
        video_gated_attn=True,
        audio_gated_attn=True,
        connector_rope_base_seq_len=4096,
        rope_theta=10000.0,
        rope_double_precision=True,
        rope_type="split",
        per_modality_projections=True,
        video_hidden_dim=32,
        audio_hidden_dim=16,
        proj_bias=True,
        **settings,
    )
    generator = torch.Generator().manual_seed(11)
    for name, parameter in oracle.named_parameters():
        with torch.no_grad():
            if "norm_" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif parameter.ndim == 2 and "registers" not in name:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.normal_(0.0, 0.5, generator=generator)
    return oracle.eval()


def from_official_files(folder, oracle):
    """The oracle's weights under the published names, in the two files they come in, read by our loader."""
    renames = (
        ("video_text_proj_in", "text_embedding_projection.video_aggregate_embed"),
        ("audio_text_proj_in", "text_embedding_projection.audio_aggregate_embed"),
        ("video_connector.", "model.diffusion_model.video_embeddings_connector."),
        ("audio_connector.", "model.diffusion_model.audio_embeddings_connector."),
        ("transformer_blocks", "transformer_1d_blocks"),
        ("norm_q", "q_norm"),
        ("norm_k", "k_norm"),
    )
    projections, connectors = {}, {}
    for name, tensor in oracle.state_dict().items():
        for theirs, official in renames:
            name = name.replace(theirs, official)
        (projections if name.startswith("text_embedding") else connectors)[name] = tensor.clone()
    config = {"connector_apply_gated_attention": True, "connector_positional_embedding_max_pos": [4096], "connector_num_layers": 2}
    config |= {"connector_num_attention_heads": 4, "connector_attention_head_dim": 8}
    config |= {"audio_connector_num_attention_heads": 4, "audio_connector_attention_head_dim": 4}
    save_file(projections, folder / "text.safetensors")
    save_file(connectors, folder / "transformer.safetensors", {"config": json.dumps({"transformer": config})})
    widths = FeatureConfig(hidden=16, states=7, video_width=32, audio_width=16)
    projection = load(lambda: FeatureProjection(widths), read_header(folder / "text.safetensors"), "text_embedding_projection.")
    loaded = load_connectors(folder / "transformer.safetensors")
    assert isinstance(loaded, Connectors)
    return loaded, projection
