"""Students and teachers of one tokenizer whose heads are padded to different numbers of words."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cache_case import TOKENIZER
from padded_case import SIZES, Pair, make_pair
from tiny import VOCAB
from train_case import config

from qat.data.reader import TeacherCache
from qat.data.text import tokenizer_hash
from qat.errors import CacheError
from qat.evaluate.config import EvalConfig
from qat.evaluate.judge import judge
from qat.logs import read_json_lines
from qat.losses.formulas import loss_from_logits, to_targets
from qat.models.language_model import LanguageModel
from qat.models.load import load_model
from qat.train.start import train_student


@pytest.fixture(scope="module", params=SIZES.values(), ids=SIZES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("padded"), request.param)


def log_probs(model: LanguageModel, batch: object) -> torch.Tensor:
    """Log-probs over the words of both, in float64, of the valid tokens."""
    with torch.no_grad():
        logits = model.logits(model.hidden(batch.input_ids, batch.position_ids))
    return logits[batch.mask][:, :VOCAB].double().log_softmax(-1)


def test_the_steps_loss_is_that_of_the_common_words(pair: Pair, tmp_path: Path) -> None:
    trainer = pair.trainer(tmp_path, teacher=str(pair.place / "teacher"), loss="kl:1,hard_ce:1")
    batch = trainer.cache.batch(np.arange(4))
    log_q, log_p = log_probs(trainer.student, batch), log_probs(pair.teacher(), batch)
    result = trainer.take_step([batch], 0)
    kl = (log_p.exp() * (log_p - log_q)).sum().item()
    assert result.sums["kl"].item() == pytest.approx(kl, rel=1e-5)
    label_ce = -log_q.gather(1, batch.labels[batch.mask][:, None]).sum().item()
    assert result.sums["hard_ce"].item() == pytest.approx(label_ce, rel=1e-5)


def test_a_cache_holds_the_common_words_alone(pair: Pair, tmp_path: Path) -> None:
    trainer = pair.trainer(tmp_path, loss="tail:1,sampled:1")
    before = TeacherCache.open(pair.place / "cache").batch(np.arange(4))
    batch = trainer.cache.batch(np.arange(4))
    is_wide = (before.topk_ids >= VOCAB).any().item()
    assert is_wide == (pair.teacher().config.vocab_size > VOCAB)
    assert batch.topk_ids.max() < VOCAB and (batch.topk_ids < 0).any() == is_wide
    assert (batch.sample_counts.sum(-1) < before.sample_counts.sum(-1)).any() == is_wide
    log_p = log_probs(pair.teacher(), batch)
    kept = batch.topk_ids[batch.mask]
    exact = log_p.gather(1, kept.clamp_min(0))
    # what the tail holds of the teacher's own words is at most the tail
    share = batch.tail_logprob[batch.mask].exp()[:, None].expand_as(kept)
    error = (batch.topk_logprobs[batch.mask].double() - exact).abs()[kept >= 0]
    assert (error <= -torch.log1p(-share[kept >= 0].double()) + 0.02).all()
    logits = trainer.student.logits(
        trainer.student.hidden(batch.input_ids, batch.position_ids)
    ).flatten(0, 1)
    terms = {"tail": 1.0, "sampled": 1.0}
    expected = loss_from_logits(logits.double(), to_targets(batch), terms)
    assert logits.shape[1] == VOCAB
    result = trainer.take_step([batch], 0)
    assert result.sums["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-5)


@pytest.mark.parametrize("values", [{}, {"loss": "kl", "teacher": True}], ids=["cache", "teacher"])
def test_runs_learn(pair: Pair, tmp_path: Path, values: dict) -> None:
    beside = {"teacher": str(pair.place / "teacher")} if "teacher" in values else {}
    settings = config(pair.place, max_steps=9, eval_every=9, **{**values, **beside})
    train_student(settings, str(pair.place / "student"), tmp_path / "run", resume=False)
    lines = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    judged = [line["kl_tail_nats"] for line in lines if "kl_tail_nats" in line]
    assert judged[-1] < judged[0]


def test_an_evaluation_is_over_the_common_words(pair: Pair, tmp_path: Path) -> None:
    settings = EvalConfig(
        cache_dir=pair.place / "cache",
        teacher=str(pair.place / "teacher"),
        device="cpu",
        dtype="fp32",
        batch_size=64,
    )
    numbers = judge(str(pair.place / "student"), settings).numbers()
    cache = TeacherCache.open(pair.place / "cache")
    batch = cache.batch(np.arange(cache.num_sequences("held_out")), "held_out")
    student = load_model(str(pair.place / "student"), device="cpu", dtype="fp32")
    log_q, log_p = log_probs(student, batch), log_probs(pair.teacher(), batch)
    kl = (log_p.exp() * (log_p - log_q)).sum(1).mean().item()
    assert numbers["kl_nats"] == pytest.approx(kl, rel=1e-5)
    top1 = (log_p.argmax(1) == log_q.argmax(1)).double().mean().item()
    assert numbers["top1_frac"] == pytest.approx(top1)
    label_ce = -log_q.gather(1, batch.labels[batch.mask][:, None]).mean().item()
    assert numbers["ppl"] == pytest.approx(np.exp(label_ce), rel=1e-5)


def test_a_text_of_words_that_the_student_has_not_is_refused(pair: Pair) -> None:
    cache = TeacherCache.open(pair.place / "cache")
    longest = int(cache.batch(np.arange(9)).input_ids.max())
    cache.check_student(tokenizer_hash(TOKENIZER), longest, None)
    with pytest.raises(CacheError, match=f"holds token {longest}, expected .* {longest} words"):
        cache.batch(np.arange(9))
