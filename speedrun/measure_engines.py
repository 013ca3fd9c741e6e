"""Run a student in each engine that it is exported for; measure how far its logits are from ours.

An engine has two rows: as exact as it computes, and as it computes by default, where that differs.
Logits of a text's tokens are compared with those of the packed student in float32. `speed` asks
ONNX Runtime and llama.cpp for greedy tokens in turns. `results.py` makes one table of the figures.

python speedrun/measure_engines.py agree ENGINE STUDENT --text FILE.txt --figures FILE.jsonl
python speedrun/measure_engines.py speed ONNX_DIR --files FILE.gguf --text FILE.txt \\
    --figures FILE.jsonl
python speedrun/measure_engines.py count --figures FILE.jsonl
"""

import json
import operator
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from cyclopts import App
from figures import record
from measure_llamacpp import compared, logits, read_gguf, tokens, widen
from torch import Tensor, nn
from transformers import AutoRoundConfig, PreTrainedModel

from qat.cli import run_verb
from qat.export.parts import logits_of, reloaded
from qat.export.targets import load_target
from qat.extensions.lab.llamacpp import library
from qat.extensions.targets import gguf, onnx, openvino
from qat.models.checkpoint import load_checkpoint
from qat.models.load import load_tokenizer

TOP1, KL = 0.995, 0.001
RUNS, TOKENS, PROMPT = 7, 64, 16
AUTOROUND = AutoRoundConfig(backend="torch")
DTYPES = dict.fromkeys(("gptq", "awq"), "auto")
Engine = Callable[[PreTrainedModel, Path, Tensor], Tensor]
app = App(help=__doc__)


def by_export(name: str) -> Engine:
    """Return what checks the export, where that is the engine itself."""
    return lambda model, out, ids: load_target(name).read_logits(model, out, ids)


def in_dtype(dtype: torch.dtype | None, **how: object) -> Engine:
    """Return transformers with the products of its quantizer's library, in a dtype of their own."""

    def run(model: PreTrainedModel, out: Path, ids: Tensor) -> Tensor:
        found = reloaded(model, out, dtype="auto", **how)
        found = found if dtype is None else nn.Module.to(found, dtype)
        return torch.cat([logits_of(found, row[None]) for row in ids]).float()

    return run


def llamacpp(model: PreTrainedModel, out: Path, ids: Tensor) -> Tensor:
    """Return logits of llama.cpp, which rounds what its products read."""
    return read_gguf(out / gguf.FILE_NAME, ids)


def llamacpp_wide(model: PreTrainedModel, out: Path, ids: Tensor) -> Tensor:
    """Return logits of llama.cpp with the weights that its own quantizer reads, in float32."""
    widen(out / gguf.FILE_NAME, out / "wide.gguf")
    return read_gguf(out / "wide.gguf", ids, is_exact=True)


def onnx_rounded(model: PreTrainedModel, out: Path, ids: Tensor) -> Tensor:
    """Return logits of the program whose products round what they read."""
    return onnx.logits(model, out / onnx.FILE_NAME, ids, onnx.FAST)


def openvino_default(model: PreTrainedModel, out: Path, ids: Tensor) -> Tensor:
    """Return logits of OpenVINO as it computes without settings."""
    return openvino.logits(out, ids, {})


