"""The tokens of a tokenizer as bytes, in which two tokenizers can be compared."""

import json
from collections.abc import Iterator
from functools import cached_property

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from qat.data.text import begin_token, end_token, special_tokens
from qat.errors import ConfigError

SPACE = "▁"
"""The character that SentencePiece writes for a space."""
ALPHABET = bytes_to_unicode()
OF_BYTE = {character: bytes([byte]) for byte, character in ALPHABET.items()}
"""The byte of each character in which byte-level tokenizers write their tokens."""
FALLBACK = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
"""The byte of each token in which SentencePiece writes characters that it has no token of."""


class Vocabulary:
    """All tokens of a tokenizer as bytes, and the way back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        """Read the vocabulary of `tokenizer`; `name` is what messages call it.

        Raises:
            ConfigError: the tokenizer does not tell the bytes of its tokens, or has no end token.
        """
        self.tokenizer, self.name = tokenizer, name
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise self._unreadable(f"is a {type(tokenizer).__name__} without tokenizer.json")
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        kinds = {*_kinds(state["decoder"])}
        self._is_byte_level = "ByteLevel" in kinds
        if not self._is_byte_level and not kinds & {"Metaspace", "Replace"}:
            raise self._unreadable(f"decodes by {' and '.join(sorted(kinds)) or 'nothing'}")
        self._has_fallback = "ByteFallback" in kinds
        self.special = special_tokens(tokenizer)
        self.begin, self.end = begin_token(tokenizer), end_token(tokenizer)
        added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        self.words = {i: word for word, i in tokenizer.get_vocab().items()} | added
        """The tokens as the tokenizer writes them, by id."""
        self.size = max(self.words) + 1
        """One more than the largest id."""
        self.octets = [b""] * self.size
        """The bytes of each token, by id; empty for ids without a token."""
        for i, word in self.words.items():
            self.octets[i] = word.encode() if i in added else self._octets(word)
        self._firsts: dict[bytes, int] = {}

    @cached_property
    def has_dummy(self) -> bool:
        """True if a space that is not in the text stands before it, as in SentencePiece."""
        ids = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        return self.joined(ids) == b" a"

    @cached_property
    def by_octets(self) -> dict[bytes, int]:
        """The id of each token that is no special one, by its bytes; of equal ones the least.

        A token of a single byte for characters without a token yields to one that is a character.
        """
        ids = sorted(self.words.keys() - self.special, reverse=True)
        ids.sort(key=lambda i: self.words[i] not in FALLBACK)
        return {self.octets[i]: i for i in ids}

    @cached_property
    def by_special(self) -> dict[str, int]:
        """The id of each special token by what it is called."""
        return {self.words[i]: i for i in sorted(self.special, reverse=True)}

    def joined(self, ids: list[int]) -> bytes:
        """Return the bytes of several tokens."""
        return b"".join(self.octets[i] for i in ids)

    def first(self, octets: bytes) -> int:
        """Return the first token that the tokenizer makes of bytes within a text.

        That is the token of these very bytes if there is one. The model of the tokenizer is asked
        itself: bytes that begin or end within a character are allowed, and no space is put before
        them.
        """
        found = self._firsts.get(octets)
        if found is None:
            found = self.by_octets.get(octets)
            if found is None:
                tokens = self.tokenizer.backend_tokenizer.model.tokenize(self._written(octets))
                found = tokens[0].id if tokens else self.by_octets.get(octets[:1], -1)
            self._firsts[octets] = found
        return found

    def _octets(self, word: str) -> bytes:
        if self._is_byte_level:
            return b"".join(OF_BYTE.get(c) or c.encode() for c in word)
        if self._has_fallback and word in FALLBACK:
            return FALLBACK[word]
        return word.replace(SPACE, " ").encode()

    def _written(self, octets: bytes) -> str:
        """Return bytes as the model of the tokenizer reads them, up to half a character."""
        if self._is_byte_level:
            return "".join(ALPHABET[byte] for byte in octets)
        try:
            text = octets.decode()
        except UnicodeDecodeError as error:
            text = octets[: error.start].decode()
        return text.replace(" ", SPACE)

    def _unreadable(self, what: str) -> ConfigError:
        return ConfigError(
            f"the tokenizer of {self.name} {what}, expected a byte-level one or SentencePiece's, "
            "which tell the bytes of their tokens; take a model with such a tokenizer"
        )


def _kinds(decoder: dict | None) -> Iterator[str]:
    """Yield the types of a decoder and of those within it."""
    if decoder is not None:
        yield decoder["type"]
        for inner in decoder.get("decoders", ()):
            yield from _kinds(inner)
