"""Configs of the published model, for tests and benchmarks that build it with random weights."""

from __future__ import annotations

from ...ltx25.config.dit import DiTConfig
from ...ltx25.config.text import TowerConfig

PUBLISHED_DIT = DiTConfig(
    layers=48,
    heads=32,
    head_dim=128,
    audio_head_dim=64,
    in_channels=128,
    out_channels=128,
    audio_in_channels=128,
    audio_out_channels=128,
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

PUBLISHED_TOWER = TowerConfig(
    vocabulary=262144,
    hidden=3840,
    intermediate=15360,
    full=tuple(i % 6 == 5 for i in range(48)),
    heads=16,
    kv_heads=8,
    head_dim=256,
    full_kv_heads=1,
    full_head_dim=512,
    window=1024,
    eps=1e-6,
    theta=1e4,
    full_theta=1e6,
    rotated=0.25,
    bos=2,
    pad=0,
    gemma_version=None,
)
