"""Choose the parameters of a student that learn, by kind; give their natural sizes."""

import logging
from collections.abc import Collection
from operator import mul
from typing import cast

from torch import nn

from qat.errors import ConfigError
from qat.models.attention import SPARSE, load_sparse_attention
from qat.models.stored_state import INPUT_SCALE, quantized_modules
from qat.nn.lut_embedding import quant_tables
from qat.nn.quant_linear import quant_linears
from qat.nn.quant_weight import KIND_OF, LatentWeight, QuantWeight
from qat.nn.sites import routers
from qat.nn.swap import FEW_BITS
from qat.quant.spec import role_of
from qat.quant.weight import rms
from qat.train.step_config import KINDS

logger = logging.getLogger(__name__)

WHY_NONE = {
    "gates": "the student's attention has no gates (it is dense, or its branches are merged): "
    "convert with --attention nsa",
    "router": "the student has no experts to choose among",
}
"""Reasons why a kind of parameter outside linears may be missing."""


def weights_in_scope(model: nn.Module, scope: str, kinds: tuple[str, ...] = KINDS) -> list[str]:
    """Return the names of the quantized weights that may learn: linears, and tables with `e2e`.

    A table of more than `FEW_BITS` bits does not learn: nothing was lost in it.

    Raises:
        ConfigError: there are none, though one of `kinds` belongs to quantized weights.
    """
    names = [name for name in quant_linears(model) if scope in ("e2e", role_of(name))]
    if names and scope == "e2e":
        tables = quant_tables(model).items()
        names += [name for name, table in tables if table.spec.index_bits <= FEW_BITS]
    if not names and set(kinds) & set(KIND_OF.values()):
        raise ConfigError(
            f"the student has no quantized linears in scope {scope}; quantize it first with "
            "'qat convert' or choose another scope"
        )
    return names


def learnable(model: nn.Module, names: list[str], kinds: tuple[str, ...]) -> dict[str, list[str]]:
    """Return parameter names by kind: of the weights `names`, and all norms, gates or routers.

    Static scales of inputs are `scales` as well. Fixed grids have no codebook to learn; if no
    linear has one and there are other kinds, `codebook` is left out.

    Raises:
        ConfigError: a requested kind has no parameters here.
    """
    found: dict[str, list[str]] = {kind: [] for kind in kinds}
    modules = quantized_modules(model)
    for name in names:
        for local in modules[name].weight_parameters():
            kind = KIND_OF[local]
            is_fixed_grid = kind == "codebook" and modules[name].spec.codebook != "lut"
            if kind in found and not is_fixed_grid:
                found[kind].append(f"{name}.{local}")
    shared = {name for name, _ in model.named_parameters()}  # a shared one has one name here
    if "scales" in found:
        scales = (f"{name}.{INPUT_SCALE}" for name in names)
        found["scales"] += [name for name in scales if name in shared]
    everywhere = {
        "norms": lambda: [n for n, p in model.named_parameters() if p.dim() == 1 and "norm" in n],
        "gates": lambda: [n for n, _ in model.named_parameters() if f".{SPARSE}." in n],
        "router": lambda: [
            f"{name}.{local}" for name, router in routers(model).items()
            for local, _ in router.named_parameters()
        ],
    }  # fmt: skip
    found |= {kind: named() for kind, named in everywhere.items() if kind in found}
    if not found.get("codebook", ["other"]) and len(found) > 1:
        del found["codebook"]
    for kind, parameters in found.items():
        if not parameters:
            why = WHY_NONE.get(kind, f"the linears in scope hold no {kind} that can learn")
            raise ConfigError(f"learn={kind}, but {why}; drop it from --learn")
    return found


def natural_sizes(model: nn.Module, kinds: dict[str, list[str]], lr: float = 0) -> dict[str, float]:
    """Return each learnable tensor's natural size, by which its learning rate is multiplied.

    It is the root mean square, for latent weights times `latent_share`; one for a norm, whose
    weight scales by itself or by one plus itself. The factors of an adapter may be zero: their size
    is that of factors whose product is as large as the weight, so that a step at `lr_lora` moves
    the weight by about that share of its own size. Gates may begin at zero: the extension with
    sparse attention knows their size. With an `lr`, the log says which share of it latents take.
    """
    weights, parameters = quantized_modules(model), dict(model.named_parameters())
    owners = {n: weights[n.rpartition(".")[0]] for n in kinds.get("weights", ())}
    share = latent_share(owners.values()) if owners else 1.0
    if share < 1 and lr:
        logger.info("latent weights learn at %.3g of --lr, which is the rate of 2 bits", share)
    size_of = {
        "norms": lambda _: 1.0,
        "lora": lambda name: weights[name.rpartition(".")[0]].lora_size(),
        "weights": lambda name: cast(LatentWeight, owners[name]).latent_size() * share,
        "gates": lambda name: load_sparse_attention().natural_size(name, parameters[name]),
        # a bias, often zero, adds to logits
        "router": lambda name: rms(parameters[name]) if parameters[name].dim() > 1 else 1.0,
        **dict.fromkeys(("scales", "codebook"), lambda name: rms(parameters[name])),
    }
    return {name: size_of[kind](name) for kind, names in kinds.items() for name in names}


def latent_share(latents: Collection[QuantWeight]) -> float:
    """Return the rate of latent weights as a share of that of 2 bits, at most 1.

    It is the root mean square of the widths of their cells, which each bit halves: steps must not
    shake the weights by more than the error that they mend. Tensors of more bits than the others
    learn best at the common rate (speedrun/LOG.md).
    """
    counts = [each.out_features * each.in_features for each in latents]
    squares = (4.0 ** (2 - each.spec.index_bits) for each in latents)
    return min(1.0, (sum(map(mul, counts, squares)) / sum(counts)) ** 0.5)
