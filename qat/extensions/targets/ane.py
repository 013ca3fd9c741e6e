"""Target `ane`: the package of `coreml`, of weights that Apple's Neural Engine computes right.

Scales within a row, which `coreml` holds, are silently computed wrong there: outputs have a cosine
of 0.367 with the right ones, those of look-up tables 0.9975 (apple/coreai-models#279). So a weight
has a table for each `TABLE_ROWS` rows, and the scale of a row multiplies the output.
"""

from qat.extensions.targets import coreml
from qat.quant.spec import LutSpec

COMPARED = coreml.COMPARED
HOLDS_ADAPTERS, HOLDS_TABLES = coreml.HOLDS_ADAPTERS, coreml.HOLDS_TABLES
HOLDS_ACTIVATIONS = coreml.HOLDS_ACTIVATIONS
HOW_TO_LOAD = coreml.HOW_TO_LOAD
check, write, read_logits, file_bits = (
    coreml.check,
    coreml.write,
    coreml.read_logits,
    coreml.file_bits,
)
TABLE_ROWS = 16
FEW_BITS = 4
"""The most bits of tables for some rows: 256 levels for 16 rows of 576 add 0.44 bits a weight."""


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why the Neural Engine would compute a weight wrong, or why it would lose something."""
    if spec.scale == "group" and spec.group_size != shape[1]:
        return f"it has a scale for each {spec.group_size} features of a row, expected one scale"
    return coreml.lost(spec, shape)


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return `spec` with one scale per row, and tables of learned levels for some rows each."""
    O, I = shape
    spec = coreml.scheme(spec, shape).model_copy(update={"group_size": I, "scale_bits": 16})
    is_learned = spec.codebook == "lut" and spec.vector_size == 1 and not spec.table_rows
    if not is_learned or spec.bits > FEW_BITS or O % TABLE_ROWS:
        return spec
    return LutSpec(**spec.model_dump(), table_rows=TABLE_ROWS)
