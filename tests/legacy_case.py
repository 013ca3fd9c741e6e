"""Checkpoints of the reference system, made from its documented formats, and their weights.

`first_weight` and `second_weight` write out its formulas (Anemll/qwen3_apple_style_2bit_qat_lora at
b1eaee5): what an import must be equal to.
"""

import json
from pathlib import Path

import torch
from tiny import VOCAB, tiny_model, tiny_tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

Parts = dict[str, Tensor]


def even_lut(entries: int) -> Tensor:
    """Return levels evenly spaced from -1 to 1, rounded to float16."""
    return torch.linspace(-1, 1, entries, dtype=torch.float16).float()


def first_parts(
    weight: Tensor, *, entries: int = 4, rank: int = 3, pad: int = 0, shift: float = 0.3
) -> Parts:
    """Return tensors of version 1; with a low `shift` some scales are raised to 1e-8."""
    O, I = weight.shape
    A = torch.randn(O, rank) * 0.05 + shift
    B = torch.rand(rank, I + pad) * 0.3
    return {"weight": weight, "lut": even_lut(entries), "scale_A": A, "scale_B": B}


def first_weight(parts: Parts) -> Tensor:
    """`lut[idx(clip(W / S))] * S`, `S = max(A B, 1e-8)`, idx by even steps; no padding."""
    W, lut = parts["weight"], parts["lut"]
    raw = parts["full_scales"] if "full_scales" in parts else parts["scale_A"] @ parts["scale_B"]
    S = raw[:, : W.shape[1]].clamp(min=1e-8)
    x, L = (W / S).clamp(-1, 1), len(lut)
    if L % 2 == 0 and (lut == 0).any():
        below = ((x + 1) * (L // 2)).round()
        above = (x * (L // 2 - 1)).round() + L // 2
        idx = torch.where(x < 0, below, above)
    else:
        idx = ((x + 1) / (2 / (L - 1))).round()
    return lut[idx.long().clamp(0, L - 1)] * S


def second_parts(
    weight: Tensor, *, entries: int = 4, rank: int = 3, keep: tuple[str, ...] = ("_Q", "_indices")
) -> Parts:
    """Version 2 with scales of both signs; of `_Q` and `_indices` those of `keep`."""
    O, I = weight.shape
    lut, indices = even_lut(entries), torch.randint(entries, (O, I))
    stored = {"_Q": lut[indices], "_indices": indices}
    return {
        "weight": weight,
        "lut": lut,
        "scale_A": torch.randn(O, rank),
        "scale_B": torch.randn(rank, I),
        "rank_magnitude": torch.rand(rank) + 0.3,
        "_scales_baked_flag": torch.tensor(0, dtype=torch.int8),
        **{name: stored[name] for name in keep},
    }


def second_weight(parts: Parts) -> Tensor:
    """`Q * (A' diag(g) B')`, rank by rank, in float64; `A'`, `B'` of unit length if not baked."""
    A, B, g = (parts[n].double() for n in ("scale_A", "scale_B", "rank_magnitude"))
    if not parts["_scales_baked_flag"]:
        A, B = A / A.norm(dim=0, keepdim=True), B / B.norm(dim=1, keepdim=True)
    S = sum(g[k] * A[:, k, None] * B[k] for k in range(len(g)))
    lut = parts["lut"].double()
    if "_indices" in parts:
        learned = parts.get("_lut_raw_deltas")
        Q = (lut if learned is None else learned_lut(learned))[parts["_indices"].long()]
    elif "_Q" in parts:
        Q = parts["_Q"].double()
    else:
        Q = lut[((parts["weight"] / S)[..., None] - lut).abs().argmin(-1)]
    return Q * S


def learned_lut(raw: Tensor) -> Tensor:
    """Eight gaps of at least 2 ulp of float16 at 1, their sums mirrored, rounded to float16."""
    gaps = 2 * 2**-10 + (1 - 8 * 2 * 2**-10) * F.softmax(raw, 0)
    upper = gaps.cumsum(0)
    return torch.cat([-upper.flip(0), upper]).half().double()


def lora_weight(parts: Parts, alpha: float) -> Tensor:
    """`lora_B lora_A * alpha / r`, in float64; zero without a LoRA."""
    if "lora_A" not in parts:
        return torch.zeros(())
    return (parts["lora_B"].double() @ parts["lora_A"].double()) * (alpha / len(parts["lora_A"]))


def save_base(directory: Path, **overrides: object) -> PreTrainedModel:
    """The float model, saved with its tokenizer."""
    model = tiny_model(initializer_range=0.2, **overrides)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return model


def legacy_state(model: PreTrainedModel, make: object, **how: object) -> dict[str, Tensor]:
    """The state dict of `model` with every linear of its blocks as `make` (see above) gives it."""
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            parts = make(module.weight.detach(), **how)
            state |= {f"{name}.{key}": tensor for key, tensor in parts.items()}
    return state


def parts_of(state: dict[str, Tensor], name: str) -> Parts:
    """The tensors of one linear."""
    return {k.rpartition(".")[2]: t for k, t in state.items() if k.rpartition(".")[0] == name}


def save_legacy(directory: Path, state: dict[str, object], **config: object) -> Path:
    """The `.pt` file of a state dict, its config.json beside it."""
    directory.mkdir(exist_ok=True)
    torch.save(state, directory / "best_state_dict.pt")
    (directory / "config.json").write_text(json.dumps({"model_id": "nowhere", **config}))
    return directory / "best_state_dict.pt"


def save_legacy_cache(directory: Path, *, sequences: tuple[int, ...] = (6, 5)) -> dict[str, Tensor]:
    """A cache of shards with so many sequences; all their tensors, joined."""
    directory.mkdir()
    L, K, R = 9, 4, 3
    meta = {
        "format": "qwen_kd_topk_cache_v1",
        "teacher_model": "nowhere",
        "tokenizer": "nowhere",
        "dataset_name": "words",
        "dataset_format": "alpaca_chat",
        "chat_thinking": "both",
        "max_length": L,
        "topk": K,
        "rand_neg": R,
        "num_sequences": sum(sequences),
        "vocab_size": VOCAB,
    }
    (directory / "meta.json").write_text(json.dumps(meta))
    shards = []
    for number, N in enumerate(sequences):
        top = (torch.randn(N, L - 1, VOCAB) * 3).half().topk(K)
        shard = {
            "input_ids": torch.randint(VOCAB, (N, L), dtype=torch.int32),
            "attention_mask": torch.ones(N, L, dtype=torch.uint8),
            "topk_idx": top.indices.int(),
            "topk_logits": top.values,
            "rand_idx": torch.randint(VOCAB, (N, L - 1, R), dtype=torch.int32),
            "rand_logits": torch.randn(N, L - 1, R).half(),
        }
        torch.save(shard, directory / f"shard_{number:05d}.pt")
        shards.append(shard)
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
