import json
import logging

import pytest
import torch
from comfyui_ltx25.kernels import attention as module
from comfyui_ltx25.kernels.attention import BACKENDS, Choices, aligned, attention_reference
from comfyui_ltx25.tests.support.kernels import CUDA, random

Q, K = random((1, 5, 2, 8), torch.float32, 1), random((1, 7, 2, 8), torch.float32, 2)


def noise(q, k, v, bias):
    return torch.randn(q.shape)


def absent(q, k, v, bias):
    raise ImportError("no such library")


def refusing(q, k, v, bias):
    raise RuntimeError("No available kernel.")


@pytest.fixture
def backends(monkeypatch):
    """Back ends that run on the CPU, and seconds that each is said to take."""
    seconds = {}
    monkeypatch.delenv("LTX25_ATTENTION", raising=False)
    monkeypatch.setattr(module, "shape_class", lambda q, k, bias: f"{tuple(q.shape)} {tuple(k.shape)} {bias is None}")
    monkeypatch.setattr(module, "_time", lambda attend, *_: seconds[attend])
    monkeypatch.setattr(module.torch.cuda, "is_current_stream_capturing", lambda: False)

    def install(**by_name):
        monkeypatch.setattr(module, "BACKENDS", {name: attend for name, (attend, _) in by_name.items()})
        monkeypatch.setattr(module, "ORDER", tuple(by_name))
        seconds.update({attend: time for attend, time in by_name.values()})

    return install


def plain(name):
    def attend(q, k, v, bias):
        return attention_reference(q, k, v, bias)

    attend.__name__ = name
    return attend


def picky(q, k, v, bias):
    """Takes what it is compared on, and no input of five tokens."""
    if q.shape[1] == 5 and k.shape[1] == 7 and q.shape[0] == 3:
        raise RuntimeError("odd lengths are not supported")
    return attention_reference(q, k, v, bias)


def test_n15_a_back_end_that_returns_noise_is_rejected_and_named(backends, caplog):
    good = plain("good")
    backends(wild=(noise, 0.1), good=(good, 1.0), math=(plain("math"), 9.0))
    with caplog.at_level(logging.WARNING):
        assert Choices(None).of(Q, K, None) == "good"
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("attention back end wild is skipped")


def test_w5_an_absent_or_refusing_back_end_falls_back(backends, caplog):
    good = plain("good")
    backends(old=(absent, 0.1), narrow=(refusing, 0.1), good=(good, 1.0), math=(plain("math"), 9.0))
    choices = Choices(None)
    assert choices.of(Q, K, None) == "good"
    assert len(caplog.messages) == 1  # what the user never installed is not worth a word
    backends(narrow=(refusing, 0.1), math=(plain("math"), 9.0))
    assert Choices(None).of(Q, K, None) == "math"


def test_the_earlier_back_end_wins_unless_another_is_clearly_faster(backends):
    first, second = plain("first"), plain("second")
    backends(first=(first, 1.04), second=(second, 1.0), math=(plain("math"), 9.0))
    assert Choices(None).of(Q, K, None) == "first"
    backends(first=(first, 1.06), second=(second, 1.0), math=(plain("math"), 9.0))
    assert Choices(None).of(Q, K, None) == "second"


def test_a_choice_is_kept_for_the_next_process_and_a_broken_file_is_no_choice(backends, tmp_path):
    file = tmp_path / "sub" / "attention.json"
    first, second = plain("first"), plain("second")
    backends(first=(first, 2.0), second=(second, 1.0), math=(plain("math"), 9.0))
    assert Choices(file).of(Q, K, None) == "second"
    assert list(json.loads(file.read_text()).values()) == ["second"]
    backends(first=(first, 1.0), second=(second, 2.0), math=(plain("math"), 9.0))
    assert Choices(file).of(Q, K, None) == "second"
    file.write_text("{not json")
    assert Choices(file).of(Q, K, None) == "first"


def test_a_back_end_there_was_no_memory_to_try_is_tried_again_by_the_next_process(backends, tmp_path, caplog):
    file, short = tmp_path / "attention.json", [True]
    second = plain("second")

    def first(q, k, v, bias):
        if short:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return attention_reference(q, k, v, bias)

    backends(first=(first, 1.0), math=(plain("math"), 9.0))
    with pytest.raises(torch.OutOfMemoryError, match="2.00 GiB"):
        Choices(file).of(Q, K, None)
    backends(first=(first, 1.0), second=(second, 2.0), math=(plain("math"), 9.0))
    assert Choices(file).of(Q, K, None) == "second"
    short.clear()
    assert Choices(file).of(Q, K, None) == "first" and not caplog.messages


