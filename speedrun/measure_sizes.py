"""Sizes of GGUF files before and after a preset: what a user gets who gives no other flag.

Each model is converted by the preset for llama.cpp, without calibration, which changes no size, and
exported.

python speedrun/measure_sizes.py coder=CODER.gguf smollm2=SMOLLM2.gguf --figures FILE.jsonl
"""

import tempfile
from pathlib import Path

from cyclopts import App
from figures import record

from qat.cli import run_verb

GOALS = {"coder": 280, "smollm2": 60}  # MB of the file that is written, by name of the model
PRESET = "q2a4"
app = App(help=__doc__)


@app.default
def main(models: list[str], *, figures: Path | None = None, device: str = "auto") -> None:
    """Print a line for each NAME=MODEL and record `NAME_gguf_mb_default`."""
    for named in models:
        name, _, model = named.partition("=")
        found = exported(model, device)
        megabytes = found["bytes"] / 1e6
        print(
            f"{name}: {found['source_megabytes']:.1f} MB become {megabytes:.1f} MB, "
            f"{found['bits_per_weight']:.3f} bits per weight ({found['linear_bits']:.3f} of "
            "linears)",
            flush=True,
        )
        goal = f"<= {GOALS[name]}" if name in GOALS else ""
        record(figures, f"{name}_gguf_mb_default", round(megabytes, 2), "MB", goal)


def exported(model: str, device: str) -> dict[str, object]:
    """Return the report of `qat export` on the GGUF file that the preset makes of `model`."""
    with tempfile.TemporaryDirectory() as folder:
        student = Path(folder, "student")
        flags = ("--to", PRESET, "--for", "gguf", "--device", device, "--out", student)
        run_verb(["convert", model, *map(str, flags)])
        out = Path(folder, "out")
        return run_verb(["export", str(student), "--to", "gguf", "--out", str(out)])


if __name__ == "__main__":
    app()