def vllm(model: PreTrainedModel, out: Path, ids: Tensor) -> Tensor:
    """Return the log-probabilities of vLLM on a CPU, in float32; they compare as logits do."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(out),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2 * ids.shape[1],
        max_num_seqs=1,
        max_logprobs=-1,
        enable_prefix_caching=False,
    )
    how = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False, flat_logprobs=True)
    size, found = model.config.vocab_size, []
    for row in ids.tolist():
        # a place predicts the next, so the last takes one more token, which is then not compared
        (said,) = engine.generate([{"prompt_token_ids": [*row, row[-1]]}], how, use_tqdm=False)
        kept = said.prompt_logprobs
        made = torch.full((len(row), size), -torch.inf)
        for place in range(len(row)):
            part = slice(kept.start_indices[place + 1], kept.end_indices[place + 1])
            made[place, torch.tensor(kept.token_ids[part])] = torch.tensor(kept.logprobs[part])
        found.append(made)
    return torch.stack(found)


ENGINES: dict[str, tuple[str, Engine, Engine | None]] = {
    "onnx": ("onnx", by_export("onnx"), onnx_rounded),
    "openvino": ("openvino", by_export("openvino"), openvino_default),
    "executorch": ("executorch", by_export("executorch"), None),
    "litert": ("litert", by_export("litert"), None),
    "mlx": ("mlx", by_export("mlx"), None),
    "torchao": ("torchao", by_export("torchao"), None),
    "compressed-tensors": ("compressed-tensors", by_export("compressed-tensors"), None),
    "llamacpp": ("gguf", llamacpp_wide, llamacpp),
    "autoround": ("gptq", by_export("gptq"), in_dtype(None, quantization_config=AUTOROUND)),
    "gptqmodel": ("awq", in_dtype(torch.float32), in_dtype(None)),
    "vllm": ("packed", vllm, None),
    "coreai": ("coreai", by_export("coreai"), None),
}
"""The target of each engine, and what runs its files: exactly, and by default."""


@app.command
def agree(
    engine: str,
    student: Path,
    *,
    text: Path,
    sequences: int = 4,
    length: int = 128,
    of: str = "",
    figures: Path | None = None,
) -> None:
    """Export STUDENT for ENGINE, run it there, and record where the likeliest token is ours.

    `of` stands in the figures' names: which model it is a student of, if not of SmolLM2.
    """
    torch.set_num_threads(1)
    target, *ways = ENGINES[engine]
    model, tokenizer = load_checkpoint(student, torch.float32), load_tokenizer(str(student))
    ids = tokens(tokenizer, text.read_text(encoding="utf-8"), sequences, length)
    ours = logits(model, ids)
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "out")
        words = ["--to", target, "--dtype", DTYPES.get(target, "fp32"), "--out", str(out)]
        run_verb(["export", str(student), *words])
        for way, run in zip(("exact", "default"), ways, strict=True):
            if run is None:
                continue
            found = compared(ours, run(model, out, ids))
            print(f"{engine} {way}: {found}", flush=True)
            named = "_".join(filter(None, (of, engine.replace("-", "_"))))
            for figure, value, unit, goal in (
                ("top1", found.agrees, "share of places", f">= {TOP1}"),
                ("kl", found.kl, "nats", f"<= {KL}"),
            ):
                goal = goal if way == "exact" else ""
                name = f"engine_{named}_{way}_{figure}"
                record(figures, name, value, unit, goal, runs=ids.numel())


@app.command
def speed(
    made: Path, *, files: list[Path], text: Path, threads: int = 2, figures: Path | None = None
) -> None:
    """Record greedy tokens a second of an ONNX export and of GGUF FILES, which take turns."""
    torch.set_num_threads(threads)
    whole = text.read_text(encoding="utf-8")
    prompt = tokens(load_tokenizer(str(made)), whole, 1, PROMPT)[0].tolist()
    speakers = {"onnx": genai_speaker(made, prompt, threads)}
    speakers |= {file.stem: llamacpp_speaker(file, prompt, threads) for file in files}
    rates = {name: [] for name in speakers}
    for _ in range(RUNS):
        for name, speak in speakers.items():
            rates[name].append(rate(speak))
    for name, found in rates.items():
        ratios = [*map(operator.truediv, rates["onnx"], found)]
        print(name, statistics.median(found), statistics.median(ratios), flush=True)
        how = {"runs": RUNS, "spread": statistics.stdev(found)}
        record(figures, f"cpu_tok_s_{name}", statistics.median(found), "tokens/s", "", **how)
        if name != "onnx":
            how = {"runs": RUNS, "spread": statistics.stdev(ratios)}
            figure = f"onnx_cpu_tok_s_over_llamacpp_{name}"
            record(figures, figure, statistics.median(ratios), "x", ">= 1", **how)


def rate(speak: Callable[[], Iterator[int]]) -> float:
    """Tokens a second behind the first one."""
    words = speak()
    next(words)
    began = time.perf_counter()
    count = sum(1 for _ in words)
    return count / (time.perf_counter() - began)


def genai_speaker(made: Path, prompt: list[int], threads: int) -> Callable[[], Iterator[int]]:
    """Return what speaks greedily in onnxruntime-genai."""
    import onnxruntime_genai as og

    config = og.Config(str(made))
    session = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": session}}))
    model = og.Model(config)

    def speak() -> Iterator[int]:
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(max_length=PROMPT + TOKENS, min_length=PROMPT + TOKENS)
        generator = og.Generator(model, parameters)
        generator.append_tokens(prompt)
        while not generator.is_done():
            generator.generate_next_token()
            yield 1

    return speak


def llamacpp_speaker(file: Path, prompt: list[int], threads: int) -> Callable[[], Iterator[int]]:
    """Return what speaks greedily in llama.cpp."""
    how = {"n_ctx": 256, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    llama = library().Llama(str(file), **how)

    def speak() -> Iterator[int]:
        words = llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
        for _ in range(TOKENS):
            yield next(words)

    return speak


@app.command
def count(*, figures: Path) -> None:
    """Record how many engines of FIGURES meet both goals, as exact as they compute."""
    lines = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
    found = {line["figure"]: line["value"] for line in lines}
    met = [
        engine
        for engine in (name.replace("-", "_") for name in ENGINES)
        if found.get(f"engine_{engine}_exact_top1", 0) >= TOP1
        and found.get(f"engine_{engine}_exact_kl", 1) <= KL
    ]
    print(", ".join(met))
    record(figures, "engines_verified", len(met), "engines", ">= 9", runs=len(ENGINES))


if __name__ == "__main__":
    app()
