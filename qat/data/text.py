"""From documents to tokens, and what makes two tokenizers the same."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import xxhash
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qat.data.config import Targets, Thinking
from qat.data.sources import Document, Message
from qat.data.template import templated
from qat.errors import ConfigError, DataError

if TYPE_CHECKING:
    pass


# A chat is rendered with the tokenizer's own template, once for each thinking mode asked for. Where
# its assistants speak is found by rendering it again with marks in place of their words: what lies
# between the marks is the template and the other speakers, and the same in both.

MODES: dict[Thinking, tuple[str, ...]] = {
    "false": ("false",),
    "true": ("true",),
    "both": ("true", "false"),
    "none": ("none",),
    "all": ("true", "false", "none"),
}
THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
LAST_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z")
FIRST_EMPTY_THOUGHT = re.compile(r"\A\s*<think>\s*</think>\s*")
MARK = "qat-3f9c61d2-speaks"
"""Stands for what an assistant says: nothing that a template would trim, and nobody says it."""

Span = tuple[int, int]
"""Where something begins and ends in a text, in characters."""


class Rendering(NamedTuple):
    """A text and whether a chat template has already written its special tokens."""

    text: str
    is_templated: bool
    spoken: tuple[Span, ...] | None = None
    """What the assistants say, which alone counts; None where all of the text does."""


def num_characters(document: Document) -> int:
    """Characters of a text, or of all that is said in a chat."""
    if isinstance(document, str):
        return len(document)
    return sum(len(message["content"]) for message in document)


def render(
    document: Document,
    tokenizer: "PreTrainedTokenizerBase",
    thinking: Thinking,
    targets: Targets = "all",
) -> list[Rendering]:
    """The texts of a document: one for plain text, one for each thinking mode of a chat.

    `false` drops what assistants thought; the last answer stands behind what the template prompts
    for it without thinking, be it an empty thinking block. `true` leaves thinking to the template,
    `none` joins the messages by blank lines without one. Plain text counts whole, whatever the
    targets.

    Raises:
        ConfigError: a chat is to be templated, and the tokenizer has no template.
        DataError: the template refuses a chat; or assistants alone are to count, and a chat has
            none, or where they speak cannot be told.
    """
    if isinstance(document, str):
        return [Rendering(document, is_templated=False)]
    if targets == "assistant" and all(message["role"] != "assistant" for message in document):
        raise DataError(
            f"{_called(document)} has no assistant's turn, expected one to learn from; "
            "mend the row, or let all tokens count with --targets all"
        )
    renderings = []
    for mode in MODES[thinking]:
        text, has_block = _chat_text(document, tokenizer, mode)
        spoken = None
        if targets == "assistant":
            marks = _saying(document, lambda _: MARK)
            marked, _ = _chat_text(marks, tokenizer, mode)
            spoken = _spans(text, marked, has_block=has_block)
        if spoken == ():
            raise DataError(
                f"where the assistant speaks in {_called(document)} cannot be told: the chat "
                "template writes other things around other answers; let all tokens count with "
                "--targets all, or join the messages without it by --thinking none"
            )
        renderings.append(Rendering(text, is_templated=mode != "none", spoken=spoken))
    return renderings


def render_prompt(
    messages: list[Message], tokenizer: "PreTrainedTokenizerBase", mode: str
) -> Rendering:
    """The chat as a text up to where the model is to answer, in one of the `MODES`.

    Raises:
        ConfigError, DataError: as `render`.
    """
    if mode == "none":
        text = "".join(message["content"] + "\n\n" for message in messages)
        return Rendering(text, is_templated=False)
    _check_template(tokenizer, mode)
    if mode == "false":
        messages = _without_thoughts(messages)
    text = _template(messages, tokenizer, enable_thinking=mode == "true", is_prompt=True)
    return Rendering(text, is_templated=True)


def _chat_text(
    messages: list[Message], tokenizer: "PreTrainedTokenizerBase", mode: str
) -> tuple[str, bool]:
    """The chat as a text, and whether empty thinking blocks in it are the prompt's, not spoken."""
    if mode == "none":
        return "\n\n".join(message["content"] for message in messages), False
    _check_template(tokenizer, mode)
    if mode == "true":
        return _template(messages, tokenizer, enable_thinking=True), False
    thoughtless = _without_thoughts(messages)
    text = _template(thoughtless, tokenizer, enable_thinking=False)
    if messages[-1]["role"] != "assistant" or "think" not in str(tokenizer.chat_template):
        return text, False
    prompt = _template(thoughtless[:-1], tokenizer, enable_thinking=False, is_prompt=True)
    block = LAST_EMPTY_THOUGHT.search(prompt)
    if block is None:
        return text, False
    before = prompt[: block.start()]
    if text.startswith(before) and not text.startswith(prompt):
        # the template may write an empty thought of another shape than its prompt's
        text = prompt + FIRST_EMPTY_THOUGHT.sub("", text[len(before) :])
    return text, True


