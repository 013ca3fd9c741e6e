"""Form a quantized weight by a PyTorch custom operator that has its own backward pass.

`qat.nn.step` forms each weight once a step, without autograd. In a user's own loop nothing
says when a step begins, other libraries wrap the parameters (DDP, FSDP2), and compilers trace the
layers. Here a weight is a function of its tensors alone: autograd keeps them and computes their
gradients, and a compiler sees one operator, the same for all layers of one shape. The values are
those of `QuantWeight.form_` and `QuantWeight.pull_back_`, bit for bit.

Shapes: O out_features (words of a table), I in_features, N rows that are read.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qat.kernels.lut_weight import choose, form, levels_as_stored, pull_back
from qat.nn.lut_embedding import QuantEmbedding, QuantTable, summed_by_word
from qat.nn.quant_weight import PIECE, PackedWeight, QuantWeight
from qat.quant.lora import LORA_NAMES, Lora, add_product_, pull_back_product
from qat.quant.weight import BY_ROW, SCALE_NAMES, PackedIndices, Scales, index_dtype

Source = PackedIndices | Tensor


class Numbers(NamedTuple):
    """The numbers of a weight's format, in an order that an operator can take."""

    bits: int
    """Bits per packed index."""
    in_features: int
    vector_size: int
    level_bits: int
    scale_bits: int
    piece: int
    """Rows whose gradient is pulled back at a time; 0 for all."""
    padding: int
    """The row that never learns; -1 for none."""

    @classmethod
    def of(cls, weight: QuantWeight) -> "Numbers":
        """Return the numbers of `weight`."""
        spec, is_table = weight.spec, isinstance(weight, QuantTable)
        padding = weight.padding_idx if isinstance(weight, QuantEmbedding) else None
        return cls(
            spec.bits,
            weight.in_features,
            spec.vector_size,
            spec.level_bits,
            spec.scale_bits,
            max(1, PIECE // weight.in_features) if is_table else 0,
            -1 if padding is None else padding,
        )


class Made(NamedTuple):
    """The tensors that a weight is formed from, in the layout that the kernels take."""

    source: Source
    levels: Tensor
    scales: Scales
    lora: Lora | None

    @classmethod
    def of(cls, parts: dict[str, Tensor], numbers: Numbers, chosen: Tensor | None = None) -> "Made":
        """Return what the tensors `parts` make.

        `chosen` are the indices of a latent weight's codewords, if they have been found before.
        """
        levels = levels_as_stored(parts["codebook"], numbers.level_bits)
        d = numbers.vector_size
        if chosen is not None and chosen.numel():
            bits = 8 * index_dtype(len(levels)).itemsize
            source: Source = PackedIndices(chosen, bits, numbers.in_features, d)
        elif "weight" in parts:
            source = parts["weight"]
        else:
            source = PackedIndices(parts["packed"], numbers.bits, numbers.in_features, d)
        named = {name: parts[name] for name in SCALE_NAMES if name in parts}
        factors = [parts[name] for name in LORA_NAMES if name in parts]
        return cls(
            source,
            levels,
            Scales(**named, bits=numbers.scale_bits),
            Lora(*factors) if factors else None,
        )

    def of_rows(self, rows: Tensor | slice) -> "Made":
        """Return what some rows are made of."""
        source = self.source
        if isinstance(source, PackedIndices):
            source = source._replace(octets=source.octets[rows])
        else:
            source = source[rows]
        return self._replace(source=source, scales=self.scales.of_rows(rows))

    def formed(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, `(O, I)`."""
        if self.lora is None:
            return form(self.source, self.levels, self.scales, dtype)
        part = form(self.source, self.levels, self.scales, torch.float32)
        return add_product_(part, self.lora).to(dtype)

    def pulled_back(self, dW: Tensor, wanted: Sequence[str]) -> dict[str, Tensor]:
        """Return the gradients of the `wanted` parts; that of a latent weight is `dW` itself."""
        gradients = {} if self.lora is None else pull_back_product(dW, self.lora, wanted)
        return gradients | pull_back(dW, self.source, self.levels, self.scales, wanted=wanted)


def formed(weight: QuantWeight, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """Return `W` in `dtype`, or its `rows` `(N,)`, with the gradients of what learns.

    Unlike `QuantWeight.weight_in` it remembers nothing between two calls.
    """
    parts = parts_of(weight)
    wanted = [name for name, part in parts.items() if part.requires_grad]
    names = ",".join(parts), ",".join(wanted)
    W, _ = form_weight([*parts.values()], *names, rows, [*Numbers.of(weight)], dtype)
    return W


def parts_of(weight: QuantWeight) -> dict[str, Tensor]:
    """Return the tensors of a weight by name: its parameters, and packed indices if it has them."""
    parts: dict[str, Tensor] = dict(weight.weight_parameters())
    return parts | {"packed": weight.packed} if isinstance(weight, PackedWeight) else parts


@torch.library.custom_op("qat::form_weight", mutates_args=())
def form_weight(
    parts: Sequence[Tensor],
    names: str,
    wanted: str,
    rows: Tensor | None,
    numbers: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return a weight or some of its rows, and the codewords found for a latent weight, if any.

    Args:
        parts: the tensors of the weight, called `names`, joined by commas.
        names: see `parts`.
        wanted: names of the parts that get gradients.
        rows: ids of the rows to form, `(N,)`; None for all.
        numbers: `Numbers` of its format.
        dtype: dtype of the result.
    """
    known = Numbers(*numbers)
    made = Made.of(dict(zip(names.split(","), parts, strict=True)), known)
    octets = made.levels.new_empty(0, dtype=torch.uint8)
    if rows is not None:
        return made.of_rows(rows).formed(dtype), octets
    if "weight" in names.split(",") and known.vector_size > 1:
        made = made._replace(source=choose(made.source, made.levels, made.scales))
        octets = made.source.octets
    if not known.piece:
        return made.formed(dtype), octets
    pieces = [made.of_rows(piece).formed(dtype) for piece in _pieces(made, known)]
    return torch.cat(pieces), octets


@form_weight.register_fake
def _(
    parts: Sequence[Tensor],
    names: str,
    _wanted: str,
    rows: Tensor | None,
    numbers: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    known, named = Numbers(*numbers), dict(zip(names.split(","), parts, strict=True))
    source = named["weight"] if "weight" in named else named["packed"]
    O = source.shape[0] if rows is None else rows.shape[0]
    is_chosen = "weight" in named and known.vector_size > 1 and rows is None
    width = known.in_features // known.vector_size
    width *= index_dtype(named["codebook"].shape[0]).itemsize
    shape = (O, width) if is_chosen else (0,)
    like = named["codebook"]
    return (
        like.new_empty(O, known.in_features, dtype=dtype),
        like.new_empty(shape, dtype=torch.uint8),
    )


@torch.library.custom_op("qat::pull_back_weight", mutates_args=())
def pull_back_weight(
    dW: Tensor,
    parts: Sequence[Tensor],
    names: str,
    wanted: str,
    rows: Tensor | None,
    numbers: Sequence[int],
    chosen: Tensor,
) -> list[Tensor]:
    """Return the gradients of the parts in `wanted`, which `dW` implies, in that order.

    That of a latent weight is `dW` itself, and is left out where all rows were formed. The other
    arguments are those of `form_weight`, and the codewords that it found.
    """
    known, asked = Numbers(*numbers), wanted.split(",")
    named = dict(zip(names.split(","), parts, strict=True))
    with torch.autocast(dW.device.type, enabled=False):
        made = Made.of(named, known, chosen)
        if rows is None:
            asked = [name for name in asked if name != "weight"]
            found = whole_pulled_back(made, dW, asked, known)
        else:
            words, sums = summed_by_word(rows, dW)
            sums = sums.masked_fill(words.eq(known.padding)[:, None], 0.0)
            found = _spread(made.of_rows(words).pulled_back(sums, asked), words, sums, named)
    return [found[name].contiguous() for name in asked]  # as compilers are told below


@pull_back_weight.register_fake
def _(
    _dW: Tensor,
    parts: Sequence[Tensor],
    names: str,
    wanted: str,
    rows: Tensor | None,
    _numbers: Sequence[int],
    _chosen: Tensor,
) -> list[Tensor]:
    named = dict(zip(names.split(","), parts, strict=True))
    asked = [name for name in wanted.split(",") if rows is not None or name != "weight"]
    return [torch.empty_like(named[name], dtype=torch.float32) for name in asked]


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    parts, ctx.names, ctx.wanted, rows, ctx.numbers, _ = inputs
    ctx.has_rows = rows is not None
    ctx.save_for_backward(*parts, output[1], *([] if rows is None else [rows]))


def _backward(ctx: Any, dW: Tensor, _: Tensor | None) -> tuple:
    saved, names = [*ctx.saved_tensors], ctx.names.split(",")
    rows = saved.pop() if ctx.has_rows else None
    *parts, chosen = saved
    asked = ctx.wanted.split(",")
    rest = [name for name in asked if ctx.has_rows or name != "weight"]
    found: dict[str, Tensor] = {}
    if rest:
        given = dW.contiguous(), parts, ctx.names, ctx.wanted, rows, ctx.numbers, chosen
        found = dict(zip(rest, pull_back_weight(*given), strict=True))
    if "weight" in asked and rows is None:
        found["weight"] = _without_padding(dW, Numbers(*ctx.numbers))
    kinds = {name: part.dtype for name, part in zip(names, parts, strict=True)}
    gradients = [found[name].to(kinds[name]) if name in found else None for name in names]
    return gradients, None, None, None, None, None


form_weight.register_autograd(_backward, setup_context=_keep)


def whole_pulled_back(
    made: Made, dW: Tensor, wanted: Sequence[str], numbers: Numbers
) -> dict[str, Tensor]:
    """Return the gradients of the `wanted` parts for that of all rows, by name.

    Those of a table are summed over pieces of it, as `QuantTable.take_gradient_` does.
    """
    dW = _without_padding(dW, numbers)
    if not numbers.piece:
        return made.pulled_back(dW, wanted)
    found: dict[str, list[Tensor]] = {name: [] for name in wanted}
    for rows in _pieces(made, numbers):
        for name, gradient in made.of_rows(rows).pulled_back(dW[rows], wanted).items():
            found[name].append(gradient)
    return {
        name: torch.cat(each) if name in BY_ROW else sum(each[1:], start=each[0])
        for name, each in found.items()
    }


def _pieces(made: Made, numbers: Numbers) -> Iterator[slice]:
    O = made.source.shape[0]
    return (slice(start, start + numbers.piece) for start in range(0, O, numbers.piece))


def _without_padding(dW: Tensor, numbers: Numbers) -> Tensor:
    """Return `dW` without the gradient of the row of the padding."""
    if numbers.padding < 0:
        return dW
    rows = torch.arange(len(dW), device=dW.device)
    return dW.masked_fill(rows.eq(numbers.padding)[:, None], 0.0)


def _spread(
    found: dict[str, Tensor], words: Tensor, sums: Tensor, parts: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradients of whole `parts`, given those that `sums`, of the rows `words`, imply.

    Ids in `words` may repeat: their rows add up.
    """
    by_row = {**found, "weight": sums}
    for name in by_row.keys() & parts.keys() & {*BY_ROW, "weight"}:
        whole = torch.zeros_like(parts[name], dtype=torch.float32)
        found[name] = whole.index_add_(0, words, by_row[name])
    return found
