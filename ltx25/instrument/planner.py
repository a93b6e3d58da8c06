"""Time and memory of a render before anything is loaded, from this device's records, or from arithmetic where it has none.

    planner = Planner(models, device, read_runs(folder)[0])
    plan = planner.plan(request)                                   # phases, peaks, what each number rests on
    planner.largest(request, Budget(seconds=600, device=24 << 30, host=None))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from ..connector import context_length
from ..dit.modality import LegPlan
from ..fitting import HOST_LEAST
from ..host_spare import host_spare
from ..parts import TRANSFORMER
from ..predictor import Course
from ..replay import graphs_wanted
from ..request import Request
from ..sampler import check_course, sampler_of
from ..schedule import STAGE_2
from ..shapes import MAX_FRAMES, AudioLatentShape
from ..stages import first_request, refining_sampler
from .costs import model_of, phase_rates
from .flops import (
    audio_decode_flops,
    connector_flops,
    group_flops,
    projection_flops,
    tower_flops,
    upscale_flops,
    video_decode_flops,
)
from .footprint import (
    ENLARGING,
    LOADING,
    PARTS,
    UPSCALER,
    WRITING,
    Footprint,
    device_lines,
    host_lines,
    itemsize_on,
    process_before,
)
from .forecast import Forecast, by_arithmetic
from .header import device_name
from .history import Run
from .memory import device_free, device_now, device_total, host_free, host_now, is_unified
from .models import Enlarging, Models
from .plan import UNLIMITED, Budget, Expected, Peak, Plan
from .selftest import Speed, self_test
from .units import counted, rate_text
from .work import TERA, group_kind, is_adapted

PROMPT_TOKENS = 200  # of a prompt nobody has written yet
QUICK_TEST = 0.5  # s

# Without records: what share of the measured matrix-product rate a phase around the forwards gets, and rates of what is no arithmetic.
SHARE = {"text.tower": 0.3, "text.project": 0.5, "text.connect": 0.3, "upscale": 0.4, "decode.video": 0.4, "decode.audio": 0.05}
DISK = 1e9  # bytes/s
ENCODER = 60e6  # pixels/s of the video encoder
GROWTH = 96 << 20  # bytes a process grows by in its first render whatever the clip (libraries, allocators): 70 to 85 MiB measured on a CPU
KEPT = 0.25  # of what a phase works in on a CPU, that its allocator may hold more, where no measurement tells: one clip took 710 to 824 MiB in six runs
UNSURE = "guess"


class Planner:
    """Predicts for one model on one device. `runs`: records, of any device; those of this one and this model are used."""

    def __init__(
        self,
        models: Models,
        device: torch.device,
        runs: Sequence[Run],
        batched: bool | None = None,
        speed: Speed | None = None,
        writes: bool = True,
        enlarging: Enlarging | None = None,
        outside: int | None = None,
        frozen: frozenset[str] = frozenset(),
        loras: bool = False,
    ) -> None:
        """`enlarging`: the clip is made in two stages, by this upscaler. `batched`: legs side by side (None: as `auto` decides). `speed`: the device's, measured when first needed if None.
        `writes`: the render writes its clip (mux); of a host's graph another node does, and no record says how long it takes.
        `outside`: host bytes of the process that will render, without what it holds of this model; None: one that starts for it.
        `frozen`: names of streams that are given and kept: a soundtrack is "audio". `loras`: the transformer has some.
        """
        self.models, self.device = models, device
        self._name = device_name(device)
        self._batched = device.type != "cpu" if batched is None else batched
        self._runs = [run for run in runs if run.header.get("device") == self._name]
        self._forecast = Forecast(self._runs, self._name, models.signature)
        self._runs = [run for run in self._runs if model_of(run) == models.signature]
        self._rates = phase_rates(self._runs, self._name)
        self._lines = {"device": device_lines(self._runs, models), "host": host_lines(self._runs, models, again=False), "again": host_lines(self._runs, models, again=True)}
        self._outside = outside
        self._given_speed = speed
        self._writes = writes
        self._enlarging = enlarging
        self._frozen = frozen
        self._loras = loras

    @property
    def has_records(self) -> bool:
        return bool(self._forecast.series)

    def budget(self, seconds: float | None, device: int | None, host: int | None) -> Budget:
        """The limits given, and where none is what is free now or held by this process: it renders itself, or ends before the
        render begins. On a CPU the device's memory is the host's.
        """
        free = host_free()
        there = None if free is None else free + (host_now() or 0)
        if self.device.type != "cpu":
            room = device_free(self.device)
            held = device_now(self.device) or 0
            together = None if there is None or not is_unified(self.device) else there + held
            return Budget(seconds, device or (None if room is None else room + held), host or there, together)
        given = [limit for limit in (device, host) if limit]
        return Budget(seconds, None, min(given) if given else there)

    def plan(self, request: Request, batch: int = 1, budget: Budget = UNLIMITED) -> Plan:
        """Predict `batch` clips of `request`, run as `budget`'s memory makes them run. Reads and loads nothing.

        Raises InputError for stg_blocks of another model and for settings that its sampler cannot run with.
        """
        models = self.models
        latent = request.video.latent(models.compression, models.dit.in_channels)
        sound = AudioLatentShape.of_clip(request.frames, request.frame_rate)
        two = self._enlarging
        first = request if two is None else first_request(request, two.config)
        small = first.video.latent(models.compression, models.dit.in_channels)
        groups = self._groups(first)
        again = Counter() if two is None else self._groups(_refined(request))
        prompts = 1 if request.negative is None else 2
        pixels = request.width * request.height * request.frames * batch
        text = context_length(PROMPT_TOKENS)
        last = Footprint(latent, sound, self._rows(again if two else groups), batch)
        before = Footprint(small, sound, self._rows(groups), batch, upscaler=two.config) if two else last
        device, host, turns = self._peaks(before, last, budget)
        phases = [
            self._phase("load.read", sum(models.read.values()) + (two.read if two else 0), None),
            self._phase("text.tower", PROMPT_TOKENS, tower_flops(models.tower, PROMPT_TOKENS).total, prompts),
            self._phase("text.project", PROMPT_TOKENS, projection_flops(models.tower, models.connectors, PROMPT_TOKENS).total, prompts),
            self._phase("text.connect", 1, connector_flops(models.connectors, text).total, prompts),
            self._sampling(groups, small.tokens, sound.tokens, text, batch, (TRANSFORMER, before) in turns),
            *([self._phase("upscale", pixels, upscale_flops(two.config, small).total * batch), self._sampling(again, latent.tokens, sound.tokens, text, batch, (TRANSFORMER, last) in turns)] if two else []),
            self._phase("decode.video", pixels, video_decode_flops(models.video, latent).total * batch),
        ]
        if "audio" not in self._frozen:  # what is given goes into the file as it is
            phases.append(self._phase("decode.audio", sound.seconds * batch, audio_decode_flops(models.audio, sound).total * batch))
        if self._writes:
            phases.append(self._phase("mux", pixels // batch, None, batch))  # clip by clip
        forwards = sum(len(plan.legs) * n for plan, n in (groups + again).items())
        first_size = (first.width, first.height) if two else None
        return Plan(request, (latent.tokens, sound.tokens), forwards, tuple(phases), device, host, (*self._notes(), *_taking_turns({part for part, _ in turns})), first_size)

    def largest(self, request: Request, budget: Budget, batch: int = 1) -> list[Plan]:
        """The most that fits: more frames at the size asked for, and more pixels at its length and shape. Empty: nothing does."""
        side, frames = self._side, self.models.compression.frames
        shape = request.width / request.height

        def longer(n: int) -> Request:
            return replace(request, frames=(n - 1) * frames + 1)

        def larger(n: int) -> Request:
            return replace(request, height=n * side, width=max(1, round(n * shape)) * side)

        most_frames = (MAX_FRAMES - 1) // frames + 1
        most_rows = int(8192 / side / max(1.0, shape))
        found = [self._last_that_fits(make, most, budget, batch) for make, most in ((longer, most_frames), (larger, most_rows))]
        return [plan for plan in found if plan is not None]

    def smallest(self, request: Request, budget: Budget, batch: int = 1) -> list[Plan]:
        """The least a render with these settings can be, one cell of one frame, and the least that `largest` looks at: one
        frame of this size, and this length at the smallest size of this shape.
        """
        side = self._side
        narrow = replace(request, height=side, width=max(1, round(request.width / request.height)) * side)
        return [self.plan(least, batch, budget) for least in (replace(request, width=side, height=side, frames=1), replace(request, frames=1), narrow)]

    def _last_that_fits(self, make, most: int, budget: Budget, batch: int) -> Plan | None:
        """Largest n in 1..most whose plan fits; time and memory grow with n."""
        low, high, best = 1, most, None
        while low <= high:
            middle = (low + high) // 2
            plan = self.plan(make(middle), batch, budget)
            if plan.beyond(budget):
                high = middle - 1
            else:
                low, best = middle + 1, plan
        return best

    @property
    def _side(self) -> int:
        """The step of a clip's sides, px."""
        return self.models.compression.side * (1 if self._enlarging is None else self._enlarging.config.space.numerator)

    def _groups(self, request: Request) -> Counter[LegPlan]:
        course = course_of(request, self.models.dit.layers, self._frozen)
        check_course(course, request.negative is not None)
        return Counter(plan for plan in course.plans if plan is not None)

    def _rows(self, groups: Mapping[LegPlan, int]) -> int:
        return max((len(plan.legs) for plan in groups), default=1) if self._batched else 1

    @cached_property
    def _speed(self) -> Speed:
        return self._given_speed or self_test(self.device, QUICK_TEST)

    def _phase(self, name: str, units: float, flops: float | None, times: int = 1) -> Expected:
        rate = self._rates.get(name)
        if rate is not None:
            basis = f"{counted(rate.samples, 'phase')} of {counted(rate.sizes, 'size')} measured here"
            outside = not rate.least <= units <= rate.most and not name.startswith("load")  # a file is read at one rate
            between = rate.between(units)
            ends = None if between is None else (times * between[0], times * between[1])
            return Expected(name, times * rate.seconds(units), basis + (", extrapolated" if outside else ""), outside, ends)
        if flops is None:
            assumed = DISK if name.startswith("load") else ENCODER
            unit = rate_text(DISK) if name.startswith("load") else f"{ENCODER / 1e6:.0f} megapixels/s"
            return Expected(name, times * units / assumed, f"{UNSURE}: {unit} assumed", True, None)
        share = SHARE[name]
        seconds = times * flops / (share * self._speed.flops)
        return Expected(name, seconds, f"{times * flops / TERA:.3g} TFLOP at {100 * share:.0f} % of {self._speed.flops / TERA:.3g} TFLOP/s", True, None)

    def _sampling(self, groups: Mapping[LegPlan, int], video: int, audio: int, text: int, batch: int, turns: bool) -> Expected:
        """turns: blocks of the transformer do not fit whole beside this clip."""
        seconds, least, most, bases, beyond, known = 0.0, 0.0, 0.0, [], False, True
        streams, precision = turns or self.models.streamed, self.models.precision
        how = {
            "precision": precision,
            "residency": "stream" if streams else "resident",
            "batched": self._batched,
            "graphs": graphs_wanted(self.device) and not streams,
            "adapted": is_adapted(self._loras, streams, precision),
        }
        for plan, count in groups.items():
            flops = group_flops(self.models.dit, plan, video, audio, text) * batch
            legs = "+".join(leg.value for leg in plan.legs)
            work = flops.linear / TERA, flops.attention / TERA
            guess = self._forecast.group(legs, group_kind(plan), *work, video + audio, how)
            if guess is None:
                guess = by_arithmetic(flops.total / TERA, self._speed.flops)
            seconds += count * guess.seconds + guess.warm_up
            low, high = guess.between or (0.0, 0.0)
            least, most, known = least + count * low + guess.warm_up, most + count * high + guess.warm_up, known and guess.between is not None
            bases.append(guess.basis)
            beyond = beyond or guess.extrapolated
        return Expected("sample", seconds, "; ".join(dict.fromkeys(bases)), beyond, (least, most) if known else None)

    def _peaks(self, first: Footprint, last: Footprint, budget: Budget) -> tuple[Peak | None, Peak, set[tuple[str, Footprint]]]:
        """Most bytes on the device (None on a CPU) and on the host, and the parts whose blocks take turns because they do not
        fit whole beside a clip. Parts stay loaded until another needs their room. first, last: of two stages; of one, the same clip.
        """
        models, on_cpu = self.models, self.device.type == "cpu"
        place = "host" if on_cpu else "device"  # where weights lie
        capacity = device_total(self.device) if budget.device is None else budget.device
        if on_cpu:
            capacity = None if budget.host is None else max(0, budget.host - max(self._baseline, self._outside or 0))
        device, host = _Highest(), _Highest()
        if not on_cpu:
            self._reach_host(host, LOADING, 0, 0, HOST_LEAST)
        held_by, least = dict(models.held), dict(models.least)
        if self._enlarging is not None:
            held_by[UPSCALER] = least[UPSCALER] = self._enlarging.numbers * itemsize_on(self.device.type)
        loaded: dict[str, int] = {}
        turns: set[tuple[str, Footprint]] = set()
        parked = 0
        for phase, part, clip in self._holding(first, last):
            loaded[part] = weights = held_by[part]
            working = clip.working(phase, models, self.device.type, None)
            size, off, *_ = self._expected(place, phase, working[place])
            if capacity is not None and sum(loaded.values()) + max(working[place], size + off) > capacity:
                loaded, parked = {part: weights}, 0
                working = clip.working(phase, models, self.device.type, max(0, capacity - weights))
                size, off, *_ = self._expected(place, phase, working[place])
                stays = max(least[part], capacity - max(working[place], size + off))
                if stays < weights:  # its blocks take turns in the room there is
                    loaded, parked, weights = {part: stays}, self._parked(weights - stays, budget), least[part]
                    turns.add((part, clip))
            held = sum(loaded.values())
            if not on_cpu:
                size, off, basis, known = self._expected("device", phase, working["device"])
                device.reach(held + size, max(held + size + off, weights + working["device"]), f"in {phase}, {basis}", known)
            self._reach_host(host, phase, working["host"], held if on_cpu else parked, weights * on_cpu)
        if self._writes:
            self._reach_host(host, WRITING, last.working(WRITING, models, self.device.type, None)["host"], sum(loaded.values()) * on_cpu, 0)
        return (None if on_cpu else device.peak), host.peak, turns

    def _holding(self, first: Footprint, last: Footprint) -> Iterator[tuple[str, str, Footprint]]:
        """Phases that hold weights, in order: name, part, and the clip it works on."""
        for phase, part in PARTS.items():
            if phase == "decode.audio" and "audio" in self._frozen:
                continue
            if phase == "sample" and self._enlarging is not None:
                yield phase, part, first
                yield ENLARGING, UPSCALER, first
            yield phase, part, last

    def _parked(self, away: int, budget: Budget) -> int:
        """Bytes of `away`, blocks that are not on the device, that wait in host memory; else their file is read again and again."""
        fits = budget.host is None or self._baseline + away + host_spare() <= budget.host
        return away if fits and self.device.type != "cpu" and not is_unified(self.device) else 0

    def _reach_host(self, host: _Highest, phase: str, arithmetic: int, held: int, asked: int) -> None:
        """held: bytes of weights on the host; asked: beside `arithmetic`, without which the engine does not start the phase."""
        size, off, basis, known = self._expected("host", phase, arithmetic)
        reached = self._baseline + held + size
        host.reach(reached, max(reached + off, self._baseline + arithmetic + asked), f"in {phase}, {basis}", known)
        if self._outside is not None:
            size, off, basis, known = self._expected("again", phase, arithmetic)
            reached = self._outside + held + size
            host.reach(reached, reached + off, f"in {phase}, on top of what this process holds, {basis}", known)

    def _expected(self, place: str, phase: str, arithmetic: int) -> tuple[int, int, str, bool]:
        """Bytes beside the weights, how many more the measurements leave open, what they rest on, and whether that is all that
        is open. place: "device", "host" above a new process, or above one that rendered before ("again").
        """
        size, off, basis, known = self._measured(place, phase, arithmetic)
        return size, off if known or self.device.type != "cpu" else max(off, int(KEPT * size)), basis, known

    def _measured(self, place: str, phase: str, arithmetic: int) -> tuple[int, int, str, bool]:
        """`_expected` by the records there are; else by arithmetic, which leaves open what nobody measured."""
        line = self._lines[place].get(phase)
        if line is not None:
            return line.at(arithmetic), line.open(arithmetic), f"by {line.basis(arithmetic)}", line.is_known(arithmetic)
        new = self._lines["host"].get(phase)  # memory that a process took once serves again; what grows with the clip comes on top
        if place == "again" and new is not None:
            return int(min(new.slope * arithmetic, new.at(arithmetic))), new.open(arithmetic), "by measurements of new ones", False
        return arithmetic + (GROWTH if place == "host" else 0), 0, "by arithmetic", False

    @cached_property
    def _baseline(self) -> int:
        """A process before it loads: measured in records, else the one that will render, else this one."""
        return process_before(self._runs) or self._outside or host_now() or 1 << 30

    def _notes(self) -> tuple[str, ...]:
        if self.has_records:
            return ()
        speed = f"{self._speed.flops / TERA:.3g} TFLOP/s in {self._speed.dtype}, {rate_text(self._speed.copy)}"
        return (
            f"No records of {self.models.signature} on {self._name}: times are from the FLOP model and a {QUICK_TEST:g} s test of the device "
            f"({speed}), memory from arithmetic. A render or three here make them measured.",
        )


