"""The findings against a run, by code and severity; nothing here is loaded or measured."""

import re
from pathlib import Path

import pytest

from qat.errors import ConfigError
from qat.train.config import TrainConfig
from qat.train.preflight import (
    Preflight,
    RunFinding,
    RunPlan,
    RunPrediction,
    codes_forced,
    is_long,
    refuse,
)

GIB = 2**30

FAST = RunPrediction(
    step_s=0.1,
    tokens_per_s=80_000.0,
    eval_s=0.5,
    peak_gib=20.0,
    pinned_gib=70.0,
    checkpoint_bytes=GIB,
    final_bytes=GIB // 4,
    attention="tile",
    fallback=None,
)
PLAN = RunPlan(
    device="NVIDIA H200",
    has_bf16=True,
    memory_gib=139.0,
    free_bytes=100 * GIB,
    train_sequences=10**6,
    held_out_sequences=1000,
    sequence_length=64,
    width=1024,
    prediction=FAST,
)

AWAY = {"latent_dtype": "bf16", "offload": "latents"}


def settings(**values: object) -> TrainConfig:
    plain = {"cache_dir": Path("cache"), "dtype": "bf16", "max_steps": 10_000}
    return TrainConfig(**{**plain, **values})


def found(plan: RunPlan, **values: object) -> dict[str, RunFinding]:
    """Findings by code, notes left out."""
    findings = Preflight(settings(**values), plan).findings()
    return {each.code: each for each in findings if each.severity != "note"}


def slower(step_s: float, **values: object) -> RunPlan:
    return PLAN._replace(prediction=FAST._replace(step_s=step_s, **values))


def test_nothing_speaks_against_a_sound_run() -> None:
    assert found(PLAN) == {}
    notes = {each.code for each in Preflight(settings(), PLAN).findings()}
    assert notes == {"epochs", "memory", "disk", "time"}
    (pinned,) = (f for f in Preflight(settings(**AWAY), PLAN).findings() if f.code == "host_memory")
    assert "offload=latents pins 70 GiB of host memory" in pinned.line()


CASES = [
    ("save_every_off", "error", PLAN, {"save_every": 0}, "save_every=0 in a run of 10,000 steps"),
    ("save_every_off", "error", slower(4.0), {"save_every": 0, "max_steps": 1000}, "since the"),
    ("save_every_off", "error", PLAN._replace(prediction=None), {"save_every": 0}, "every 100$"),
    ("save_sparse", "warning", slower(15.0, eval_s=0), {}, "one checkpoint in 25 minutes"),
    ("save_sparse", "error", slower(60.0), {}, "checkpoint in 100 minutes.*--save-every 10$"),
    ("disk", "error", PLAN._replace(free_bytes=4 * GIB), {}, "4.25 GiB of checkpoints, 4 GiB"),
    ("disk", "warning", PLAN._replace(free_bytes=5 * GIB), {}, "little is left"),
    ("disk", "error", PLAN, {"milestone_every": 100}, "104 GiB of checkpoints"),
    ("memory", "error", slower(0.1, peak_gib=140.0), {}, "140 GiB of 139 GiB.*--batch-size"),
    ("memory", "warning", slower(0.1, peak_gib=130.0), {}, "130 GiB of 139 GiB"),
    (
        "memory",
        "warning",
        slower(0.1, peak_gib=130.0),
        {**AWAY, "offload": "moments"},
        "--form layer, or --offload latents",
    ),
    ("memory", "error", PLAN._replace(prediction=None, has_run_out=True), {}, "memory ran out"),
    ("dtype", "error", PLAN, {"dtype": "fp32"}, "computes many times faster in bf16"),
    ("dtype", "warning", PLAN, {"dtype": "fp32", "max_steps": 1000}, "many times faster in bf16"),
    ("dtype", "warning", PLAN, {"dtype": "fp16"}, "whose gradients do not overflow"),
    ("eval_split", "warning", PLAN._replace(held_out_sequences=9), {}, "9 held-out.*--held-out"),
    ("eval_split", "warning", PLAN, {"eval_sequences": 9}, "9 held-out.*raise --eval-sequences"),
    ("eval_split", "error", PLAN._replace(held_out_sequences=0), {}, "0 held-out"),
    ("eval_cost", "warning", slower(0.1, eval_s=5.0), {}, "evaluations take 34% of the time"),
    ("lr", "warning", PLAN, {"lr": 0.2}, "lr=0.2, far from the 0.01.*--lr 0.01"),
    ("lr", "warning", PLAN, {"lr_scales": 1e-6}, "lr_scales=1e-06, .*--lr-scales 0.001"),
    ("lr", "error", PLAN, {"lr_codebook": 2.0}, "more than its own size"),
    ("warmup", "warning", PLAN, {"warmup_steps": 2500}, "warmup_steps=2500 of 10000"),
    ("epochs", "warning", PLAN._replace(train_sequences=20_000), {}, "32.0 passes over 20,000"),
    ("epochs", "warning", PLAN._replace(train_sequences=700), {}, "914.3 passes over 700"),
    ("epochs", "error", PLAN._replace(train_sequences=600), {}, "1,066.7 passes.*larger cache"),
    ("epochs", "warning", PLAN._replace(train_sequences=60), {"max_steps": 4999}, "5,332.3 passes"),
    ("attention", "warning", slower(0.1, attention="sdpa"), {}, "attention=sdpa"),
    ("compile", "warning", slower(0.1, fallback="no compiler"), {}, "uncompiled .no compiler"),
    ("cache", "error", PLAN._replace(problems=("a, expected b; do c",)), {}, "a, .*; do c$"),
    ("toy", "warning", PLAN._replace(sequence_length=16), {"batch_size": 128}, "ces of 16 tokens"),
    ("toy", "warning", PLAN, {"batch_size": 4}, "256 tokens a step"),
    ("toy", "warning", PLAN._replace(width=128), {}, "a student of width 128"),
    ("toy", "error", PLAN._replace(width=128), {"batch_size": 16}, "1,024 tokens a step.* 128"),
    ("toy", "warning", PLAN._replace(width=128, device="cpu"), {"batch_size": 16}, "1,024 tokens"),
]


