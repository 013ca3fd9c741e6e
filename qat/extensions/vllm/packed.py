"""Packed checkpoints for serving engines: config, tensor slices for several processes, operators.

This module is independent of any engine.

An engine joins matrices with the same input, such as queries, keys and values, into one linear.
Each of these parts keeps its spec and its codebook; nothing is converted.

Shapes: O out_features, I in_features, R rank, d weights per index; N rows of tokens, each routed to
one of E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import NamedTuple, Self

import torch
from huggingface_hub.errors import HFValidationError
from torch import Tensor
from torch.nn import functional as F

from qat.errors import CheckpointError, QatError
from qat.extensions.decode.kernels.lut_gemm import Part as GemmPart
from qat.extensions.decode.kernels.lut_gemm import is_format, is_one_product, lut_gemm
from qat.kernels.lut_weight import form
from qat.models.checkpoint import is_packed
from qat.models.directory import GGUF, is_path, resolve
from qat.models.hf_quantizer import Headers, QatConfig, check_input_scale
from qat.models.opening import read_table
from qat.models.stored_state import INPUT_SCALE, PACKED
from qat.quant.activation import quantize_static, quantize_tokens
from qat.quant.kv import fake_quantize_heads
from qat.quant.lora import LORA_NAMES, Lora, add_product_
from qat.quant.spec import ACTIVATION_KINDS, ActivationSpec, KvSpec, LutSpec
from qat.quant.weight import (
    SCALE_NAMES,
    PackedIndices,
    Scales,
    dtype_as_stored,
    empty_weight,
    from_stored,
    pack,
    unpack,
)

DENSE = "weight"
"""Name of the only tensor of a matrix that stayed in floating point."""
BY_ROW = (PACKED, "scales", "scale_out", "lora_out", DENSE)
"""Tensors whose first dimension is the output features."""
BY_COLUMN = ("scale_in", "lora_in", DENSE)
"""Tensors whose second dimension is the input features, one entry each."""


class Format(NamedTuple):
    """Numbers that describe a part to an operator; the tensors are passed separately."""

    bits: int = 0
    """Bits per index; 0 for a matrix in floating point."""
    vector_size: int = 1
    rank: int = 0
    """Rank of a low-rank scale; 0 with group scales."""
    lora_rank: int = 0
    """Rank of the LoRA adapter; 0 without one."""
    activation: int = 0
    """Input quantization: position in `ACTIVATION_KINDS`, from 1; 0 for none."""
    input_scale_bits: int = 0
    """Bits of the input's static scale."""
    input_scale: int = 0
    """Number of the static input scale in the checkpoint, from 1; 0 without one."""

    def names(self) -> tuple[str, ...]:
        """Return the names of the part's tensors, in the order in which operators take them."""
        if not self.bits:
            return (DENSE,)
        scales = SCALE_NAMES[1:] if self.rank else SCALE_NAMES[:1]
        adapter = LORA_NAMES if self.lora_rank else ()
        inputs = (INPUT_SCALE,) if self.input_scale else ()
        return (PACKED, "codebook", *scales, *adapter, *inputs)

    @property
    def rounding(self) -> tuple[int, ...]:
        """A key that is equal for parts which quantize a common input identically."""
        return (self.activation, self.input_scale_bits, self.input_scale)


class Stored(NamedTuple):
    """The storage format of one matrix of the checkpoint."""

    name: str
    spec: LutSpec | None
    """Quantization spec; None if the matrix stayed in floating point."""
    lora_rank: int = 0
    activation: ActivationSpec | None = None
    """Quantization of its input; None if the input is not quantized."""
    input_scale: int = 0
    """Number of its input's static scale in the checkpoint, from 1; 0 without one."""

    @property
    def format(self) -> Format:
        """The description of the matrix for an operator."""
        spec, read = self.spec, self.activation
        if spec is None:
            return Format()
        weight = (spec.bits, spec.vector_size, spec.rank, self.lora_rank)
        if read is None:
            return Format(*weight)
        kind = 1 + ACTIVATION_KINDS.index(read.kind)
        return Format(*weight, kind, read.scale_bits, self.input_scale)


