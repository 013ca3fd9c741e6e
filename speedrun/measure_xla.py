"""What PyTorch/XLA computes beside a CPU, and what each step costs it, on XLA's CPU client.

In the environment of .ci/xla, whose tests the cases come from; nothing here ran on a TPU:

PJRT_DEVICE=CPU PYTHONPATH=.:tests .venv-xla/bin/python speedrun/measure_xla.py FIGURES.jsonl
"""

import sys
import tempfile
from pathlib import Path

import figures

from qat.backend import select

DEVICES = 4
LONG = 200
CASES = (
    {"loss": "tail", "learn": "weights,codebook,scales,norms"},
    {"loss": "candidates", "learn": "codebook,scales"},
    {"loss": "sampled", "learn": "weights", "grad_accum_steps": 2},
    {"loss": "tail", "gradient_checkpointing": True},
)
"""Every loss, learning and frozen codes, accumulation and recomputation."""


def main(path: Path) -> None:
    """Write all figures to `path`."""
    select("xla")  # before any backward of the process
    from xla_case import course, largest_difference, make_short_place, over_devices

    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        place = make_short_place(out)

        def difference(**values: object) -> float:
            both = (course(place, out, device, **values) for device in ("xla", "cpu"))
            return largest_difference(*both)

        for dtype, most in (("fp32", "<= 1e-5"), ("bf16", "<= 1e-3")):
            worst = max(difference(dtype=dtype, **case) for case in CASES)
            figures.record(path, f"xla_loss_diff_{dtype}", worst, "nats", most)
        long = course(place, out, "xla", steps=LONG)
        figures.record(path, "xla_compiles_200_steps", long.compiles, "graphs", "2")
        each = long.executions / LONG
        figures.record(path, "xla_executions_per_step", each, "graphs", "1")
        fallbacks = sum(long.fallbacks.values())
        figures.record(path, "xla_host_fallbacks", fallbacks, "operators", "0")
        shared = largest_difference(over_devices(DEVICES, place, out), course(place, out, "xla"))
        figures.record(path, "spmd_loss_diff", shared, "nats", "<= 1e-6")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
