"""How exactly a model with Native Sparse Attention swapped in is what it should be, in float32.

Up to the reach of its selection it is the dense model; nowhere does a token show in what is said
before it. The dense model attends in plain PyTorch (`eager`), whose sums the reference repeats;
what SDPA makes of the same model is printed beside, to show how far rounding alone reaches.

python speedrun/research/measure_nsa_swap.py --figures FILE.jsonl
python speedrun/research/measure_nsa_swap.py --model DIR --text FILE.txt --figures FILE.jsonl
"""

import argparse
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch
from research_records import record
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.backend.device import select
from qat.bench.config import MeasureConfig
from qat.bench.student import random_model
from qat.kernels.nsa.config import PRESETS, NSAConfig
from qat.kernels.nsa.router import routes_taken
from qat.models.load import load_model, load_tokenizer
from qat.nsa.swap import nsa_modules, swap_attention

GOAL = 1e-5
LONGEST = max(config.reach for config in PRESETS.values())
LEAK_LENGTH = LONGEST + 300


def main() -> None:
    """Print both differences and record them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a dense model to swap; else a tiny random one")
    parser.add_argument("--text", type=Path, help="what it reads; else random tokens")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="shorter rows, to try the script")
    parser.add_argument("--figures", type=Path)
    asked = parser.parse_args()
    dense = opened(asked.model, str(select(asked.device).device))
    ids = read(asked.model, asked.text, dense)
    with torch.no_grad():
        difference = max(swap_differences(dense, ids))
        leak = max(leaks(dense, ids[:, : 300 if asked.small else LEAK_LENGTH]))
    for route, count in routes_taken().items():
        print(f"{route.backend} (asked: {route.requested}): {count} layers")
    print(f"swap_max_logit_diff: {difference:.3g} (goal <= {GOAL}); future_leak: {leak} (goal 0)")
    if asked.figures and not asked.small:
        record(asked.figures, "swap_max_logit_diff", difference, "logits", f"<= {GOAL}")
        record(asked.figures, "future_leak", leak, "logits", "0")


def opened(source: str | None, device: str) -> PreTrainedModel:
    """The dense model in float32."""
    if source is None:
        return told_apart(device)
    model = load_model(source, device=device, dtype="fp32").model
    model.config.use_cache = False
    return model


def read(source: str | None, text: Path | None, model: PreTrainedModel) -> Tensor:
    """`(1, LEAK_LENGTH)` token ids."""
    if text is None:
        torch.manual_seed(2)
        return torch.randint(500, (1, LEAK_LENGTH), device=model.device)
    words = text.read_text(encoding="utf-8")[: 20 * LEAK_LENGTH]
    ids = load_tokenizer(source)(words)["input_ids"][:LEAK_LENGTH]
    return torch.tensor([ids], device=model.device)


def swap_differences(dense: PreTrainedModel, ids: Tensor) -> Iterator[float]:
    """Of logits from the dense model's, at lengths about every boundary up to the reach."""
    plain = deepcopy(dense)
    plain.set_attn_implementation("eager")
    for name in ("nsa", "nsa-merged"):
        config = PRESETS[name].model_copy(update={"backend": "reference"})
        model = deepcopy(dense)
        swap_attention(model, config)
        reach = config.reach
        for length in (1, 31, 32, 33, 127, 128, 129, 511, 512, 513, reach - 1, reach):
            row = ids[:, :length]
            expected = plain(row).logits
            found, rounding = (largest(m(row).logits, expected) for m in (model, dense))
            print(f"{name}, {length} tokens: {found:.3g} (SDPA {rounding:.3g})", flush=True)
            yield found


def leaks(dense: PreTrainedModel, ids: Tensor) -> Iterator[float]:
    """Of logits from those of the same row with other tokens from some place on, before it."""
    sizes = {"compress_block": 8, "compress_stride": 4, "select_block": 16, "num_selected": 4}
    small = NSAConfig(**sizes, window=24, select_tile=32, pooling="weighted", cmp_rope="pre")
    length = ids.shape[1]
    # kernels where the device has them
    backends = ("reference",) if ids.device.type == "cpu" else ("auto", "reference")
    for config in (*PRESETS.values(), small):
        for backend in backends:
            model = deepcopy(dense)
            swap_attention(model, config.model_copy(update={"backend": backend}))
            for module in nsa_modules(model).values():
                for parameter in module.nsa.parameters():
                    nn.init.normal_(parameter, std=0.5)
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
