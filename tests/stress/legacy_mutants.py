"""Files of the reference system, honest ones and mutants of them, for `fuzz_legacy.py`.

A checkpoint is a `.pt` file and its config.json, a cache is meta.json and two shards. A mutant is
one of them with up to three changes: of bytes, of tensors, or of a JSON file.
"""

import copy
import io
import json
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
LENGTH, TOP_K, NEGATIVES, SEQUENCES = 8, 4, 3, 5
STATE = "best_state_dict.pt"
META = "meta.json"

LARGE = 2**20

Tree = dict[str, object]
"""A file's content: a dictionary for `torch.save`, or the values of a JSON file."""


class Mutant(NamedTuple):
    """Files to import."""

    kind: str
    """What was changed."""
    is_cache: bool
    files: dict[str, bytes]


def base_model() -> Qwen3ForCausalLM:
    """The float model that the honest checkpoints are of."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()


def honest_checkpoints(model: Qwen3ForCausalLM) -> list[dict[str, Tree]]:
    """Checkpoints of both versions with every variant of keys, by file name."""
    torch.manual_seed(1)
    first = {"lut_size": 4, "attn_lut_size": 16, "scale_rank": 3, "model_id": "tiny"}
    second = {"version": "v2", "model_id": "tiny", "config_preset": None, "lora_r": 2}
    variants = [
        (1, {"is_full": False}, first),
        (1, {"is_full": True}, {**first, "quantize_attn": True}),
        (2, {"keep": ("_Q", "_indices")}, second),
        (2, {"keep": ("_indices",), "lora_rank": 2}, {**second, "lora_alpha": 4}),
        (2, {"keep": ("_Q",)}, {**second, "magnitude_activation": "identity"}),
        (2, {"keep": (), "learns": True}, {**second, "lut_max_abs": 1.0}),
    ]
    return [
        {STATE: state_dict(model, version, **how), "config.json": config}
        for version, how, config in variants
    ]


def state_dict(model: Qwen3ForCausalLM, version: int, **how: object) -> Tree:
    """The state of `model` with quantized linears of that version."""
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    make = first_linear if version == 1 else second_linear
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            for key, tensor in make(module.weight.detach(), **how).items():
                state[f"{name}.{key}"] = tensor
    return state


def first_linear(weight: Tensor, *, is_full: bool) -> dict[str, Tensor]:
    """Version 1, its input features padded, some scales below zero."""
    O, I = weight.shape
    parts = {"weight": weight, "lut": torch.linspace(-1, 1, 4)}
    if is_full:
        return parts | {"full_scales": torch.rand(O, I + 16) + 0.1}
    return parts | {"scale_A": torch.randn(O, 3) + 1, "scale_B": torch.rand(3, I + 16)}


def second_linear(
    weight: Tensor, *, keep: tuple[str, ...], learns: bool = False, lora_rank: int = 0
) -> dict[str, Tensor]:
    """Version 2 with those of `_Q` and `_indices` that are kept."""
    O, I = weight.shape
    lut = torch.linspace(-1, 1, 16)
    indices = torch.randint(16, (O, I))
    stored = {"_Q": lut[indices], "_indices": indices}
    parts = {
        "weight": weight,
        "lut": lut,
        "scale_A": torch.randn(O, 3),
        "scale_B": torch.randn(3, I),
        "rank_magnitude": torch.rand(3),
        "_scales_baked_flag": torch.tensor(0, dtype=torch.int8),
        **{name: stored[name] for name in keep},
    }
    if learns:
        parts["_lut_raw_deltas"] = torch.randn(8)
    if lora_rank:
        parts["lora_A"] = torch.randn(lora_rank, I) * 0.02
        parts["lora_B"] = torch.randn(O, lora_rank) * 0.02
    return parts


def honest_cache() -> dict[str, Tree]:
    """A cache of two shards, by file name."""
    torch.manual_seed(2)
    V = SHAPE["vocab_size"]
    meta = {
        "format": "qwen_kd_topk_cache_v1",
        "teacher_model": "tiny",
        "tokenizer": "tiny",
        "dataset_name": "words",
        "dataset_format": "alpaca_chat",
        "chat_thinking": "both",
        "max_length": LENGTH,
        "topk": TOP_K,
        "rand_neg": NEGATIVES,
        "num_sequences": 2 * SEQUENCES,
        "vocab_size": V,
    }
    files: dict[str, Tree] = {META: meta}
    for number in range(2):
        top = torch.randn(SEQUENCES, LENGTH - 1, V).topk(TOP_K)
        files[f"shard_{number:05d}.pt"] = {
            "input_ids": torch.randint(V, (SEQUENCES, LENGTH), dtype=torch.int32),
            "attention_mask": torch.ones(SEQUENCES, LENGTH, dtype=torch.uint8),
            "topk_idx": top.indices.int(),
            "topk_logits": top.values.half(),
            "rand_idx": torch.randint(V, (SEQUENCES, LENGTH - 1, NEGATIVES), dtype=torch.int32),
            "rand_logits": torch.randn(SEQUENCES, LENGTH - 1, NEGATIVES).half(),
        }
    return files


def mutate(honest: list[dict[str, Tree]], seed: int) -> Mutant:
    """One of the honest sets of files, the last of which is a cache, with up to three changes."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    is_cache = rng.random() < 0.3
    trees = copy.deepcopy(honest[-1] if is_cache else rng.choice(honest[:-1]))
    name = rng.choice(sorted(trees))
    kinds = []
    if rng.random() < 0.6:
        changes = JSON_CHANGES if name.endswith(".json") else TENSOR_CHANGES
        for _ in range(rng.randint(1, 3)):
            change = rng.choice(changes)
            trees[name] = change(trees[name], rng, honest) or trees[name]
            kinds.append(change.__name__)
    old_format = rng.random() < 0.2
    files = {name: to_bytes(name, tree, zipped=not old_format) for name, tree in trees.items()}
    if not kinds:
        change = rng.choice(BYTE_CHANGES)
        files[name] = change(files[name], rng)
        kinds.append(change.__name__)
    return Mutant(kinds[0], is_cache, files)