class Part(NamedTuple):
    """A matrix of the checkpoint, and the slice of it that one tensor-parallel process holds."""

    stored: Stored
    out_features: int
    """Number of rows held; those of a table may include padding."""
    columns: slice
    """Range of input features held."""
    in_features: int
    """Number of input features of the whole matrix."""

    @classmethod
    def of(
        cls, stored: Stored, out_features: int, in_features: int, *, columns: int, rank: int
    ) -> Self:
        """Return the slice of `out_features` rows and `columns` columns for process `rank`.

        Raises:
            CheckpointError: the columns end inside a group or a vector.
        """
        spec = stored.spec
        if spec is not None:
            unit = spec.group_size if spec.scale == "group" else spec.vector_size
            what = "group of" if spec.scale == "group" else "vector of"
            if in_features % unit:
                raise CheckpointError(
                    f"quantization_config of {stored.name} has a {what} {unit} weights, which "
                    f"does not divide its {in_features} input features; convert the model anew"
                )
            if columns % unit:
                raise CheckpointError(
                    f"{stored.name}: tensor parallelism over {in_features // columns} processes "
                    f"gives each {columns} of its {in_features} input features, which splits a "
                    f"{what} {unit}; choose a size that leaves each a multiple of {unit}"
                )
        start = rank * columns if columns < in_features else 0
        return cls(stored, out_features, slice(start, start + columns), in_features)

    @property
    def columns_held(self) -> int:
        """Number of input features held."""
        return self.columns.stop - self.columns.start

    @property
    def needs_token_range(self) -> bool:
        """True if the input's scale depends on values that other processes hold."""
        read = self.stored.activation
        return self.columns_held < self.in_features and read is not None and not read.is_static

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the held tensors by name, on the meta device; `dtype` is for float matrices."""
        return _tensors(self.stored, self.out_features, self.columns_held, dtype)

    def rows(self, total: int, rank: int, size: int) -> slice:
        """Return the rows that process `rank` of `size` holds of a linear with `total` rows.

        With more processes than key/value heads, several processes hold the same rows.

        Raises:
            CheckpointError: the rows cannot be divided evenly among the processes.
        """
        held = self.out_features
        copies, rest = divmod(size * held, total)
        if rest or not copies:
            raise CheckpointError(
                f"{self.stored.name} has {total} rows in the checkpoint, of which {size} "
                f"processes hold {held} each; expected {size * held} rows: its config.json "
                "belongs to another model; copy it anew"
            )
        start = rank // copies * held
        return slice(start, start + held)

    def cut(self, key: str, stored: Tensor, rows_of: Callable[[int], slice | Tensor]) -> Tensor:
        """Return the held slice of the checkpoint's tensor `key`; padding rows are zero.

        `rows_of` returns the rows to hold, given their number in the checkpoint.

        Raises:
            CheckpointError: the tensor has another shape or dtype than the spec, holds an index
                beyond the codebook, or is an invalid input scale.
        """
        self._check(key, stored)
        if key in BY_ROW:
            held = stored[rows_of(len(stored))]
            stored = F.pad(held, (0, 0, 0, self.out_features - len(held)))
        if self.columns_held == self.in_features:
            return stored
        if key in BY_COLUMN:
            return stored[:, self.columns]
        spec = self.stored.spec
        if spec is None or key not in (PACKED, "scales"):
            return stored
        if key == "scales":
            return stored[:, _in_units(self.columns, spec.group_size)]
        indices = unpack(stored, spec.bits, self.in_features // spec.vector_size)
        return pack(indices[:, _in_units(self.columns, spec.vector_size)], spec.bits)

    def _check(self, key: str, stored: Tensor) -> None:
        name, spec = f"{self.stored.name}.{key}", self.stored.spec
        O = len(stored) if key in BY_ROW else self.out_features
        expected = _tensors(self.stored, O, self.in_features, stored.dtype)
        if key not in expected:
            raise CheckpointError(
                f"the checkpoint holds {name}, expected {', '.join(sorted(expected))} alone of "
                f"{self.stored.name}; copy it anew or convert the model anew"
            )
        found = tuple(stored.shape), stored.dtype
        wanted = tuple(expected[key].shape), expected[key].dtype
        if found != wanted:
            raise CheckpointError(
                f"{name} is {found[0]} {found[1]}, expected {wanted[0]} {wanted[1]} by its "
                "config.json; copy the checkpoint anew or convert the model anew"
            )
        if key == PACKED and spec is not None and spec.num_levels < 2**spec.bits:
            largest = int(unpack(stored, spec.bits, self.in_features // spec.vector_size).max())
            if largest >= spec.num_levels:
                raise CheckpointError(
                    f"{name} holds index {largest}, but the codebook has {spec.num_levels} "
                    "levels; the file is damaged: copy it anew"
                )
        if key == INPUT_SCALE:
            check_input_scale(self.stored.name, stored.item())


def read_config(values: dict) -> tuple[dict[str, Stored], KvSpec | None]:
    """Parse the `quantization_config` of config.json: quantized modules by name, and the KV spec.

    Raises:
        CheckpointError: the config is of a newer version or damaged, or has a feature that no
            engine supports yet.
    """
    config = QatConfig(**values)
    if "nsa" in config.features:
        raise CheckpointError(
            "the checkpoint has sparse attention (feature 'nsa'), which the engine does not "
            "compute, expected dense attention; run it with 'qat generate', or make it dense with "
            "'qat convert --attention dense'"
        )
    if "tables" in config.features:
        raise CheckpointError(
            "the checkpoint has a codebook for some rows each (feature 'tables'), which the engine "
            "does not look up, expected one for all rows; run it with 'qat generate', or export "
            "--to dense"
        )
    ranks, activations, owners = config.lora_ranks(), config.activations(), config.scale_owners()
    places = {name: place for place, name in enumerate(config.modules, start=1)}
    modules = {}
    for name, spec in config.specs().items():
        read = activations.get(name)
        scale = places[owners.get(name, name)] if read is not None and read.is_static else 0
        modules[name] = Stored(name, spec, ranks.get(name, 0), read, scale)
    return modules, config.kv_spec()


class Experts(NamedTuple):
    """The experts of a stack that one process holds, and the slice of each."""

    total: int
    """Number of experts in the checkpoint."""
    held: Sequence[int]
    """Numbers of the experts held, in their order in memory."""
    rank: int = 0
    size: int = 1
    """Slice `rank` of `size` of each expert's matrices."""

    def rows(self, total: int, *, name: str, matrices: int, width: int) -> Tensor:
        """Return the rows held among the `total` rows of the stack `name`.

        Each expert has `matrices` stacked matrices of `width` rows.

        Raises:
            CheckpointError: the checkpoint has another number of rows.
        """
        expected = self.total * matrices * width
        if total != expected:
            raise CheckpointError(
                f"{name} has {total} rows in the checkpoint, expected {expected}, those of "
                f"{self.total} experts; its config.json belongs to another model: copy it anew"
            )
        places = torch.arange(total).view(self.total, matrices, self.size, -1)
        return places[list(self.held), :, self.rank].flatten()


