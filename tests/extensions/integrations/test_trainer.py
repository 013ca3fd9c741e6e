"""The trainer of transformers takes the steps of a loop of one's own, and resumes them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cache_case import TOKENIZER
from loop_case import RATES as OPTIMIZER
from loop_case import assert_same, optimizer_of, prepared, values_of, with_tables
from padded_case import SIZES, make_pair
from quantized import SPECS, tiny_quantized
from tiny import IDS, tiny_model
from torch.utils.data import Dataset
from train_case import config, make_place
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, TrainingArguments

import qat
from qat.errors import ConfigError
from qat.integrations.transformers import QatTrainer
from qat.models.stored_state import packed_state_dict

RATES = {"lr": 1e-2, "beta2": 0.99, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("trainer"))


def arguments(out: Path, **values: object) -> TrainingArguments:
    """Arguments of a few steps on a CPU."""
    short = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(out), **{**short, **values})


def student_of(place: Path, **values: object) -> PreTrainedModel:
    return prepared(place, config(place, **values))


def losses_of(trainer: QatTrainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_it_takes_the_steps_of_a_loop(place: Path, tmp_path: Path) -> None:
    data = qat.CacheDataset(place / "cache")
    student = student_of(place)
    trainer = QatTrainer(student, arguments(tmp_path), train_dataset=data, rates=RATES)
    trainer.train()
    course = config(place, schedule="constant", warmup_steps=0, weight_decay=0.1)
    other = student_of(place)
    optimizer, _ = optimizer_of(other, course)
    for step in range(4):
        parts = [data.cache.batch([4 * step + 2 * m, 4 * step + 2 * m + 1]) for m in range(2)]
        totals = qat.totals(other, parts)
        for batch in parts:
            how = {"position_ids": batch.position_ids, "with_logits": False}
            qat.loss(other(batch.input_ids, **how), batch, totals=totals).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(values_of(student), values_of(other))
    trainer.save_model(str(tmp_path / "saved"))
    opened = qat.load(tmp_path / "saved", device="cpu", dtype="fp32")
    assert_same(packed_state_dict(opened), packed_state_dict(qat.finish(other)))
    assert len(losses_of(trainer)) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("short_fits")
def test_it_resumes_to_the_bit_and_keeps_the_best(place: Path, tmp_path: Path) -> None:
    data, held_out = (qat.CacheDataset(place / "cache", split) for split in ("train", "held_out"))
    settings = {"save_steps": 2, "save_strategy": "steps", "lr_scheduler_type": "linear"}

    def trainer_in(out: Path, **values: object) -> QatTrainer:
        model = with_tables()
        model.name_or_path = ""
        student = qat.prepare(model, None)
        args = arguments(out, **{**settings, **values})
        return QatTrainer(
            student, args, train_dataset=data, eval_dataset=held_out, rates=RATES,
            processing_class=TOKENIZER,
        )  # fmt: skip

    whole = trainer_in(
        tmp_path / "a", eval_strategy="steps", eval_steps=2, load_best_model_at_end=True
    )
    whole.train()
    scores = [line["eval_loss"] for line in whole.state.log_history if "eval_loss" in line]
    assert len(scores) == 2 and whole.state.best_metric == min(scores)
    first = trainer_in(tmp_path / "b")
    first.train()
    resumed = trainer_in(tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert_same(values_of(resumed.model), values_of(first.model))
    best = trainer_in(tmp_path / "c")
    best._load_from_checkpoint(whole.state.best_model_checkpoint)
    assert_same(values_of(best.model), values_of(whole.model))
    with pytest.raises(ConfigError, match="a run with the same student"):
        best.train(resume_from_checkpoint=str(tmp_path))


def test_tables_that_are_one_are_saved_once(place: Path, tmp_path: Path) -> None:
    def student() -> PreTrainedModel:
        model = tiny_quantized("llama", SPECS["lut2"], tie_word_embeddings=True)
        return qat.prepare(model, None, learn="scales,norms")

    first, second = (QatTrainer(student(), arguments(tmp_path)) for _ in range(2))
    with torch.no_grad():
        for parameter in first.model.parameters():
            parameter.mul_(0.5)
    first._save(str(tmp_path / "a"))
    second._load_from_checkpoint(str(tmp_path / "a"))
    assert_same(second.model.state_dict(), first.model.state_dict())
    assert second.model.lm_head.weight is second.model.model.embed_tokens.weight


class Texts(Dataset):
    """Rows of token ids of several lengths, as a tokenizer makes them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = IDS[0, : 6 + index].tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100, *ids[1:]]}


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_learned_from_a_teacher(place: Path, tmp_path: Path, side: str) -> None:
    teacher = tiny_model(seed=3)
    student = student_of(place)
    other = prepared(place, config(place))
    tokenizer = TOKENIZER.__class__.from_pretrained(place / "student", padding_side=side)
    tokenizer.pad_token = tokenizer.eos_token
    trainer = QatTrainer(
        student,
        arguments(tmp_path, max_steps=1),
        teacher=teacher,
        train_dataset=Texts(),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        loss="kl:1,hard_ce:0.5",
    )
    trainer.train()
    total = count = 0.0
    for index in range(4):
        ids = torch.tensor([Texts()[index]["input_ids"]])
        log_q, log_p = (model(ids).logits[0, :-1].log_softmax(-1) for model in (other, teacher))
        kl = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")
        ce = torch.nn.functional.nll_loss(log_q, ids[0, 1:], reduction="sum")
        total, count = total + (kl + 0.5 * ce).item(), count + len(ids[0]) - 1
    assert losses_of(trainer) == pytest.approx([total / count], rel=1e-4)


