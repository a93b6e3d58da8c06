import math
import re
from dataclasses import replace

import pytest
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.instrument import Forwards, Group, RunRecord, Watch
from comfyui_ltx25.ltx25.instrument.costs import Measured, law_of, measured_series, phase_rates, rate_of
from comfyui_ltx25.ltx25.instrument.flops import ONE_LEG, group_flops
from comfyui_ltx25.ltx25.instrument.history import read_run, read_runs
from comfyui_ltx25.ltx25.instrument.law import Point, fit_law
from comfyui_ltx25.ltx25.instrument.report import clip_text, law_lines
from comfyui_ltx25.tests.support.records import GUIDED, PUBLISHED, Clock, law_seconds, render

SIZES = ((768, 448, 25), (1024, 576, 49), (1024, 576, 97))


def point(video, audio, seconds):
    flops = group_flops(PUBLISHED, ONE_LEG, video, audio, 1024)
    return Point(video, audio, flops.linear / 1e12, flops.attention / 1e12, seconds, 10, 1, 0.01)


def truth(video, audio, constant=0.02, linear=1.5e-3, attention=1.8e-3):
    p = point(video, audio, 1.0)
    return point(video, audio, constant + linear * p.linear + attention * p.attention)


def test_three_geometries_predict_a_fourth_between_them():
    law = fit_law([truth(1344, 26), truth(4032, 51), truth(7488, 101)])
    fourth = truth(6144, 126)
    assert law.seconds(fourth.linear, fourth.attention) == pytest.approx(fourth.seconds, rel=0.02)
    assert not law.is_extrapolation(fourth.tokens)


def test_a_geometry_beyond_those_seen_is_marked_as_extrapolation():
    law = fit_law([truth(1344, 26), truth(4032, 51), truth(7488, 101)])
    beyond = truth(14080, 126)
    assert law.is_extrapolation(beyond.tokens)
    assert law.seconds(beyond.linear, beyond.attention) == pytest.approx(beyond.seconds, rel=0.05)
    assert law.tokens == (1370, 7589)


