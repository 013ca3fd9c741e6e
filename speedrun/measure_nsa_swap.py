"""How exactly a model with Native Sparse Attention swapped in is what it should be, in float32.

Up to the reach of its selection it is the dense model; nowhere does a token show in what is said
before it.

python speedrun/measure_nsa_swap.py --figures FILE.jsonl
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from figures import record
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.backend import select
from qat.bench.config import MeasureConfig
from qat.bench.student import random_model
from qat.kernels.nsa.config import PRESETS, NSAConfig
from qat.kernels.nsa.router import routes_taken
from qat.models.nsa_swap import nsa_modules, swap_attention

GOAL = 1e-5
LEAK_LENGTH = 1300


def main() -> None:
    """Print both differences and record them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="shorter rows, to try the script")
    parser.add_argument("--figures", type=Path)
    asked = parser.parse_args()
    device = str(select(asked.device).device)
    with torch.no_grad():
        difference = max(swap_differences(device))
        leak = max(leaks(device, 300 if asked.small else LEAK_LENGTH))
    for route, count in routes_taken().items():
        print(f"{route.backend} (asked: {route.requested}): {count} layers")
    print(f"swap_max_logit_diff: {difference:.3g} (goal <= {GOAL}); future_leak: {leak} (goal 0)")
    if asked.figures and not asked.small:
        record(asked.figures, "swap_max_logit_diff", difference, "logits", f"<= {GOAL}")
        record(asked.figures, "future_leak", leak, "logits", "0")


def swap_differences(device: str) -> Iterator[float]:
    """Of logits from the dense model's, at lengths about every boundary up to the reach."""
    for name in ("nsa", "nsa-merged"):
        config = PRESETS[name].model_copy(update={"backend": "reference"})
        dense, model = told_apart(device), told_apart(device)
        swap_attention(model, config)
        reach = config.reach
        for length in (1, 31, 32, 33, 127, 128, 129, 511, 512, 513, reach - 1, reach):
            ids = torch.randint(500, (1, length), device=device)
            found = largest(model(ids).logits, dense(ids).logits)
            print(f"{name}, {length} tokens: {found:.3g}", flush=True)
            yield found


def leaks(device: str, length: int) -> Iterator[float]:
    """Of logits from those of the same row with other tokens from some place on, before it."""
    sizes = {"compress_block": 8, "compress_stride": 4, "select_block": 16, "num_selected": 4}
    small = NSAConfig(**sizes, window=24, select_tile=32, pooling="weighted", cmp_rope="pre")
    for config in (*PRESETS.values(), small):
        # kernels where the device has them
        for backend in ("auto", "reference"):
            model = told_apart(device)
            swap_attention(model, config.model_copy(update={"backend": backend}))
            for module in nsa_modules(model).values():
                for parameter in module.nsa.parameters():
                    nn.init.normal_(parameter, std=0.5)
            ids = torch.randint(500, (1, length), device=device)
            before = model(ids).logits
            for place in (1, 31, 128, 129, length // 2, length - 1):
                changed = ids.clone()
                changed[:, place:] = (changed[:, place:] + 7) % 500
                yield largest(model(changed).logits[:, :place], before[:, :place])


def told_apart(device: str) -> PreTrainedModel:
    """A tiny model with weights large enough for attention to prefer some keys."""
    model = random_model("tiny", MeasureConfig(device=device)).float()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


def largest(found: Tensor, expected: Tensor) -> float:
    """Absolute difference."""
    return (found - expected).abs().max().item()


if __name__ == "__main__":
    main()