def _taking_turns(parts: Collection[str]) -> list[str]:
    said = "does not fit whole: its blocks take turns there, which takes longer than is predicted here unless it was measured."
    return [f"The {part} {said}" for part in sorted(parts)]


class _Highest:
    """The highest of the phases' peaks, and the most that must be there for one."""

    def __init__(self) -> None:
        self.peak = Peak(0, 0, "", False)

    def reach(self, reached: int, need: int, basis: str, known: bool) -> None:
        need = max(self.peak.need, need)
        self.peak = Peak(reached, need, basis, known) if reached > self.peak.bytes else replace(self.peak, need=need)


def course_of(request: Request, blocks: int, frozen: frozenset[str] = frozenset()) -> Course:
    """What a render of `request` by a model of `blocks` blocks calls. Raises InputError for stg_blocks of another model."""
    sigmas, schedule = request.noise_levels()
    video, audio = request.guidance_by_sigma(blocks)
    return Course(sampler_of(request.sampler, schedule, request.eta), sigmas, {"video": video, "audio": audio}, frozen)


def _refined(request: Request) -> Request:
    """The second of two stages, as stages.refinement asks for it."""
    off = {f"{stream}_{scale}": value for stream in ("video", "audio") for scale, value in (("cfg", 1.0), ("stg", 0.0), ("modality", 1.0))}
    constant = {"skip_step": 0, "bins": "", "guidance_start": 1.0, "guidance_end": 0.0}
    return replace(request, negative=None, schedule=STAGE_2, sigmas=None, token_shift=False, sampler=refining_sampler(request.sampler), **constant, **off)
