"""The same code on CUDA: every weight, gradient and stage against the CPU's. Run with `-m gpu`."""

from pathlib import Path

import pytest
import torch
from quantized import SPECS, frozen_linear, latent_linear
from tiny import tiny_model, tiny_tokenizer

from qat.cli import run_verb
from qat.quant.spec import LutSpec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("make", [frozen_linear, latent_linear], ids=["frozen", "latent"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_weight_and_gradients_equal_the_cpu(make: type, spec: LutSpec) -> None:
    here = make(24, 64, spec, bias=True)
    there = make(24, 64, spec, bias=True)
    there.load_state_dict(here.state_dict())
    there.cuda()
    assert torch.equal(here.quantized_weight(), there.quantized_weight().cpu())
    x, dy = torch.randn(2, 10, 64), torch.randn(2, 10, 24)
    for linear, device in ((here, "cpu"), (there, "cuda")):
        linear.form_(torch.float32)
        for part_x, part_dy in zip(x, dy, strict=True):
            linear(part_x.to(device)).backward(part_dy.to(device))
    for (name, p), q in zip(here.named_parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad.cpu(), rtol=1e-3, atol=1e-3, msg=name)


def test_the_pipeline_runs_on_cuda_and_exports_what_it_trained(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tiny_model("qwen3", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the cat saw dog number {i} on the mat" for i in range(400)))

    def qat(*words: object) -> dict:
        return run_verb([str(word) for word in words])

    cache = tmp_path / "cache"
    qat("cache", "--teacher", tmp_path / "teacher", "--data", text, "--out", cache,
        "--sequence-length", 32, "--top-k", 16, "--draws", 8, "--device", "cuda")  # fmt: skip
    qat("convert", tmp_path / "teacher", "--to", "q2a4", "--out", tmp_path / "q2",
        "--calibration", cache, "--device", "cuda")  # fmt: skip
    for learn, dtype in (("weights,scales,codebook", "bf16"), ("scales,codebook", "fp32")):
        run = tmp_path / f"run_{dtype}"
        found = qat("train", tmp_path / "q2", "--cache-dir", cache, "--out", run, "--learn", learn,
                    "--dtype", dtype, "--max-steps", 20, "--eval-every", 10, "--log-every", 5,
                    "--batch-size", 8, "--gradient-checkpointing",
                    "--loss", "tail:1,sampled:0.1")  # fmt: skip
        assert found["steps"] == 20
        dense = tmp_path / f"dense_{dtype}"
        exported = qat("export", run, "--to", "dense", "--dtype", dtype, "--out", dense)
        assert exported["logits_equal"]
    found = qat("eval", tmp_path / "run_bf16", "--teacher", tmp_path / "teacher",
                "--cache-dir", cache)  # fmt: skip
    assert 0 <= found["kl_nats"] < 1
