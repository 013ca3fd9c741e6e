"""How close a 2-bit student comes to its teacher: convert, train over several seeds, judge.

    python speedrun/sample_corpus.py --teacher DIR --documents 22000 --top-p 0.9 --out corpus.jsonl
    python speedrun/measure_quality.py --teacher DIR --corpus corpus.jsonl --name stories15m \
        --work /tmp/quality --figures figures.jsonl

MLPs go to 2 bits, attention to 4 (groups of 32). Training is 1,000 steps of 64 x 64 tokens. The KL
is exact, over the whole vocabulary, in float32, on documents that nothing was trained on.
"""

import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cyclopts import App
from figures import record

app = App(help=__doc__)
NUMBERS = ("kl_nats", "kd_nats", "top1_frac", "ppl", "teacher_ppl", "num_tokens")


@app.default
def measure(
    *,
    teacher: str,
    corpus: Path,
    work: Path,
    figures: Path,
    name: str,
    seeds: int = 3,
    max_steps: int = 1000,
    device: str = "auto",
) -> None:
    """Write `NAME_kl_converted` and `NAME_kl_trained` (mean over SEEDS) to FIGURES."""
    cache, student = work / "cache", work / "q2a4"
    where = ["--device", device]
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(
                qat, "cache", "--teacher", teacher, "--data", corpus, "--out", cache,
                "--top-k", 128, "--held-out", 0.02, "--batch-size", 256, "--dtype", "fp32", *where,
            ),
            pool.submit(
                qat, "convert", teacher, "--to", "q2a4", "--out", student, "--calibration", corpus,
                "--calibration-sequences", 1024, "--calibration-length", 64, *where,
            ),
        ]  # fmt: skip
        converted = [job.result() for job in jobs][1]
        judge = ["--teacher", teacher, "--cache-dir", cache, "--dtype", "fp32",
                 "--batch-size", 128, *where]  # fmt: skip
        before = qat("eval", student, *judge)
        runs = [work / f"seed{seed}" for seed in range(seeds)]
        trained = pool.map(
            lambda seed: qat(
                "train", student, "--cache-dir", cache, "--out", runs[seed], "--seed", seed,
                "--batch-size", 64, "--max-steps", max_steps, "--eval-every", 250,
                "--save-every", 250, "--log-every", 50, *where,
            ),
            range(seeds),
        )  # fmt: skip
        list(trained)
    after = [qat("eval", run, *judge) for run in runs]
    kl = [found["kl_nats"] for found in after]
    spread = statistics.stdev(kl) if seeds > 1 else None
    record(figures, f"{name}_kl_converted", round(before["kl_nats"], 4), "nats/token", "<= 0.8")
    record(
        figures,
        f"{name}_kl_trained",
        round(statistics.mean(kl), 4),
        "nats/token",
        "<= 0.15",
        runs=seeds,
        spread=spread,
    )
    summary = {
        "bits_per_weight": converted["bits_per_weight"],
        "converted": {key: before[key] for key in NUMBERS},
        "trained": [{key: found[key] for key in NUMBERS} for found in after],
    }
    print(json.dumps(summary, indent=1))


def qat(*words: object) -> dict:
    """Run one verb as a user would; its last line."""
    command = [sys.executable, "-m", "qat", *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


if __name__ == "__main__":
    app()