@pytest.mark.parametrize("broken", [absent, refusing, noise])
def test_a_kept_back_end_that_this_process_cannot_use_is_chosen_again(broken, backends, tmp_path, caplog):
    file = tmp_path / "attention.json"
    backends(first=(plain("first"), 1.0), second=(plain("second"), 2.0), math=(plain("math"), 9.0))
    assert Choices(file).of(Q, K, None) == "first"
    backends(first=(broken, 1.0), second=(plain("second"), 2.0), math=(plain("math"), 9.0))
    assert torch.equal(Choices(file).run(Q, K, K, None), attention_reference(Q, K, K, None))
    assert list(json.loads(file.read_text()).values()) == ["second"]
    assert len(caplog.messages) == (broken is not absent)


def test_a_kept_back_end_is_compared_once_and_not_for_the_lack_of_memory_given_up(backends, tmp_path):
    file, calls = tmp_path / "attention.json", []

    def first(q, k, v, bias):
        calls.append(q.shape)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return attention_reference(q, k, v, bias)

    backends(first=(plain("first"), 1.0), math=(plain("math"), 9.0))
    longer = K.repeat(1, 2, 1, 1)
    for key in (K, longer):
        assert Choices(file).of(Q, key, None) == "first"
    backends(first=(first, 1.0), math=(plain("math"), 9.0))
    choices = Choices(file)
    with pytest.raises(torch.OutOfMemoryError):
        choices.of(Q, K, None)
    assert choices.of(Q, K, None) == choices.of(Q, longer, None) == "first" and len(calls) == 2


def of_three_rows(q):
    return q.expand(3, -1, -1, -1)


def test_a_shape_that_the_back_end_of_its_class_refuses_has_another_and_its_class_has_not(backends, tmp_path, monkeypatch, caplog):
    file = tmp_path / "attention.json"
    monkeypatch.setattr(module, "shape_class", lambda *_: "one class")
    backends(first=(picky, 1.0), second=(plain("second"), 2.0), math=(plain("math"), 9.0))
    choices, (q, k) = Choices(file), (of_three_rows(Q), of_three_rows(K))
    monkeypatch.setattr(module, "_time", lambda attend, *sample: attend(*sample) is None or (1.0 if attend is picky else 2.0))
    assert choices.of(Q, K, None) == "first"
    for _ in range(2):
        assert torch.equal(choices.run(q, k, k, None), attention_reference(q, k, k, None))
    assert choices.of(Q, K, None) == "first" and json.loads(file.read_text()) == {"one class": "first"}
    assert choices.made == {"one class": "first", "one class, exactly 3 x 5 x 7": "second"}
    assert caplog.messages == ["attention back end first refuses 3 x 5 x 7 of torch.float32, another is used for that shape: odd lengths are not supported"]
    file.unlink()
    assert Choices(file).of(q, k, None) == "second" and not file.exists()  # nor is it kept for the class that one shape was refused


