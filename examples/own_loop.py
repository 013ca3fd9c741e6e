"""Train in a loop of your own: python examples/own_loop.py MODEL CACHE OUT."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qat

model_name, cache_dir, out = sys.argv[1:] if len(sys.argv) == 4 else sys.exit(__doc__)
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLM.from_pretrained(model_name)
student = qat.prepare(model, "q2a4", calibration=cache_dir, tokenizer=tokenizer, group_size=64)
optimizer = qat.AdamW(qat.param_groups(student))
data = torch.utils.data.DataLoader(qat.CacheDataset(cache_dir), batch_size=8, shuffle=True)
for rows in data:
    batch = qat.as_batch(rows).to(student.device)
    out_of_batch = student(batch.input_ids, position_ids=batch.position_ids, with_logits=False)
    loss = qat.loss(out_of_batch, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"{loss.item():.4f} nats per token")
qat.save(qat.finish(student), out, tokenizer)
