"""Print what the rows of a tied table add to the KL when it alone is quantized.

python table_rows.py MODEL.gguf ALPACA.json OTHER.txt

Text is written as chats; OTHER is of another kind and judged too. First levels, with some rows kept
in 8 bits; then vectors in the rows that either text may have, which count alike or by their tokens.
"""

import json
import sys

import torch
from torch import Tensor

from qat.convert.calibrate import TokenBatch
from qat.convert.tables import fit_table, table_inputs
from qat.models.load import load_model, load_tokenizer
from qat.nn.swap import table_names, table_spec
from qat.quant.spec import VectorSpec
from qat.quant.weight import dequantize

S, FITTED, JUDGED = 128, 48, 8
LIKELY = 6000
source, text, other = sys.argv[1:]
model, tokenizer = load_model(source, device="cpu", dtype="fp32"), load_tokenizer(source)
chats = [
    [
        {"role": "user", "content": f"{row['instruction']}\n{row.get('input', '')}".strip()},
        {"role": "assistant", "content": row["output"]},
    ]
    for row in json.load(open(text, encoding="utf-8"))[:300]
]
said = "".join(tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats)
ids = torch.tensor(tokenizer(said)["input_ids"])
ids = ids[: len(ids) // S * S].view(-1, S)
positions = torch.arange(S).expand(8, S)
batches = [TokenBatch(some, positions) for some in ids[:FITTED].split(8)]
(name,) = table_names(model.model)
table = model.model.get_input_embeddings().weight
weight = table.detach().clone()
by_count = torch.bincount(ids[:FITTED].flatten(), minlength=len(weight)).argsort(descending=True)
words = tokenizer(open(other, encoding="utf-8").read()[20_000:26_000])["input_ids"]
texts = {"chats": ids[-JUDGED:], "other": torch.tensor(words)[: JUDGED * S].view(-1, S)}
specials = torch.tensor(sorted(tokenizer.get_added_vocab().values()))


@torch.no_grad()
def log_p(quantized: Tensor, judged: Tensor) -> Tensor:
    """Return the log-probabilities of the judged tokens, `(T, V)`."""
    table.copy_(quantized)
    hidden = model.hidden(judged, positions[: len(judged)]).flatten(0, 1)
    found = (hidden @ quantized.T).log_softmax(-1)
    table.copy_(weight)
    return found


before = {name: log_p(weight, judged) for name, judged in texts.items()}


def judge(what: str, quantized: Tensor) -> None:
    """Print the KL from the float model on each text."""
    for name, judged in texts.items():
        gap = before[name].exp() * (before[name] - log_p(quantized, judged))
        print(f"{what}, {name}: {gap.sum(-1).mean().item():.4f} nats", flush=True)


def kept(quantized: Tensor, rows: Tensor, of: Tensor) -> Tensor:
    """Return `quantized` with `rows` of another table."""
    changed = quantized.clone()
    changed[rows] = of[rows]
    return changed


two = table_spec(2, weight.shape[1])
read = table_inputs(model, {name: [two]}, batches)[name]
eight = dequantize(fit_table(weight, table_spec(8, weight.shape[1])))
for bits in (2, 3):
    fitted = dequantize(fit_table(weight, table_spec(bits, weight.shape[1]), read))
    judge(f"{bits} bits", fitted)
    judge(f"{bits} bits, special tokens in 8", kept(fitted, specials, eight))
    judge(f"{bits} bits, 64 longest rows in 8", kept(fitted, weight.norm(dim=1).topk(64)[1], eight))
    for count in (3, 64, 256, 1024):
        judge(
            f"{bits} bits, {count} rows of most tokens in 8", kept(fitted, by_count[:count], eight)
        )

likely = sum(found.exp().sum(0) for found in before.values())
likely[torch.cat([rows.flatten() for rows in texts.values()])] += len(likely)
rows = likely.topk(LIKELY).indices.sort().values
for bits, d in ((8, 4), (6, 2), (12, 4)):
    spec = VectorSpec(bits=bits, vector_size=d, group_size=192, scale_bits=8)
    for what, mass in (("alike", torch.ones(LIKELY)), ("by their tokens", read.mass[rows])):
        part = dequantize(fit_table(weight[rows], spec, read._replace(mass=mass)))
        whole = weight.clone()
        whole[rows] = part
        judge(f"{2**bits} codewords of {d}, likely rows {what}", whole)
judge("of these the special tokens in 8 bits", kept(whole, specials, eight))
for count in (16, 64, 256, 1024):
    judge(f"of these {count} rows of most tokens in 8 bits", kept(whole, by_count[:count], eight))
