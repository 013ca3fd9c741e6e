"""What PyTorch/XLA computes beside a CPU, and what each step costs it, on XLA's CPU client.

In the environment of .ci/xla, whose tests the cases come from; nothing here ran on a TPU:

PJRT_DEVICE=CPU PYTHONPATH=.:tests .venv-xla/bin/python speedrun/measure_xla.py FIGURES.jsonl
"""

import sys
import tempfile
from pathlib import Path

import figures

from qat.backend.device import select

DEVICES = 4
LONG = 200
ALL = "weights,codebook,scales,norms"
CASES = {
    "short": (
        {"loss": "tail", "learn": ALL},
        {"loss": "candidates", "learn": "codebook,scales"},
        {"loss": "sampled", "learn": "weights", "grad_accum_steps": 2},
        {"loss": "reverse_kl,jsd,cakld,hard_ce"},
        {"loss": "tail", "gradient_checkpointing": True},
    ),
    "mixed": ({"learn": ALL},),
    "adapted": ({"learn": "lora,norms"},),
    "sparse": ({"learn": "weights,gates"},),
    "taught": ({"loss": "kl,reverse_kl,jsd,cakld,hard_ce"},),
}
"""Every loss, learning and frozen codes, accumulation and recomputation; students of every make."""
IN_FLOAT32 = ("taught",)
"""A teacher beside the student, in bfloat16, changes its losses by more on a CPU too (1.2e-3)."""


class Differences:
    """Courses on XLA beside those on the CPU, and the operators that the host computed in them."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._places: dict[str, Path] = {}
        self.fallbacks = 0

    def place(self, name: str) -> Path:
        """The place called `name`, made when it is first asked for."""
        import xla_case

        if name not in self._places:
            make = getattr(xla_case, f"make_{name}_place")
            self._places[name] = make(self._out / name)
        return self._places[name]

    def largest(self, dtype: str) -> float:
        """Over all cases and steps, nats."""
        names = [name for name in CASES if dtype == "fp32" or name not in IN_FLOAT32]
        each = [(name, values) for name in names for values in CASES[name]]
        return max(self._one(name, dtype=dtype, **values) for name, values in each)

    def _one(self, name: str, **values: object) -> float:
        from xla_case import course, largest_difference

        place = self.place(name)
        ours, theirs = (course(place, self._out, device, **values) for device in ("xla", "cpu"))
        self.fallbacks += sum(ours.fallbacks.values())
        return largest_difference(ours, theirs)


def cache_fallbacks(out: Path) -> int:
    """Operators that the host computes while a cache is built."""
    from cache_case import build, teacher

    xla, asked = select("xla"), teacher()
    before = sum(xla.host_fallbacks().values())
    xla.place(asked.model)
    build(out, teacher=asked)
    return sum(xla.host_fallbacks().values()) - before


def shared_difference(place: Path, out: Path) -> float:
    """Between one device and several, latent weights whole or shared, nats."""
    import xla_sharded_case
    from xla_case import Course, course, largest_difference, over_devices, told_by

    told = told_by(Path(xla_sharded_case.__file__), place, out, devices=DEVICES)
    several = over_devices(DEVICES, place, out), Course(*told["course"])
    one = course(place, out, "xla")
    return max(largest_difference(each, one) for each in several)


def main(path: Path) -> None:
    """Write all figures to `path`."""
    select("xla")  # before any backward of the process
    from xla_case import course

    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        differences = Differences(out)
        for dtype, most in (("fp32", "<= 1e-5"), ("bf16", "<= 1e-3")):
            worst = differences.largest(dtype)
            figures.record(path, f"xla_loss_diff_{dtype}", worst, "nats", most)
        place = differences.place("short")
        long = course(place, out, "xla", steps=LONG)
        figures.record(path, "xla_compiles_200_steps", long.compiles, "graphs", "2")
        each = long.executions / LONG
        figures.record(path, "xla_executions_per_step", each, "graphs", "1")
        fallbacks = differences.fallbacks + sum(long.fallbacks.values())
        fallbacks += cache_fallbacks(out / "cache")
        figures.record(path, "xla_host_fallbacks", fallbacks, "operators", "0")
        shared = shared_difference(place, out)
        figures.record(path, "spmd_loss_diff", shared, "nats", "<= 1e-6")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
