"""Runs students in MLX's build for CPUs: how far its logits are from ours, and what it writes.

Each student is exported in float32 and in bfloat16 and opened by mlx-lm as its users do. In float32
only the order of sums is another. In bfloat16 ours, computed in bfloat16, says what the dtype alone
does; beyond that, MLX's product with quantized weights adds up in bfloat16 on a CPU.

pip install 'mlx-lm[cpu]'
python speedrun/measure_mlx.py STUDENT=TEXT.txt ... --figures FILE.jsonl
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from figures import record
from measure_llamacpp import Compared, compared, divergence, logits, tokens
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from qat.cli import run_verb
from qat.models.checkpoint import load_checkpoint
from qat.models.load import load_tokenizer
from qat.models.stored_state import quantized_modules

GOAL = 1e-3
WORDS = 32
"""Tokens that are written greedily."""


class Found(NamedTuple):
    """What was measured of one student."""

    bits: int
    """Of the narrowest linears."""
    float32: Compared
    bfloat16: Compared
    ours: float
    """KL of our own logits in bfloat16 from those in float32, nats per token."""
    same: int
    """Of `WORDS` greedy tokens in float32, how many are ours before the first that is not."""


def main() -> None:
    """Print a line for each student and a text, and record the worst KL of each number of bits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("students", nargs="+", metavar="STUDENT=TEXT")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    load = engine()
    by_bits: dict[int, list[float]] = {}
    bfloat16 = []
    for named in arguments.students:
        student, _, text = named.rpartition("=")
        found = measure(student, Path(text), arguments, load)
        by_bits.setdefault(found.bits, []).append(found.float32.kl)
        bfloat16.append(found.bfloat16.kl)
        print(
            f"{student}, {found.bits} bits: KL {found.float32.kl:.3g} nats in float32, "
            f"{found.bfloat16.kl:.3g} in bfloat16 ({found.ours:.3g} by ours in bfloat16); the "
            f"likeliest token is the same in {found.float32.agrees:.2%} and "
            f"{found.bfloat16.agrees:.2%}; {found.same} of {WORDS} greedy tokens are ours",
            flush=True,
        )
    worst = {f"mlx_kl_{bits}bit": values for bits, values in sorted(by_bits.items())}
    for figure, values in (worst | {"mlx_kl_bf16": bfloat16}).items():
        print(f"{figure}: worst {max(values):.3g} nats of {len(values)} (goal {GOAL:g})")
        if arguments.figures:
            goal, runs = f"<= {GOAL:g}", len(values)
            record(arguments.figures, figure, max(values), "nats", goal, runs=runs)
    raise SystemExit(not max(max(values) for values in worst.values()) <= GOAL)


def engine() -> Any:
    """The function `mlx_lm.load`."""
    try:
        from mlx_lm import load
    except ImportError:
        raise SystemExit(
            "mlx_lm is not installed, expected MLX and its models; run: pip install 'mlx-lm[cpu]'"
        ) from None
    return load


def measure(student: str, text: Path, arguments: argparse.Namespace, load: Any) -> Found:
    """Export `student` in both dtypes and compare."""
    tokenizer, model = load_tokenizer(student), load_checkpoint(Path(student), torch.float32)
    ids = tokens(tokenizer, text.read_text(encoding="utf-8"), arguments)
    ours = logits(model, ids)
    rounded = logits(load_checkpoint(Path(student), torch.bfloat16), ids).float()
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for dtype in ("fp32", "bf16"):
            out = f"{place}/{dtype}"
            run_verb(["export", student, "--to", "mlx", "--dtype", dtype, "--out", out])
            theirs, _ = load(out)
            found[dtype] = compared(ours, torch.stack([their_logits(theirs, row) for row in ids]))
            if dtype == "fp32":
                same = agreeing(model, theirs, ids[0, :16])
    bits = min(module.spec.bits for module in quantized_modules(model).values())
    return Found(bits, found["fp32"], found["bf16"], divergence(ours, rounded), same)


def their_logits(model: Any, ids: Tensor) -> Tensor:
    """`(S, V)` of MLX's model, in float32."""
    import mlx.core as mx
    import numpy as np

    out = model(mx.array(ids[None].numpy()))[0].astype(mx.float32)
    return torch.from_numpy(np.array(out))


def agreeing(model: PreTrainedModel, theirs: Any, prompt: Tensor) -> int:
    """How many greedy tokens both write alike."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    model.generation_config = GenerationConfig(max_new_tokens=WORDS, do_sample=False)
    ours = model.generate(prompt[None])[0, len(prompt) :].tolist()
    steps = generate_step(mx.array(prompt.numpy()), theirs, max_tokens=WORDS)
    pairs = zip(ours, (int(token) for token, _ in steps), strict=True)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), WORDS)


if __name__ == "__main__":
    main()
