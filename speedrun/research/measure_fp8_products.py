"""Would a step be faster if linears whose inputs are rounded to E4M3 multiplied in FP8 (Hopper)?

    python speedrun/research/measure_fp8_products.py --out fp8.jsonl
    TRITON_INTERPRET=1 python speedrun/research/measure_fp8_products.py --device cpu \
        --shapes tiny --batch-size 2 --seq-len 32 --out fp8.jsonl

A linear has three products, `Y = X W^T`, `dX = dY W` and `G = dY^T X`, which goes back into scales
and codebooks. A tensor core wants both factors with the summed dimension last, so X, W and dY are
each needed transposed too, and a scale can only be taken out of a sum that does not run over it.
With codes `Cx`, `Cw` and a scale for each row, `X = diag(sx) Cx` and `W = diag(sw) Cw`:

    Y  = diag(sx) (Cx Cw^T) diag(sw)    dX = (dY diag(sw)) Cw    G = (diag(sx) dY)^T Cx

So X and W have one code, in which all products read them, and their transposed copies are the same
bytes; Cx and sx are what the student's quantizer of activations finds. Only dY is rounded twice:
times sw with a scale for each token, and times sx with one for each feature. Its second scale needs
the whole column, hence a pass for the largest numbers and one for the codes.

First our kernels are compared with the textbook, bit by bit. Then products and casts take turns.
A step recomputes its layers, so each product but the last of a layer runs forward twice. What a
step would take is PROJECTED: the measured one less its products in bf16, plus those in FP8 and
their casts, in which "raw" leaves out all casts, and "before" leaves to the kernel before whatever
it could find: codes of X (not of attention's output), those of W, and the largest numbers of dY.

Shapes: M tokens, N out_features, K in_features.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from cyclopts import App
from research_records import commit, device
from speed_case import EXACT, FROZEN, SPEED_COLUMNS, Column, Row, settled, show, timed_row
from torch import Tensor
from torch.nn import functional as F

from qat.backend.device import select
from qat.bench.config import shape_called
from qat.bench.find_max import unless_out_of_memory
from qat.bench.measure import Clock
from qat.bench.run import prepare, time_ours
from qat.bench.student import WEIGHT_RMS, Ours
from qat.kernels.dispatch import IS_COMPILED, tl, triton
from qat.logs import configure
from qat.models.regions import MOST_GRAPHS
from qat.quant.activation import LARGEST_E4M3, SMALLEST_SCALE, quantize_tokens, token_levels

app = App(help=__doc__)
E4M3 = torch.float8_e4m3fn
GOAL = 0.15
"""Share of a step that FP8 must save to be built."""
BITS, GROUP = 2, 16
"""Of weights."""
ODD = ((37, 83), (1, 16), (130, 257), (64, 128), (3, 1025))
OUTLIER = 50.0
"""Size of one feature of inputs and of gradients, where all others have 1."""
REPEATS, LIMIT_S = 9, 4.0
SUMS = {"fast": True, "exact": False}
"""Whether sums stay in the tensor cores' own registers, of 14 bits or so."""
WAYS = [f"{way} {sums}" for way in ("raw", "compiled", "ours", "before") for sums in SUMS]
WAYS = ["raw tensor", *WAYS]
"""In which casts and products are made; "tensor" has one scale a matrix, and fast sums."""
STUDENTS = {"plain": "q2a4", "today": "q2a4_f8"}
"""Presets of the steps that are measured: inputs as they are, and rounded to E4M3."""


class Cast(NamedTuple):
    """A matrix `(R, C)` as codes of E4M3 times a scale for each row."""

    codes: Tensor
    """`(R, C)`"""
    transposed: Tensor | None
    """`(C, R)`: the same codes."""
    scales: Tensor
    """`(R, 1)` float32."""

    def values(self) -> Tensor:
        """What it stands for, `(R, C)` float32."""
        return self.codes.float() * self.scales


class GradientCast(NamedTuple):
    """dY as its two products read it."""

    rows: Tensor
    """`(M, N)`: codes of `dY diag(sw)`."""
    row_scales: Tensor
    """`(M, 1)` float32."""
    columns: Tensor
    """`(N, M)`: codes of `(diag(sx) dY)^T`."""
    column_scales: Tensor
    """`(N, 1)` float32."""


