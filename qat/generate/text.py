"""Continue a prompt with streaming, and measure whether the result degenerates."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TextStreamer,
)

from qat.backend.device import on
from qat.data.cache import Split
from qat.data.reader import TeacherCache
from qat.data.template import templated
from qat.data.text import check_vocabulary, text_ids
from qat.errors import ConfigError
from qat.generate.sampling import Sampling, until_end
from qat.models.decoding import Decoder, open_decoder
from qat.models.language_model import LanguageModel, judging
from qat.models.load import load_model, load_tokenizer
from qat.models.regions import as_written
from qat.nn.step import form_weights

MEDIA = ("image", "video", "audio")
"""Input types whose placeholder tokens multimodal models use."""
PROMPT_TOKENS = 16
"""Number of tokens of a held-out document that are used as a prompt."""
CONTEXT = 16
"""Tokens of a raw prompt that are decoded with what follows: alone, some tokenizers drop the space
before its first word."""


class Generated(NamedTuple):
    """A generated text and its statistics."""

    text: str
    """Text without the prompt and without special tokens."""
    num_tokens: int
    """Number of tokens generated, including the end token."""
    repeated_frac: float
    """Fraction of 4-grams that occurred before: above 0.5 the model loops."""
    distinct_frac: float
    """Number of distinct tokens over number of tokens."""


def open_generator(
    source: str, *, device: str, dtype: str
) -> tuple[LanguageModel | Decoder, PreTrainedTokenizerBase]:
    """Open a model for generation and its tokenizer; as a `Decoder` where one supports it.

    Otherwise the model itself is returned, with its quantized weights formed once.

    Raises:
        CheckpointError: no such model or tokenizer.
        ConfigError: the device is missing or cannot compute in `dtype`.
    """
    model = load_model(source, device=device, dtype=dtype)
    tokenizer = load_tokenizer(source)
    decoder = open_decoder(model)
    if decoder is not None:
        return decoder, tokenizer
    form_weights(model.model, model.dtype)
    return model, tokenizer


def generate_text(
    model: LanguageModel | Decoder,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.7,
    top_p: float = 0.95,
    raw: bool = False,
    stream: Callable[[str], None] | None = None,
) -> Generated:
    """Continue `prompt`; with a chat template, and unless `raw`, it becomes a user's message.

    Sampling uses only `temperature` and `top_p`, not the checkpoint's generation settings, and
    draws from torch's generator (`qat.backend.device.seeded`); temperature 0 takes the most likely
    token without a draw. `stream` receives the text in pieces as soon as they are final. A
    `Decoder` replaces the model's own loop; its draws differ.

    Raises:
        ConfigError: the prompt holds no token, a placeholder for an image or the like, or a token
            without an embedding.
    """
    ids = encode_prompt(tokenizer, prompt, raw=raw)
    is_raw = raw or not tokenizer.chat_template
    before = ids[0, -CONTEXT:].tolist() if is_raw else []
    streamer = None if stream is None else _Pieces(tokenizer, stream, before)
    own = model if isinstance(model, LanguageModel) else model.model
    check_vocabulary(int(ids.max()), own.config.vocab_size)
    _refuse_media(own, tokenizer, ids)
    ends = closing_tokens(own, tokenizer.eos_token_id)
    config = generation_config(ends, max_new_tokens, temperature, top_p)
    if isinstance(model, LanguageModel):
        (new_ids,) = continue_rows(model, ids, config, streamer=streamer)
    else:
        new_ids = _decode(model, ids, config, streamer)
    shown = _decoded(tokenizer, before)
    text = _decoded(tokenizer, [*before, *new_ids])[len(shown) :]
    return Generated(text, len(new_ids), repeated_frac(new_ids), distinct_frac(new_ids))


def continue_rows(
    model: LanguageModel,
    ids: Tensor,
    config: GenerationConfig,
    *,
    streamer: "_Pieces | None" = None,
    processor: LogitsProcessor | None = None,
) -> list[list[int]]:
    """Return the new tokens of each of the prompts `ids` `(B, N)`, up to its end token.

    `processor` may change the logits `(B, V)` of each step before a token is chosen.
    """
    if on(model.device).is_traced:
        return _continue_filled(model, ids, config, streamer=streamer, processor=processor)
    ids = ids.to(model.device)
    # a compiled layer would be recompiled for every length
    with judging(model), as_written(model.model), _generating_by(model, config):
        answers = model.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            streamer=streamer,
            logits_processor=LogitsProcessorList([] if processor is None else [processor]),
        )
    ends = set(config.eos_token_id or ())
    return [until_end(row, ends) for row in answers[:, ids.shape[1] :].tolist()]


def _continue_filled(
    model: LanguageModel,
    ids: Tensor,
    config: GenerationConfig,
    *,
    streamer: "_Pieces | None",
    processor: LogitsProcessor | None,
) -> list[list[int]]:
    """Do what `continue_rows` does with forwards over rows padded to full length.

    All forwards have one shape, and there is no KV cache.
    """
    backend, ends, (B, N) = on(model.device), set(config.eos_token_id or ()), ids.shape
    length = backend.tracing.filled_length(N + config.max_new_tokens)
    rows = torch.nn.functional.pad(ids, (0, length - N))
    places = torch.arange(length).expand(B, length)
    if streamer is not None:
        streamer.put(ids)  # skipped: the streamer drops the prompt
    with judging(model), as_written(model.model):
        for place in range(N, N + config.max_new_tokens):
            # positions of later padding are 0, so that the text does not seem longer (rotary
            # scaling)
            positions = (places * (places < place)).to(model.device)
            hidden = model.hidden(rows.to(model.device), positions, is_packed=False)
            last = torch.tensor([place - 1]).to(model.device)
            logits = model.logits(hidden.index_select(1, last))[:, 0].float()
            backend.step_end()
            logits = backend.to_host(logits)
            if processor is not None:
                logits = processor(rows[:, :place], logits)
            rows[:, place] = _sampling(config).draw(logits)
            if streamer is not None:
                streamer.put(rows[:1, place])
            if all(ends & set(row) for row in rows[:, N : place + 1].tolist()):
                break
    if streamer is not None:
        streamer.end()
    return [until_end(row, ends) for row in rows[:, N : place + 1].tolist()]


def _sampling(config: GenerationConfig) -> Sampling:
    return Sampling(config.temperature if config.do_sample else 0.0, config.top_p)


def _decode(
    decoder: Decoder, ids: Tensor, config: GenerationConfig, streamer: "_Pieces | None"
) -> list[int]:
    """Continue one prompt with a `Decoder`, one token at a time."""
    if streamer is not None:
        streamer.put(ids)  # skipped: the streamer drops the prompt

    def seen(said: list[list[int]]) -> None:
        if streamer is not None:
            for token in said[0]:
                streamer.put(torch.tensor([token]))

    (new_ids,) = decoder.generate(
        ids,
        _sampling(config),
        max_new_tokens=config.max_new_tokens,
        ends=set(config.eos_token_id or ()),
        seen=seen,
    )
    if streamer is not None:
        streamer.end()
    return new_ids


def closing_tokens(model: LanguageModel, end: int | None) -> list[int]:
    """Return the ids that end a text: those of the checkpoint, then the tokenizer's `end`.

    Chat templates end a turn with the latter. The list may be empty.
    """
    ends = model.model.generation_config.eos_token_id
    ends = getattr(model.config, "eos_token_id", None) if ends is None else ends
    named = [ends] if isinstance(ends, int) else list(ends or ())
    return [*dict.fromkeys([*named, *([] if end is None else [end])])]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, *, raw: bool = False) -> Tensor:
    """Return the token ids `(1, N)` of a prompt, in the chat template if there is one.

    Without a template, or if `raw`, it begins like a plain text of a cache, with
    `qat.data.text.begin_token`.

    Raises:
        ConfigError: the prompt holds no token.
        DataError: the chat template fails.
    """
    if tokenizer.chat_template and not raw:
        turn = {"role": "user", "content": prompt}
        prompt = templated([turn], tokenizer, add_generation_prompt=True)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    else:
        ids = text_ids(prompt, tokenizer)
    if not ids:
        raise ConfigError(
            f"prompt={prompt!r} holds no token; expected something to continue; use --prompt TEXT"
        )
    return torch.tensor([ids])


def _refuse_media(model: LanguageModel, tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> None:
    """Refuse a prompt with a placeholder token for an image, a video or audio.

    Raises:
        ConfigError: the prompt holds such a token.
    """
    for medium in MEDIA:
        for key in (f"{medium}_token_id", f"{medium}_token_index"):
            token = getattr(model.model.config, key, None)
            if token is not None and (ids == token).any():
                raise ConfigError(
                    f"the prompt holds {tokenizer.convert_ids_to_tokens(token)!r}, which stands "
                    f"for {medium} input, expected text alone; leave it out"
                )


def repeated_frac(ids: list[int], n: int = 4) -> float:
    """Return the fraction of n-grams of `ids` that occurred before; 0 if there are none."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct_frac(ids: list[int]) -> float:
    """Return the number of distinct tokens over the number of tokens; `ids` must not be empty."""
    return len(set(ids)) / len(ids)


