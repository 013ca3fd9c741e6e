"""How well a step over a mixture of experts uses the device, beside the dense 0.6B step.

Both take turns in one run: frozen codes, scales and codebooks learn from the exact loss. MFU counts
the experts that a token is sent to, so that what forming and pulling back all others costs shows up
as a lower one. The mixture has as many layers as `--layers` says; a row a turn tells them.

python speedrun/measure_moe.py --out runs/moe
"""

import gc
import statistics
from collections import defaultdict
from pathlib import Path

from cyclopts import App
from speed_case import EXACT, FROZEN, Figure, record, results_in, settled, show, timed_row

from qat.bench.run import prepare, time_ours
from qat.bench.student import Ours
from qat.logs import configure

app = App(help=__doc__)
RATIO = Figure("moe_step_mfu_over_dense", "x", ">= 0.6")


@app.default
def measure(
    *,
    out: Path,
    dense: str = "qwen3-0.6b",
    mixture: str = "qwen3-30b-a3b",
    layers: int = 48,
    batch_size: int = 512,
    mixture_batch_size: int = 512,
    device: str = "auto",
    rounds: int = 2,
) -> None:
    """Write rows, a table and the figure to OUT.

    Parameters
    ----------
    layers
        Of the mixture, which keeps the formed weights of all its experts.
    mixture_batch_size
        Sequences of its step, in which layers are recomputed.
    """
    configure()
    common = FROZEN | EXACT | {"device": device}
    recomputed = {"layers": layers, "gradient_checkpointing": True}
    cases = {
        dense: settled(**common, batch_size=batch_size),
        mixture: settled(**common, **recomputed, batch_size=mixture_batch_size),
    }
    found = defaultdict(list)
    with results_in(out, cases[dense]) as results:
        rows = []
        for number in range(rounds):
            for shape, config in cases.items():
                setting, student = prepare(config, shape)
                timing = time_ours(setting, Ours(student, config), config.batch_size)
                rows.append(timed_row(setting, shape, timing, round=number))
                results.add(**rows[-1])
                if timing is not None:
                    share = (
                        setting.flops.total * timing.tokens_per_s / setting.roofline.matmul_flops
                    )
                    found[shape].append(share)
                del setting, student
                gc.collect()
        results.finish()
        show(rows, ("Student", "case", "{}"), ("Layers", "layers", "{}"))
        pairs = list(zip(found[mixture], found[dense], strict=False))
        if pairs:
            record(results.path, RATIO, [mine / theirs for mine, theirs in pairs], digits=3)
            print(f"of the matmul rate: {statistics.median(found[mixture]):.3f} and "
                  f"{statistics.median(found[dense]):.3f}")  # fmt: skip


if __name__ == "__main__":
    app()
