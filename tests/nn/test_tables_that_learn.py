"""Embeddings and heads that learn, against plain PyTorch with a straight-through estimator."""

from collections.abc import Callable

import pytest
import torch
from tiny import tiny_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from qat.kernels.head import named_words
from qat.losses.formulas import Targets, loss_from_logits
from qat.losses.from_hidden import loss_from_hidden
from qat.models.language_model import LanguageModel
from qat.models.stored_state import packed_state_dict
from qat.nn import lut_embedding
from qat.nn.latent import to_latent
from qat.nn.lut_embedding import FrozenLutEmbedding, QuantTable, quant_tables
from qat.nn.step import form_weights, release_weights
from qat.nn.swap import put_table, table_names, table_spec
from qat.quant.fit import fit_weight
from qat.quant.spec import LutSpec, VectorSpec
from qat.quant.weight import expand_scales, round_scales
from qat.ranks import ALONE

FORMATS = {
    "levels2": table_spec(2, 32),
    "levels4": table_spec(4, 32),
    "vectors": VectorSpec(bits=6, vector_size=4, group_size=32, scale_bits=8),
}
B, S, K = 3, 5, 4
TERMS = {"tail": 1.0, "hard_ce": 0.5}


def student(spec: LutSpec, is_tied: bool, **hosted: object) -> LanguageModel:
    """Return a float model whose tables are quantized and learn."""
    torch.manual_seed(0)
    model = tiny_model(tie_word_embeddings=is_tied)
    for name in table_names(model):
        weight = model.get_submodule(name).weight.detach()
        put_table(model, name, fit_weight(weight, spec), spec)
    names = [*quant_tables(model)]
    assert len(names) == 2 - is_tied
    to_latent(model, names, **hosted)
    model.requires_grad_(False)
    for table in quant_tables(model).values():
        for parameter in table.weight_parameters().values():
            parameter.requires_grad_()
    return LanguageModel(model)


def batch(V: int) -> tuple[Tensor, Tensor, Targets]:
    """Return ids, positions and what a teacher says; one token does not count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(V // 2, (B, S), generator=generator)  # the others are no inputs
    positions = torch.arange(S).expand(B, S)
    topk = torch.stack([torch.randperm(V - 9, generator=generator)[:K] for _ in range(B * S)])
    p = torch.rand(B * S, K + 1, generator=generator).softmax(1).log()
    mask = torch.ones(B * S, dtype=torch.bool)
    mask[4] = False
    targets = Targets(
        mask=mask,
        labels=topk[:, 0],
        topk_ids=topk,
        topk_logprobs=p[:, :K],
        tail_logprob=p[:, K],
        sample_ids=topk[:, :0],
        sample_counts=p[:, :0],
    )
    return ids, positions, targets


def straight_through(table: QuantTable) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a table by the textbook: nearest codes, with the gradient of the table to latents."""
    leaves = {n: p.detach().clone().requires_grad_() for n, p in table.weight_parameters().items()}
    indices = table.indices().long()
    scales = round_scales(table.scales_as_stored().replaced({"scales": leaves["scales"]}))
    # rounding of scales passes gradients on, as that of levels does
    rounded = leaves["scales"] + (table.scales_as_stored().by_group() - leaves["scales"]).detach()
    S = expand_scales(scales.replaced({"scales": rounded}), table.in_features)
    levels = leaves["codebook"] + (table.levels() - leaves["codebook"]).detach()
    weight = levels[indices].view(S.shape) * S
    return weight + leaves["weight"] - leaves["weight"].detach(), leaves


