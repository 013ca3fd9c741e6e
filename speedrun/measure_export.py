"""Converts a model for every target, trains a little, exports it and reads it back.

Each target's own library reads what was written: transformers (dense, packed), mlx-lm (mlx),
transformers with compressed-tensors or torchao, gguf (dequantized) and coreml (decompressed, the
program's values inferred). The largest difference of a logit from the checkpoint is recorded, and
of NVFP4 that of a weight too.

python speedrun/measure_export.py MODEL [--cache-dir CACHE] --figures FILE.jsonl
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from figures import record

from qat.cli import run_verb
from qat.export.targets import TARGETS, load_target
from qat.models.load import load_model
from qat.nn.step import quant_linears

STEPS = 3
GOALS = {"mlx": 1e-3, "coreml": 1e-3, "coreml_fp16": 0.1, "anemll": 1e-3}
"""The largest difference that another order of sums (of float16 weights, in the second case) may
make where logits are around 10; everywhere else they must be equal to the bit."""


class Shipped(NamedTuple):
    """One export."""

    target: str
    dtype: str
    difference: float
    bits: float
    megabytes: float
    seconds: float
    weights: float | None
    """The largest difference of a weight, where that is measured."""

    @property
    def figure(self) -> str:
        """The target, with its dtype where that is not float32."""
        return self.target if self.dtype == "fp32" else f"{self.target}_{self.dtype}"


def main() -> None:
    """Ship the model everywhere, print a table, and record the differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a float model")
    parser.add_argument("--plan", default="q2a4")
    parser.add_argument("--cache-dir", help=f"teacher cache to train {STEPS} steps on in between")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    failed = 0
    for name in arguments.targets.split(","):
        for shipped in ship(name, arguments):
            goal = GOALS.get(shipped.figure, GOALS.get(name, 0.0))
            print(
                f"{shipped.figure:20} differs by {shipped.difference:.3g} (goal {goal:g}), "
                f"{shipped.bits:.3f} bits a weight, {shipped.megabytes:.1f} MB, "
                f"{shipped.seconds:.1f} s"
            )
            failed += not shipped.difference <= goal
            if arguments.figures:
                figure = f"export_max_logit_diff_{shipped.figure}"
                wished = f"<= {goal:g}" if goal else "== 0"
                record(arguments.figures, figure, shipped.difference, "logit", wished)
                if shipped.weights is not None:
                    figure = f"{shipped.figure}_roundtrip_diff"
                    record(arguments.figures, figure, shipped.weights, "weight", "== 0")
            failed += bool(shipped.weights)
    raise SystemExit(failed)


def ship(name: str, arguments: argparse.Namespace) -> list[Shipped]:
    """Convert, train and export for one target, in float32 and what else it should hold."""
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "converted")
        words = ["convert", arguments.model, "--to", arguments.plan, "--for", name]
        run_verb([*words, "--out", str(source)])
        if arguments.cache_dir:
            source = train(source, Path(place, "run"), arguments.cache_dir)
        dtypes = ("fp32", "fp16") if load_target(name).COMPARED != "bits" else ("fp32",)
        return [export(name, source, Path(place, dtype), dtype) for dtype in dtypes]


def train(student: Path, run: Path, cache: str) -> Path:
    """A few steps on weights, scales and, where levels may learn, the codebook."""
    report = json.loads((student / "convert_report.json").read_text(encoding="utf-8"))
    has_levels = any(module["codebook"] == "lut" for module in report["modules"])
    learn = "weights,scales,codebook" if has_levels else "weights,scales"
    words = ["train", str(student), "--cache-dir", cache, "--max-steps", str(STEPS)]
    words += ["--warmup-steps", "0", "--lr-scales", "0.02", "--lr-codebook", "0.02"]
    run_verb([*words, "--batch-size", "4", "--learn", learn, "--out", str(run)])
    return run


def export(name: str, source: Path, out: Path, dtype: str) -> Shipped:
    """One export, read back."""
    began = time.perf_counter()
    words = ["export", str(source), "--to", name, "--dtype", dtype, "--out", str(out)]
    found = run_verb(words)
    return Shipped(
        target=name,
        dtype=dtype,
        difference=found["logits_max_diff"],
        bits=found["linear_bits"],
        megabytes=found["bytes"] / 1e6,
        seconds=time.perf_counter() - began,
        weights=weight_difference(source, out) if name == "nvfp4" else None,
    )


def weight_difference(student: Path, written: Path) -> float:
    """The largest difference of a weight, read as a float, from that of the student."""
    packed, read = (
        load_model(str(path), device="cpu", dtype="fp32").model for path in (student, written)
    )
    return max(
        (read.get_submodule(name).weight - linear.quantized_weight()).abs().max().item()
        for name, linear in quant_linears(packed).items()
    )


if __name__ == "__main__":
    main()
