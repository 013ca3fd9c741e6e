"""What Native Sparse Attention adds to an attention module: gates, and weights of its pooling.

Shapes: B rows, S positions, D head width, H query heads, K key-value heads, C pooled keys.
"""

import torch
from torch import Tensor, nn

from qat.kernels.nsa.config import NSAConfig
from qat.kernels.nsa.select import pool

NUM_BRANCHES, SELECTED = 3, 1
SIGMOID_BIAS = (-6.0, 6.0, -6.0)
"""Where gates of the mode `sigmoid` begin: selection 0.9975, the other two 0.0025."""


def squashed(raw: Tensor, config: NSAConfig) -> Tensor:
    """Gates `(..., 3)` from what the linear says of them; see `NSAParts.gates_of`."""
    if config.mode == "sigmoid":
        return raw.sigmoid()
    # made on the device: a graph that is being recorded copies nothing from the host
    is_selected = torch.arange(NUM_BRANCHES, device=raw.device) == SELECTED
    return raw.tanh() + is_selected.to(raw.dtype)


class NSAParts(nn.Module):
    """The parameters of one layer, which begin as dense attention as far as the mode allows.

    `gates` is a linear from the layer's input to three gates a head, in the order compressed,
    selected, window; None in the mode `merged`. `pool_key` and `pool_value` `(K, compress_block)`
    are None where pooling is the mean.
    """

    stays_float = True
    """Its linears are few and learn a choice: no quantizer takes them."""

    def __init__(
        self, config: NSAConfig, *, hidden_size: int, num_heads: int, num_key_heads: int
    ) -> None:
        super().__init__()
        self.config = config
        self.gates = self.pool_key = self.pool_value = None
        if config.mode == "merged":
            return
        self.gates = nn.Linear(hidden_size, NUM_BRANCHES * num_heads)
        if config.pooling == "weighted":
            shape = (num_key_heads, config.compress_block)
            self.pool_key = nn.Parameter(torch.empty(shape))
            self.pool_value = nn.Parameter(torch.empty(shape))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Give every parameter the value that it begins with."""
        if self.gates is not None:
            start = SIGMOID_BIAS if self.config.mode == "sigmoid" else (0.0,) * NUM_BRANCHES
            bias = self.gates.bias
            bias.copy_(torch.tensor(start, device=bias.device).repeat(len(bias) // NUM_BRANCHES))
            self.gates.weight.zero_()
        for weights in (self.pool_key, self.pool_value):
            if weights is not None:
                weights.fill_(1 / self.config.compress_block)

    def gates_of(self, hidden: Tensor) -> Tensor | None:
        """`(B, S, H, 3)` float32 for the layer's input `(B, S, hidden_size)`; None: merged.

        `residual`: `(tanh b, 1 + tanh a, tanh c)`; `sigmoid`: the sigmoid of each.
        """
        if self.gates is None:
            return None
        raw = self.gates(hidden).unflatten(-1, (-1, NUM_BRANCHES))
        raw = raw if raw.dtype == torch.float64 else raw.float()
        return squashed(raw, self.config)

    def pooled(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """`(B, K, C, D)` each, of `(B, K, S, D)`; values only where a branch reads them."""
        pooled_key = pool(key, self.config, self.pool_key)
        if self.config.mode == "merged":
            return pooled_key, None
        return pooled_key, pool(value, self.config, self.pool_value)