def _check_template(tokenizer: "PreTrainedTokenizerBase", mode: str) -> None:
    if not tokenizer.chat_template:
        raise ConfigError(
            f"thinking={mode} needs a chat template, but the tokenizer has none; "
            "use --thinking none or the tokenizer of a chat model"
        )


def _without_thoughts(messages: list[Message]) -> list[Message]:
    return _saying(messages, lambda words: THOUGHT.sub("", words))


def _template(
    messages: list[Message],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    enable_thinking: bool,
    is_prompt: bool = False,
) -> str:
    """The chat as the template writes it; with `is_prompt`, up to where the model is to answer."""
    try:
        return templated(
            messages, tokenizer, enable_thinking=enable_thinking, add_generation_prompt=is_prompt
        )
    except DataError as error:
        raise DataError(f"{_called(messages)}: {error}") from None


def _saying(messages: list[Message], change: Callable[[str], str]) -> list[Message]:
    """The chat with other words of its assistants; what they reasoned beside them is left out."""
    return [
        {"role": "assistant", "content": change(message["content"])}
        if message["role"] == "assistant"
        else message
        for message in messages
    ]


def _spans(text: str, marked: str, *, has_block: bool) -> tuple[Span, ...]:
    """What stands in `text` where `marked` has marks; nothing if the two do not fit.

    An empty thinking block that the template puts before a mark gives way to a thought, unless it
    is the prompt's.
    """
    parts = marked.split(MARK)
    if not has_block:
        parts = [LAST_EMPTY_THOUGHT.sub("", part) for part in parts]
    first, *others = parts
    if not others or not text.startswith(first):
        return ()
    spans, begin = [], len(first)
    for part in others[:-1]:
        end = text.find(part, begin)
        if end < 0:
            return ()
        spans.append((begin, end))
        begin = end + len(part)
    end = len(text) - len(others[-1])
    if end < begin or not text.endswith(others[-1]):
        return ()
    return (*spans, (begin, end))


def _called(messages: list[Message]) -> str:
    """What a message calls a chat: how it begins."""
    return f"the chat that begins {messages[0]['content']!r:.60}"


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
    """The id that goes before a text; None where none does.

    It is the beginning-of-sequence token of a tokenizer that puts one itself (Llama, Gemma), or
    that names one which is not the end token as well. Templates of chats may be all that writes
    such a token, and a model that never read without it is at a loss: MiniMind2's perplexity on
    TinyStories is 961,303 without and 44 with it.
    """
    begin = tokenizer.bos_token_id
    is_put = begin is not None and tokenizer("a").input_ids[:1] == [begin]
    return begin if is_put or begin != tokenizer.eos_token_id else None


