"""The student's own words: whose they are, what is learned on them, and how runs go on."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_case import TOKENIZER
from crash import stopped_at
from nsa_train_case import SPARSE
from quantized import SPECS, random_weight, tiny_adapted, tiny_quantized, with_rounded_inputs
from ranks_case import run_ranks
from torch.nn import functional as F
from train_case import (
    assert_same_end,
    config,
    make_place,
    make_trainer,
    pretend_recording,
    with_teacher,
)
from transformers import PreTrainedModel

from qat.backend.cpu import CpuBackend
from qat.data.packing import NO_LABEL, Batch, position_ids
from qat.data.reader import TeacherCache
from qat.errors import ConfigError, QatError
from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.like import time_like
from qat.extensions.decode.rollout import OwnRow, RolloutSampler, laid_in, prompt_of
from qat.extensions.decode.slots import Batch as Slotted
from qat.extensions.decode.slots import Request, Slots, Waves, in_order, open_sampler
from qat.extensions.nsa.swap import swap_attention
from qat.generate.sampling import Sampling
from qat.logs import HEARTBEAT, read_json_lines
from qat.losses.formulas import loss_from_logits, to_targets
from qat.models.checkpoint import save_checkpoint
from qat.models.load import load_model, load_teacher
from qat.nn.swap import put_table, table_names, table_spec, weight_shape
from qat.ranks import ALONE, Ranks
from qat.train.config import TrainConfig
from qat.train.loop import Trainer
from qat.train.optim import Optimizer
from qat.train.preflight import MEASURED_STEPS, WARM_STEPS, predict
from qat.train.start import TrainReport, train_student
from qat.train.step import StepResult

ALL = "weights,scales,codebook,norms"
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, its teacher on disk, and a cache that knows it."""
    return with_teacher(make_place(tmp_path_factory.mktemp("own"), layers=1))


def settings(place: Path, **values: object) -> TrainConfig:
    beside = {"cache_dir": place / "known", "teacher": str(place / "teacher"), "on_policy": 0.5}
    return config(place, **{**beside, "learn": ALL, **values})


def run(
    place: Path, out: Path, *, student: str = "student", resume: bool = False, **values: object
) -> TrainReport:
    return train_student(settings(place, **values), str(place / student), out, resume=resume)


def trainer_of(place: Path, out: Path, **values: object) -> Trainer:
    return make_trainer(settings(place, **values), place / "student", out)


def taken(trainer: Trainer, step: int) -> StepResult:
    return trainer.take_step(trainer.step_batches(step), step)


def losses(out: Path) -> list[dict]:
    return [line for line in read_json_lines(out / "metrics.jsonl") if line["kind"] == "train"]


def document(ids: list[int], counts: list[int], starts: tuple[int, ...] = (0,)) -> Batch:
    """One sequence of a cache."""
    begins = torch.zeros(1, len(ids), dtype=torch.bool)
    begins[0, list(starts)] = True
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[counts] = True
    nothing = torch.zeros(len(ids), 0)
    tokens = torch.tensor(ids)
    return Batch(tokens, position_ids(begins)[0], mask, tokens, *[nothing] * 5)


def test_a_prompt_is_a_question_or_the_first_half() -> None:
    ids = list(range(10, 20))
    # predictions 4 and 5 are those of an answer's tokens 5 and 6
    assert prompt_of(document(ids, [4, 5]), 0, 8) == ids[:5]
    assert prompt_of(document(ids, list(range(9))), 0, 8) == ids[:5]
    assert prompt_of(document(ids, list(range(9))), 0, 3) == ids[:3]
    two = document(ids, [0, 1, 2, 7, 8], starts=(0, 4))
    found = [prompt_of(two, number, 8) for number in range(3)]
    assert found == [ids[:2], ids[4:8], ids[:2]]
    padded = document(ids, [0, 1, 2], starts=(0, 4))
    assert [prompt_of(padded, number, 8) for number in (0, 1)] == [ids[:2], ids[:2]]
    assert prompt_of(document(ids, []), 3, 8) == ids[:1]
    assert prompt_of(document(ids, [0]), 0, 8) == ids[:1]


