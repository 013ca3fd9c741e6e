"""Rotation of a model's weights, so that fewer values are much larger than the others.

Some channels of the residual stream of a trained model hold values many times as large as the rest,
and rounding a token's values to few bits must cover them. The function of a decoder does not change
when its stream is multiplied by an orthogonal matrix Q: norms without gains commute with it, and
the weights that read the stream and those that write to it are multiplied by Q in advance. Q mixes
all channels (QuaRot, arXiv:2404.00456; SpinQuant, arXiv:2405.16406). The values of each head are
rotated in the same way, between the value projection and the output projection. Only weights
change; nothing is added at run time.

Shapes: D model width, O out_features, I in_features, E experts, n a size.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.convert.quantize import ROTATION
from qat.errors import ConfigError
from qat.models.language_model import LanguageModel
from qat.models.noise import distance, disturbed
from qat.models.precision import matmul_precision
from qat.models.stored_state import quantized_modules
from qat.nn.sites import Owner, StackedLinear, experts_of
from qat.nn.swap import decoder_layers, untie_head

logger = logging.getLogger(__name__)

SEED = 0
"""The seed of the signs, and of random matrices for sizes without a Hadamard matrix."""
TOKENS = 16
"""Tokens whose logits are compared before and after."""
MOST_OF_ROUNDING = 8.0
"""Largest allowed change of the logits, as a multiple of the change by one rounding in every layer.
Over 169 classes of tiny models, correct rotations changed them by up to 1.1 times (real models 1.6
times), and wrong ones by at least 334 times."""
VALUES = ("v_proj", "qkv_proj")
"""Linears whose last rows compute the values of all heads, in modules with an `o_proj` that reads
them."""


class Rotation(NamedTuple):
    """The result of rotating a model."""

    seed: int
    logits_off: float
    """`|rotated - logits| / |logits|`, Frobenius, on a few tokens."""
    rounding: float
    """The same measure for one rounding in each decoder layer, summed over the model before and
    after."""
    untied_megabytes: float
    """Size in float32, in 10**6 bytes, of a head that was tied to the embedding; 0 if it was not
    untied."""


@torch.no_grad()
def rotate(student: LanguageModel, seed: int = SEED) -> Rotation:
    """Rotate the float weights of `student` in place; up to rounding its function stays.

    Gains of norms are folded into the weights that read them. A head tied to the embedding gets a
    table of its own, unless all gains of the last norm are equal. Tables that fit bfloat16 exactly
    are rounded to it again: they often stay in floating point, and a checkpoint would otherwise
    store them in 32 bits.

    Raises:
        ConfigError: weights are quantized or rotated, the stream is not as expected, or the
            function of the model has changed. Only in the last case `student` was modified and is
            unusable.
    """
    model = student.model
    _check(model)
    ids = torch.arange(TOKENS, device=student.device)[None] % student.config.vocab_size
    tables: list = [model.get_input_embeddings(), student.head]
    narrow = [m for m in tables if torch.equal(m.weight.bfloat16().float(), m.weight.float())]
    generator = torch.Generator().manual_seed(seed)
    with matmul_precision("highest"):
        stream = _Stream(student, ids)
        before, noise = _logits(student, ids)
        untied = stream.fold_gains()
        stream.turn(orthogonal(stream.width, generator))
        _turn_values(model, generator)
        after, more_noise = _logits(student, ids)
    done = Rotation(seed, distance(after, before), noise + more_noise, untied / 1e6)
    if not done.logits_off <= MOST_OF_ROUNDING * done.rounding:
        raise ConfigError(
            f"rotate: {type(model).__name__} is another function once its residual stream is "
            f"rotated (logits are off by {done.logits_off:.2g} of their size, where rounding gives "
            f"{done.rounding:.2g}), expected blocks that read the stream through an RMSNorm and "
            "add to it, and nothing else; leave out --rotate"
        )
    for table in narrow:
        table.weight.copy_(table.weight.bfloat16())
    setattr(model.config, ROTATION, seed)
    logger.info(
        "rotated: logits are off by %.2g of their size, where rounding gives %.2g%s",
        done.logits_off,
        done.rounding,
        f"; the head is no longer the embedding, {done.untied_megabytes:.1f} MB more in float32"
        if untied
        else "",
    )
    return done


def orthogonal(n: int, generator: torch.Generator) -> Tensor:
    """Return a random orthogonal matrix `(n, n)`, float64, with equal magnitudes where possible.

    It is a Hadamard matrix whose rows have random signs: Sylvester's for a power of two, times one
    of Paley's if n has an odd factor. If Paley has none (his orders include 12, 20, 28, 36, 44, 60
    and most others), or n is no multiple of 4, the odd factor is a random matrix.
    """
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    powers, odd = n & -n, n // (n & -n)
    orders = (odd * 2**k for k in range(powers.bit_length()))
    matrix = next((found for order in orders if (found := _paley(order)) is not None), None)
    if matrix is None:
        normal = torch.randn(odd, odd, generator=generator, dtype=torch.float64)
        matrix = torch.linalg.qr(normal).Q.contiguous() * math.sqrt(odd)
    while len(matrix) < n:
        matrix = torch.kron(matrix, two)
    signs = torch.randint(2, (n, 1), generator=generator) * 2.0 - 1
    return signs * matrix / math.sqrt(n)


def _paley(order: int) -> Tensor | None:
    """Return a Hadamard matrix of `order` from squares modulo a prime, or `[[1]]`; else None."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    for prime, is_symmetric in ((order - 1, False), (order // 2 - 1, True)):
        is_prime = prime > 2 and all(prime % k for k in range(2, math.isqrt(prime) + 1))
        if order % 4 or not is_prime or (prime % 4 == 1) != is_symmetric:
            continue
        numbers = torch.arange(prime)
        is_square = torch.isin(numbers, numbers[1:] ** 2 % prime)
        signs = (is_square * 2.0 - 1).double() * (numbers > 0)
        core = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
        core[0, 0], core[1:, 1:] = 0, signs[(numbers[:, None] - numbers) % prime]
        eye = torch.eye(prime + 1, dtype=torch.float64)
        if is_symmetric:
            plus, minus = torch.tensor([[[1, 1], [1, -1]], [[1, -1], [-1, -1]]]).double()
            return torch.kron(core, plus) + torch.kron(eye, minus)
        core[1:, 0] = -1
        return core + eye
    return None


