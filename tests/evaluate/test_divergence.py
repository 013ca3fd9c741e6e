"""Judging a student: against the textbook over full logits, with parts of a cache missing."""

import math

import pytest
import torch
from teacher_targets import targets_of
from tiny import VOCAB, tiny_model
from torch import Tensor
from torch.nn import functional as F

from qat.data.packing import NO_LABEL, Batch
from qat.errors import ConfigError, DataError
from qat.evaluate import divergence
from qat.evaluate.divergence import cached_divergence, cached_teacher, exact_divergence
from qat.models.language_model import LanguageModel

B, S = 3, 10


@pytest.fixture
def student() -> LanguageModel:
    return LanguageModel(tiny_model(seed=1, initializer_range=0.3))


@pytest.fixture
def teacher() -> LanguageModel:
    return LanguageModel(tiny_model(seed=2, initializer_range=0.3))


def logits_of(model: LanguageModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        outputs = model.model(input_ids=batch.input_ids, position_ids=batch.position_ids)
    return outputs.logits.double().flatten(0, 1)


def batch_from(teacher: LanguageModel, top_k: int, draws: int = 0, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(VOCAB, (B, S), generator=generator)
    position_ids = torch.arange(S).expand(B, S)
    empty = Batch(input_ids, position_ids, *(torch.empty(0),) * 7)
    targets = targets_of(logits_of(teacher, empty), top_k, draws, seed)
    labels = torch.cat([input_ids[:, 1:], torch.full((B, 1), NO_LABEL)], dim=1)
    fields = {name: value.unflatten(0, (B, S)) for name, value in targets._asdict().items()}
    return Batch(input_ids, position_ids, **{**fields, "labels": labels})


@pytest.mark.parametrize("top_k", [VOCAB, 30])
def test_the_teacher_by_its_cache_is_at_least_so_perplexed(teacher, top_k) -> None:
    batches = [batch_from(teacher, top_k=top_k, seed=seed) for seed in range(2)]
    actual = cached_teacher(batches)
    exact = exact_divergence(teacher, teacher, batches)
    rows = [logits_of(teacher, batch)[batch.mask.flatten()] for batch in batches]
    log_p = torch.cat(rows).log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1).mean().item()
    if top_k == VOCAB:
        assert actual.teacher_ppl_floor == pytest.approx(exact.teacher_ppl, rel=1e-4)
        assert actual.teacher_entropy_floor_nats == pytest.approx(entropy, rel=1e-4)
        assert actual.labels_outside_frac == 0
    else:
        assert 1 < actual.teacher_ppl_floor < exact.teacher_ppl
        assert 0 < actual.teacher_entropy_floor_nats < entropy
        assert 0 < actual.labels_outside_frac < 1


def test_a_cache_without_a_top_k_or_its_tail_tells_nothing_of_the_teacher(teacher) -> None:
    batch = batch_from(teacher, top_k=4, draws=3)
    assert cached_teacher([batch._replace(tail_logprob=batch.tail_logprob * torch.nan)]) is None
    assert cached_teacher([batch_from(teacher, top_k=0, draws=3)]) is None


@pytest.mark.parametrize("chunk_tokens", [4, 1024])
def test_cached_divergence_equals_the_textbook(student, teacher, chunk_tokens, monkeypatch) -> None:
    monkeypatch.setattr(divergence, "CHUNK_TOKENS", chunk_tokens)
    batches = [batch_from(teacher, top_k=VOCAB, draws=30, seed=seed) for seed in range(2)]
    actual = cached_divergence(student, batches)
    q, p, labels, reference = [], [], [], []
    for batch in batches:
        valid = batch.mask.flatten()
        log_q, log_p = (logits_of(m, batch)[valid].log_softmax(1) for m in (student, teacher))
        q.append(log_q), p.append(log_p), labels.append(batch.labels.flatten()[valid])
        reference.append(4 * F.kl_div((log_q / 2).log_softmax(1), (log_p / 2).softmax(1), **NONE))
    q, p, labels = torch.cat(q), torch.cat(p), torch.cat(labels)
    assert actual.num_tokens == len(q)
    assert actual.kl_tail_nats == pytest.approx(F.kl_div(q, p.exp(), **NONE).sum(1).mean().item())
    assert actual.kd_nats == pytest.approx(torch.cat(reference).sum(1).mean().item(), rel=1e-4)
    assert actual.top1_frac == pytest.approx((q.argmax(1) == p.argmax(1)).float().mean().item())
    expected_ppl = F.cross_entropy(q, labels, ignore_index=NO_LABEL).exp().item()
    assert actual.ppl == pytest.approx(expected_ppl, rel=1e-4)
    assert actual.sampled_ce_nats == pytest.approx(-(p.exp() * q).sum(1).mean().item(), rel=0.2)


NONE = {"reduction": "none"}


def test_what_the_cache_lacks_is_none(student: LanguageModel, teacher: LanguageModel) -> None:
    drawn = cached_divergence(student, [batch_from(teacher, top_k=0, draws=9)])
    assert (drawn.kd_nats, drawn.kl_tail_nats, drawn.top1_frac) == (None, None, None)
    assert drawn.sampled_ce_nats > 0 and drawn.ppl > 1
    batch = batch_from(teacher, top_k=4)
    unlabelled = batch._replace(labels=torch.full_like(batch.labels, NO_LABEL))
    kept = cached_divergence(student, [unlabelled])
    assert (kept.sampled_ce_nats, kept.ppl) == (None, None)
    assert kept.kd_nats > 0


def test_exact_divergence_equals_the_textbook(student, teacher, monkeypatch) -> None:
    monkeypatch.setattr(divergence, "CHUNK_TOKENS", 7)
    batch = batch_from(teacher, top_k=4)
    actual = exact_divergence(student, teacher, [batch])
    valid = batch.mask.flatten()
    q, p = (logits_of(m, batch)[valid].log_softmax(1) for m in (student, teacher))
    kl = F.kl_div(q, p, log_target=True, reduction="batchmean").item()
    assert actual.kl_nats == pytest.approx(kl, rel=1e-4)
    labels = batch.labels.flatten()[valid]
    for ppl, log_probs in [(actual.ppl, q), (actual.teacher_ppl, p)]:
        expected = F.nll_loss(log_probs, labels, ignore_index=NO_LABEL).exp().item()
        assert ppl == pytest.approx(expected, rel=1e-4)
    bound = cached_divergence(student, [batch]).kl_tail_nats
    assert 0 < bound < actual.kl_nats, "the cached number is a lower bound on the exact one"


def test_padding_changes_nothing(student: LanguageModel, teacher: LanguageModel) -> None:
    batch = batch_from(teacher, top_k=4, draws=5)
    hidden = ~batch.mask
    noisy = batch._replace(
        topk_logprobs=batch.topk_logprobs.masked_fill(hidden[..., None], 1e9),
        sample_counts=batch.sample_counts.masked_fill(hidden[..., None], 1e9),
        labels=batch.labels.masked_fill(hidden, 7),
    )
    assert cached_divergence(student, [noisy]) == cached_divergence(student, [batch])


def test_judging_leaves_the_model_as_it_was(student: LanguageModel, teacher: LanguageModel) -> None:
    student.model.train()
    exact_divergence(student, teacher, [batch_from(teacher, top_k=4)])
    assert student.model.training and not teacher.model.training
    assert all(parameter.grad is None for parameter in student.model.parameters())


def test_a_perplexity_beyond_floats_is_infinite(student: LanguageModel) -> None:
    batch = batch_from(student, top_k=4)
    student.head.weight.data.mul_(1e4)
    assert cached_divergence(student, [batch]).ppl == math.inf


def test_refuses_batches_without_a_valid_token(student, teacher) -> None:
    batch = batch_from(teacher, top_k=4)
    batch = batch._replace(mask=torch.zeros_like(batch.mask))
    with pytest.raises(DataError, match="no valid token"):
        cached_divergence(student, [batch])
    with pytest.raises(DataError, match="no valid token"):
        exact_divergence(student, teacher, [])


def test_refuses_vocabularies_of_different_size(student: LanguageModel) -> None:
    other = LanguageModel(tiny_model(vocab_size=VOCAB + 8))
    with pytest.raises(ConfigError, match=f"has {VOCAB} words and the teacher's {VOCAB + 8}"):
        exact_divergence(student, other, [batch_from(student, top_k=4)])
