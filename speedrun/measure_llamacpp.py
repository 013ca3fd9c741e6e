"""Run students in llama.cpp and measure how far its logits are from ours.

Each student is exported to GGUF and opened there, beside a second file that holds the same weights
in float32. What that one differs by has nothing to do with quantization (another order of sums, an
attention cache in float16). The rest should come from activations, which llama.cpp rounds to 8 bits
wherever it multiplies by quantized weights; so ours are compared with themselves under the same
rounding too. (The two cannot be equal to the bit: a float16 in the cache moves many values past the
middle between two levels, and a few layers later all of the rounding is another.)

pip install 'qat-distill[llamacpp]'
python speedrun/measure_llamacpp.py STUDENT=TEXT.txt ... --figures FILE.jsonl
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cyclopts import App
from figures import record
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.cli import run_verb
from qat.export import gguf
from qat.export.dense import dense_state_dict
from qat.export.parts import float_model, logits_of
from qat.extensions.lab.llamacpp import LlamaCpp
from qat.models.checkpoint import load_checkpoint
from qat.models.load import load_tokenizer
from qat.models.stored_state import quantized_modules
from qat.nn.lut_embedding import TiedLutHead

GOAL = 1e-3
app = App(help=__doc__)


class Compared(NamedTuple):
    """One file against the model that it came from, over the tokens of a text."""

    kl: float  # KL(ours || theirs), nats per token
    agrees: float  # share of places where both find the same token likeliest


@app.default
def main(
    students: list[str], *, sequences: int = 16, length: int = 256, figures: Path | None = None
) -> None:
    """Print a line for each STUDENT=TEXT and record the worst KL."""
    worst = 0.0
    for named in students:
        student, _, text = named.rpartition("=")
        found = measure(student, Path(text), sequences, length)
        worst = max(worst, found.kl)
    print(f"worst KL {worst:.3g} nats (goal {GOAL:g})")
    if figures:
        runs = len(students)
        record(figures, "gguf_llamacpp_kl", worst, "nats", f"<= {GOAL:g}", runs=runs)
    raise SystemExit(not worst <= GOAL)


def measure(student: str, text: Path, sequences: int, length: int) -> Compared:
    """Export `student` and compare, in quantized types and in float32."""
    tokenizer, model = load_tokenizer(student), load_checkpoint(Path(student), torch.float32)
    ids = tokens(tokenizer, text.read_text(encoding="utf-8"), sequences, length)
    ours = logits(model, ids)
    with activations_of_8_bits(model):
        rounded = divergence(ours, logits(model, ids))
    with tempfile.TemporaryDirectory() as place:
        words = ["export", student, "--to", "gguf", "--dtype", "fp32", "--out", f"{place}/student"]
        run_verb(words)
        dense = float_model(model, dense_state_dict(model, torch.float32), torch.float32)
        Path(place, "floats").mkdir()
        gguf.write(dense, None, Path(place, "floats"))
        found, floor = (
            compare(Path(place, name, gguf.FILE_NAME), ids, ours) for name in ("student", "floats")
        )
        print(
            f"{student}: KL {found.kl:.3g} nats over {ids.numel()} tokens, {floor.kl:.3g} with the "
            f"same weights in float32, {rounded:.3g} by rounding activations in ours; the "
            f"likeliest token is the same in {found.agrees:.2%}"
        )
    return found


def tokens(tokenizer: PreTrainedTokenizerBase, text: str, B: int, S: int) -> Tensor:
    """Rows `(B, S)` from all over the text."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    if len(ids) < B * S:
        raise SystemExit(f"the text has {len(ids)} tokens, expected {B * S}; give a longer one")
    starts = torch.linspace(0, len(ids) - S, B).long()
    return ids[starts[:, None] + torch.arange(S)]


def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`(B, S, V)`, a row at a time."""
    return torch.cat([logits_of(model, row[None]) for row in ids])


@contextmanager
def activations_of_8_bits(model: PreTrainedModel) -> Iterator[None]:
    """Round what enters quantized weights as llama.cpp does, 256 values a scale for K types."""
    handles = []
    heads = [module for module in model.modules() if isinstance(module, TiedLutHead)]
    for module in [*quantized_modules(model).values(), *heads]:
        is_large = module not in heads and gguf.block_type(module.spec).size == gguf.LARGE
        size = gguf.LARGE if is_large else gguf.SMALL

        def rounded(_: object, inputs: tuple[Tensor, ...], size: int = size) -> Any:
            if not inputs[0].is_floating_point():  # an embedding reads tokens
                return None
            return (to_8_bits(inputs[0], size), *inputs[1:])

        handles.append(module.register_forward_pre_hook(rounded))
    yield
    for handle in handles:
        handle.remove()


def to_8_bits(x: Tensor, size: int) -> Tensor:
    """`x` on 255 levels for each `size` values, their scale a float16 in blocks of 32 (Q8_0)."""
    blocks = x.unflatten(-1, (-1, size))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale == 0, 0.0, blocks / scale).round()
    return (codes * (scale.half().float() if size == gguf.SMALL else scale)).flatten(-2)


def compare(path: Path, ids: Tensor, ours: Tensor) -> Compared:
    """Logits of a GGUF file in llama.cpp against `ours` `(B, S, V)`."""
    engine = LlamaCpp(path, ids.shape[1])
    theirs = torch.stack([engine.logits(row.tolist()).clone() for row in ids])
    engine.close()
    return compared(ours, theirs)


def compared(ours: Tensor, theirs: Tensor) -> Compared:
    """Logits `(B, S, V)` of an engine against ours."""
    agrees = (ours.argmax(-1) == theirs.argmax(-1)).double().mean().item()
    return Compared(divergence(ours, theirs), agrees)


def divergence(ours: Tensor, theirs: Tensor) -> float:
    """KL(ours || theirs) of logits `(B, S, V)`, nats per token."""
    log_p, log_q = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


if __name__ == "__main__":
    app()