def check_vocabulary(largest: int, vocab_size: int, whose: str = "model") -> None:
    """Refuse tokens that a model has no embedding for, such as one added to the tokenizer alone.

    Raises:
        ConfigError: `largest`, the largest token of some text, is not below `vocab_size`.
    """
    if largest >= vocab_size:
        raise ConfigError(
            f"the tokenizer gave token {largest}, but the {whose}'s vocabulary has {vocab_size}, "
            f"expected tokens below that; use the {whose}'s own tokenizer, or leave out text that "
            "holds tokens which were added to it"
        )


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that no text holds: they begin and end documents and turns."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset([*tokenizer.all_special_ids, *(i for i, each in added if each.special)])


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a plain text with what the tokenizer adds, begun by `begin_token`."""
    return _begun(
        Tokens(tokenizer(text, verbose=False)["input_ids"], None), begin_token(tokenizer)
    ).ids


class Tokens(NamedTuple):
    """One text as a tokenizer writes it."""

    ids: list[int]
    is_target: np.ndarray | None
    """bool: the token counts, because an assistant says it or ends its turn with it; None where
    all do."""


def encode(renderings: list[Rendering], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """The tokens of each text, ended by exactly one end token; many texts at once use all cores.

    Plain text gets the special tokens that the tokenizer adds, and `begin_token` in any case;
    templated text already holds what the template wants, and what a template writes behind the end
    token of its last turn, such as a line end, is left out.

    Raises:
        ConfigError: the tokenizer has no end token, or does not tell where in a text a token lies
            and not all of the text counts.
    """
    renderings = [_trimmed(each, tokenizer) if each.is_templated else each for each in renderings]
    encoded: dict[int, Tokens] = {}
    for is_templated in (False, True):
        places = [i for i, r in enumerate(renderings) if r.is_templated == is_templated]
        whole = [i for i in places if renderings[i].spoken is None]
        chats = [i for i in places if renderings[i].spoken is not None]
        found = _ids([renderings[i].text for i in whole], tokenizer, not is_templated)
        encoded |= {i: Tokens(ids, None) for i, ids in zip(whole, found, strict=True)}
        found = _spoken([renderings[i] for i in chats], tokenizer, not is_templated)
        encoded |= dict(zip(chats, found, strict=True))
    end, begin = end_token(tokenizer), begin_token(tokenizer)
    return [
        _ended(encoded[i] if rendering.is_templated else _begun(encoded[i], begin), end)
        for i, rendering in enumerate(renderings)
    ]


def _trimmed(rendering: Rendering, tokenizer: PreTrainedTokenizerBase) -> Rendering:
    text = rendering.text.rstrip()
    is_ended = tokenizer.eos_token is not None and text.endswith(tokenizer.eos_token)
    return rendering._replace(text=text) if is_ended else rendering


def _begun(tokens: Tokens, begin: int | None) -> Tokens:
    ids, is_target = tokens
    if begin is None or ids[:1] == [begin]:
        return tokens
    return Tokens([begin, *ids], None if is_target is None else np.insert(is_target, 0, False))


def _ended(tokens: Tokens, end: int) -> Tokens:
    ids, is_target = tokens
    if is_target is not None:
        # one more than the ids: whether what follows the text counts
        return Tokens(ids, is_target[:-1]) if ids[-1:] == [end] else Tokens([*ids, end], is_target)
    return tokens if ids[-1:] == [end] else Tokens([*ids, end], None)


def _spoken(
    chats: list[Rendering], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool
) -> list[Tokens]:
    """The tokens of chats, and one flag more for what follows the text."""
    if not chats:
        return []
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"the tokenizer ({type(tokenizer).__name__}) does not tell where in a text a token "
            "lies, expected one with a tokenizer.json, to know what assistants say; "
            "let all tokens count with --targets all"
        )
    backend = _whole(tokenizer)
    added = set(backend.get_added_tokens_decoder())
    texts = [chat.text for chat in chats]
    found = backend.encode_batch(texts, add_special_tokens=add_special_tokens)
    return [
        Tokens(encoding.ids, _said(encoding, chat, added))
        for encoding, chat in zip(found, chats, strict=True)
    ]


def _said(encoding: Encoding, chat: Rendering, added: set[int]) -> np.ndarray:
    """Which tokens assistants say, `(N + 1,)` bool; the last one is what follows the text.

    The token behind their words counts, which ends the turn; where blanks come first, so do they.
    """
    places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    is_said = np.zeros(len(places) + 1, dtype=bool)
    for begin, end in chat.spoken:
        first = np.searchsorted(places[:, 1], begin, side="right")
        last = np.searchsorted(places[:, 0], end, side="left")
        is_said[first:last] = True
        if last > first and places[last - 1, 1] > end:
            continue  # the last word's token ends the turn as well
        is_said[last] = True
        blanks = last
        while blanks < len(places) and encoding.ids[blanks] not in added:
            if chat.text[slice(*places[blanks])].strip():
                break
            blanks += 1
        if blanks == len(places) or encoding.ids[blanks] in added:
            is_said[last : blanks + 1] = True
    return is_said


def _whole(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """What reads texts for a tokenizer, told to cut and to fill none."""
    backend = tokenizer.backend_tokenizer
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    return backend


def _ids(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool
) -> list[list[int]]:
    if not texts:
        return []
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        # what the call below does, without a dictionary for each text; any thread may do it
        backend = _whole(tokenizer)
        found = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]
    return tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]
