"""What choosing bits per module gains over the same bits everywhere, after conversion alone.

    python speedrun/sample_corpus.py --teacher DIR --documents 2000 --out corpus.jsonl
    python speedrun/measure_mixed_bits.py --teacher DIR --corpus corpus.jsonl --work /tmp/mixed \
        --figures figures.jsonl

Each plan is converted, then `--bits-budget` at just its bits per weight. The KL is exact, over the
whole vocabulary, in float32, on documents that neither conversion has seen. The figure is the
smallest gain over the uniform plans; `q2a4` (MLP 2 bits, attention 4) is printed beside them.
"""

import json
from pathlib import Path

from cyclopts import App
from figures import record
from measure_quality import qat

app = App(help=__doc__)
UNIFORM = 'name = "uniform{bits}"\n[[rules]]\npattern = "*"\nspec = {{ bits = {bits} }}\n'


@app.default
def measure(
    *,
    teacher: str,
    corpus: Path,
    work: Path,
    figures: Path,
    sequences: int = 1024,
    held_out: float = 0.1,
    device: str = "auto",
) -> None:
    """Print both KLs for each plan and write `mixed_bits_gain` to FIGURES."""
    cache = work / "cache"
    qat("cache", "--teacher", teacher, "--data", corpus, "--out", cache, "--top-k", 8,
        "--held-out", held_out, "--dtype", "fp32", "--device", device)  # fmt: skip
    plans = {f"uniform{bits}": uniform(work, bits) for bits in (2, 3)} | {"q2a4": "q2a4"}
    common = ["--calibration", cache, "--calibration-sequences", sequences, "--device", device]
    found = {}
    for name, plan in plans.items():
        whole, mixed = work / name, work / f"{name}_mixed"
        before = qat("convert", teacher, "--to", plan, "--out", whole, *common)
        budget = json.loads((whole / "convert_report.json").read_text())["bits_per_weight"]
        after = qat("convert", teacher, "--bits-budget", repr(budget), "--out", mixed, *common)
        kls = [exact_kl(student, teacher, cache, device) for student in (whole, mixed)]
        found[name] = {
            "bits_per_weight": [before["bits_per_weight"], after["bits_per_weight"]],
            "kl_nats": kls,
            "gain_nats": kls[0] - kls[1],
            "predicted_kl_nats": after["predicted_kl_nats"],
            "seconds": [before["seconds"], after["seconds"]],
            "seconds_to_choose": after["seconds_to_choose"],
        }
        print(json.dumps({name: found[name]}), flush=True)
    gain = min(numbers["gain_nats"] for name, numbers in found.items() if name != "q2a4")
    record(figures, "mixed_bits_gain", round(gain, 5), "nats/token", "> 0")


def uniform(work: Path, bits: int) -> Path:
    """A plan file that gives every linear as many bits."""
    path = work / f"uniform{bits}.toml"
    path.write_text(UNIFORM.format(bits=bits))
    return path


def exact_kl(student: Path, teacher: str, cache: Path, device: str) -> float:
    """KL(teacher || student) in nats per token of the cache's held-out split."""
    judge = ["--teacher", teacher, "--cache-dir", cache, "--dtype", "fp32", "--device", device]
    return qat("eval", student, *judge)["kl_nats"]


if __name__ == "__main__":
    app()
