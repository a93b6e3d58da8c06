"""Sampler steps: the official values, and the formulas again in float64."""

import math

import pytest
import torch
from comfyui_ltx25.ltx25 import steps
from comfyui_ltx25.tests.support import golden_dit as golden
from hypothesis import given, settings
from hypothesis import strategies as st

NOISY = [name for name in golden.names("step/") if "ancestral" in name or "cfg_pp" in name]
PAIRS = [(1.0, 0.99375), (0.909375, 0.725), (0.421875, 0.1), (0.3, 0.0001)]


def test_every_case_is_tested():
    named = {"step/euler", "step/res_2s_sde_mix", "step/res_2s_coefficients", "step/res_2s_noise"}
    assert set(golden.names("step/")) == named | set(NOISY)


def pairs(case):
    return [(f"{s}_to_{t}", s, t) for s, t in case["sigma_pairs"]]


def test_n13_euler_follows_the_velocity():
    case = golden.inputs("step/euler")
    for output, s, t in pairs(case):
        golden.check("step/euler", output, steps.euler(case["x"], case["x0"], s, t))


@pytest.mark.parametrize("name", NOISY)
def test_noisy_steps(name):
    case = golden.inputs(name)
    eta, s_noise, x, x0 = case["eta"], case["s_noise"], case["x"], case["x0"]
    noise = case["noise"] if eta > 0 else None
    for output, s, t in pairs(case):
        if t == 0:
            got = x0  # the loops return it
        elif "uncond" in case:
            got = steps.cfg_plus_plus(x, x0, case["uncond"], noise, s, steps.CfgPlusPlus.of(s, t, eta, s_noise))
        else:
            got = steps.ancestral(x, x0, noise, steps.Ancestral.of(s, t, eta, s_noise))
        golden.check(name, output, got)


def test_res_2s_mix():
    case = golden.inputs("step/res_2s_sde_mix")
    for output, s, t in pairs(case):
        got = steps.mix_noise(case["x"].double(), case["x0"].double(), case["noise"], s, t, case["eta"])
        golden.check("step/res_2s_sde_mix", output, got)


def test_res_2s_coefficients():
    case, want = golden.inputs("step/res_2s_coefficients"), golden.outputs("step/res_2s_coefficients")
    got = [(k.a21, k.b1, k.b2) for k in (steps.Res2s.of(1.0, math.exp(-h)) for h in case["h"])]
    golden.close("step/res_2s_coefficients", "a21_b1_b2", torch.tensor(got, dtype=torch.float64), torch.tensor(want["a21_b1_b2"], dtype=torch.float64))


def test_res_2s_noise():
    case = golden.inputs("step/res_2s_noise")
    golden.check("step/res_2s_noise", "noise", steps.standardise(case["raw"]))


