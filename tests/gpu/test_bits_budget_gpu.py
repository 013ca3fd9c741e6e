"""Sensitivities on CUDA against the CPU's, and a budget met there."""

import pytest
import torch
from tiny import VOCAB, tiny_model

from qat.convert.bits_budget import measure_sensitivities, plan_within_budget
from qat.convert.calibrate import TokenBatch
from qat.convert.quantize import quantize_model
from qat.logs import progress
from qat.models.cost import linear_bits
from qat.models.language_model import LanguageModel
from qat.nn.swap import linear_names, table_names
from qat.quant.spec import LutSpec, PlanRule, QuantPlan

pytestmark = pytest.mark.gpu

FORMATS = [LutSpec(bits=bits, group_size=16) for bits in (2, 4)]


def student(device: str) -> LanguageModel:
    return LanguageModel(tiny_model(initializer_range=0.2, tie_word_embeddings=True).to(device))


def tokens() -> list[TokenBatch]:
    ids = torch.randint(VOCAB, (24, 32), generator=torch.Generator().manual_seed(5))
    return [TokenBatch(part, torch.arange(32).expand_as(part)) for part in ids.split(8)]


def test_sensitivities_are_the_cpu_s() -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = student(device)
        formats = dict.fromkeys([*linear_names(model.model), *table_names(model.model)], FORMATS)
        with progress("measuring", None) as ticker:
            found.append(measure_sensitivities(model, tokens(), formats, ticker))
    for name, expected in found[0].items():
        for spec, kl in expected.items():
            assert found[1][name][spec] == pytest.approx(kl, rel=0.15, abs=1e-4), (name, spec)


def test_a_budget_is_met() -> None:
    model = student("cuda")
    plan = QuantPlan(name="p", rules=(PlanRule(pattern="*", spec=FORMATS[0]),))
    plan, report = plan_within_budget(model, plan, 4.2, tokens())
    quantize_model(model, plan, calibration=tokens())
    assert linear_bits(model.model) == pytest.approx(report.bits_per_weight)
    assert 4.0 < report.bits_per_weight <= 4.2
