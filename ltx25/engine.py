"""The engine: one set of files on one device, from prompt to frames and sound.

    engine = Engine.open(files, options, device)          # headers only
    positive = engine.encode(prompt, watch)               # text encoder, connectors
    clip = engine.sample(job, watch)                      # transformer
    frames = engine.decode_video(clip.video, ...)         # video VAE
    sound = engine.decode_audio(clip.audio, ...)          # audio VAE, vocoder

Weights are read when a phase first needs them; the arbiter decides what else stays on the device.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ..kernels.attention import choices
from .audio.decode import decode_audio
from .audio.encode import check_sound, encode_audio
from .checkpoint import Header
from .config.transformer import CONNECTOR_TENSORS
from .config.upscaler import UpscalerConfig
from .connector import Conditioning, Connectors, context_length
from .denoise import Sampled as Clip
from .denoise import run
from .device import check_current, compute_dtype, release, release_host
from .dit import check_fp8
from .dit.kept_text import KeptTexts
from .dit.patchify import patchify_audio, patchify_video
from .fitting import Result, Way, change, choose, fit
from .graphs import Captured
from .hdr import SDR, check_transfer
from .instrument import Phase, Watch
from .instrument.profile import ProfiledTransformer, StepWork
from .instrument.units import bytes_text
from .job import Options, Sampled, SampleJob
from .lora import Adapter, Lora
from .lora.adapter import SPARE
from .optional import OptionalParts
from .parts import AUDIO_VAE, CONNECTORS, TEXT, TRANSFORMER, VIDEO_VAE, Files, Opened, open_parts
from .precision import full_precision
from .predictor import Denoise, Predictor, Transformer
from .preparing import Prepared, facts_of, prepare
from .prompt_cache import PromptCache, PromptMemory, disk_limit, identity_of, prompts_folder
from .replay import Replay, graphs_wanted
from .residency import Arbiter, Part, Standalone
from .schedule import STAGE_2, STEPS, sigmas_of
from .shapes import AudioLatentShape, Compression, VideoLatentShape, VideoShape
from .sizing import Sizing
from .switches import check_switches, tell_unused
from .text import Features, TextEncoder, Tokenizer
from .upscaler import upscale, working_bytes
from .video import decode_video
from .working import connecting_bytes, frames_bytes, hearing_bytes, sounding_bytes, timing_bytes

__all__ = ["Conditioning", "Engine", "Files", "Options", "SampleJob", "Sampled"]

log = logging.getLogger(__name__)

TEXT_GRAPHS = {TEXT: 2, CONNECTORS: 1}  # kept at a time: a prompt and its negative differ in length, their contexts do not
KEPT_TEXTS = 4 << 30  # bytes of text keys and values to hold: at the published sizes those of stage 2 and of frozen sound


class Engine:
    """One set of files and options. `arbiter` may be replaced by a host's before the first phase; `forecast` makes, of what
    `facts` returns, the sentence shown before the first forward (instrument.forecast).
    """

    def __init__(self, opened: Opened, options: Options, device: torch.device, prompts: PromptMemory | None = None) -> None:
        self.device = device
        self.options = options
        self.headers = opened.headers
        self._opened = opened
        self._optional = OptionalParts(opened, device)
        self._sizing = Sizing(opened, options, device)
        self.arbiter: Arbiter = Standalone(self.parts)
        self.forecast: Callable[[Mapping[str, object]], str] = _no_forecast
        self._tokenizer: Tokenizer | None = None
        encoders = (opened.headers["text_encoder"], opened.headers["transformer"])  # the latter holds the connectors
        on_disk = (prompts_folder(), disk_limit()) if options.cache == "disk" else (None, 0)
        memory = None if options.cache == "off" else PromptMemory() if prompts is None else prompts
        self._prompts = PromptCache(memory, on_disk[0], identity_of(encoders, self._dtype), on_disk[1], self.context_widths)
        self._untold = dict(opened.decoded)  # what is still to be said, once
        self._captured = Captured()
        self._replays = {name: Replay(f"the {name}", kept) for name, kept in TEXT_GRAPHS.items()}
        self._texts = KeptTexts(sigmas_of(STAGE_2, STEPS), KEPT_TEXTS)  # 0, its end, is the level of a frozen stream
        self._loras: tuple[Lora, ...] = ()
        self._base: Engine | None = None  # keeps alive what drops the graphs
        self._group_seconds: dict[Hashable, float] = {}  # per kind of group of the transformer, from run to run
        forget = weakref.WeakMethod(self._drop_graphs)  # a cycle would keep a dropped engine's weights on the device
        opened.parts[TRANSFORMER].unloading.append(lambda: (drop := forget()) and drop())
        for name, replay in self._replays.items():
            opened.parts[name].unloading.append(replay.drop)

    @staticmethod
    def open(files: Files, options: Options, device: torch.device, prompts: PromptMemory | None = None) -> Engine:
        """Check files, options and switches; reads headers, no weights. device: of CUDA ones the thread's current one.
        prompts: to share with engines of the same process; None: the engine's own.

        Raises FileError, InputError.
        """
        check_switches()
        tell_unused(device.type)
        check_current(device)
        if options.precision == "fp8":
            check_fp8(device)
        return Engine(open_parts(files, device, options.check().precision, options.residency), options, device, prompts)

    def with_loras(self, loras: Sequence[tuple[str | Path, float]]) -> Engine:
        """A handle to this engine whose transformer has (file, strength) LoRAs besides those it has; all else is shared.

        Reads headers. Strength 0 changes nothing, to the bit. Raises FileError for a file that is no LoRA or of which
        nothing fits, InputError for a strength that is no number.
        """
        piece = self._opened.parts[TRANSFORMER].pieces[0]
        others = tuple(pattern.removesuffix("*") for pattern in CONNECTOR_TENSORS)
        handle = copy.copy(self)
        handle._base = self
        handle._loras = (*self._loras, *(Lora.open(path, strength, piece.header, piece.prefix, others) for path, strength in loras))
        return handle

    # What the files say

    @property
    def loras(self) -> tuple[Lora, ...]:
        """Of this handle, in order, those of strength 0 among them."""
        return self._loras

    @property
    def opened(self) -> Opened:
        """Configs, headers and parts of the files."""
        return self._opened

    @property
    def batched(self) -> bool:
        """Whether legs run side by side."""
        return self.options.batched(self.device)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self._opened.parts.values(), *self._optional.parts)

    @property
    def blocks(self) -> int:
        """Blocks of the transformer: legal stg_blocks are below it."""
        return self._opened.dit.layers

    @property
    def compression(self) -> Compression:
        return self._opened.video.compression

    @property
    def context_widths(self) -> tuple[int, int]:
        """(D, Da): features of the video and the audio context, side by side in the host's conditioning."""
        return self._opened.dit.width, self._opened.dit.audio_width

    def video_shape(self, latent: torch.Tensor) -> VideoShape:
        """Pixels of a video latent (B, C, t, h, w)."""
        return VideoLatentShape(*latent.shape[1:]).pixels(self.compression)

    # Phases, in the order a prompt meets them

    @torch.inference_mode()
    def encode(self, text: str, watch: Watch) -> Conditioning:
        """A prompt as contexts. A prompt encoded before comes from the cache without loading anything."""
        cached = self._prompts.get(text)
        if cached is not None:
            return cached
        part, tokenizer = self._opened.parts[TEXT], self._read_tokenizer(watch)

        def run_encoder(way: Way) -> Features:
            with part.during(watch):
                return TextEncoder(tokenizer, part["tower"], part["projection"], self._graphs(part)).encode(text, watch)

        features, told = fit(self.arbiter, part, [self._sizing.prompt()], self._sizing.prompt_advice, watch, run_encoder)
        video, audio = self._connect(features.video, features.audio, watch)
        encoded = Conditioning(video, audio, (str(features.tokens) + ".",) if features.tokens.truncated else ())
        self._prompts.put(text, encoded)
        return replace(encoded, told=(*told, *self._decoded(TEXT)))

    @torch.inference_mode()
    def connect(self, features: torch.Tensor, watch: Watch) -> Conditioning:
        """The host's own LTX text features (1, n, D + Da), before the connectors, as contexts. Raises InputError when they do not fit."""
        with self._connectors(watch) as (connectors, phase):
            video, audio = (context.float().cpu() for context in connectors.unprocessed(features.to(self.device, self._dtype), phase))
        return Conditioning(video, audio, ())

    def facts(self, job: SampleJob) -> dict[str, object]:
        """What `sample` will run, before any weight is read: tokens, steps, legs, forwards and the arithmetic of each kind of
        group. Contexts may be empty placeholders. Raises InputError as `sample` does, for want of memory, too.
        """
        ready = self._prepare(job)
        choose(self.arbiter, self._opened.parts[TRANSFORMER], self._sizing.ways(ready), partial(self._sizing.sampling_advice, ready))
        return self._facts(ready, job)

    @torch.inference_mode()
    def sample(self, job: SampleJob, watch: Watch, profile: bool = False) -> Sampled:
        """Noise, schedule and guided steps. Inputs are not written to. Raises InputError before any weight is read.

        profile: trace one step (with captured graphs, and the next one without) and say where its time goes.
        """
        ready = self._prepare(job)
        (part, changed), texts = self._adapted(watch), ()
        if self._sizing.ways(ready)[0].working + SPARE > self.arbiter.free(self.device):
            self._texts.drop()  # before anything else makes room

        def run_steps(way: Way) -> Clip:
            nonlocal texts
            here = ready.on(self.device, self._dtype, way.batched)
            plan, facts = here.job, self._facts(here, job)
            traced = self._traced(plan, facts, watch) if profile else None
            self._texts.begin(ready.job.positive, self._weights_key, self.arbiter.free(self.device) - way.working - SPARE)
            with watch.phase("sample", total=plan.forwards, unit="forward", **facts) as phase, part.during(watch, phase):
                clip = run(traced or self._dit, plan, ready.drafts, job.seed, phase, self.device, self._dtype, self._predicted(facts), self._group_seconds, self._texts, traced.traced if traced else (), job.add_noise)
            texts = traced.texts if traced else ()
            return clip

        clip, told = fit(self.arbiter, part, self._sizing.ways(ready), partial(self._sizing.sampling_advice, ready), watch, run_steps)
        made = choices()  # back ends picked by timing: equal results between runs are claimed for equal choices
        if made:
            watch.note("choice", "attention: " + ", ".join(f"{shape} {backend}" for shape, backend in made.items()), attention=made)
        notices = (*map(str, self._loras), *ready.notices, *changed, *told, *self._decoded(TRANSFORMER), *ready.doubts(clip.video))
        return Sampled(clip.video, clip.audio, clip.keyframes, clip.outcome.legs, clip.outcome.seconds, notices, texts)

    @torch.inference_mode()
    def predict(
        self, job: SampleJob, video: torch.Tensor | None, audio: torch.Tensor | None, watch: Watch
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """One guided x0 of noised grids at sigma job.sigmas[0], for samplers that are not ours: grids in, grids out, float32 CPU.

        job.sigmas are (sigma, 0); its latents are the clean ones that masked tokens are pulled to.
        """
        ready = self._prepare(job)
        part, _ = self._adapted(watch)

        def run_call(way: Way) -> dict[str, torch.Tensor]:
            here, x = ready.on(self.device, self._dtype, way.batched), {}
            for name, grid, patchify in (("video", video, patchify_video), ("audio", audio, patchify_audio)):
                if grid is not None:
                    x[name] = patchify(grid.float()).contiguous().to(self.device)
            plan, facts = here.job, self._facts(here, job)
            with watch.phase("sample", total=plan.forwards, unit="forward", **facts) as phase, part.during(watch, phase):
                predictor = Predictor(self._dit, plan, phase, self.device, self._dtype, "", self._group_seconds)
                x0 = predictor(x).x0
                predictor.flight.land()
                return {name: ready.drafts[name].grid(tokens).float().cpu() for name, tokens in x0.items()}

        grids, _ = fit(self.arbiter, part, self._sizing.ways(ready), partial(self._sizing.sampling_advice, ready), watch, run_call)
        return grids.get("video"), grids.get("audio")

    @torch.inference_mode()
    def decode_video(self, latent: torch.Tensor, seed: int, tiling: str, watch: Watch, transfer: str = SDR) -> torch.Tensor:
        """Frames (B * F, H, W, 3) float32 CPU in 0..1 of a latent (B, C, t, h, w).

        transfer: one of hdr.TRANSFERS. With a curve the frames are scene-linear light (Rec.709) from 0 up, and all of the
        decode is float32, as officially: bf16 steps are visible where a curve spreads them over stops.
        Raises InputError for a latent that is not one, and where host memory has no room for its frames.
        """
        wide, beside = check_transfer(transfer) != SDR, 0
        part = self._optional.wide_video_decoder() if wide else self._opened.parts[VIDEO_VAE]
        if latent.ndim == 5 and 0 not in latent.shape:  # what is no latent is refused by the decoder
            self.check_frames(VideoLatentShape(*latent.shape[1:]), len(latent))
            beside = frames_bytes(self.video_shape(latent), len(latent)) if self._sizing.one_memory else 0
        self.arbiter.ready([part], self._sizing.decoding(latent, 4 if wide else self._dtype.itemsize) + beside, watch)
        free = max(0, self.arbiter.free(self.device) - beside)
        with full_precision() if wide else contextlib.nullcontext():
            return decode_video(part["decoder"], latent, tiling=tiling, seed=seed, watch=watch, free=free, transfer=transfer)

    def check_frames(self, latent: VideoLatentShape, batch: int) -> None:
        """Raise InputError where host memory has no room for the frames of `batch` clips, with all that may leave it gone."""
        self._sizing.check_frames(latent, batch, self.arbiter)

    @torch.inference_mode()
    def decode_audio(self, latent: torch.Tensor, samples: int | None, watch: Watch) -> torch.Tensor:
        """Sound (B, 2, N) float32 CPU at 48 kHz of a latent (B, c, n, bins); cut or padded to `samples` when given."""
        part, working = self._opened.parts[AUDIO_VAE], 0
        if latent.ndim == 4 and 0 not in latent.shape:  # what is no latent is refused by the decoder
            made = AudioLatentShape(*latent.shape[1:]).samples
            self.check_sound(max(made, samples or 0), len(latent))
            working = sounding_bytes(self._opened.audio, part.bytes, made, self.device.type)
        return self._in_room(part, working, "one clip's sound", watch, lambda: decode_audio(part["decoder"], latent, watch, samples))

    def check_sound(self, samples: int, batch: int) -> None:
        """Raise InputError where host memory has no room for `batch` waves of `samples` at 48 kHz."""
        self._sizing.check_sound(samples, batch)

    # What a clip can be told beside its prompt, and what it can become

    @torch.inference_mode()
    def encode_video(self, images: torch.Tensor, watch: Watch) -> torch.Tensor:
        """Frames (F, H, W, 3) in 0..1 -> latent (1, C, t, h, w) float32 CPU. Frames beyond the last 8 n + 1 are dropped.

        Raises InputError for sides that are not a multiple of a cell.
        """
        part = self._optional.video_encoder()
        return self._in_room(part, self._sizing.seeing(images), "these pictures", watch, lambda: part["encoder"].encode(images, watch))

    @torch.inference_mode()
    def encode_audio(self, wave: torch.Tensor, rate: int, watch: Watch) -> torch.Tensor:
        """Sound (B, channels, N) at `rate` Hz -> latent (B, c, n, bins) float32 CPU, 25 frames a second. Raises InputError."""
        check_sound(wave, rate)
        part = self._optional.audio_encoder()
        working = hearing_bytes(self._opened.audio.vae, wave.shape[-1], rate)
        return self._in_room(part, working, "this sound", watch, lambda: encode_audio(part["encoder"], wave, rate, watch))

    def upscaler(self, file: Path) -> tuple[Header, UpscalerConfig]:
        """A latent upscaler file, checked for this model by its header. Raises FileError."""
        config, part = self._optional.upscaler(file)
        return part.pieces[0].header, config

    @torch.inference_mode()
    def upscale(self, latent: torch.Tensor, file: Path, watch: Watch) -> torch.Tensor:
        """A video latent (B, C, t, h, w) enlarged by a latent upscaler file; float32 CPU. Raises FileError, InputError."""
        config, part = self._optional.upscaler(file)
        working = working_bytes(config, *latent.shape[-3:], self._dtype.itemsize) if latent.ndim == 5 else 0
        return self._in_room(part, working, "this latent", watch, lambda: upscale(part["upscaler"], part["statistics"], latent, self.compression, watch))

    @torch.inference_mode()
    def predict_seconds(self, prompt: Conditioning, file: Path, watch: Watch) -> float:
        """How long a clip the prompt wants, by a duration head file: s, not held within any limits. Raises FileError."""
        config, part = self._optional.duration_head(file)
        working = timing_bytes(config, max(prompt.video.shape[1], prompt.audio.shape[1]), self._dtype.itemsize)

        def read() -> float:
            with watch.phase("text.duration"):
                return float(part["head"](*(context.to(self.device, self._dtype) for context in (prompt.video, prompt.audio))))

        return self._in_room(part, working, "one prompt", watch, read)

    def detach(self) -> None:
        """Take everything off the device. The engine stays usable: the next phase reads what it needs again."""
        for part in self.parts:
            part.unload()
        release(self.device)
        release_host()

    # How

    @property
    def _dtype(self) -> torch.dtype:
        return compute_dtype(self.device)

    @property
    def _dit(self) -> Transformer:
        """The loaded transformer, with its captured graphs where the device has them."""
        dit = self._opened.parts[TRANSFORMER]["dit"]
        if not graphs_wanted(self.device) or self._opened.parts[TRANSFORMER].streams:  # a graph holds addresses, and slots change theirs
            return dit
        return self._captured.of(dit)

    def _adapted(self, watch: Watch) -> tuple[Part, tuple[str, ...]]:
        """The transformer's part, with this handle's LoRAs from its next use on; what there is to tell of it."""
        part = self._opened.parts[TRANSFORMER]
        loras = [lora for lora in self._loras if lora.strength != 0]
        if part.adapter is None and loras:
            part.adapter = Adapter(part.pieces[0], self.device)
        if part.adapter is None:
            return part, ()
        return part, change(part, lambda: part.adapter.switch(part, loras, watch), "its LoRAs were changed", watch)

    @property
    def _weights_key(self) -> Hashable:
        """Equal while the transformer's weights are."""
        return tuple(lora.key for lora in self._loras if lora.strength != 0)

    def _traced(self, job: Denoise, facts: Mapping[str, object], watch: Watch) -> ProfiledTransformer:
        plain = self._opened.parts[TRANSFORMER]["dit"]
        plans = [plan for plan in job.plans if plan is not None]
        work = StepWork(self._opened.dit, facts["tokens"], facts["text"], facts["batch"], self._dtype.itemsize)
        return ProfiledTransformer(self._dit, plain, self.device, watch, plans, work)

    def _graphs(self, part: Part) -> Replay | None:
        """Of a part of the text side. None where weights have no addresses of their own: blocks that take turns."""
        return None if part.streams else self._replays[part.name]

    def _drop_graphs(self) -> None:
        """Graphs hold addresses of weights that are about to go, texts are made by them, and groups will take another time elsewhere."""
        self._group_seconds.clear()
        self._texts.drop()
        self._captured.drop()

    def _connect(self, video: torch.Tensor, audio: torch.Tensor, watch: Watch) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = video.shape[1]
        with self._connectors(watch) as (connectors, phase):
            video, audio = connectors.forward(video, audio, [tokens], context_length(tokens), phase)
            return video.float().cpu(), audio.float().cpu()

    @contextlib.contextmanager
    def _connectors(self, watch: Watch) -> Iterator[tuple[Connectors, Phase]]:
        part = self._opened.parts[CONNECTORS]
        self.arbiter.ready([part], connecting_bytes(self._opened.connectors, self._dtype.itemsize), watch)
        connectors = Connectors(part["video"], part["audio"], self._graphs(part))
        with watch.phase("text.connect", total=connectors.blocks, unit="block") as phase:
            yield connectors, phase

    def _in_room(self, part: Part, working: int, what: str, watch: Watch, run: Callable[[], Result]) -> Result:
        """Run a phase that has one way only, with `working` bytes beside its part. Raises InputError where they cannot be had."""

        def advice(short: int) -> str:
            smaller = f"make {what} smaller or shorter"
            return f"free {bytes_text(short)}, or {smaller}" if short > 0 else f"close what else uses the memory, or {smaller}"

        done, _ = fit(self.arbiter, part, [Way(what, working)], advice, watch, lambda way: run())
        return done

    def _prepare(self, job: SampleJob) -> Prepared:
        return prepare(job, self._opened, self.batched, self._loras)

    def _facts(self, ready: Prepared, job: SampleJob) -> dict[str, object]:
        part = self._opened.parts[TRANSFORMER]
        whole = part.bytes + self._sizing.sampling(ready, ready.job.batched)
        streams = part.streams if part.loaded else part.wanted < part.bytes or whole > self.arbiter.room(self.device)
        return facts_of(ready, job.seed, self._opened, self.device, streams, self._loras)

    def _predicted(self, facts: Mapping[str, object]) -> str:
        """The sentence of `forecast`; "" where it fails: records that others wrote are no reason to lose a render."""
        try:
            return self.forecast(facts)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("The time of this render is not predicted (%s); the render goes on.", reason)
            return ""

    def _decoded(self, part: str) -> tuple[str, ...]:
        """That weights were decoded on load, for the first run that used the part; nothing after it."""
        sentence = self._untold.pop(part, None)
        return () if sentence is None else (sentence,)

    def _read_tokenizer(self, watch: Watch) -> Tokenizer:
        if self._tokenizer is None:
            tower = self._opened.tower
            with watch.phase("text.tokenize", total=1, unit="tokenizer", reading=True) as phase:
                self._tokenizer = Tokenizer.read(self.headers["text_encoder"], tower.bos, tower.pad, tower.vocabulary)
                phase.tick(1, "tokenizer read")
        return self._tokenizer


def _no_forecast(facts: Mapping[str, object]) -> str:
    return ""
