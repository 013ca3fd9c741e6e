"""How well a model predicts a text: perplexity over sliding windows."""

import math
from typing import NamedTuple

from qat.errors import ConfigError
from qat.evaluate.divergence import cached_divergence
from qat.evaluate.text import Text, text_batches
from qat.models.language_model import LanguageModel


class Perplexity(NamedTuple):
    """How surprised a model is by a text."""

    num_tokens: int
    """Tokens scored: all but the first of a text; of chats, what assistants say."""
    nats_per_token: float
    """Mean of `-log q` of the tokens scored."""
    ppl: float
    """`exp(nats_per_token)`; depends on the tokenizer."""
    bits_per_byte: float
    """Bits spent on the tokens scored, over the bytes of the text that counts: free of the
    tokenizer."""


def text_perplexity(
    model: LanguageModel, text: Text, *, context: int, stride: int, batch_size: int
) -> Perplexity:
    """Perplexity of a text over windows of `context` tokens every `stride`, each token scored once.

    The method of Hugging Face's guide to the perplexity of fixed-length models: a token sees at
    least `context - stride` tokens before it, save in the first window.

    Raises:
        ConfigError: `context` is beyond the model's positions, or `stride` not below `context`.
    """
    check_context(model, context)
    batches = text_batches(text, context, stride, batch_size)
    judged = cached_divergence(model, batches)
    nats = math.log(judged.ppl)
    bits = nats * judged.num_tokens / math.log(2)
    return Perplexity(judged.num_tokens, nats, judged.ppl, bits / text.num_bytes)


def check_context(model: LanguageModel, context: int) -> None:
    """Refuse windows that the model has no positions for.

    Raises:
        ConfigError: `context` is beyond the model's positions.
    """
    limit = model.longest
    if context > limit:
        raise ConfigError(
            f"context={context}, but the model has positions for {limit} tokens; "
            f"use --context {limit} or less"
        )