def test_many_geometries_give_the_rates_themselves():
    points = [truth(n, n // 60, 0.03, 1.4e-3, 2.4e-3) for n in (336, 1344, 2304, 4032, 7488, 14080, 30000)]
    law = fit_law(points)
    assert law.constant == pytest.approx(0.03, rel=0.1)
    assert law.linear == pytest.approx(1.4e-3, rel=0.1)
    assert law.attention == pytest.approx(2.4e-3, rel=0.1)
    assert max(map(abs, law.residuals)) < 0.015 and law.error < 0.05


def test_no_coefficient_is_negative():
    law = fit_law([point(1344, 26, 0.35), point(4032, 51, 0.31), point(7488, 101, 0.6)])  # launch-bound: smaller is no faster
    assert min(law.constant, law.linear, law.attention) >= 0
    assert law.error > 0.2  # and the cross-validation says what that is worth


def test_within_holds_for_every_geometry_that_was_left_out():
    """A mean of the errors would not: one of four here is off by three times what the others are."""
    points = [truth(1344, 26), truth(4032, 51), truth(7488, 101), truth(14080, 126)]
    law = fit_law([*points[:3], replace(points[3], seconds=1.3 * points[3].seconds)])
    worst = max(map(abs, law.left_out))
    assert law.error == worst > 1.2 * (sum(error**2 for error in law.left_out) / 4) ** 0.5
    (said,) = re.findall(r"a geometry not seen: within (\d+) %", "\n".join(law_lines(law, Measured())))
    assert worst <= int(said) / 100 < worst + 0.01


@pytest.mark.parametrize("points", [[], [(1344, 26)], [(1344, 26), (4032, 51)], [(1344, 26), (1344, 26), (4032, 51)]])
def test_fewer_than_three_geometries_are_refused(points):
    with pytest.raises(InputError, match="three different ones"):
        fit_law([truth(*tokens) for tokens in points])


def test_power_law_stands_beside_the_physical_one():
    law = fit_law([point(n, 0, 1e-4 * n**1.2) for n in (1000, 2000, 4000, 8000)])
    assert law.power == pytest.approx(1.2, abs=1e-6) and law.scale == pytest.approx(1e-4)
    assert max(map(abs, law.power_left_out)) < 1e-9


@pytest.fixture
def runs(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    for n, size in enumerate(SIZES):
        render(tmp_path, clock, *size, noise=0.02, seed=n)
    with pytest.raises(RuntimeError):
        render(tmp_path, clock, 1024, 576, 97, stop=4)
    return read_runs(tmp_path)[0]


def test_records_give_points_with_warm_up_apart(runs):
    (series, measured), = measured_series(runs).items()
    assert series.legs == "cond+uncond+stg+mod" and series.device == "Toy card"
    assert dict(series.how) == {"precision": "bfloat16", "batched": True}
    assert sorted(measured.seconds) == [(1344, 26), (4032, 51), (7488, 101)]
    assert [len(run) for run in measured.seconds[7488, 101]] == [5, 3]  # the failed run counts with what it finished
    assert measured.warm_up == pytest.approx(2.0, abs=0.1)


def test_law_from_records_predicts_a_geometry_not_seen_within_15_percent(runs):
    law = law_of(next(iter(measured_series(runs).values())))
    flops = group_flops(PUBLISHED, GUIDED, 14080, 126, 1024)
    linear, attention = flops.linear / 1e12, flops.attention / 1e12
    assert law.seconds(linear, attention) == pytest.approx(law_seconds(linear, attention), rel=0.15)


def test_two_geometries_in_the_records_are_no_law(runs):
    law = law_of(next(iter(measured_series(runs[:2]).values())))
    assert isinstance(law, str) and "no law" in law


def test_fixed_and_variable_cost_are_told_apart(runs):
    rates = phase_rates(runs, "Toy card")
    decode = rates["decode.video"]
    assert decode.sizes == 3
    assert decode.fixed == pytest.approx(0.2, rel=1e-6) and decode.per_unit == pytest.approx(4e-9, rel=1e-6)
    assert rates["load.read"].per_unit == pytest.approx(4.0 / (40 << 30))
    assert rates["load.read"].sizes == 1
    assert phase_rates(runs, "another card") == {}


def test_a_record_from_before_phases_said_their_size_counts_by_its_header(runs):
    rates = phase_rates(runs, "Toy card")
    old = [replace(run, phases=[{**row, "facts": {name: value for name, value in row["facts"].items() if name == "tokens"}} for row in run.phases]) for run in runs]
    assert phase_rates(old, "Toy card") == rates
    for run in old:
        run.header["geometry"] = {"width": None, "frame_rate": 24.0, "batch": 1}
    assert phase_rates(old, "Toy card").keys() == rates.keys() - {"decode.video", "decode.audio"}


def test_every_phase_counts_by_its_own_size_in_a_run_of_several_clips(tmp_path, monkeypatch):
    """A graph with three clips and a sound: its header tells the last of them."""
    clock, clips = Clock(monkeypatch), [(256, 160, 9, 1), (512, 320, 17, 2), (1024, 640, 33, 1)]
    with RunRecord(tmp_path, {"device": "Toy card", "geometry": {"width": None, "frame_rate": 24.0, "batch": 1}}) as record:
        watch = Watch([record])
        for name in ("encode.video", "decode.video", "upscale", "mux"):
            for width, height, frames, batch in clips:
                size = {"width": width, "height": height, "frames": frames, **({} if name == "mux" else {"batch": batch})}
                with watch.phase(name, total=1, unit="chunk", **size) as phase:
                    clock.sleep(0.5 + 1e-8 * width * height * frames * (1 if name == "mux" else batch))
                    phase.tick()
        for name in ("encode.audio", "decode.audio"):
            for n in (25, 50, 250):
                with watch.phase(name, total=1, unit="layer", latent_frames=n, batch=2):
                    clock.sleep(0.1 + 0.02 * 2 * n / 25)
    run = read_run(record.path)
    assert clip_text(run) == "256x160, 9 frames + 512x320, 17 frames + 1024x640, 33 frames"
    rates = phase_rates([run], "Toy card")
    for name, fixed, slope in [*((name, 0.5, 1e-8) for name in ("encode.video", "decode.video", "upscale", "mux")), ("encode.audio", 0.1, 0.02), ("decode.audio", 0.1, 0.02)]:
        assert (rates[name].samples, rates[name].sizes) == (3, 3)
        assert (rates[name].fixed, rates[name].per_unit) == pytest.approx((fixed, slope), rel=1e-3), name


@pytest.mark.parametrize("sizes", [[(256, 160, 9)], [(256, 160, 9), (256, 192, 9)], [(256, 160, 9), (256, 160, 17), (256, 192, 9)]])
def test_sizes_too_few_or_too_much_alike_tell_no_fixed_part(tmp_path, monkeypatch, sizes):
    """A line through near points follows their noise, and may predict that nothing grows."""
    clock = Clock(monkeypatch)
    for n, size in enumerate(sizes):
        render(tmp_path, clock, *size, seed=n)
    runs = read_runs(tmp_path)[0]
    decode = phase_rates(runs, "Toy card")["decode.video"]
    largest = max(w * h * f for w, h, f in sizes)
    assert decode.fixed == 0 and decode.off is None
    assert decode.per_unit == pytest.approx(4e-9 + 0.2 / largest)
    assert decode.between(100 * largest) is None  # how much of it grows is not known
    assert decode.between(largest) is None  # nor what another run of this size takes: there was one


def test_a_size_seen_twice_is_told_with_the_spread_of_its_repeats():
    rate = rate_of([(1.0, 1.0), (4.0, 2.2), (4.0, 2.0), (4.0, 2.6)], "pixel")
    assert rate.off is None and rate.sizes == 2
    assert rate.between(4.0) == (2.0, 2.6) and rate.seconds(4.0) == 2.2
    assert rate.seconds(1.0) == 1.0 and rate.between(1.0) is None  # seen once: it has no spread
    assert rate.seconds(8.0) == pytest.approx(4.4) and rate.between(8.0) is None


def test_a_line_says_how_far_it_missed_what_it_was_drawn_through():
    rate = rate_of([(1.0, 1.0), (2.0, 2.2), (4.0, 4.0)], "pixel")
    least, most = rate.between(3.0)
    assert rate.off == pytest.approx(max(abs(rate.seconds(size) / seconds - 1) for size, seconds in ((1.0, 1.0), (2.0, 2.2), (4.0, 4.0))))
    assert least < rate.seconds(3.0) < most and 0.02 < rate.off < 0.2


def test_sizes_that_are_nearly_one_have_a_power_law_that_can_be_computed():
    """Their noise is steeper than any float: 1371 tokens instead of 1370 that take twice as long are a power of 950."""
    points = [Point(video, 0, float(video), 0.1 * video, seconds, 5, 1, 0.0) for video, seconds in ((1370, 1.0), (1371, 2.0), (9000, 1.5))]
    law = fit_law(points)
    assert all(map(math.isfinite, (*law.power_residuals, *law.power_left_out, law.scale)))
    assert law_lines(law, Measured())[1].startswith("  power law beside it = ")


@pytest.mark.parametrize("wall", [0.0, 1e-12, 1e9])
def test_a_phase_of_no_time_or_all_of_it_has_a_rate_too(wall):
    rate = rate_of([(1.0, wall), (2.0, 2.0), (4.0, 4.0)], "pixel")
    assert rate.fixed >= 0 and rate.per_unit >= 0 and math.isfinite(rate.off)


def test_other_settings_are_another_series(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    one = render(tmp_path, clock, 768, 448, 25)
    two = render(tmp_path, clock, 768, 448, 25, device="Another card")
    assert len(measured_series([read_run(one.path), read_run(two.path)])) == 2


@pytest.mark.parametrize("older", [False, True])
def test_groups_under_the_tracer_are_counted_in_their_own_sampling(tmp_path, monkeypatch, older):
    """The second sampler of a graph is traced, its first try ran out of memory: number 2 is that of the third phase."""
    clock = Clock(monkeypatch)
    work = {"legs": "cond", "kind": "", "groups": 4, "linear": 1.0, "attention": 1.0}
    with RunRecord(tmp_path, {"device": "Toy card"}) as record:
        for traced, seconds, end in ((), 1.0, 4), ((2,), 2.0, 3), ((2,), 2.0, 4):
            watch = Watch([record])
            with watch.phase("profile.selftest"):
                clock.sleep(1.0)
            with watch.phase("sample", total=4, unit="forward", tokens={"video": 100}, model="m", work=[work]) as phase:
                forwards = Forwards(phase, [Group(n + 1, ("cond",), "", n in traced) for n in range(4)])
                for number in range(end):
                    if number in traced:
                        watch.note("profile", "", group=number, begin=clock.now)
                    clock.sleep(9 * seconds if number in traced else seconds)
                    forwards.finished(9 * seconds if number in traced else seconds)
    if older:
        record.path.write_text(re.sub(r'("event":"profile".*),"id":\d+', r"\1", record.path.read_text()))
    run = read_run(record.path)
    assert [event.get("id") for event in run.of("profile")] == ([None, None] if older else [4, 6])
    assert run.traced == {(4, 2), (6, 2)}
    (measured,) = measured_series([run]).values()
    assert measured.seconds == {(100, 0): [[1.0] * 3, [2.0], [2.0] * 2]} and measured.first == {(100, 0): [1.0, 2.0, 2.0]}


def test_groups_under_the_tracer_count_in_no_law(tmp_path, monkeypatch):
    """They are told by their number: clocks of host and device are not the same to a millisecond."""
    record = render(tmp_path, Clock(monkeypatch), *SIZES[0])
    run = read_run(record.path)
    (plain,) = measured_series([run]).values()
    for number in (2, 3):
        run.forwards[number]["seconds"] = 99.0
        run.events.append({"event": "profile", "t": 0.0, "group": number})
    (told,) = measured_series([run]).values()
    (before,), (after,) = (next(iter(measured.seconds.values())) for measured in (plain, told))
    assert 99.0 not in after and len(after) == len(before) - 2