def to_bytes(name: str, tree: Tree, *, zipped: bool) -> bytes:
    """The bytes of a file; `zipped` is the present format of `torch.save`."""
    if name.endswith(".json"):
        return json.dumps(tree, default=str).encode()
    buffer = io.BytesIO()
    torch.save(tree, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def flip(data: bytes, rng: random.Random) -> bytes:
    """Some bytes are others."""
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 4, 40])):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def flip_structure(data: bytes, rng: random.Random) -> bytes:
    """Some bytes of the first or last few hundred, where formats describe themselves."""
    found = bytearray(data)
    size = min(len(found), 600)
    for _ in range(rng.choice([1, 2, 6])):
        place = rng.randrange(size)
        found[place if rng.random() < 0.5 else len(found) - 1 - place] = rng.randrange(256)
    return bytes(found)


def cut(data: bytes, rng: random.Random) -> bytes:
    """The end is missing."""
    return data[: rng.randrange(len(data))]


def insert(data: bytes, rng: random.Random) -> bytes:
    """Bytes too many somewhere."""
    place = rng.randrange(len(data))
    return data[:place] + rng.randbytes(rng.choice([1, 8, 300])) + data[place:]


def blank(data: bytes, rng: random.Random) -> bytes:
    """A stretch of zeros."""
    place, size = rng.randrange(len(data)), rng.choice([16, 512, 4096])
    return data[:place] + bytes(size) + data[place + size :]


BYTE_CHANGES: list[Callable[[bytes, random.Random], bytes]] = [
    flip,
    flip_structure,
    cut,
    insert,
    blank,
]


def drop(tree: Tree, rng: random.Random, _: object) -> None:
    """A key is missing."""
    tree.pop(rng.choice(sorted(tree)), None)


def rename(tree: Tree, rng: random.Random, _: object) -> None:
    """A key has another name."""
    key = rng.choice(sorted(tree))
    other = rng.choice([key[:-1], key + "x", "module." + key, key.replace("layers", "layer"), ""])
    tree[other] = tree.pop(key)


def add(tree: Tree, rng: random.Random, _: object) -> None:
    """A key too many, of a name that means something."""
    linear = rng.choice(sorted(tree)).rpartition(".")[0]
    part = rng.choice(
        ["rank_magnitude", "_Q", "_indices", "A_lut", "full_scales", "bias", "lora_A", "scale_A"]
    )
    tree[f"{linear}.{part}"] = torch.randn(rng.choice([1, 4, 16]), 32)


