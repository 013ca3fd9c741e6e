"""The tokenizers of two models: names of tokens, splitting, begin, end, chat template."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from qat.extensions.targets.gguf import Words
from qat.extensions.verify.facts import Finding, Rules, Side, Tokens
from qat.models.gguf_header import Field, read_metadata
from qat.models.gguf_layout import DIGITS_APART

PROBES = (
    "The cat sat on the mat, and the dog saw it.",
    "It's 1234567 o'clock, we'll see 3.14159.",
    "def f(x):\n\treturn x  +  1\r\n\n\n    # done",
    "Z\u00fcrich \u4f60\u597d \u043f\u0440\u0438\u0432 e\u0301 \U0001f600\u200d\U0001f525",
    " leading and trailing ",
)
"""Texts that tokenizers of different rules split differently."""
CHATS = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "1 + 1?"},
    ],
)
"""Chats that templates are rendered with."""
SAME_RULES = {
    **{"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"},
    **dict.fromkeys(DIGITS_APART, "smollm"),
}
"""llama.cpp's further names of rules for splitting text."""
BEGINNING = ("llama-bpe",)
"""Rules with which llama.cpp begins texts with a token if a file does not say so."""
ENDING = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|return|>", "<|call|>", "<end_of_utterance>",
    "<|eom_id|>",
}  # fmt: skip
"""Tokens that llama.cpp takes as the end of an answer by their names."""
OF_GGUF = "tokenizer.ggml."


def of_tokenizer(tokenizer: PreTrainedTokenizerBase, ends: Iterable[object]) -> Tokens:
    """Describe a tokenizer of transformers.

    `ends` are the end tokens of files beside it: numbers, lists of numbers, or None.
    """
    names = {number: text for text, number in tokenizer.get_vocab().items()}
    backend, rules = getattr(tokenizer, "backend_tokenizer", None), None
    if backend is not None:
        words = Words.of(tokenizer, json.loads(backend.to_str()), 1 + max(names))
        rules = words and Rules(words.kind, words.pre, words.merges)
    end, template = tokenizer.eos_token_id, tokenizer.chat_template
    first = tokenizer("a").input_ids[:1]
    return Tokens(
        names=names,
        rules=rules,
        encode=lambda text: tokenizer(text, add_special_tokens=False).input_ids,
        begin=first[0] if first == [tokenizer.bos_token_id] else None,
        end=end,
        ends=frozenset(_numbers([end, *ends])),
        template=template.get("default") if isinstance(template, dict) else template,
    )


