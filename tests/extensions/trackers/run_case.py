"""Run directories as a trainer fills them, without training."""

import json
from pathlib import Path

RECIPE = '[train]\nstudent = "q2"\nlr = 0.01\nsample_prompt = "The"\n'


def begin(run: Path, commit: str = "0123abc") -> None:
    """The files that a run begins with, and that a resumed one replaces."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "recipe.toml").write_text(RECIPE)
    partial = run / ".run.json.partial"
    partial.write_text(json.dumps({"device": "cpu", "commit": commit}))
    partial.replace(run / "run.json")


def write_steps(run: Path, first: int, last: int) -> None:
    """Lines of the steps `first` to `last`, judged at every second one."""
    for step in range(first, last + 1):
        line = {"kind": "train", "step": step, "loss_nats": loss(step), "valid_tokens": 64}
        add_line(run / "metrics.jsonl", **line)
        beat = {"tokens_per_s": 1000.0 + step, "peak_gib": None, "compiled": False}
        add_line(run / "heartbeat-rank0.jsonl", step=step, **beat)
        if step % 2 == 0:
            verdict = {"kl_tail_nats": loss(step) / 2, "sample": f"text of {step}"}
            add_line(run / "metrics.jsonl", kind="eval", step=step, **verdict)


def cut(run: Path, step: int) -> None:
    """Drop the lines after `step`, as a resumed run does first."""
    for name in ("metrics.jsonl", "heartbeat-rank0.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(x for x in lines if json.loads(x)["step"] <= step))


def loss(step: int) -> float:
    """A loss that tells its step."""
    return 1 / (1 + step)


def add_line(path: Path, **values: object) -> None:
    """Append one JSON object."""
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")
