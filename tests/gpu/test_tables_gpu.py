"""Packed tables on CUDA: the same rows as on the CPU, no waiting, and whole steps with them."""

import time

import pytest
import torch
from gpu_case import recorded
from quantized import SPECS, random_weight, tiny_quantized

from qat.kernels.head import Head, named_words
from qat.losses.formulas import Targets
from qat.losses.from_hidden import loss_from_hidden
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.nn.lut_embedding import FrozenLutEmbedding, LutEmbedding, quant_tables
from qat.nn.swap import put_table, table_names, table_spec, weight_shape
from qat.quant.fit import fit_weight
from qat.quant.spec import LutSpec, VectorSpec
from qat.quant.weight import dequantize

pytestmark = pytest.mark.gpu

TABLES = {
    "lut2": LutSpec(bits=2),
    "lut3": LutSpec(bits=3),
    "lut4": LutSpec(bits=4),
    "lut8": LutSpec(bits=8),
    "lut4_s8": LutSpec(bits=4, group_size=16, scale_bits=8),
    "lut4 odd": LutSpec(bits=4, group_size=3),
    "lut8 odd": LutSpec(bits=8, group_size=3),
    "low rank": LutSpec(bits=4, scale="low_rank", rank=3),
}
V = 1013


def embedding(spec: LutSpec, dtype: torch.dtype) -> FrozenLutEmbedding:
    return FrozenLutEmbedding(random_weight(V, 11 * spec.group_size, spec), spec, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", TABLES.values(), ids=TABLES)
def test_rows_are_those_of_the_cpu(spec: LutSpec, dtype: torch.dtype) -> None:
    table, ids = embedding(spec, dtype), torch.randint(V, (7, 19))
    wished, whole = table(ids), table.quantized_weight(dtype)
    table.cuda()
    assert torch.equal(table(ids.cuda()).cpu(), wished)
    assert torch.equal(table.weight_in(dtype).cpu(), whole)
    assert torch.equal(table(ids.cuda()).cpu(), wished)


@pytest.mark.parametrize("spec", TABLES.values(), ids=TABLES)
def test_a_lookup_can_be_recorded(spec: LutSpec) -> None:
    table, ids = embedding(spec, torch.bfloat16).cuda(), torch.randint(V, (64, 64)).cuda()
    graph, rows = recorded(lambda: table(ids))
    ids.copy_(torch.randint(V, (64, 64)))
    graph.replay()
    assert torch.equal(rows, table(ids))


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_loads_onto_the_device(tied: bool, tmp_path) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"], tie_word_embeddings=tied)
    for name in table_names(model):
        spec = table_spec(8, 32)
        put_table(model, name, random_weight(*weight_shape(model.get_submodule(name)), spec), spec)
    save_checkpoint(model, None, tmp_path / "packed")
    there = load_checkpoint(tmp_path / "packed", torch.float32, {"": torch.device("cuda")})
    ids = torch.arange(40, device="cuda").view(2, 20)
    assert all(table.device.type == "cuda" for table in quant_tables(there).values())
    wished = model.cuda()(ids).logits
    assert torch.equal(there(ids).logits, wished)


FORMATS = {
    "levels2": table_spec(2, 64),
    "levels4": table_spec(4, 64),
    "vectors": VectorSpec(bits=6, vector_size=4, group_size=64, scale_bits=8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_gradients_are_those_of_the_cpu(spec: LutSpec, dtype: torch.dtype) -> None:
    """A tied table in a step: rows of a batch, and a head of several tiles of words."""
    torch.manual_seed(0)
    words, K, T = 9001, 8, 700
    quantized = random_weight(words, 64, spec)
    table = LutEmbedding(dequantize(quantized), quantized, spec, torch.float32).requires_grad_()
    topk = torch.stack([torch.randperm(words)[:K] for _ in range(T)])
    log_p = torch.rand(T, K + 1).log_softmax(1)
    none = topk[:, :0]
    targets = Targets(
        torch.rand(T) > 0.1, topk[:, 0], topk, log_p[:, :K], log_p[:, K], none, none.float()
    )
    named = named_words(topk[targets.mask], words) > 0
    ids, mixed = torch.randint(words, (1, T)), torch.randn(64, 64) / 8
    found = []
    for place, kind in (("cpu", torch.float32), ("cuda", dtype)):
        table.to(place).zero_grad()
        table.form_(kind)
        for _ in range(2):
            hidden = table(ids.to(place))[0].to(kind) @ mixed.to(place, kind)
            weight, take = table.weight_in(kind), table.take_gradient_
            head = Head(weight, take_gradient=take, named=named.to(place))
            there = Targets(*(each.to(place) for each in targets))
            loss_from_hidden(30 * hidden, head, there, {"tail": 1.0})["loss"].backward()
        found.append({n: p.grad.cpu().clone() for n, p in table.weight_parameters().items()})
        table.release_()
    for name, exact in found[0].items():
        error = (found[1][name] - exact).norm() / exact.norm()
        assert error < (1e-4 if dtype == torch.float32 else 0.02), name


@pytest.mark.parametrize("bits", [4, 8])
def test_a_large_table_is_fitted_in_a_minute(bits: int) -> None:
    weight = torch.randn(151_936, 1024, device="cuda") * 0.02
    fit_weight(weight[:2000], table_spec(bits, 1024))
    torch.cuda.synchronize()
    began = time.perf_counter()
    quantized = fit_weight(weight, table_spec(bits, 1024))
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 60
    table = FrozenLutEmbedding(quantized, table_spec(bits, 1024), torch.bfloat16)
    error = (weight - table.quantized_weight()).norm() / weight.norm()
    assert error < (0.01 if bits == 8 else 0.12)