def test_a_finding_has_a_reason_and_a_mend() -> None:
    for code, severity, plan, values, message in CASES:
        finding = found(plan, **values)[code]
        assert finding.severity == severity and finding.reason and finding.mend
        assert re.search(message, finding.line()), finding.line()


def test_what_does_not_learn_has_no_rate() -> None:
    assert "lr" not in found(PLAN, learn="scales", lr=5.0)


def test_the_worst_comes_first() -> None:
    plan = PLAN._replace(prediction=FAST._replace(peak_gib=200.0))
    severities = [each.severity for each in Preflight(settings(lr=0.2), plan).findings()]
    assert severities == ["error", "warning", *["note"] * (len(severities) - 2)]


def test_time_and_price() -> None:
    plan = PLAN._replace(world=2)
    (note,) = (
        f for f in Preflight(settings(price_per_hour=3.0), plan).findings() if f.code == "time"
    )
    # 10,000 steps of 0.1 s, 101 evaluations of 0.5 s
    assert Preflight(settings(), PLAN).hours == pytest.approx((1000 + 50.5) / 3600)
    spared = Preflight(settings(skip_first_eval=True), PLAN).hours
    assert spared == pytest.approx((1000 + 50.0) / 3600)
    assert note.found.startswith("0.292 hours at 0.1 s a step, 160,000 tokens/s")
    assert note.reason.startswith("1.75 at 3 an hour")


def test_at_its_limit_a_thing_is_not_told() -> None:
    assert "save_sparse" not in found(slower(11.9, eval_s=0))
    plan = PLAN._replace(sequence_length=32, width=256)
    assert "toy" not in found(plan, batch_size=64)  # of 2048 tokens


def test_a_short_run_may_do_without_checkpoints() -> None:
    assert "save_every_off" not in found(PLAN, save_every=0, max_steps=1000)
    assert not is_long(4999, 0.9)
    assert is_long(4999, 1.1) and is_long(5000, None)


def test_disk_counts_all_that_lies_there_at_once() -> None:
    config = settings(keep=3, milestone_every=1000)
    assert Preflight(config, PLAN).disk_bytes == (3 + 10 + 2) * GIB + GIB // 4
    assert Preflight(settings(save_every=0), PLAN).disk_bytes == 3 * GIB + GIB // 4


def test_errors_stop_and_are_remembered_when_forced() -> None:
    plan = PLAN._replace(problems=("x; y",))
    findings = Preflight(settings(save_every=0, lr=2.0), plan).findings()
    with pytest.raises(ConfigError, match=r"^preflight: .*--force \(1 more"):
        codes_forced(findings, force=False)
    assert codes_forced(findings, force=True) == ["lr", "save_every_off"]
    with pytest.raises(ConfigError, match="2 more"):
        refuse(findings)
    refuse([])
