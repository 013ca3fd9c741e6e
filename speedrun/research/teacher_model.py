"""The model of the tiny teacher, its loss, its schedule and its judge."""

import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tiny_teacher_text import encode, pack
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from qat.backend.base import Backend
from qat.data.packing import NO_LABEL

HEAD_DIM = 64
POSITIONS = 2048


class Shape(NamedTuple):
    """The size of a Qwen3 with tied embeddings and heads that are 64 wide."""

    vocab: int
    hidden: int
    ffn: int
    layers: int
    kv_heads: int


def new_qwen3(
    shape: Shape, tokenizer: PreTrainedTokenizerFast, *, dropout: float, seed: int
) -> PreTrainedModel:
    """Random weights from the seed; `dropout` acts on what a branch adds to the residual."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // HEAD_DIM,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if dropout:
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            attention.o_proj = _DropoutLinear(attention.o_proj, dropout)
            mlp.down_proj = _DropoutLinear(mlp.down_proj, dropout)
    return model


class _DropoutLinear(nn.Linear):
    """A linear whose output is dropped in training; hooks would be compiled once a layer."""

    def __init__(self, linear: nn.Linear, p: float) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.p, training=self.training)


def loss_sum(
    model: nn.Module,
    batch: tuple[Tensor, Tensor, Tensor],
    device: Backend,
    dtype: str = "auto",
) -> Tensor:
    """Cross-entropy of a packed batch: nats summed over its labels, `()` float32."""
    ids, positions, labels = (tensor.to(device.device, non_blocking=True) for tensor in batch)
    with device.autocast(device.dtype(dtype)):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="sum"
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay, norms do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def learning_rate(peak: float, done_frac: float) -> float:
    """5 % linear warm-up, then a cosine to zero."""
    if done_frac < 0.05:
        return peak * max(done_frac, 1e-3) / 0.05
    return peak * 0.5 * (1 + math.cos(math.pi * (done_frac - 0.05) / 0.95))


def judge(
    out: Path, documents: list[str], *, row: int, rows: int, device: Backend
) -> dict[str, float]:
    """Perplexity and bits per byte of the saved model on `documents`, in float32.

    The first token of a document has no context and is left out of both; the end token counts.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).to(device.device).eval()
    encoded = encode(tokenizer, documents)
    packed = pack(encoded, row)
    batches = zip(*(tensor.split(rows) for tensor in packed), strict=True)
    with torch.no_grad():
        nats = sum(loss_sum(model, b, device, dtype="fp32").item() for b in batches)
    firsts = sum(len(tokenizer.decode(tokens[:1]).encode()) for tokens in encoded)
    num_bytes = sum(len(document.encode()) for document in documents) - firsts
    tokens = (packed[2] != NO_LABEL).sum().item()
    return {
        "megabytes": sum(file.stat().st_size for file in out.iterdir() if file.is_file()) / 1e6,
        "parameters": model.num_parameters(),
        "held_out_documents": len(documents),
        "held_out_tokens": tokens,
        "perplexity": math.exp(nats / tokens),
        "bits_per_byte": nats / math.log(2) / num_bytes,
    }
