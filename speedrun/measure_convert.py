"""How long quantizing a model of Qwen3-0.6B's shape takes, from four bits to two, with calibration.

    python speedrun/measure_convert.py --figures figures.jsonl
    python speedrun/measure_convert.py --layers 2 --phases

Weights are random with heavy tails, tokens are random too: neither changes what is computed. The
time is that of `quantize_model`, calibration forwards included; loading and writing are not. All
196 linears change from q4a4 to q2a2; q4a4 to q2a4, which keeps the attention, is printed beside it.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import patch

import torch
from cyclopts import App
from figures import record
from transformers import Qwen3Config, Qwen3ForCausalLM

from qat.backend.device import Backend, select
from qat.models.calibrate import TokenBatch
from qat.models.convert import BATCH
from qat.models.language_model import LanguageModel
from qat.models.quantize import QuantizeReport, quantize_model
from qat.quant.spec import PRESETS

app = App(help=__doc__)
LAYERS, VOCAB = 28, 4096
PHASES = {
    "moments": "qat.models.calibrate._MeanOuter.add",
    "block outputs": "qat.models.calibrate._Block.outputs",
    "fit alone": "qat.quant.error_feedback.fit_weight",
    "k-means (of it)": "qat.quant.fit.weighted_kmeans",
    "feedback": "qat.quant.error_feedback.feed_back",
    "Cholesky (of it)": "qat.quant.error_feedback.feedback_coupling",
    "levels": "qat.quant.error_feedback.refit_levels",
    "descent": "qat.quant.error_feedback.descend",
    "packing": "qat.models.quantize._Conversion._put",
    "report": "qat.models.quantize._Conversion.reports",
}
"""What `--phases` times. A phase "of it" is part of the one before."""


@app.default
def measure(
    *,
    layers: int = LAYERS,
    sequences: int = 32,
    length: int = 256,
    runs: int = 1,
    phases: bool = False,
    device: str = "auto",
    figures: Path | None = None,
) -> None:
    """Print seconds, and record them as convert_gpu_seconds or convert_cpu_seconds."""
    backend = select(device)
    tokens = calibration(sequences, length)
    # the first conversion of a process loads libraries and compiles kernels
    convert("q2a2", 1, tokens[:1], backend)
    spent: dict[str, float] = defaultdict(float)
    with ExitStack() as timers:
        if phases:
            for name, target in PHASES.items():
                timers.enter_context(timed(name, target, spent, backend))
        seconds = [convert("q2a2", layers, tokens, backend)[0] for _ in range(runs)]
    mlp_seconds, _ = convert("q2a4", layers, tokens, backend)
    mean = sum(seconds) / runs
    scaled = mean * LAYERS / layers
    found = {
        "q2a2_seconds": seconds,
        "q2a4_seconds": mlp_seconds,
        "layers": layers,
        "scaled_to_28_layers": scaled,
        "calibration_tokens": sequences * length,
        "phases_seconds_per_run": {name: round(s / runs, 3) for name, s in spent.items()},
    }
    print(json.dumps(found, indent=1))
    if figures is not None:
        if layers != LAYERS:
            raise SystemExit(f"layers={layers}: only a whole model of {LAYERS} makes a figure")
        on_gpu = backend.device.type == "cuda"
        name, goal = ("convert_gpu_seconds", 10) if on_gpu else ("convert_cpu_seconds", 180)
        record(figures, name, round(mean, 2), "s", f"<= {goal}", runs=runs)


def calibration(sequences: int, length: int) -> list[TokenBatch]:
    """Random tokens in the batches that `qat convert` makes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (sequences, length), generator=generator)
    positions = torch.arange(length).expand_as(ids)
    return [
        TokenBatch(*pair) for pair in zip(ids.split(BATCH), positions.split(BATCH), strict=True)
    ]


def convert(
    plan: str, layers: int, tokens: list[TokenBatch], backend: Backend
) -> tuple[float, QuantizeReport]:
    """Seconds of quantizing a fresh four-bit model by `plan`, and the report."""
    student = four_bit_model(layers, backend.device)
    backend.synchronize()
    began = time.perf_counter()
    report = quantize_model(student, PRESETS[plan], calibration=tokens)
    backend.synchronize()
    return time.perf_counter() - began, report


def four_bit_model(layers: int, device: torch.device) -> LanguageModel:
    """A model of Qwen3-0.6B's shape (but for the vocabulary) with random weights in q4a4."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(config).eval()
        heavy = torch.distributions.StudentT(torch.tensor(5.0, device=device))
        for name, parameter in model.named_parameters():
            if name.endswith("proj.weight"):
                parameter.data.copy_(heavy.sample(parameter.shape) * 0.02)
    student = LanguageModel(model)
    quantize_model(student, PRESETS["q4a4"])
    return student


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
