"""Convert documents to tokens, and define when two tokenizers are the same."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import compress, product
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import xxhash
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qat.data.config import Targets, Thinking
from qat.data.documents import CALLABLE, Document, Message
from qat.data.template import MARK, templated
from qat.errors import ConfigError, DataError
from qat.hooks import extension

# A chat is rendered with the tokenizer's own template, once per requested thinking mode. To find
# the assistants' turns it is rendered again with marks in place of their content: the text between
# the marks is the template and the other roles, and equal in both.

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
Span = tuple[int, int]
"""Start and end of a part of a text, in characters."""


class Rendering(NamedTuple):
    """A text, and whether a chat template has already written its special tokens."""

    text: str
    is_templated: bool
    target_spans: tuple[Span, ...] | None = None
    """Spans of what assistants say and call, the only part that counts; None if the whole text
    counts."""


def num_characters(document: Document) -> int:
    """Return the number of characters of a text, or of all messages of a chat."""
    if isinstance(document, str):
        return len(document)
    return sum(len(whole_turn(message)) for message in document)


def whole_turn(message: Message) -> str:
    """Return a turn as text without a template: its content, then its tools and calls as JSON."""
    listed = (json.dumps(each) for field in CALLABLE for each in message.get(field, ()))
    return "\n".join(filter(None, (message["content"], *listed)))


def render(
    document: Document,
    tokenizer: "PreTrainedTokenizerBase",
    thinking: Thinking,
    targets: Targets = "all",
) -> list[Rendering]:
    """Return the texts of a document: one for plain text, one per thinking mode for a chat.

    `false` removes the assistants' thoughts; the last answer follows the template's generation
    prompt without thinking, which may hold an empty thinking block. `true` leaves thinking to the
    template; `none` joins the messages with blank lines and uses no template. Plain text counts as
    a whole, whatever the targets.

    Raises:
        ConfigError: a template is needed, but the tokenizer has none.
        DataError: the template rejects a chat or leaves out tools; or `targets` is `assistant`, and
            a chat has no assistant's turn that counts or its turns cannot be located.
    """
    if isinstance(document, str):
        return [Rendering(document, is_templated=False)]
    weights = [turn.get("weight", 1) for turn in document if turn["role"] == "assistant"]
    if targets == "assistant" and not any(weights):
        raise DataError(
            f"{_quoted(document)} has no assistant's turn that counts, expected one; "
            "mend the row, or let all tokens count with --targets all"
        )
    renderings = []
    for mode in MODES[thinking]:
        _check_tools(document, tokenizer, mode)
        text, has_block = _chat_text(document, tokenizer, mode)
        target_spans = None
        if targets == "assistant":
            target_spans = ()
            with suppress(DataError):  # of a template whose answers of tools need their calls
                marks = _with_contents(document, lambda _: MARK, dropped=CALLABLE[1])
                _check_tools(marks, tokenizer, mode)
                marked, _ = _chat_text(marks, tokenizer, mode)
                target_spans = _spans(text, marked, has_block=has_block)
        if target_spans == ():
            raise DataError(
                f"where the assistant speaks in {_quoted(document)} cannot be told: the chat "
                "template writes other things around other answers; let all tokens count with "
                "--targets all, or join the messages without it by --thinking none"
            )
        counted = None if target_spans is None else tuple(compress(target_spans, weights))
        renderings.append(Rendering(text, is_templated=mode != "none", target_spans=counted))
    return renderings


def render_prompt(
    messages: list[Message], tokenizer: "PreTrainedTokenizerBase", mode: str
) -> Rendering:
    """Render the chat up to the start of the model's answer, in one of the `MODES`.

    Raises:
        ConfigError, DataError: see `render`.
    """
    if mode == "none":
        text = "".join(whole_turn(message) + "\n\n" for message in messages)
        return Rendering(text, is_templated=False)
    _check_tools(messages, tokenizer, mode)
    return Rendering(_template(messages, tokenizer, mode, is_prompt=True), is_templated=True)


def _chat_text(
    messages: list[Message], tokenizer: "PreTrainedTokenizerBase", mode: str
) -> tuple[str, bool]:
    """Return the chat's text, and whether its empty thinking blocks belong to the prompt."""
    if mode == "none":
        return "\n\n".join(map(whole_turn, messages)), False
    text = _template(messages, tokenizer, mode)
    # an answer to nothing has no prompt: templates render one turn or more
    is_answered = messages[-1]["role"] == "assistant" and len(messages) > 1
    if mode == "true" or not is_answered or "think" not in str(tokenizer.chat_template):
        return text, False
    prompt = _template(messages[:-1], tokenizer, mode, is_prompt=True)
    block = LAST_EMPTY_THOUGHT.search(prompt)
    if block is None:
        return text, False
    before = prompt[: block.start()]
    if text.startswith(before) and not text.startswith(prompt):
        # the empty thought in the turn may differ from the one in the generation prompt
        text = prompt + FIRST_EMPTY_THOUGHT.sub("", text[len(before) :])
    return text, True


