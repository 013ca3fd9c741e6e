"""Measure how Core AI rounds in float16 on a CPU, and how much KL that costs a student.

python measure_coreai.py STUDENT TEXT --figures figures.jsonl

First a product alone: its error relative to the exact one, and whether it equals a loop that rounds
each term and each partial sum to float16. Then programs of STUDENT, read in rows of 125 tokens:
KL and equal top-1 tokens beside our float32 student, as `qat export --to coreai --dtype fp16`
writes it, and without its float32 sums (`--plain-rows`: 3 minutes a row for stories15M).
"""

import argparse
import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import coreai_torch
import torch
from coreai.authoring import AIModelAsset
from coreai.runtime import NDArray
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from figures import record

from qat.export.dense import dense_state_dict
from qat.export.parts import float_model
from qat.extensions.targets import coreai
from qat.models.checkpoint import load_checkpoint
from qat.models.load import load_tokenizer

LENGTH, ROWS, OUTPUTS = 125, 8, 64
TERMS = (64, 288, 576, 1536)
SEED = 0


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T` as Core AI computes it."""
    linear = nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
    linear.weight.data = weight
    exported = torch.export.export(linear, (x,))
    exported = exported.run_decompositions(coreai_torch.get_decomp_table())
    converter = coreai_torch.TorchConverter()
    converter.add_exported_program(exported, input_names=["x"], output_names=["y"])

    async def run(path: Path) -> Tensor:
        async with AIModelAsset.load(path).executable() as program:
            found = await program.load_function("main")({"x": NDArray(x.numpy())})
            return torch.from_numpy(found["y"].numpy().copy())

    with TemporaryDirectory() as directory:
        path = Path(directory) / "product.aimodel"
        converter.to_coreai().save_asset(path)
        return asyncio.run(run(path))


def rounded_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product whose terms and partial sums are rounded to the dtype of `x`, in order."""
    total = torch.zeros(len(x), len(weight), dtype=x.dtype)
    for place in range(x.shape[1]):
        total = total + x[:, place, None] * weight[:, place]
    return total


def products(figures: Path | None) -> None:
    """Print and record the errors of products alone."""
    torch.manual_seed(SEED)
    for terms in TERMS:
        x, weight = torch.randn(ROWS, terms).half(), torch.randn(OUTPUTS, terms).half()
        found, exact = product(x, weight), x.double() @ weight.double().T
        error = ((found.double() - exact).norm() / exact.norm()).item()
        rounding = ((exact.half().double() - exact).norm() / exact.norm()).item()
        is_loop = torch.equal(found, rounded_sum(x, weight))
        print(f"{terms} terms: off by {error:.2e}, one rounding {rounding:.2e}, loop {is_loop}")
        measured = {"one_rounding": rounding, "equals_loop": is_loop}
        name = f"coreai_fp16_product_error {terms} terms"
        record(figures, name, error, "1", "none", measured=measured)


def main() -> None:
    """Print and record the errors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("student", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--plain-rows", type=int, default=1)
    parser.add_argument("--figures", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    products(given.figures)
    model = load_checkpoint(given.student, torch.float16).eval()
    ours = float_model(model, dense_state_dict(model, torch.float16), torch.float32)
    text = given.text.read_text(encoding="utf-8")[: 10 * ROWS * LENGTH]
    ids = load_tokenizer(str(given.student))(text, add_special_tokens=False).input_ids
    rows = torch.tensor(ids[: ROWS * LENGTH]).view(ROWS, LENGTH)
    coreai.length_of = lambda _model: LENGTH

    def judge(what: str, some: Tensor) -> None:
        sums = torch.zeros(2, dtype=torch.float64)
        with TemporaryDirectory() as directory, torch.no_grad():
            coreai.write(model, None, Path(directory))
            for row in some[:, None]:
                p = ours(input_ids=row, use_cache=False).logits.double().log_softmax(-1)
                q = coreai.read_logits(model, Path(directory), row).double().log_softmax(-1)
                sums[0] += (p.exp() * (p - q)).sum()
                sums[1] += (p.argmax(-1) == q.argmax(-1)).sum()
        kl, top1 = (sums / some.numel()).tolist()
        print(f"{what}: KL {kl:.3g} nats, top-1 {top1:.4f} of {some.numel()}", flush=True)
        measured = {"tokens": some.numel(), "student": given.student.name}
        goals = ("<= 0.001", ">= 0.995") if what == "coreai_fp16" else ("none", "none")
        record(given.figures, f"{what}_kl", kl, "nats", goals[0], measured=measured)
        record(given.figures, f"{what}_top1", top1, "1", goals[1], measured=measured)

    judge("coreai_fp16", rows)
    coreai.sum_in_float32 = lambda _graph: None
    judge("coreai_fp16_plain", rows[: given.plain_rows])


if __name__ == "__main__":
    main()
