"""Runs a saved Core ML program without Core ML: coremltools reads it and infers every value.

Weights are decompressed by coremltools in the dtype that they are stored in; the rest runs in
float32.
"""

from pathlib import Path

import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.frontend.milproto.load import load
from coremltools.converters.mil.mil import Function, Operation, Program, Var
from coremltools.models import MLModel

from qat.export.coreml_graph import OPSET


def read_program(package: Path) -> Program:
    """The MIL program of an .mlpackage, its weights included."""
    model = MLModel(str(package), skip_model_load=True)
    spec = model.get_spec()
    return load(spec, spec.specificationVersion, file_weights_dir=model.weights_dir)


def read_weights(program: Program) -> dict[str, np.ndarray]:
    """What coremltools decompresses of each look-up table under its scale, by the name written."""
    (main,) = program.functions.values()
    found = [op for op in main.operations if op.op_type == "constexpr_blockwise_shift_scale"]
    return {op.name: op.materialized_val_inference() for op in found}


def evaluate(program: Program, input_ids: np.ndarray) -> np.ndarray:
    """The output of a program of one input and one output, in float32.

    A look-up table is decompressed where it is used and dropped again.
    """
    (main,) = program.functions.values()
    (given,) = main.inputs.values()
    values = {given: input_ids.astype(np.int32)}
    with Function({}, opset_version=OPSET):
        for op in main.operations:
            if op.op_type != "const" and not op.op_type.startswith("constexpr_"):
                values.update(zip(op.outputs, _outputs(op, values), strict=True))
    return values[main.outputs[0]]


def _outputs(op: Operation, values: dict[Var, np.ndarray]) -> list[np.ndarray]:
    """The outputs of one operation, its inputs being known."""
    inputs = {
        name: [_value(part, values) for part in var]
        if isinstance(var, list | tuple)
        else _value(var, values)
        for name, var in op.inputs.items()
        if var is not None
    }
    if op.op_type == "silu":  # coremltools infers no value of it
        return [inputs["x"] / (1 + np.exp(-inputs["x"]))]
    if op.op_type == "cast":
        return [inputs["x"]]
    made = getattr(mb, op.op_type)(**inputs)
    return [var.val for var in (made if isinstance(made, list | tuple) else (made,))]


def _value(var: Var, values: dict[Var, np.ndarray]) -> np.ndarray:
    """What a variable holds, halves as float32."""
    if var in values:
        return values[var]
    is_table = var.op.op_type.startswith("constexpr_")
    value = var.op.materialized_val_inference() if is_table else var.val
    return value.astype(np.float32) if getattr(value, "dtype", None) == np.float16 else value
