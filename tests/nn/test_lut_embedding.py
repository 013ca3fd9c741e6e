"""Packed tables: gathered rows are those of the whole table, and heads multiply by it."""

import copy

import pytest
import torch
from covering import covering
from quantized import KINDS, SPECS, random_weight
from torch import nn
from torch.nn import functional as F

from qat.nn.lut_embedding import (
    FrozenLutEmbedding,
    FrozenLutHead,
    Lookup,
    TiedLutHead,
    quant_tables,
)
from qat.quant.spec import LutSpec
from qat.quant.weight import dequantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TABLES = {
    **{name: SPECS[name] for name in (*KINDS, "lut4")},
    "lut5": LutSpec(bits=5, group_size=8),
    "lut8": LutSpec(bits=8, group_size=8),
    "lut4 odd": LutSpec(bits=4, group_size=3),
    "lut8 odd": LutSpec(bits=8, group_size=3),
}
V = 37


def width(spec: LutSpec) -> int:
    return 11 * spec.group_size  # odd where the group is


def embedding(spec: LutSpec, dtype: torch.dtype = torch.float32) -> FrozenLutEmbedding:
    return FrozenLutEmbedding(random_weight(V, width(spec), spec), spec, dtype)


@pytest.mark.parametrize(("name", "dtype"), covering(TABLES, DTYPES))
def test_gathered_rows_are_those_of_the_table(name: str, dtype: torch.dtype) -> None:
    table = embedding(TABLES[name], dtype)
    whole = dequantize(table.quantized()).to(dtype)
    ids = torch.tensor([[0, V - 1, 5], [5, 5, 17]])
    for _ in range(2):  # from packed rows, then from the table that a tied head has formed
        assert torch.equal(table(ids), F.embedding(ids, whole))
        assert torch.equal(table.weight_in(dtype), whole)


def test_a_table_of_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, spec in TABLES.items():
        table = embedding(spec)
        whole = table.quantized_weight()
        with monkeypatch.context() as patch:
            patch.setattr("qat.nn.lut_embedding.PIECE", 5 * table.in_features + 1)
            assert torch.equal(table.quantized_weight(), whole), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_heads_are_linears(has_bias: bool, dtype: torch.dtype) -> None:
    spec = TABLES["lut8"]
    quantized, bias = random_weight(V, 88, spec), torch.randn(V) if has_bias else None
    table = FrozenLutEmbedding(quantized, spec, torch.float32)
    hidden = torch.randn(2, 3, 88, dtype=dtype, requires_grad=True)
    weight = dequantize(quantized).to(dtype)
    wished = F.linear(hidden, weight, None if bias is None else bias.to(dtype))
    (slope,) = torch.autograd.grad(wished.sum(), hidden)
    for head in (FrozenLutHead(quantized, spec, torch.float32, bias), TiedLutHead(table, bias)):
        found = head(hidden)
        assert torch.equal(found, wished)
        assert torch.equal(torch.autograd.grad(found.sum(), hidden)[0], slope)
        assert (head.out_features, head.in_features) == (V, 88)
        assert torch.equal(head.table.weight_in(dtype), weight)


def test_a_head_under_autocast_forms_its_table_in_that_dtype() -> None:
    head = FrozenLutHead(random_weight(V, 88, TABLES["lut8"]), TABLES["lut8"], torch.float32, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert head(torch.randn(2, 88)).dtype == torch.bfloat16
    assert head.formed.dtype == torch.bfloat16


def test_the_table_is_formed_once_and_gives_rows_of_its_own_dtype() -> None:
    table, ids = embedding(TABLES["lut4"]), torch.arange(V)
    before = table(ids)
    first = table.weight_in(torch.bfloat16)
    assert table.weight_in(torch.bfloat16) is first
    assert torch.equal(table(ids), before)
    assert table.weight_in(torch.float32).dtype == torch.float32


def test_casting_the_model_casts_what_the_table_gives_and_not_the_table() -> None:
    model = nn.Sequential(embedding(TABLES["lut8"]))
    whole = model[0].quantized_weight()
    model.to(torch.bfloat16)
    assert model[0](torch.arange(V)).dtype == model[0].dtype == torch.bfloat16
    assert model[0].scales.dtype == model[0].codebook.dtype == torch.float32
    assert torch.equal(model.float()[0](torch.arange(V)), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_of_an_embedding_is_rounded_as_its_rows(dtype: torch.dtype) -> None:
    spec = TABLES["lut8"]
    table = FrozenLutEmbedding(random_weight(V, 88, spec), spec, dtype, Lookup(9.38))
    wished = table.quantized_weight(dtype) * torch.tensor(9.38).to(dtype)
    assert torch.equal(table(torch.arange(V)), wished)


def test_a_table_learns_when_asked_to_and_a_tied_head_owns_nothing() -> None:
    model = nn.ModuleDict({"in": embedding(TABLES["lut8"])})
    model["out"] = TiedLutHead(model["in"], None)
    assert {name for name, _ in model.named_parameters()} == {"in.codebook", "in.scales"}
    assert not [p for p in model.parameters() if p.requires_grad]
    assert {*quant_tables(model)} == {"in"}
    assert {*model.state_dict()} == {"in.packed", "in.codebook", "in.scales"}
    twin = copy.deepcopy(model)
    assert twin["out"].table is twin["in"]
    assert "bits=8" in str(model) and str(V) in str(model)
