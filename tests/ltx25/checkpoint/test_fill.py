import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import check, expected, fill, read_header
from comfyui_ltx25.ltx25.errors import FileError
from safetensors.torch import save_file
from torch import nn


class Attention(nn.Module):
    """Keys and values in one product, as the file keeps them apart; values are wider than keys."""

    def __init__(self, rows=(2, 2)):
        super().__init__()
        self.to_q = nn.Linear(4, 3)
        self.to_kv = nn.Linear(4, sum(rows), bias=False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("ids", torch.zeros(2, dtype=torch.uint8))

    def checkpoint_sources(self):
        return {"to_kv.weight": ("to_k.weight", "to_v.weight")}


class Model(nn.Module):
    def __init__(self, rows=(2, 2)):
        super().__init__()
        self.blocks = nn.ModuleList([Attention(rows), Attention(rows)])
        self.table = nn.Parameter(torch.zeros(2, 4))


def on_meta(rows=(2, 2)):
    with torch.device("meta"):
        return Model(rows)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    made = {"m.table": torch.randn(2, 4, generator=generator)}
    for i in range(2):
        for name, shape in (("to_q.weight", (3, 4)), ("to_q.bias", (3,)), ("to_k.weight", (2, 4)), ("to_v.weight", (2, 4)), ("scale", (1,))):
            made[f"m.blocks.{i}.{name}"] = torch.randn(shape, generator=generator).bfloat16()
        made[f"m.blocks.{i}.ids"] = torch.tensor([3, 250], dtype=torch.uint8)
    return made


@pytest.fixture
def written(tmp_path):
    def write(tensors):
        save_file(tensors, tmp_path / "x.safetensors")
        return read_header(tmp_path / "x.safetensors")

    return write


def load(header, module, dtype=None, unused=(), keep=(), read=lambda n: None):
    fill(module, header, "m.", torch.device("cpu"), dtype, read, unused, keep)
    return module


def test_every_parameter_and_buffer_is_filled_as_stored(written, tensors):
    model = load(written(tensors), on_meta())
    state = model.state_dict()
    assert torch.equal(state["table"], tensors["m.table"])
    for i in range(2):
        lead = f"m.blocks.{i}."
        merged = torch.cat([tensors[lead + "to_k.weight"], tensors[lead + "to_v.weight"]])
        assert torch.equal(state[f"blocks.{i}.to_kv.weight"], merged)
        for name in ("to_q.weight", "to_q.bias", "scale", "ids"):
            assert torch.equal(state[f"blocks.{i}.{name}"], tensors[lead + name])
            assert state[f"blocks.{i}.{name}"].dtype == tensors[lead + name].dtype
    assert not any(p.requires_grad for p in model.parameters())
    assert isinstance(model.table, nn.Parameter) and isinstance(model.blocks[0].scale, torch.Tensor)


def test_floating_tensors_become_the_dtype_and_integers_stay(written, tensors):
    model = load(written(tensors), on_meta(), dtype=torch.float64)
    assert model.table.dtype == model.blocks[0].to_kv.weight.dtype == model.blocks[1].scale.dtype == torch.float64
    assert model.blocks[0].ids.dtype == torch.uint8
    assert torch.equal(model.table, tensors["m.table"].double())


def test_kept_patterns_stay_as_stored(written, tensors):
    model = load(written(tensors), on_meta(), dtype=torch.bfloat16, keep=("*table*",))
    assert model.table.dtype == torch.float32 and torch.equal(model.table, tensors["m.table"])
    model = load(written(tensors), on_meta(), dtype=torch.float32, keep=("blocks.1.to_kv.*",))
    assert model.blocks[1].to_kv.weight.dtype == torch.bfloat16 and model.blocks[0].to_kv.weight.dtype == torch.float32


def test_merged_sources_of_unequal_size_take_their_rows_from_the_file(written, tensors):
    for i in range(2):
        tensors[f"m.blocks.{i}.to_v.weight"] = torch.full((5, 4), 7.0)
    model = load(written(tensors), on_meta(rows=(2, 5)))
    assert model.blocks[0].to_kv.weight[2:].eq(7).all()
    assert torch.equal(model.blocks[0].to_kv.weight[:2], tensors["m.blocks.0.to_k.weight"])


def test_sources_that_miss_rows_of_the_merged_parameter_are_refused(written, tensors):
    """Rows that nothing fills would be whatever the memory held before."""
    with pytest.raises(FileError, match=r"to_v\.weight has shape \(2, 4\), and the model needs \(3, 4\)"):
        load(written(tensors), on_meta(rows=(2, 3)))


def test_declared_rows_win_and_are_checked(written, tensors):
    class Declared(Attention):
        def checkpoint_rows(self):
            return {"to_kv.weight": (1, 3)}

    with torch.device("meta"):
        model = Model()
        model.blocks[0] = Declared()
    assert expected(model)["blocks.0.to_v.weight"].rows == 3
    with pytest.raises(FileError, match=r"to_k\.weight has shape \(2, 4\), and the model needs \(1, 4\)"):
        load(written(tensors), model)


def test_expected_names_are_those_of_the_file(tensors):
    table = expected(on_meta())
    assert {"m." + name for name in table} == set(tensors)
    assert (table["blocks.1.to_v.weight"].name, table["blocks.1.to_v.weight"].start, table["blocks.1.to_v.weight"].rows) == ("blocks.1.to_kv.weight", 2, 2)


@pytest.mark.parametrize("name", ["m.table", "m.blocks.1.to_k.weight", "m.blocks.0.scale"])
def test_n7_a_missing_tensor_is_named(written, tensors, name):
    del tensors[name]
    with pytest.raises(FileError, match=name.replace(".", r"\.")):
        load(written(tensors), on_meta())


def test_many_missing_tensors_are_counted(written, tensors):
    few = {name: t for name, t in tensors.items() if ".1." not in name}
    with pytest.raises(FileError, match="and 3 more"):
        load(written(few), on_meta())


@pytest.mark.parametrize("name", ["m.extra", "m.blocks.2.to_q.weight", "m.table.weight_scale"])
def test_n7_an_unknown_tensor_is_named_unless_it_is_known_to_be_unused(written, tensors, name):
    tensors[name] = torch.zeros(1)
    with pytest.raises(FileError, match=name.replace(".", r"\.")):
        load(written(tensors), on_meta())
    assert load(written(tensors), on_meta(), unused=(name.removeprefix("m."),)).table.shape == (2, 4)


def test_what_is_outside_the_prefix_is_not_looked_at(written, tensors):
    tensors["other.extra"] = torch.zeros(1)
    load(written(tensors), on_meta())


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [("m.table", (4, 2), r"\(4, 2\).*\(2, 4\)"), ("m.blocks.0.to_q.bias", (4,), r"\(4,\).*\(3,\)"), ("m.blocks.0.to_v.weight", (2, 5), r"\(2, 5\).*\(2, 4\)")],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(written, tensors, name, shape, wanted):
    tensors[name] = torch.zeros(shape)
    with pytest.raises(FileError, match=name.replace(".", r"\.") + ".*" + wanted):
        load(written(tensors), on_meta())


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), ()])
def test_merged_sources_that_do_not_add_up_are_refused(written, tensors, shape):
    tensors["m.blocks.0.to_v.weight"] = torch.zeros(shape)
    with pytest.raises(FileError, match=r"to_v\.weight has shape .* needs \(2, 4\)"):
        load(written(tensors), on_meta())


