"""One block: per stream self-attention and text attention, then the streams read each other, then the feed-forwards.

Legs go through it side by side as rows (rows.py). Residual rows are written in place; both directions between the streams
read them from before either was updated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ...kernels.gated_residual import gated_residual, gated_residual_rms_adaln
from ...kernels.modulate import modulate
from ...kernels.rms_adaln import rms_adaln, rms_adaln_pair
from ..config.dit import DiTConfig
from .adaln import BLOCK_ROWS, CROSS_ROWS, PROMPT_ROWS, BlockModulation, StreamModulation
from .attention import CrossAttention, FeedForward, SelfAttention
from .geometry import Geometry, StreamGeometry
from .modality import Leg
from .rows import Point, Rows, Schedule, StreamSchedule


@dataclass(frozen=True)
class State:
    """What runs through the blocks: rows of (B, N, D) and (B, M, Da); None: no such stream."""

    video: Rows | None
    audio: Rows | None


class Layers(NamedTuple):
    """The layers of one stream, so that its code is written once."""

    self_attention: SelfAttention
    text_attention: CrossAttention
    feed_forward: FeedForward


class Block(nn.Module):
    """Names of layers and tables are the file's below `transformer_blocks.{i}.`."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        d, da, heads, eps = config.width, config.audio_width, config.heads, config.norm_eps
        self.eps = eps
        self.attn1, self.audio_attn1 = SelfAttention(d, heads, eps), SelfAttention(da, heads, eps)
        self.attn2, self.audio_attn2 = CrossAttention(d, d, d, heads, eps), CrossAttention(da, da, da, heads, eps)
        self.audio_to_video_attn = CrossAttention(d, da, da, heads, eps)
        self.video_to_audio_attn = CrossAttention(da, d, da, heads, eps)
        self.ff, self.audio_ff = FeedForward(d, config.ff_bias), FeedForward(da, config.audio_ff_bias)
        for stream, audio_stream, rows in (
            ("scale_shift_table", "audio_scale_shift_table", BLOCK_ROWS),
            ("prompt_scale_shift_table", "audio_prompt_scale_shift_table", PROMPT_ROWS),
            ("scale_shift_table_a2v_ca_video", "scale_shift_table_a2v_ca_audio", CROSS_ROWS + 1),
        ):
            self.register_parameter(stream, nn.Parameter(torch.empty(rows, d)))
            self.register_parameter(audio_stream, nn.Parameter(torch.empty(rows, da)))

    def forward(
        self,
        state: State,
        text: State,
        modulation: BlockModulation,
        geometry: Geometry,
        legs: Schedule,
        number: int,
        side: torch.cuda.Stream | None,
    ) -> State:
        """`state` before block `number`, `text` its contexts as rows (B or 1, L, D): the state after the block.

        `side`: the few audio tokens go through it while the video fills the device on the current stream; None: after it.
        """
        video, audio = state.video, state.audio
        both = side if video is not None and audio is not None else None
        if audio is not None and legs.audio.enabled:
            with beside(both):
                audio = self._attend(self._audio(), audio, text.audio, modulation.audio, geometry.audio, legs.audio, number)
        if video is not None and legs.video.enabled:
            video = self._attend(self._video(), video, text.video, modulation.video, geometry.video, legs.video, number)
        rejoin(both)
        if video is not None and audio is not None:
            self._meet(video, audio, modulation, geometry, legs)
        if audio is not None and legs.audio.enabled:
            with beside(both):
                self._feed_forward(self.audio_ff, audio, modulation.audio, geometry.audio)
        if video is not None and legs.video.enabled:
            self._feed_forward(self.ff, video, modulation.video, geometry.video)
        rejoin(both)
        return State(video, audio)

    def _video(self) -> Layers:
        return Layers(self.attn1, self.attn2, self.ff)

    def _audio(self) -> Layers:
        return Layers(self.audio_attn1, self.audio_attn2, self.audio_ff)

    def _attend(
        self, layers: Layers, x: Rows, text: Rows, m: StreamModulation, g: StreamGeometry, legs: StreamSchedule, number: int
    ) -> Rows:
        """Self-attention, then text attention; legs part where the schedule says. Returns x, which is also written to."""
        attention, after = layers.self_attention, legs.groups(number, Point.TEXT)

        def norm(x: torch.Tensor) -> torch.Tensor:
            return rms_adaln(x, m.attn.scale, m.attn.shift, g.index, self.eps)

        def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # returns what text attention reads
            return gated_residual_rms_adaln(x, y, m.attn.gate, m.text.scale, m.text.shift, g.index, self.eps)

        if number in legs.perturbed and Leg.STG in legs.legs:
            y = attention.perturbed(x.map(norm), after, g.rope, g.bias)
            x = x.fork(after)
            h = x.map(add, y)
        else:
            h = x.map(lambda x: add(x, attention(norm(x), g.rope, g.bias)))
            x, h = x.fork(after), h.fork(after)
        keys, values = text.map_pair(
            lambda context: layers.text_attention.keys_values(modulate(context, m.text_scale, m.text_shift), None)
        )
        y = layers.text_attention(h, keys, values, None)
        x.map(partial(gated_residual, gate=m.text.gate, index=g.index), y)
        return x.fork(legs.groups(number, Point.CROSS))

    def _meet(self, video: Rows, audio: Rows, modulation: BlockModulation, geometry: Geometry, legs: Schedule) -> None:
        """Audio to video and video to audio, written to the rows of every leg but the isolated one.

        A stream that is not updated this step is read all the same.
        """
        v, a = (x.run(0, sum(group != (Leg.ISOLATED,) for group in x.groups)) for x in (video, audio))
        if not v.groups or not a.groups:
            return
        (v_a2v, v_v2a), (a_a2v, a_v2a) = (
            x.map_pair(partial(self._norm_pair, m=m, g=g))
            for x, m, g in ((v, modulation.video, geometry.video), (a, modulation.audio, geometry.audio))
        )
        v_rope, a_rope = geometry.video.cross_rope, geometry.audio.cross_rope
        if legs.video.enabled:
            layer = self.audio_to_video_attn
            keys, values = a_a2v.map_pair(partial(layer.keys_values, rope=a_rope))
            v.map(partial(gated_residual, gate=modulation.video.cross_gate, index=None), layer(v_a2v, keys, values, v_rope))
        if legs.audio.enabled:
            layer = self.video_to_audio_attn
            keys, values = v_v2a.map_pair(partial(layer.keys_values, rope=v_rope))
            a.map(partial(gated_residual, gate=modulation.audio.cross_gate, index=None), layer(a_v2a, keys, values, a_rope))

    def _norm_pair(self, x: torch.Tensor, m: StreamModulation, g: StreamGeometry) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_adaln_pair(x, m.a2v, m.v2a, g.index, self.eps)

    def _feed_forward(self, layer: FeedForward, x: Rows, m: StreamModulation, g: StreamGeometry) -> None:
        x.map(
            lambda x: gated_residual(
                x, layer(rms_adaln(x, m.ff.scale, m.ff.shift, g.index, self.eps)), m.ff.gate, g.index
            )
        )


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work inside goes to `stream`, after what the current stream holds so far; None: to the current stream.

    Memory stays safe without more marks: what is allocated inside is freed inside or after `rejoin`, and the next
    `beside` waits for whatever the current stream did with it.
    """
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def rejoin(stream: torch.cuda.Stream | None) -> None:
    """The current stream goes on after what `stream` holds so far."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
