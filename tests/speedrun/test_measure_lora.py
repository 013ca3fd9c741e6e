"""The script that compares gradients: it passes what is right and notices what is not."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qat.nn.quant_linear import QuantLinear

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


@pytest.fixture(autouse=True)
def _script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    torch.set_num_threads(1)
    import measure_lora

    small = {**measure_lora.SHAPE, "num_hidden_layers": 1, "intermediate_size": 256}
    monkeypatch.setattr(measure_lora, "SHAPE", small)
    out = str(tmp_path / "figures.jsonl")
    arguments = ["measure_lora.py", "--seeds", "1", "--device", "cpu", "--figures", out]
    monkeypatch.setattr(sys, "argv", arguments)


def test_the_right_gradients_pass(tmp_path: Path, capsys) -> None:
    import measure_lora

    with pytest.raises(SystemExit) as end:
        measure_lora.main()
    assert not end.value.code
    line = json.loads((tmp_path / "figures.jsonl").read_text())
    assert line["figure"] == "lora_gradient_cosine" and line["value"] > 0.999999
    assert capsys.readouterr().out.count("linears") == 9


def test_a_base_that_passes_no_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import measure_lora

    def detached(self: QuantLinear, x: Tensor) -> Tensor:
        base = F.linear(x.detach(), self._quantized_part().detach())
        return base + F.linear(F.linear(x, self.lora_in), self.lora_out)

    monkeypatch.setattr(QuantLinear, "forward", detached)
    monkeypatch.setattr(measure_lora, "WAYS", {"alone": lambda _: None})
    assert measure_lora.measure(0, torch.device("cpu")) < 0.9
