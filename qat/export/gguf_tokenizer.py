"""The tokenizer inside a GGUF file."""

import json
import logging
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
PRE_TOKENIZERS = {
    CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": "qwen2",
    CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": "llama-bpe",
}
"""What llama.cpp calls the expression that a byte-level tokenizer splits text with."""


def add_tokenizer(writer: object, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> bool:
    """Write tokens, merges or scores, special tokens and the chat template.

    Byte-level BPE (of Qwen, Llama 3 and GPT-2) and BPE with byte fallback (of Llama 2) are known;
    of another tokenizer nothing is written, and that is logged. Rows of the embedding above the
    last token get names of their own.

    Returns:
        Whether the tokenizer was written.
    """
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    model, pre = values["model"], _pre_tokenizer(values.get("pre_tokenizer"))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", ())]
    if model["type"] == "BPE" and model.get("byte_fallback"):
        kind = "llama"
    elif model["type"] == "BPE" and pre is not None:
        kind = "gpt2"
    else:
        logger.warning("this tokenizer is none that GGUF files know: the file has none")
        return False
    tokens = _tokens(tokenizer, vocab_size)
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
    else:
        writer.add_tokenizer_pre("default")
        rank = {merge.replace(" ", ""): -float(place) for place, merge in enumerate(merges, 1)}
        writer.add_token_scores([rank.get(token, 0.0) for token in tokens])
    writer.add_token_list(tokens)
    writer.add_token_types(list(_types(values, tokens)))
    _add_special(writer, tokenizer)
    return True


def _pre_tokenizer(values: dict | None) -> str | None:
    """The name of a byte-level pre-tokenizer; None if llama.cpp has none."""
    parts = (values or {}).get("pretokenizers", [values] if values else [])
    if not any(part["type"] == "ByteLevel" for part in parts):
        return None
    splits = [part["pattern"].get("Regex") for part in parts if part["type"] == "Split"]
    return PRE_TOKENIZERS.get(splits[0]) if len(splits) == 1 else None if splits else "gpt-2"


def _tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[str]:
    """The text of each id."""
    names = {number: text for text, number in tokenizer.get_vocab().items()}
    return [names.get(number, f"[PAD{number}]") for number in range(vocab_size)]


def _types(values: dict, tokens: list[str]) -> Iterator[int]:
    """What each token is: normal, control, user-defined, unused or a byte."""
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


def _add_special(writer: object, tokenizer: PreTrainedTokenizerBase) -> None:
    adders = (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    )
    for number, add in adders:
        if number is not None:
            add(number)
    first = tokenizer("a").input_ids[:1]
    writer.add_add_bos_token(first == [tokenizer.bos_token_id])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