def of_gguf(path: Path) -> Tokens | None:
    """Describe the tokenizer in a GGUF file as llama.cpp reads it; None if there is none."""
    fields = read_metadata(path)
    if f"{OF_GGUF}tokens" not in fields:
        return None

    def texts(name: str) -> list[str]:
        found = fields.get(name)
        return [part.decode(errors="replace") for part in found.parts] if found else []

    def number(name: str) -> int | None:
        return _scalar(fields.get(f"{OF_GGUF}{name}"))

    names = dict(enumerate(texts(f"{OF_GGUF}tokens")))
    kind, *_ = texts(f"{OF_GGUF}model") or [""]
    pre, *_ = texts(f"{OF_GGUF}pre") or ["default"]
    pre = SAME_RULES.get(pre, pre)
    begins = number("add_bos_token")
    begins = kind == "llama" or pre in BEGINNING if begins is None else begins
    given = [number(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    named = (token for token, text in names.items() if text in ENDING)
    return Tokens(
        names=names,
        rules=Rules(kind, pre, texts(f"{OF_GGUF}merges")),
        encode=None,
        begin=number("bos_token_id") if begins else None,
        end=given[0],
        ends=frozenset(_numbers([*given, *named])),
        template=next(iter(texts("tokenizer.chat_template")), None),
    )


def compare_tokens(reference: Side, file: Side) -> Iterator[Finding]:
    """Yield how the tokenizer of `file` differs from that of `reference`."""
    ours, theirs = reference.tokens, file.tokens
    if ours is None:
        return
    if theirs is None:
        yield Finding("vocabulary", "tokenizer", "the file has none, the reference has one")
        return
    wrong = [n for n, text in ours.names.items() if theirs.names.get(n, text) != text]
    if wrong:
        token = min(wrong)
        words = f"{theirs.names[token]!r}, expected {ours.names[token]!r}"
        yield Finding("vocabulary", f"token {token}", f"{words} ({len(wrong)} differ)")
    yield from _splitting(ours, theirs)
    yield from _special(ours, theirs)
    yield from _template(reference, theirs)


def _splitting(ours: Tokens, theirs: Tokens) -> Iterator[Finding]:
    if ours.encode is not None and theirs.encode is not None:
        for text in PROBES:
            expected, found = ours.encode(text), theirs.encode(text)
            if found != expected:
                words = f"{found[:12]}, expected {expected[:12]}"
                yield Finding("splitting", repr(text), words)
                return
    elif ours.rules is not None and theirs.rules is not None:
        for name in ("kind", "pre"):
            expected, found = getattr(ours.rules, name), getattr(theirs.rules, name)
            if found != expected:
                yield Finding("splitting", f"tokenizer {name}", f"{found}, expected {expected}")
        expected, found = ours.rules.merges, theirs.rules.merges
        if found != expected and ours.rules.kind != "llama":  # it has scores instead
            at = _first_difference(found, expected)
            words = f"differ from number {at} on, {len(found)} instead of {len(expected)}"
            yield Finding("splitting", "merges", words)


def _special(ours: Tokens, theirs: Tokens) -> Iterator[Finding]:
    def name(token: int | None) -> str:
        return "none" if token is None else f"{token} {ours.names.get(token, '?')!r}"

    if theirs.begin != ours.begin:
        words = f"{name(theirs.begin)}, expected {name(ours.begin)}"
        yield Finding("begin-token", "begin of a text", words)
    if ours.end is not None and ours.end not in theirs.ends:
        words = f"{name(theirs.end)}, expected {name(ours.end)}: answers would not end"
        yield Finding("end-token", "end of an answer", words)
    elif theirs.end is not None and ours.ends and theirs.end not in ours.ends:
        words = f"{name(theirs.end)}, expected one of {', '.join(map(name, sorted(ours.ends)))}"
        yield Finding("end-token", "end of an answer", words)


def _template(reference: Side, theirs: Tokens) -> Iterator[Finding]:
    ours, tokenizer = reference.tokens.template, reference.tokenizer
    if ours is None or ours == theirs.template:
        return
    if theirs.template is None:
        yield Finding("chat-template", "chat template", "the file has none, the reference has one")
        return
    for chat in CHATS:
        for is_asking in (True, False):
            templates = ours, theirs.template
            expected, found = (_rendered(tokenizer, chat, each, is_asking) for each in templates)
            if found != expected:
                at = _first_difference(found, expected)
                words = f"{found[at : at + 40]!r}, expected {expected[at : at + 40]!r}"
                yield Finding("chat-template", f"letter {at} of a chat", words)
                return


def _first_difference(found: Sequence[str], expected: Sequence[str]) -> int:
    pairs = enumerate(zip(found, expected, strict=False))
    ends = min(len(found), len(expected))
    return next((place for place, (one, other) in pairs if one != other), ends)


def _rendered(
    tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, str]], template: str, is_asking: bool
) -> str:
    try:
        return tokenizer.apply_chat_template(
            chat, chat_template=template, tokenize=False, add_generation_prompt=is_asking
        )
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return f"refused: {error}"


def _numbers(given: Iterable[object]) -> Iterator[int]:
    for each in given:
        if isinstance(each, int):
            yield each
        elif isinstance(each, list):
            yield from each


def _scalar(field: Field | None) -> int | None:
    return None if field is None else field.parts[0][0]
