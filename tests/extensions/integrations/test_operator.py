"""The operator that forms weights is what PyTorch's compilers take it for."""

import pytest
import torch
from quantized import SPECS, frozen_linear, latent_linear, with_adapter

from qat.extensions.integrations.operator import (
    Numbers,
    form_weight,
    formed,
    parts_of,
    pull_back_weight,
)

WEIGHTS = {
    "latent": lambda: latent_linear(24, 32, SPECS["lut2"]),
    "vectors": lambda: latent_linear(24, 32, SPECS["fours8_s8"]),
    "low rank": lambda: latent_linear(24, 32, SPECS["fours10_r2"]),
    "adapter": lambda: with_adapter(frozen_linear(24, 32, SPECS["lut3"])),
    "one row": lambda: latent_linear(1, 16, SPECS["lut2"]),
}


@pytest.mark.parametrize(
    ("kind", "rows"), [*((kind, None) for kind in WEIGHTS), ("vectors", [5, 0, 5]), ("latent", [2])]
)
def test_it_is_as_it_says(kind: str, rows: list[int] | None) -> None:
    ids = None if rows is None else torch.tensor(rows)
    weight = WEIGHTS[kind]()
    parts = parts_of(weight)
    wanted = [name for name, part in parts.items() if part.requires_grad]
    words = ",".join(parts), ",".join(wanted)
    numbers = [*Numbers.of(weight)]
    args = ([*parts.values()], *words, ids, numbers, torch.float32)
    torch.library.opcheck(form_weight, args)
    W, chosen = (part.detach() for part in form_weight(*args))
    plain = [part.detach() for part in parts.values()]
    torch.library.opcheck(
        pull_back_weight, (torch.randn_like(W), plain, *words, ids, numbers, chosen)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_it_is_what_a_step_forms_and_pulls_back(kind: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[kind]()
    W = formed(weight, dtype)
    assert torch.equal(W, weight.quantized_weight(dtype))
    dW = torch.randn(W.shape).to(dtype)
    W.backward(dW)
    found = {name: p.grad for name, p in weight.named_parameters()}
    weight.zero_grad()
    weight.form_(dtype)
    weight.formed.backward(dW)
    for name, parameter in weight.named_parameters():
        assert torch.equal(found[name], parameter.grad), name


def test_rows_are_rows_of_the_whole() -> None:
    weight = latent_linear(24, 32, SPECS["lut2"])
    rows = torch.tensor([3, 0, 3, 23])
    some, whole = formed(weight, torch.float32, rows), formed(weight, torch.float32)
    assert torch.equal(some, whole[rows])
    d_some = torch.randn_like(some)
    gradients = []
    for out, gradient in ((some, d_some), (whole[rows], d_some)):
        weight.zero_grad()
        out.backward(gradient)
        gradients.append([p.grad.clone() for p in weight.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