def test_rows_hold_the_words_and_count_their_predictions(place: Path, tmp_path: Path) -> None:
    batch = trainer_of(place, tmp_path).cache.batch(np.arange(3))
    before = Batch(*(tensor.clone() for tensor in batch))
    found = laid_in(batch, [OwnRow([5, 6, 7, 8, 9], 3), OwnRow([4, 0], 1)])
    assert found.input_ids[1:, :6].tolist() == [[5, 6, 7, 8, 9, 0], [4, 0, 0, 0, 0, 0]]
    assert found.mask[1:].nonzero().tolist() == [[0, 2], [0, 3], [1, 0]]
    assert found.labels[1:][found.mask[1:]].tolist() == [8, 9, 0]
    assert (found.labels[1:][~found.mask[1:]] == NO_LABEL).all()
    # padding is a document of its own: some models read a row by how long its document is
    for places, length in zip(found.position_ids[1:], (5, 2), strict=True):
        assert places.tolist() == [*range(length), *range(16 - length)]
    for new, old in zip(found, before, strict=True):
        torch.testing.assert_close(new[0], old[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("share", "own"), [(0.25, 1), (0.5, 2), (1.0, 4)])
def test_the_share_of_tokens_is_as_wished(
    place: Path, tmp_path: Path, share: float, own: int
) -> None:
    values = {"on_policy": share, "grad_accum_steps": 2, "rollout_tokens": 8}
    trainer = trainer_of(place, tmp_path, **values)
    plain = make_trainer(config(place, grad_accum_steps=2), place / "student", tmp_path / "plain")
    for step in range(3):
        batches = trainer.micro_batches(step)
        # sequences of the same documents, whether their words or their prompts are read
        sets = [
            sorted(row.tolist() for batch in each for row in batch.input_ids)
            for each in (batches, plain.micro_batches(step))
        ]
        assert sets[0] == sets[1]
        asked = trainer.rollouts.requests(step)
        rows = trainer.rollouts.into(batches, step)
        positions = sum(batch.mask[-own:].numel() for batch in rows)
        assert positions == share * sum(batch.mask.numel() for batch in rows)
        mine = [ids for batch in rows for ids in batch.input_ids[-own:].tolist()]
        assert len(asked) == len(mine) == 2 * own
        for request, ids in zip(asked, mine, strict=True):
            assert ids[: len(request.ids)] == request.ids
        told = trainer.rollouts.metrics()
        assert told["own_tokens"] == sum(int(batch.mask[-own:].sum()) for batch in rows)
        assert told["own_length"] == told["own_tokens"] / len(mine) <= 8


def test_how_a_step_is_divided_changes_no_row(place: Path, tmp_path: Path) -> None:
    found = []
    for number, (size, accumulate) in enumerate([(4, 2), (2, 4), (8, 1)]):
        values = {"batch_size": size, "grad_accum_steps": accumulate}
        trainer = trainer_of(place, tmp_path / str(number), **values)
        found.append([trainer.rollouts.requests(step) for step in range(3)])
    assert found[0] == found[1] == found[2]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Request], list[list[int]]]]:
    """Record the requests and results of every `RolloutSampler`."""
    real, found = RolloutSampler.sample, []

    def sample(sampler: RolloutSampler, requests: list[Request]) -> list[list[int]]:
        found.append((list(requests), real(sampler, requests)))
        return found[-1][1]

    monkeypatch.setattr(RolloutSampler, "sample", sample)
    return found


def sparse() -> PreTrainedModel:
    model = tiny_quantized("qwen3", SPECS["lut2"], num_hidden_layers=1)
    swap_attention(model, SPARSE)
    return model


def tabled(is_tied: bool) -> PreTrainedModel:
    """Return a student whose tables of 2 bits learn."""
    model = tiny_quantized("qwen3", SPECS["lut2"], tie_word_embeddings=is_tied)
    spec = table_spec(2, 32)
    for name in table_names(model):
        put_table(model, name, random_weight(*weight_shape(model.get_submodule(name)), spec), spec)
    return model


