"""A float model whose weights lie on a grid, as another program's QAT leaves them, with that grid.

A weight that was trained as `level * scale` and stored in 16 bits is rounded to these. Levels and
scales are sought whose products round to the same numbers, all of them; nothing is approximated.

Shapes: O rows, I columns, N groups of W weights, C levels.
"""

import logging
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from qat.convert.checkpoint import write_converted
from qat.convert.config import ConvertConfig
from qat.convert.convert import Converted
from qat.convert.quantize import QuantizeReport, quantize_model
from qat.errors import ConfigError
from qat.files import check_free
from qat.models.load import load_model, load_tokenizer
from qat.nn.quant_weight import quant_weights
from qat.nn.swap import linear_names, put_quantized, table_names
from qat.quant.codebook import fixed_grid, nearest_level
from qat.quant.spec import LutSpec, PlanRule, QuantPlan
from qat.quant.weight import QuantizedWeight, Scales, index_dtype, round_as_stored

logger = logging.getLogger(__name__)

GRIDS = (
    {"bits": 1, "codebook": "seq"},
    {"bits": 2, "codebook": "ternary"},
    {"bits": 2, "codebook": "int"},
    {"bits": 2, "codebook": "seq"},
    {"bits": 3, "codebook": "int"},
    {"bits": 3, "codebook": "seq"},
    {"bits": 4, "codebook": "int"},
    {"bits": 4, "codebook": "e2m1"},
    {"bits": 4, "codebook": "seq"},
    {"bits": 5, "codebook": "int"},
    {"bits": 6, "codebook": "int"},
    {"bits": 8, "codebook": "int"},
)
"""Levels that are tried. Integers of 5 bits hold those of 4 with any zero point."""
GROUP_SIZES = (16, 32, 64, 128, 256)
"""Weights that may share a scale, besides a whole row."""
MOST_LEVELS = 256
"""Levels of a palette, which are the distinct numbers of a weight."""
FEW_GROUPS, FEW_COLUMNS, FEW_WEIGHTS = 4, 128, 4096
"""Groups, and weights of each, that show that a format does not fit; and weights that show that
there is no palette."""
PIECE = 2**21
"""Weights that are processed at a time: 16 MiB for each temporary in float64."""


def snap_checkpoint(source: str, out: Path, config: ConvertConfig) -> QuantizeReport:
    """Write the model `source` to `out` as a student with the grids that its weights lie on.

    Weights without one stay in floating point.

    Raises:
        ConfigError: no linear lies on a grid.
    """
    check_free(out)
    student = load_model(source, device="cpu", dtype="fp32")
    plan = snap_weights(source, student.model)
    done = Converted(quantize_model(student, plan), plan, fits=[], rotation=None)
    write_converted(out, done, student, load_tokenizer(source), source=source, config=config)
    return done.report


def snap_weights(source: str, model: PreTrainedModel) -> QuantPlan:
    """Give linears and tables of `model` the grids that they lie on; return the plan it has then.

    Raises:
        ConfigError: no linear lies on one, or weights have indices already.
    """
    if quant_weights(model):
        raise ConfigError(
            f"{source} is a packed model, whose weights have levels and scales already, expected a "
            "float model for --snap; train or export it as it is"
        )
    rules, linears, left = [], linear_names(model), []
    for name in (*table_names(model), *linears):
        found = find_grid(model.get_submodule(name).weight.detach())
        if found is not None:
            put_quantized(model, name, found.weight, found.spec)
        elif name in linears:
            left.append(name)
        rules.append(PlanRule(pattern=name, spec=found and found.spec))
    if len(left) == len(linears):
        raise ConfigError(
            f"the {len(linears)} linears of {source} lie on no grid of at most 8 bits with a scale "
            "for a row or for 16 to 256 weights, expected one as QAT leaves it; quantize the model "
            "with --to PLAN"
        )
    if left:
        logger.warning(
            "%d of %d linears lie on no grid and stay in floating point (such as %s)",
            len(left),
            len(linears),
            left[0],
        )
    return QuantPlan(name="snapped", rules=tuple(rules))


class Snapped(NamedTuple):
    """A weight on its grid."""

    spec: LutSpec
    weight: QuantizedWeight


def find_grid(weight: Tensor) -> Snapped | None:
    """Return `weight` `(O, I)` in the smallest format that gives it exactly; None if none does.

    Exactly means: rounded to the narrowest dtype that holds `weight`.
    """
    if not weight.any() or not weight.isfinite().all():
        return None
    dtype, palette = narrowest_dtype(weight), _palette(weight)
    most = math.inf if palette is None else palette.spec.bits
    for spec in _formats(weight.shape[1]):
        if spec.bits + spec.scale_bits / spec.group_size >= most:
            break
        found = _on_grid(weight, spec, dtype)
        if found is not None:
            return found
    return palette


