"""HDR curves and primaries against the official values."""

from pathlib import Path

import pytest
import torch
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.hdr import CURVES, check_transfer, convert, to_linear
from comfyui_ltx25.tests.support.golden import Golden
from comfyui_ltx25.tests.support.hdr import LAWS, encode, from_linear

GOLDEN = Golden("upscale")


def test_every_official_case_is_tested():
    assert sorted(GOLDEN.names("hdr/")) == ["hdr/acescct", "hdr/logc3", "hdr/working_space"]


@pytest.mark.parametrize("name", LAWS)
def test_official_curves(name):
    case = f"hdr/{name.lower()}"
    GOLDEN.check(case, "compress", encode(GOLDEN.input(case, "linear"), name))
    GOLDEN.check(case, "decompress", LAWS[name].decode(GOLDEN.input(case, "code")))
    GOLDEN.check(case, "compress_ldr", GOLDEN.input(case, "linear").clamp(0, 1))


def test_official_conversions():
    case = "hdr/working_space"
    linear, working = (GOLDEN.input(case, name).movedim(1, -1) for name in ("linear_rec709", "working"))
    made = {
        "acescct": from_linear(linear, "ACEScct"),
        "logc3": from_linear(linear, "LogC3"),
        "acescct_from_acescg": from_linear(linear, "ACEScct", "acescg"),
        "linear_from_logc3": to_linear(working, "LogC3"),
        "linear_from_acescct": to_linear(working, "ACEScct"),
        "acescg_from_acescct": to_linear(working, "ACEScct", "acescg"),
        "rec2020_from_rec709": convert(linear, "rec709", "rec2020"),
    }
    assert set(made) == set(GOLDEN.index[case]["outputs"])
    for name, value in made.items():
        GOLDEN.check(case, name, value.movedim(-1, 1))


@pytest.mark.parametrize("curve", CURVES)
def test_there_and_back(curve):
    light = torch.logspace(-4, 1.5, 60).view(-1, 1).expand(-1, 3)
    torch.testing.assert_close(to_linear(from_linear(light, curve), curve), light, rtol=1e-3, atol=1e-5)


def test_the_help_page_tells_the_brightest_light():
    """ACEScct's primaries are wider than Rec.709's: a pure one is brighter there than white."""
    page = (Path(__file__).parents[2] / "nodes" / "web" / "docs" / "DecodeVideoVAE.md").read_text()
    signals = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    most = {curve: round(float(to_linear(signals, curve).max())) for curve in CURVES}
    white = round(float(to_linear(torch.ones(3), "ACEScct").max()))
    assert f"up to {most['LogC3']} (LogC3), or up to {white} in white and {most['ACEScct']} in pure red (ACEScct" in page


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match="ACEScct or LogC3"):
        to_linear(torch.zeros(3), "pq")
    with pytest.raises(InputError, match="transfer 'acescct' does not exist; choose ACEScct, LogC3, or sdr"):
        check_transfer("acescct")
    with pytest.raises(InputError, match="cannot be turned"):
        convert(torch.zeros(3), "rec2020", "rec709")
