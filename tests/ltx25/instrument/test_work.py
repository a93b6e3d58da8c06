import pytest
from comfyui_ltx25.ltx25.dit.modality import Leg, LegPlan
from comfyui_ltx25.ltx25.instrument.work import group_kind, sample_work
from comfyui_ltx25.tests.support.records import GUIDED, PUBLISHED

ALONE = LegPlan((Leg.COND,), frozenset(), frozenset(), video=True, audio=False)


def test_work_lists_every_kind_of_group_with_its_arithmetic():
    facts = sample_work(PUBLISHED, [GUIDED, None, ALONE, GUIDED], {"video": 1344, "audio": 26}, 1024, 1, precision="bf16")
    assert facts["model"] == "48 blocks of 4096/2048" and facts["precision"] == "bf16"
    guided, alone = facts["work"]
    assert (guided["legs"], guided["kind"], guided["groups"]) == ("cond+uncond+stg+mod", "", 2)
    assert guided["linear"] + guided["attention"] == pytest.approx(131, abs=0.6)
    assert (alone["legs"], alone["kind"], alone["groups"]) == ("cond", "video only", 1)


def test_a_batch_does_the_work_of_its_items():
    one, two = (sample_work(PUBLISHED, [GUIDED], {"video": 1344, "audio": 26}, 1024, batch)["work"][0] for batch in (1, 2))
    assert two["linear"] == pytest.approx(2 * one["linear"]) and two["attention"] == pytest.approx(2 * one["attention"])


@pytest.mark.parametrize(
    ("video", "audio", "isolated", "kind"),
    [
        (True, True, {"video", "audio"}, ""),
        (False, True, {"audio"}, "audio only, mod of audio"),
        (True, True, {"video"}, "mod of video"),
    ],
)
def test_kind_tells_groups_of_equal_legs_and_other_cost_apart(video, audio, isolated, kind):
    plan = LegPlan((Leg.COND, Leg.ISOLATED), frozenset(), frozenset(), video=video, audio=audio, isolated=frozenset(isolated))
    assert group_kind(plan) == kind
