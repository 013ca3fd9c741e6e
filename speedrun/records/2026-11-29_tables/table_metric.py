"""Print the KL of a tied model whose table alone is quantized, by what the table is fitted to.

python table_metric.py MODEL.gguf ALPACA.json [BITS ...]
"""

import json
import sys

import torch
from torch import Tensor

from qat.convert.calibrate import TokenBatch, head_second_moment
from qat.kernels.column_sweep import COLUMN_OPS
from qat.models.load import load_model, load_tokenizer
from qat.quant.error_feedback import fit_all_to_inputs
from qat.quant.fit import fit_weight
from qat.quant.spec import by_group
from qat.quant.weight import dequantize

S, FITTED, JUDGED = 128, 96, 32
source, text, *bits = sys.argv[1:]
student, tokenizer = load_model(source, device="cpu", dtype="fp32"), load_tokenizer(source)
rows = json.load(open(text, encoding="utf-8"))[:600]
said = "\n\n".join(f"{r['instruction']}\n{r.get('input', '')}\n{r['output']}" for r in rows)
ids = torch.tensor(tokenizer(said)["input_ids"])
ids = ids[: len(ids) // S * S].view(-1, S)
positions = torch.arange(S).expand(8, S)
batches = [TokenBatch(some, positions) for some in ids[:FITTED].split(8)]
table = student.model.get_input_embeddings().weight
weight = table.detach().clone()


@torch.no_grad()
def log_p(quantized: Tensor) -> Tensor:
    """Return the log-probabilities of the judged tokens, `(T, V)`."""
    table.copy_(quantized)
    hidden = [student.hidden(some, positions) for some in ids[-JUDGED:].split(8)]
    return (torch.cat(hidden).flatten(0, 1) @ quantized.T).log_softmax(-1)


before, moment = log_p(weight), head_second_moment(student, batches)
moment /= moment.diagonal().mean()


def judge(name: str, quantized: Tensor) -> None:
    """Print the KL from the float model."""
    gap = (before.exp() * (before - log_p(quantized))).sum(-1).mean().item()
    table.detach().copy_(weight)
    print(f"{name}: {gap:.4f} nats", flush=True)


for each in map(int, bits or ("2", "3", "4")):
    spec = by_group(each, 16)
    judge(f"{each} bits, values", dequantize(fit_weight(weight, spec)))
    judge(f"{each} bits, mean squares", dequantize(fit_weight(weight, spec, moment.diagonal())))
    for share in (0.0, 0.03, 0.1, 0.3, 1.0, 10.0):
        metric = moment + share * torch.eye(len(moment), dtype=moment.dtype)
        (fit,) = fit_all_to_inputs([weight], spec, metric, COLUMN_OPS)
        judge(f"{each} bits, inputs and {share:g}", dequantize(fit.quantized))
