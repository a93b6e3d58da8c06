"""The transformer against the independent one in diffusers, on weights made there and read from a file by our loader.

diffusers is an oracle for text-to-video with one sigma only: with other timesteps per token, or another sigma per stream,
it is known to differ from the official model (the golden values cover those).
"""

import json

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import fill, read_header
from comfyui_ltx25.ltx25.config.dit import DiTConfig
from comfyui_ltx25.ltx25.dit import Contexts, DiT, Leg, LegPlan, Stream
from comfyui_ltx25.tests.support import golden_dit as golden
from safetensors.torch import save_file

pytest.importorskip("diffusers")

LAYERS, HEADS, HEAD, AUDIO_HEAD, CHANNELS, AUDIO_CHANNELS = 4, 4, 16, 8, 8, 12
GRID, AUDIO, TEXT, FRAME_RATE, SIGMA = (3, 2, 4), 10, 7, 24.0, 0.6
TOLERANCE = 1e-5  # relative: max|a - b| / max|b|

# Official name -> name there, replaced in this order.
RENAMED = (
    ("patchify_proj", "proj_in"),
    ("av_ca_video_scale_shift_adaln_single", "av_cross_attn_video_scale_shift"),
    ("av_ca_a2v_gate_adaln_single", "av_cross_attn_video_a2v_gate"),
    ("av_ca_audio_scale_shift_adaln_single", "av_cross_attn_audio_scale_shift"),
    ("av_ca_v2a_gate_adaln_single", "av_cross_attn_audio_v2a_gate"),
    ("scale_shift_table_a2v_ca_video", "video_a2v_cross_attn_scale_shift_table"),
    ("scale_shift_table_a2v_ca_audio", "audio_a2v_cross_attn_scale_shift_table"),
    ("q_norm", "norm_q"),
    ("k_norm", "norm_k"),
    ("audio_prompt_adaln_single", "audio_prompt_adaln"),
    ("prompt_adaln_single", "prompt_adaln"),
    ("audio_adaln_single.", "audio_time_embed."),
    ("adaln_single.", "time_embed."),
)


def config():
    return DiTConfig(
        layers=LAYERS,
        heads=HEADS,
        head_dim=HEAD,
        audio_head_dim=AUDIO_HEAD,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        audio_in_channels=AUDIO_CHANNELS,
        audio_out_channels=AUDIO_CHANNELS,
        norm_eps=1e-6,
        rope_theta=10000.0,
        max_position=(20, 2048, 2048),
        audio_max_position=20,
        timestep_scale=1000.0,
        cross_timestep_scale=1000.0,
        ff_bias=False,
        audio_ff_bias=True,
        prompt_adaln=True,
        keyframe_embedding=True,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from diffusers import LTX2VideoTransformer3DModel

    torch.manual_seed(0)
    oracle = LTX2VideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD,
        cross_attention_dim=HEADS * HEAD,
        gated_attn=True,
        cross_attn_mod=True,
        audio_in_channels=AUDIO_CHANNELS,
        audio_out_channels=AUDIO_CHANNELS,
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=AUDIO_HEAD,
        audio_cross_attention_dim=HEADS * AUDIO_HEAD,
        audio_gated_attn=True,
        audio_cross_attn_mod=True,
        num_layers=LAYERS,
        caption_channels=16,
        rope_double_precision=True,
        rope_type="split",
        use_prompt_embeddings=False,
        perturbed_attn=True,
        ff_bias=False,
        use_keyframes_abs_pos_embedding=True,
        cross_attn_timestep_scale_multiplier=1000,
    ).eval()
    for name, parameter in oracle.named_parameters():
        with torch.no_grad():
            if name.endswith("weight") and parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(1.0 if "norm_" in name else 0.0, 0.2)
    there = {name: tensor.contiguous() for name, tensor in oracle.state_dict().items()}
    ours = {}
    with torch.device("meta"):
        dit = DiT(config())
    for name in official_names(dit):
        renamed = name
        for old, new in RENAMED:
            renamed = renamed.replace(old, new)
        ours["model.diffusion_model." + name] = there.pop(renamed)
    assert not there, f"weights of the oracle that we do not have: {sorted(there)}"
    path = tmp_path_factory.mktemp("oracle") / "transformer.safetensors"
    save_file(ours, path, metadata={"config": json.dumps({})})
    fill(dit, read_header(path), "model.diffusion_model.", torch.device("cpu"), torch.float32, lambda _: None)
    return oracle, dit