@pytest.mark.parametrize("loss", ["tail:1,sampled:1", "kl:1,hard_ce:0.5"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_padded_heads_are_cut_as_in_a_run(
    tmp_path: Path, sizes: tuple[int, int], loss: str
) -> None:
    pair, teacher = make_pair(tmp_path, sizes), None
    settings = {"loss": loss, "schedule": "constant", "warmup_steps": 0}
    if "kl" in loss:
        settings["teacher"] = str(tmp_path / "teacher")
        teacher = pair.teacher().model
    run = pair.trainer(tmp_path / "run", **settings)
    for step in range(2):
        run.take_step([run.cache.batch([*range(4 * step, 4 * step + 4)])], step)
    run.take_step.close()
    short = {"max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    student = student_of(tmp_path)
    trainer = QatTrainer(
        student,
        arguments(tmp_path / "out", **short, max_grad_norm=run.config.clip_grad_norm),
        teacher=teacher,
        train_dataset=qat.CacheDataset(tmp_path / "cache"),
        rates={name: getattr(run.config, name) for name in OPTIMIZER},
        loss=loss,
    )
    trainer.train()
    assert_same(values_of(student), values_of(run.student.model))


def test_fsdp1_is_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = QatTrainer.create_accelerator_and_postprocess

    def divided(trainer: QatTrainer) -> None:
        own(trainer)
        trainer.is_fsdp_enabled = True
        plugin = SimpleNamespace(fsdp_version=1)
        monkeypatch.setitem(vars(trainer.accelerator.state), "fsdp_plugin", plugin)

    monkeypatch.setattr(QatTrainer, "create_accelerator_and_postprocess", divided)
    with pytest.raises(ConfigError, match="fsdp_version=1"):
        QatTrainer(student_of(place), arguments(tmp_path))


def test_mistakes(place: Path, tmp_path: Path) -> None:
    data, student = qat.CacheDataset(place / "cache"), student_of(place)
    for act, message in (
        (lambda: QatTrainer(tiny_model()), "not a prepared student"),
        (lambda: QatTrainer(student, arguments(tmp_path, bf16=True)), "dtype='bf16'"),
    ):
        with pytest.raises(ConfigError, match=message):
            act()
    for values, named, message in (
        ({"learning_rate": 1e-3}, {"train_dataset": data}, "learning_rate=0.001 is given"),
        ({}, {"train_dataset": data, "loss": "kl"}, "reads every word"),
        ({}, {"train_dataset": data, "rates": {"lrr": 1}}, "lrr is unknown"),
        ({}, {"train_dataset": [{"input_ids": IDS[0]}] * 8}, "expected those of a CacheDataset"),
        ({}, {"train_dataset": [{"words": IDS[0]}] * 8}, "expected input_ids"),
    ):
        trainer = QatTrainer(student, arguments(tmp_path, **values), **named)
        with pytest.raises(ConfigError, match=message):
            trainer.train()
