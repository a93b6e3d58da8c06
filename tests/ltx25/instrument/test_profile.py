import pytest
import torch
from comfyui_ltx25.ltx25.instrument import RunRecord, Watch, profile
from comfyui_ltx25.ltx25.instrument.flops import Flops
from comfyui_ltx25.ltx25.instrument.history import read_run
from comfyui_ltx25.ltx25.instrument.profile import (
    ATTENTION,
    COPIES,
    ELEMENTWISE,
    GAPS,
    MATRIX,
    STEP,
    ProfiledTransformer,
    StepWork,
    attribute,
    kind_of,
    length,
    profile_step,
    union,
)
from comfyui_ltx25.ltx25.instrument.selftest import Speed, quick_product, self_test
from comfyui_ltx25.tests.support.records import GUIDED, PUBLISHED
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")


def event(name, start, end, cat="kernel", **args):
    """A trace event; times in ms."""
    return {"ph": "X", "name": name, "cat": cat, "ts": start * 1e3, "dur": (end - start) * 1e3, "tid": 1, "args": args}


def mark(start, end):
    return event(STEP, start, end, "user_annotation")


def test_parts_sum_to_the_wall_and_overlaps_count_once():
    trace = [
        mark(0, 100),
        event("nvjet_hsh_128x256", 10, 40),
        event("cudnn_generated_fort_native_sdpa_sm90", 40, 60),
        event("vectorized_elementwise_kernel", 55, 70),  # 5 ms beside attention, on another stream
        event("Memcpy HtoD (Pinned -> Device)", 20, 80, "gpu_memcpy", bytes=1000),  # mostly hidden behind compute
        event("sm90_xmma_gemm_bf16", 90, 120),  # runs past the mark: only what is inside counts
        event("cudaLaunchKernel", 0, 90, "cuda_runtime"),
    ]
    split = attribute(trace, 0.1)
    assert split.wall == pytest.approx(0.1)
    assert {kind: round(1e3 * seconds, 6) for kind, seconds in split.seconds.items()} == {
        MATRIX: 40, ATTENTION: 20, ELEMENTWISE: 10, COPIES: 10, GAPS: 20,
    }  # fmt: skip
    assert sum(split.seconds.values()) == pytest.approx(split.wall, rel=1e-9)
    assert split.device_busy == pytest.approx(0.08)
    assert split.kernels == 4 and split.copied == 1000


@given(st.lists(st.tuples(st.sampled_from(["gemm", "flash", "add", "Memcpy"]), st.integers(-20, 120), st.integers(1, 50)), max_size=30))
def test_parts_always_sum_to_the_wall(spans):
    split = attribute([mark(0, 100), *(event(name, start, start + n) for name, start, n in spans)], 0.1)
    assert sum(split.seconds.values()) == pytest.approx(split.wall, rel=1e-9)
    assert all(seconds >= -1e-12 for seconds in split.seconds.values())


def test_union_of_intervals():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert length(union([(0, 2), (1, 3)])) == 3
    assert union([]) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_192x192_64x4_2x1_v_bz_TNT", MATRIX),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", MATRIX),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...GemmUniversal...>>", MATRIX),
        ("sm90_xmma_fprop_implicit_gemm_bf16", MATRIX),
        ("Cijk_Ailk_Bljk_HHS_BH_MT128x128", MATRIX),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", ATTENTION),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>", ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", ATTENTION),
        ("_na3d_kernel", ATTENTION),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", ELEMENTWISE),
        ("_rms_adaln_kernel", ELEMENTWISE),
        ("_qk_norm_rope_kernel", ELEMENTWISE),
        ("Memcpy DtoH (Device -> Pinned)", COPIES),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::direct_copy_kernel_cuda>>", COPIES),
        ("void at::native::CatArrayBatchedCopy_contig<...>", COPIES),
        ("aten::addmm", MATRIX),
        ("aten::scaled_dot_product_attention", ATTENTION),
        ("aten::copy_", COPIES),
        ("aten::mul", ELEMENTWISE),
    ],
)
def test_kernels_are_told_apart_by_name(name, kind):
    assert kind_of(name) == kind


