"""Distil on the student's own answers by trl: python examples/trl_distillation.py MODEL OUT."""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig

import qat
from qat.integrations.trl import QatDistillationTrainer

model_name, out = sys.argv[1:] if len(sys.argv) == 3 else sys.exit(__doc__)
tokenizer = AutoTokenizer.from_pretrained(model_name)
teacher, model = (AutoModelForCausalLM.from_pretrained(model_name) for _ in range(2))
student = qat.prepare(model, "q2a4", embedding_bits=16, group_size=64)  # trl reads a float head
prompts = Dataset.from_dict({"prompt": ["Return the number of", "Raise ValueError if"] * 4})
args = DistillationConfig(f"{out}-run", max_steps=2, max_completion_length=8, bf16=False)
args.per_device_train_batch_size = 2
trainer = QatDistillationTrainer(
    student, teacher, args, train_dataset=prompts, processing_class=tokenizer
)
trainer.train()
trainer.save_model(out)
