"""How much a model's output changes when one of its weights is quantized and nothing else.

Each weight is fitted to each format as a conversion would fit it, put in place, judged, and taken
out again. What lies before its decoder layer is not computed anew.

Shapes: T tokens, V vocabulary, D model width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat.convert.calibrate import StageInputs, TokenBatch, patched_forwards, quantize_in_order
from qat.kernels.column_sweep import COLUMN_OPS
from qat.logs import Ticker
from qat.models.language_model import LanguageModel
from qat.models.regions import matmul_precision
from qat.nn.quant_linear import QuantLinear
from qat.nn.swap import decoder_layers
from qat.quant.error_feedback import fit_all_to_inputs
from qat.quant.fit import fit_weight
from qat.quant.spec import LutSpec
from qat.quant.weight import QuantizedWeight, dequantize

JUDGED_TOKENS = 1024
"""Tokens that changed models are judged on, or half of a shorter calibration."""
ROWS = 256
"""Tokens whose logits are compared at a time."""

Sensitivities = dict[str, dict[LutSpec, float]]
"""By name and format: KL(model || model with that weight in that format), nats per token."""


@torch.no_grad()
def measure_sensitivities(
    model: LanguageModel,
    calibration: Sequence[TokenBatch],
    formats: Mapping[str, Sequence[LutSpec]],
    ticker: Ticker,
) -> Sensitivities:
    """The exact KL of every weight named in `formats`, in each of its formats alone.

    The first sequences of `calibration`, `JUDGED_TOKENS` or half of them, are judged on; linears
    are fitted to their inputs over the others. Embeddings and heads are fitted to their values.
    The model is as before afterwards.

    Args:
        formats: names of linears in the decoder layers, of the embedding or of an untied head.
        ticker: moves by one for each KL.
    """
    judged, rest = split_calibration(calibration)
    found: Sensitivities = {name: {} for name in formats}
    modules = {name: model.model.get_submodule(name) for name in formats}
    with matmul_precision("medium"):
        judge = _Judge(model, judged)

        def note(name: str, spec: LutSpec, quantized: QuantizedWeight) -> None:
            found[name][spec] = judge.divergence(modules[name], dequantize(quantized))
            ticker.advance()
            ticker.note(name)

        def measure_stage(names: list[str], inputs: StageInputs) -> None:
            for spec in dict.fromkeys(spec for name in names for spec in formats[name]):
                own = [name for name in names if spec in formats[name]]
                weights = [_weight(modules[name]) for name in own]
                fits = fit_all_to_inputs(weights, spec, inputs.second_moment, COLUMN_OPS)
                for name, fit in zip(own, fits, strict=True):
                    note(name, spec, fit.quantized)

        outside = [name for name, module in modules.items() if judge.layer_of(module) is None]
        for name in outside:
            for spec in formats[name]:
                note(name, spec, fit_weight(_weight(modules[name]), spec))
        inside = [name for name in formats if name not in outside]
        quantize_in_order(model, rest, inside, measure_stage)
    return found


def split_calibration(batches: Sequence[TokenBatch]) -> tuple[TokenBatch, list[TokenBatch]]:
    """The sequences to judge on and those to fit to; a single sequence serves both."""
    ids, positions = (torch.cat(part) for part in zip(*batches, strict=True))
    wished = -(-JUDGED_TOKENS // ids.shape[1])
    count = max(1, min(wished, len(ids) // 2))
    judged = TokenBatch(ids[:count], positions[:count])
    if len(ids) == 1:
        return judged, [judged]
    size = len(batches[0].input_ids)
    rest = zip(ids[count:].split(size), positions[count:].split(size), strict=True)
    return judged, [TokenBatch(*pair) for pair in rest]


class _Judge:
    """A model, what it says about some tokens, and what its decoder layers gave for them."""

    def __init__(self, model: LanguageModel, batch: TokenBatch) -> None:
        self._model = model
        self._batch = batch
        self._layers = list(decoder_layers(model.model))
        self._gave: list[object] = []
        with patched_forwards({layer: self._noting(layer.forward) for layer in self._layers}):
            log_p_TV = self._logits().log_softmax(-1)
        self._p_TV = log_p_TV.exp()
        self._negative_entropy = _row_dots(self._p_TV, log_p_TV)

    def layer_of(self, module: nn.Module) -> int | None:
        """The number of the decoder layer that `module` lies in; None outside."""
        for number, layer in enumerate(self._layers):
            if any(inner is module for inner in layer.modules()):
                return number
        return None

    def divergence(self, module: nn.Module, weight: Tensor) -> float:
        """KL(model || model whose `module` has that weight), nats per token."""
        with _holding(module, weight), self._skipping(self._first_changed(module)):
            logits_TV = self._logits()
        # sum p (log p - log q), where log q is the logits less their log-sum-exp
        crossed = logits_TV.logsumexp(-1) - _row_dots(self._p_TV, logits_TV)
        return (self._negative_entropy + crossed).double().mean().item()

    def _first_changed(self, module: nn.Module) -> int:
        """The first layer whose input or weights another weight of `module` changes."""
        if module is self._model.model.get_input_embeddings():
            return 0
        number = self.layer_of(module)
        return len(self._layers) if number is None else number

    def _skipping(self, count: int) -> AbstractContextManager[None]:
        """Let the first `count` layers give what they gave, without computing it."""
        given = self._gave[count - 1] if count else None
        return patched_forwards(
            {layer: lambda *_args, **_named: given for layer in self._layers[:count]}
        )

    def _noting(self, forward: Callable) -> Callable:
        def call(*args: object, **named: object) -> object:
            self._gave.append(forward(*args, **named))
            return self._gave[-1]

        return call

    def _logits(self) -> Tensor:
        with matmul_precision("highest"):
            ids = (ids.to(self._model.device) for ids in self._batch)
            return self._model.logits(self._model.hidden(*ids).flatten(0, 1)).float()


def _row_dots(left: Tensor, right: Tensor) -> Tensor:
    """`sum_v left * right` for each row, a few rows at a time."""
    pairs = zip(left.split(ROWS), right.split(ROWS), strict=True)
    return torch.cat([(one * other).sum(-1) for one, other in pairs])


@contextmanager
def _holding(module: nn.Module, weight: Tensor) -> Iterator[None]:
    """Let a linear compute with `weight`, or an embedding and the head tied to it."""
    if isinstance(module, nn.Embedding):
        own = module.weight.data
        module.weight.data = weight.to(own.dtype)
        try:
            yield
        finally:
            module.weight.data = own
    else:
        with patched_forwards({module: lambda x: F.linear(x, weight.to(x.dtype), module.bias)}):
            yield


def _weight(module: nn.Module) -> Tensor:
    if isinstance(module, QuantLinear):
        return module.quantized_weight()
    return module.weight.detach().float()