def narrowest_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of the fewest significant bits that holds all of `weight`."""
    narrow = (torch.bfloat16, torch.float16)
    return next((d for d in narrow if torch.equal(weight.to(d).float(), weight)), torch.float32)


def _formats(columns: int) -> Iterator[LutSpec]:
    """Yield formats for rows of so many weights, those of the fewest bits first."""
    sizes = {size for size in (*GROUP_SIZES, columns) if columns % size == 0}
    found = [LutSpec(**grid, group_size=size) for grid in GRIDS for size in sizes]
    yield from sorted(found, key=lambda spec: spec.bits + spec.scale_bits / spec.group_size)


def _palette(weight: Tensor) -> Snapped | None:
    few = weight.flatten()[:: max(1, weight.numel() // FEW_WEIGHTS)]
    if len(few.unique()) > MOST_LEVELS:
        return None
    levels, indices = weight.unique(return_inverse=True)
    if len(levels) > MOST_LEVELS:
        return None
    O, I = weight.shape
    spec = LutSpec(bits=max(1, (len(levels) - 1).bit_length()), codebook="lut", group_size=I)
    levels = torch.cat([levels, levels[-1:].expand(spec.num_levels - len(levels))]).float()
    indices = indices.to(index_dtype(spec.num_levels))
    return Snapped(spec, QuantizedWeight(indices, levels, Scales(torch.ones(O, 1), bits=16)))


def _on_grid(weight: Tensor, spec: LutSpec, dtype: torch.dtype) -> Snapped | None:
    O, I = weight.shape
    groups, levels = weight.view(-1, spec.group_size), cast(Tensor, fixed_grid(spec))
    if not _may_fit(groups[:: max(1, len(groups) // FEW_GROUPS)], levels, dtype):
        return None
    parts = []
    for piece in groups.split(max(1, PIECE // spec.group_size)):
        found = _fit(piece, levels, dtype)
        if found is None:
            return None
        parts.append(found)
    indices, scales = map(torch.cat, zip(*parts, strict=True))
    bits = next(b for b in (5, 16, 32) if torch.equal(round_as_stored("scales", scales, b), scales))
    spec = spec.model_copy(update={"scale_bits": bits})
    indices = indices.view(O, I).to(index_dtype(spec.num_levels))
    scales = Scales(scales.view(O, -1), bits=spec.scale_bits)
    return Snapped(spec, QuantizedWeight(indices, levels, scales))


def _fit(groups: Tensor, levels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Return the level of each weight `(N, W)` and the scale of each group `(N,)`; None if none."""
    groups = groups.double()
    extreme = _extreme(groups)
    indices = torch.zeros(groups.shape, dtype=torch.long)
    scales = torch.zeros(len(groups))
    left = extreme.nonzero()[:, 0]  # a group of zeros has a scale of zero
    tried = _levels_of_extreme(levels)
    for level, of_power in [*product(tried, (True,)), *product(tried, (False,))]:
        near = extreme[left] / level
        # few weights may fit several scales: then that of MX formats, a power of two, is meant
        asked = left[near.frexp().mantissa == 0.5] if of_power else left
        if not len(asked):
            continue
        chosen, scale = _with_scale_near(groups[asked], extreme[asked] / level, levels, dtype)
        fits = scale != 0
        indices[asked[fits]], scales[asked[fits]] = chosen[fits], scale[fits]
        left = left[scales[left] == 0]
    return None if len(left) else (indices, scales)


def _may_fit(groups: Tensor, levels: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a few weights of each group fit; all candidates are tried at once."""
    groups = groups.double()
    extreme = _extreme(groups)[:, None]
    few = torch.cat([extreme, groups[:, :FEW_COLUMNS]], 1)
    tried = _levels_of_extreme(levels)
    near = (extreme / tried).flatten()
    repeated = few.repeat_interleave(len(tried), 0)
    _, scale = _with_scale_near(repeated, near, levels, dtype)
    return bool(((scale != 0).view(-1, len(tried)).any(1) | (extreme[:, 0] == 0)).all())


def _extreme(groups: Tensor) -> Tensor:
    """Return the weight of largest magnitude of each group, `(N,)`."""
    return groups.gather(1, groups.abs().argmax(1, keepdim=True))[:, 0]


def _levels_of_extreme(levels: Tensor) -> Tensor:
    """Return the levels that the largest weight may have, the outermost first.

    Divided by one of them it gives nearly the scale, so that the levels of the others follow.
    """
    outermost = levels[levels != 0].double()
    return outermost[outermost.abs().argsort(descending=True)]


def _with_scale_near(
    groups: Tensor, near: Tensor, levels: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return levels `(N, W)`, and scales near `near` `(N,)` that give all weights, else zero."""
    near = torch.where(near == 0, 1.0, near)
    chosen = nearest_level((groups / near[:, None]).float(), levels).long()
    return chosen, _scales(groups, levels.double()[chosen], near.sign(), dtype)


def _scales(groups: Tensor, levels: Tensor, signs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale `(N,)` float32 whose products with `levels` round to `groups`, else zero.

    It is a float16 number if there is such, and that of least squares if it gives all weights:
    rounding moved them both ways. `signs` are those of the scales.
    """
    size, unit = groups.abs(), levels.abs()
    spacing = torch.finfo(dtype).eps * 2.0 ** (size.frexp().exponent - 1).double()
    below = torch.where(size.frexp().mantissa == 0.5, spacing / 4, spacing / 2)
    is_some = unit > 0
    low = torch.where(is_some, (size - below) / unit, 0.0).amax(1)
    high = torch.where(is_some, (size + spacing / 2) / unit, torch.inf).amin(1)
    found, left = torch.zeros(len(groups)), (low <= high).nonzero()[:, 0]
    nearest = (size * unit).sum(1) / unit.square().sum(1).clamp_min(torch.finfo().tiny)
    for scale in _numbers_near(nearest, (low + high) / 2, low):
        if not len(left):
            break
        value = (signs * scale)[left].float()
        product = (levels[left].float() * value[:, None]).to(dtype)
        # at an end of the interval products lie between two numbers, and round to either
        fits = (product.double() == groups[left]).all(1) & (value != 0)
        found[left[fits]] = value[fits]
        left = left[~fits]
    return found


def _numbers_near(*wished: Tensor) -> Iterator[Tensor]:
    """Yield numbers of float16, then of float32, at each of `wished` and just above it."""
    for kind in (torch.float16, torch.float32):
        for each in wished:
            rounded = each.to(kind).numpy()
            above = np.nextafter(rounded, np.array(np.inf, rounded.dtype))
            yield from map(torch.from_numpy, (rounded, above))
