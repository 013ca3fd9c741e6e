"""Train a student against a running teacher: python examples/trainer_teacher.py MODEL OUT."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import qat
from qat.integrations.transformers import QatTrainer

model_name, out = sys.argv[1:] if len(sys.argv) == 3 else sys.exit(__doc__)
tokenizer = AutoTokenizer.from_pretrained(model_name)
texts = ["Return the number of items.", "Raise ValueError if the key is not there."] * 16
rows = [dict(tokenizer(text, padding="max_length", max_length=24)) for text in texts]
teacher, model = (AutoModelForCausalLM.from_pretrained(model_name) for _ in range(2))
student = qat.prepare(model, "q2a4", group_size=64)
args = TrainingArguments(f"{out}-run", max_steps=8, report_to="none", logging_steps=4)
trainer = QatTrainer(student, args, teacher=teacher, train_dataset=rows, loss="kl:1,hard_ce:0.1")
trainer.train()
qat.save(qat.finish(trainer.model), out, tokenizer)
