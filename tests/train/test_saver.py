"""Saving behind the step: what is written is the step's own, proven, and never in the way."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from train_case import config, make_trainer

from qat.backend import device as backends
from qat.backend.base import Backend
from qat.backend.copies import KeptCopies
from qat.errors import CheckpointError
from qat.logs import read_json_lines
from qat.models.checkpoint import load_checkpoint
from qat.models.stored_state import packed_state_dict
from qat.train import saver as saving
from qat.train.loop import Trainer
from qat.train.resume import load_training_state
from qat.train.run import RunDirectory, read_state
from qat.train.saver import Saver, problem, prove
from qat.train.start import train_student


@pytest.fixture
def trainer(place: Path, tmp_path: Path) -> Iterator[Trainer]:
    """A trainer after one step, with a saver of its own."""
    made = make_trainer(config(place, max_steps=1), place / "student", tmp_path / "run")
    made.train()
    made.saver = Saver(
        made.run,
        made.student,
        made.judge.tokenizer,
        made.optimizer,
        beside=[made.codes],
        keep=made.config.keep,
        milestone_every=made.config.milestone_every,
        ranks=made.ranks,
    )
    with made.saver:
        yield made


def test_what_changes_after_a_save_is_not_in_it(trainer: Trainer, monkeypatch) -> None:
    expected = packed_state_dict(trainer.student.model)
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    moments = {name: tensor.clone() for name, tensor in trainer.optimizer.state().items()}
    real = saving.write_checkpoint

    def late(*arguments: object) -> None:
        with torch.no_grad():
            for parameter in trainer.optimizer.parameters.values():
                parameter.add_(1.0)
        real(*arguments)

    monkeypatch.setattr(saving, "write_checkpoint", late)
    trainer.saver.save(7, 0.5, is_best=True)
    trainer.saver.finish()
    path = trainer.run.checkpoint_path(7)
    assert trainer.run.pointed("latest") == trainer.run.pointed("best") == path
    found, facts = load_training_state(path)
    assert facts["step"] == 7 and facts["best"] == 0.5 and trainer.saver.saved == 7
    assert all(torch.equal(found[name], tensor) for name, tensor in moments.items())
    stored = safetensors.torch.load_file(path / "model.safetensors")
    assert all(torch.equal(stored[name], expected[name]) for name in stored)
    assert problem(path) is None and load_checkpoint(path).hf_quantizer.packed is None


def test_a_file_that_reads_otherwise_than_written_is_found(tmp_path: Path, monkeypatch) -> None:
    written = {"a": torch.tensor([1.0, 3.0]), "b": torch.zeros(0)}
    safetensors.torch.save_file(written, tmp_path / "x.safetensors")
    (tmp_path / "trainer").mkdir()
    prove(tmp_path, written)
    meant = {"a": torch.tensor([1.0, 2.0])}
    with pytest.raises(CheckpointError, match="x.safetensors: a reads otherwise"):
        prove(tmp_path, meant)
    with pytest.raises(CheckpointError, match="a reads otherwise"):
        prove(tmp_path, {"a": written["a"].double()})
    with pytest.raises(CheckpointError, match="a reads otherwise"):  # the same bytes in other rows
        prove(tmp_path, {"a": written["a"][:, None]})
    with pytest.raises(CheckpointError, match="b reads otherwise"):
        prove(tmp_path, {"b": torch.zeros(0, 3)})

    def damage(path: Path) -> None:
        path.write_bytes(path.read_bytes().replace(b"F32", b"F33"))

    monkeypatch.setattr(saving, "_forget_pages", damage)
    with pytest.raises(CheckpointError, match="header reads otherwise"):
        prove(tmp_path, written)


def test_copies_on_the_host_keep_ties() -> None:
    weight = torch.arange(6.0).view(2, 3)
    tensors = {"a": weight, "b": weight, "c": weight.t(), "d": torch.zeros(0), "e": torch.zeros(0)}
    backend = backends.select("cpu")
    copies, copying = backend.copied_to_host(tensors)
    copying.hold()
    copying.wait()
    assert copies["a"] is copies["b"] and copies["a"].data_ptr() != weight.data_ptr()
    assert copies["c"].is_contiguous() and torch.equal(copies["c"], weight.t())
    assert copies["d"].numel() == copies["e"].numel() == 0
    weight.zero_()
    assert copies["a"].sum() == 15


def test_small_tensors_travel_together() -> None:
    many = {str(n): torch.full((n, 3), float(n)) for n in range(4)}
    more = {"scalar": torch.tensor(7.0), "bytes": torch.arange(5, dtype=torch.uint8)}
    large = {"large": torch.randn(2**18 + 1)}
    tensors = many | more | large
    copies, copying = backends.select("cpu").copied_to_host(tensors)
    copying.wait()
    assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())
    assert copies["1"].untyped_storage().data_ptr() == copies["3"].untyped_storage().data_ptr()
    assert copies["large"].data_ptr() != tensors["large"].data_ptr()
    assert not any(copies[name].data_ptr() == tensors[name].data_ptr() for name in ("1", "bytes"))


def test_a_copy_is_made_once_and_anew_after_a_change() -> None:
    kept, tensor = KeptCopies(), torch.zeros(3)
    assert kept.missing({"a": tensor}) == {"a": tensor}
    kept.keep({"a": tensor}, {"a": tensor.clone()})
    assert not kept.missing({"a": tensor.detach()})
    assert kept.missing({"a": tensor.clone()}) and kept.missing({"a": tensor[:2]})
    tensor.add_(1)
    assert kept.missing({"a": tensor}) and kept.of(["a"])["a"].sum() == 0


@pytest.mark.parametrize("learn", ["scales,codebook", "weights,scales,codebook", "norms"])
def test_what_does_not_learn_is_copied_once(
    place: Path, tmp_path: Path, monkeypatch, learn: str
) -> None:
    """The model counts as not on the host, as on a GPU, so that its tensors are no copies."""
    monkeypatch.setattr(saving, "_is_on_host", lambda _: False)
    settings = config(place, max_steps=3, save_every=1, keep=9, learn=learn)
    made = make_trainer(settings, place / "student", tmp_path / "run")
    seen, counts = {}, []
    copied = type(made.backend).copied_to_host
    real = made.saver.save

    def count(backend: Backend, tensors: dict) -> tuple:
        counts.append(set(tensors))
        return copied(backend, tensors)

    def save(step: int, best: float, *, is_best: bool) -> None:
        state = packed_state_dict(made.student.model)
        seen[step] = {name: tensor.clone() for name, tensor in state.items()}
        real(step, best, is_best=is_best)

    monkeypatch.setattr(type(made.backend), "copied_to_host", count)
    made.saver.save = save
    made.train()
    still, *moving = counts
    assert still and len(moving) == 4 and not any(still & names for names in moving)
    del seen[0]  # the untrained student's goes when a step is better
    for step, expected in seen.items():
        stored = safetensors.torch.load_file(made.run.checkpoint_path(step) / "model.safetensors")
        assert all(torch.equal(stored[name], expected[name]) for name in stored)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"save_every": 1, "milestone_every": 2, "keep": 1}, [2, 4, 5]),
        ({"save_every": 0}, [5]),
        ({"save_every": 1, "keep": 2, "eval_every": 2}, [2, 4, 5]),  # the best one is that of 2
    ],
)
def test_what_is_kept(
    place: Path, tmp_path: Path, monkeypatch, values: dict[str, int], kept: list[int]
) -> None:
    scores = iter([0.5, 0.2, 0.3, 0.4])
    monkeypatch.setattr("qat.train.loop.score", lambda _: next(scores))
    settings, out = config(place, **{"eval_every": 9, "max_steps": 5, **values}), tmp_path / "run"
    train_student(settings, str(place / "student"), out, resume=False)
    left = sorted((out / "checkpoints").iterdir())
    assert [read_state(path)["step"] for path in left] == kept
    assert [path.name for path in left] == [f"step-{step:06d}" for step in kept]


def test_leavings_of_a_killed_run_go(place: Path, tmp_path: Path) -> None:
    settings = config(place, max_steps=1)
    train_student(settings, str(place / "student"), tmp_path / "run", resume=False)
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "run/.best.partial").touch()
    for name in (".step-000009.partial-abcd1234", ".step-000001.old-"):
        (tmp_path / "run/checkpoints" / name / "trainer").mkdir(parents=True)
    train_student(settings, str(place / "student"), tmp_path / "run", resume=True)
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "run/events.jsonl"])


def test_a_run_whose_disk_is_full_says_so_and_goes_on(
    place: Path, tmp_path: Path, monkeypatch
) -> None:
    settings, out = config(place, max_steps=4, save_every=1), tmp_path / "run"
    real = saving.write_checkpoint

    def full_in_the_end(*arguments: object) -> None:
        if "step-000003" in str(arguments[2]):
            raise OSError(28, "No space left on device")
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_checkpoint", full_in_the_end)
        message = r"step-000003: writing stopped \(.*No space.*\); nothing new was left there: free"
        with pytest.raises(CheckpointError, match=message):
            train_student(settings, str(place / "student"), out, resume=False)
    (event,) = read_json_lines(out / "events.jsonl")
    assert event["kind"] == "save_failed" and "No space left" in event["error"]
    assert (out / "latest").read_text() == "checkpoints/step-000002\n"
    assert [path.name for path in RunDirectory(out).checkpoints()][-1] == "step-000002"
    assert train_student(settings, str(place / "student"), out, resume=True).steps == 4


def test_the_untrained_student_competes(place: Path, tmp_path: Path, monkeypatch) -> None:
    """Steps that make the student worse: what it was at step 0 is what the run hands on."""
    out, source, scores = tmp_path / "run", place / "student", iter([0.3, 0.4, 0.5])
    monkeypatch.setattr("qat.train.loop.score", lambda _: next(scores))
    settings = config(place, max_steps=4, eval_every=2, save_every=2, keep=1)
    report = train_student(settings, str(source), out, resume=False)
    assert (report.best, report.best_step, report.steps) == (0.3, 0, 4)
    assert RunDirectory(out).pointed("best").name == "step-000000"
    assert sorted(path.name for path in (out / "checkpoints").iterdir())[1:] == ["step-000004"]
    ours, theirs = (
        safetensors.torch.load_file(directory / "model.safetensors")
        for directory in (report.final, source)
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert json.loads((out / "metrics.json").read_text())["best_step"] == 0
