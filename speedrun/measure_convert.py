"""The time of the default conversion of a model, calibrated on a cache.

    python speedrun/measure_convert.py real MODEL CACHE --figure coder_convert_s_h100

It is that of all of `convert_model`, from the weights and tokens in memory to the quantized model
in memory.
"""

import json
import time
from pathlib import Path

from cyclopts import App
from figures import record

from qat.backend.device import select
from qat.convert.calibration_data import calibration_batches
from qat.convert.config import ConvertConfig
from qat.convert.convert import convert_model
from qat.models.load import load_model, load_tokenizer

app = App(help=__doc__)
GOAL = "<= 30"


@app.command
def real(
    model: str,
    cache: str,
    *,
    figure: str,
    to: str = "q2a4",
    device: str = "auto",
    figures: Path | None = None,
) -> None:
    """Print seconds of the default conversion of MODEL, calibrated on CACHE, and record them."""
    backend = select(device)
    config = ConvertConfig(to=to, calibration=cache, device=device)
    tokenizer = load_tokenizer(model)

    def seconds_of(plan: ConvertConfig) -> float:
        student = load_model(model, device=device, dtype="fp32")
        tokens = calibration_batches(cache, plan, student, tokenizer)
        backend.synchronize()
        began = time.perf_counter()
        convert_model(student, plan, calibration=tokens)
        backend.synchronize()
        return time.perf_counter() - began

    # the first conversion of a process loads libraries and compiles kernels
    seconds_of(config.model_copy(update={"calibration_sequences": 1}))
    seconds = seconds_of(config)
    print(json.dumps({"model": model, "to": to, "seconds": seconds}))
    record(figures, figure, round(seconds, 1), "s", GOAL)


if __name__ == "__main__":
    app()
