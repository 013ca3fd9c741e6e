"""The weights of two models: how far each is off, and what was done to those that are off too far.

Shapes: O rows, I columns, G groups per row.
"""

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from qat.extensions.verify.facts import Finding, Side, Stored

FLOAT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8, "F32": 24, "F16": 11, "BF16": 8}
"""Significant bits of floating-point types, by torch's and by ggml's names."""
LEAST, MOST, SLACK = 1e-5, 0.9, 4.0
"""Rounding to b bits moves a weight by about 1.3 / 2**b of its norm. More than `SLACK` / 2**b is a
fault, between these two bounds: two unrelated weights of one norm differ by 1.4."""
PEERS, ABOVE_PEERS = 4, 6.0
"""A weight is also at fault if its error is so many times the median of others of its type, if
there are enough of them; where those are equal to the bit, so must this one be."""
FEWEST_BITS = 4
"""Significant bits that a scale should have: a float below its smallest normal one loses some."""
LOST = 1e-3
"""Share of a weight's norm in groups whose scale has fewer, from which on that is a fault."""
MOST_ROWS = 2**14
"""Rows of a weight whose order is looked for, as each is compared with each."""
PROBES = 64
"""Random directions that rows are compared along."""


class Difference(NamedTuple):
    """The distance of a weight of a file from that of the reference."""

    name: str
    type: str
    error: float
    """The norm of the difference over the norm of the weight."""
    limit: float
    """The largest error that rounding explains."""


def compare_weights(reference: Side, file: Side) -> tuple[list[Difference], list[Finding]]:
    """Compare all weights; the differences in falling order, and what is wrong."""
    findings, measured = [], []
    for name, expected in reference.weights.items():
        found = file.weights.get(name)
        if found is None and file.program is not None:
            continue
        if found is None or found.shape != expected.shape:
            shape = "the file lacks it" if found is None else f"shape {tuple(found.shape)}"
            findings.append(Finding("missing", name, f"{shape}, expected {tuple(expected.shape)}"))
            continue
        stored = file.stored.get(name) or of_dtype(found)
        fault = _scale_fault(name, stored, found, expected)
        if fault is not None:
            findings.append(fault)
            continue
        limit = min(MOST, max(LEAST, SLACK * 2.0**-stored.bits))
        measured.append(Difference(name, stored.type, relative_error(found, expected), limit))
    extra = file.weights.keys() - reference.weights.keys()
    findings += [Finding("missing", name, "the reference lacks it") for name in sorted(extra)]
    measured = _among_peers(measured)
    findings += _faults([each for each in measured if each.error > each.limit], reference, file)
    return sorted(measured, key=lambda each: each.error, reverse=True), findings


def of_dtype(weight: Tensor) -> Stored:
    """Return how a float weight is stored that is in no packed form."""
    name = str(weight.dtype).removeprefix("torch.")
    return Stored(name, FLOAT_BITS[name])


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`."""
    found, expected = found.float(), expected.float()
    norm = expected.norm().item()
    difference = (found - expected).norm().item()
    return difference / norm if norm else difference


def _among_peers(measured: list[Difference]) -> list[Difference]:
    """Return the differences with limits that follow from others of the same type."""
    by_type = defaultdict(list)
    for each in measured:
        by_type[each.type].append(each.error)
    limits = {
        kind: max(LEAST, ABOVE_PEERS * median(errors)) if len(errors) >= PEERS else MOST
        for kind, errors in by_type.items()
    }
    return [each._replace(limit=min(each.limit, limits[each.type])) for each in measured]


def _scale_fault(name: str, stored: Stored, found: Tensor, expected: Tensor) -> Finding | None:
    """Return what a weight's scales do not hold: numbers too large or too small for their dtype."""
    scales = found if stored.scales is None else stored.scales
    dtype = str(scales.dtype).removeprefix("torch.") if stored.scales is not None else stored.type
    what = "weights" if stored.scales is None else "scales"
    too_large = int((~scales.float().isfinite()).sum())
    if not too_large and not found.isfinite().all():
        too_large, what = int((~found.isfinite()).sum()), "weights"
    if too_large:
        largest = expected.abs().max().item()
        words = f"{too_large} {what} overflow {dtype}: the largest weight is {largest:.3g}"
        return Finding("overflow", name, words)
    if stored.scales is None:
        if stored.type not in FLOAT_BITS:
            return None
        groups, is_lost = expected.reshape(-1, 1), found.reshape(-1) == 0
    elif expected.numel() % scales.numel():
        return None
    else:
        groups = expected.reshape(scales.numel(), -1)
        is_lost = scales.float().reshape(-1).abs() < _smallest(scales.dtype)
    lost = groups[is_lost].float().norm() / expected.float().norm().clamp_min(torch.finfo().tiny)
    if lost <= LOST:
        return None
    number = int(is_lost.sum())
    words = f"{number} {what} underflow {dtype}, with {lost.item():.1%} of the weight's norm"
    return Finding("underflow", name, words)


def _smallest(dtype: torch.dtype) -> float:
    """Return the smallest number that has `FEWEST_BITS` significant bits, or, of 8, any."""
    if dtype.itemsize == 1:
        return torch.finfo(torch.float32).tiny
    found = torch.finfo(dtype)
    return found.smallest_normal * found.eps * 2 ** (FEWEST_BITS - 1)


def _faults(wrong: list[Difference], reference: Side, file: Side) -> Iterator[Finding]:
    ours = {each.name: reference.weights[each.name].float() for each in wrong}
    for name, _, error, limit in wrong:
        found, expected = file.weights[name].float(), ours[name]
        alike = (each for each, w in ours.items() if each != name and w.shape == found.shape)
        other = next((each for each in alike if relative_error(found, ours[each]) <= limit), None)
        if other is not None:
            yield Finding("swapped", name, f"it holds {other}")
        elif (order := _order(found, expected, limit)) is not None:
            yield Finding("order", name, f"its {order} are in another order")
        elif (factor := _factor(found, expected, error)) is not None:
            words = "it is {:.4g} times the weight plus {:.4g}".format(*factor)
            yield Finding("factor", name, words)
        else:
            words = f"off by {error:.3g} of its norm, expected at most {limit:.3g}"
            yield Finding("tensor", name, words)


def _order(found: Tensor, expected: Tensor, limit: float) -> str | None:
    """Return `rows` or `columns` if `found` has those of `expected` in another order."""
    if found.dim() == 1:
        pair = found.sort().values, expected.sort().values
        return "values" if relative_error(*pair) <= limit else None
    if found.dim() != 2:
        return None
    for word, theirs, ours in (("rows", found, expected), ("columns", found.T, expected.T)):
        O, I = ours.shape
        if O > MOST_ROWS:
            continue
        probes = torch.randn(I, PROBES, generator=torch.Generator().manual_seed(0))
        places = torch.cdist(theirs @ probes, ours @ probes).argmin(1)
        if relative_error(theirs, ours[places]) <= limit:
            return word
    return None


def _factor(found: Tensor, expected: Tensor, error: float) -> tuple[float, float] | None:
    """Return `a` and `b` if `found` is `a * expected + b`, with far less left than `error`."""
    x, y = expected.double().flatten(), found.double().flatten()
    spread = x - x.mean()
    power = spread.square().sum()
    a = (spread * (y - y.mean())).sum() / power if power else torch.tensor(1.0)
    b = y.mean() - a * x.mean()
    left = relative_error(found, (a * x + b).view_as(expected))
    return (a.item(), b.item()) if left < error / 4 else None
