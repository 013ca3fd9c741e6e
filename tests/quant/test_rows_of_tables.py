"""Formats with a codebook for some rows each: every step is that of the rows alone."""

import pytest
import torch
from torch import Tensor

from qat.errors import ConfigError
from qat.kernels.lut_weight import form, pull_back
from qat.models.cost import format_bits
from qat.quant.codebook import latent_indices
from qat.quant.error_feedback import damped, fit_all_to_inputs, output_error
from qat.quant.fit import fit_weight
from qat.quant.spec import LutSpec, PlanRule
from qat.quant.weight import PackedIndices, QuantizedWeight, Scales, dequantize, expand_scales, pack

O, I, ROWS = 24, 40, 8


def spec_of(bits: int) -> LutSpec:
    return LutSpec(bits=bits, group_size=I, table_rows=ROWS)


def moment(weight: Tensor) -> Tensor:
    x = torch.randn(200, weight.shape[1]) * torch.linspace(0.2, 2, weight.shape[1])
    return x.T @ x / len(x)


def test_rows_with_a_codebook_are_a_weight_of_their_own() -> None:
    for bits in (1, 2, 3, 4, 6, 8):
        check_fits(bits)


def check_fits(bits: int) -> None:
    """Fits with and without inputs are those of the rows, and take the bits that are said."""
    spec, weight = spec_of(bits), torch.randn(O, I) * torch.rand(O, 1)
    fitted, hessian = fit_weight(weight, spec), moment(weight)
    parts = [fit_weight(part, spec.of_one_table) for part in weight.split(ROWS)]
    assert fitted.codebook.shape == (O // ROWS, 2**bits, 1)
    assert torch.equal(dequantize(fitted), torch.cat([dequantize(part) for part in parts]))
    assert torch.equal(fitted.codebook[1, :, 0], parts[1].codebook)
    levels = 16 * 2**bits * (O // ROWS)
    assert format_bits(spec, (O, I)) == O * (8 * -(-I * bits // 8) + 16) + levels

    (fit,) = fit_all_to_inputs([weight], spec, hessian)
    alone = [
        fit_all_to_inputs([part], spec.of_one_table, hessian)[0] for part in weight.split(ROWS)
    ]
    expected = torch.cat([dequantize(part.quantized) for part in alone])
    torch.testing.assert_close(dequantize(fit.quantized), expected, rtol=1e-5, atol=1e-6)
    H = damped(hessian)
    whole = (weight.T * (H @ weight.T)).sum()
    share = output_error(weight, fit.quantized, H) / whole.item()
    assert fit.output_error == pytest.approx(share**0.5, rel=1e-3)
    assert share < output_error(weight, fitted, H) / whole.item()


def test_forming_and_pulling_back_are_those_of_the_rows() -> None:
    for bits in (2, 5):
        check_gradients(bits)


def check_gradients(bits: int) -> None:
    """What is formed from latent weights and from indices, and its gradients, are those of rows."""
    codebook = torch.randn(O // ROWS, 2**bits, 1).half().float()
    scales, latent = Scales((torch.rand(O, 1) + 0.1).half().float()), torch.randn(O, I)
    scales.by_group()[3] = 0  # a row of nothing
    found = latent_indices(latent, expand_scales(scales, I), codebook)
    packed = PackedIndices(pack(found, bits), bits, I)
    dW, names = torch.randn(O, I), ("codebook", "scales")
    W = form(latent, codebook, scales, torch.float32)
    assert torch.equal(W, form(packed, codebook, scales, torch.float32))
    assert torch.equal(W, dequantize(QuantizedWeight(found, codebook, scales)))
    gradients = [pull_back(dW, each, codebook, scales, wanted=names) for each in (latent, packed)]
    for t, rows in enumerate(slice(start, start + ROWS) for start in range(0, O, ROWS)):
        own = latent[rows], codebook[t, :, 0], scales.of_rows(rows)
        assert torch.equal(W[rows], form(*own, torch.float32))
        expected = pull_back(dW[rows], *own, wanted=names)
        for gradient in gradients:
            torch.testing.assert_close(gradient["codebook"][t, :, 0], expected["codebook"])
            assert torch.equal(gradient["scales"][rows], expected["scales"])


def test_specs_with_tables_are_kept_and_wrong_ones_refused() -> None:
    spec = spec_of(2)
    rule = PlanRule.model_validate(
        {"pattern": "*", "spec": {"bits": 2, "group_size": I, "table_rows": ROWS}}
    )
    assert rule.spec == spec and LutSpec(**spec.model_dump()) == spec
    assert "table_rows" not in LutSpec(bits=2).model_dump() and "8" in spec.described_codebook()
    with pytest.raises(ConfigError, match="table_rows=8 does not divide its 20 rows"):
        spec.check_shape("q", 20, I)
    for wrong in ({"codebook": "seq"}, {"vector_size": 2}, {"level_bits": 32}, {"table_rows": 5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LutSpec(**{"bits": 2, "table_rows": ROWS, **wrong})