def generation_config(
    ends: list[int], max_new_tokens: int, temperature: float, top_p: float
) -> GenerationConfig:
    """Return a new configuration that takes only the end tokens from the checkpoint."""
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else None,
        **sampling,
    )


@contextmanager
def _generating_by(model: LanguageModel, config: GenerationConfig) -> Iterator[None]:
    """Replace the model's generation config for a block.

    If passed to `generate`, it would be merged with the checkpoint's config.
    """
    own = model.model.generation_config
    model.model.generation_config = config
    try:
        yield
    finally:
        model.model.generation_config = own


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""


class _Pieces(TextStreamer):
    """A streamer that passes finished pieces of text to a function instead of printing them.

    `before` are the last tokens of a text that is continued; they are decoded but not passed on.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stream: Callable[[str], None],
        before: Sequence[int] = (),
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stream = stream
        self.token_cache = list(before)
        self.print_len = len(_decoded(tokenizer, before))

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass on complete words; called by the streamer."""
        if text:
            self._stream(text)


def held_out_prompt(cache: Path | str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the beginning of the first held-out document of a teacher cache.

    For a chat it is everything before the first answer, for other text `PROMPT_TOKENS` tokens or
    half of a short document, up to the last whole word. A cache without a held-out split gives the
    beginning of its training text.
    """
    reader = TeacherCache.open(cache)
    split: Split = "held_out" if reader.num_sequences("held_out") else "train"
    batch = reader.batch([0], split, targets=())
    ends = (batch.position_ids[0, 1:] == 0).nonzero().flatten().tolist()
    length = ends[0] + 1 if ends else reader.sequence_length
    counted = batch.mask[0, :length].nonzero().flatten().tolist()
    before_answer = counted[0] + 1 if counted else 0
    count = before_answer if before_answer > 1 else max(1, min(PROMPT_TOKENS, length // 2))
    ids = batch.input_ids[0, :length].tolist()
    # a first word has a space where some tokenizers decode it behind the token that begins a text
    first = int(ids[0] == tokenizer.bos_token_id)
    prompt, document = (str(tokenizer.decode(ids[first:end])) for end in (count, length))
    return prompt if count == before_answer else _whole_words(prompt, document)


def _whole_words(prompt: str, document: str) -> str:
    """Return `prompt` without its last word if `document`, which begins so, goes on with it."""
    # a prompt that ends inside a character decodes to another text than the document
    if re.match(re.escape(prompt) + r"(?!['\u2019]?\w)", document):
        return prompt
    kept = re.sub(r"\S+$", "", prompt).rstrip()
    # where little would be left, words have no spaces between them
    return kept if len(kept) > len(prompt) / 2 else prompt
