"""The time of the default conversion of a model, calibrated on a cache.

    python speedrun/measure_convert.py real MODEL CACHE --figure coder_convert_s_h100 --phases

It is that of all of `convert_model`, from the weights and tokens in memory to the quantized model
in memory.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import patch

from cyclopts import App
from figures import record

from qat.backend.base import Backend
from qat.backend.device import select
from qat.convert.calibration_data import calibration_batches
from qat.convert.config import ConvertConfig
from qat.convert.convert import convert_model
from qat.models.load import load_model, load_tokenizer

app = App(help=__doc__)
GOAL = "<= 30"
PHASES = {
    "massive tokens": "qat.convert.calibrate._Rows",
    "moments": "qat.convert.calibrate._MeanOuter.add",
    "block outputs": "qat.convert.calibrate._Block.outputs",
    "fit alone": "qat.quant.error_feedback.fit_weight",
    "k-means (of it)": "qat.quant.fit.weighted_kmeans",
    "seeds of codewords (of it)": "qat.quant.fit.start_codewords",
    "levels or codewords (of it)": "qat.quant.fit.refit_levels",
    "nearest codewords, by kernel (of it)": "qat.kernels.column_sweep.nearest_by_kernel",
    "feedback": "qat.quant.error_feedback.feed_back",
    "Cholesky (of it)": "qat.quant.error_feedback.feedback_coupling",
    "levels": "qat.quant.error_feedback.refit_levels",
    "descent": "qat.quant.error_feedback.descend",
    "packing": "qat.convert.quantize._Conversion.put",
    "report": "qat.convert.quantize._Conversion.reports",
}
"""Functions that `--phases` times.

A phase "of it" is part of the last phase above it that is not.
"""


@app.command
def real(
    model: str,
    cache: str,
    *,
    figure: str,
    to: str = "q2a4",
    rotate: bool = False,
    phases: bool = False,
    device: str = "auto",
    figures: Path | None = None,
) -> None:
    """Print seconds of the default conversion of MODEL, calibrated on CACHE, and record them."""
    backend = select(device)
    config = ConvertConfig(to=to, calibration=cache, rotate=rotate, device=device)
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
    spent: dict[str, float] = defaultdict(float)
    with ExitStack() as timers:
        for name, target in PHASES.items() if phases else ():
            timers.enter_context(timed(name, target, spent, backend))
        seconds = seconds_of(config)
    parts = {name: round(each, 3) for name, each in spent.items()}
    print(json.dumps({"model": model, "to": to, "seconds": seconds, "phases": parts}))
    if figures is not None:
        record(figures, figure, round(seconds, 1), "s", GOAL)


def timed(name: str, target: str, spent: dict[str, float], backend: Backend) -> patch:
    """Patch the function called `target` so that its time is added to `spent[name]`."""
    function: Callable = resolve_name(target)

    def call(*args: object, **named: object) -> object:
        backend.synchronize()
        began = time.perf_counter()
        result = function(*args, **named)
        backend.synchronize()
        spent[name] += time.perf_counter() - began
        return result

    return patch(target, call)


if __name__ == "__main__":
    app()