def test_an_error_of_a_back_end_inside_a_capture_or_for_the_lack_of_memory_passes(backends, monkeypatch):
    raised = []

    def first(q, k, v, bias):
        if raised:
            raise raised[0]
        return attention_reference(q, k, v, bias)

    backends(first=(first, 1.0), math=(plain("math"), 9.0))
    choices = Choices(None)
    assert choices.of(Q, K, None) == "first"
    raised.append(RuntimeError("CUDA error: out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        choices.run(Q, K, K, None)
    raised[0] = RuntimeError("odd lengths are not supported")
    with monkeypatch.context() as capture, pytest.raises(RuntimeError, match="odd lengths"):
        capture.setattr(module.torch.cuda, "is_current_stream_capturing", lambda: True)
        choices.run(Q, K, K, None)
    assert choices.of(Q, K, None) == "first"
    assert torch.equal(choices.run(Q, K, K, None), attention_reference(Q, K, K, None)) and choices.of(Q, K, None) == "math"


def test_the_environment_forces_one(backends, monkeypatch):
    first, second = plain("first"), plain("second")
    backends(first=(first, 1.0), second=(second, 2.0), math=(plain("math"), 9.0))
    monkeypatch.setenv("LTX25_ATTENTION", "second")
    assert Choices(None).of(Q, K, None) == "second"
    monkeypatch.setenv("LTX25_ATTENTION", "third")
    with pytest.raises(ValueError, match="wanted one of first, second, math"):
        Choices(None).of(Q, K, None)


@pytest.mark.parametrize("bad", [absent, refusing, noise], ids=lambda attend: attend.__name__)
def test_one_that_is_asked_for_and_is_not_there_or_not_right_gives_way_and_is_named_once(bad, backends, monkeypatch, caplog, tmp_path):
    backends(bad=(bad, 0.1), good=(plain("good"), 1.0), math=(plain("math"), 9.0))
    monkeypatch.setenv("LTX25_ATTENTION", "bad")
    choices = Choices(tmp_path / "attention.json")
    for q in (Q, Q[:, :2], Q[:, :1]):
        assert choices.of(q, K, None) == "good"
    assert sum("LTX25_ATTENTION asks for bad" in record.message for record in caplog.records) == 1
    assert not (tmp_path / "attention.json").exists(), "what is fastest without it is not what is fastest"


def test_nothing_is_timed_inside_a_capture(backends, monkeypatch):
    backends(first=(plain("first"), 1.0), math=(plain("math"), 9.0))
    monkeypatch.setattr(module.torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run it once before"):
        Choices(None).of(Q, K, None)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 1344, 1344, 128), (2, 7, 1024, 128), (1, 26, 1344, 64), (3, 1, 1, 64)])
def test_the_chosen_back_end_is_as_good_as_the_plain_sums(shape, biased):
    rows, tokens, sources, head = shape
    q, k, v = random((rows, tokens, 32, head), torch.bfloat16, 1), *(random((rows, sources, 32, head), torch.bfloat16, s) for s in (2, 3))
    bias = random((tokens, sources), torch.bfloat16, 4) if biased else None
    truth = attention_reference(q.double(), k.double(), v.double(), None if bias is None else bias.double())
    got = module.attention(q.cuda(), k.cuda(), v.cuda(), None if bias is None else bias.cuda()).cpu().double()
    assert (got - truth).abs().max() <= 2**-7 * truth.abs().max()


def parts_of_a_product(heads, width, gates, dtype, device):
    """q, k, v (2, 40, heads, width) as views of one merged product whose rows are `gates` numbers longer."""
    product = random((2, 40, 3 * heads * width + gates), dtype, 5).to(device)
    return [part.unflatten(-1, (heads, width)) for part in product.split((*[heads * width] * 3, gates), dim=-1)[:3]]


@pytest.mark.parametrize(("gates", "dtype", "copied"), [(4, torch.bfloat16, True), (4, torch.float32, False), (8, torch.bfloat16, False), (1, torch.float32, True)])
def test_only_views_that_vector_loads_cannot_read_are_copied(gates, dtype, copied):
    for part in parts_of_a_product(4, 16, gates, dtype, "cpu"):
        got = aligned(part)
        assert (got.data_ptr() != part.data_ptr()) == copied
        assert torch.equal(got, part) and all(stride * got.itemsize % 16 == 0 for stride in got.stride()[:-1])


def test_a_row_of_one_token_and_a_shared_batch_are_not_copied():
    x = random((1, 1, 4, 16), torch.bfloat16, 1)
    assert aligned(x) is x
    shared = random((1, 6, 4, 16), torch.bfloat16, 1).expand(3, -1, -1, -1)
    assert aligned(shared) is shared


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("gates", [4, 8, 3])
def test_no_back_end_meets_an_address_it_cannot_load(name, gates, monkeypatch):
    """Small models' merged products are any width; a misaligned load would end the process' use of the device."""
    monkeypatch.setattr(module, "_CHOICES", Choices(None))
    monkeypatch.setenv("LTX25_ATTENTION", name)
    if name == "flash3":
        pytest.importorskip("flash_attn_interface")
    q, k, v = parts_of_a_product(4, 16, gates, torch.bfloat16, torch.device("cuda"))
    got = module.attention(q, k, v, None)
    torch.cuda.synchronize()
    torch.testing.assert_close(got.float(), attention_reference(q.float(), k.float(), v.float(), None), rtol=2e-2, atol=2e-2)
