"""`qat demo`: the whole pipeline on the embedded teacher, each stage the verb a user would call."""

import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from qat.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TINY_TEACHER = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-qwen3"
MARKER = "demo.txt"
PROMPT = "Return the number of"
Steps = Annotated[int, Parameter(validator=validators.Number(gte=1))]


@dataclass(frozen=True)
class Student:
    """One line of the demo's table."""

    name: str
    path: Path
    bits_per_weight: float
    numbers: dict


class Demo:
    """Runs verbs, prints the command of each, and keeps what they found."""

    def __init__(self, teacher: Path, out: Path, console: "Console") -> None:
        self.teacher = teacher
        self.out = out
        self.console = console

    def qat(self, *words: object) -> dict:
        """Run one verb in this process; what it found."""
        from qat.cli import run_verb

        tokens = [str(word) for word in words]
        self.say(f"\n[bold]$ qat {shlex.join(tokens)}[/bold]")
        began = time.perf_counter()
        found = run_verb(tokens)
        self.say(f"[dim]{time.perf_counter() - began:.1f} s[/dim]")
        return found

    def say(self, line: str) -> None:
        """Print a line that may be copied: it is never broken to fit the terminal."""
        self.console.print(line, highlight=False, soft_wrap=True)

    def judge(self, name: str, path: Path, bits_per_weight: float) -> Student:
        """Measure one model against the teacher on the held-out split."""
        numbers = self.qat(
            "eval", path, "--teacher", self.teacher, "--cache-dir", self.out / "cache"
        )
        return Student(name, path, bits_per_weight, numbers)


def demo(*, out: Path = Path("demo"), teacher: Path = TINY_TEACHER, steps: Steps = 200) -> dict:
    """Take a small teacher to an exported 2-bit student; about three minutes on two CPU cores.

    Args:
        out: directory for everything that is made; an earlier demo there is replaced.
        teacher: the float model to start from.
        steps: training steps of the 2-bit student.
    """
    from rich.console import Console

    _clear(out, teacher)
    console = Console()
    began = time.perf_counter()
    run = Demo(teacher, out, console)
    students = _quantize_and_train(run, steps)
    final = students[-1].path
    run.qat("export", final, "--to", "dense", "--dtype", "bf16", "--out", out / "dense")
    run.qat("generate", final, "--prompt", PROMPT, "--raw", "--max-new-tokens", 48)
    reported = [out / name for name in ("q4", "q2_init", "q4_run", "q2_run")]
    page = run.qat("report", *reported, "--out", out / "report.html")["page"]
    console.print(_table(students))
    seconds = time.perf_counter() - began
    run.say(f"{seconds:.0f} s in all. Open {page}")
    return {
        "seconds": round(seconds, 1),
        "report": page,
        "kl_nats": {student.name: student.numbers["kl_nats"] for student in students},
    }


def _quantize_and_train(run: Demo, steps: int) -> list[Student]:
    """Cache, Q4, Q2: the teacher and its three students, judged."""
    teacher, out = run.teacher, run.out
    run.qat(
        "cache", "--teacher", teacher, "--data", "stdlib", "--out", out / "cache",
        "--num-sequences", 3000, "--batch-size", 32,
    )  # fmt: skip
    run.qat("cache", "info", out / "cache")
    # steps that two CPU cores take in a third of a second
    train = ["--cache-dir", out / "cache", "--batch-size", 16, "--eval-every", 50]
    train += ["--eval-sequences", 64]
    q4 = run.qat("convert", teacher, "--to", "q4a4", "--out", out / "q4")
    q4_run = run.qat(
        "train", out / "q4", "--learn", "scales,codebook", "--max-steps", 20,
        "--out", out / "q4_run", *train,
    )  # fmt: skip
    q2 = run.qat(
        "convert", q4_run["final"], "--to", "q2a4", "--base", teacher,
        "--calibration", out / "cache", "--calibration-sequences", 128, "--out", out / "q2_init",
    )  # fmt: skip
    q2_run = run.qat(
        "train", out / "q2_init", "--mlp-only", "--max-steps", steps, "--out", out / "q2_run",
        *train,
    )  # fmt: skip
    return [
        run.judge("teacher", teacher, 16.0),
        run.judge("Q4", Path(q4_run["final"]), q4["bits_per_weight"]),
        run.judge("Q2 converted", out / "q2_init", q2["bits_per_weight"]),
        run.judge("Q2 trained", Path(q2_run["final"]), q2["bits_per_weight"]),
    ]


def _clear(out: Path, teacher: Path) -> None:
    """Make `out` an empty directory, if it is free or an earlier demo's.

    Raises:
        ConfigError: it holds something else, or there is no teacher.
    """
    if not (teacher / "config.json").exists():
        raise ConfigError(
            f"teacher={teacher} holds no model; expected a model directory; run from a clone of "
            "the repository or give --teacher"
        )
    if out.exists() and any(out.iterdir()):
        if not (out / MARKER).exists():
            raise ConfigError(
                f"out={out} is not empty and not an earlier demo; choose another --out"
            )
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).write_text("Made by `qat demo`, which may replace this directory.\n")


def _table(students: list[Student]) -> "Table":
    from rich.table import Table

    from qat.models.count import model_bytes

    table = Table(
        "", "KD", "KL", "top-1", "perplexity", "bits/weight", "MB",
        title="On documents that none was trained on; KD and KL in nats a token",
    )  # fmt: skip
    for student in students:
        found = student.numbers
        table.add_row(
            student.name,
            *(f"{found[key]:.3f}" for key in ("kd_nats", "kl_nats", "top1_frac")),
            f"{found['ppl']:.2f}",
            f"{student.bits_per_weight:.2f}",
            f"{model_bytes(student.path) / 1e6:.2f}",
        )
    return table
