"""What `measure_rotation.py` counts as rounding and as outliers, against plain formulas."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_model

from qat.models.language_model import LanguageModel
from qat.nn.swap import linear_names

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


@pytest.fixture(autouse=True)
def _beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))


def test_rounding_is_that_of_torch() -> None:
    import measure_rotation

    x = torch.randn(64)
    found = measure_rotation.rounded(x, torch.tensor(2.0), 8)
    expected = torch.fake_quantize_per_tensor_affine(x, 2 / 127, 0, -127, 127)
    torch.testing.assert_close(found, expected)


def test_inputs_are_seen_and_replaced_by_name() -> None:
    import measure_rotation

    model, ids = LanguageModel(tiny_model("llama")), torch.arange(6)[None]
    seen = set()

    def erase(name: str, x: torch.Tensor) -> torch.Tensor:
        seen.add(name)
        return torch.zeros_like(x)

    with measure_rotation.inputs_through(model, erase), torch.no_grad():
        erased = model.hidden(ids, ids)
    assert seen == set(linear_names(model.model))
    embedded = model.model.model.norm(model.model.get_input_embeddings()(ids))
    torch.testing.assert_close(erased, embedded)  # nothing is added to the stream
    kinds = {measure_rotation.kind(name) for name in seen}
    assert kinds == {"stream", "values", "down"}
