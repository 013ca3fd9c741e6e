"""Target `gguf`: one file for llama.cpp, with quantized weights in ggml types that hold them."""

import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from qat.convert.shipping import FileSizes
from qat.errors import ExportError
from qat.export.parts import float_model, logits_of
from qat.extensions.targets.shared import (
    EVEN_GRIDS,
    Affine,
    affine,
    exact,
    group_size_near,
    lost_by_grid,
    narrow_state,
    refuse_all_but_groups,
)
from qat.models.cost import Part, parameter_count, parts_of
from qat.models.gguf import GgufFile, dequantize, type_number
from qat.models.gguf_layout import (
    ARCHITECTURES,
    ROPE_FACTORS,
    rope_factors,
    row_order,
    tensor_names,
)
from qat.models.sizes import linear_bits_in
from qat.models.stored_state import quantized_modules
from qat.nn.swap import embedding_dtype, head_dim, weight_shape
from qat.quant.codebook import fixed_grid
from qat.quant.spec import LutSpec

logger = logging.getLogger(__name__)

# The tokenizer inside a GGUF file.

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
"""The English contractions that both expressions below split off."""
PRE_TOKENIZERS = {
    CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": "qwen2",
    CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": "llama-bpe",
}
"""llama.cpp's names of the regular expressions that byte-level tokenizers split text with."""

AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
"""Settings of a BPE model that add text to the parts of a word, which llama.cpp does not do."""


class Words(NamedTuple):
    """The words of a tokenizer that llama.cpp knows, and how it splits text."""

    kind: str
    """The name of the tokenizer in llama.cpp."""
    pre: str
    """Its name of the way in which text is split first."""
    tokens: list[str]
    merges: list[str]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, values: dict, vocab_size: int) -> Self | None:
        """Return the words of a tokenizer whose tokenizer.json holds `values`; None if unknown.

        Rows of the embedding after the last token get placeholder names.
        """
        model, pre = values["model"], pre_tokenizer(values)
        is_llama = bool(model.get("byte_fallback"))
        if model["type"] != "BPE" or not (is_llama or pre):
            return None
        merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", ())]
        names = {number: text for text, number in tokenizer.get_vocab().items()}
        tokens = [names.get(number, f"[PAD{number}]") for number in range(vocab_size)]
        return cls(*(("llama", "default") if is_llama else ("gpt2", pre)), tokens, merges)

    @property
    def num_bytes(self) -> int:
        """The bytes in a file: words have a length, tokens a type, and a score if not merges."""
        written = self.tokens + (self.merges if self.kind == "gpt2" else [])
        numbers = 4 * len(self.tokens) * (1 if self.kind == "gpt2" else 2)
        return numbers + sum(8 + len(word.encode()) for word in written)