def refused_path(source: str, error: BaseException | None = None) -> QatError | None:
    """Return why an engine cannot serve `source`, or None if it may be able to.

    `error` is the engine's exception, if it was started before. A missing path is then refused only
    if the engine did not find it either.
    """
    is_unfound = (
        error is None
        or isinstance(error, HFValidationError)
        # an OSError with a number is another failure, such as a port in use
        or (isinstance(error, OSError) and error.errno is None)
    )
    is_local = is_path(source) and not source.startswith("-") and "://" not in source
    if not (Path(source).exists() or (is_unfound and is_local)):
        return None
    try:
        found = resolve(source)
    except QatError as refusal:
        return refusal
    if found.endswith(GGUF):
        return CheckpointError(
            f"{source} holds a GGUF file, expected a model directory; run it in llama.cpp, or make "
            "a packed checkpoint of it with 'qat convert'"
        )
    if Path(found) != Path(source):
        return CheckpointError(
            f"{source} holds no config.json, expected a model directory; serve the one in it: "
            f"{found}"
        )
    if is_packed(Path(found)) and "Model architecture" in str(error):  # vLLM's message begins so
        classes = read_table(Path(found) / "config.json").get("architectures")
        return CheckpointError(
            f"{found} has architectures={classes}, expected a class that vLLM has; serve it with "
            f"'python -m qat.extensions.vllm.transformers serve {found}'"
        )
    return None


def num_processes(command: Sequence[str]) -> int:
    """Return N of `PROGRAM serve DIR --tensor-parallel-size N`, the shares of a weight; else 1."""
    words = [word for each in command for word in each.split("=", 1)]
    flags = ("--tensor-parallel-size", "--tensor_parallel_size", "-tp")
    given = [after for flag, after in pairwise(words) if flag in flags and after.isdigit()]
    return int(given[-1]) if given and command[1:2] == ["serve"] else 1


