"""Train by the trainer of transformers: python examples/trainer.py MODEL CACHE OUT.

On several GPUs: accelerate launch examples/trainer.py MODEL CACHE OUT.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import qat
from qat.integrations.transformers import CacheDataset, QatTrainer

model_name, cache_dir, out = sys.argv[1:] if len(sys.argv) == 4 else sys.exit(__doc__)
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLM.from_pretrained(model_name)
student = qat.prepare(model, "q2a4", calibration=cache_dir, tokenizer=tokenizer, group_size=64)
args = TrainingArguments(
    f"{out}-run", per_device_train_batch_size=8, num_train_epochs=2, report_to="none"
)
data = CacheDataset(cache_dir)
trainer = QatTrainer(student, args, train_dataset=data, processing_class=tokenizer)
trainer.train()
trainer.save_model(out)
