"""The baselines compute what they say: the same model, the same loss, the reference's formula."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from qat.backend import device as backend
from qat.data.packing import Batch
from qat.errors import ConfigError
from qat.extensions.bench.batches import open_source
from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.student import Ours, open_student
from qat.extensions.lab.baselines.reference import GatheredCandidates, reference_step
from qat.extensions.lab.baselines.run import run_baselines
from qat.extensions.lab.baselines.training import CHUNK_TOKENS, ChunkedLoss, plain_step
from qat.extensions.lab.config import BaselinesConfig
from qat.losses.formulas import to_targets
from qat.models.language_model import LanguageModel
from qat.train.learnable import weights_in_scope

CPU = backend.select("cpu")


def case(**values: object) -> tuple[BenchConfig, LanguageModel, Batch]:
    config = BenchConfig(device="cpu", dtype="fp32", seq_len=16, top_k=8, **values)
    student = open_student("tiny", config)
    return config, student, open_source(config, student).batch(3, 0, CPU)


@pytest.mark.parametrize("loss", ["candidates", "sampled", "hard_ce:0.5,tail:2"])
def test_plain_training_sees_our_loss(loss: str) -> None:
    config, student, batch = case(loss=loss, temperature=1.5)
    names = weights_in_scope(student.model, "e2e")
    theirs = plain_step(student, names, config, is_compiled=False)([batch], 0)
    ours = Ours(student, config).subject()([batch], 0)
    torch.testing.assert_close(theirs.sums["loss"], ours.sums["loss"], rtol=1e-4, atol=1e-3)
    assert int(theirs.valid_tokens) == int(ours.valid_tokens) == 48


def test_plain_training_trains_the_layers_in_scope_and_stands_still() -> None:
    config, student, batch = case(gradient_checkpointing=True)
    names = weights_in_scope(student.model, "mlp")
    step = plain_step(student, names, config, is_compiled=False)
    model = step._model
    before = {name: p.clone() for name, p in model.named_parameters()}
    first, second = (step([batch, batch], number) for number in range(2))
    assert first.grad_norm > 0 and torch.equal(first.sums["loss"], second.sums["loss"])
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == {f"{name}.weight" for name in names}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_chunks_add_up_to_the_whole() -> None:
    T, V, D = CHUNK_TOKENS + 100, 40, 8
    hidden = torch.randn(T, D, requires_grad=True)
    head = torch.randn(V, D)
    _, _, batch = case()
    targets = to_targets(batch)
    rows = torch.arange(T) % len(targets.mask)
    targets = type(targets)(*(t[rows] for t in targets))
    targets = targets._replace(labels=torch.randint(V, (T,)))
    loss = ChunkedLoss(head, 20.0, {"hard_ce": 1.0}, 1.0)(hidden, targets)
    capped = 20 * torch.tanh(hidden @ head.T / 20)
    expected = F.cross_entropy(capped, targets.labels, reduction="sum")
    torch.testing.assert_close(loss, expected)


def test_the_references_ranks_are_its_published_ones() -> None:
    config, student, batch = case()
    names = weights_in_scope(student.model, "e2e")
    step = reference_step(student, names, config)
    modules = dict(step._model.named_modules())
    assert {len(modules[n].B) for n in names if ".mlp." in n} == {32}
    assert {len(modules[n].B) for n in names if ".self_attn." in n} == {8}
    result = step([batch], 0)
    assert result.sums["loss"].isfinite() and result.grad_norm > 0


def test_gathered_candidates_are_our_candidates_loss() -> None:
    _, student, batch = case()
    head = student.head.weight.detach()
    hidden, targets = torch.randn(48, 64), to_targets(batch)
    logits = hidden @ head.T
    chosen = torch.log_softmax(logits.gather(1, targets.topk_ids) / 2, 1)
    teacher = torch.softmax(targets.topk_logprobs / 2, 1)
    expected = 4 * F.kl_div(chosen, teacher, reduction="sum")
    torch.testing.assert_close(GatheredCandidates(head)(hidden, targets), expected)


@pytest.mark.slow
def test_cases_take_turns_and_land_in_one_table(tmp_path: Path) -> None:
    sizes = {"seq_len": 8, "top_k": 4, "batch_size": 2, "steps": 2, "warmup": 1, "rounds": 2}
    config = BaselinesConfig(device="cpu", only="ours,plain-eager,reference", **sizes)
    _, rows = run_baselines(config, "tiny", tmp_path / "out")
    assert [row["case"] for row in rows] == ["ours", "plain-eager", "reference"]
    ours, plain, reference = rows
    assert ours["ours_over_this"] == 1.0 and ours["timed_steps"] == 4
    assert plain["loss_nats"] == pytest.approx(ours["loss_nats"], rel=1e-4)
    assert reference["loss"] == "candidates" and reference["gradient_checkpointing"]
    assert reference["ours_over_this"] > 0


def test_a_case_that_is_not_installed_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("qat.extensions.lab.baselines.run.is_installed", lambda: False)
    config = BaselinesConfig(device="cpu", steps=1, warmup=1, seq_len=8, only="torchao-int2")
    _, (row,) = run_baselines(config, "tiny", tmp_path / "out")
    assert row["status"] == "torchao is not installed" and "ours_over_this" not in row


def test_a_loss_that_no_textbook_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loss=jsd, but the baselines know tail, candidates, sa"):
        run_baselines(BaselinesConfig(loss="jsd", device="cpu"), "tiny", tmp_path)
