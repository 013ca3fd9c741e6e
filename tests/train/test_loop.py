"""The loop: what a step computes, what it leaves alone, and when it stops."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cache_case import TOKENIZER, build
from quantized import SPECS, tiny_quantized
from torch import Tensor
from train_case import golden_course, make_place, put_tables, trainer_of

from qat.data.sampler import sequence_indices
from qat.logs import read_json_lines
from qat.losses.formulas import loss_from_logits, to_targets
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.nn.quant_linear import FrozenLutLinear, LutLinear, quant_linears
from qat.train.loop import Trainer

GOLDEN = Path(__file__).parents[1] / "golden" / "train_20.json"
IDS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place of one layer, for tests to which a second one adds nothing."""
    return make_place(tmp_path_factory.mktemp("shallow"), layers=1)


def metrics(trainer: Trainer, kind: str) -> list[dict]:
    return [m for m in read_json_lines(trainer.run.path / "metrics.jsonl") if m["kind"] == kind]


def before_each_step(trainer: Trainer, act: Callable[[int, dict], None]) -> None:
    """Call `act(step, parameters)` when the gradients of a step are there."""
    real = trainer.optimizer.step

    def step(number: int) -> Tensor:
        act(number, trainer.optimizer.parameters)
        return real(number)

    trainer.optimizer.step = step


def first_gradients(trainer: Trainer) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}

    def note(_step: int, parameters: dict) -> None:
        seen.update({name: p.grad.clone() for name, p in parameters.items()})

    before_each_step(trainer, note)
    trainer.train()
    return seen


@pytest.mark.parametrize(
    ("learn", "tables"),
    [
        ("weights,scales,codebook,norms", "float"),
        ("weights,scales,codebook,norms", "tied"),
        ("scales,codebook", "float"),
        ("scales,codebook", "untied"),
    ],
)
def test_micro_batches_add_up_to_the_batch(
    place: Path, tmp_path: Path, learn: str, tables: str
) -> None:
    if tables != "float":
        model = tiny_quantized("qwen3", SPECS["lut2"], tie_word_embeddings=tables == "tied")
        put_tables(model)
        place = tmp_path / "place"
        build(place / "cache")
        save_checkpoint(model, TOKENIZER, place / "student")
    parts = {
        (batch, accum): trainer_of(
            place,
            tmp_path / f"{batch}x{accum}",
            batch_size=batch,
            grad_accum_steps=accum,
            max_steps=1,
            learn=learn,
        )
        for batch, accum in ((8, 1), (4, 2), (1, 8))
    }
    whole = parts[8, 1]
    rows = whole.cache.batch(sequence_indices(0, 0, 8, whole.cache.num_sequences("train"))).mask
    assert len(set(rows.sum(1).tolist())) > 1  # sequences of unequal valid tokens
    expected = first_gradients(whole)
    loss = metrics(whole, "train")[0]["loss_nats"]
    for split in ((4, 2), (1, 8)):
        found = first_gradients(parts[split])
        for name, gradient in expected.items():
            slack = 1e-5 * gradient.abs().max().item()
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=slack)
        assert metrics(parts[split], "train")[0]["loss_nats"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "temperature"),
    [
        ("tail", 1.0),
        ("candidates", 2.0),
        ("tail:0.5,hard_ce:2", 1.0),
        ("sampled:2,jsd:0.1", 1.0),
        ("reverse_kl,cakld", 1.0),
    ],
)
def test_the_logged_loss_is_the_mean_over_valid_tokens(
    shallow: Path, tmp_path: Path, loss: str, temperature: float
) -> None:
    trainer = trainer_of(
        shallow, tmp_path, loss=loss, temperature=temperature, max_steps=1, seed=4, batch_size=5
    )
    rows = sequence_indices(4, 0, 5, trainer.cache.num_sequences("train"))
    batch, model = trainer.cache.batch(rows), load_checkpoint(shallow / "student")
    with torch.no_grad():  # with a cache, transformers does not keep packed documents apart
        output = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    logits, targets = output.logits.flatten(0, 1), to_targets(batch)
    losses = trainer.config.losses
    found = loss_from_logits(logits, targets, losses, temperature=temperature)
    sums = {name: value.item() for name, value in found.items()}
    trainer.train()
    (line,) = metrics(trainer, "train")
    tokens = int(batch.mask.sum())
    assert line["valid_tokens"] == tokens and line["step"] == 1
    assert set(sums) == {*losses, "loss"}
    for name, value in sums.items():
        assert line[f"{name}_nats"] == pytest.approx(value / tokens, rel=1e-5)
    assert line["lr_share"] == 0.5 and line["grad_norm"] > 0


