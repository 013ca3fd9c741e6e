"""Frozen twins: the plainest NumPy and PyTorch that does the work of a guarded part.

Nothing here calls the code that it stands beside, and nothing here is ever made faster: a twin's
time says how fast the machine is at the moment, which is all that it is for.

Shapes: O out_features, I in_features, B sequences, S positions, V vocabulary, D width.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

LLOYD_ROUNDS, LAYERS, HEADS = 20, 4, 4


def form(indices: Tensor, codebook: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """`codebook[indices] * scales`, `(O, I)`."""
    return codebook[indices.long()] * scales.repeat_interleave(group_size, 1)


def pack(indices: Tensor) -> Tensor:
    """Indices of 2 bits, four to a byte, `(O, I / 4)`."""
    parts = [indices[:, place::4] << 2 * place for place in range(4)]
    return parts[0] | parts[1] | parts[2] | parts[3]


def unpack(packed: Tensor) -> Tensor:
    """Indices of 2 bits out of bytes, `(O, 4 I)`."""
    return torch.stack([packed >> 2 * place & 3 for place in range(4)], -1).flatten(1)


def lloyd(values: np.ndarray, weights: np.ndarray, num_levels: int) -> np.ndarray:
    """Levels of weighted k-means after a fixed number of rounds from quantiles."""
    levels = np.quantile(values, (np.arange(num_levels) + 0.5) / num_levels)
    for _ in range(LLOYD_ROUNDS):
        nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, values)
        mass = np.bincount(nearest, weights, num_levels)
        levels = np.bincount(nearest, weights * values, num_levels) / np.maximum(mass, 1e-30)
    return levels


def decode(octets: np.ndarray, bits: int, count: int) -> Tensor:
    """`count` numbers of `bits` bits a row, least significant first, and their softmax."""
    flags = np.unpackbits(octets, axis=1, count=count * bits, bitorder="little")
    numbers = flags.reshape(len(octets), count, bits) @ (1 << np.arange(bits))
    return torch.from_numpy(numbers.astype(np.float32)).log_softmax(-1)


def training_step(B: int, S: int, V: int, D: int) -> Callable[[], None]:
    """A step of AdamW over a small transformer and cross-entropy, on the same tokens each time."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, HEADS, 3 * D, 0.0, "gelu", batch_first=True)
    body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(V, D), body, nn.Linear(D, V))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    tokens = torch.randint(V, (B, S))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step
