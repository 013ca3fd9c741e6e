"""Speculative decoding: a student drafts tokens, and its teacher checks them in one pass.

A drafted token x is taken with probability `min(1, p(x) / q(x))`, of its probabilities p by the
teacher and q by the draft. The first that is not taken is replaced by a draw from the normalised
positive part of p - q, and the tokens behind it are forgotten; if all are taken, one more is drawn
from p. So the text has exactly the teacher's distribution, whatever the draft says
(arXiv:2211.17192, arXiv:2302.01318). Temperature 0 makes both one-hot: a draft is taken where it is
the teacher's most likely token.

A whole round depends on nothing on the host, so it is one graph where both models can be captured.

Shapes: N drafted tokens of a round, S tokens of a prompt, V words of the teacher.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from qat.backend.device import on
from qat.errors import ConfigError
from qat.evaluate.config import GenerateConfig
from qat.extensions.decode.decoder import Seen, recorded
from qat.extensions.decode.rewind import Rewindable, rewindable
from qat.generate.sampling import Sampling, draw_from, until_end
from qat.generate.text import open_generator
from qat.models.decoding import Decoder
from qat.models.language_model import LanguageModel


def open_drafted(
    teacher: LanguageModel | Decoder, tokenizer: PreTrainedTokenizerBase, config: GenerateConfig
) -> "Drafted":
    """Open the student of `config` and return it and its teacher as one decoder.

    Raises:
        CheckpointError: no such student or tokenizer.
        ConfigError: the student has another tokenizer, or one of the two models cannot go back.
    """
    behind = rewindable(teacher)
    student, own = open_generator(config.draft, device=config.device, dtype=config.dtype)
    words, others = named_tokens(tokenizer), named_tokens(own)
    if words != others:
        first = min(number for number, _ in words.items() ^ others.items())
        raise ConfigError(
            f"draft={config.draft} calls token {first} {others.get(first)!r}, but the model calls "
            f"it {words.get(first)!r}, expected the same tokenizer; choose a student of this "
            "model, or leave out --draft"
        )
    return Drafted(behind, rewindable(student), config.draft_tokens)


def named_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the tokens by id, without those that fill a GGUF file's table: `[PAD151665]`."""
    known = tokenizer.get_vocab().items()
    return {number: token for token, number in known if token != f"[PAD{number}]"}


class Drafted:
    """Continues one prompt with the tokens of a teacher, for which a student drafts."""

    def __init__(self, teacher: Rewindable, draft: Rewindable, num_tokens: int) -> None:
        self.model = teacher.model
        self.teacher, self.draft, self._num_tokens = teacher, draft, num_tokens
        self.accepted_length: float | None = None
        """Mean number of tokens per pass of the teacher in the latest text, the prompt's pass left
        out; from 1, nothing drafted was taken, to N + 1. None without another pass."""

    def generate(
        self,
        ids: Tensor,
        sampling: Sampling,
        *,
        max_new_tokens: int,
        ends: Collection[int] = (),
        seen: Seen | None = None,
    ) -> list[list[int]]:
        """Return new tokens for the prompt `ids` `(1, S)`, up to the first of `ends`.

        `seen` receives the tokens of each round. Draws use torch's generator.

        Raises:
            ValueError: more than one prompt.
        """
        if ids.shape[0] > 1:
            raise ValueError(f"{ids.shape[0]} prompts at once, expected one")
        ends, told = set(ends), 0
        run = self.begin(ids, sampling, max_new_tokens)
        while True:
            said = until_end(run.said()[:max_new_tokens], ends)
            if seen is not None:
                seen([said[told:]])
                told = len(said)
            if len(said) == max_new_tokens or said[-1] in ends:
                break
            run.advance()
        self.accepted_length = run.accepted_length()
        return [said]

    @torch.no_grad()
    def begin(self, ids: Tensor, sampling: Sampling, max_new_tokens: int) -> "Rounds":
        """Let both models read the prompt, draw the first token, and capture a round."""
        ids = ids.to(self.model.device)
        # the last round may begin one token before the end
        num_positions = ids.shape[1] + max_new_tokens + self._num_tokens
        logits = self.teacher.begin(ids, num_positions)
        draft = Draft(self.draft, logits.shape[1])
        draft.begin(ids, num_positions)
        run = Rounds(self.teacher, draft, self._num_tokens, sampling)
        run.start(ids[0], sampling.draw(logits), num_positions)
        if max_new_tokens > 1 and self.teacher.records and self.draft.records:
            run.record()
        return run


