"""The time to quantize a model of Qwen3-0.6B's shape from four bits to two, with calibration.

    python speedrun/measure_convert.py --figures figures.jsonl
    python speedrun/measure_convert.py --to v2a2 --figures figures.jsonl
    python speedrun/measure_convert.py --layers 2 --phases
    python speedrun/measure_convert.py real MODEL CACHE --figure coder_convert_s_h100
    python speedrun/measure_convert.py gain MODEL=TEXT MODEL=TEXT --figures figures.jsonl

Weights are random with heavy tails, tokens are random too: neither changes what is computed. The
time is that of `quantize_model`, calibration forwards included; loading and writing are not. All
196 linears change from q4a4 to q2a2, or `--to` another preset; q4a4 to q2a4, which keeps the
attention, is printed as well.

`real` times the default conversion of a model that is there, calibrated on a cache: all of
`convert_model`, from the weights and tokens in memory to the quantized model in memory.

`gain` says what it is worth that calibration is drawn from a whole text: the exact KL of models as
converted, on documents that are kept away, over the KL with the text's first sequences.
"""

import json
import random
import statistics
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

from qat.backend.base import Backend
from qat.backend.device import select
from qat.convert.calibrate import TokenBatch
from qat.convert.config import ConvertConfig
from qat.convert.convert import BATCH, calibration_batches, convert_model
from qat.convert.quantize import QuantizeReport, quantize_model
from qat.data.config import CacheSettings
from qat.data.sources import Document, open_source
from qat.data.stream import divided
from qat.evaluate.divergence import exact_divergence
from qat.evaluate.text import packed_batches
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer
from qat.quant.spec import PRESETS

app = App(help=__doc__)
LAYERS, VOCAB = 28, 4096
GOALS = {
    "convert_gpu_seconds": 10,
    "convert_cpu_seconds": 180,
    "vector_convert_gpu_seconds": 30,
    "vector_convert_cpu_seconds": 600,
}
GAIN_GOALS = {"tiny-qwen3": "<= 0.87"}
PHASES = {
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
"""What `--phases` times. A phase "of it" is part of the last one before that is of none."""


@app.default
def measure(
    *,
    to: str = "q2a2",
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
    convert(to, 1, tokens[:1], backend)
    spent: dict[str, float] = defaultdict(float)
    with ExitStack() as timers:
        if phases:
            for name, target in PHASES.items():
                timers.enter_context(timed(name, target, spent, backend))
        seconds = [convert(to, layers, tokens, backend)[0] for _ in range(runs)]
    mlp_seconds, _ = convert("q2a4", layers, tokens, backend)
    mean = sum(seconds) / runs
    scaled = mean * LAYERS / layers
    found = {
        f"{to}_seconds": seconds,
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
        name = f"convert_{'gpu' if backend.device.type == 'cuda' else 'cpu'}_seconds"
        name = f"vector_{name}" if to == "v2a2" else name
        record(figures, name, round(mean, 2), "s", f"<= {GOALS[name]}", runs=runs)


@app.command
def real(
    model: str,
    cache: str,
    *,
    figure: str,
    to: str = "q2a4",
    rotate: bool = False,
    goal: str = "<= 30",
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
    seconds = seconds_of(config)
    print(json.dumps({"model": model, "to": to, "seconds": seconds}))
    if figures is not None:
        record(figures, figure, round(seconds, 1), "s", goal)


@app.command
def gain(
    pairs: tuple[str, ...] = (),
    *,
    to: str = "q2a4",
    sequences: int = 128,
    length: int = 64,
    seeds: int = 5,
    judged: int = 256,
    device: str = "auto",
    figures: Path | None = None,
) -> None:
    """Print KL with a drawn calibration over KL with a text's first sequences, per MODEL=TEXT.

    Recorded are the median over `seeds` of each, calibration_gain_MODEL, and the worst of all that
    FIGURES then holds.
    """
    for pair in pairs:
        model, text = pair.rsplit("=", 1)
        parts: dict[str, list[Document]] = {"train": [], "held_out": []}
        settings = CacheSettings(data=text, sequence_length=length, held_out=0.1)
        for document, side in divided(open_source(text).documents, settings):
            parts[side].append(document)
        random.Random(0).shuffle(parts["held_out"])
        values = {"to": to, "calibration_sequences": sequences, "calibration_length": length}
        config = ConvertConfig(**values, device=device)
        first, *drawn = converted_kls(model, config, parts, seeds=seeds, judged=judged)
        ratios = [kl / first for kl in drawn]
        ratio, spread = statistics.median(ratios), statistics.stdev(ratios)
        name = Path(model).name
        print(json.dumps({"model": name, "first": first, "drawn": drawn, "gain": ratio}))
        if figures is not None:
            gain_name, rounded = f"calibration_gain_{name}", round(spread, 4)
            goal = GAIN_GOALS.get(name, "<= 1.0")
            record(figures, gain_name, round(ratio, 4), "1", goal, runs=seeds, spread=rounded)
    if figures is not None:
        lines = map(json.loads, figures.read_text(encoding="utf-8").splitlines())
        gains = {line["figure"]: line["value"] for line in lines}
        found = [gains[name] for name in gains if name.startswith("calibration_gain_")]
        record(figures, "calibration_gain", max(found), "1", "<= 1.0", runs=len(found))


def converted_kls(
    model: str, config: ConvertConfig, parts: dict[str, list[Document]], *, seeds: int, judged: int
) -> list[float]:
    """KL as converted on the first sequences of the training documents, then on `seeds` draws."""
    tokenizer = load_tokenizer(model)
    teacher = load_model(model, device=config.device, dtype="fp32")
    length = config.calibration_length
    exam = packed_batches(
        parts["held_out"], tokenizer, length=length, max_sequences=judged, batch_size=BATCH
    )
    number = config.calibration_sequences
    first = packed_batches(
        parts["train"], tokenizer, length=length, max_sequences=number, batch_size=BATCH
    )
    tokens = [[TokenBatch(batch.input_ids, batch.position_ids) for batch in first]]
    for seed in range(seeds):
        drawn = config.model_copy(update={"calibration_seed": seed})
        tokens.append(calibration_batches(parts["train"], drawn, teacher, tokenizer))
    found = []
    for batches in tokens:
        student = load_model(model, device=config.device, dtype="fp32")
        convert_model(student, config, calibration=batches)
        found.append(exact_divergence(student, teacher, exam).kl_nats)
    return found


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