def _template(
    messages: list[Message],
    tokenizer: "PreTrainedTokenizerBase",
    mode: str,
    *,
    is_prompt: bool = False,
) -> str:
    """Apply the template; with `is_prompt` the text ends where the model is to answer."""
    if not tokenizer.chat_template:
        raise ConfigError(
            f"thinking={mode} needs a chat template, but the tokenizer has none; "
            "use --thinking none or the tokenizer of a chat model"
        )
    if mode == "false":
        messages = _with_contents(messages, lambda text: THOUGHT.sub("", text))
    try:
        return templated(
            messages, tokenizer, enable_thinking=mode == "true", add_generation_prompt=is_prompt
        )
    except DataError as error:
        raise DataError(f"{_quoted(messages)}: {error}") from None


def _check_tools(messages: list[Message], tokenizer: "PreTrainedTokenizerBase", mode: str) -> None:
    """Refuse a chat if the template leaves out its tools, their calls or their answers."""
    has_tools = any(turn["role"] == "tool" or turn.keys() & {*CALLABLE} for turn in messages)
    if has_tools and mode != "none":
        check_complete = extension("qat.chats", "tools").check_complete
        check_complete(messages, partial(_template, tokenizer=tokenizer, mode=mode))


def _with_contents(
    messages: list[Message], change: Callable[[str], str], *, dropped: str = ""
) -> list[Message]:
    """Return the chat with the assistants' content changed, and reasoning and `dropped` removed."""
    return [
        {field: message[field] for field in message if field not in ("reasoning_content", dropped)}
        | {"content": change(message["content"])}
        if message["role"] == "assistant"
        else message
        for message in messages
    ]


def _spans(text: str, marked: str, *, has_block: bool) -> tuple[Span, ...]:
    """Return the spans of `text` where `marked` has marks; empty if the two do not match.

    An empty thinking block that the template puts before a mark is replaced by the thought in
    `text`, unless it belongs to the prompt.
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


def _quoted(messages: list[Message]) -> str:
    """Name a chat in an error message by its beginning."""
    return f"the chat that begins {messages[0]['content']!r:.60}"


_hashes: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[list[int], str]] = WeakKeyDictionary()
"""Cached hashes by live tokenizer, which take most of a second, and the token list they are valid
for."""


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hex digits that identify vocabulary, merges and special tokens in any process.

    Two tokenizers with the same hash turn text into the same ids, up to normalisation. The hash is
    computed once per tokenizer, and again when tokens were added or became special.
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
    """Return the id that ends a document.

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
    """Return the id that begins a text, or None.

    It is the beginning-of-sequence token if the tokenizer adds it itself (Llama, Gemma), or if it
    differs from the end token. In some models only the chat template writes such a token, and text
    without it is out of distribution: MiniMind2's perplexity on TinyStories is 961,303 without and
    44 with it.
    """
    begin = tokenizer.bos_token_id
    is_put = begin is not None and tokenizer("a").input_ids[:1] == [begin]
    return begin if is_put or begin != tokenizer.eos_token_id else None


def check_vocabulary(largest: int, vocab_size: int, whose: str = "model") -> None:
    """Refuse tokens without an embedding in the model, such as one added to the tokenizer alone.

    Raises:
        ConfigError: `largest`, the largest token id of a text, is not below `vocab_size`.
    """
    if largest >= vocab_size:
        raise ConfigError(
            f"the tokenizer gave token {largest}, but the {whose}'s vocabulary has {vocab_size}, "
            f"expected tokens below that; use the {whose}'s own tokenizer, or leave out text that "
            "holds tokens which were added to it"
        )


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of special tokens, which begin and end documents and turns."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset([*tokenizer.all_special_ids, *(i for i, each in added if each.special)])


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a plain text with the tokenizer's special tokens and `begin_token`."""
    return _with_begin(
        Tokens(tokenizer(text, verbose=False)["input_ids"], None), begin_token(tokenizer)
    ).ids


class Tokens(NamedTuple):
    """The tokens of one text, and which of them count."""

    ids: list[int]
    is_target: np.ndarray | None
    """True for tokens of an assistant's content or the end of its turn (bool); None if all
    count."""