STUDENTS = {
    "latent weights": (None, {}, Slots),
    "frozen codes": (None, {"learn": "scales,codebook"}, Slots),
    "MLPs alone": (None, {"mlp_only": True, "learn": "weights,scales"}, Slots),
    "adapters": (None, {"learn": "lora,scales", "lora_rank": 4}, Slots),
    "adapters of before": (
        lambda: tiny_adapted("qwen3", SPECS["lut2"]),
        {"learn": "lora", "lora_rank": 3},
        Slots,
    ),
    "a tied table": (lambda: tabled(True), {}, Slots),
    "two tables": (lambda: tabled(False), {"learn": "scales,codebook"}, Slots),
    "scales in 8 bits": (lambda: tiny_quantized("llama", SPECS["lut2_s8"]), {}, Slots),
    "codewords": (lambda: tiny_quantized("qwen3", SPECS["fours8_s8"]), {"learn": "scales"}, Slots),
    "static inputs": (
        lambda: with_rounded_inputs(tiny_quantized("qwen3", SPECS["lut2"]), "int8-static"),
        {},
        Slots,
    ),
    "another family": (lambda: tiny_quantized("gemma3", SPECS["lut2"]), {}, Waves),
    "sparse attention": (sparse, {"learn": "weights,gates"}, Waves),
}


QUICK = ("latent weights", "a tied table", "another family")


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=SLOW), 1.0])
@pytest.mark.parametrize(
    ("make", "values", "kind"),
    [
        pytest.param(*case, id=name, marks=() if name in QUICK else SLOW)
        for name, case in STUDENTS.items()
    ],
)
def test_the_words_are_those_of_the_checkpoint(
    place: Path,
    tmp_path: Path,
    heard: list,
    make: Callable[[], PreTrainedModel] | None,
    values: dict,
    kind: type,
    temperature: float,
) -> None:
    student = place / "student"
    if make is not None:
        torch.manual_seed(7)
        student = tmp_path / "student"
        save_checkpoint(make(), TOKENIZER, student)
    rates = {"lr": 0.1, "lr_scales": 0.05, "lr_lora": 0.1, "lr_norms": 0.1, "warmup_steps": 0}
    few = {"max_steps": 3, "save_every": 1, "keep": 9, "eval_every": 3, **rates}
    own = {"rollout_temperature": temperature, "rollout_tokens": 8}
    chosen = settings(place, **{**few, **own, **values})
    train_student(chosen, str(student), tmp_path / "run", resume=False)
    assert len(heard) == 3
    for step, (requests, said) in enumerate(heard):
        source = tmp_path / f"run/checkpoints/step-{step:06d}" if step else student
        model = load_model(str(source), device="cpu", dtype="fp32")
        slotted = Slotted(2, 16, 8, Sampling(temperature), frozenset({0}))
        sampler = open_sampler(model, slotted)
        assert type(sampler) is kind
        assert in_order(sampler.sample(requests)) == said
    if temperature:  # draws of another step are others
        assert heard[0][1] != heard[1][1]


