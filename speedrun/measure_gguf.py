"""The time to open a GGUF file, model and tokenizer, the first time and from then on.

Every opening is a process of its own, and the first one finds an empty cache. The clock begins when
all is imported and stops when the model is on its device.

python speedrun/measure_gguf.py MODEL.gguf --figures FILE.jsonl
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cyclopts import App
from figures import ROOT, record

app = App(help=__doc__)
GOAL = "<= 10"
OPENED = """
import json, pathlib, sys, time
from qat.models import gguf_cache
gguf_cache.GGUF_CACHE = pathlib.Path(sys.argv[2])
from qat.backend.device import select
from qat.models.load import load_model, load_tokenizer
device = select("auto")
start = time.perf_counter()
tokenizer = load_tokenizer(sys.argv[1])
middle = time.perf_counter()
model = load_model(sys.argv[1])
device.synchronize()
print(json.dumps({"tokenizer_s": middle - start, "model_s": time.perf_counter() - middle}))
"""


@app.default
def main(model: Path, *, figures: Path | None = None, runs: int = 3) -> None:
    """Open MODEL once without a cache and `runs` times with what that left; record the median."""
    with tempfile.TemporaryDirectory() as kept:
        taken = [opened(model.absolute(), Path(kept)) for _ in range(runs + 1)]
    for number, seconds in enumerate(taken):
        print("first" if number == 0 else f"again {number}", json.dumps(seconds))
    first_s, *again_s = [sum(seconds.values()) for seconds in taken]
    median, spread = statistics.median(again_s), statistics.pstdev(again_s)
    print(f"{first_s:.1f} s the first time, {median:.1f} s from then on")
    record(figures, "gguf_open_s", round(first_s, 2), "s", "")
    how = {"goal": GOAL, "runs": runs, "spread": round(spread, 2)}
    record(figures, "gguf_reopen_s", round(median, 2), "s", **how)


def opened(model: Path, kept: Path) -> dict[str, float]:
    """Seconds that a process takes for the tokenizer, then the model, with a cache in `kept`."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OPENED, str(model), str(kept)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    app()
