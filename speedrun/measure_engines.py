"""Measure exports to OpenVINO and ExecuTorch beside their packed students, on one thread.

Logits of a text's tokens (half of each row is a prompt, the rest goes token by token), then greedy
tokens a second in openvino-genai, of which the median of RUNS counts; settings take turns.

python speedrun/measure_engines.py openvino NAME=STUDENT ... --text FILE.txt --figures FILE.jsonl
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
from cyclopts import App
from figures import record
from measure_llamacpp import compared, logits, tokens

from qat.cli import run_verb
from qat.extensions.targets import executorch, openvino
from qat.models.checkpoint import load_checkpoint
from qat.models.load import load_tokenizer

RUNS, TOKENS, PROMPT = 7, 64, 16
SETTINGS = {"openvino": openvino.EXACT, "openvino_default": {}}
app = App(help=__doc__)


@app.default
def main(  # noqa: PLR0913
    engine: Literal["openvino", "executorch"],
    students: list[str],
    *,
    text: Path,
    sequences: int = 4,
    length: int = 128,
    made: Path | None = None,
    figures: Path | None = None,
) -> None:
    """Print and record the figures of each NAME=STUDENT, a packed checkpoint.

    `made`: the directory of its export, if it is there already.
    """
    torch.set_num_threads(1)
    for named in students:
        name, _, student = named.partition("=")
        model, tokenizer = load_checkpoint(Path(student), torch.float32), load_tokenizer(student)
        ids = tokens(tokenizer, text.read_text(encoding="utf-8"), sequences, length)
        ours = logits(model, ids)

        def keep(figure: str, value: float, unit: str, goal: str = "none", **more: object) -> None:
            known = f"{figure}_{name}" if name else figure  # noqa: B023
            print(f"{known} {value:.6g} {unit}", flush=True)
            record(figures, known, value, unit, goal, **more)

        def agreement(figure: str, found: torch.Tensor) -> None:
            found = compared(ours, found)  # noqa: B023
            keep(f"{figure}_top1", found.agrees, "share of places", ">= 0.995", runs=ids.numel())  # noqa: B023
            keep(f"{figure}_kl", found.kl, "nats", "<= 0.001", runs=ids.numel())  # noqa: B023

        with tempfile.TemporaryDirectory() as place:
            out = made or Path(place) / "out"
            if made is None:
                run_verb(["export", student, "--to", engine, "--dtype", "fp32", "--out", str(out)])
            if engine == "executorch":
                keep("executorch_mb", (out / executorch.FILE_NAME).stat().st_size / 1e6, "MB")
                began = time.perf_counter()
                agreement("executorch_w", executorch.read_logits(model, out, ids))
                spent = time.perf_counter() - began
                # a prompt of 64 tokens costs about as much as one token: weights are formed
                keep("executorch_w_calls_s", sequences * (1 + length // 2) / spent, "calls/s")
                continue
            keep("openvino_mb", (out / "openvino_model.bin").stat().st_size / 1e6, "MB")
            for figure, settings in SETTINGS.items():
                agreement(figure, openvino.logits(out, ids, settings))
            speak(out, ids[0, :PROMPT], keep)


def speak(out: Path, prompt: torch.Tensor, keep) -> None:  # noqa: ANN001
    """Record tokens a second of openvino-genai, its settings in turns."""
    import openvino_genai
    from openvino import Tensor

    wished = openvino_genai.GenerationConfig(
        max_new_tokens=TOKENS, ignore_eos=True, do_sample=False, apply_chat_template=False
    )
    pipelines = {
        figure: openvino_genai.LLMPipeline(str(out), "CPU", INFERENCE_NUM_THREADS=1, **settings)
        for figure, settings in SETTINGS.items()
    }
    rates = {figure: [] for figure in SETTINGS}
    for _ in range(RUNS):
        for figure, pipeline in pipelines.items():
            said = pipeline.generate(Tensor(prompt[None].numpy()), wished)
            rates[figure].append(1000 / said.perf_metrics.get_tpot().mean)
    for figure, found in rates.items():
        how = {"runs": RUNS, "spread": statistics.stdev(found)}
        keep(f"{figure}_tok_s", statistics.median(found), "tokens/s", **how)


if __name__ == "__main__":
    app()