def textbook(trainer: Trainer, place: Path, step: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by whole forwards, a greedy loop and formulas over all logits."""
    n, student = trainer.config.own_rows, trainer.student
    beside = load_teacher(str(place / "teacher"), device="cpu", dtype="fp32")
    total, valid = 0.0, 0
    for batch in trainer.micro_batches(step):
        logits = student.logits(student.hidden(batch.input_ids, batch.position_ids))
        cached = to_targets(Batch(*(tensor[:-n] for tensor in batch)))
        found = loss_from_logits(logits[:-n].flatten(0, 1), cached, {"tail": 1.0})
        total, valid = total + found["loss"], valid + int(cached.mask.sum())
    for request in trainer.rollouts.requests(step):
        ids = list(request.ids)
        for _ in range(request.limit):
            with torch.no_grad():
                last = student.model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(last.argmax()))
            if ids[-1] == 0:
                break
        said = slice(len(request.ids) - 1, len(ids) - 1)
        log_q, log_p = (
            model.model(torch.tensor([ids])).logits[0, said].log_softmax(-1)
            for model in (student, beside)
        )
        total = total + F.kl_div(log_p.detach(), log_q, log_target=True, reduction="sum")
        valid += len(ids) - len(request.ids)
    loss = total / valid
    loss.backward()
    parameters = trainer.optimizer.parameters
    return loss.item(), {n: p.grad.clone() for n, p in parameters.items()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_those_of_the_textbook(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    values = {"rollout_temperature": 0.0, "grad_accum_steps": accumulate}
    expected, gradients = textbook(trainer_of(place, tmp_path / "plain", **values), place, 0)
    trainer, found = trainer_of(place, tmp_path / "ours", **values), {}

    def keep(optimizer: Optimizer, step: int) -> torch.Tensor:
        found.update({n: p.grad.clone() for n, p in optimizer.parameters.items()})
        return torch.zeros(())

    monkeypatch.setattr(Optimizer, "step", keep)
    result = taken(trainer, 0)
    loss = result.sums["loss"].item() / int(result.valid_tokens)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * max(scale, 1e-3))


def test_own_losses_are_told_by_their_own_tokens(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "run", max_steps=2, on_policy_loss="reverse_kl:1,kl:0.5")
    for line in losses(tmp_path / "run"):
        mine, cached = line["own_tokens"], line["valid_tokens"] - line["own_tokens"]
        own = mine * (line["own_reverse_kl_nats"] + 0.5 * line["own_kl_nats"])
        whole = (cached * line["tail_nats"] + own) / line["valid_tokens"]
        assert line["loss_nats"] == pytest.approx(whole, rel=1e-5)
        assert 0 <= line["own_ended_frac"] <= 1 and 0 <= line["own_repeated_frac"] < 1
        assert line["own_lag_steps"] == 0
    beat = read_json_lines(tmp_path / "run" / HEARTBEAT)[-1]
    assert 0 < beat["rollout_s"] < beat["step_s"] and 0 < beat["rollout_frac"] < 1


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, {"tail", "own_reverse_kl", "loss"}),
        ({"loss": "hard_ce"}, {"hard_ce", "own_reverse_kl", "loss"}),
        ({"loss": "kl", "on_policy_loss": "jsd"}, {"kl", "own_jsd", "loss"}),
        ({"on_policy": 1.0}, {"own_reverse_kl", "loss"}),
    ],
)
def test_who_teaches_which_rows(place: Path, tmp_path: Path, values: dict, names: set) -> None:
    trainer = trainer_of(place, tmp_path, **values)
    result = taken(trainer, 0)
    assert result.sums.keys() == names
    assert result.sums["loss"].isfinite() and result.grad_norm > 0
    assert trainer._targets == ({"topk"} if values.get("loss", "tail") == "tail" else set())


def test_a_lag_is_told(place: Path, tmp_path: Path, heard: list) -> None:
    run(place, tmp_path / "run", max_steps=5, rollout_every=3)
    assert [line["own_lag_steps"] for line in losses(tmp_path / "run")] == [0, 1, 2, 0, 1]
    assert [len(requests) for requests, _ in heard] == [6, 6]


def test_a_replayed_step_is_the_step(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"grad_accum_steps": 2, "max_steps": 9}
    courses, rows = [], []
    for name in ("plain", "recorded"):
        trainer = trainer_of(place, tmp_path / name, **values)
        rows = rows or [
            trainer.rollouts.into(trainer.micro_batches(step), step) for step in range(5)
        ]
        replays = pretend_recording(monkeypatch, trainer) if name == "recorded" else []
        results = [trainer.take_step(batches, step) for step, batches in enumerate(rows)]
        courses.append([result.sums["loss"].item() for result in results])
    assert courses[1] == pytest.approx(courses[0], rel=1e-6)
    assert len(replays) == 3 * 2


FROZEN = {"learn": "scales,codebook", "rollout_every": 3}


@pytest.mark.parametrize(
    ("values", "owner", "name", "call"),
    [
        pytest.param({}, RolloutSampler, "sample", 3, marks=SLOW),
        (FROZEN, Optimizer, "step", 4),
        pytest.param({}, Optimizer, "step", 3, marks=SLOW),
        pytest.param(FROZEN, Optimizer, "step", 3, marks=SLOW),
        pytest.param(FROZEN, Optimizer, "step", 5, marks=SLOW),
        pytest.param(FROZEN, RolloutSampler, "sample", 1, marks=SLOW),
        pytest.param({"learn": "lora", "rollout_every": 2}, Optimizer, "step", 3, marks=SLOW),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(
    place: Path, tmp_path: Path, values: dict, owner: type, name: str, call: int
) -> None:
    values = {"save_every": 2, "max_steps": 6, "eval_every": 6, **values}
    whole = run(place, tmp_path / "whole", **values)
    with stopped_at(owner, name, call):
        run(place, tmp_path / "run", **values)
    torch.rand(3)
    again = run(place, tmp_path / "run", resume=True, **values)
    assert_same_end((tmp_path / "whole", whole), tmp_path / "run", again)


def on_ranks(place: Path, out: Path, ranks: Ranks = ALONE, **values: object) -> float:
    """A run of eight rows a step, begun or gone on with; the draws are greedy."""
    own = {"learn": "scales,codebook", "rollout_every": 2, "rollout_temperature": 0.0}
    often = {"max_steps": 5, "save_every": 3, "eval_every": 5, "batch_size": 2}
    chosen = settings(place, global_batch_size=8, **{**own, **often, **values})
    resume = (out / "recipe.toml").exists()
    return train_student(chosen, str(place / "student"), out, resume=resume, ranks=ranks).best


def assert_same_course(out: Path, other: Path) -> None:
    found = [losses(out), losses(other)]
    assert len(found[0]) == len(found[1]) == 5
    for ours, theirs in zip(*found, strict=True):
        del ours["kind"], theirs["kind"]
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_ranks_roll_out_rows_of_their_own(place: Path, tmp_path: Path) -> None:
    on_ranks(place, tmp_path / "one")
    run_ranks(2, lambda ranks: on_ranks(place, tmp_path / "two", ranks), tmp_path)
    assert_same_course(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_other_ranks_go_on_with_rows_that_wait(place: Path, tmp_path: Path) -> None:
    steady = {"schedule": "constant"}
    on_ranks(place, tmp_path / "one", **steady)
    run_ranks(
        2, lambda ranks: on_ranks(place, tmp_path / "run", ranks, max_steps=3, **steady), tmp_path
    )
    on_ranks(place, tmp_path / "run", **steady)
    assert_same_course(tmp_path / "run", tmp_path / "one")
    on_ranks(place, tmp_path / "less", max_steps=3, **steady)
    run_ranks(2, lambda ranks: on_ranks(place, tmp_path / "less", ranks, **steady), tmp_path)
    assert_same_course(tmp_path / "less", tmp_path / "one")


@pytest.mark.slow
def test_latent_weights_may_be_divided(place: Path, tmp_path: Path) -> None:
    values = {"learn": "weights,scales", "shard_latents": True}
    on_ranks(place, tmp_path / "one", learn="weights,scales")
    run_ranks(2, lambda ranks: on_ranks(place, tmp_path / "two", ranks, **values), tmp_path)
    assert_same_course(tmp_path / "two", tmp_path / "one")


def test_a_student_that_ends_at_once_is_told_and_taught(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RolloutSampler, "sample", lambda _, requests: [[0] for _ in requests])
    with caplog.at_level(logging.INFO):
        run(place, tmp_path / "run", max_steps=3)
    words = "2 of the 4 sequences of a step are prompts that the student goes on with"
    assert f"{words}, by 12 tokens at most, anew every step" in caplog.messages
    told = [record.message for record in caplog.records if "at once" in record.message]
    assert len(told) == 1 and "step 0: the student ends all 2 rows" in told[0]
    for line in losses(tmp_path / "run"):
        assert line["own_length"] == line["own_ended_frac"] == 1.0
        assert line["own_tokens"] == 2 and line["own_reverse_kl_nats"] > 0


def test_what_cannot_be_leaves_nothing(place: Path, tmp_path: Path) -> None:
    for values, message in (
        ({"teacher": None}, "on_policy=0.5: .*--teacher DIR"),
        ({"on_policy": 0.3}, "on_policy=0.3 of batch_size=4 .*--on-policy 0.25"),
        ({"on_policy": 1e-9}, "4e-09 rows"),
        ({"on_policy": 1.5}, "on_policy=1.5"),
        ({"on_policy_loss": "tail"}, "names tail, "),
        ({"on_policy_loss": "hard_ce"}, "names hard_ce"),
        ({"on_policy_loss": "revers_kl"}, "on_policy_loss='revers_kl'.* reverse_kl"),
        ({"rollout_tokens": 16}, "rollout_tokens=16, .*15 or fewer"),
        ({"loss": "kl,tail:0.1"}, "tail reads the teacher from a cache"),
    ):
        known = settings(place).model_dump(exclude_unset=True)
        with pytest.raises(QatError, match=message) as error:
            chosen = TrainConfig.parse({**known, **values}, "train")
            train_student(chosen, str(place / "student"), tmp_path / "run", resume=False)
        assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_device_of_fixed_shapes_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "is_traced", True)
    with pytest.raises(ConfigError, match="compiles for each shape.*reads the whole row anew"):
        run(place, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_dry_run_rolls_out_for_every_step(place: Path, heard: list) -> None:
    chosen = settings(place, rollout_every=3)
    found = predict(chosen, str(place / "student"), TeacherCache.open(place / "known"))
    assert found.step_s > 0 and len(heard) == WARM_STEPS + MEASURED_STEPS
    assert all(len(requests) == chosen.own_rows for requests, _ in heard)


def test_a_run_timed_again_has_its_own_words_before_the_clock(
    place: Path, tmp_path: Path, heard: list
) -> None:
    every = {"rollout_every": 3, "log_every": 3, "save_every": 6, "eval_every": 6}
    run(place, tmp_path / "run", **every)
    first, *_ = heard
    heard.clear()
    quick = BenchConfig(device="cpu", warmup=2, steps=1)
    (row,) = time_like(quick, tmp_path / "run", tmp_path / "out").rows
    assert heard == [first]  # the words of the first three steps, as the run rolled them out
    (third,) = [line for line in losses(tmp_path / "run") if line["step"] == 3]
    assert row["loss_nats"] == pytest.approx(third["loss_nats"], rel=1e-7)
    assert row["run_rollout_s"] > 0


@pytest.mark.parametrize(
    "values", [{"on_policy": 0.25}, {"rollout_every": 2}, {"on_policy_loss": "kl"}]
)
def test_a_run_goes_on_with_the_same_share(place: Path, tmp_path: Path, values: dict) -> None:
    run(place, tmp_path / "run", max_steps=1)
    (name,) = values
    with pytest.raises(ConfigError, match=f"{name}=.* was begun with"):
        run(place, tmp_path / "run", max_steps=4, resume=True, **values)


@pytest.mark.parametrize("is_copied", [pytest.param(True, marks=SLOW), False])
def test_a_student_formed_by_layer_says_and_learns_the_same(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    monkeypatch.setattr("qat.extensions.decode.rollout.DecodeStep.fits", lambda _: is_copied)
    ended = {}
    for form in ("whole", "layer"):
        out = tmp_path / form
        ended[form] = out, run(place, out, form=form, max_steps=2, eval_every=2, save_every=2)
    assert_same_end(ended["whole"], *ended["layer"])
