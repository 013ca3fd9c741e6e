"""Tokens of documents, and what makes two tokenizers the same."""

import json
from weakref import WeakKeyDictionary

import xxhash
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qat.data.chat import Rendering
from qat.errors import ConfigError

_hashes: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[list[int], str]] = WeakKeyDictionary()
"""Of tokenizers that live: the hash, which takes most of a second, and what tells of changes."""


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits of the vocabulary, the merges and the special tokens; equal in any process.

    Two tokenizers with the same hash turn text into the same ids, up to normalisation. It is
    computed once for each tokenizer, and again when tokens were added or became special.
    """
    signs = [len(tokenizer), *tokenizer.all_special_ids]
    if _hashes.get(tokenizer, ([], ""))[0] != signs:
        _hashes[tokenizer] = signs, _state_hash(tokenizer)
    return _hashes[tokenizer][1]


def _state_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    state = {"vocabulary": sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])}
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        merges = backend["model"].get("merges", [])
        state["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
        added = backend["added_tokens"]
        state["special"] = sorted((t["id"], t["content"]) for t in added if t["special"])
    return xxhash.xxh3_64_hexdigest(json.dumps(state, ensure_ascii=True).encode())


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that ends a document.

    Raises:
        ConfigError: the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has no end-of-sequence token, which separates packed documents; "
            "set eos_token in its tokenizer_config.json"
        )
    return tokenizer.eos_token_id


def begin_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id that the tokenizer puts before a text (Llama, Gemma); None where it puts none."""
    with_special, without = (tokenizer("a", add_special_tokens=s).input_ids for s in (True, False))
    is_put = with_special[:1] != without[:1] and with_special[:1] == [tokenizer.bos_token_id]
    return tokenizer.bos_token_id if is_put else None


def encode(renderings: list[Rendering], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each text, ended by exactly one end token; many texts at once use all cores.

    Plain text gets the special tokens that the tokenizer adds (a BOS for Llama and Gemma);
    templated text already holds them.
    """
    end = end_token(tokenizer)
    encoded: list[list[int]] = [[]] * len(renderings)
    for is_templated in (False, True):
        places = [i for i, r in enumerate(renderings) if r.is_templated == is_templated]
        texts = [renderings[i].text for i in places]
        for i, ids in zip(places, _ids(texts, tokenizer, not is_templated), strict=True):
            encoded[i] = ids if ids and ids[-1] == end else [*ids, end]
    return encoded


def _ids(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool
) -> list[list[int]]:
    if not texts:
        return []
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        # what the call below does, without a dictionary for each text; any thread may do it
        backend = tokenizer.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        found = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]
    return tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]
