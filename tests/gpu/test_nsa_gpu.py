"""Sparse attention's kernels against its reference on equal selections. Run with `-m gpu`."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from nsa_case import nsa_inputs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qat.extensions.bench.config import AttentionConfig
from qat.extensions.nsa.bench import run_attention
from qat.extensions.nsa.kernels import fla, flex, gather, reference, router
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.select import Inputs, pool, select

pytestmark = pytest.mark.gpu

WORSE, SLACK = 1.25, 5e-4
"""Bound of a kernel's error: a factor on bfloat16 PyTorch's, and a share of the exact norm."""
LEARNED = ("query", "key", "value", "gates")
CASES = {
    "nsa": (dict(num_selected=4, window=300), (4, 2), 1000, False),
    "sigmoid, packed": (dict(mode="sigmoid", num_selected=4, window=300), (10, 2), 641, True),
    "nsa, the parts of a row differ": (dict(num_selected=6), (4, 2), 8100, False),
    "merged, first blocks copied": (dict(mode="merged", num_selected=8), (8, 2), 5001, False),
    "merged, packed": (dict(mode="merged", num_selected=4), (2, 2), 700, True),
    "one head, packed": (dict(num_selected=4, window=300), (1, 1), 700, True),
    "small blocks": (dict(select_block=32, select_tile=16, num_selected=6), (16, 2), 333, True),
}


def documents(S: int) -> Tensor:
    """Return documents that begin inside and between tiles, one of them a single token."""
    places = torch.arange(S)
    rows = [[0, 5, 130, 256, 300], [0, 200, 201]]
    found = [torch.stack([torch.where(places >= s, s, 0) for s in row]).amax(0) for row in rows]
    return torch.stack(found)


def made(config: NSAConfig, heads: tuple[int, int], S: int, *, is_packed: bool) -> Inputs:
    """Return inputs on the GPU, in bfloat16, with heads of width 64."""
    first = documents(S).cuda() if is_packed else None
    inputs = nsa_inputs(config, S, heads=heads, width=64, dtype=torch.bfloat16)
    inputs = inputs._replace(
        **{name: t.cuda() for name, t in inputs._asdict().items() if isinstance(t, Tensor)}
    )
    return inputs._replace(first=first)


def results(attend: Callable[[Inputs], Tensor], inputs: Inputs, config: NSAConfig) -> list[Tensor]:
    """The output and the gradients of all that learns, pooling included."""
    learned = {
        name: getattr(inputs, name).detach().requires_grad_()
        for name in LEARNED
        if getattr(inputs, name) is not None
    }
    pooled = pool(learned["key"], config)
    pooled_value = None if config.mode == "merged" else pool(learned["value"], config)
    out = attend(inputs._replace(**learned, pooled_key=pooled, pooled_value=pooled_value))
    torch.manual_seed(1)
    weights = torch.randn(out.shape).bfloat16().to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [*learned.values()])]


def wide(inputs: Inputs) -> Inputs:
    return Inputs(
        *(t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs)
    )


def assert_near(
    attend: Callable[[Inputs], Tensor], inputs: Inputs, config: NSAConfig, selection: Tensor
) -> None:
    """Check that results err little more from float32 than plain PyTorch's, gradients too."""

    def plain(inputs: Inputs) -> Tensor:
        return reference.attend(inputs, selection, config)

    exact = results(plain, wide(inputs), config)
    ours, theirs = (results(way, inputs, config) for way in (attend, plain))
    for name, *tensors in zip(("out", *LEARNED), ours, theirs, exact, strict=False):
        mine, other = (distance(tensor, tensors[2]) for tensor in tensors[:2])
        assert tensors[0].isfinite().all()
        assert mine <= WORSE * other + SLACK, f"{name}: {mine:.2g}, plain PyTorch {other:.2g}"


def distance(found: Tensor, exact: Tensor) -> float:
    return ((found.float() - exact).norm() / exact.norm()).item()


