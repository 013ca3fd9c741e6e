"""Measures the optimizer alone: time of a step, and memory, by how latent weights are kept.

The tensors are the 196 linears of Qwen3-0.6B (440 M weights) with their gradients; no model runs.

python speedrun/measure_optimizer.py --out FILE.jsonl
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from qat.backend import device as backends
from qat.logs import JsonLines
from qat.train.config import TrainConfig
from qat.train.optim import Optimizer

KEPT = {
    "fp32, AdamW": {},
    "bf16, AdamW": {"latent_dtype": "bf16"},
    "fp32, 8-bit AdamW": {"optimizer": "adamw8bit"},
    "bf16, 8-bit AdamW": {"optimizer": "adamw8bit", "latent_dtype": "bf16"},
}
WARM_UP = 3


def main() -> None:
    """Print a line for each way to keep latent weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = JsonLines(arguments.out) if arguments.out else None
    for name, settings in KEPT.items():
        found = measure(arguments.layers, arguments.steps, arguments.device, **settings)
        print(f"{name:20s}", "  ".join(f"{key} {value:.3f}" for key, value in found.items()))
        if lines:
            device = backends.select(arguments.device).name()
            lines.write(kept=name, layers=arguments.layers, device=device, **found)
    if lines:
        lines.close()


def measure(layers: int, steps: int, device: str, **settings: str) -> dict[str, float]:
    """Milliseconds of a step, of the host alone, and GiB with and without gradients."""
    backend = backends.select(device)
    backend.free_memory()
    backend.reset_peak_memory()
    config = TrainConfig(cache_dir=Path("none"), device=device, learn="weights", **settings)
    model = latents(layers).to(backend.device)
    names = [name for name, _ in model.named_parameters()]
    optimizer = Optimizer(model, {"weights": names}, config)
    gradients = [torch.randn_like(p) for p in optimizer.parameters.values()]
    wall_ms, host_ms = [], []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            backend.reset_peak_memory()
        for parameter, gradient in zip(optimizer.parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        backend.synchronize()
        began = time.perf_counter()
        optimizer.step(step)
        host_ms.append((time.perf_counter() - began) * 1e3)
        backend.synchronize()
        wall_ms.append((time.perf_counter() - began) * 1e3)
    return {
        "step_ms": statistics.median(wall_ms[WARM_UP:]),
        "host_ms": statistics.median(host_ms[WARM_UP:]),
        "peak_gib": backend.peak_memory_gib() or 0.0,
        "state_gib": gib([t for t in optimizer.state().values() if t.dim()]),
        "gradients_gib": gib(gradients),
    }


def latents(layers: int) -> nn.Module:
    """The linears of Qwen3-0.6B as bare parameters."""
    shapes = [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048)]
    shapes += [(3072, 1024), (3072, 1024), (1024, 3072)]
    tensors = [torch.randn(shape) * 0.02 for _ in range(layers) for shape in shapes]
    return nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)


def gib(tensors: list[Tensor]) -> float:
    """What tensors hold; `state` counts the weights too."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / backends.GIB


if __name__ == "__main__":
    main()
