"""Measure exports to ONNX beside their packed students, and beside llama.cpp's file of the same.

All on one thread: logits of a text's tokens (half of each row is a prompt, the rest goes token by
token), then greedy tokens a second, of which the median of RUNS counts; engines take turns.

pip install 'qat-distill[onnx,llamacpp]'
python speedrun/measure_onnx.py NAME=STUDENT ... --text FILE.txt --figures FILE.jsonl
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from cyclopts import App
from figures import record
from measure_llamacpp import compare, compared, logits, tokens
from torch import Tensor

from qat.cli import run_verb
from qat.errors import QatError
from qat.extensions.lab.llamacpp import library
from qat.extensions.targets import onnx
from qat.models.checkpoint import load_checkpoint
from qat.models.load import load_tokenizer

RUNS, TOKENS = 7, 64
PROMPT = 16
app = App(help=__doc__)


@app.default
def main(
    students: list[str],
    *,
    text: Path,
    sequences: int = 4,
    length: int = 128,
    figures: Path | None = None,
) -> None:
    """Print and record the figures of each NAME=STUDENT, a packed checkpoint.

    Args:
        students: packed checkpoints, each with what its figures' names end with, or nothing.
        text: where the tokens come from.
        sequences: rows of tokens.
        length: tokens in a row.
        figures: file to record in.
    """
    torch.set_num_threads(1)
    for named in students:
        name, _, student = named.partition("=")
        model, tokenizer = load_checkpoint(Path(student), torch.float32), load_tokenizer(student)
        ids = tokens(tokenizer, text.read_text(encoding="utf-8"), sequences, length)
        with tempfile.TemporaryDirectory() as place:
            measure(name, student, model, ids, Path(place), figures)


def measure(name: str, student: str, model, ids: Tensor, place: Path, figures: Path | None) -> None:  # noqa: ANN001, PLR0913, PLR0917, E501
    """Export one student, compare, and let it speak."""

    def keep(figure: str, value: float, unit: str, goal: str, **more: object) -> None:
        print(f"{name}: {figure} {value:.6g} {unit}")
        record(figures, "_".join(filter(None, (figure, name))), value, unit, goal, **more)

    def export(to: str) -> Path:
        run_verb(["export", student, "--to", to, "--dtype", "fp32", "--out", f"{place}/{to}"])
        return place / to

    ours, made, speeds = logits(model, ids), export("onnx"), {}
    keep("onnx_mb", (made / onnx.DATA_NAME).stat().st_size / 1e6, "MB", "")
    programs = {"onnx": (onnx.EXACT_NAME, onnx.SLOW), "onnx_int8": (onnx.FILE_NAME, onnx.FAST)}
    for figure, (file, options) in programs.items():
        found = compared(ours, onnx.logits(model, made / file, ids, options))
        keep(f"{figure}_top1", found.agrees, "share of places", ">= 0.995", runs=ids.numel())
        keep(f"{figure}_kl", found.kl, "nats", "<= 0.001", runs=ids.numel())
    speeds["onnx_tok_s"] = onnx_speaker(made, ids, {})
    speeds["onnx_exact_tok_s"] = onnx_speaker(made, ids, onnx.EXACT)
    try:
        file = export("gguf") / "model.gguf"
    except QatError as error:
        print(f"{name}: no GGUF file: {error}")
    else:
        keep("gguf_mb", file.stat().st_size / 1e6, "MB", "")
        found = compare(file, ids, ours)
        keep("llamacpp_top1", found.agrees, "share of places", "", runs=ids.numel())
        keep("llamacpp_kl", found.kl, "nats", "", runs=ids.numel())
        speeds["llamacpp_tok_s"] = llamacpp_speaker(file, ids)
    rates = {figure: [] for figure in speeds}
    for _ in range(RUNS):
        for figure, speak in speeds.items():
            rates[figure].append(rate(speak))
    for figure, found in rates.items():
        how = {"runs": RUNS, "spread": statistics.stdev(found)}
        keep(figure, statistics.median(found), "tokens/s", "", **how)
    if "llamacpp_tok_s" in rates:
        ratios = [a / b for a, b in zip(rates["onnx_tok_s"], rates["llamacpp_tok_s"], strict=True)]
        how = {"runs": RUNS, "spread": statistics.stdev(ratios)}
        keep("onnx_cpu_tok_s_over_llamacpp", statistics.median(ratios), "x", ">= 1", **how)


def rate(speak: Callable[[], Iterator[int]]) -> float:
    """Tokens a second behind the first one."""
    words = speak()
    next(words)
    began = time.perf_counter()
    count = sum(1 for _ in words)
    return count / (time.perf_counter() - began)


def onnx_speaker(made: Path, ids: Tensor, settings: dict) -> Callable[[], Iterator[int]]:
    """Return what speaks greedily in onnxruntime-genai."""
    import onnxruntime_genai as og

    config = og.Config(str(made))
    for each in (
        {"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}},
        settings,
    ):
        config.overlay(json.dumps(each))
    model = og.Model(config)

    def speak() -> Iterator[int]:
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(max_length=PROMPT + TOKENS, min_length=PROMPT + TOKENS)
        generator = og.Generator(model, parameters)
        generator.append_tokens(ids[0, :PROMPT].tolist())
        while not generator.is_done():
            generator.generate_next_token()
            yield 1

    return speak


def llamacpp_speaker(file: Path, ids: Tensor) -> Callable[[], Iterator[int]]:
    """Return what speaks greedily in llama.cpp."""
    llama = library().Llama(str(file), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)

    def speak() -> Iterator[int]:
        words = llama.generate(ids[0, :PROMPT].tolist(), temp=0.0, repeat_penalty=1.0)
        for _ in range(TOKENS):
            yield next(words)

    return speak


if __name__ == "__main__":
    app()