def add_tokenizer(writer: object, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> bool:
    """Write tokens, merges or scores, special tokens and the chat template.

    Supported are byte-level BPE (of Qwen, Llama 3 and GPT-2) and BPE with byte fallback (of Llama
    2), if they split text as llama.cpp does. For another tokenizer nothing is written, with a
    warning.

    Returns:
        Whether the tokenizer was written.
    """
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    words = Words.of(tokenizer, values, vocab_size)
    if words is None:
        logger.warning(
            "this tokenizer is none that GGUF files know, or splits text in another way: the file "
            "has none; give llama.cpp token ids, or use another target"
        )
        return False
    tokens = words.tokens
    writer.add_tokenizer_model(words.kind)
    writer.add_tokenizer_pre(words.pre)
    if words.kind == "gpt2":
        writer.add_token_merges(words.merges)
    else:
        rank = {m.replace(" ", ""): -float(place) for place, m in enumerate(words.merges, 1)}
        writer.add_token_scores([rank.get(token, 0.0) for token in tokens])
        begins = tokenizer.tokenize("a", add_special_tokens=False)[0]
        writer.add_add_space_prefix(begins.startswith("\u2581"))
    writer.add_token_list(tokens)
    writer.add_token_types(list(_types(values, tokens)))
    _add_special(writer, tokenizer, vocab_size)
    return True


def pre_tokenizer(values: dict) -> str | None:
    """Return llama.cpp's name for how a byte-level tokenizer splits text; None if unknown.

    `values` are the content of its tokenizer.json.
    """
    given, normalizer = values.get("pre_tokenizer") or {}, values.get("normalizer")
    *steps, last = given.get("pretokenizers") or [given]
    normalizers = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    is_known = (
        last.get("type") == "ByteLevel"
        # llama.cpp's byte-level tokenizers put no space before a text
        and not last.get("add_prefix_space")
        and all(each["type"] == "NFC" for each in normalizers)
        and not any(values["model"].get(key) for key in AFFIXES)
    )
    splits_itself = last.get("use_regex", True)
    match steps:
        case [] if is_known and splits_itself:
            return "gpt-2"
        case [{"type": "Digits", "individual_digits": True}] if is_known and splits_itself:
            return "smollm"
        case [{"type": "Split", "behavior": "Isolated", "invert": False, "pattern": pattern}] if (
            is_known and not splits_itself
        ):
            return PRE_TOKENIZERS.get(pattern.get("Regex"))
    return None


def _types(values: dict, tokens: list[str]) -> Iterator[int]:
    """Yield the type of each token: normal, control, user-defined, unused or byte."""
    from gguf import TokenType

    added = {token["content"]: token["special"] for token in values.get("added_tokens", ())}
    known = values["model"]["vocab"].keys() | added.keys()
    for token in tokens:
        if token in added:
            yield TokenType.CONTROL if added[token] else TokenType.USER_DEFINED
        elif token not in known:
            yield TokenType.UNUSED
        elif len(token) == len("<0x00>") and token.startswith("<0x"):
            yield TokenType.BYTE
        else:
            yield TokenType.NORMAL


def _add_special(writer: object, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    adders = (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    )
    for number, add in adders:
        # an added token may have no row in the embedding
        if number is not None and number < vocab_size:
            add(number)
    first = tokenizer("a").input_ids[:1]
    writer.add_add_bos_token(first == [tokenizer.bos_token_id])
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


# Blocks of GGUF: evenly spaced levels and float16 scales in the types of ggml that hold them.
#
# Shapes: O rows, B blocks per row, N weights per block.

SMALL, LARGE = 32, 256
"""The fewest and the most weights per block; the activations of a LARGE one share a scale too."""


class BlockType(NamedTuple):
    """A ggml type: `W = d * integer`, or `W = d * code + m` with codes from 0."""

    name: str
    size: int
    """Weights per block."""
    integers: range | int
    """The integers of the type; if it has `m` instead, the number of its codes."""
    layout: Callable[[Tensor, Tensor, Tensor], list[Tensor]]
    """Maps `(n, N)` uint8 codes and the bytes of `d` and `m`, `(n, 2)` each, to columns of bytes.
    The codes count the integers from the lowest one."""

    @property
    def num_levels(self) -> int:
        """The number of levels of a block."""
        return self.integers if isinstance(self.integers, int) else len(self.integers)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of a block."""
        block, scale = (torch.zeros(1, n, dtype=torch.uint8) for n in (self.size, 2))
        return sum(columns.shape[1] for columns in self.layout(block, scale, scale))

    def holds(self, spec: LutSpec) -> bool:
        """Return whether weights of even levels in that format lose nothing."""
        if spec.group_size % self.size:
            return False
        if isinstance(self.integers, int):  # `m` has more bits than a float16 scale leaves room for
            return spec.num_levels <= self.num_levels and spec.scale_bits == 8
        return all(level in self.integers for level in _levels(spec))


def _levels(spec: LutSpec) -> list[int]:
    """Return the levels of an even grid as integers; those of seq are odd, over a power of two."""
    levels = cast(Tensor, fixed_grid(spec))
    return (levels * spec.num_levels if spec.codebook == "seq" else levels).int().tolist()


def block_type(spec: LutSpec) -> BlockType | None:
    """Return the smallest type that holds even levels exactly; None if there is none."""
    if spec.codebook not in EVEN_GRIDS or spec.scale_bits > 16:
        return None
    return next((kind for kind in BLOCK_TYPES if kind.holds(spec)), None)


def file_bits(spec: LutSpec, shape: tuple[int, int]) -> int:
    """Return the bits of an `(O, I)` weight in the file, for a format that has a type."""
    kind = cast(BlockType, block_type(spec))
    return 8 * kind.num_bytes * math.prod(shape) // kind.size


def larger(spec: LutSpec, held: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return the type of an `(O, I)` weight if `spec` takes fewer bits in long rows, and why.

    None if it takes as few.
    """
    specs = held, scheme(spec, shape), scheme(spec, (shape[0], LARGE))
    taken, alone, wished = (cast(BlockType, block_type(each)) for each in specs)
    fewest, bits = (8 * each.num_bytes / each.size for each in (wished, taken))
    if bits <= fewest:
        return None
    reason = f"whose blocks of {wished.size} do not divide rows of {shape[1]}"
    if taken is not alone:  # the plan or another target wants these groups
        reason = (
            f"which does not hold codebook={held.codebook} in groups of {held.group_size} with "
            f"scales of {held.scale_bits} bits"
        )
    most = taken.num_levels.bit_length() - 1
    if spec.bits < most:
        reason += f"; levels of {most} bits take no more there and lose less"
    return f"{taken.name} ({bits:.4g} bits), not {wished.name} ({fewest:.4g}), {reason}"


ENTRY_BYTES = 8 + 4 + 2 * 8 + 4 + 8
"""Bytes in the header for a matrix, besides its name: lengths, type and place."""


def count_file(
    model: PreTrainedModel, sizes: Mapping[str, int], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[dict[str, int], FileSizes]:
    """Return the bytes of the tensors that `write` writes of a model, and what they come to.

    See `qat.convert.shipping.Shipping.count_file`. Matrices that are not quantized take as much as
    in the checkpoint.
    """
    found, types, modules = {}, defaultdict(dict), quantized_modules(model)
    for name, module in modules.items():
        key, shape = f"{name}.weight", weight_shape(module)
        found[key] = file_bits(module.spec, shape) // 8
        types[block_type(module.spec).name][key] = found[key]
    for name, parameter in model.named_parameters():
        if name in sizes and name.rpartition(".")[0] not in modules:
            found[name] = 4 * len(parameter) if parameter.dim() == 1 else sizes[name]
    octets = sum(len(name) + ENTRY_BYTES for name in found)
    if tokenizer is not None:
        values = json.loads(tokenizer.backend_tokenizer.to_str())
        words = Words.of(tokenizer, values, model.config.vocab_size)
        octets += 0 if words is None else words.num_bytes
    total = sum(found.values())
    return found, FileSizes(
        megabytes=(total + octets) / 1e6,
        bits_per_weight=8 * total / parameter_count(model),
        linear_bits=linear_bits_in(found, model, otherwise=math.nan),
        parts=[*_named_parts(model, found, types), Part("tokenizer and header", 0, octets / 1e6)],
    )


def _named_parts(
    model: PreTrainedModel, sizes: Mapping[str, int], types: Mapping[str, Mapping[str, int]]
) -> Iterator[Part]:
    """Yield the parts of a file, named with the types of their quantized weights."""
    names = defaultdict(list)
    for kind in sorted(types):
        for part in parts_of(model, types[kind]):
            names[part.name] += [kind] * (part.megabytes > 0)
    for part in parts_of(model, sizes):
        yield replace(part, name=", ".join([part.name, *names[part.name]]))


def to_blocks(name: str, weight: Affine, spec: LutSpec) -> Tensor:
    """Return the rows of a weight in its `block_type`, `(O, bytes)` uint8.

    Raises:
        ExportError: a scale does not fit into float16.
    """
    kind = cast(BlockType, block_type(spec))
    d, m, codes = weight.scale, weight.bias, weight.codes.short()
    if isinstance(kind.integers, range):
        first, second = _levels(spec)[:2]
        codes = (first + (second - first) * codes - kind.integers[0]) // kind.integers.step
        d, m = d / (second - first), torch.zeros_like(m)
    O, I = codes.shape
    repeats = I // d.shape[1] // kind.size
    d, m = (t.repeat_interleave(repeats, 1).reshape(-1, 1) for t in (d, m))
    octets = codes.to(torch.uint8).reshape(-1, kind.size)
    return torch.cat(kind.layout(octets, _half(name, d), _half(name, m)), 1).view(O, -1)


def _half(name: str, value: Tensor) -> Tensor:
    return exact(name, value, torch.float16, has_choice=False).view(torch.uint8)  # `(n, 2)`


def _nibbles(codes: Tensor) -> Tensor:
    """Pack the first half of a block into the lower four bits, the second half into the upper."""
    low, high = codes.chunk(2, 1)
    return (low & 15) | (high & 15) << 4


def _fifth_bits(codes: Tensor) -> Tensor:
    """Pack the fifth bits of a block, 32 in a row."""
    bits = (codes >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)
    return bits.sum(-1, dtype=torch.uint8)


def _negative(half: Tensor) -> Tensor:
    """Flip the sign of float16 numbers, given as two bytes each."""
    return half ^ torch.tensor([0, 0x80], dtype=torch.uint8)


def _eights(codes: Tensor) -> Tensor:
    """Pack one bit each: eight neighbours share a byte."""
    bits = codes.view(len(codes), -1, 8) << torch.arange(8, dtype=torch.uint8)
    return bits.sum(-1, dtype=torch.uint8)


def _fours(codes: Tensor) -> Tensor:
    """Pack two bits each: four neighbours share a byte."""
    bits = codes.view(len(codes), -1, 4) << torch.arange(0, 8, 2, dtype=torch.uint8)
    return bits.sum(-1, dtype=torch.uint8)


def _fives(codes: Tensor) -> Tensor:
    """Pack five ternary digits in a byte: runs of 32 in 32 bytes, of 16 in 16, four of 4 in 4.

    A byte is the fraction `q / 243` of 256, rounded up, so that multiplying it by 3 carries out one
    digit after the other, the first run first.
    """
    parts = []
    for run, width in zip(codes.split((160, 80, 16), 1), (32, 16, 4), strict=True):
        digits = run.view(len(codes), -1, width).short()
        places = 3 ** torch.arange(4, 4 - digits.shape[1], -1, dtype=torch.int16)
        q = (digits * places[:, None]).sum(1, dtype=torch.int32)
        parts.append(((q * 256 + 242) // 243).to(torch.uint8))
    return torch.cat(parts, 1)


def _quarters(codes: Tensor) -> Tensor:
    """Pack two bits each: four runs of 32 weights share 32 bytes."""
    runs = (codes & 3).view(-1, 2, 4, 32) << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return runs.sum(2, dtype=torch.uint8).view(-1, 64)


def _third_bits(codes: Tensor) -> Tensor:
    """Pack the third bits: eight runs of 32 weights share 32 bytes."""
    runs = (codes >> 2).view(-1, 8, 32) << torch.arange(8, dtype=torch.uint8)[:, None]
    return runs.sum(1, dtype=torch.uint8)


def _q2_k(codes: Tensor, d: Tensor, m: Tensor) -> list[Tensor]:
    """Lay out Q2_K: 16 scales and minima of 4 bits, all 1; then codes, less the minimum."""
    return [_repeated(codes, 0x11, 16), _quarters(codes), d, _negative(m)]


def _q3_k(codes: Tensor, d: Tensor, m: Tensor) -> list[Tensor]:
    """Lay out Q3_K: codes, then 16 scales of 6 bits, all 33, which stands for 1."""
    scales = [_repeated(codes, 0x11, 8), _repeated(codes, 0xAA, 4)]
    return [_third_bits(codes), _quarters(codes), *scales, d]


def _q6_k(codes: Tensor, d: Tensor, m: Tensor) -> list[Tensor]:
    """Lay out Q6_K: lower 4 bits, then upper 2, of two halves of 4 runs of 32; 16 scales of 1."""
    runs = codes.view(-1, 2, 4, 32)
    low, high = runs & 15, runs >> 4
    lower = low[:, :, :2] | low[:, :, 2:] << 4
    upper = (high << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]).sum(2, dtype=torch.uint8)
    scales = _repeated(codes, 1, 16)
    return [lower.reshape(len(codes), -1), upper.reshape(len(codes), -1), scales, d]


def _repeated(codes: Tensor, value: int, count: int) -> Tensor:
    return codes.new_full((codes.shape[0], count), value)


BLOCK_TYPES = (
    BlockType("Q1_0", 128, range(-1, 2, 2), lambda codes, d, m: [d, _eights(codes)]),
    BlockType("TQ1_0", LARGE, range(-1, 2), lambda codes, d, m: [_fives(codes), d]),
    BlockType("Q2_0", 64, range(-1, 3), lambda codes, d, m: [d, _fours(codes)]),
    # the same type with the signs of codes and scale flipped
    BlockType("Q2_0", 64, range(-2, 2), lambda codes, d, m: [_negative(d), _fours(3 - codes)]),
    BlockType("Q2_K", LARGE, 4, _q2_k),
    BlockType("Q3_K", LARGE, range(-4, 4), _q3_k),
    BlockType("Q4_0", SMALL, range(-8, 8), lambda codes, d, m: [d, _nibbles(codes)]),
    BlockType("Q4_1", SMALL, 16, lambda codes, d, m: [d, m, _nibbles(codes)]),
    BlockType(
        "Q5_0", SMALL, range(-16, 16), lambda codes, d, m: [d, _fifth_bits(codes), _nibbles(codes)]
    ),
    BlockType("Q6_K", LARGE, range(-32, 32), _q6_k),
    BlockType("Q8_0", SMALL, range(-128, 128), lambda codes, d, m: [d, codes ^ 128]),
)
"""Types of ggml by their bits per weight, the smallest first.

TQ2_0 holds no more than TQ1_0, which is smaller.
"""


COMPARED = "bits"
HOLDS_ADAPTERS = False
HOLDS_TABLES = True
HOLDS_ACTIVATIONS = (None,)
FILE_NAME = "model.gguf"
GEMMA_PERIOD = 6
"""llama.cpp runs Gemma-3 with full attention in every sixth layer."""
LARGEST_GEMMA = 62
"""Layers of Gemma-3 27B; llama.cpp scales its attention scores by a different width."""
HOW_TO_LOAD = """\
```
llama-cli -m DIR/model.gguf -p "Once upon a time"
```
"""


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why a weight would lose something; None if not.

    Even levels of up to 7 bits, and integers of 8, lose nothing in groups of a multiple of 32.
    """
    reason = lost_by_grid(spec, EVEN_GRIDS)
    if reason is not None:
        return reason
    if block_type(spec) is None:
        return (
            f"no type of ggml holds {spec.bits} bits of codebook={spec.codebook} in groups of "
            f"{spec.group_size} with scales of {spec.scale_bits} bits without loss, expected "
            f"groups of a multiple of {SMALL} and scales of 16 or 8 bits"
        )
    return None


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return a format that ggml holds: the one given, if a type has just its levels and groups.

    Otherwise Q1_0, TQ1_0, Q2_K, Q3_K, Q6_K or Q2_0, or Q4_0 to Q8_0 if rows do not split into their
    blocks. Scales have 8 bits. Even levels of 2 bits lose less than integers, whose zero leaves one
    level on the other side: so Q2_0 with integers is only used if the plan has integers, or if 256
    does not divide the row.

    Raises:
        ExportError: rows split into no blocks, an index names a vector, or scales are of low rank.
    """
    refuse_all_but_groups(spec)
    own = None if shape[1] % spec.group_size else block_type(spec)
    if own is not None and own.size == spec.group_size and own.num_levels <= 2**spec.bits:
        return spec
    codebook = spec.codebook if spec.codebook == "ternary" else "int" if spec.bits > 1 else "seq"
    found = LutSpec(bits=spec.bits, codebook=codebook, group_size=SMALL, scale_bits=8)
    is_even = spec.bits == 2 and spec.codebook in {"lut", "seq"}
    for size, levels in ((LARGE, "seq" if is_even else codebook), (128, codebook), (64, codebook)):
        wider = found.model_copy(update={"group_size": size, "codebook": levels})
        kind = block_type(wider)
        if shape[1] % size == 0 and kind is not None and kind.size == size:
            return wider
    group_size_near(SMALL, (SMALL,), shape[1])
    return found


def check(model: PreTrainedModel) -> None:
    """Refuse an architecture whose names or rotary embedding are not written here.

    Raises:
        ExportError: llama.cpp would not compute the same.
    """
    config = model.config
    if config.model_type not in ARCHITECTURES:
        raise ExportError(
            f"model_type={config.model_type} cannot be written as GGUF, expected one of "
            f"{', '.join(ARCHITECTURES)}; export --to dense and use llama.cpp's own converter"
        )
    ropes = config.rope_parameters
    is_nested = all(isinstance(value, dict) for value in ropes.values())  # one per kind of layer
    each_rope = ropes.values() if is_nested else [ropes]
    kinds = {rope.get("rope_type", "default") for rope in each_rope}
    known = {"default", "llama3"} if config.model_type == "llama" else {"default"}
    if not kinds <= known:
        raise ExportError(
            f"rope_type={', '.join(sorted(kinds))} is not written here, expected "
            f"{' or '.join(sorted(known))}; export --to dense and use llama.cpp's own converter"
        )
    fixed = _unwritten(config)
    if fixed is not None:
        raise ExportError(f"llama.cpp computes {config.model_type} with {fixed}; export --to dense")


def _unwritten(config: PreTrainedConfig) -> str | None:
    """Return what llama.cpp hard-codes and this model has otherwise; None if there is nothing."""
    is_gemma = config.model_type == "gemma3_text"
    activation = config.hidden_activation if is_gemma else config.hidden_act
    known = ("gelu_pytorch_tanh",) if is_gemma else ("silu", "swish")
    if activation not in known:
        return f"{known[0]}, but the activation of this model is {activation}"
    for number, kind in enumerate(getattr(config, "layer_types", None) or (), 1):
        is_full = not is_gemma or number % GEMMA_PERIOD == 0
        if (kind == "full_attention") != is_full:
            return f"another attention in layer {number} than this model, which has {kind} there"
    if not is_gemma:
        return None
    scalar = gemma_scalar(config)
    if config.query_pre_attn_scalar != scalar:
        return (
            f"scores over the root of {scalar}, but this model has "
            f"query_pre_attn_scalar={config.query_pre_attn_scalar}"
        )
    return None


def gemma_scalar(config: PreTrainedConfig) -> int:
    """Return the number by whose root llama.cpp divides the attention scores of a Gemma-3."""
    is_largest = config.num_hidden_layers == LARGEST_GEMMA
    return config.hidden_size // config.num_attention_heads if is_largest else config.head_dim


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write model.gguf: metadata, tokenizer and tensors.

    Raises:
        ExportError: a scale is not exact in float16.
    """
    import gguf

    writer = gguf.GGUFWriter(directory / FILE_NAME, ARCHITECTURES[model.config.model_type])
    _add_metadata(writer, model.config)
    if tokenizer is None or not add_tokenizer(writer, tokenizer, model.config.vocab_size):
        writer.add_tokenizer_model("none")  # llama.cpp opens no file without this key
    names = tensor_names(model)
    for name, module in quantized_modules(model).items():
        weight = affine(module)
        rows = row_order(name, model.config)
        if rows is not None:
            weight = weight._make(part[rows] for part in weight)
        blocks = to_blocks(f"{name}.scales", weight, module.spec)
        # as int8 and with its shape: of uint8 the writer looks up the type, and misses Q2_0
        octets, shape = blocks.numpy().view(np.int8), weight_shape(module)
        number = type_number(block_type(module.spec).name)
        writer.add_tensor(f"{names[name]}.weight", octets, raw_shape=shape, raw_dtype=number)
    for key, tensor in narrow_state(model).items():
        stem, kind = key.rsplit(".", 1)
        rows = row_order(stem, model.config)
        if rows is not None:
            tensor = tensor[rows]
        elif _is_gemma_norm(stem, model.config):  # ggml stores 1 + weight
            tensor = tensor.float() + 1
        name, raw_type = f"{names[stem]}.{kind}", None
        if tensor.dim() == 1:  # ggml reads vectors in float32, matrices in their own dtype
            tensor = tensor.float()
        if tensor.dtype == torch.bfloat16:  # which numpy lacks
            tensor, raw_type = tensor.view(torch.uint8), gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, tensor.numpy(), raw_dtype=raw_type)
    if _has_rope_factors(model.config):
        writer.add_tensor(ROPE_FACTORS, rope_factors(model.config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return logits of `model` with the weights that gguf reads and dequantizes.

    Raises:
        ExportError: a tensor of the file is not that of `model`: few tokens do not read all rows.
    """
    weights = read_weights(model, directory / FILE_NAME)
    modules, others = quantized_modules(model), narrow_state(model)
    if _has_rope_factors(model.config):
        others[ROPE_FACTORS] = rope_factors(model.config)
    for name, found in weights.items():
        stem = name.removesuffix(".weight")
        own = modules[stem].quantized_weight() if stem in modules else others[name].float()
        if _is_gemma_norm(stem, model.config):  # which loses bits of its own
            own = (own + 1) - 1
        if not torch.equal(found, own.cpu()):
            raise ExportError(
                f"what was written gives another {name}, expected the same to the bit; report "
                "this, and meanwhile export --to dense"
            )
    weights.pop(ROPE_FACTORS, None)
    return logits_of(float_model(model, weights, embedding_dtype(model)), ids)


def read_weights(model: PreTrainedModel, path: Path) -> dict[str, Tensor]:
    """Return the float32 weights of a GGUF file by transformers' names, dequantized by `gguf`.

    Factors of rotary frequencies keep llama.cpp's name.
    """
    names = {written: name for name, written in tensor_names(model).items()}
    names[ROPE_FACTORS.removesuffix(".weight")] = ROPE_FACTORS.removesuffix(".weight")
    weights = {}
    for tensor in GgufFile(path).tensors:
        stem, kind = tensor.name.rsplit(".", 1)
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        rows = row_order(names[stem], model.config)
        if rows is not None:
            weight = weight[rows.argsort()]
        elif _is_gemma_norm(names[stem], model.config):
            weight = weight - 1
        weights[f"{names[stem]}.{kind}"] = weight
    return weights


def _add_metadata(writer: object, config: PreTrainedConfig) -> None:
    width = head_dim(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gemma3_text":
        ropes = config.rope_parameters
        writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.sliding_window)
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _has_rope_factors(config: PreTrainedConfig) -> bool:
    return config.rope_parameters.get("rope_type") == "llama3"


def _is_gemma_norm(stem: str, config: PreTrainedConfig) -> bool:
    return config.model_type == "gemma3_text" and stem.endswith("norm")