def official_names(dit):
    from comfyui_ltx25.ltx25.checkpoint import expected

    return expected(dit)


def positions(grid, audio, frame_rate):
    """[start, end) of tokens, written out from the definition: 8 n + 1 frames, 32 px cells, 25 audio latents a second."""
    t, h, w = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    video = torch.stack(
        [
            torch.stack([(8 * t - 7).clamp(min=0) / frame_rate, (8 * t + 1) / frame_rate], -1),
            torch.stack([32.0 * h, 32.0 * h + 32], -1),
            torch.stack([32.0 * w, 32.0 * w + 32], -1),
        ]
    ).flatten(1, 3)
    i = torch.arange(audio)
    return video, torch.stack([(4 * i - 3).clamp(min=0) * 160 / 16000, (4 * i + 1) * 160 / 16000], -1)[None]


@pytest.mark.parametrize("batched", [False, True])
def test_cond_stg_and_isolated_legs_equal_diffusers(batched, models):
    oracle, dit = models
    torch.manual_seed(1)
    tokens = GRID[0] * GRID[1] * GRID[2]
    video, audio = torch.randn(1, tokens, CHANNELS), torch.randn(1, AUDIO, AUDIO_CHANNELS)
    text = Contexts(torch.randn(1, TEXT, HEADS * HEAD), torch.randn(1, TEXT, HEADS * AUDIO_HEAD))
    video_positions, audio_positions = positions(GRID, AUDIO, FRAME_RATE)
    marked = torch.arange(tokens) < GRID[1] * GRID[2]
    geometry = dit.prepare(
        Stream(video_positions, torch.ones(tokens), marked, False, None),
        Stream(audio_positions, torch.ones(AUDIO), None, False, None),
        torch.device("cpu"),
        torch.float32,
    )
    plan = LegPlan((Leg.COND, Leg.STG, Leg.ISOLATED), frozenset({2}), frozenset({2}), True, True)
    got = dit(video, audio, geometry, dit.tables(geometry, SIGMA, SIGMA), text, None, plan, batched, lambda _: None)

    t = torch.tensor([1000.0 * SIGMA])
    for leg, extra in ((Leg.COND, {}), (Leg.STG, {"spatio_temporal_guidance_blocks": [2]}), (Leg.ISOLATED, {"isolate_modalities": True})):
        with torch.no_grad():
            want = oracle(
                hidden_states=video,
                audio_hidden_states=audio,
                encoder_hidden_states=text.video,
                audio_encoder_hidden_states=text.audio,
                timestep=t,
                audio_timestep=t,
                sigma=t,
                audio_sigma=t,
                num_frames=GRID[0],
                height=GRID[1],
                width=GRID[2],
                fps=FRAME_RATE,
                audio_num_frames=AUDIO,
                use_cross_timestep=True,
                video_keyframes_mask=marked[None, :, None].float(),
                return_dict=False,
                **extra,
            )
        for stream, expected in zip(("video", "audio"), want, strict=True):
            error = (getattr(got[leg], stream) - expected).abs().max() / expected.abs().max()
            assert error <= TOLERANCE, f"{leg} {stream}: {error}"


def test_the_oracle_has_the_golden_model_s_layout():
    """The config written out above is what the published keys say, but for its sizes."""
    published = golden.config()
    sizes = {"in_channels", "out_channels", "audio_in_channels", "audio_out_channels"}
    assert {k: v for k, v in vars(config()).items() if k not in sizes} == {k: v for k, v in vars(published).items() if k not in sizes}
