"""An adapter of peft learns beside codes, and becomes that of the packed checkpoint."""

from pathlib import Path

import pytest
import torch
from cache_case import TOKENIZER
from quantized import SPECS, tiny_adapted, tiny_quantized, with_rounded_inputs
from test_trainer import arguments
from tiny import IDS, tiny_model
from train_case import make_place

import qat
from qat.errors import ConfigError

peft = pytest.importorskip("peft")
from qat.integrations.peft import prepare_lora  # noqa: E402
from qat.integrations.transformers import CacheDataset, QatTrainer  # noqa: E402

# peft asks transformers by names of before 5.24
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("adapters"))


@pytest.mark.slow
def test_an_adapter_learns_and_is_packed(place: Path, tmp_path: Path) -> None:
    def student() -> peft.PeftModel:
        torch.manual_seed(1)
        model = qat.load(place / "student", device="cpu", dtype="fp32")
        return prepare_lora(model, peft.LoraConfig(r=3, lora_alpha=6), dtype="fp32")

    def trainer_of(model: peft.PeftModel, out: Path) -> QatTrainer:
        args = arguments(out, learning_rate=1e-2, save_strategy="steps", save_steps=2)
        data = CacheDataset(place / "cache")
        return QatTrainer(model, args, train_dataset=data, processing_class=TOKENIZER)

    first = student()
    with torch.no_grad():
        plain = qat.load(place / "student", device="cpu", dtype="fp32")
        torch.testing.assert_close(first(IDS).logits, plain(IDS).logits)
    learning = {name for name, p in first.named_parameters() if p.requires_grad}
    assert learning and all(".lora_" in name for name in learning)
    trainer = trainer_of(first, tmp_path / "run")
    before = trainer.evaluate(CacheDataset(place / "cache"))["eval_loss"]
    trainer.train()
    assert trainer.evaluate(CacheDataset(place / "cache"))["eval_loss"] < before
    again = trainer_of(student(), tmp_path / "run")
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for (name, a), b in zip(first.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    with torch.no_grad():
        trained = first(IDS).logits
    trainer.save_model(str(tmp_path / "saved"))
    opened = qat.load(tmp_path / "saved", device="cpu", dtype="fp32")
    with torch.no_grad():  # the factors are stored in float16
        torch.testing.assert_close(opened(IDS).logits, trained, rtol=2e-3, atol=2e-3)
        assert not torch.allclose(trained, plain(IDS).logits, rtol=2e-2, atol=2e-2)
        assert torch.equal(qat.finish(first)(IDS).logits, opened(IDS).logits)


def test_mistakes() -> None:
    for model, message in (
        (tiny_model(), "no quantized linears"),
        (tiny_adapted("qwen3", SPECS["lut2"]), "has an adapter"),
        (with_rounded_inputs(tiny_quantized("qwen3", SPECS["lut2"]), "int8"), "rounds its inputs"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare_lora(model)
    with pytest.raises(ConfigError, match="codes of its own"):
        prepare_lora(tiny_quantized("qwen3", SPECS["lut2"])).merge_and_unload()
