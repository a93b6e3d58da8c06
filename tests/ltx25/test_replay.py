"""When a net is run, captured or replayed. Graphs themselves are tested on a card, with the nets they are of."""

import logging

import pytest
import torch
from comfyui_ltx25.ltx25 import replay as module
from comfyui_ltx25.ltx25.instrument import Sink, Watch
from comfyui_ltx25.ltx25.parts import CONNECTORS
from comfyui_ltx25.ltx25.parts import TEXT as TEXT_PART
from comfyui_ltx25.ltx25.replay import Replay
from comfyui_ltx25.ltx25.text import SHORT, TextEncoder, run_length
from comfyui_ltx25.tests.support.engine import engine
from comfyui_ltx25.tests.support.golden import Golden
from comfyui_ltx25.tests.support.text import load_connectors, load_projection, load_tokenizer, load_tower

TEXT = Golden("text")
CUDA = torch.device("cuda")


class Net:
    """Adds one, counts how often it ran, and ticks twice."""

    def __init__(self):
        self.ran = 0

    def __call__(self, x, tick):
        self.ran += 1
        tick(1)
        tick(1)
        return x + 1, x + 2


class Recorded:
    """Stands for a captured graph where there is no card: fixed inputs, and a net that runs on them when it is replayed."""

    def __init__(self, net, inputs, reads):
        self.net, self.own, self.reads = net, tuple(x.clone() for x in inputs), reads

    def replay(self, inputs):
        for own, given in zip(self.own, inputs, strict=True):
            own.copy_(given)
        return self.net(*self.own, module._silent)


@pytest.fixture
def captures(monkeypatch):
    """Kinds in the order they were captured; graphs are wanted and come from `Recorded`."""
    made = []

    def capture(net, inputs, reads):
        made.append(tuple(inputs[0].shape))
        return Recorded(net, inputs, reads)

    monkeypatch.setattr(module, "graphs_wanted", lambda device: True)
    monkeypatch.setattr(module, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def run(replay, net, x):
    ticks = []
    results = replay(net, (x,), lambda n=1, text="": ticks.append(n), 2)
    assert sum(ticks) == 2
    assert torch.equal(results[0], x + 1) and torch.equal(results[1], x + 2)
    return ticks


def test_a_cpu_runs_the_net_itself_every_time():
    net, replay = Net(), Replay("the net", 2)
    assert [run(replay, net, torch.zeros(2)) for _ in range(3)] == [[1, 1]] * 3
    assert net.ran == 3 and replay.captured == 0


def test_one_switch_turns_graphs_off(monkeypatch):
    assert module.graphs_wanted(CUDA) and not module.graphs_wanted(torch.device("cpu"))
    monkeypatch.setenv("LTX25_GRAPHS", "off")
    assert not module.graphs_wanted(CUDA)


def test_the_second_call_of_a_kind_is_captured_and_ticks_come_at_once(captures):
    net, replay = Net(), Replay("the net", 2)
    assert run(replay, net, torch.zeros(2)) == [1, 1] and captures == []
    assert run(replay, net, torch.ones(2)) == [2] and captures == [(2,)]
    assert run(replay, net, torch.ones(2) * 3) == [2] and captures == [(2,)]


def test_a_kind_that_never_comes_back_is_never_captured_and_pushes_nothing_out(captures):
    net, replay = Net(), Replay("the net", 1)
    for n in (2, 2, 3, 4, 5, 2):
        run(replay, net, torch.zeros(n))
    assert captures == [(2,)] and replay.captured == 1


def test_the_graph_used_longest_ago_makes_room_before_the_next_is_captured(captures, monkeypatch):
    net, replay = Net(), Replay("the net", 2)
    for n in (1, 2, 1, 2, 1, 3, 3):  # 2 goes
        run(replay, net, torch.zeros(n))
        assert replay.captured <= 2
    run(replay, net, torch.zeros(1))
    run(replay, net, torch.zeros(2))
    assert captures == [(1,), (2,), (3,), (2,)]


def test_dtypes_are_kinds_of_their_own(captures):
    net, replay = Net(), Replay("the net", 2)
    for dtype in (torch.float32, torch.float64) * 2:
        run(replay, net, torch.zeros(2, dtype=dtype))
    assert len(captures) == 2


def test_dropped_graphs_are_gone_and_their_kinds_are_new_again(captures):
    net, replay = Net(), Replay("the net", 2)
    for _ in range(2):
        run(replay, net, torch.zeros(2))
    replay.drop()
    assert replay.captured == 0
    assert run(replay, net, torch.zeros(2)) == [1, 1] and len(captures) == 1


def test_what_cannot_be_captured_runs_as_it_is_and_says_so_once(captures, monkeypatch, caplog):
    def capture(net, inputs, reads):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(module, "_capture", capture)
    net, replay = Net(), Replay("the net", 2)
    with caplog.at_level(logging.WARNING):
        assert [run(replay, net, torch.zeros(2)) for _ in range(4)] == [[1, 1]] * 4
    assert caplog.messages == ["the net runs without captured graphs: operation not permitted when stream is capturing"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), RuntimeError("CUDA error: out of memory")])
