"""Paths through a trellis, against every path there is, in float64.

Shapes: O out_features, I in_features, C states, k bits of a weight.
"""

import itertools

import pytest
import torch
from torch import Tensor

from qat.quant import error_feedback as ef
from qat.quant import trellis
from qat.quant.fit import fit_weight, weighted_error
from qat.quant.spec import LutSpec
from qat.quant.trellis import best_path, feedback_path, start_levels
from qat.quant.weight import dequantize, pack, packed_width, unpack

KINDS = [(2, 1), (3, 1), (4, 2), (5, 2), (8, 2), (8, 3), (8, 4), (6, 3)]
"""Bits of an index, and of a weight."""
SPEC = LutSpec(bits=8, trellis_bits=2, group_size=16, scale_bits=8)


def paths(bits: int, k: int, I: int) -> Tensor:
    """Every path of I states, `(2**(k I), I)`, by Python's integers."""
    found = []
    for own in itertools.product(range(2**k), repeat=I):
        index, path = 0, []
        for each in own:
            index = index >> k | each << bits - k
            path.append(index)
        found.append(path)
    return torch.tensor(found)


def case(O: int, I: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, scales of which some are zero, and levels."""
    S = (torch.rand(O, I) + 0.1) * (torch.rand(O, I) < 0.9)
    return torch.randn(O, I), S, torch.randn(2**bits, 1)


@pytest.mark.parametrize(("bits", "k"), [kind for kind in KINDS if kind[1] < 4])
def test_no_path_errs_less(bits: int, k: int) -> None:
    for I in (1, 2, 3, 4):
        weight, S, codebook = case(5, I, bits)
        every = paths(bits, k, I)
        gaps = weight[:, None] - S[:, None] * codebook[every, 0]
        errors = gaps.double().square().sum(-1)
        found = best_path(weight, S, codebook, k)
        assert found.dtype == torch.uint8, I
        assert all(any(torch.equal(row, path) for path in every) for row in found.long()), I
        gap = weight - S * codebook[found.long(), 0]
        torch.testing.assert_close(gap.double().square().sum(-1), errors.amin(1))


@pytest.mark.parametrize(("bits", "k"), KINDS)
def test_a_path_is_k_bits_a_weight_of_one_little_endian_integer(bits: int, k: int) -> None:
    for I in (1, 2, 5, 33):
        weight, S, codebook = case(3, I, bits)
        indices = best_path(weight, S, codebook, k)
        packed = pack(indices, bits, k)
        assert packed.shape == (3, packed_width(I, bits, k)) and packed.shape[1] == -(
            -I * k // 8
        ), I
        assert torch.equal(unpack(packed, bits, I, k), indices), I
        for row, octets in zip(indices.tolist(), packed.tolist(), strict=True):
            stream = int.from_bytes(bytes(octets), "little") << bits  # zeros before the row
            assert row == [stream >> (i + 1) * k & 2**bits - 1 for i in range(I)], I


def test_every_piece_of_a_weight_takes_the_same_path(monkeypatch) -> None:
    weight, S, codebook = case(300, 40, 8)
    whole = best_path(weight, S, codebook, 2)
    monkeypatch.setattr(trellis, "LEAST_ROWS", 7)
    monkeypatch.setattr(trellis, "HELD", 1)
    assert torch.equal(best_path(weight, S, codebook, 2), whole)
    assert torch.equal(best_path(weight[17:19], S[17:19], codebook, 2), whole[17:19])
    bf16 = weight.bfloat16()
    assert torch.equal(best_path(bf16, S, codebook, 2), best_path(bf16.float(), S, codebook, 2))


def test_the_lower_state_before_wins_a_tie() -> None:
    """All levels equal: every path errs alike, and that of zeros is the first of all."""
    weight, S = torch.randn(4, 9), torch.ones(4, 9)
    assert best_path(weight, S, torch.ones(16, 1), 2).count_nonzero() == 0


@pytest.mark.parametrize(("bits", "k"), KINDS)
def test_start_levels_of_states_that_meet_lie_in_all_parts_of_the_range(bits: int, k: int) -> None:
    levels, K = start_levels(bits, k)[:, 0], 2**k
    assert levels.shape == (2**bits,) and len(levels.unique()) == 2**bits
    torch.testing.assert_close(levels.sort().values, -levels.sort(descending=True).values)
    part = levels.argsort().argsort() // (2**bits // K)
    after = part.view(K, -1)  # of one state
    assert all(len(column.unique()) == K for column in after.T)
    before = part.view(-1, K)  # into one state
    assert all(len(row.unique()) == K for row in before)


def test_a_gaussian_errs_less_than_by_levels_or_codewords() -> None:
    weight = torch.randn(64, 256)
    one = torch.ones_like(weight)
    formats = [
        {"bits": 8, "trellis_bits": 2},
        {"bits": 8, "vector_size": 4},
        {"bits": 2},
    ]
    specs = [LutSpec(group_size=64, **each) for each in formats]
    errors = [weighted_error(weight, fit_weight(weight, spec), one) for spec in specs]
    assert errors[0] < errors[1] < 0.8 * errors[2]
    assert errors[0] < 0.08 * weight.square().sum()


def test_importance_is_heeded() -> None:
    weight, h = torch.randn(32, 64), torch.tensor([100.0] * 8 + [0.01] * 56)
    told, plain = (fit_weight(weight, SPEC, given) for given in (h, None))
    told_gap, gap = ((weight - dequantize(each))[:, :8].norm() for each in (told, plain))
    assert told_gap < 0.7 * gap


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e12])
def test_weights_of_any_size_are_fitted(size: float) -> None:
    weight = torch.randn(9, 32) * size
    fitted = fit_weight(weight, SPEC.model_copy(update={"scale_bits": 32}))
    assert all(t.isfinite().all() for t in (fitted.codebook, fitted.scales.by_group()))
    assert (weight - dequantize(fitted)).norm() <= 0.4 * weight.norm()


def hessian(I: int, rows: int = 400) -> Tensor:
    """The second moment of correlated inputs of very different size."""
    x = torch.randn(rows, I) @ (torch.randn(I, I) / I**0.5) * torch.linspace(0.2, 2, I)
    return ef.damped(x.T @ x / rows)


def test_feedback_without_coupling_is_the_best_path_of_each_block() -> None:
    weight, S, codebook = case(6, trellis.BLOCK, 8)
    h = torch.rand(trellis.BLOCK) + 0.1
    found = feedback_path(weight, S, codebook, 2, coupling=torch.zeros(len(h), len(h)), metric=h)
    root = h.sqrt()
    gaps = [
        (root * (weight - S * codebook[path.long(), 0])).norm()
        for path in (found, best_path(root * weight, root * S, codebook, 2))
    ]
    torch.testing.assert_close(*gaps)


@pytest.mark.parametrize("I", [16, 80, 112])
def test_feedback_pays_errors_back(I: int) -> None:
    """Also where columns are no multiple of a block; and what it gives is a path."""
    weight, H = torch.randn(24, I), hessian(I)
    (fit,) = ef.fit_all_to_inputs([weight], SPEC, H)
    start = fit_weight(weight, SPEC, ef.damped(H).diagonal())
    errors = [ef.output_error(weight, each, H) for each in (fit.quantized, start)]
    assert errors[0] < 0.9 * errors[1]
    indices = fit.quantized.indices
    assert torch.equal(unpack(pack(indices, 8, 2), 8, I, 2), indices)


def test_experts_share_a_codebook_and_have_paths_of_their_own() -> None:
    weight, H = torch.randn(2 * 16, 48), hessian(48)
    hessians = torch.stack([H, H.flip(0, 1)])
    counts = torch.tensor([400, 10])
    fit = ef.fit_stack_to_inputs(weight, SPEC, hessians, counts)
    assert fit.quantized.codebook.shape == (256, 1)
    indices = fit.quantized.indices
    assert torch.equal(unpack(pack(indices, 8, 2), 8, 48, 2), indices)
