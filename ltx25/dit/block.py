"""One block: per stream self-attention and text attention, then the streams read each other, then the feed-forwards.

Legs go through it side by side as rows (rows.py). Residual rows are written in place, each time together with the norm
that opens what comes next; both directions between the streams read them from before either was updated. Audio goes
through a lane of its own (lanes.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ...kernels.gated_residual import gated_residual
from ...kernels.modulate import modulate
from ...kernels.quantise import Activation
from ...kernels.rms_adaln import Norm, rms_adaln
from ..config.dit import DiTConfig
from .adaln import BLOCK_ROWS, CROSS_ROWS, PROMPT_ROWS, BlockModulation, StreamModulation
from .attention import CrossAttention, FeedForward, SelfAttention
from .geometry import Geometry, StreamGeometry
from .kept_text import KeptLevel
from .lanes import Lanes
from .modality import Leg
from .rows import Point, Rows, Schedule, StreamSchedule


class Opening(NamedTuple):
    """The norm with which a block begins, per stream: the block before applies it where it writes the stream."""

    video: Norm | None
    audio: Norm | None


@dataclass(frozen=True)
class Lane:
    """One stream between blocks: x, rows of (B, T, D), written in place; h, x behind the next block's opening norm.

    h is None for a stream that is not updated, and after the last block.
    """

    x: Rows
    h: Rows | None


@dataclass(frozen=True)
class State:
    """What runs through the blocks; None: no such stream."""

    video: Lane | None
    audio: Lane | None


@dataclass(frozen=True)
class Text:
    """The contexts of one stream, rows of (B or 1, L, D), and what is kept of their keys and values, if anything."""

    rows: Rows
    kept: KeptLevel | None


@dataclass(frozen=True)
class Texts:
    """The text that each stream reads; None: no such stream, or one that is not updated."""

    video: Text | None
    audio: Text | None


class Met(NamedTuple):
    """One stream behind its text attention.

    towards: what the two directions between the streams read of it, for legs whose streams meet: the leading rows of x.
    ff: memory for the input of the feed-forward, written already for the other rows; None where there will be none.
    """

    x: Rows
    towards: dict[str, Rows]
    ff: Rows | None


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

    def opening(self, modulation: BlockModulation) -> Opening:
        """The norms in front of its self-attentions."""
        return Opening(
            *(
                None if m is None else Norm(m.attn.scale, m.attn.shift, attention.qkvg.quantised)
                for m, attention in ((modulation.video, self.attn1), (modulation.audio, self.audio_attn1))
            )
        )

    def forward(
        self,
        state: State,
        text: Texts,
        modulation: BlockModulation,
        following: Opening | None,
        geometry: Geometry,
        legs: Schedule,
        number: int,
        lanes: Lanes,
    ) -> State:
        """`state` before block `number`: the state after it, opened for the `following` block; None: this is the last."""
        video, audio, m, g = state.video, state.audio, modulation, geometry
        to_video, to_audio = self.audio_to_video_attn, self.video_to_audio_attn
        # A stream is updated to the block's end if anyone reads it behind that: another block or the output.
        v_goes = video is not None and legs.video.enabled and (following is not None or legs.video.read)
        a_goes = audio is not None and legs.audio.enabled and (following is not None or legs.audio.read)
        meet = video is not None and audio is not None
        a2v, v2a = meet and v_goes, meet and a_goes
        if audio is not None:
            towards = _towards(m.audio, a2v, to_video.kv.quantised, v2a, to_audio.qg.quantised)
            with lanes.audio():
                a = self._attend(self._audio(), audio, text.audio, m.audio, g.audio, legs.audio, number, meet, towards, a_goes)
        if video is not None:
            towards = _towards(m.video, a2v, to_video.qg.quantised, v2a, to_audio.kv.quantised)
            v = self._attend(self._video(), video, text.video, m.video, g.video, legs.video, number, meet, towards, v_goes)
        # No leg's streams meet where all rows are isolated ones.
        a2v, v2a = (way and bool(v.towards) and bool(a.towards) for way in (a2v, v2a))
        if a2v or v2a:
            crossing: list[Rows] = []
            with lanes.audio():
                if a2v:
                    crossing += a.towards["a2v"].spread(partial(to_video.keys_values, rope=g.audio.cross_rope))
                if v2a:
                    a_queries = a.towards["v2a"].spread(partial(to_audio.queries, rope=g.audio.cross_rope))
            if v2a:
                crossing += v.towards["v2a"].spread(partial(to_audio.keys_values, rope=g.video.cross_rope))
            if a2v:
                v_queries = v.towards["a2v"].spread(partial(to_video.queries, rope=g.video.cross_rope))
            lanes.meet(crossing, modulation)
            if v2a:
                with lanes.audio():
                    self._receive(a, to_audio(*a_queries, *crossing[-2:]), m.audio, g.audio, self.audio_ff)
            if a2v:
                self._receive(v, to_video(*v_queries, *crossing[:2]), m.video, g.video, self.ff)
        elif meet:
            lanes.meet(modulation)  # made outside of the audio lane, and read in it
        if audio is not None:
            with lanes.audio():
                audio = self._feed_forward(self.audio_ff, a, m.audio, g.audio, legs.audio, following and following.audio)
        if video is not None:
            video = self._feed_forward(self.ff, v, m.video, g.video, legs.video, following and following.video)
        return State(video, audio)

    def _video(self) -> Layers:
        return Layers(self.attn1, self.attn2, self.ff)

    def _audio(self) -> Layers:
        return Layers(self.audio_attn1, self.audio_attn2, self.audio_ff)

    def _attend(
        self,
        layers: Layers,
        lane: Lane,
        text: Text | None,
        m: StreamModulation,
        g: StreamGeometry,
        legs: StreamSchedule,
        number: int,
        meet: bool,
        towards: dict[str, Norm],
        goes: bool,
    ) -> Met:
        """Self-attention, then text attention; legs part where the schedule says."""
        if not legs.enabled:
            x = lane.x.run(0, _meeting(lane.x)) if meet else lane.x
            made = x.spread(lambda x: rms_adaln(x, list(towards.values()), g.index, self.eps)) if towards and x.groups else ()
            return Met(lane.x, dict(zip(towards, made, strict=False)), None)
        attention, before, after = layers.self_attention, legs.groups(number, Point.TEXT), legs.groups(number, Point.CROSS)
        x = lane.x
        if number in legs.perturbed and Leg.STG in legs.legs:
            y = attention.perturbed(lane.h, before, g.rope, g.bias)
            x = x.fork(before)
        else:
            y = lane.h.map(lambda h: attention(h, g.rope, g.bias))
        (h,) = self._add(x, y, m.attn.gate, [Norm(m.text.scale, m.text.shift, layers.text_attention.qg.quantised)], g.index)
        x, h = x.fork(before), h.fork(before)
        keys, values = self._keys_values(layers.text_attention, text, m, number)
        y = layers.text_attention(*h.spread(partial(layers.text_attention.queries, rope=None)), keys, values)
        if x.groups != after:
            x, y = x.fork(after), y.fork(after)
        return self._part(layers.feed_forward, x, y, m, g, _meeting(x) if meet else 0, towards, goes)

    def _keys_values(self, attention: CrossAttention, text: Text, m: StreamModulation, number: int) -> tuple[Rows, Rows]:
        """Of the text, made now or found where an earlier denoise made the same ones."""
        rows, kept = text.rows, text.kept
        found = None if kept is None else kept.get(number)
        if found is not None:
            return Rows(rows.groups, (found[0],), rows.batched), Rows(rows.groups, (found[1],), rows.batched)
        keys, values = rows.spread(lambda context: attention.keys_values(modulate(context, m.text_scale, m.text_shift), None))
        if kept is not None:
            kept.put(number, keys.tensors[0], values.tensors[0])
        return keys, values

    def _part(
        self,
        feed_forward: FeedForward,
        x: Rows,
        y: Rows,
        m: StreamModulation,
        g: StreamGeometry,
        meeting: int,
        towards: dict[str, Norm],
        goes: bool,
    ) -> Met:
        """Add text attention's result; the first `meeting` rows go on to the other stream, the rest to the feed-forward."""
        ff = x.room(x.tensors[0].shape[-1], feed_forward.quantised) if goes else None
        made: tuple[Rows, ...] = ()
        if meeting:
            made = self._add(x.run(0, meeting), y.run(0, meeting), m.text.gate, list(towards.values()), g.index)
        if meeting < len(x.groups):
            rest = slice(meeting, len(x.groups))
            self._open_feed_forward(feed_forward, x, y.run(rest.start, rest.stop), m.text.gate, m, g, ff, rest)
        return Met(x, dict(zip(towards, made, strict=False)), ff)

    def _receive(self, met: Met, y: Rows, m: StreamModulation, g: StreamGeometry, feed_forward: FeedForward) -> None:
        """Add what the rows that meet read from the other stream, and open their feed-forward."""
        self._open_feed_forward(feed_forward, met.x, y, m.cross_gate, m, g, met.ff, slice(0, len(y.groups)))

    def _open_feed_forward(
        self,
        feed_forward: FeedForward,
        x: Rows,
        y: Rows,
        gate: torch.Tensor,
        m: StreamModulation,
        g: StreamGeometry,
        ff: Rows | None,
        rows: slice,
    ) -> None:
        """Add y to the given rows of x and write their norm to those of `ff`, if there is one."""
        norms = [] if ff is None else [Norm(m.ff.scale, m.ff.shift, feed_forward.quantised)]
        places = [] if ff is None else [ff.run(rows.start, rows.stop)]
        self._add(x.run(rows.start, rows.stop), y, gate, norms, g.index, places)

    def _feed_forward(self, layer: FeedForward, met: Met, m: StreamModulation, g: StreamGeometry, legs: StreamSchedule, opening: Norm | None) -> Lane:
        """The last block's, which opens nothing, is of the tokens whose velocities are read."""
        if met.ff is None:
            return Lane(met.x, None)
        span = legs.span(g) if opening is None else None
        x, ff, index = (met.x, met.ff, g.index) if span is None else (met.x.tokens(*span), met.ff.tokens(*span), g.index[slice(*span)])
        opened = self._add(x, ff.map(layer), m.ff.gate, [] if opening is None else [opening], index)
        return Lane(x, opened[0] if opened else None)

    def _add(
        self, x: Rows, y: Rows, gate: torch.Tensor, norms: Sequence[Norm], index: torch.Tensor | None, out: Sequence[Rows] = ()
    ) -> tuple[Rows, ...]:
        """x += y * gate, and the norms of that, into `out` where given."""

        def add(x: torch.Tensor, y: torch.Tensor, *places: Activation) -> tuple[Activation, ...]:
            return gated_residual(x, y, gate, norms, index, self.eps, places or None)

        return x.spread(add, y, *out)


def _towards(m: StreamModulation, a2v: bool, a2v_quantised: bool, v2a: bool, v2a_quantised: bool) -> dict[str, Norm]:
    """The norms of a stream for the directions that are computed."""
    norms = {}
    if a2v:
        norms["a2v"] = Norm(*m.a2v, a2v_quantised)
    if v2a:
        norms["v2a"] = Norm(*m.v2a, v2a_quantised)
    return norms


def _meeting(x: Rows) -> int:
    """How many of the leading rows have attention between the streams."""
    return sum(group != (Leg.ISOLATED,) for group in x.groups)