def test_memory_that_runs_out_while_capturing_is_for_the_caller_to_handle(error, captures, monkeypatch):
    def capture(net, inputs, reads):
        raise error

    monkeypatch.setattr(module, "_capture", capture)
    replay = Replay("the net", 2)
    run(replay, Net(), torch.zeros(2))
    with pytest.raises(type(error), match=str(error)):
        run(replay, Net(), torch.zeros(2))


@pytest.mark.parametrize(
    ("tokens", "device", "length"), [(1, CUDA, 128), (128, CUDA, 128), (200, CUDA, 256), (512, CUDA, 512), (513, CUDA, 513), (200, torch.device("cpu"), 200)]
)
def test_short_prompts_run_at_a_few_lengths_where_graphs_are(tokens, device, length):
    assert run_length(tokens, device) == length


def test_prompts_of_one_length_share_a_graph_and_long_ones_make_none(captures, monkeypatch):
    """The text side at its tiny size, as on a card: padded, replayed from the second prompt on, equal to the plain run."""
    path = TEXT.folder / "text_encoder.f32.safetensors"
    parts = load_tokenizer(path), load_tower(path), load_projection(path)
    connectors = load_connectors(TEXT.folder / "transformer_connectors.f32.safetensors")
    replays = Replay("the text encoder", 2), Replay("the connectors", 1)
    plain, graphed = TextEncoder(*parts, None), TextEncoder(*parts, replays[0])
    ticks = {}

    class Listener(Sink):
        def ticked(self, phase):
            ticks[phase.name] = phase.done

    monkeypatch.setattr("comfyui_ltx25.ltx25.text.run_length", lambda tokens, device: run_length(tokens, CUDA))
    for text in ("a red fox", "two grey cats in the snow", "a bird " * 30, "", "fox " * 2 * SHORT):
        want, got = plain.encode(text, Watch()), graphed.encode(text, Watch([Listener()]))
        assert torch.equal(got.video, want.video) and torch.equal(got.audio, want.audio)
        assert ticks["text.tower"] == 6
        with Watch([Listener()]).phase("text.connect", total=connectors.blocks, unit="block") as phase:
            arguments = got.video, got.audio, [got.tokens.used], 1024, phase
            connected = type(connectors)(connectors.video, connectors.audio, replays[1]).forward(*arguments)
            assert phase.done == phase.total
            assert all(map(torch.equal, connected, connectors.forward(*arguments)))
    assert set(captures) == {(128,), (1, 1024, 32)}  # the others came once, or are long
    assert replays[1]._graphs.popitem()[1].reads[0] is connectors.video.rope(1024, torch.device("cpu"))[0]


def test_graphs_of_the_text_side_go_with_the_weights_they_read():
    one = engine()
    one.encode("a red fox", Watch())
    for part in (one.opened.parts[TEXT_PART], one.opened.parts[CONNECTORS]):
        replay = one._graphs(part)
        replay._graphs["a kind"] = object()  # stands for a graph, which needs a card
        part.unload()
        assert replay.captured == 0
    one.encode("a grey cat", Watch())
    replay = one._graphs(one.opened.parts[TEXT_PART])
    replay._graphs["a kind"] = object()
    assert one.opened.parts[TEXT_PART].shrink(1) and replay.captured == 0
    replay._graphs["a kind"] = object()
    one.encode("a blue bird", Watch())
    one.detach()
    assert replay.captured == 0


def test_a_text_encoder_whose_blocks_take_turns_has_no_graphs():
    one = engine(residency="stream")
    one.encode("a red fox", Watch())
    assert one.opened.parts[TEXT_PART].streams and one._graphs(one.opened.parts[TEXT_PART]) is None
    assert engine()._graphs(engine().opened.parts[TEXT_PART]) is not None