@pytest.mark.parametrize(
    ("flag", "inside"), [("mlp_only", ".mlp."), ("attention_only", ".self_attn.")]
)
def test_what_is_out_of_scope_costs_nothing(
    place: Path, tmp_path: Path, flag: str, inside: str
) -> None:
    trainer = trainer_of(place, tmp_path, max_steps=2, **{flag: True})
    model, wants_gradient = trainer.student.model, {}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def watch(name: str) -> Callable:
        def hook(module: torch.nn.Module, _args: tuple) -> None:
            if torch.is_grad_enabled():
                wants_gradient[name] = module.formed.requires_grad

        return hook

    linears = quant_linears(model)
    for name, linear in linears.items():
        linear.register_forward_pre_hook(watch(name))
        assert isinstance(linear, LutLinear if inside in name else FrozenLutLinear)
    seen = set()

    def note(_step: int, _parameters: dict) -> None:
        seen.update(name for name, p in model.named_parameters() if p.grad is not None)

    before_each_step(trainer, note)
    trainer.train()
    assert wants_gradient == {name: inside in name for name in linears}
    assert seen == set(trainer.optimizer.parameters) and all(inside in name for name in seen)
    assert all(inside in name for name in trainer.optimizer.state())
    for name, parameter in model.named_parameters():
        assert inside in name or torch.equal(parameter, before[name])


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_loss(place: Path, tmp_path: Path) -> None:
    runs = [trainer_of(place, tmp_path / str(flag), gradient_checkpointing=flag) for flag in (0, 1)]
    for trainer in runs:
        trainer.train()
    plain, recomputed = (metrics(trainer, "train") for trainer in runs)
    assert [m["loss_nats"] for m in plain] == [m["loss_nats"] for m in recomputed]
    assert metrics(runs[0], "eval") == metrics(runs[1], "eval")


def test_mixed_precision_trains_float32_masters(shallow: Path, tmp_path: Path) -> None:
    trainer = trainer_of(shallow, tmp_path, dtype="bf16", max_steps=2)
    trainer.train()
    assert all(p.dtype == torch.float32 for p in trainer.optimizer.parameters.values())
    exact = trainer_of(shallow, tmp_path / "exact", max_steps=2)
    exact.train()
    for low, high in zip(metrics(trainer, "train"), metrics(exact, "train"), strict=True):
        assert low["loss_nats"] == pytest.approx(high["loss_nats"], rel=0.02)
        assert low["loss_nats"] != high["loss_nats"]


def test_metrics_say_when_and_in_what_unit(shallow: Path, tmp_path: Path) -> None:
    trainer = trainer_of(shallow, tmp_path, log_every=4, max_steps=6)
    trainer.train()
    assert [m["step"] for m in metrics(trainer, "train")] == [4, 6]
    evals = metrics(trainer, "eval")
    assert [m["step"] for m in evals] == [0, 3, 6]
    assert all(isinstance(m["sample"], str) and m["num_tokens"] > 0 for m in evals)
    for key in ("kd_nats", "kl_tail_nats", "sampled_ce_nats", "top1_frac", "ppl"):
        assert all(isinstance(m[key], float) for m in evals)
    beats = read_json_lines(tmp_path / "heartbeat-rank0.jsonl")
    assert [beat["step"] for beat in beats] == [4, 6]
    assert all(beat["tokens_per_s"] > 0 and beat["step_s"] > 0 for beat in beats)
    assert all(beat["compiled"] is False and beat["fallback"] is None for beat in beats)


def test_slow_steps_leave_heartbeats_between_logged_ones(shallow: Path, tmp_path: Path) -> None:
    trainer = trainer_of(shallow, tmp_path, log_every=4, max_steps=6, beat_s=1e-9, batches_ahead=2)
    read, made = [], trainer.micro_batches
    trainer.micro_batches = lambda step: read.append((step, trainer.step)) or made(step)
    trainer.train()
    # two steps wait for each one that is taken; the device's own number is 0
    assert [step for step, _ in sorted(read)] == [0, 1, 2, 3, 4, 5]
    assert max(step - taken for step, taken in read) >= 2
    assert [m["step"] for m in metrics(trainer, "train")] == [4, 6]
    beats = read_json_lines(tmp_path / "heartbeat-rank0.jsonl")
    assert [beat["step"] for beat in beats] == [1, 2, 3, 4, 5, 6]
    assert [beat["loss_nats"] is None for beat in beats] == [True] * 3 + [False, True, False]
    assert all(beat["compiled"] is False for beat in beats)


def test_the_course_of_twenty_steps_is_golden(place: Path, tmp_path: Path) -> None:
    """One thread is exact on one machine; other CPUs sum in other orders, by 3e-7 at most.

    A change that means to move these numbers renews them: `python tests/golden/renew.py`.
    """
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = golden_course(place, tmp_path)
    assert found["loss_nats"] == pytest.approx(expected["loss_nats"], rel=1e-6)
    assert found["kl_tail_nats"] == pytest.approx(expected["kl_tail_nats"], rel=1e-6)
