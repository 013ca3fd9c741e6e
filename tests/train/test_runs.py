"""Whole runs: their directory, how they go on after a stop, and what they refuse.

A stop here is an exception in the middle of a step; `measure_kills.py` kills processes.
"""

import json
import logging
import shutil
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from cache_case import build, texts, without_split
from crash import stopped_at
from quantized import (
    SPECS,
    nearest_e5m3,
    random_weight,
    tiny_quantized,
    with_kv,
    with_rounded_inputs,
)
from tiny import tiny_model, tiny_tokenizer
from train_case import assert_resumes, assert_same_end, config, make_place
from transformers import PreTrainedModel

from qat.data.reader import TeacherCache
from qat.errors import CacheError, CheckpointError, ConfigError
from qat.logs import read_json_lines
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.directory import atomic_directory
from qat.nn.quant_linear import FrozenLutLinear, quant_linears
from qat.nn.swap import replace_module
from qat.train.config import TrainConfig
from qat.train.optim import Optimizer
from qat.train.resume import load_training_state
from qat.train.run import RunDirectory
from qat.train.start import TrainReport, train_student


def run(place: Path, out: Path, *, resume: bool = False, **values: object) -> TrainReport:
    settings = config(place, **{"max_steps": 7, "learn": "weights,scales,codebook,norms", **values})
    return train_student(settings, str(place / "student"), out, resume=resume, begins_anew=resume)


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainReport]:
    """An unbroken run of seven steps, saved every two, judged every three."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, run(place, out)


def test_frozen_indices_go_on_bit_for_bit_when_levels_cross(place: Path, tmp_path: Path) -> None:
    frozen = {"learn": "scales,codebook", "lr_codebook": 0.5, "save_every": 1}
    assert_resumes(partial(run, place, **frozen), tmp_path, 6)
    state, _ = load_training_state(tmp_path / "whole/checkpoints/step-000006")
    codebooks = [
        t for name, t in state.items() if name.startswith("parameter.") and "codebook" in name
    ]
    assert any((levels.diff() < 0).any() for levels in codebooks), "no two levels have crossed"


@pytest.mark.slow
def test_scales_of_8_bits_learn_between_their_bytes_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    place = make_place(tmp_path, SPECS["lut2_s8"], layers=1)
    _, report = assert_resumes(partial(run, place, lr_scales=1e-3), tmp_path, 3)
    state, _ = load_training_state(RunDirectory(tmp_path / "whole").pointed("latest"))
    names = [n for n in state if n.startswith("parameter.") and n.endswith(".scales")]
    assert any(not torch.equal(state[n], nearest_e5m3(state[n])) for n in names)
    final = quant_linears(load_checkpoint(report.final))
    assert all(torch.equal(m.scales, nearest_e5m3(m.scales)) for m in final.values())


def test_a_rebuilt_cache_does_not_continue_a_run(tmp_path: Path) -> None:
    place = make_place(tmp_path, layers=1)
    shutil.rmtree(place / "cache")
    build(place / "cache", documents=texts(seed=4), num_sequences=20)
    run(place, tmp_path / "run")
    shutil.rmtree(place / "cache")
    build(place / "cache", documents=texts(seed=5), num_sequences=20)
    with pytest.raises(ConfigError, match="cache_content=.* begun with"):
        run(place, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Optimizer, "step", 3),
        *(pytest.param(Optimizer, "step", step, marks=pytest.mark.slow) for step in (0, 1, 6)),
        # before the first pointer, and between best and latest
        pytest.param(RunDirectory, "point", 0, marks=pytest.mark.slow),
        (RunDirectory, "point", 2),
        pytest.param(RunDirectory, "remove_old", 1, marks=pytest.mark.slow),
        (RunDirectory, "forget_after", 0),  # the recipe is there, nothing else
        (RunDirectory, "begin", 0),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(
    place: Path, tmp_path: Path, whole, owner: type, name: str, call: int
) -> None:
    out = tmp_path / "run"
    with stopped_at(owner, name, call):
        run(place, out)
    torch.rand(call + 1)  # a new process has another random state
    assert_same_end(whole, out, run(place, out, resume=True))


def test_a_half_written_recipe_is_in_nobodys_way(place: Path, tmp_path: Path, whole) -> None:
    (tmp_path / ".recipe.toml.partial").write_text("[tra")
    assert_same_end(whole, tmp_path, run(place, tmp_path, resume=True))


def test_several_stops_and_torn_metrics(place: Path, tmp_path: Path, whole) -> None:
    for call in (3, 2, 2):
        with stopped_at(Optimizer, "step", call):
            run(place, tmp_path, resume=True)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "st')
    assert_same_end(whole, tmp_path, run(place, tmp_path, resume=True))


def test_a_finished_run_resumes_to_itself(place: Path, tmp_path: Path, whole) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    assert_same_end(whole, out, run(place, out, resume=True))


def test_same_seed_same_run_and_another_seed_another(place: Path, tmp_path: Path, whole) -> None:
    assert_same_end(whole, tmp_path / "a", run(place, tmp_path / "a"))
    run(place, tmp_path / "b", seed=1)
    assert (tmp_path / "b/metrics.jsonl").read_bytes() != (whole[0] / "metrics.jsonl").read_bytes()


def mixed() -> PreTrainedModel:
    """One of six equal linears has 4 bits, the others 2."""
    model = tiny_quantized("qwen3", SPECS["lut2"])
    name = "model.layers.1.mlp.up_proj"
    shape = model.get_submodule(name).indices().shape
    linear = FrozenLutLinear(random_weight(*shape, SPECS["lut4"]), None, SPECS["lut4"])
    replace_module(model, name, linear)
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (mixed, "q2.3a2_e2e_"),
        (lambda: with_kv(tiny_quantized("qwen3", SPECS["fours8_s8"]), 8), "v2a2_kv8_e2e_"),
        (
            lambda: with_kv(with_rounded_inputs(tiny_quantized("qwen3", SPECS["lut2"]), "int8"), 4),
            "q2a2_a8kv4_e2e_",
        ),
    ],
)
def test_the_name_tells_what_a_student_is_made_of(
    make: Callable[[], PreTrainedModel], said: str, place: Path, tmp_path: Path
) -> None:
    save_checkpoint(make(), tiny_tokenizer(), tmp_path / "student")
    settings = config(place, max_steps=1)
    report = train_student(settings, str(tmp_path / "student"), tmp_path / "run", resume=False)
    assert report.final.name.startswith(said)


def test_the_directory_of_a_run(place: Path, whole) -> None:
    out, report = whole
    assert report.steps == 7 and report.final.parent == out
    assert report.final.name == f"q2a2_e2e_{report.best:.2f}_fp32"
    names = {path.name for path in out.iterdir()}
    files = {"recipe.toml", "run.json", "metrics.jsonl", "heartbeat-rank0.jsonl", "latest", "best"}
    tables = {"training.csv", "val.csv", "metrics.json"}
    assert names == files | tables | {"checkpoints", report.final.name}
    facts = json.loads((out / "run.json").read_text())
    cache = TeacherCache.open(place / "cache").manifest
    assert facts["cache_fingerprint"] == cache.fingerprint and facts["teacher"] == "tiny"
    assert facts["student"] == str(place / "student") and facts["dtype"] == "fp32"
    assert facts["device"] == "cpu" and facts["torch"] == torch.__version__
    assert facts["learnable"] > 0 and len(facts["config_fingerprint"]) == 12
    assert {"commit", "qat", "transformers", "python"} <= facts.keys()
    recipe = tomllib.loads((out / "recipe.toml").read_text())["train"]
    assert recipe.pop("student") == str(place / "student")
    settings = config(place, max_steps=7, learn="weights,scales,codebook,norms")
    assert TrainConfig.parse(recipe, "recipe") == settings


def test_the_environment_that_shaped_a_run_is_recorded(
    place: Path, tmp_path: Path, monkeypatch
) -> None:
    shaping = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "NCCL_DEBUG": "INFO",
        "XLA_FLAGS": "--xla_dump_to=/tmp --token=hf_abcdefghijklmnopqrstuvw",
        "PJRT_DEVICE": "CPU",
        "TORCH_LOGS": "recompiles",
    }
    others = {
        "HF_TOKEN": "hf_" + "a" * 20,
        "TORCH_API_KEY": "b" * 20,
        "TPU_SECRET": "c",
        "HOME": "/",
    }
    for name, value in {**shaping, **others}.items():
        monkeypatch.setenv(name, value)
    RunDirectory(tmp_path).write_facts()
    found = json.loads((tmp_path / "run.json").read_text())["environment"]
    hidden = {"XLA_FLAGS": "--xla_dump_to=/tmp --token=[hidden]"}
    assert found.items() >= (shaping | hidden).items() and not found.keys() & others.keys()


def test_the_final_checkpoint_is_the_best_one(whole) -> None:
    out, report = whole
    best = RunDirectory(out).pointed("best")
    evals = [m for m in read_json_lines(out / "metrics.jsonl") if m["kind"] == "eval"]
    trained = [m for m in evals if m["step"] > 0]
    least = min(trained, key=lambda m: m["kl_tail_nats"])
    assert best.name == f"step-{least['step']:06d}" and report.best == least["kl_tail_nats"]
    files = [path / "model.safetensors" for path in (best, report.final)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not (report.final / "trainer").exists()
    tensors, facts = load_training_state(RunDirectory(out).pointed("latest"))
    assert facts["step"] == 7 and facts["best"] == report.best and "rng.cpu" in tensors
    assert facts["world_size"] == 1 and facts["sequences_per_step"] == 4


@pytest.mark.slow
def test_fixed_grids_and_frozen_indices_train(tmp_path: Path) -> None:
    build(tmp_path / "cache")
    for spec in ("seq1", "seq2", "lut2_r4", "ternary_r2"):
        place = tmp_path / spec
        place.mkdir()
        (place / "cache").symlink_to(tmp_path / "cache")
        save_checkpoint(tiny_quantized("llama", SPECS[spec]), tiny_tokenizer(), place / "student")
        report = run(place, place / "run", learn="scales", max_steps=2, mlp_only=True)
        bits = SPECS[spec].bits
        packed = [load_checkpoint(path) for path in (place / "student", report.final)]
        names = [f"model.layers.0.{part}_proj" for part in ("self_attn.q", "mlp.up")]
        same = [
            torch.equal(*(model.get_submodule(name).quantized_weight() for model in packed))
            for name in names
        ]
        assert same == [True, False] and report.final.name.startswith(f"q{bits}a{bits}_mlp_")


def test_a_cache_of_draws_alone_is_judged_by_them(place: Path, tmp_path: Path) -> None:
    build(tmp_path / "cache", top_k=0)
    report = run(place, tmp_path / "run", cache_dir=tmp_path / "cache", loss="sampled")
    evals = [m for m in read_json_lines(tmp_path / "run/metrics.jsonl") if m["kind"] == "eval"]
    assert report.best == min(m["sampled_ce_nats"] for m in evals[1:])
    assert all(m["kl_tail_nats"] is None and m["ppl"] > 0 for m in evals)


def test_resuming_with_other_settings(place: Path, whole) -> None:
    before = (whole[0] / "metrics.jsonl").read_bytes()
    for values, message in (
        (
            {"lr_scales": 0.5},
            r"lr_scales=0.5, .*0.001",
        ),
        ({"max_steps": 6}, "max_steps=6, .* 7"),
        ({"eval_sequences": 3}, "eval_sequences=3, .* begun with 4"),
        ({"seed": 3}, "seed=3, .* begun with 0"),
        ({"mlp_only": True}, "mlp_only=True, .* begun with False"),
        ({"loss": "jsd"}, "loss='jsd', .*'tail'"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(place, whole[0], resume=True, **values)
    assert (whole[0] / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_takes_more_steps(place: Path, tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    same = {"schedule": "constant", "eval_every": 2, "save_every": 2}
    long = tmp_path / "long", run(place, tmp_path / "long", max_steps=6, **same)
    out = tmp_path / "run"
    run(place, out, max_steps=4, **same)
    report = run(place, out, resume=True, max_steps=6, **same)
    assert_same_end(long, out, report)  # a constant rate knows no end
    assert "goes on with max_steps=6 instead of 4" in caplog.text and "schedule" not in caplog.text
    assert tomllib.loads((out / "recipe.toml").read_text())["train"]["max_steps"] == 6
    (entry,) = json.loads((out / "run.json").read_text())["resumed"]
    assert entry["step"] == 4 and entry["changed"] == {"max_steps": [4, 6]}


def test_a_run_goes_on_with_more_steps_and_another_cadence(
    place: Path, tmp_path: Path, whole, caplog
) -> None:
    caplog.set_level(logging.INFO)
    out, moved = tmp_path / "run", tmp_path / "cache"
    shutil.copytree(whole[0], out)
    shutil.copytree(place / "cache", moved)
    shutil.copytree(place / "student", tmp_path / "student")
    more = {"max_steps": 14, "eval_every": 5, "log_every": 2, "save_every": 4, "cache_dir": moved}
    settings = config(place, learn="weights,scales,codebook,norms", **more)
    settings = without_warm_up(settings)
    assert settings.warmup_steps == 1
    report = train_student(settings, str(tmp_path / "student"), out, resume=True)
    assert report.steps == 14
    said = "cosine schedule of 14 steps: they were at 0.1 of their peak and go on at 0.61"
    assert said in caplog.text
    steps = [m["step"] for m in read_json_lines(out / "metrics.jsonl") if m["step"] > 7]
    assert steps == [8, 10, 10, 12, 14, 14]
    recipe = tomllib.loads((out / "recipe.toml").read_text())["train"]
    assert recipe["warmup_steps"] == 2 and recipe["student"] == str(tmp_path / "student")
    # and on with the same, which changes nothing more
    train_student(settings, str(tmp_path / "student"), out, resume=True)
    entries = json.loads((out / "run.json").read_text())["resumed"]
    assert ["changed" in entry for entry in entries] == [True, False]


def test_a_directory_in_use(place: Path, tmp_path: Path, whole) -> None:
    with pytest.raises(ConfigError, match="holds a run already; .*--resume"):
        run(place, whole[0])
    (tmp_path / "mine").touch()
    for resume in (False, True):
        with pytest.raises(ConfigError, match="is not empty"):
            run(place, tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("made", "values", "error", "message"),
    [
        ({"draws": 0}, {"loss": "sampled"}, ConfigError, "sampled reads .* draws"),
        ({"top_k": 0}, {}, ConfigError, "tail reads .* topk"),
        ({"held_out": 0.0}, {}, ConfigError, "0 held-out sequences"),
        ({"tokenizer": tiny_tokenizer(265)}, {}, CacheError, "tokenizer .*, the student"),
        ("no training", {}, ConfigError, "0 training and .* held-out sequences"),
        ("none", {}, CacheError, "none"),
        ({}, {"loss": "ki"}, ConfigError, "has no loss called 'ki'"),
        ({}, {"sample_prompt": ""}, ConfigError, "sample_prompt='' holds no token"),
    ],
)
def test_what_does_not_fit_leaves_nothing(
    place: Path, tmp_path: Path, made: dict | str, values: dict, error: type, message: str
) -> None:
    cache, out = tmp_path / "none", tmp_path / "run"
    if made == "no training":
        without_split(cache, "train")
    elif made != "none":
        build(cache, **made)
    with pytest.raises(error, match=message):
        run(place, out, cache_dir=cache, **values)
    assert not out.exists()


def test_students_that_cannot_learn(place: Path, tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "float") as partial:
        tiny_model().save_pretrained(partial)
        tiny_tokenizer().save_pretrained(partial)
    short = tiny_quantized("qwen3", SPECS["lut2"], max_position_embeddings=8)
    save_checkpoint(short, tiny_tokenizer(), tmp_path / "short")
    cases = [
        (
            "float",
            ConfigError,
            "no quantized linears in scope e2e; quantize it first with",
        ),
        ("short", CacheError, "holds sequences of 16 tokens, the student reads at most 8"),
        ("nowhere", CheckpointError, "nowhere does not exist"),
    ]
    for name, error, message in cases:
        with pytest.raises(error, match=message):
            train_student(config(place), str(tmp_path / name), tmp_path / "run", resume=False)
        assert not (tmp_path / "run").exists()


def test_the_warm_up_of_a_short_run_is_short_and_said(place: Path, tmp_path: Path, caplog) -> None:
    usual = [TrainConfig(cache_dir="c", max_steps=n).warmup_steps for n in (5, 60, 500, 9999)]
    assert usual == [0, 6, 50, 50]
    assert TrainConfig(cache_dir="c", max_steps=60, warmup_steps=50).warmup_steps == 50
    caplog.set_level(logging.INFO)
    said = "warm-up: 2 steps, a tenth of 20 (--warmup-steps sets another)"
    given = config(place, max_steps=20)
    for number, settings in enumerate((given, without_warm_up(given))):
        assert said not in caplog.text
        with stopped_at(Optimizer, "step", 0):
            student = str(place / "student")
            train_student(settings, student, tmp_path / str(number), resume=False)
        recipe = tomllib.loads((tmp_path / str(number) / "recipe.toml").read_text())["train"]
        assert recipe["warmup_steps"] == 2
    assert caplog.text.count(said) == 1
    with stopped_at(Optimizer, "step", 0):
        settings = without_warm_up(config(place, max_steps=10))
        train_student(settings, str(place / "student"), tmp_path / "short", resume=False)
    assert "warm-up: 1 step, a tenth of 10" in caplog.text


def without_warm_up(settings: TrainConfig) -> TrainConfig:
    return TrainConfig(**settings.model_dump(exclude={"warmup_steps"}))


def test_a_checkpoint_that_goes_loses_its_name_first(tmp_path: Path) -> None:
    made = RunDirectory(tmp_path)
    for step in (1, 2):
        (made.checkpoint_path(step) / "trainer").mkdir(parents=True)
    made.point("latest", made.checkpoint_path(2))
    with stopped_at(shutil, "rmtree", 0):
        made.remove_old(keep=1)
    assert made.checkpoints() == [made.checkpoint_path(2)]
    (tmp_path / ".heartbeat-rank3.jsonl.partial").touch()
    made.remove_leavings()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    assert not list(tmp_path.glob(".heartbeat*"))
