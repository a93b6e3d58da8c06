import pytest
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.instrument.estimate import Estimate, Forwards, Group
from comfyui_ltx25.ltx25.instrument.units import seconds_text
from comfyui_ltx25.tests.support.records import Clock

FOUR = ("cond", "uncond", "stg", "mod")


def told(groups, seconds, prediction=""):
    """Texts shown for `groups` taking `seconds` each."""
    texts = []
    watch = Watch([Texts(texts)])
    with watch.phase("sample", sum(len(g.legs) for g in groups), "forward") as phase:
        forwards = Forwards(phase, groups, prediction)
        for s in seconds:
            forwards.finished(s)
    return texts, phase


class Texts:
    wants_preview = False

    def __init__(self, texts):
        self.texts = texts

    def check(self): ...
    def opened(self, phase): ...
    def closed(self, phase): ...
    def ticked(self, phase):
        self.texts.append((phase.done, phase.text))


def test_text_of_a_guided_step_is_the_designs():
    groups = [Group(step, FOUR) for step in range(1, 31)]
    texts, _ = told(groups, [3.0, 0.21, 0.21])
    assert texts[-1] == (12, "step 3/30 - forward 9-12/120 (cond+uncond+stg+mod) - last 0.21 s - about 6 s left (from 2 steps)")


def test_one_leg_reads_as_one_forward():
    texts, _ = told([Group(step, ("cond",)) for step in range(1, 9)], [0.5] * 3)
    assert texts[-1] == (3, "step 3/8 - forward 3/8 (cond) - last 0.50 s - about 2 s left (from 2 steps)")


def test_estimate_is_shown_from_the_second_step_on():
    texts, _ = told([Group(step, ("cond",)) for step in range(1, 5)], [9.0, 1.0, 1.0, 1.0])
    shown = [text for _, text in texts]
    assert shown[0] == "step 1/4 - forward 1/4 (cond)"  # what runs now
    assert "left" not in shown[1]
    assert shown[2].endswith("about 2 s left (from 1 step)")
    assert shown[3].endswith("about 1 s left (from 2 steps)")
    assert "left" not in shown[4]  # nothing is left


def test_prediction_stands_until_the_first_forward_is_done():
    texts, _ = told([Group(1, FOUR), Group(2, FOUR)], [1.0], "about 8 s predicted")
    assert texts[0] == (0, "step 1/2 - forward 1-4/8 (cond+uncond+stg+mod) - about 8 s predicted")
    assert "predicted" not in texts[1][1]


def test_forwards_reported_are_the_forwards_run():
    groups = [Group(step, (leg,)) for step in range(1, 4) for leg in FOUR]
    texts, phase = told(groups, [0.1] * 12)
    assert [done for done, _ in texts] == list(range(13))
    assert phase.done == phase.total == 12


def test_one_hiccup_does_not_move_the_median():
    estimate = Estimate([Group(step, ("cond",)) for step in range(1, 31)])
    for seconds in [5.0, 1.0, 1.0, 40.0, 1.0]:
        estimate.add(seconds)
    assert estimate.left().seconds == pytest.approx(25.0)
    assert estimate.left().steps == 4


def test_kinds_are_estimated_apart():
    groups = [Group(step, FOUR if step % 2 else ("cond",), "" if step % 2 else "video only") for step in range(1, 9)]
    estimate = Estimate(groups)
    for seconds in [9.0, 3.0, 2.0, 0.5]:
        estimate.add(seconds)
    assert estimate.left().seconds == pytest.approx(2 * 2.0 + 2 * 0.5)


def test_a_kind_not_seen_yet_costs_its_legs():
    estimate = Estimate([Group(1, ("cond",)), Group(2, ("cond",)), Group(3, ("cond", "uncond"))])
    estimate.add(9.0)
    estimate.add(1.0)
    assert estimate.left().seconds == pytest.approx(2.0)
    assert estimate.left().steps == 1


def test_error_of_the_estimate_is_in_the_facts_at_the_end():
    _, phase = told([Group(step, ("cond",)) for step in range(1, 5)], [1.0, 1.0, 1.0, 1.0])
    first = phase.facts["estimate"]["first"]
    assert first["predicted_s"] == 2.0 and first["groups"] == 2 and first["steps"] == 1
    assert first["error"] == pytest.approx(first["predicted_s"] / first["actual_s"] - 1)


@pytest.mark.parametrize("traced", [{2}, {2, 3}, {0}, {6}])
def test_what_a_profiler_takes_is_in_no_estimate_and_in_no_error(monkeypatch, traced):
    clock = Clock(monkeypatch)
    groups = [Group(n + 1, ("cond",), traced=n in traced) for n in range(7)]
    estimate, left = Estimate(groups), []
    for n in range(7):
        seconds = 20.0 if n in traced else 1.0
        clock.sleep(seconds)
        estimate.add(seconds)
        left.append(estimate.left())
    assert [guess and guess.seconds for guess in left[1:]] == pytest.approx([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    assert (left[0] is None) == (0 in traced)
    assert left[3].steps == sum(n not in traced for n in range(4)) - 1  # without the one that warms up
    assert estimate.error()["worst"]["error"] == pytest.approx(0.0)


def test_no_estimate_no_error():
    _, phase = told([Group(1, ("cond",))], [1.0])
    assert phase.facts["estimate"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0021, "2.1 ms"), (0.21, "0.21 s"), (16.4, "16.4 s"), (59.99, "1 min 0 s"), (75, "1 min 15 s"), (8100, "2 h 15 min"), (None, "-")],
)
def test_seconds_text(seconds, text):
    assert seconds_text(seconds) == text
