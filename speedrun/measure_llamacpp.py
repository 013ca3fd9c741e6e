"""Run students in llama.cpp and measure how far its logits are from ours.

Each student is exported to GGUF and opened there, beside a second file that holds the same weights
in float32. What that one differs by has nothing to do with quantization (another order of sums, an
attention cache in float16). The rest should come from activations, which llama.cpp rounds to 8 bits
wherever it multiplies by quantized weights; so ours are compared with themselves under the same
rounding too. (The two cannot be equal to the bit: a float16 in the cache moves many values past the
middle between two levels, and a few layers later all of the rounding is another.)

A third file shows that nothing else differs: llama.cpp's own quantizer reads the blocks of the
exported file and writes them in float32, and with those, activations and the attention cache are
float32 too. What its logits differ by from ours is recorded by the type of the most weights, such
as `q1_0_diff`.

pip install 'qat-distill[llamacpp]'
python speedrun/measure_llamacpp.py STUDENT=TEXT.txt ... --figures FILE.jsonl
"""

import ctypes
import math
import tempfile
from collections import Counter
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
from qat.export.dense import dense_state_dict
from qat.export.parts import float_model, logits_of
from qat.extensions.lab.llamacpp import LlamaCpp, library
from qat.extensions.targets import gguf
from qat.models.checkpoint import load_checkpoint
from qat.models.gguf_header import read_header
from qat.models.load import load_tokenizer
from qat.models.stored_state import quantized_modules
from qat.nn.lut_embedding import TiedLutHead

GOAL = 1e-3
app = App(help=__doc__)


class Compared(NamedTuple):
    """One file against the model that it came from, over the tokens of a text."""

    kl: float  # KL(ours || theirs), nats per token
    agrees: float  # share of places where both find the same token likeliest
    largest: float  # largest difference of a logit


@app.default
def main(
    students: list[str],
    *,
    sequences: int = 16,
    length: int = 256,
    rounded: bool = True,
    figures: Path | None = None,
) -> None:
    """Print lines for each STUDENT=TEXT; record the worst KL and the differences in float32.

    Args:
        students: packed checkpoints, each with a text.
        sequences: rows of tokens.
        length: tokens in a row.
        rounded: also compare with activations rounded to 8 bits, as llama.cpp computes.
        figures: file to record in.
    """
    worst, differences = 0.0, {}
    for named in students:
        student, _, text = named.rpartition("=")
        tokenizer, model = load_tokenizer(student), load_checkpoint(Path(student), torch.float32)
        ids = tokens(tokenizer, Path(text).read_text(encoding="utf-8"), sequences, length)
        ours = logits(model, ids)
        with tempfile.TemporaryDirectory() as place:
            words = ["export", student, "--to", "gguf", "--dtype", "fp32"]
            run_verb([*words, "--out", f"{place}/student"])
            if rounded:
                found = measure(student, model, ids, ours, place=Path(place))
                worst = max(worst, found.kl)
            kind, difference = measure_in_float32(student, ids, ours, Path(place))
            differences[kind] = max(difference, differences.get(kind, 0.0))
    if rounded:
        print(f"worst KL {worst:.3g} nats (goal {GOAL:g})")
    how = {"goal": f"<= {GOAL:g}", "runs": len(students)}
    if rounded:
        record(figures, "gguf_llamacpp_kl", worst, "nats", **how)
    for kind, difference in differences.items():
        record(figures, f"{kind.lower()}_diff", difference, "logits", **how)
    raise SystemExit(not max(worst, *differences.values()) <= GOAL)


def measure(
    student: str, model: PreTrainedModel, ids: Tensor, ours: Tensor, *, place: Path
) -> Compared:
    """Compare the export in `place` in its own types, and the same weights in float32."""
    with activations_of_8_bits(model):
        rounded = divergence(ours, logits(model, ids))
    dense = float_model(model, dense_state_dict(model, torch.float32), torch.float32)
    (place / "floats").mkdir()
    gguf.write(dense, None, place / "floats")
    found, floor = (
        compare(place / name / gguf.FILE_NAME, ids, ours) for name in ("student", "floats")
    )
    print(
        f"{student}: KL {found.kl:.3g} nats over {ids.numel()} tokens, {floor.kl:.3g} with the "
        f"same weights in float32, {rounded:.3g} by rounding activations in ours; the "
        f"likeliest token is the same in {found.agrees:.2%}"
    )
    return found


def measure_in_float32(student: str, ids: Tensor, ours: Tensor, place: Path) -> tuple[str, float]:
    """Compare the export in `place` where llama.cpp computes with its weights in float32.

    Returns:
        The type of the most weights, and the largest difference of a logit.
    """
    path, weights = place / "student" / gguf.FILE_NAME, Counter()
    for tensor in read_header(path).values():
        weights[tensor.type] += math.prod(tensor.shape)
    kind, _ = weights.most_common(1)[0]
    widen(path, place / "wide.gguf")
    found = compare(place / "wide.gguf", ids, ours, is_exact=True)
    print(
        f"{student}: most weights are {kind}; in float32 logits of up to {ours.abs().max():.4g} "
        f"differ by up to {found.largest:.3g}, KL {found.kl:.3g} nats"
    )
    return kind, found.largest


def widen(path: Path, out: Path) -> None:
    """Let llama.cpp's quantizer read the blocks of a file and write their weights in float32."""
    llama = library()
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = llama.LLAMA_FTYPE_ALL_F32, True, 1
    params.output_tensor_type = params.token_embedding_type = llama.GGML_TYPE_F32
    if llama.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp does not read {path}")


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


def compare(path: Path, ids: Tensor, ours: Tensor, *, is_exact: bool = False) -> Compared:
    """Logits of a GGUF file in llama.cpp against `ours` `(B, S, V)`."""
    return compared(ours, read_gguf(path, ids, is_exact=is_exact))


def read_gguf(path: Path, ids: Tensor, *, is_exact: bool = False) -> Tensor:
    """Return the logits `(B, S, V)` of a GGUF file in llama.cpp."""
    engine = LlamaCpp(path, ids.shape[1], is_exact=is_exact)
    theirs = torch.stack([engine.logits(row.tolist()).clone() for row in ids])
    engine.close()
    return theirs


def compared(ours: Tensor, theirs: Tensor) -> Compared:
    """Logits `(B, S, V)` of an engine against ours."""
    agrees = (ours.argmax(-1) == theirs.argmax(-1)).double().mean().item()
    return Compared(divergence(ours, theirs), agrees, (ours - theirs).abs().max().item())


def divergence(ours: Tensor, theirs: Tensor) -> float:
    """KL(ours || theirs) of logits `(B, S, V)`, nats per token."""
    log_p, log_q = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


if __name__ == "__main__":
    app()