def mix(tree: Tree, rng: random.Random, honest: list[dict[str, Tree]]) -> None:
    """Some tensors of another checkpoint."""
    other = rng.choice(honest[:-1])[STATE]
    for key in rng.sample(sorted(other), rng.choice([1, 3, 10])):
        tree[key] = other[key]


def swap(tree: Tree, rng: random.Random, _: object) -> None:
    """Two tensors under each other's names."""
    one, other = rng.choice(sorted(tree)), rng.choice(sorted(tree))
    tree[one], tree[other] = tree[other], tree[one]


def is_small(value: object) -> bool:
    """Whether it is a dense tensor that does not claim to be huge."""
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided
    return is_dense and value.numel() < LARGE


def reshape(tree: Tree, rng: random.Random, _: object) -> None:
    """A tensor of another shape."""
    key = rng.choice(sorted(tree))
    if is_small(tree[key]):
        tensor = torch.atleast_1d(tree[key])
        changes = [
            lambda t: t.T if t.dim() == 2 else t[None],
            lambda t: t[..., :-1],
            lambda t: t[:0],
            lambda t: t[None],
            lambda t: t.flatten(),
            lambda t: t.flatten()[0] if t.numel() else t,
            lambda t: torch.cat([t, t]),
        ]
        tree[key] = rng.choice(changes)(tensor)


def claim(tree: Tree, rng: random.Random, _: object) -> None:
    """A tensor that claims to be huge over a few bytes."""
    key = rng.choice(sorted(tree))
    shape = rng.choice([(2**20, 2**20), (2**40,), (2**15, 2**15, 4), (48, 2**30)])
    tree[key] = torch.zeros(1).expand(shape)


def retype(tree: Tree, rng: random.Random, _: object) -> None:
    """A tensor of another dtype."""
    key = rng.choice(sorted(tree))
    dtypes = [torch.int64, torch.bool, torch.complex64, torch.float64, torch.bfloat16, torch.uint8]
    if is_small(tree[key]) and not tree[key].is_complex():
        tree[key] = tree[key].to(rng.choice(dtypes))


def poison(tree: Tree, rng: random.Random, _: object) -> None:
    """Values that are no numbers, or enormous, or beyond what they index."""
    key = rng.choice(sorted(tree))
    value = tree[key]
    if is_small(value) and value.numel() and not value.is_complex():
        bad = rng.choice([float("nan"), float("inf"), 1e38, -1e38, 0.0, 1e-42])
        if not value.is_floating_point():
            bad = rng.choice([-1, 16, 64, 127])
        place = rng.randrange(value.numel())
        value = value.clone(memory_format=torch.contiguous_format)
        value.view(-1)[place if rng.random() < 0.5 else slice(None)] = bad
        tree[key] = value


def replace(tree: Tree, rng: random.Random, _: object) -> None:
    """Something that is no plain tensor."""
    values = [None, 3, "text", [torch.ones(2)], {"a": 1}, torch.eye(3).to_sparse(), True]
    tree[rng.choice(sorted(tree))] = rng.choice(values)


def wrap(tree: Tree, rng: random.Random, _: object) -> Tree:
    """The dictionary inside another one, as some scripts save it."""
    return {rng.choice(["model_state_dict", "state_dict", "model"]): dict(tree), "config": {}}


TENSOR_CHANGES = [drop, rename, add, mix, swap, reshape, claim, retype, poison, replace, wrap]


def set_value(tree: Tree, rng: random.Random, _: object) -> None:
    """A setting of another kind or beyond its range."""
    keys = [
        *tree,
        "lora_alpha",
        "snapped_mode",
        "snapped",
        "lut_include_zero",
        "magnitude_activation",
        "magnitude_eps",
        "force_positive_scales",
        "lut_max_abs",
    ]
    values = [None, 0, -1, 1e30, 2**70, float("nan"), "", "baked", "softplus", "x" * 300]
    tree[rng.choice(keys)] = rng.choice([*values, [], {}, [1], True, "lut", 64, 4, "identity"])


JSON_CHANGES = [set_value, drop, rename]
