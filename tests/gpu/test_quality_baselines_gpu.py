"""Baselines on a GPU: compiled, in bf16, each step's time measured."""

from pathlib import Path

import pytest
from cache_case import TOKENIZER, build, teacher

from qat.convert.calibrate import TokenBatch
from qat.data.reader import TeacherCache
from qat.evaluate.divergence import exact_divergence
from qat.extensions.lab.baselines.config import METHODS, BaselineSettings
from qat.extensions.lab.baselines.methods import time_step, train_baseline
from qat.models.language_model import LanguageModel

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("method", "own"),
    [*((method, {}) for method in METHODS), ("edgerazor", {"activations": "int8", "kv": "int8"})],
)
def test_a_method_runs_from_end_to_end(tmp_path: Path, method: str, own: dict[str, str]) -> None:
    if method in {"torchao_int2", "edgerazor"}:
        pytest.importorskip(method.removesuffix("_int2"))
    build(tmp_path / "cache")
    cache = TeacherCache.open(tmp_path / "cache")
    float_teacher = LanguageModel(teacher().model.to("cuda"))
    settings = BaselineSettings(max_steps=24, batch_size=8, warmup_steps=2, device="cuda", **own)
    batch = cache.batch(range(16))
    found = train_baseline(
        method,
        float_teacher,
        TOKENIZER,
        cache,
        settings=settings,
        calibration=[TokenBatch(batch.input_ids, batch.position_ids)],
    )
    assert exact_divergence(found.model, float_teacher, [batch]).kl_nats < 1
    assert found.model.device.type == "cuda" and found.peak_gib > 0
    trains = method not in ("rtn", "gptq")
    assert (found.steps > 0) == trains
    step_s = time_step(method, float_teacher, cache, settings=settings, steps=3)
    assert (step_s > 0) == trains