class Draft:
    """A student with logits of V words: tables of one tokenizer may differ in rows at the end."""

    def __init__(self, student: Rewindable, num_words: int) -> None:
        self._student, self._num_words = student, num_words
        self._last = student.model.config.vocab_size - 1

    def begin(self, ids: Tensor, num_positions: int) -> None:
        """Read a prompt `(1, S)` into a new cache."""
        self._student.begin(ids.clamp(max=self._last), num_positions)

    def __call__(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Return the logits `(1, V)` after `tokens`, the first at `position` `(1,)`."""
        logits = self._student(tokens.clamp(max=self._last), position)[-1:]
        return F.pad(logits, (0, self._num_words - logits.shape[1]), value=-torch.inf)


class Rounds:
    """The state of a running generation, at fixed addresses so that a graph can be replayed."""

    def __init__(
        self, teacher: Rewindable, draft: Draft, num_tokens: int, sampling: Sampling
    ) -> None:
        self._teacher, self._draft, self._sampling = teacher, draft, sampling
        self._num_tokens = num_tokens
        self.advance: Callable[[], None] = self._advance

    def start(self, prompt: Tensor, first: Tensor, num_positions: int) -> None:
        """Start after a prompt `(S,)` and the first new token `(1,)`."""
        self._num_prompt = len(prompt)
        self._text = F.pad(torch.cat([prompt, first]), (0, num_positions - len(prompt)))
        self._length = torch.tensor([len(prompt) + 1], device=prompt.device)
        self._num_rounds = torch.zeros_like(self._length)

    def record(self) -> None:
        """Capture one round as a graph and replay it from now on."""
        state = (self._text, self._length, self._num_rounds)
        self.advance = recorded(self._advance, state, on(self._text.device))

    def said(self) -> list[int]:
        """Return all new tokens; waits for the device."""
        return self._text[self._num_prompt : int(self._length)].tolist()

    def accepted_length(self) -> float | None:
        """Return the mean number of tokens per round; None before the first."""
        rounds = int(self._num_rounds)
        return (int(self._length) - self._num_prompt - 1) / rounds if rounds else None

    @torch.no_grad()
    def _advance(self) -> None:
        """Draft N tokens, let the teacher read them, and append 1 to N + 1 tokens to the text."""
        N, length = self._num_tokens, self._length
        places = torch.arange(N + 1, device=length.device)
        last = self._text[length - 1]
        # after a round in which all were taken the draft has not yet read the last token but one
        position, following = length - 2, torch.cat([self._text[length - 2], last])
        drafted, probs = [last], []
        for _ in range(N):
            probs.append(self._sampling.probs(self._draft(following, position)))
            following = draw_from(probs[-1])
            drafted.append(following)
            position = length - 1 + len(probs)
        p = self._sampling.probs(self._teacher(torch.cat(drafted), length - 1))
        q = F.pad(torch.cat(probs), (0, 0, 0, 1))  # 0 behind the last draft
        new = torch.cat(drafted[1:])
        p_new, q_new = (part[:N].gather(1, new[:, None])[:, 0] for part in (p, q))
        is_taken = torch.rand(N, device=p.device) * q_new < p_new
        num_taken = is_taken.long().cumprod(0).sum(0, keepdim=True)
        rest = (p[num_taken] - q[num_taken]).clamp_min(0)
        # where p and q differ by rounding alone, nothing may be left of the difference
        rest = torch.where(rest.sum() > 0, rest, p[num_taken])
        new = F.pad(new, (0, 1)).index_copy(0, num_taken, draw_from(rest))
        self._text.index_copy_(0, length + places, new)
        self._length += num_taken + 1
        self._num_rounds += 1