def encode(renderings: list[Rendering], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Return the tokens of each text, with exactly one end token; batches use all cores.

    Plain text gets the tokenizer's special tokens, and `begin_token` in any case. Templated text
    already holds its special tokens; whatever the template writes after the end token of the last
    turn, such as a newline, is dropped.

    Raises:
        ConfigError: the tokenizer has no end token, or it gives no offsets and only parts of a text
            count.
    """
    renderings = [_trimmed(each, tokenizer) if each.is_templated else each for each in renderings]
    tokens: dict[int, Tokens] = {}
    for is_templated, has_spans in product((False, True), repeat=2):
        kind = is_templated, has_spans
        own = {
            i: each
            for i, each in enumerate(renderings)
            if (each.is_templated, each.target_spans is not None) == kind
        }
        tokens |= zip(own, encoded([*own.values()], tokenizer, *kind), strict=True)
    end, begin = end_token(tokenizer), begin_token(tokenizer)
    return [
        _with_end(tokens[i] if rendering.is_templated else _with_begin(tokens[i], begin), end)
        for i, rendering in enumerate(renderings)
    ]


def _trimmed(rendering: Rendering, tokenizer: PreTrainedTokenizerBase) -> Rendering:
    text = rendering.text.rstrip()
    is_ended = tokenizer.eos_token is not None and text.endswith(tokenizer.eos_token)
    return rendering._replace(text=text) if is_ended else rendering


def _with_begin(tokens: Tokens, begin: int | None) -> Tokens:
    ids, is_target = tokens
    if begin is None or ids[:1] == [begin]:
        return tokens
    return Tokens([begin, *ids], None if is_target is None else np.insert(is_target, 0, False))


def _with_end(tokens: Tokens, end: int) -> Tokens:
    ids, is_target = tokens
    if is_target is not None:
        # the last flag tells whether the token after the text counts
        return Tokens(ids, is_target[:-1]) if ids[-1:] == [end] else Tokens([*ids, end], is_target)
    return tokens if ids[-1:] == [end] else Tokens([*ids, end], None)


def encoded(
    renderings: list[Rendering],
    tokenizer: PreTrainedTokenizerBase,
    is_templated: bool,
    has_spans: bool,
) -> list[Tokens]:
    """Return the tokens of texts of one kind as the tokenizer gives them, in parallel.

    With spans `is_target` has one more flag, for the token after the text.
    """
    if not renderings:
        return []
    texts = [each.text for each in renderings]
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        # same result as the call below, but thread-safe and without a dictionary per text
        backend = _untruncated(tokenizer)
        if not has_spans:
            found = backend.encode_batch_fast(texts, add_special_tokens=not is_templated)
            return [Tokens(encoding.ids, None) for encoding in found]
        added = set(backend.get_added_tokens_decoder())
        found = backend.encode_batch(texts, add_special_tokens=not is_templated)
        pairs = zip(found, renderings, strict=True)
        return [Tokens(one.ids, _target_mask(one, chat, added)) for one, chat in pairs]
    if has_spans:
        raise ConfigError(
            f"the tokenizer ({type(tokenizer).__name__}) does not tell where in a text a token "
            "lies, expected one with a tokenizer.json, to know what assistants say; "
            "let all tokens count with --targets all"
        )
    found = tokenizer(
        texts,
        add_special_tokens=not is_templated,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return [Tokens(ids, None) for ids in found["input_ids"]]


def _target_mask(encoding: Encoding, chat: Rendering, added: set[int]) -> np.ndarray:
    """Return which tokens assistants say, `(N + 1,)` bool; the last is the one after the text."""
    places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    is_said = np.zeros(len(places) + 1, dtype=bool)
    for begin, end in chat.target_spans:
        first = np.searchsorted(places[:, 1], begin, side="right")
        last = np.searchsorted(places[:, 0], end, side="left")
        is_said[first:last] = True
        if last > first and places[last - 1, 1] > end:
            continue  # the last content token also holds the end of the turn
        is_said[last] = True
        blanks = last
        while blanks < len(places) and encoding.ids[blanks] not in added:
            if chat.text[slice(*places[blanks])].strip():
                break
            blanks += 1
        if blanks == len(places) or encoding.ids[blanks] in added:
            is_said[last : blanks + 1] = True
    return is_said


def _untruncated(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Return the tokenizer's backend with truncation and padding disabled."""
    backend = tokenizer.backend_tokenizer
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    return backend
