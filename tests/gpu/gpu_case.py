"""The shared parts of GPU tests: a ban on synchronisation, and recorded graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from qat.extensions.decode.kernels.launch import has_warpgroups
from qat.models.document_attention import set_kv
from qat.quant.spec import KvSpec

HAS_GROUPS = torch.cuda.is_available() and has_warpgroups(torch.device("cuda"))
# 128 KiB of shared memory
needs_hopper = pytest.mark.skipif(not HAS_GROUPS, reason="sums are looked up on Hopper")


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Let PyTorch raise where the host would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def recorded(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return a graph of `run`, which compiles before, and the tensor that a replay fills."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


def with_kv(model: PreTrainedModel, bits: int | None) -> PreTrainedModel:
    """The same model, which keeps keys and values in so many bits."""
    set_kv(model, None if bits is None else KvSpec(bits=bits))
    return model
