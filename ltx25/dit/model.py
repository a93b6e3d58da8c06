"""The audio-video diffusion transformer: tokens of both streams at one noise level -> their velocities, for every leg of a step.

Read this first. A clip is prepared once (`prepare`), a schedule's modulation once (`schedule_tables`), and `forward` runs
the blocks outermost and the legs inside them, so that what legs have in common is computed once. `forward` never waits
for the device, copies nothing back and decides nothing from values: it may be captured as a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.rms_adaln import Norm, affine, rms_adaln
from ..config.dit import DiTConfig
from ..errors import InputError
from . import geometry as clip
from .adaln import (
    BLOCK_ROWS,
    CROSS_ROWS,
    PROMPT_ROWS,
    BlockModulation,
    Producer,
    StepTables,
    StreamTables,
    modulate_blocks,
)
from .block import Block, Lane, State, Text, Texts
from .geometry import Geometry, StreamGeometry
from .kept_text import StepTexts
from .lanes import Lanes, side_stream
from .modality import Contexts, Leg, LegPlan, Stream, Velocity
from .rows import Rows, Schedule, StreamSchedule, schedule
from .tables import ScheduleTables, step_tables

# Stored in float32 and rounded only when added (see adaln.modulate_blocks): pass to checkpoint.fill as `keep`.
KEEP_STORED = ("*scale_shift_table*",)

_MODULATION_BYTES = 64 << 20  # rows of as many blocks as fit are made in one go


def _untold(made: int) -> None:
    """Nobody wants to know how many steps' tables are made."""