def check_cut(headers: Headers, modules: Mapping[str, Stored], size: int) -> None:
    """Check that `size` processes can split the input features, before any process is started.

    Only linears that engines split along their input in every model family are checked; each
    process checks all of its own parts when it loads.

    Raises:
        CheckpointError: a process would get a part of a group or of a vector.
    """
    shared = [
        m for name, m in modules.items() if name.endswith(("self_attn.o_proj", "mlp.down_proj"))
    ]
    grouped = {
        f"{m.name}.{SCALE_NAMES[0]}": m for m in shared if m.spec and m.spec.scale == "group"
    }
    for key in sorted(grouped.keys() & headers.keys()):
        (*_, groups), _ = headers[key]
        I = groups * grouped[key].spec.group_size
        if I % size == 0:  # otherwise the engine reports it
            Part.of(grouped[key], 1, I, columns=I // size, rank=0)


def in_one_line(refusal: QatError) -> str:
    """Format the message that a server prints before it exits because of `refusal`."""
    return f"qat: {' '.join(str(refusal).split())}\n"


def _tensors(stored: Stored, O: int, I: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the checkpoint's tensors of an `(O, I)` matrix on the meta device."""
    spec, R = stored.spec, stored.lora_rank
    with torch.device("meta"):
        if spec is None:
            return {DENSE: torch.empty(O, I, dtype=dtype)}
        weight = empty_weight(spec, O, I)
        parts = {"codebook": weight.codebook, **weight.scales.present()}
        if R:
            parts |= {"lora_out": torch.empty(O, R), "lora_in": torch.empty(R, I)}
        typed = {k: t.to(dtype_as_stored(k, spec.stored_bits(k))) for k, t in parts.items()}
        if stored.input_scale:
            typed[INPUT_SCALE] = torch.empty((), dtype=torch.float32)
        return {PACKED: pack(weight.indices, spec.bits), **typed}


def _in_units(features: slice, unit: int) -> slice:
    return slice(features.start // unit, features.stop // unit)


# The operators, opaque to torch.compile and CUDA graph capture.
#
# `weights` are the tensors of all parts as a checkpoint stores them, in the order of
# `Format.names`; `formats` are the concatenated numbers of each part's `Format`.


@torch.library.custom_op("qat::lut_linear", mutates_args=())
def lut_linear(  # noqa: PLR0917
    x: Tensor,
    weights: Sequence[Tensor],
    formats: Sequence[int],
    bias: Tensor | None,
    ends: Tensor | None = None,
) -> Tensor:
    """Compute `read(x) @ W.T + bias`, `(..., I)` to `(..., O)`, with the rows of all parts stacked.

    Parts with the same input quantization share one rounding of `x`. If `x` is a slice of each
    token's features, `ends` `(..., N)` holds the minima and maxima of all slices.
    """
    products, end = [], 0
    for _, alike in groupby(_by_part(weights, formats), key=lambda part: part[1].rounding):
        parts = [*alike]
        start, end = end, end + _num_rows(parts)
        own = None if bias is None else bias[start:end]
        products.append(_product(_read(x, *parts[0], ends), parts, own))
    return products[0] if len(products) == 1 else torch.cat(products, -1)


@lut_linear.register_fake
def _(  # noqa: PLR0917
    x: Tensor,
    weights: Sequence[Tensor],
    formats: Sequence[int],
    bias: Tensor | None,
    ends: Tensor | None = None,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], _num_rows(_by_part(weights, formats)))


@torch.library.custom_op("qat::lut_embedding", mutates_args=())
def lut_embedding(  # noqa: PLR0917
    ids: Tensor,
    weights: Sequence[Tensor],
    formats: Sequence[int],
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return `W[ids]` in `dtype` for a table of one part; only these rows are unpacked."""
    rows = _formed_rows(weights, Format(*formats), ids.flatten(), in_features, dtype)
    return rows.view(*ids.shape, in_features)


@lut_embedding.register_fake
def _(  # noqa: PLR0917
    ids: Tensor,
    weights: Sequence[Tensor],
    formats: Sequence[int],
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    return ids.new_empty(*ids.shape, in_features, dtype=dtype)


@torch.library.custom_op("qat::lut_experts", mutates_args=())
def lut_experts(  # noqa: PLR0917
    x: Tensor,
    experts: Tensor,
    weights: Sequence[Tensor],
    formats: Sequence[int],
    num_experts: int,
) -> Tensor:
    """Compute `W[experts[n]] @ read(x[n])` for each row n of `x`: `(N, I)` to `(N, O)`.

    `weights` are one part that stacks the rows of E experts. With fewer rows than experts, only the
    weights of the selected experts are formed, once per row. The selection is never read on the
    host, so that a graph can be captured.
    """
    format, (N, I), E = Format(*formats), x.shape, num_experts
    x = _read(x, weights, format)
    O = len(weights[0]) // E
    if N < E:
        rows = (experts[:, None] * O + torch.arange(O, device=x.device)).flatten()
        formed = _formed_rows(weights, format, rows, I, x.dtype).view(N, O, I)
        return torch.bmm(formed, x[:, :, None])[:, :, 0]
    order = experts.argsort(stable=True)
    ends = torch.searchsorted(experts[order], torch.arange(E, device=x.device), right=True)
    formed = formed_part(weights, format, I, x.dtype).view(E, O, I)
    y = F.grouped_mm(x[order], formed.mT, offs=ends.int())
    return torch.empty_like(y).index_copy_(0, order, y)


@lut_experts.register_fake
def _(  # noqa: PLR0917
    x: Tensor,
    experts: Tensor,
    weights: Sequence[Tensor],
    formats: Sequence[int],
    num_experts: int,
) -> Tensor:
    return x.new_empty(len(x), len(weights[0]) // num_experts)


@torch.library.custom_op("qat::rounded_heads", mutates_args=())
def rounded_heads(x: Tensor, bits: int) -> Tensor:
    """Return keys or values `(..., D)` after a round trip through a cache of `bits` bits.

    It is an opaque operator because a compiler would drop the preceding rounding of `x` to its
    dtype.
    """
    return fake_quantize_heads(x, bits)


@rounded_heads.register_fake
def _(x: Tensor, bits: int) -> Tensor:
    return torch.empty_like(x)


def formed_part(
    tensors: Sequence[Tensor], format: Format, in_features: int, dtype: torch.dtype
) -> Tensor:
    """Return `W`, `(O, I)` in `dtype`, formed from a part's tensors as a checkpoint stores them."""
    held = dict(zip(format.names(), tensors, strict=True))
    if not format.bits:
        return held[DENSE].to(dtype)
    stored = {name: held[name] for name in SCALE_NAMES if name in held}
    bits = 8 * next(iter(stored.values())).element_size()
    scales = Scales(**{n: from_stored(n, t, bits) for n, t in stored.items()}, bits=bits)
    source = PackedIndices(held[PACKED], format.bits, in_features, format.vector_size)
    codebook = from_stored("codebook", held["codebook"])
    if not format.lora_rank:
        return form(source, codebook, scales, dtype)
    lora = Lora(*(held[name] for name in LORA_NAMES))
    return add_product_(form(source, codebook, scales, torch.float32), lora).to(dtype)


def _read(
    x: Tensor, tensors: Sequence[Tensor], format: Format, ends: Tensor | None = None
) -> Tensor:
    """Quantize `x` `(..., I)` as a part reads it, bit-identical to `qat.nn.activation`."""
    if not format.activation:
        return x
    if format.input_scale:
        scale = tensors[format.names().index(INPUT_SCALE)]
        return quantize_static(x, scale, format.input_scale_bits)
    kind = ACTIVATION_KINDS[format.activation - 1]
    if ends is None:
        return quantize_tokens(x, kind)
    # append the token's extremes, so that a slice gets the scale of the whole token
    return quantize_tokens(torch.cat([x, ends], -1), kind)[..., : x.shape[-1]].contiguous()


def _product(
    x: Tensor, parts: Sequence[tuple[Sequence[Tensor], Format]], bias: Tensor | None
) -> Tensor:
    packed = [_gemm_part(tensors, format, x.shape[-1]) for tensors, format in parts]
    if None not in packed and is_one_product(packed, x.dtype):
        return lut_gemm(x, packed, bias)
    formed = [formed_part(tensors, format, x.shape[-1], x.dtype) for tensors, format in parts]
    return F.linear(x, formed[0] if len(formed) == 1 else torch.cat(formed), bias)


def _num_rows(parts: Sequence[tuple[Sequence[Tensor], Format]]) -> int:
    return sum(len(tensors[0]) for tensors, _ in parts)


def _gemm_part(tensors: Sequence[Tensor], format: Format, in_features: int) -> GemmPart | None:
    """Return the operands of the packed matmul, or None if the weight must be formed first."""
    if not format.bits or format.rank or format.lora_rank:
        return None
    packed, codebook, scales = tensors[:3]
    group_size = in_features // scales.shape[1]
    if not is_format(format.bits, format.vector_size, group_size, in_features):
        return None
    return GemmPart(packed, scales, codebook, format.bits)


def _formed_rows(  # noqa: PLR0917
    tensors: Sequence[Tensor], format: Format, rows: Tensor, in_features: int, dtype: torch.dtype
) -> Tensor:
    taken = [
        tensor[rows] if key in BY_ROW else tensor
        for key, tensor in zip(format.names(), tensors, strict=True)
    ]
    return formed_part(taken, format, in_features, dtype)


def _by_part(
    weights: Sequence[Tensor], formats: Sequence[int]
) -> list[tuple[Sequence[Tensor], Format]]:
    size, rest, parts = len(Format._fields), iter(weights), []
    for first in range(0, len(formats), size):
        format = Format(*formats[first : first + size])
        parts.append(([*islice(rest, len(format.names()))], format))
    return parts