@pytest.mark.parametrize("name", ["m.table", "m.blocks.0.to_q.bias", "m.blocks.1.to_v.weight", "m.blocks.1.scale"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool])
def test_integers_where_the_model_has_floats_are_refused_by_name_and_dtype(written, tensors, name, dtype):
    """Cast, they would render a finite clip of noise."""
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(FileError, match=name.replace(".", r"\.") + f" is stored as {str(dtype).removeprefix('torch.')}, and the model needs a floating-point tensor"):
        load(written(tensors), on_meta())


def test_check_reads_no_weights(written, tensors):
    model = on_meta()
    places = check(model, written(tensors), "m.")
    assert set(places) == set(tensors) and all(p.is_meta for p in model.parameters())


class Stop(BaseException):
    pass


def test_cancel_leaves_nothing_on_the_module(written, tensors):
    model, calls = on_meta(), []

    def cancel(n):
        calls.append(n)
        if len(calls) == 5:
            raise Stop

    with pytest.raises(Stop):
        load(written(tensors), model, read=cancel)
    assert all(t.is_meta for t in model.state_dict().values())
    assert torch.equal(load(written(tensors), model).table, tensors["m.table"])  # and it can be filled afterwards


def test_a_buffer_that_nothing_fills_is_a_mistake_of_the_module(written, tensors):
    model = on_meta()
    with torch.device("meta"):
        model.register_buffer("rope", torch.zeros(3), persistent=False)
    with pytest.raises(RuntimeError, match="rope are still on meta"):
        load(written(tensors), model)
