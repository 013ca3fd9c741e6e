"""A small student, a cache for it, and runs: what the tests of the trainer share."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from cache_case import TOKENIZER, build, info, teacher
from crash import stopped_at
from quantized import SPECS, tiny_quantized
from safetensors.torch import load_file
from transformers import PreTrainedModel

from qat.backend.base import Backend
from qat.data.reader import TeacherCache
from qat.data.text import tokenizer_hash
from qat.logs import read_json_lines
from qat.models.checkpoint import save_checkpoint
from qat.models.load import load_model, load_tokenizer, model_identity
from qat.nn.swap import put_table, table_names, table_spec
from qat.quant.codebook import fixed_grid
from qat.quant.fit import fit_weight
from qat.quant.spec import LutSpec
from qat.train import judge
from qat.train.config import TrainConfig
from qat.train.judge import Judge
from qat.train.loop import Trainer
from qat.train.optim import Optimizer
from qat.train.run import RunDirectory, resolved
from qat.train.start import TrainReport, make_trainable, open_teacher, train_student

judge.SAMPLE_TOKENS = 4  # a user reads 32; half of a run of a few steps would go into them


def make_place(place: Path, spec: LutSpec = SPECS["lut2"], layers: int = 2) -> Path:
    """A cache and a student of random two-bit weights in `place`."""
    for name, data in _place(spec, layers).items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return place


@cache
def _place(spec: LutSpec, layers: int) -> dict[Path, bytes]:
    """The files of such a place, which are the same for every test."""
    with TemporaryDirectory() as name:
        place = Path(name)
        build(place / "cache")
        torch.manual_seed(7)
        student = tiny_quantized("qwen3", spec, num_hidden_layers=layers)
        save_checkpoint(student, TOKENIZER, place / "student")
        files = [path for path in place.rglob("*") if path.is_file()]
        return {path.relative_to(place): path.read_bytes() for path in files}


def with_teacher(place: Path) -> Path:
    """The same place with its teacher on disk, and a cache that knows it."""
    teacher().model.save_pretrained(place / "teacher")
    TOKENIZER.save_pretrained(place / "teacher")
    known = info(name=str(place / "teacher"), identity=model_identity(str(place / "teacher")))
    build(place / "known", info=known)
    return place


def config(place: Path, **values: object) -> TrainConfig:
    """Settings for runs of a few steps, all of them named so that no default matters."""
    short = {
        "cache_dir": place / "cache",
        "max_steps": 6,
        "batch_size": 4,
        "grad_accum_steps": 1,
        "lr": 1e-2,
        "lr_scales": 1e-3,
        "lr_codebook": 1e-3,
        "lr_norms": 1e-3,
        "beta2": 0.99,
        "schedule": "cosine",
        "warmup_steps": 2,
        "min_lr_ratio": 0.1,
        "eval_every": 3,
        "eval_sequences": 4,
        "save_every": 2,
        "log_every": 1,
        "keep": 2,
        "device": "cpu",
        "dtype": "fp32",
    }
    return TrainConfig(**{**short, **values})


def flags(place: Path, **values: object) -> list[str]:
    """The same settings as words of `qat train`."""
    words = []
    for key, value in resolved(config(place, **values), str(place / "student")).items():
        name = "--" + key.replace("_", "-")
        if key != "student" and value is not False:
            words += [name] if value is True else [name, str(value)]
    return words


def make_trainer(config: TrainConfig, student: Path, out: Path) -> Trainer:
    """A trainer at step 0, as `train_student` makes it, with the teacher that `config` names."""
    model = load_model(str(student), device=config.device, dtype="fp32")
    optimizer = make_trainable(model.model, config, shards_latents=config.shard_latents)
    cache, run = TeacherCache.open(config.cache_dir), RunDirectory(out)
    run.begin(resolved(config, str(student)))
    tokenizer = load_tokenizer(str(student))
    known, vocab_size = tokenizer_hash(tokenizer), model.config.vocab_size
    model.num_words = cache.check_student(known, vocab_size, model.longest)
    judge = Judge(model, tokenizer, cache, config)
    teacher = open_teacher(config, cache)
    return Trainer(optimizer, judge, run=run, config=config, teacher=teacher)


def trainer_of(place: Path, out: Path, **values: object) -> Trainer:
    """The trainer of the student of a `place`."""
    return make_trainer(config(place, **values), place / "student", out)


def visiting(_backend: Backend, groups: list) -> Iterator:
    """Yield copies, as a device of its own does; each goes back when the next one is asked for."""
    for group in groups:
        here = tuple(tensor.clone() for tensor in group)
        yield here
        for host, there in zip(group, here, strict=True):
            host.copy_(there)


def golden_course(place: Path, out: Path) -> dict[str, list[float] | float]:
    """The losses of twenty steps, and the held-out verdict after them."""
    settings = config(place, max_steps=20, eval_every=20, save_every=20)
    make_trainer(settings, place / "student", out).train()
    lines = read_json_lines(out / "metrics.jsonl")
    return {
        "loss_nats": [line["loss_nats"] for line in lines if line["kind"] == "train"],
        "kl_tail_nats": lines[-1]["kl_tail_nats"],
    }


def assert_same_end(whole: tuple[Path, TrainReport], out: Path, report: TrainReport) -> None:
    """Make sure that a run left the metrics, pointers, student and state of the `whole` one."""
    path, expected = whole
    assert (out / "metrics.jsonl").read_bytes() == (path / "metrics.jsonl").read_bytes()
    assert report.final.name == expected.final.name and report.best == expected.best
    name = "model.safetensors"
    assert (report.final / name).read_bytes() == (expected.final / name).read_bytes()
    for pointer in ("best", "latest"):
        assert (out / pointer).read_text() == (path / pointer).read_text()
    ours, theirs = (
        r.pointed("latest") / "trainer/state.safetensors"
        for r in (RunDirectory(out), RunDirectory(path))
    )
    assert ours.read_bytes() == theirs.read_bytes()


def pretend_recording(monkeypatch: pytest.MonkeyPatch, trainer: Trainer) -> list[int]:
    """Let the CPU record: a replay runs again and fills what the first run gave.

    The list grows with each replay of forward and backward.
    """
    parameters, replays = [*trainer.optimizer.parameters.values()], []

    def record(_backend: Backend, run: Callable[[], torch.Tensor | None]) -> tuple:
        result = run()
        if result is None:  # forming, which writes where it wrote before
            return run, None
        kept = {p: p.grad for p in parameters if p.grad is not None}

        def replay() -> None:
            replays.append(1)
            held = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
            result.copy_(run())
            for p, gradient in kept.items():
                gradient.copy_(p.grad)
            for p, gradient in zip(parameters, held, strict=True):
                p.grad = gradient

        return replay, result

    monkeypatch.setattr(Backend, "records", True)
    monkeypatch.setattr(Backend, "record", record)
    return replays


def assert_resumes(
    run: Callable[..., TrainReport], place: Path, step: int
) -> tuple[Path, TrainReport]:
    """Make sure that a run stopped in `step` ends like an unbroken one; return the latter.

    `run` is given a directory and `resume`.
    """
    whole = place / "whole", run(place / "whole", resume=False)
    with stopped_at(Optimizer, "step", step):
        run(place / "stopped", resume=False)
    torch.rand(step + 1)  # a new process has another random state
    assert_same_end(whole, place / "stopped", run(place / "stopped", resume=True))
    return whole


def put_tables(model: PreTrainedModel, bits: int = 2) -> None:
    """Quantize the embedding and the head of a model, in levels that learn."""
    for name in table_names(model):
        weight = model.get_submodule(name).weight.detach()
        spec = table_spec(bits, weight.shape[1])
        put_table(model, name, fit_weight(weight, spec), spec)


def train_tables(place: Path, model: PreTrainedModel) -> Path:
    """Train linears and tables of a student for three steps; return the checkpoint of its end.

    Every table then has other indices and scales, and other levels where these can learn.
    """
    build(place / "cache")
    save_checkpoint(model, TOKENIZER, place / "student")
    parts = {name: {"packed", "scales"} for name in table_names(model)}
    learned = [n for n in parts if fixed_grid(model.get_submodule(n).spec) is None]
    for name in learned:
        parts[name].add("codebook")
    learn = "weights,scales" + ",codebook" * bool(learned)
    settings = config(place, learn=learn, max_steps=3, lr=0.5, lr_scales=0.02, lr_codebook=0.02)
    report = train_student(settings, str(place / "student"), place / "run", resume=False)
    was, now = (load_file(path / "model.safetensors") for path in (place / "student", report.final))
    for name, own in parts.items():
        moved = {p for p in own if not torch.equal(was[f"{name}.{p}"], now[f"{name}.{p}"])}
        assert moved == own, name
    return report.final
