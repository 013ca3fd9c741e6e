"""The host memory that converting a model takes which does not fit into it.

    python speedrun/measure_big_convert.py --scratch DIR --figures figures.jsonl
    python speedrun/measure_big_convert.py --scratch DIR --shape 8b --calibrate

A checkpoint of the shape's own widths and words but of a few layers, of random bfloat16 weights in
a file a layer, is written below `--scratch` and removed in the end. `qat convert` runs on it in a
process of its own, which is looked at fifty times a second. What counts is its private memory:
pages of files, which the system takes back when somebody needs them, do not. The head shares the
embedding's table, as it need not in such models, to save the disk; it is read into memory by itself
all the same.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
from cyclopts import App
from figures import record
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qat.process import GIB

app = App(help=__doc__)
SHAPES = {
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
"""Widths of Llama-3.3-70B and Llama-3.1-8B."""
VOCAB, WORDS = 128256, 1000
SEEN_S = 0.02


@app.default
def measure(
    *,
    scratch: Path,
    shape: Literal["70b", "8b"] = "70b",
    layers: int = 2,
    to: str = "q2a4",
    calibrate: bool = False,
    figures: Path | None = None,
) -> None:
    """Print the peak in GiB, and record it as convert_70b_host_gib."""
    scratch = scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        source = Path(folder, "model")
        num_bytes = write_random(source, shape, layers)
        text = Path(folder, "text.txt")
        words = (f"w{random.randrange(WORDS)}" for _ in range(2**16))  # noqa: S311
        text.write_text(" ".join(words))
        options = ["--to", to, "--device", "cpu", "--out", f"{folder}/out"]
        if calibrate:
            options += ["--calibration", str(text), "--calibration-sequences", "16"]
        command = [sys.executable, "-m", "qat", "convert", str(source), *options]
        began = time.perf_counter()
        gib = watched(subprocess.Popen(command, cwd=Path(__file__).parents[1]))  # noqa: S603
    found = {
        "shape": shape,
        "layers": layers,
        "checkpoint_gib": round(num_bytes / GIB, 2),
        "peak_private_gib": round(gib, 2),
        "seconds": round(time.perf_counter() - began, 1),
        "is_calibrated": calibrate,
    }
    print(json.dumps(found))
    if figures is not None:
        record(figures, f"convert_{shape}_host_gib", round(gib, 2), "GiB", "<= 48")


def write_random(out: Path, shape: str, layers: int) -> int:
    """Write a model of that shape with a tokenizer of few words; the bytes of its weights."""
    config = LlamaConfig(
        **SHAPES[shape],
        vocab_size=VOCAB,
        num_hidden_layers=layers,
        head_dim=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        file = "-".join(name.split(".")[1:3]) + ".safetensors"
        files.setdefault(file, {})[name] = parameter
    out.mkdir()
    for file, parameters in files.items():
        drawn = {
            name: torch.randn(p.shape, dtype=torch.bfloat16).mul_(config.initializer_range)
            for name, p in parameters.items()
        }
        save_file(drawn, out / file, metadata={"format": "pt"})
    places = {name: file for file, parameters in files.items() for name in parameters}
    index = {"metadata": {}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(out)
    vocab = {"<end>": 0, **{f"w{number}": number + 1 for number in range(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<end>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")  # noqa: S106
    made.save_pretrained(out)
    return sum(file.stat().st_size for file in out.glob("*.safetensors"))


def watched(process: subprocess.Popen) -> float:
    """The most private memory that a process had at once until it ended, in GiB.

    A line tells each new GiB.
    """
    status, most = Path(f"/proc/{process.pid}/status"), 0.0
    while process.poll() is None:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "RssAnon" in lines:  # a process that has just ended has none
            now = int(lines["RssAnon"].split()[0]) / 2**20
            if int(now) > int(most):
                print(f"{now:.2f} GiB", flush=True)
            most = max(most, now)
        time.sleep(SEEN_S)
    if process.returncode:
        raise SystemExit(f"qat convert ended with {process.returncode}")
    return most


if __name__ == "__main__":
    app()
