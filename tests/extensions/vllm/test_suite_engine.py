"""Answers of a suite by vLLM's own engine on the CPU are those of our sampler."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from quantized import SPECS, tiny_quantized
from tiny import save_tiny, tiny_tokenizer

from qat.extensions.decode.slots import Batch, Request, in_order, open_sampler
from qat.extensions.suite import engine
from qat.generate.sampling import Sampling
from qat.models.checkpoint import save_checkpoint
from qat.models.load import load_model

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; .ci/vllm runs these tests", allow_module_level=True)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
# by default the engine refuses to start unless nearly all memory is free
ENGINE = {"gpu_memory_utilization": 0.3, "enforce_eager": True}


@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_it_writes_what_our_sampler_writes(tmp_path: Path, monkeypatch, kind: str) -> None:
    monkeypatch.setattr(engine, "MEMORY", ENGINE)
    torch.manual_seed(3)
    if kind == "packed":
        save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), tiny_tokenizer(), tmp_path / "it")
    else:
        save_tiny(tmp_path / "it")
    source = str(tmp_path / "it")
    prompts = tiny_tokenizer()(["the cat sat", "on the mat and the dog", "saw"])["input_ids"]
    requests = [Request(ids, 12 + n, (0, 0)) for n, ids in enumerate(prompts)]
    model = load_model(source, device="cpu", dtype="fp32")
    free = Batch(3, 40, 14, Sampling(0.0), ())
    ours = in_order(open_sampler(model, free).sample(requests))
    end = ours[0][5]  # a token that the first answer has, as an end of texts
    batch = Batch(3, 40, 14, Sampling(0.0), {end})
    cut = [row[: row.index(end) + 1] if end in row else row for row in ours]
    sampler = engine.VllmSampler(source, "float32", batch)
    try:
        assert in_order(sampler.sample(requests)) == cut
    finally:
        sampler.close()