EACH = {"select_tile": 1, "compress_stride": 32, "bound": 0.3}
GATHERED = {
    "nsa": (dict(num_selected=4, window=300, **EACH), (4, 2), 1000, False),
    "sigmoid, packed": (dict(mode="sigmoid", num_selected=4, **EACH), (10, 2), 641, True),
    "merged, long": (dict(mode="merged", num_selected=8, **EACH), (8, 2), 5001, False),
    "merged, packed, a few share": (
        dict(mode="merged", select_block=32, select_tile=16, num_selected=6),
        (16, 2),
        333,
        True,
    ),
    "small blocks": (
        dict(mode="merged", select_block=16, num_selected=5, select_tile=1, compress_block=16),
        (3, 1),
        500,
        False,
    ),
}


@pytest.mark.parametrize(
    ("kernel", "case"),
    [*((flex, case) for case in CASES.values()), *((gather, case) for case in GATHERED.values())],
    ids=[*(f"flex {name}" for name in CASES), *(f"gather {name}" for name in GATHERED)],
)
def test_a_kernel_is_the_reference(kernel: ModuleType, case: tuple) -> None:
    sizes, heads, S, is_packed = case
    config = NSAConfig(**sizes)
    inputs = made(config, heads, S, is_packed=is_packed)
    selection = select(inputs, config)
    assert_near(lambda i: kernel.attend(i, config, selection), inputs, config, selection)


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_kernel_chooses_as_the_reference_but_for_near_ties(is_packed: bool) -> None:
    config = NSAConfig(mode="merged", num_selected=4, **EACH)
    inputs = made(config, (4, 2), 641 if is_packed else 3000, is_packed=is_packed)
    found = gather.chosen(inputs, config) > 0
    wanted = gather.ranks_of(select(inputs, config), inputs, config) > 0
    assert torch.equal(found.sum(1), wanted.sum(1))
    assert (found != wanted).float().mean() < 1e-3


def test_gathered_results_repeat_to_the_bit() -> None:
    config = NSAConfig(mode="merged", num_selected=8, **EACH)
    inputs = made(config, (8, 2), 3000, is_packed=False)
    first, second = (results(lambda i: gather.attend(i, config), inputs, config) for _ in range(2))
    assert all(map(torch.equal, first, second))


class Recomputed(torch.nn.Module):
    """A layer as models have it: the definition is the module's, its numbers the graph's constants.

    Those of a closure become symbols in torch 2.11 once a process compiles a second definition.
    """

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, inputs: Inputs) -> Tensor:
        config, device = self.config, inputs.query.device
        route = router.choose(config, length=1000, group=2, head_dim=64, device=device)
        assert route.backend == ("flex" if config.select_tile == 128 else "gather")
        return checkpoint(router.attend, inputs, config, route, use_reentrant=False)


def test_flex_inside_another_graph_and_recomputed() -> None:
    # all blocks, for near ties may be rounded apart; two definitions, one after the other
    for sizes in ({}, dict(select_block=64, select_tile=1)):
        config = NSAConfig(**{"num_selected": 16, "window": 300, **sizes})
        inputs = made(config, (4, 2), 1000, is_packed=False)
        layer = torch.compile(Recomputed(config), fullgraph=True)
        assert_near(layer, inputs, config, select(inputs, config))


@pytest.mark.skipif(not fla.IS_INSTALLED, reason="fla-core is not installed")
def test_fla_is_the_reference() -> None:
    config = NSAConfig(mode="sigmoid", select_block=64, num_selected=4, select_tile=1, window=128)
    inputs = made(config, (32, 2), 500, is_packed=False)
    selection = select(inputs, config)
    assert_near(lambda i: fla.attend(i, config, selection), inputs, config, selection)


def test_the_bench_times_flex_and_decoding(tmp_path: Path) -> None:
    config = AttentionConfig(
        repeats=2,
        lengths="3000",
        groups="2",
        attention="nsa-merged,nsa-merged-shared",
        passes="forward,decode",
    )
    _, measured, _ = run_attention(config, tmp_path / "out")
    rows = {row["case"].split(",")[0]: row for row in measured}
    names = ("dense cudnn", "nsa-merged gather", "nsa-merged-shared flex", "nsa-merged decode")
    for name in names:
        assert rows[name]["status"] == "OK", rows[name]
        assert rows[name]["p50_s"] > 0