def cast(x: Tensor, *, transposes: bool = True) -> Cast:
    """The textbook's: the codes and scales that a student's quantizer finds."""
    found = token_levels(x, "fp8")
    codes = found.levels.to(E4M3)
    return Cast(codes, codes.t().contiguous() if transposes else None, found.scale)


def cast_gradient(dY: Tensor, x_scales: Tensor, w_scales: Tensor) -> GradientCast:
    """The textbook's."""
    rows = cast(dY.float() * w_scales.t(), transposes=False)
    columns = cast((dY.float() * x_scales).t(), transposes=False)
    return GradientCast(rows.codes, rows.scales, columns.codes.contiguous(), columns.scales)


# Our kernels: tiles of ROWS x COLUMNS, bound by memory. X and W are read twice, the second time
# from the cache, and dY twice from memory.

LARGEST, SMALLEST = tl.constexpr(LARGEST_E4M3), tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _scale_of(largest):
    scale = tl.maximum((largest.to(tl.float64) / LARGEST).to(tl.float32), SMALLEST)
    return scale, (1.0 / scale.to(tl.float64)).to(tl.float32)


@triton.jit
def _code(scaled):
    return tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST).to(tl.float8e4nv)


@triton.jit
def _cast_kernel(
    x,
    codes,
    transposed,
    scales,
    R,
    C,
    TRANSPOSES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < R
    largest = tl.zeros((ROWS,), tl.float32)
    for start in range(0, C, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = is_row[:, None] & (column < C)[None, :]
        tile = tl.load(x + row[:, None] * C + column[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(tile.to(tl.float32)), 1))
    scale, inverse = _scale_of(largest)
    tl.store(scales + row, scale, mask=is_row)
    for start in range(0, C, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        inside = is_row[:, None] & (column < C)[None, :]
        tile = tl.load(x + row[:, None] * C + column[None, :], mask=inside, other=0.0)
        code = _code(tile.to(tl.float32) * inverse[:, None])
        tl.store(codes + row[:, None] * C + column[None, :], code, mask=inside)
        if TRANSPOSES:
            tl.store(transposed + column[None, :] * R + row[:, None], code, mask=inside)


@triton.jit
def _largest_kernel(
    dY, x_scales, w_scales, largest, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < M, column < N
    inside = is_row[:, None] & is_column[None, :]
    tile = tl.load(dY + row[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
    x_scale = tl.load(x_scales + row, mask=is_row, other=0.0)
    w_scale = tl.load(w_scales + column, mask=is_column, other=0.0)
    of_rows = tl.max(tl.abs(tile * w_scale[None, :]), 1)
    of_columns = tl.max(tl.abs(tile * x_scale[:, None]), 0)
    tl.atomic_max(largest + row, of_rows, mask=is_row, sem="relaxed")
    tl.atomic_max(largest + M + column, of_columns, mask=is_column, sem="relaxed")


@triton.jit
def _gradient_kernel(
    dY,
    x_scales,
    w_scales,
    largest,
    rows,
    columns,
    scales,
    M,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < M, column < N
    inside = is_row[:, None] & is_column[None, :]
    tile = tl.load(dY + row[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
    x_scale = tl.load(x_scales + row, mask=is_row, other=0.0)
    w_scale = tl.load(w_scales + column, mask=is_column, other=0.0)
    row_scale, row_inverse = _scale_of(tl.load(largest + row, mask=is_row, other=0.0))
    column_scale, column_inverse = _scale_of(
        tl.load(largest + M + column, mask=is_column, other=0.0)
    )
    if tl.program_id(1) == 0:
        tl.store(scales + row, row_scale, mask=is_row)
    if tl.program_id(0) == 0:
        tl.store(scales + M + column, column_scale, mask=is_column)
    code = _code(tile * w_scale[None, :] * row_inverse[:, None])
    tl.store(rows + row[:, None] * N + column[None, :], code, mask=inside)
    code = _code(tile * x_scale[:, None] * column_inverse[None, :])
    tl.store(columns + column[None, :] * M + row[:, None], code, mask=inside)


class Tile(NamedTuple):
    """What a program of a kernel takes."""

    rows: int
    columns: int
    warps: int


TILES = (
    Tile(32, 128, 4),
    Tile(32, 256, 8),
    Tile(64, 64, 4),
    Tile(64, 128, 4),
    Tile(64, 128, 8),
    Tile(128, 64, 4),
    Tile(128, 128, 8),
)


class OurCasts(NamedTuple):
    """The casts by our kernels, and the tile of each."""

    casting: Tile = TILES[0]
    looking: Tile = TILES[4]
    rounding: Tile = TILES[4]

    def cast(self, x: Tensor, *, transposes: bool = True) -> Cast:
        """As the textbook's, in one kernel."""
        (R, C), (rows, columns, warps) = x.shape, self.casting
        codes = torch.empty(R, C, dtype=E4M3, device=x.device)
        transposed = torch.empty(C, R, dtype=E4M3, device=x.device) if transposes else None
        scales = torch.empty(R, 1, device=x.device)
        outputs = (codes, codes if transposed is None else transposed, scales)
        _cast_kernel[(triton.cdiv(R, rows),)](
            x, *outputs, R, C, TRANSPOSES=transposes, ROWS=rows, COLUMNS=columns, num_warps=warps
        )
        return Cast(codes, transposed, scales)

    def cast_gradient(self, dY: Tensor, x_scales: Tensor, w_scales: Tensor) -> GradientCast:
        """As the textbook's, in two kernels."""
        largest = self.largest(dY, x_scales, w_scales)
        return self.round_gradient(dY, x_scales, w_scales, largest)

    def largest(self, dY: Tensor, x_scales: Tensor, w_scales: Tensor) -> Tensor:
        """The largest magnitudes of the rows of `dY diag(sw)`, then columns of `diag(sx) dY`."""
        (M, N), (rows, columns, warps) = dY.shape, self.looking
        found = torch.zeros(M + N, device=dY.device)
        _largest_kernel[(triton.cdiv(M, rows), triton.cdiv(N, columns))](
            dY, x_scales, w_scales, found, M, N, ROWS=rows, COLUMNS=columns, num_warps=warps
        )
        return found

    def round_gradient(
        self, dY: Tensor, x_scales: Tensor, w_scales: Tensor, largest: Tensor
    ) -> GradientCast:
        """The codes, where the largest magnitudes are known."""
        (M, N), (rows, columns, warps) = dY.shape, self.rounding
        of_rows = torch.empty(M, N, dtype=E4M3, device=dY.device)
        of_columns = torch.empty(N, M, dtype=E4M3, device=dY.device)
        scales = torch.empty(M + N, 1, device=dY.device)
        tensors = (dY, x_scales, w_scales, largest, of_rows, of_columns, scales)
        _gradient_kernel[(triton.cdiv(M, rows), triton.cdiv(N, columns))](
            *tensors, M, N, ROWS=rows, COLUMNS=columns, num_warps=warps
        )
        return GradientCast(of_rows, scales[:M], of_columns, scales[M:])


# The products. X, W and dY stand for their casts.


def forward_product(X: Cast, W: Cast, *, fast: bool) -> Tensor:
    """Y, `(M, N)` bf16."""
    return _scaled_mm(X.codes, W.codes, (X.scales, W.scales), fast=fast)


def input_gradient(dY: GradientCast, W: Cast, ones: Tensor, *, fast: bool) -> Tensor:
    """dX, `(M, K)` bf16; `ones` `(K, 1)`."""
    return _scaled_mm(dY.rows, W.transposed, (dY.row_scales, ones), fast=fast)


def weight_gradient(dY: GradientCast, X: Cast, ones: Tensor, *, fast: bool) -> Tensor:
    """G, `(N, K)` bf16; `ones` `(K, 1)`."""
    return _scaled_mm(dY.columns, X.transposed, (dY.column_scales, ones), fast=fast)


def _scaled_mm(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], *, fast: bool) -> Tensor:
    """`a b^T` of codes, both with the summed dimension last, with a scale for each row of both."""
    return torch._scaled_mm(
        a,
        b.t(),
        scale_a=scales[0],
        scale_b=scales[1].t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


class Site(NamedTuple):
    """A linear of every layer."""

    name: str
    N: int
    K: int
    is_made_by_us: bool = True
    """Whether the kernel before is ours or the compiler's, so that it could find the codes of X."""
    forwards: int = 2
    """Of a step whose layers are recomputed."""


def sites_of(shape: str) -> list[Site]:
    """The linears of a published shape, projections of one input joined."""
    sizes = shape_called(shape)
    D, F_, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    return [
        Site("query, key, value", queries + 2 * keys, D),
        Site("out", D, queries, is_made_by_us=False),
        Site("gate, up", 2 * F_, D),
        Site("down", D, F_, forwards=1),  # backward reads no layer's output
    ]


class Factors(NamedTuple):
    """What a linear multiplies, bf16."""

    x: Tensor
    """`(M, K)`"""
    w: Tensor
    """`(N, K)`"""
    dY: Tensor
    """`(M, N)`"""


def random_factors(M: int, site: Site, where: torch.device, *, outlier: float = 1.0) -> Factors:
    """Inputs and gradients of a normal distribution, one feature of each larger; a packed weight's
    values: a few levels times a scale for each group."""
    N, K = site.N, site.K
    x, dY = torch.randn(M, K, device=where), 1e-3 * torch.randn(M, N, device=where)
    x[:, K // 2] *= outlier
    dY[:, N // 2] *= outlier
    levels = torch.linspace(-1, 1, 2**BITS, device=where) * WEIGHT_RMS
    indices = torch.randint(0, 2**BITS, (N, K // GROUP, GROUP), device=where)
    w = levels[indices] * (0.5 + torch.rand(N, K // GROUP, 1, device=where))
    return Factors(x.bfloat16(), w.flatten(1).bfloat16(), dY.bfloat16())


def check(ours: OurCasts, where: torch.device) -> list[str]:
    """Where our kernels' codes and scales are not the textbook's, bit by bit, at odd shapes."""
    wrong = []
    for R, C in ODD:
        sizes = torch.logspace(-9, 3, R, device=where)[:, None]
        x = (torch.randn(R, C, device=where) * sizes).bfloat16()
        x[:, C // 3], x[R // 2] = OUTLIER, 0
        scales = cast(x).scales, torch.rand(C, 1, device=where) + SMALLEST_SCALE
        pairs = {
            "X": (ours.cast(x), cast(x)),
            "X alone": (ours.cast(x, transposes=False), cast(x, transposes=False)),
            "dY": (ours.cast_gradient(x, *scales), cast_gradient(x, *scales)),
        }
        for name, (found, expected) in pairs.items():
            for field, mine, textbook in zip(found._fields, found, expected, strict=True):
                if textbook is not None and not torch.equal(bits(mine), bits(textbook)):
                    count = (bits(mine) != bits(textbook)).sum().item()
                    wrong.append(f"{name} {R} x {C}: {count} of {field} differ")
    return wrong


def bits(tensor: Tensor) -> Tensor:
    """As integers, so that zeros of either sign differ."""
    return tensor.view(torch.uint8 if tensor.dtype == E4M3 else torch.int32)


def tune(clock: Clock, factors: Factors) -> OurCasts:
    """The fastest tile of each kernel for one linear."""
    x, w, dY = factors
    scales = cast(x).scales, cast(w).scales
    largest = OurCasts().largest(dY, *scales)

    def best(name: str, run: Callable[[OurCasts], object]) -> Tile:
        ways = [OurCasts(tile, tile, tile) for tile in TILES]
        seconds = medians(clock, {ours.casting: partial(run, ours) for ours in ways})
        chosen = min(seconds, key=seconds.__getitem__)
        print(f"{name}: {chosen} {1e6 * seconds[chosen]:.0f} us", flush=True)
        return chosen

    return OurCasts(
        best("codes of X", lambda ours: ours.cast(x)),
        best("largest of dY", lambda ours: ours.largest(dY, *scales)),
        best("codes of dY", lambda ours: ours.round_gradient(dY, *scales, largest)),
    )


def medians(clock: Clock, runs: dict) -> dict:
    """Median seconds of every run that this PyTorch and device can do, in turns.

    On a GPU they are recorded: the host launches too slowly for small kernels.
    """
    able, backend = {}, clock.backend
    for name, run in runs.items():
        try:
            run()  # compiles
            able[name] = backend.record(run)[0] if backend.records() else run
        except (RuntimeError, NotImplementedError) as error:
            print(f"{name} does not run: {type(error).__name__}: {str(error)[:300]}", flush=True)
    turns = clock.turns(list(able.values()))
    return dict(zip(able, map(statistics.median, turns), strict=True))


def timed(clock: Clock, site: Site, factors: Factors, ours: OurCasts) -> dict[str, float]:
    """Seconds of each product and cast of a linear, by name."""
    x, w, dY = factors
    torch._dynamo.config.recompile_limit = MOST_GRAPHS  # each width is a graph of its own
    compiled, compiled_gradient = (
        torch.compile(fn, dynamic=False, fullgraph=True) for fn in (cast, cast_gradient)
    )
    X, W = ours.cast(x), ours.cast(w)
    scales = X.scales, W.scales
    largest, G = ours.largest(dY, *scales), ours.cast_gradient(dY, *scales)
    ones = torch.ones(site.K, 1, device=x.device)
    runs: dict[str, Callable[[], object]] = {
        "bf16 Y": lambda: F.linear(x, w),
        "bf16 dX": lambda: dY @ w,
        "bf16 G": lambda: dY.t() @ x,
    }
    for sums, fast in SUMS.items():
        runs |= products(X, W, G, ones, sums=sums, fast=fast)
    one = torch.ones((), device=x.device)
    alone = X._replace(scales=one), W._replace(scales=one)
    G_alone = G._replace(row_scales=one, column_scales=one)
    runs |= products(*alone, G_alone, one, sums="tensor", fast=True)
    for name, one, both in (
        ("compiled", compiled, compiled_gradient),
        ("ours", ours.cast, ours.cast_gradient),
    ):
        runs |= {
            f"{name} X codes": partial(one, x, transposes=False),
            f"{name} X": partial(one, x),
            f"{name} W": partial(one, w),
            f"{name} dY": partial(both, dY, *scales),
        }
    runs["before dY"] = lambda: ours.round_gradient(dY, *scales, largest)
    return medians(clock, runs)


def products(
    X: Cast, W: Cast, dY: GradientCast, ones: Tensor, *, sums: str, fast: bool
) -> dict[str, Callable[[], Tensor]]:
    """The three products in FP8, by name."""
    return {
        f"{sums} Y": partial(forward_product, X, W, fast=fast),
        f"{sums} dX": partial(input_gradient, dY, W, ones, fast=fast),
        f"{sums} G": partial(weight_gradient, dY, X, ones, fast=fast),
    }


def of_a_step(site: Site, seconds: dict[str, float]) -> dict[str, float]:
    """Seconds of one linear in a step, in bf16 and by every way to have FP8; those that ran."""

    def multiplied(kind: str) -> float:
        forward = site.forwards * seconds[f"{kind} Y"]
        return forward + seconds[f"{kind} dX"] + seconds[f"{kind} G"]

    def inputs(name: str) -> float:
        """Forward needs the codes alone, and its repetition in backward the transposed too."""
        return seconds[f"{name} X codes"] + seconds[f"{name} X"]

    def casts(name: str) -> float:
        if name == "raw":
            return 0.0
        if name == "before":
            return seconds["before dY"] + (0.0 if site.is_made_by_us else inputs("ours"))
        return inputs(name) + seconds[f"{name} W"] + seconds[f"{name} dY"]

    found = {"bf16": multiplied("bf16")}
    for way in WAYS:
        name, sums = way.split()
        try:
            found[way] = multiplied(sums) + casts(name)
        except KeyError:  # something did not run, which was said
            continue
    return found


def noise(site: Site, M: int, where: torch.device, outlier: float, ours: OurCasts) -> list[Row]:
    """Relative errors of the three products, of bf16 and of FP8, against float64.

    Exact is what a student of today means: its rounded input, its formed weight, and gradients
    straight through the rounding. `own` has codes of their own for the transposed X and W. Of G
    what belongs to the outliers is left out: nothing else would be seen.
    """
    x, w, dY = random_factors(M, site, where, outlier=outlier)
    X, W = ours.cast(x), ours.cast(w)
    G, ones = ours.cast_gradient(dY, X.scales, W.scales), torch.ones(site.K, 1, device=where)
    read, read64 = quantize_tokens(x, "fp8"), X.values().double()
    w64, dY64 = w.double(), dY.double()
    ways = {
        "Y": (F.linear(read64, w64), F.linear(read, w), partial(forward_product, X, W), (x, w)),
        "dX": (dY64 @ w64, dY @ w, partial(input_gradient, G, W, ones), (dY, w.t())),
        "G": (
            dY64.t() @ read64,
            dY.t() @ read,
            partial(weight_gradient, G, X, ones),
            (dY.t(), read.t()),
        ),
    }
    rows: list[Row] = []
    for product, (exact, plain, fp8, factors) in ways.items():
        codes = [ours.cast(each.contiguous(), transposes=False) for each in factors]
        found = {
            "bf16": plain,
            "fp8_fast": fp8(fast=True),
            "fp8_exact": fp8(fast=False),
            "fp8_own": _scaled_mm(
                *(each.codes for each in codes), tuple(each.scales for each in codes), fast=False
            ),
        }
        if product == "G":
            for tensor in (exact, *found.values()):
                tensor[site.N // 2], tensor[:, site.K // 2] = 0, 0
        errors = {way: relative(tensor, exact) for way, tensor in found.items()}
        row = {"kind": "noise", "linear": site.name, "product": product, "outlier": outlier}
        rows.append(row | errors)
    return rows


def relative(found: Tensor, exact: Tensor) -> float:
    """The error's length over that of what is exact."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def measured_step(shape: str, case: str, common: Row) -> Row:
    """A frozen student's step as it is; without numbers where memory ran out."""
    config = settled(**common, **EXACT, **FROZEN, form="whole", to=STUDENTS[case])
    backend = select(config.device)

    def run() -> Row:
        setting, student = prepare(config, shape)
        timing = time_ours(setting, Ours(student, config), config.batch_size)
        return timed_row(setting, case, timing, reserved_gib=backend.reserved_memory_gib())

    gc.collect()
    backend.free_memory()
    row = unless_out_of_memory(run, backend)
    gc.collect()
    backend.free_memory()
    return row or {"kind": "step", "case": case, "student": shape, "status": "OOM"}


def projected(shape: str, steps: dict[str, float], linears: dict[str, float]) -> list[Row]:
    """What a step would take by every way, were all else as in one whose inputs are not rounded;
    `linears` are the seconds of one layer."""
    layers = shape_called(shape)["num_hidden_layers"]
    rows: list[Row] = []
    for way, seconds in linears.items():
        step_s = steps["plain"] - layers * (linears["bf16"] - seconds)
        saved = {f"saved_of_{case}": 1 - step_s / now for case, now in steps.items()}
        row = {"kind": "projected", "student": shape, "way": way, "step_s": step_s}
        rows.append({**row, "linears_s": layers * seconds, **saved, "status": "PROJECTED"})
    return rows


def nearest_codes(convert: Callable) -> Callable:
    """For Triton's interpreter, which cuts bits off where a GPU rounds to the nearest E4M3."""

    def converted(array: np.ndarray, source: object, target: object, rounding: object) -> object:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(array, source, target, rounding)
        values = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
        return values.to(E4M3).view(torch.uint8).numpy()

    return converted


def _columns(names: Sequence[str], key: str, shown: str) -> tuple[Column, ...]:
    return tuple((name, key.format(name.replace(" ", "_")), shown) for name in names)


LINEAR_COLUMNS = _columns(
    [f"{kind} {product}" for kind in ("bf16", "tensor", *SUMS) for product in ("Y", "dX", "G")],
    "{}_ms",
    "{:.3f}",
)
CAST_COLUMNS = _columns(
    [f"{by} {what}" for by in ("compiled", "ours") for what in ("X codes", "X", "W", "dY")]
    + ["before dY"],
    "{}_ms",
    "{:.3f}",
)
WAY_COLUMNS = _columns(WAYS, "{}_over_bf16", "{:.2f}")
NOISE_COLUMNS = _columns(("bf16", "fp8_fast", "fp8_exact", "fp8_own"), "{}", "{:.5f}")
STEP_COLUMNS = (
    ("Step(s)", "step_s", "{:.4f}"),
    ("Linears(s)", "linears_s", "{:.4f}"),
    ("Saved of today's", "saved_of_today", "{:.3f}"),
    ("of plain", "saved_of_plain", "{:.3f}"),
    ("Status", "status", "{}"),
)


@app.default
def measure(
    *,
    out: Path,
    shapes: str = "qwen3-4b,qwen3-0.6b",
    only: str = "products,noise,step",
    device: str = "auto",
    batch_size: int = 32,
    seq_len: int = 512,
    steps: int = 8,
) -> None:
    """Append rows to OUT and print tables; the step is that of the first shape.

    Parameters
    ----------
    only
        Parts, joined by commas; a step measured without products is not projected.
    """
    configure()
    torch.manual_seed(0)
    backend, names, parts = select(device), shapes.split(","), only.split(",")
    where = torch.device(backend.device)
    if not IS_COMPILED:
        from triton.runtime import interpreter

        interpreter._convert_float = nearest_codes(interpreter._convert_float)
    writer = Writer(out)
    ours = OurCasts()
    wrong = check(ours, where)
    print("\n".join(wrong) or "our codes and scales are the textbook's, bit by bit", flush=True)
    M, seconds = batch_size * seq_len, {}
    largest = max(sites_of(names[0]), key=lambda site: site.N * site.K)
    if "products" in parts:
        clock = Clock(backend, repeats=REPEATS, limit_s=LIMIT_S)
        ours = tune(clock, random_factors(M, largest, where))
        seconds = _products(writer, clock, names[0], ours=ours, M=M)
    if "step" in parts:
        common = {"device": device, "batch_size": batch_size, "seq_len": seq_len, "steps": steps}
        _steps(writer, names[0], common | {"gradient_checkpointing": True}, seconds)
    for name in names[1:] if "products" in parts else ():
        _products(writer, clock, name, ours=ours, M=M)
    if "noise" in parts:
        rows = [row for size in (1.0, OUTLIER) for row in noise(largest, M, where, size, ours)]
        writer.add(rows)
        first = ("Relative error", "product", "{}"), ("Outlier", "outlier", "{}")
        show(rows, *first, columns=NOISE_COLUMNS)
    if wrong:
        raise SystemExit("our casts are not the textbook's: no number of theirs counts")


class Writer:
    """Appends rows to a file, each with its device and commit."""

    def __init__(self, out: Path) -> None:
        self.out, self.began = out, time.monotonic()
        out.parent.mkdir(parents=True, exist_ok=True)
        self.facts = {"device": device(), "commit": commit(), "torch": torch.__version__}

    def add(self, rows: Sequence[Row]) -> None:
        """Write rows, and say how long it took from the start."""
        with self.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row | self.facts) + "\n" for row in rows)
        print(f"{len(rows)} rows after {time.monotonic() - self.began:.0f} s", flush=True)


def _products(
    writer: Writer, clock: Clock, shape: str, *, ours: OurCasts, M: int
) -> dict[str, float]:
    """Measure a shape's linears; seconds of a layer in a step, by way."""
    where, rows, total = torch.device(clock.backend.device), [], {}
    for site in sites_of(shape):
        seconds = timed(clock, site, random_factors(M, site, where), ours)
        step = of_a_step(site, seconds)
        row = {"kind": "products", "student": shape, "linear": site.name, "M": M}
        row |= {"N": site.N, "K": site.K, "forwards": site.forwards}
        rows.append(row | _shown(seconds, step))
        for way, value in step.items():
            total.setdefault(way, []).append(value)
    layer = {way: sum(v) for way, v in total.items() if len(v) == len(rows)}
    rows.append({"kind": "products", "student": shape, "linear": "layer", "M": M})
    rows[-1] |= _shown({}, layer)
    writer.add(rows)
    for columns in (LINEAR_COLUMNS, CAST_COLUMNS, WAY_COLUMNS):
        show(rows, (shape, "linear", "{}"), columns=columns)
    return layer


def _shown(seconds: dict[str, float], step: dict[str, float]) -> Row:
    """Milliseconds of the parts and of a step, and how often as fast as bf16 a step's are."""
    found = {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
    found |= {f"step_{way}_ms": 1e3 * value for way, value in step.items()}
    found |= {f"{way}_over_bf16": step["bf16"] / value for way, value in step.items()}
    return {key.replace(" ", "_"): value for key, value in found.items()}


def _steps(writer: Writer, shape: str, common: Row, linears: dict[str, float]) -> None:
    """Measure the step, and project what it would take."""
    rows = [measured_step(shape, case, common) for case in STUDENTS]
    writer.add(rows)
    show(rows, ("Student", "case", "{}"), columns=SPEED_COLUMNS)
    seconds = {row["case"]: row["step_s"] for row in rows if row["status"] == "OK"}
    if not linears or len(seconds) < len(STUDENTS):
        return
    found = projected(shape, seconds, linears)
    writer.add(found)
    show(found, ("PROJECTED", "way", "{}"), columns=STEP_COLUMNS)
    best = {row["way"]: row["saved_of_today"] for row in found if row["way"].startswith("ours")}
    for way, saved in best.items():
        answer = "train one and compare its KL" if saved >= GOAL else "do not build it"
        print(f"{way}: PROJECTED to save {saved:.1%} of a step, goal {GOAL:.0%}: {answer}")


if __name__ == "__main__":
    app()