def draw(n, seed=0):
    return torch.randn(n, 2, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("s, t", PAIRS)
def test_euler_in_float64(s, t):
    x, x0 = draw(2)
    torch.testing.assert_close(steps.euler(x, x0, s, t), x0 + (x - x0) * t / s)


def test_euler_to_zero_is_the_prediction():
    x, x0 = draw(2)
    torch.testing.assert_close(steps.euler(x, x0, 0.1, 0.0), x0)


@pytest.mark.parametrize("s, t", PAIRS)
@pytest.mark.parametrize("eta, s_noise", [(1.0, 1.0), (0.5, 1.0), (0.5, 0.8), (0.0, 1.0)])
def test_ancestral_in_float64(s, t, eta, s_noise):
    """Down to t (1 + (t/s - 1) eta), then up so that signal and noise have the shares 1 - t and t again."""
    x, x0, noise = draw(3)
    k = steps.Ancestral.of(s, t, eta, s_noise)
    down = t * (1 + (t / s - 1) * eta)
    signal = x0 + (x - x0) * down / s
    if eta == 0:
        torch.testing.assert_close(steps.ancestral(x, x0, None, k), signal)
        return
    keep = (1 - t) / (1 - down)
    want = keep * signal + s_noise * noise * math.sqrt(t**2 - (keep * down) ** 2)
    torch.testing.assert_close(steps.ancestral(x, x0, noise, k), want)


@settings(deadline=None)
@given(st.floats(0.01, 1.0), st.floats(0.001, 0.999), st.floats(0.0, 1.0))
def test_ancestral_keeps_the_noise_level(s, ratio, eta):
    """Of x = (1 - s) x0 + s n with the true x0, the step's result has variance t^2 around (1 - t) x0."""
    t = s * ratio
    k = steps.Ancestral.of(s, t, eta, 1.0)
    signal = k.keep * (k.ratio * (1 - s) + 1 - k.ratio)
    noise = (k.keep * k.ratio * s) ** 2 + k.renoise**2
    assert signal == pytest.approx(1 - t, abs=1e-9)
    assert noise == pytest.approx(t * t, abs=1e-9)


@pytest.mark.parametrize("s, t", PAIRS[1:])
@pytest.mark.parametrize("eta", [1.0, 0.5, 0.0])
def test_cfg_plus_plus_in_float64(s, t, eta):
    x, x0, u, noise = draw(4)
    a, b = s / (1 - s), t / (1 - t)
    up = min(b, eta * math.sqrt(b * b * (a * a - b * b) / (a * a)))
    d = (x - (1 - s) * u) / s
    want = (1 - t) * (x0 + math.sqrt(b * b - up * up) * d + up * noise)
    got = steps.cfg_plus_plus(x, x0, u, noise, s, steps.CfgPlusPlus.of(s, t, eta, 1.0))
    torch.testing.assert_close(got, want)


def test_gradient_estimate_in_float64():
    x, x0, before = draw(3)
    first, velocity = steps.gradient_estimate(x, x0, None, 0.8, 2.0)
    assert torch.equal(first, x0)
    torch.testing.assert_close(velocity, (x - x0) / 0.8)
    later, _ = steps.gradient_estimate(x, x0, before, 0.8, 2.0)
    torch.testing.assert_close(later, x - 0.8 * (2 * velocity - before))
    plain, _ = steps.gradient_estimate(x, x0, before, 0.8, 1.0)
    torch.testing.assert_close(plain, x0)


@pytest.mark.parametrize("s, t", [(0.96, 0.8), (0.9, 0.7), (0.5, 0.4)])
def test_res_2s_anchor_is_where_the_official_iteration_ends(s, t):
    middle, x0 = draw(2)
    k = steps.Res2s.of(s, t)
    assert k.refine
    anchor = middle.clone()
    for _ in range(100):
        anchor = middle - k.h * k.a21 * (x0 - anchor)
    torch.testing.assert_close(steps.res_2s_anchor(middle, x0, k), anchor, atol=1e-13, rtol=1e-13)


def test_res_2s_is_of_second_order():
    """dx/dl = x - x0 with a straight x0(l): exact in l = -ln s; the error falls by 8 per step when the step is halved."""
    def error(h):
        s = 0.5
        t = s * math.exp(-h)
        x0 = lambda sigma: torch.tensor(math.sin(3 * sigma))  # noqa: E731
        x = torch.tensor(1.0, dtype=torch.float64)
        k = steps.Res2s.of(s, t)
        end = steps.res_2s_end(x, x0(s), x0(k.middle), k)
        fine, n = x, 4000
        for i in range(n):
            a, b = s * math.exp(-h * i / n), s * math.exp(-h * (i + 1) / n)
            m = math.sqrt(a * b)
            fine = x0(m) + (fine - x0(m)) * b / a
        return float(abs(end - fine))

    assert error(0.2) / error(0.1) == pytest.approx(8, rel=0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_keep_the_dtype(dtype):
    x, x0, u, noise = (v.to(dtype) for v in draw(4))
    s, t = 0.9, 0.7
    k = steps.Res2s.of(s, t)
    for got in (
        steps.euler(x, x0, s, t),
        steps.ancestral(x, x0, noise, steps.Ancestral.of(s, t, 1.0, 1.0)),
        steps.cfg_plus_plus(x, x0, u, noise, s, steps.CfgPlusPlus.of(s, t, 1.0, 1.0)),
        steps.gradient_estimate(x, x0, u, s, 2.0)[0],
        steps.res_2s_middle(x, x0, k),
        steps.res_2s_anchor(x, x0, k),
        steps.res_2s_end(x, x0, u, k),
        steps.mix_noise(x, x0, noise, s, t, 0.5),
        steps.standardise(noise),
    ):
        assert got.dtype == dtype