def test_a_trace_without_the_step_is_refused():
    with pytest.raises(ValueError, match="no profiled step"):
        attribute([event("gemm", 0, 1)], 0.1)


def test_a_real_step_on_the_cpu_is_split_and_its_result_returned():
    a = torch.randn(700, 700)

    def step():
        x = a
        for _ in range(40):  # long enough that what else the machine does is small beside it
            x = torch.nn.functional.gelu(x @ a) / 30
        return torch.nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]).clone()

    wanted = step()
    split, result = profile_step(step, CPU, Flops(40 * 2 * 700**3, 4 * 700**3), traffic=700 * 700 * 4 * 160)
    torch.testing.assert_close(result, wanted)
    assert sum(split.seconds.values()) == pytest.approx(split.wall, rel=0.02)
    assert split.wall == pytest.approx(split.measured, rel=0.02, abs=1e-3)
    assert split.seconds[MATRIX] > 0.3 * split.wall and split.seconds[ATTENTION] > 0
    assert split.kernels >= 82
    text = split.text(Speed("float32", 1e12, 1e10, None))
    assert "TFLOP/s" in text and "% of 1 TFLOP/s" in text and "% of 10.0 GB/s" in text and "host gaps" in text


def test_a_quick_product_measures_the_same_rate_and_leaves_the_random_numbers_of_the_process_alone():
    quick_product.cache_clear()
    before = torch.random.get_rng_state()
    rate = quick_product(CPU)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert rate == pytest.approx(self_test(CPU, 0.2).flops, rel=0.9) and quick_product(CPU) == rate


def test_self_test_measures_rates_in_about_the_time_given():
    import time

    begin = time.perf_counter()
    speed = self_test(CPU, 0.2)
    assert time.perf_counter() - begin < 2.0
    assert speed.flops > 1e8 and speed.copy > 1e8 and speed.link is None and speed.dtype == "float32"


def test_one_call_of_a_transformer_is_profiled_and_the_next_one_without_graphs(tmp_path, monkeypatch):
    calls = []

    class Dit:
        def __init__(self, name):
            self.name = name

        def prepare(self):
            return "prepared"

        def __call__(self, x):
            calls.append(self.name)
            return x @ x

    monkeypatch.setattr(profile, "self_test", lambda device: Speed("float32", 1e12, 1e10, None))
    work = StepWork(PUBLISHED, {"video": 1344, "audio": 26}, 1024, 1, 2)
    x = torch.eye(4)
    with RunRecord(tmp_path, {}) as record:
        watch = Watch([record])
        dit = ProfiledTransformer(Dit("graphed"), Dit("plain"), CPU, watch, [GUIDED] * 6, work)
        assert dit.prepare() == "prepared"
        assert list(dit.traced) == [2, 3]
        with watch.phase("sample"):
            for _ in range(6):
                torch.testing.assert_close(dit(x), x)
    assert calls == ["graphed"] * 3 + ["plain"] + ["graphed"] * 2
    run = read_run(record.path)
    traced = run.of("profile")
    assert [event["graphs"] for event in traced] == [True, False]  # the two halves of the verdict on graphs
    assert all(0 < event["device_busy"] <= event["wall"] for event in traced)
    assert traced[0]["linear"] + traced[0]["attention"] == pytest.approx(131e12, rel=0.01)
    assert traced[0]["selftest"]["flops"] == 1e12
    sample = next(row for row in run.phases if row["name"] == "sample")
    assert sample["start"] <= traced[0]["begin"] <= sample["start"] + sample["wall"]
    assert run.traced == {(sample["id"], 2), (sample["id"], 3)}
    assert len(dit.texts) == 2 and "host gaps" in dit.texts[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_on_the_gpu_is_split_by_kernels():
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def step():
        x = a
        for _ in range(20):
            x = torch.nn.functional.gelu(x @ a)
        return x

    step()
    split, _ = profile_step(step, device, Flops(20 * 2 * 4096**3, 0))
    assert sum(split.seconds.values()) == pytest.approx(split.wall, rel=0.02)
    assert split.seconds[MATRIX] > 0.3 * split.wall and split.seconds[ELEMENTWISE] > 0
    assert 40 <= split.kernels <= 80
