"""llama.cpp's own files of a model, which `qat bench gguf` compares ours with, and its figures.

The programs llama-imatrix, llama-quantize and llama-perplexity come from the sources inside the
package llama-cpp-python, whose library the bench runs: DIR is where they were built.

python speedrun/measure_gguf_files.py make MODEL --tools DIR --text LEARNED.txt --out OUT
qat bench gguf OUT/float/model.gguf EXPORT.gguf ... --against OUT/*.gguf --text TEXT --out RESULTS
python speedrun/measure_gguf_files.py check RESULTS --tools DIR --figures FILE.jsonl
python speedrun/measure_gguf_files.py figures MODEL=RESULTS ... --figures FILE.jsonl
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from cyclopts import App
from figures import record

from qat.extensions.bench.results import WHOLE
from qat.extensions.lab.gguf_files import OTHER, OURS, float_file

TYPES = ("Q4_K_M", "Q3_K_S", "Q2_K", "IQ3_XXS", "IQ2_M", "IQ2_XXS")
MEAN_KLD = re.compile(r"^Mean +KLD: +(\S+) \S+ +(\S+)$", re.M)
KEPT = ("megabytes", "bits_per_weight", "types", "num_tokens", "kl_stderr_nats")
"""What a figure says of a file beside its KL."""
MODELS, SIZES = 2, 2
"""Students that the ratio is the worst of: so many models, and so many sizes of each."""
app = App(help=__doc__)


@app.command
def make(model: str, *, tools: Path, text: Path, out: Path, chunks: int = 64) -> None:
    """Write MODEL as floats, its importance matrix over TEXT, and a file of each type.

    Rows that 256 does not divide have no K or IQ type: llama-quantize takes the next larger one,
    which the table of the bench shows. A type that it does not make at all is printed.
    """
    (out / "float").mkdir(parents=True)
    floats, matrix = float_file(model, out / "float"), out / "imatrix.gguf"
    words = ["-f", text, "-o", matrix, "-c", 512, "--chunks", chunks]
    (out / "imatrix.log").write_text(run(tools / "llama-imatrix", "-m", floats, *words))
    for name in TYPES:
        words = ["--imatrix", matrix, floats, out / f"{name.lower()}.gguf", name]
        try:
            log = run(tools / "llama-quantize", *words)
        except subprocess.CalledProcessError as error:
            print(f"{name} cannot be made: {error.stdout.splitlines()[-1]}")
            (out / f"{name.lower()}.gguf").unlink(missing_ok=True)
            log = error.stdout
        (out / f"{name.lower()}.log").write_text(log)


@app.command
def check(results: Path, *, tools: Path, figures: Path | None = None) -> None:
    """Compare each mean KLD of RESULTS with what llama-perplexity finds on the same contexts.

    The figure is the largest difference, in standard errors that llama-perplexity states. It reads
    a context at a time without flash attention, as the bench does: with its defaults a KL of 0.032
    moved by 1.4 %.
    """
    whole = read(results)
    config, program = whole["environment"]["config"], tools / "llama-perplexity"
    worst, alike = 0.0, ("-fa", "off", "-b", config["context"])
    with tempfile.TemporaryDirectory(dir=results) as place:
        base = Path(place, "teacher.kld")
        words = [
            "-f",
            config["text"],
            "-c",
            config["context"],
            "--chunks",
            config["contexts"] or -1,
        ]
        run(program, "-m", whole["teacher"], *words, *alike, "--kl-divergence-base", base)
        for row in whole["rows"]:
            words = ["-m", row["file"], *alike, "--kl-divergence-base", base, "--kl-divergence"]
            found = MEAN_KLD.search(run(program, *words))
            mean, error = map(float, found.groups())
            worst = max(worst, abs(row["kl_nats"] - mean) / error)
            print(f"{row['case']}: {row['kl_nats']:.6f}, llama-perplexity {mean} +- {error}")
    print(f"at most {worst:.3f} standard errors apart")
    unit, runs = "standard errors", len(whole["rows"])
    record(figures, "gguf_kld_vs_llama_perplexity", round(worst, 4), unit, "<= 1", runs=runs)


@app.command(name="figures")
def write_figures(*named: str, figures: Path) -> None:
    """Record the KL of every file in MODEL=RESULTS, and the worst ratio of ours to the best."""
    ratios = []
    for model, results in (each.split("=", 1) for each in named):
        whole = read(Path(results))
        names = "command", "commit", "device"
        measured = {name: str(whole["environment"][name]) for name in names}
        for row in whole["rows"]:
            more = measured | {name: row[name] for name in KEPT}
            stem = f"gguf_kl_{model}_{row['case']}".lower().replace("-", "_")
            record(figures, stem, round(row["kl_nats"], 6), "nats", "stated", measured=more)
        ratios.append([*whole["ratios"].values()])
        print(f"{model}: {whole['ratios']}")
    if len(ratios) < MODELS or min(map(len, ratios)) < SIZES:
        print(f"no ratio is recorded: it takes {SIZES} students of {MODELS} models")
        return
    worst = max(max(each) for each in ratios)
    unit, runs = "x the best at no more MB", sum(map(len, ratios))
    record(figures, "gguf_kl_ratio_equal_mb", round(worst, 4), unit, "<= 0.5", runs=runs)


def read(results: Path) -> dict[str, Any]:
    """Return the JSON file of a directory that `qat bench gguf` wrote."""
    whole = json.loads((results / WHOLE).read_text(encoding="utf-8"))
    assert {row["kind"] for row in whole["rows"]} <= {OURS, OTHER}, results
    return whole


def run(program: Path, *words: object) -> str:
    """Return what a program of llama.cpp prints, on both streams."""
    threads = ["-t", torch.get_num_threads()] if program.name != "llama-quantize" else []
    done = subprocess.run(
        [program, *map(str, [*words, *threads])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    app()