class _Stream:
    """The weights that write to a model's residual stream, and those that read it through norms."""

    def __init__(self, student: LanguageModel, ids: Tensor) -> None:
        self._student = student
        embedding = student.model.get_input_embeddings()
        self.width = embedding.weight.shape[1]
        self._reads: dict[nn.Module, list[nn.Parameter]] = {}
        """The weights `(O, D)` that multiply the output of each norm."""
        given: dict[int, tuple[nn.Module, Tensor]] = {}
        """Norms by the address of their output, which is kept alive so that no address is
        reused."""

        def note(module: nn.Module, args: tuple, named: dict, output: object) -> None:
            inputs = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
            norm, _ = given.get(_address(inputs[0]), (None, None)) if inputs else (None, None)
            if norm is not None:
                self._reads[norm] += self._reading(module)
            if self._is_norm(module) and isinstance(output, Tensor):
                given[_address(output)] = module, output
                self._reads.setdefault(module, [])

        with ExitStack() as handles:
            for module in student.model.modules():
                handles.enter_context(module.register_forward_hook(note, with_kwargs=True))
            student.model(input_ids=ids, use_cache=False)
        if not any(self._reads.values()):
            raise ConfigError(
                f"rotate: no weight of {type(student.model).__name__} reads its residual stream "
                "through an RMSNorm, expected a decoder that is made so; leave out --rotate"
            )

    def _is_norm(self, module: nn.Module) -> bool:
        shapes = [tuple(parameter.shape) for parameter in module.parameters()]
        return "norm" in type(module).__name__.lower() and shapes in ([], [(self.width,)])

    def _reading(self, module: nn.Module) -> list[nn.Parameter]:
        if isinstance(module, Owner):
            return [linear.weight for name, linear in _stacks(module) if not _writes(name)]
        own = module.parameters(recurse=False)
        return [weight for weight in own if weight.dim() == 2 and weight.shape[1] == self.width]

    def fold_gains(self) -> int:
        """Fold gains of norms into weights that read them; return the bytes of an untied head."""
        head, embedding = self._student.head, self._student.model.get_input_embeddings()
        untied = 0
        for norm, weights in self._reads.items():
            gain = getattr(norm, "weight", None)
            if gain is None or not weights:
                continue
            # some norms multiply by 1 + weight; eps vanishes next to values this large
            offset = (norm(torch.full_like(gain, 2.0**20)) - gain).mean().round()
            if head.weight is embedding.weight and any(w is head.weight for w in weights):
                if torch.equal(gain, gain[:1].expand_as(gain)):
                    continue  # equal gains are a scalar, which commutes with every matrix
                untie_head(self._student.model)
                untied = head.weight.nbytes
                weights = [head.weight if w is embedding.weight else w for w in weights]
                self._reads[norm] = weights
            for weight in weights:
                weight.mul_(gain + offset)
            gain.fill_(1 - offset)
        return untied

    def turn(self, matrix: Tensor) -> None:
        """Rotate all weights that write to or read the stream by `matrix` `(D, D)`."""
        tables = [m.weight for m in self._student.model.modules() if isinstance(m, nn.Embedding)]
        tables = [weight for weight in tables if weight.shape[1] == self.width]
        reads = [weight for weights in self._reads.values() for weight in weights]
        # by id, because a tied table occurs twice
        rows = {id(weight): weight for weight in (*tables, *reads)}
        for weight in rows.values():
            weight.copy_(weight @ matrix.to(weight))  # (O, D): reads Q^T x
        for weight, bias, experts in self._writers(rows.keys()):
            by_expert = weight.view(max(experts, 1), self.width, -1)
            by_expert.copy_(matrix.to(weight).T @ by_expert)  # (E, D, I): writes Q^T y
            if bias is not None:
                bias.copy_(bias @ matrix.to(bias))

    def _writers(self, known: set[int]) -> Iterator[tuple[Tensor, Tensor | None, int]]:
        """Yield weight, bias and number of experts of decoder modules that have D outputs."""
        for module in decoder_layers(self._student.model).modules():
            if isinstance(module, Owner):
                for name, linear in _stacks(module):
                    if _writes(name):
                        yield linear.weight, None, experts_of(module, name)
            is_linear = isinstance(module, nn.Linear) and not isinstance(module, StackedLinear)
            if is_linear and module.out_features == self.width and id(module.weight) not in known:
                yield module.weight, module.bias, 1


