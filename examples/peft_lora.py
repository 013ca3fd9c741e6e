"""Train an adapter of peft on frozen codes: python examples/peft_lora.py MODEL CACHE OUT."""

import sys

from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import qat
from qat.integrations.peft import prepare_lora
from qat.integrations.transformers import CacheDataset, QatTrainer

model_name, cache_dir, out = sys.argv[1:] if len(sys.argv) == 4 else sys.exit(__doc__)
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLM.from_pretrained(model_name)
qat.quantize(model, "q2a4", calibration=cache_dir, tokenizer=tokenizer, group_size=64)
student = prepare_lora(model, LoraConfig(r=16, lora_alpha=32))
args = TrainingArguments(
    f"{out}-run", per_device_train_batch_size=8, learning_rate=1e-3, report_to="none"
)
data = CacheDataset(cache_dir)
trainer = QatTrainer(student, args, train_dataset=data, processing_class=tokenizer)
trainer.train()
trainer.save_model(out)
