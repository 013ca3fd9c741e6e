"""Reader of ONNX programs: ONNX Runtime runs them, and their weights are compared where known.

Shapes: O rows, I columns, G blocks per row.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qat.errors import CheckpointError, how_to_install, is_installed
from qat.extensions.targets.onnx import EXACT_NAME, SLOW, logits
from qat.extensions.verify.facts import Side, Stored
from qat.extensions.verify.reading import ENDS, directory_tokens, of_float, skeleton
from qat.models.opening import read_config, read_table
from qat.nn.swap import is_tied
from qat.quant.weight import unpack

GENAI = "genai_config.json"
PRODUCT, ROWS = "MatMulNBits", "GatherBlockQuantized"
"""Operators of ONNX Runtime that read a quantized weight; of the second the data come first."""
FREQUENCIES, COSINES = "frequencies", "cos_cache"
"""Names of rotary frequencies in our programs, and of cosines by position in others'."""


class _Weight(NamedTuple):
    """A quantized weight of a program, by the names of its parts."""

    codes: str
    scales: str
    zero: str
    bits: int
    block: int


def open_onnx(path: Path) -> Side:
    """Open a directory with an ONNX program and config.json, or the program itself.

    Raises:
        CheckpointError: a library or config.json is missing, or it is not clear which program.
    """
    for library in ("onnx", "onnxruntime"):
        if not is_installed(library):
            raise CheckpointError(
                f"{path} is for ONNX Runtime, but {library} is not installed, expected it to read "
                f"and run the file; run: {how_to_install('onnx')}"
            )
    directory, program = (path, _program(path)) if path.is_dir() else (path.parent, path)
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory} holds no config.json, expected that of the model beside {program.name}; "
            "copy it there from the model that was exported"
        )
    config = read_config(str(directory))
    model = skeleton(config)
    graph = _Graph(program)
    weights, stored = graph.read(model)
    tokens = directory_tokens(directory, config)
    if tokens is not None and (directory / GENAI).is_file():
        ends = read_table(directory / GENAI).get("model", {}).get(ENDS)
        ends = ends if isinstance(ends, list) else [ends]
        tokens = tokens._replace(end=ends[0], ends=frozenset(ends) - {None})
    return Side(
        source=str(path),
        form="onnx",
        config=config,
        weights=weights,
        stored=stored,
        tokens=tokens,
        is_tied=is_tied(model),
        program=partial(logits, model, program, options=SLOW),
        frequencies=graph.frequencies(),
    )


def _program(directory: Path) -> Path:
    if (directory / EXACT_NAME).is_file():
        return directory / EXACT_NAME
    settings = directory / GENAI
    decoder = read_table(settings).get("model", {}).get("decoder", {}) if settings.is_file() else {}
    if (directory / decoder.get("filename", "")).is_file():
        return directory / decoder["filename"]
    found = sorted(directory.glob("*.onnx"))
    if len(found) != 1:
        raise CheckpointError(
            f"{directory} holds {len(found)} ONNX programs, expected one; name the file itself"
        )
    return found[0]


class _Graph:
    """The tensors and quantized products of a program."""

    def __init__(self, program: Path) -> None:
        import onnx

        try:
            graph = onnx.load(program).graph
        except Exception as error:  # noqa: BLE001 - protobuf and onnx have no common error
            raise CheckpointError(
                f"{program} is no ONNX program ({' '.join(str(error).split())[:99]}), expected one "
                "with its data beside it; copy both anew"
            ) from None
        self.tensors = {each.name: each for each in graph.initializer}
        self.nodes = graph.node
        self.makers = {name: node for node in graph.node for name in node.output}

    def read(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Stored]]:
        """Return the weights whose names say which of `model` they are, and how they are stored."""
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        weights, stored = {}, {}
        for name in self.tensors.keys() & shapes:
            value, shape = self._value(name), shapes[name]
            is_turned = value.shape != shape and value.shape == shape[::-1]
            weights[name] = (value.T if is_turned else value[: shape[0]]).float()
            stored[name] = of_float(value)
        for each in self._quantized():
            name = _named(each.codes, shapes)
            if name is not None and name not in weights:
                rows = shapes[name][0]
                weight, scales = self._dequantized(each)
                weights[name] = weight[:rows]
                stored[name] = Stored(f"int{each.bits}", each.bits, scales[:rows])
        return weights, stored

    def frequencies(self) -> Tensor | None:
        """Return the rotary frequencies of the program, `(W / 2,)`; None if it names none."""
        if FREQUENCIES in self.tensors:
            return self._value(FREQUENCIES).flatten()
        if COSINES in self.tensors:  # by position: those of position 1
            return self._value(COSINES)[1].float().arccos()
        return None

    def _quantized(self) -> Iterator[_Weight]:
        for node in self.nodes:
            if node.op_type not in (PRODUCT, ROWS):
                continue
            given: dict[str, Any] = {each.name: each.i for each in node.attribute}
            codes = node.input[1 if node.op_type == PRODUCT else 0]
            scales, zero = (*node.input, "")[2:4]
            yield _Weight(codes, scales, zero, given.get("bits", 4), given.get("block_size", 128))

    def _dequantized(self, weight: _Weight) -> tuple[Tensor, Tensor]:
        """Return `scale * (code - zero)`, `(O, I)`, and the scales `(O, G)`."""
        packed, bits = self._value(weight.codes), weight.bits
        packed = packed.reshape(len(packed), -1)
        I = packed.shape[1] * 8 // bits
        codes = unpack(packed, bits, I).float().view(len(packed), -1, weight.block)
        scales = self._value(weight.scales).view(codes.shape[:2])
        zeros = self._zeros(weight, scales.shape)
        return ((codes - zeros) * scales[..., None].float()).flatten(1), scales

    def _zeros(self, weight: _Weight, shape: tuple[int, int]) -> Tensor:
        """Return the zero points, `(O, G, 1)` or a scalar."""
        if not weight.zero:
            return torch.tensor(2.0 ** (weight.bits - 1))
        maker = self.makers.get(weight.zero)
        if maker is not None:  # of ConstantOfShape, one number for all
            from onnx import numpy_helper

            (value,) = (each.t for each in maker.attribute if each.name == "value")
            return torch.tensor(float(numpy_helper.to_array(value)[0]))
        zeros = self._value(weight.zero)
        if not zeros.is_floating_point():
            zeros = unpack(zeros.reshape(shape[0], -1), weight.bits, shape[1])
        return zeros.float().view(*shape, 1)

    def _value(self, name: str) -> Tensor:
        from onnx import TensorProto, numpy_helper

        tensor = self.tensors.get(name)
        if tensor is None and name in self.makers:  # a cast or a copy of a tensor
            return self._value(self.makers[name].input[0])
        if tensor is None:
            raise CheckpointError(
                f"an ONNX program reads {name} that is no tensor of its own, expected the weights "
                "of a decoder; name the directory of the model instead"
            )
        if tensor.data_type == TensorProto.BFLOAT16:
            octets = torch.frombuffer(bytearray(tensor.raw_data), dtype=torch.bfloat16)
            return octets.view(*tensor.dims)
        return torch.from_numpy(numpy_helper.to_array(tensor).copy())


def _named(name: str, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """Return the matrix of a model that a program's tensor is named after."""
    own = f"{name.rpartition('.')[0]}.weight"
    if own in shapes:
        return own
    layer = re.search(r"layers[._/](\d+)[._/]", name)
    number = f".{layer[1]}." if layer else ""
    matrices = (each for each, shape in shapes.items() if len(shape) == 2 and number in each)
    return next((each for each in matrices if each.split(".")[-2] in name), None)
