"""Read the trellises in checkpoints by qat up to 0.1, as levels. To be removed after 0.2.

In a trellis of k bits, each weight adds k bits to its row, and its index is the last `bits` of
these, the newest highest; before the row they are zeros (QTIP, arXiv:2406.11235):

    indices[o, i] = indices[o, i - 1] >> k | own[o, i] << bits - k,    indices[o, -1] = 0

A file holds `own` alone, and a codebook `(C, 1)` in any order. The opened model holds the same
weight as ascending levels and whole indices, of `bits` bits each. Trellises are never written.
"""

import logging

import torch
from torch import nn

from qat.errors import CheckpointError
from qat.quant.weight import pack, packed_width, unpack

logger = logging.getLogger(__name__)

FEATURE = "trellis"
KEY = "trellis_bits"
"""Key of a module with a trellis, stored with the keys of its spec: k."""


def as_levels(name: str, values: dict) -> dict:
    """Return the stored keys of a spec; those of levels in place of those of a trellis.

    Raises:
        CheckpointError: no trellis has such numbers.
    """
    if KEY not in values:
        return values
    k, bits = values[KEY], values.get("bits")
    if type(k) is not int or type(bits) is not int or not 1 <= k <= 4 or not 2 * k <= bits <= 8:
        raise CheckpointError(
            f"quantization_config of {name} has {KEY}={k!r:.40} with bits={bits!r:.40}, expected 1 "
            "to 4 with at least twice as many bits, up to 8; the file is damaged: copy it anew"
        )
    return {key: value for key, value in values.items() if key not in (KEY, "level_bits")}


def put_empty_paths(model: nn.Module, modules: dict[str, dict]) -> dict[str, str]:
    """Give modules with a trellis the shapes of their stored tensors, before these are loaded.

    Return the stored dtypes of their codebooks, by name.
    """
    dtypes = {}
    for name, values in modules.items():
        if KEY in values:
            module = model.get_submodule(name)
            width = packed_width(module.in_features, values[KEY])
            module.packed = module.packed.new_empty(module.out_features, width)
            module.codebook.data = module.codebook.data[:, None]
            dtypes[f"{name}.codebook"] = "I8" if values.get("level_bits", 8) == 8 else "F16"
    return dtypes


def decode_paths(model: nn.Module, modules: dict[str, dict]) -> None:
    """Give modules with a trellis, whose stored tensors are loaded, levels and whole indices."""
    walked = {name: values for name, values in modules.items() if KEY in values}
    for name, values in walked.items():
        module, bits, k = model.get_submodule(name), values["bits"], values[KEY]
        own = unpack(module.packed, k, module.in_features)
        indices = own << bits - k
        for age in range(1, -(-bits // k)):
            place = bits - (age + 1) * k
            older = own[:, : max(module.in_features - age, 0)]
            indices[:, age:] |= older << place if place >= 0 else older >> -place
        module.codebook.data, order = module.codebook.data.flatten().sort(stable=True)
        module.packed = pack(order.argsort().to(torch.uint8)[indices.int()], bits)
    if walked:
        logger.warning(
            "%d weights have a trellis, opened as levels; versions after 0.2 do not read them: "
            "write the checkpoint anew with 'qat export --to packed'",
            len(walked),
        )


def refuse(config: object, what: str) -> None:
    """Refuse a checkpoint whose `quantization_config` has trellises: `what` is not done with them.

    Raises:
        CheckpointError: it has some.
    """
    if FEATURE in getattr(config, "features", ()):
        raise CheckpointError(
            f"the checkpoint has a trellis, which is read but not {what}, expected levels or "
            "vectors; write it as levels of up to 8 bits with 'qat export --to packed', or convert "
            "the float model with 'qat convert --to v2a2'"
        )
