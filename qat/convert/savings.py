"""Sizes that one more flag of `qat convert` would save of a student's file."""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from qat.convert.config import FLOAT, ConvertConfig, read_plan
from qat.convert.shipping import Shipping
from qat.convert.tables import StoredTable, table_format
from qat.errors import ConfigError, ExportError
from qat.models.cost import format_bits
from qat.nn.swap import holds_quantized_tables, linear_names, table_names, weight_shape
from qat.quant.spec import PRESETS, LutSpec, QuantPlan

FEWER_BITS = (8, 4, 2)
"""Bits of tables to suggest."""
WORTH_A_LINE = 0.03
"""Fraction of the file from which on a saving is suggested."""

Formats = dict[str, LutSpec]


@dataclass(frozen=True)
class Saving:
    """A flag of `qat convert`, and what it would save of a file."""

    flag: str
    megabytes: float
    """In 10**6 bytes."""


def savings(
    model: PreTrainedModel,
    config: ConvertConfig,
    *,
    sizes: Mapping[str, int],
    stored: Mapping[str, StoredTable],
    shipping: Shipping | None,
) -> list[Saving]:
    """Return the next smaller step of `--embedding-bits` and of the preset that all targets hold.

    Nothing within a budget, which says the size itself, or of floats, which are what was asked for.

    Args:
        model: the student, or the same model without values.
        sizes: bytes of each tensor of its checkpoint, or of the file of a target.
        stored: its tables as a quantized source holds them.
    """
    if config.bits_budget is not None or config.to in (None, FLOAT):
        return []
    found, least = [], WORTH_A_LINE * sum(sizes.values())
    for options in (_of_tables(model, stored, shipping), _of_presets(model, config)):
        saved = {flag: _saved(model, sizes, form, shipping) for flag, form in options.items()}
        worth = {flag: size for flag, size in saved.items() if size > least}
        if worth:
            flag = min(worth, key=worth.__getitem__)
            found.append(Saving(flag, worth[flag] / 1e6))
    return found


def _saved(
    model: PreTrainedModel, sizes: Mapping[str, int], formats: Formats, shipping: Shipping | None
) -> float:
    """Return the bytes that weights would save in these formats; 0 if a target holds one not."""
    names = tuple(f"{name}." for name in formats)
    size = sum(n for key, n in sizes.items() if key.startswith(names) and not key.endswith("bias"))
    bits = 0
    for name, spec in formats.items():
        shape = weight_shape(model.get_submodule(name))
        try:
            held = spec if shipping is None else shipping.bend(name, spec, shape)
            held.check_shape(name, *shape)
        except (ConfigError, ExportError):
            return 0.0
        bits += (format_bits if shipping is None else shipping.counted_bits)(held, shape)
    return size - bits / 8


def _of_tables(
    model: PreTrainedModel, stored: Mapping[str, StoredTable], shipping: Shipping | None
) -> dict[str, Formats]:
    """Return the formats of the tables by the flag that gives them."""
    if not holds_quantized_tables(model) or not (shipping is None or shipping.holds_tables):
        return {}
    tables = table_names(model)
    return {
        f"--embedding-bits {bits}": {n: table_format(model, n, bits, stored.get(n)) for n in tables}
        for bits in FEWER_BITS
    }


def _of_presets(model: PreTrainedModel, config: ConvertConfig) -> dict[str, Formats]:
    """Return the formats of the linears in every preset like the one of `config`, by its flag."""
    linears, found = linear_names(model), {}
    mine = next((name for name in sorted(PRESETS, reverse=True) if config.to.startswith(name)), "")
    kind = _kind(PRESETS[mine]) if mine else None
    for name, preset in PRESETS.items():
        if kind == _kind(preset):
            changed = config.model_copy(update={"to": name + config.to.removeprefix(mine)})
            try:
                plan = read_plan(changed)
            except ConfigError:  # a group size that its vectors do not fill
                continue
            found[f"--to {changed.to}"] = {n: plan.spec_for(n) for n in linears}
    return found


def _kind(preset: QuantPlan) -> set[tuple[str, str]]:
    return {(rule.spec.scale, rule.spec.codebook) for rule in preset.rules}