def textbook(model: LanguageModel, run: Callable[[], Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the gradients of `run` with float tables in place of those that learn."""
    hf = model.model
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    tables = {name: straight_through(table) for name, table in quant_tables(hf).items()}
    by_table = {id(quant_tables(hf)[name]): weight for name, (weight, _) in tables.items()}
    of_input, of_output = by_table[id(embedding)], by_table[id(head.table)]
    hf.set_input_embeddings(Rows(of_input))
    hf.set_output_embeddings(Product(of_output))
    run(of_output).backward()
    hf.set_input_embeddings(embedding)
    hf.set_output_embeddings(head)
    return {name: {n: p.grad for n, p in leaves.items()} for name, (_, leaves) in tables.items()}


class Rows(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Product(Rows):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


@pytest.mark.parametrize("way", ["by rows", "formed", "alone"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
def test_gradients_equal_a_straight_through_estimator(
    kind: str, is_tied: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_formed, takes_rows = way != "alone", way == "by rows"
    monkeypatch.setattr(QuantTable, "takes_rows", takes_rows)
    model = student(FORMATS[kind], is_tied)
    V = model.config.vocab_size
    ids, positions, targets = batch(V)
    named = named_words(targets.topk_ids[targets.mask], V) > 0

    def by_logits(weight: Tensor) -> Tensor:
        hidden = model.hidden(ids, positions).flatten(0, 1)
        if is_formed:  # a step gives nothing to words that no token names
            weight = torch.where(named[:, None], weight, weight.detach())
        return loss_from_logits(F.linear(hidden, weight), targets, TERMS)["loss"]

    expected = textbook(model, by_logits)
    if is_formed:
        form_weights(model.model, torch.float32)
        model.head.name_(targets.topk_ids[targets.mask], ALONE)
    for _ in range(2):  # micro-batches add up
        hidden = model.hidden(ids, positions).flatten(0, 1)
        head = model.head_in(torch.float32)
        assert (head.take_gradient is not None) == takes_rows
        loss_from_hidden(hidden, head, targets, TERMS)["loss"].backward()
    for name, table in quant_tables(model.model).items():
        for local, parameter in table.weight_parameters().items():
            wanted = 2 * expected[name][local]
            noise = 1e-6 * wanted.abs().max().item()  # of float32 sums
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=noise)
    untouched = ~named
    untouched[ids.flatten()] = False
    assert untouched.any()
    if is_formed:
        for table in quant_tables(model.model).values():
            assert not table.weight.grad[untouched].any()
    release_weights(model.model)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("is_hosted", [False, True])
def test_latents_change_nothing_and_are_stored_as_they_are_used(kind: str, is_hosted: bool) -> None:
    torch.manual_seed(0)
    model = tiny_model(tie_word_embeddings=True)
    (name,) = table_names(model)
    spec = FORMATS[kind]
    weight = model.get_submodule(name).weight.detach()
    put_table(model, name, fit_weight(weight, spec), spec)
    before, logits = packed_state_dict(model), logits_of(model)
    frozen = model.get_submodule(name)
    assert isinstance(frozen, FrozenLutEmbedding)
    to_latent(model, [name], is_hosted=is_hosted)
    table = model.get_submodule(name)
    assert table is not frozen and model.get_output_embeddings().table is table
    assert torch.equal(logits_of(model), logits)
    after = packed_state_dict(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    if not is_hosted:
        with torch.no_grad():
            table.weight += 0.1 * torch.randn_like(table.weight)
        form_weights(model.requires_grad_(True), torch.float32)
        stored = packed_state_dict(model)
        put_table(model, name, table.quantized(), spec)
        assert all(torch.equal(packed_state_dict(model)[key], stored[key]) for key in before)
        assert torch.equal(model.get_input_embeddings().quantized_weight(), table.formed)


def logits_of(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_pieces_and_wholes_pull_back_alike(kind: str, is_first: bool, monkeypatch) -> None:
    rows, taken, whole = (
        student(FORMATS[kind], True).model.get_input_embeddings() for _ in range(3)
    )
    V, D = whole.out_features, whole.in_features
    monkeypatch.setattr(lut_embedding, "PIECE", 7 * D)  # several pieces, the last one smaller
    tables = (rows, taken, whole)
    for table in tables[: 0 if is_first else 3]:  # a gradient of the micro-batch before
        table.pull_back_(torch.ones(V, D))
    ids, d_rows = torch.tensor([7, 3, 7, 0, V - 1]), torch.randn(5, D)
    rows.pull_back_rows_(ids, d_rows)
    dW = torch.zeros(V, D).index_add_(0, ids, d_rows)
    whole.pull_back_(dW.clone())
    taken.take_gradient_(dW)
    assert (taken.weight.grad is dW) == is_first  # no second tensor of that size
    for name, parameter in whole.weight_parameters().items():
        for other in (rows, taken):
            torch.testing.assert_close(other.get_parameter(name).grad, parameter.grad)


def test_the_row_of_the_padding_never_learns() -> None:
    spec = FORMATS["levels4"]
    model = tiny_model(tie_word_embeddings=True, pad_token_id=3)
    (name,) = table_names(model)
    weight = model.get_submodule(name).weight.detach()
    assert not weight[3].any()  # torch begins it with zeros
    put_table(model, name, fit_weight(weight, spec), spec)
    to_latent(model, [name])
    table = model.get_submodule(name).requires_grad_()
    dW = torch.ones(table.out_features, table.in_features)
    table.pull_back_rows_(torch.tensor([3, 7]), dW[:2])
    table.take_gradient_(dW.clone())
    table.pull_back_(dW.clone())
    still = ~table.weight.grad.any(1)
    assert still.nonzero().flatten().tolist() == [3]
    assert not table.scales.grad[3].any() and table.scales.grad[7].any()