class DiT(nn.Module):
    """Names are the file's below `model.diffusion_model.`, without the text connectors. Widths: D video, Da audio."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self._side: torch.cuda.Stream | None = None
        d, da = config.width, config.audio_width
        self.patchify_proj, self.audio_patchify_proj = nn.Linear(config.in_channels, d), nn.Linear(config.audio_in_channels, da)
        self.adaln_single, self.audio_adaln_single = Producer(d, BLOCK_ROWS), Producer(da, BLOCK_ROWS)
        if config.prompt_adaln:
            self.prompt_adaln_single, self.audio_prompt_adaln_single = Producer(d, PROMPT_ROWS), Producer(da, PROMPT_ROWS)
        self.av_ca_video_scale_shift_adaln_single = Producer(d, CROSS_ROWS)
        self.av_ca_audio_scale_shift_adaln_single = Producer(da, CROSS_ROWS)
        self.av_ca_a2v_gate_adaln_single = Producer(d, 1)
        self.av_ca_v2a_gate_adaln_single = Producer(da, 1)
        if config.keyframe_embedding:
            self.keyframes_abs_pos_embedding = nn.Parameter(torch.empty(1, d))
        self.transformer_blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.scale_shift_table = nn.Parameter(torch.empty(2, d))
        self.audio_scale_shift_table = nn.Parameter(torch.empty(2, da))
        self.proj_out, self.audio_proj_out = nn.Linear(d, config.out_channels), nn.Linear(da, config.audio_out_channels)

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Those that blocks run on beside the current one."""
        return () if self._side is None else (self._side,)

    def prepare(self, video: Stream | None, audio: Stream | None, device: torch.device, dtype: torch.dtype) -> Geometry:
        """Once per clip: rope tables, timestep levels, marks. Raises InputError for streams whose parts do not fit."""
        return clip.prepare(self.config, video, audio, device, dtype)

    @torch.no_grad()
    def tables(self, geometry: Geometry, sigma_video: float, sigma_audio: float) -> StepTables:
        """What adaLN makes at one step, sigmas in [0, 1]; frozen streams count as 0."""
        return step_tables(self, geometry, [(sigma_video, sigma_audio)])[0]

    @torch.no_grad()
    def schedule_tables(self, geometry: Geometry, sigmas: Sequence[tuple[float, float]], told: Callable[[int], None] = _untold) -> Sequence[StepTables]:
        """`tables` of every step, (video, audio) sigmas each, made before the loop; then the producers are not needed.
        told: called with how many are made, several at a time; may raise to cancel.

        Where masks have so many distinct values that this would fill the device, a step is made when it is asked for.
        """
        return ScheduleTables(self, geometry, sigmas, told)

    @torch.no_grad()
    def forward(
        self,
        video: torch.Tensor | None,
        audio: torch.Tensor | None,
        geometry: Geometry,
        tables: StepTables,
        positive: Contexts,
        negative: Contexts | None,
        plan: LegPlan,
        batched: bool,
        pause: Callable[[int], None],
        kept: StepTexts | None = None,
    ) -> dict[Leg, Velocity]:
        """video (B, N, C) and audio (B, M, Ca) tokens, any floating dtype, None as in `geometry`: each leg's velocities.

        `batched`: rows of several legs go through one launch, equal within rounding; otherwise every op has the shapes of
        a single forward and each leg equals a run of its own bit for bit. `pause(i)` is called after block i; it may raise.
        `kept`: where keys and values of the positive text may be left and found at this noise level.
        Legs that stay equal return the same tensor. Raises InputError for tokens, legs or blocks that do not fit.
        """
        self._check(video, audio, geometry, plan)
        legs = schedule(plan, video is not None, audio is not None)
        batched = batched and len(plan.legs) > 1
        text = self._text(positive, negative, legs, len(video if audio is None else audio), batched, kept)
        lanes = self._lanes(video, audio)
        modulations = self._modulations(tables, lanes)
        modulation = next(modulations)
        opening = self.transformer_blocks[0].opening(modulation)
        lanes.follow()
        try:
            with lanes.audio():
                a = self._enter(self.audio_patchify_proj, audio, geometry.audio, legs.audio, batched, opening.audio)
            v = self._enter(self.patchify_proj, video, geometry.video, legs.video, batched, opening.video)
            state = State(v, a)
            for number, block in enumerate(self.transformer_blocks):
                ahead = next(modulations, None)
                opening = None if ahead is None else self.transformer_blocks[number + 1].opening(ahead)
                state = block(state, text, modulation, opening, geometry, legs, number, lanes)
                modulation = ahead
                pause(number)
        finally:
            lanes.join()
        v = self._leave(self.proj_out, self.scale_shift_table, state.video, tables.video, geometry.video, legs.video)
        a = self._leave(self.audio_proj_out, self.audio_scale_shift_table, state.audio, tables.audio, geometry.audio, legs.audio)
        return {leg: Velocity(_of(v, leg), _of(a, leg)) for leg in plan.legs}

    def _lanes(self, video: torch.Tensor | None, audio: torch.Tensor | None) -> Lanes:
        """The audio stream runs beside the video on CUDA, where both are there."""
        if video is None or audio is None or video.device.type != "cuda":
            return Lanes(None)
        self._side = side_stream(video.device)
        return Lanes(self._side)

    def _check(self, video: torch.Tensor | None, audio: torch.Tensor | None, geometry: Geometry, plan: LegPlan) -> None:
        for name, tokens, stream, channels in (
            ("video", video, geometry.video, self.config.in_channels),
            ("audio", audio, geometry.audio, self.config.audio_in_channels),
        ):
            got = None if tokens is None else tuple(tokens.shape[1:])
            wanted = None if stream is None else (stream.tokens, channels)
            if got != wanted:
                raise InputError(f"{name} tokens x channels are {got}, and the model and the clip's geometry want {wanted}.")
        if video is not None and audio is not None and len(video) != len(audio):
            raise InputError(f"The video latent holds {len(video)} clips and the audio latent {len(audio)}; they must be as many.")
        last = self.config.layers - 1
        for number in sorted(plan.stg_video_blocks | plan.stg_audio_blocks):
            if not 0 <= number <= last:
                raise InputError(f"stg_blocks names block {number}, and this model has blocks 0 to {last}.")
        if not plan.legs:
            raise InputError("The plan of a step has no leg; it needs at least the conditional one.")

    def _enter(
        self,
        layer: nn.Linear,
        tokens: torch.Tensor | None,
        stream: StreamGeometry | None,
        legs: StreamSchedule | None,
        batched: bool,
        opening: Norm | None,
    ) -> Lane | None:
        """Project tokens to the stream's width and mark keyframes: one row that all legs share."""
        if tokens is None or legs is None:
            return None
        x = layer(tokens.to(layer.weight.dtype))
        if stream.marks is not None and self.config.keyframe_embedding:
            x += stream.marks * self.keyframes_abs_pos_embedding
        x = Rows((legs.legs,), (x,), batched)
        if not legs.enabled:
            return Lane(x, None)
        return Lane(x, x.spread(lambda x: rms_adaln(x, [opening], stream.index, self.config.norm_eps))[0])

    def _text(
        self, positive: Contexts, negative: Contexts | None, legs: Schedule, batch: int, batched: bool, kept: StepTexts | None
    ) -> Texts:
        """Contexts as rows: the negative one serves the unconditional leg, the positive one all others."""
        texts = []
        for name, stream, width in (("video", legs.video, self.config.width), ("audio", legs.audio, self.config.audio_width)):
            if stream is None or not stream.enabled:
                texts.append(None)
                continue
            dtype = self.patchify_proj.weight.dtype
            good = getattr(positive, name)
            bad = None if negative is None else getattr(negative, name)
            if good is None:
                raise InputError(f"The prompt has no {name} context, and the {name} stream needs one.")
            for context in (good, bad):
                if context is not None and (context.ndim != 3 or context.shape[-1] != width or context.shape[0] not in (1, batch)):
                    raise InputError(
                        f"The prompt's {name} context has shape {tuple(context.shape)}, and this transformer reads "
                        f"(1 or {batch}, length, {width}); encode the prompt with this engine's text encoder."
                    )
            uncond, others = (Leg.UNCOND,), tuple(leg for leg in stream.legs if leg is not Leg.UNCOND)
            if Leg.UNCOND not in stream.legs or bad is None:  # without a negative the official code takes the positive
                texts.append(Text(Rows((stream.legs,), (good.to(dtype),), batched), kept and getattr(kept, name)))
            elif not others:
                texts.append(Text(Rows((uncond,), (bad.to(dtype),), batched), None))
            elif batched and good.shape == bad.shape:
                texts.append(Text(Rows((uncond, others), (torch.cat((bad, good)).to(dtype),), True), None))
            else:
                texts.append(Text(Rows((uncond, others), (bad.to(dtype), good.to(dtype)), False), None))
        return Texts(*texts)

    def _modulations(self, tables: StepTables, lanes: Lanes) -> Iterator[BlockModulation]:
        """Modulation of block after block, made for as many in one go as fit _MODULATION_BYTES."""
        first = 0
        while first < len(self.transformer_blocks):
            made = self._modulate(tables, first)
            lanes.follow()
            yield from made
            first += len(made)

    def _modulate(self, tables: StepTables, first: int) -> list[BlockModulation]:
        """Modulation of block `first` and of those after it that fit."""
        there = [stream for stream in (tables.video, tables.audio) if stream is not None]
        per_block = sum(2 * stream.rows.nbytes for stream in there)
        blocks = list(self.transformer_blocks)[first : first + max(1, _MODULATION_BYTES // per_block)]
        parts = [
            [None] * len(blocks)
            if stream is None
            else modulate_blocks(stream, *([getattr(block, name) for block in blocks] for name in names))
            for stream, names in (
                (tables.video, ("scale_shift_table", "prompt_scale_shift_table", "scale_shift_table_a2v_ca_video")),
                (tables.audio, ("audio_scale_shift_table", "audio_prompt_scale_shift_table", "scale_shift_table_a2v_ca_audio")),
            )
        ]
        return [BlockModulation(video, audio) for video, audio in zip(*parts, strict=True)]

    def _leave(
        self,
        layer: nn.Linear,
        table: torch.Tensor,
        lane: Lane | None,
        tables: StreamTables | None,
        stream: StreamGeometry | None,
        legs: StreamSchedule | None,
    ) -> Rows | None:
        """LayerNorm, modulate by the embedded timestep, project to velocities: rows (B, T, C)."""
        if lane is None or not legs.read:
            return None
        span = legs.span(stream)
        index = stream.index if span is None else stream.index[slice(*span)]
        shift, scale = (table.to(tables.embedded.dtype) + tables.embedded.unsqueeze(1)).unbind(1)  # (K, D)

        def head(x: torch.Tensor) -> torch.Tensor:
            wide = torch.promote_types(x.dtype, torch.float32)
            normed = F.layer_norm(x.to(wide), x.shape[-1:], eps=self.config.norm_eps)
            velocity = layer(affine(normed, scale, shift, index).to(x.dtype))
            return velocity if span is None else F.pad(velocity, (0, 0, span[0], stream.tokens - span[1]))

        return lane.x.map(head)


def _of(rows: Rows | None, leg: Leg) -> torch.Tensor | None:
    if rows is None or not any(leg in group for group in rows.groups):
        return None
    return rows.row(rows.of(leg))