def _turn_values(model: PreTrainedModel, generator: torch.Generator) -> None:
    for module in decoder_layers(model).modules():
        linears = {name: m for name, m in module.named_children() if isinstance(m, nn.Linear)}
        source = next((linears[name] for name in VALUES if name in linears), None)
        if source is None or "o_proj" not in linears or not hasattr(module, "head_dim"):
            continue
        reader, n = linears["o_proj"].weight, module.head_dim
        num_rows, num_queries = source.out_features, reader.shape[1]
        if "v_proj" not in linears:  # fused rows: queries, keys, then as many values
            num_rows = (num_rows - num_queries) // 2
        elif linears["q_proj"].out_features != num_queries:
            continue  # some query rows are gates, which multiply the values elementwise
        matrix = orthogonal(n, generator).to(reader)
        for values in (source.weight, source.bias):
            if values is not None:
                by_head = values[-num_rows:].view(-1, n, *values.shape[1:])  # (heads, n, D)
                by_head.copy_(torch.einsum("hi...,ij->hj...", by_head, matrix))
        by_head = reader.view(len(reader), -1, n)  # (O, heads, n)
        by_head.copy_(by_head @ matrix)


def _logits(student: LanguageModel, ids: Tensor) -> tuple[Tensor, float]:
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    plain = student.logits(student.hidden(ids, positions))
    with disturbed(student.model, torch.finfo(plain.dtype).eps):
        return plain, distance(student.logits(student.hidden(ids, positions)), plain)


def _check(model: PreTrainedModel) -> None:
    """Refuse a model that is rotated, has quantized weights, or reads more than text."""
    if found := quantized_modules(model):
        raise ConfigError(
            f"rotate: {next(iter(found))} is quantized already, expected a float model; rotate the "
            "one that it was made from"
        )
    if getattr(model.config, ROTATION, None) is not None:
        raise ConfigError(
            f"rotate: {ROTATION} in the configuration says that the model is rotated already, "
            "expected one that is not; leave out --rotate"
        )
    if model.config.get_text_config() is not model.config:
        raise ConfigError(
            f"rotate: {type(model).__name__} also reads what is no text, whose features would come "
            "into the stream as they are, expected a model of text alone; leave out --rotate"
        )


def _stacks(owner: Owner) -> list[tuple[str, nn.Linear]]:
    return [(n, m) for n, m in owner.named_children() if isinstance(m, StackedLinear)]


def _writes(name: str) -> bool:
    return name.startswith("down")  # down_proj adds to the stream, gate and up read it


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
