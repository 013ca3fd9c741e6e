"""A teacher behind an inference server, which receives the tokens of a cache's documents.

A server returns the log-probs of its most likely tokens, normalised over the whole vocabulary, so
the mass of all others is known too: tail = 1 - sum(exp(log-prob)). Hidden states and draws from the
whole distribution are only available from a teacher on a local device.

Shapes: S positions of a sequence, T of those that count, K teacher tokens kept, V vocabulary.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat.data.cache import Manifest
from qat.data.codec import Signals, TopK
from qat.data.reader import TeacherCache
from qat.data.shard import Answer, encode_signals
from qat.data.stream import ShardBlock
from qat.errors import CacheError, ConfigError
from qat.extensions.served import engines
from qat.extensions.served.engines import (
    ANSWER_BYTES,
    ENGINES,
    KEY,
    MODELS,
    Client,
    Engine,
    NoRoute,
    Position,
    Refused,
    Vllm,
)

logger = logging.getLogger(__name__)

AT_ONCE = 32
"""Default number of sequences in flight."""
PROBES = (
    "The 12 quick foxes x = f(y[0]) * 3.14; don't WON'T <b>&amp;",
    "\n\n\tdef g(): return 'A-B_c'\r\n\u00e9\u00df\u03b1\u0416",
    "\u4f60\u597d\uff0c \u3053\u3093 \uc548\ub155 \u0645\u0631 \U0001f600",
)
"""Short texts that different tokenizers split differently; the special tokens are added to them.
They avoid two spaces in a row, which llama.cpp splits differently from the original tokenizer."""
OVER_ONE = 1e-3
"""Tolerance of the sum of probabilities: more than a hundred times the rounding of float32."""
ROUNDING = 2.0**-23
"""Rounding error of a float32 sum of probabilities: 1 - sum cannot resolve a smaller tail."""
TINY = 1e-45
"""The smallest positive float32 probability."""
SHOWN = 8
"""Number of ids of a mismatched tokenization shown in an error; differences appear early."""
SAME_NATS = 0.02
"""Largest mean KL per token, in nats, of answers by the same model: ten times the effect of
bfloat16 (docs/cache.md), and less than that of 4-bit weights."""


Row = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Tokens, document starts and loss mask of a packed sequence, `(S,)` each."""


class TopLogprobs(NamedTuple):
    """The server's answer at the counted positions of one sequence."""

    places: np.ndarray
    """Positions in the sequence, `(T,)` int64."""
    ids: np.ndarray
    """Token ids, `(T, K)` int64, most likely first; equally likely ones in ascending order."""
    logprobs: np.ndarray
    """Log-probs of these tokens, `(T, K)` float64, nats."""
    tail: np.ndarray
    """Mass outside the K tokens, `(T,)` float64; 0 where K = V."""
    next_logprob: np.ndarray
    """Log-prob of the next token, `(T,)` float64, nats; NaN if the server does not return it."""


class ServedTeacher:
    """The model `model` behind `address`, the http://HOST/v1 of an OpenAI-compatible server."""

    def __init__(self, address: str, model: str, vocab_size: int, at_once: int = 0) -> None:
        self._address = address
        self._model = model
        self._vocab_size = vocab_size
        self._at_once = at_once or AT_ONCE
        self._engine: Engine = Vllm()

    def check(self, tokenizer: PreTrainedTokenizerBase, length: int, k: int) -> None:
        """Check the server before any text is sent.

        It must have this tokenizer, read sequences of `length` and return `k` tokens per position.

        Raises:
            ConfigError: the server has no such model, a shorter context, another tokenizer or
                vocabulary, or returns no log-probs of a prompt, or too few tokens.
            CacheError: the server is unreachable or of an unknown kind.
        """
        with closing(Client(self._address)) as client:
            if client.shows_key:
                logger.warning(
                    "%s: the key in %s goes there without encryption", self._address, KEY
                )
            try:
                room = self._select_engine(client)
            except Refused as error:
                raise ConfigError(
                    f"{self._address}, asked what it serves, answers {error}; expected an address "
                    "such as http://HOST:8000/v1 of vLLM, SGLang or llama.cpp: check --teacher"
                ) from None
            if room is not None and length >= room:
                raise ConfigError(
                    f"sequence_length={length}, but {self._address} reads at most {room - 1} "
                    "tokens and the one that it writes; lower --sequence-length or start the "
                    "server with a longer context"
                )
            ids = self._check_tokenizer(client, tokenizer)
            self._check_logprobs(client, ids[:length], k)

    @contextmanager
    def asked(
        self, manifest: Manifest, out: Path
    ) -> Iterator[Callable[[ShardBlock, Callable[[int], None]], list[Answer]]]:
        """Yield a function like `qat.data.shard.examine` that keeps many sequences in flight.

        An answer's `wait` blocks until its sequence is there, and raises its error. Leaving the
        context aborts all requests in flight.
        """
        settings = manifest.settings
        logger.info(
            "caching %s at %s (%s): the %d most likely tokens at each of %d positions, %d "
            "sequences at once, into %s",
            self._model,
            self._address,
            self._engine.name,
            settings.top_k,
            settings.sequence_length,
            self._at_once,
            out,
        )
        pool, lock = ThreadPoolExecutor(self._at_once), threading.Lock()
        client = Client(self._address, self._at_once, attempts=engines.ATTEMPTS)

        def examine(block: ShardBlock, advance: Callable[[int], None]) -> list[Answer]:
            def count(done: Future) -> None:
                if not done.cancelled() and done.exception() is None:
                    with lock:
                        advance(1)

            answers = []
            for row in zip(*block.packed[:3], strict=True):
                future = pool.submit(self._encoded_rows, client, row, settings.top_k)
                future.add_done_callback(count)
                answers.append(_answer(future))
            return answers

        try:
            yield examine
        finally:
            client.abort()
            pool.shutdown(cancel_futures=True)
            client.close()

    def check_same(self, manifest: Manifest, out: Path) -> None:
        """Check that the server still runs the model that built the shards in `out`, if any.

        The first sequence is requested again and compared by KL: a model's name does not identify
        its weights.

        Raises:
            CacheError: the mean KL exceeds `SAME_NATS`.
        """
        if not manifest.shards:
            return
        cache = TeacherCache(out, manifest)
        batch = cache.batch([0], manifest.shards[0].split)
        row = tuple(
            rows[0].numpy() for rows in (batch.input_ids, batch.position_ids == 0, batch.mask)
        )
        with closing(Client(self._address)) as client:
            now = self._top_logprobs_or_error(client, row, manifest.settings.top_k)
        ids_TK = batch.topk_ids[0].numpy()[now.places]
        p_TK = batch.topk_logprobs[0].double().exp().numpy()[now.places]
        q_TK = _probabilities(now, ids_TK)
        terms_TK = np.where(p_TK > 0, p_TK * np.log(np.maximum(p_TK, TINY) / q_TK), 0)
        rest_p, rest_q = (np.clip(1 - each.sum(1), ROUNDING, None) for each in (p_TK, q_TK))
        kl = float((terms_TK.sum(1) + rest_p * np.log(rest_p / rest_q)).mean())
        if not kl <= SAME_NATS:
            raise CacheError(
                f"{self._address} answers otherwise than {out} says of its first sequence (KL "
                f"{kl:.3g} nats a token, expected at most {SAME_NATS}): another model is served as "
                f"{self._model} now; serve the one of before, or choose another --out"
            )

    def top_logprobs(self, client: Client, row: Row, k: int) -> TopLogprobs:
        """Return the server's answer where the mask of a packed sequence is true.

        Each document in it is sent separately, up to the last token that is needed.

        Raises:
            Refused: the server rejects the request.
            CacheError: the response is too short, or impossible for a vocabulary of this size.
        """
        tokens, starts, mask = row
        parts = counted_parts(starts, mask)
        documents = [tokens[part].tolist() for part in parts]
        answers = self._engine.ask(client, self._model, documents, k) if documents else []
        # no log-prob of a next token exists at a document's last token
        answered = [np.arange(part.start, part.stop - 1) for part in parts]
        if [*map(len, answers)] != [*map(len, answered)]:
            raise CacheError(
                f"{self._address} gives log-probs of {sum(map(len, answers))} tokens of a prompt, "
                f"expected {sum(map(len, answered))}; take vLLM, SGLang or llama.cpp's own server"
            )
        places = np.concatenate([*answered, np.zeros(0, np.int64)])
        is_kept = mask[places]
        positions = [position for answer in answers for position in answer]
        positions = [position for position, kept in zip(positions, is_kept, strict=True) if kept]
        return self._checked(places[is_kept], positions, k)

    def _checked(self, places: np.ndarray, positions: Sequence[Position], k: int) -> TopLogprobs:
        """Convert answers to arrays, most likely first, and check that they are probabilities."""
        sizes = [len(position.top) for position in positions]
        if min(sizes, default=k) < k:
            raise CacheError(
                f"{self._address} gives log-probs of {min(sizes)} tokens at a position, expected "
                f"{k}; {self._engine.remedy.format(k=k)}, or lower --top-k"
            )
        ids = np.zeros((len(positions), max(sizes, default=k)), np.int64)
        logprobs = np.full(ids.shape, -np.inf)
        for row, position in enumerate(positions):
            ids[row, : sizes[row]] = [*position.top]
            logprobs[row, : sizes[row]] = [*position.top.values()]
        order = np.lexsort((ids, -logprobs))[:, :k]
        ids, logprobs = (np.take_along_axis(each, order, 1) for each in (ids, logprobs))
        if ids.size and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            raise CacheError(
                f"{self._address} gives the token {ids.max()}, expected one of the "
                f"{self._vocab_size} words of the teacher's vocabulary; name what is served there "
                "as --tokenizer"
            )
        sums = np.exp(logprobs).sum(1)
        # upper bound on the tail: no other token is likelier than the last of these
        most = (self._vocab_size - k) * np.exp(logprobs[:, -1])
        if not ((sums <= 1 + OVER_ONE) & (sums + most >= 1 - OVER_ONE)).all():
            raise CacheError(
                f"{self._address} gives probabilities of {k} tokens that sum to {sums.max():.3g}, "
                f"and with all others of the vocabulary to at most {(sums + most).min():.3g}, "
                "expected log-probs normalised over it; start the server without another way "
                "(vLLM: --logprobs-mode raw_logprobs)"
            )
        tail = np.clip(1 - sums, np.minimum(ROUNDING, most), most)
        following = np.array([position.next_logprob for position in positions], np.float64)
        if (following > OVER_ONE).any():
            raise CacheError(
                f"{self._address} gives a following token the log-prob {following.max():.3g}, "
                "expected at most 0; check that it is vLLM, SGLang or llama.cpp"
            )
        return TopLogprobs(places, ids, logprobs, tail, following)

    def _top_logprobs_or_error(self, client: Client, row: Row, k: int) -> TopLogprobs:
        """Call `top_logprobs` where the server did this before: a refusal is then an error."""
        try:
            return self.top_logprobs(client, row, k)
        except Refused as error:
            raise CacheError(
                f"{self._address}: the server answers {error}; finished shards are kept: run the "
                "same command again when it does not"
            ) from None

    def _encoded_rows(self, client: Client, row: Row, k: int) -> dict[str, Tensor]:
        """Return the shard rows of one sequence; uncounted positions get uniform placeholders."""
        found = self._top_logprobs_or_error(client, row, k)
        S, V = len(row[0]), self._vocab_size
        ids = torch.arange(k).repeat(S, 1)
        distances = torch.zeros(S, k, dtype=torch.float64)
        tail, following = torch.full((S,), (V - k) / V), torch.zeros(S)
        places = torch.from_numpy(found.places)
        ids[places] = torch.from_numpy(found.ids)
        distances[places] = torch.from_numpy(found.logprobs[:, :1] - found.logprobs)
        tail[places] = torch.from_numpy(found.tail).float()
        following[places] = torch.from_numpy(found.next_logprob).float()
        # log-sum-exp is stored as 0: the log-probs stand in for logits
        top = TopK(ids, distances, torch.zeros(S), tail.log())
        return encode_signals(Signals(following, top, None, torch.tensor(True)), 1, S)

    def _select_engine(self, client: Client) -> int | None:
        """Select the engine that serves the model; return its context length, None if unknown."""
        found = {
            card["id"]: card for card in client.ask("models", None, MODELS, ANSWER_BYTES)["data"]
        }
        if self._model not in found:
            raise ConfigError(
                f"{self._address} serves {', '.join(sorted(found))[:300] or 'nothing'}, expected "
                f"{self._model}; name one of them as --teacher-model"
            )
        card = found[self._model]
        self._engine = ENGINES.get(card.get("owned_by") or "", Vllm)()
        self._at_once, room = self._engine.prepare(client, self._at_once)
        return card.get("max_model_len") or room

    def _check_tokenizer(self, client: Client, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the ids of the probes after checking that both tokenizers agree on them."""
        ids = []
        for text in (*PROBES, "".join(tokenizer.all_special_tokens[:8])):
            ours = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += ours
            try:
                theirs = self._engine.tokenized(client, self._model, text) if ours else []
            except Refused as error:
                logger.warning(
                    "%s does not tell how it tokenises (%s): nobody can know whether it has this "
                    "tokenizer; a high perplexity at the end would say that it has not",
                    self._address,
                    error,
                )
                return ids
            if ours != theirs:
                raise ConfigError(
                    f"{self._address} has another tokenizer: {text!r} is {_shown(theirs)} there "
                    f"and {_shown(ours)} here; name the directory or hub id of what is served as "
                    "--tokenizer"
                )
        return ids

    def _check_logprobs(self, client: Client, ids: list[int], k: int) -> None:
        """Check that the server returns `k` log-probs at each position of a prompt."""
        is_first = np.arange(len(ids)) == 0
        is_last = np.arange(len(ids)) == len(ids) - 1
        try:
            self.top_logprobs(client, (np.array(ids), is_first, ~is_last), k)
        except NoRoute as error:
            raise ConfigError(
                f"{error.url} answers {error}, expected {self._engine.name}'s route that gives "
                "log-probs of a prompt; serve the teacher by vLLM, SGLang or llama.cpp"
            ) from None
        except Refused as error:
            raise ConfigError(
                f"{self._address}, asked for {k} log-probs at each token of a prompt, answers "
                f"{error}; {self._engine.remedy.format(k=k)}, or lower --top-k"
            ) from None


def counted_parts(starts: np.ndarray, mask: np.ndarray) -> list[slice]:
    """Return the parts of a sequence that the teacher has to read.

    These are the documents in which something counts, each up to the label of its last counted
    prediction.

    Args:
        starts: `(S,)` bool, true where a document or the padding begins.
        mask: `(S,)` bool, true where the prediction of the next token counts.
    """
    begins = [*np.flatnonzero(starts).tolist(), len(starts)]
    parts = [slice(*each) for each in pairwise(begins)]
    return [
        slice(part.start, part.start + int(np.flatnonzero(mask[part])[-1]) + 2)
        for part in parts
        if mask[part].any()
    ]


def _answer(future: Future[dict[str, Tensor]]) -> Answer:
    """Return an answer whose rows are filled in when `wait` returns."""
    tensors: dict[str, Tensor] = {}
    return Answer(tensors, lambda: tensors.update(future.result()))


def _shown(ids: list[int]) -> str:
    """Return the first few ids and their total number, for an error message."""
    return f"{ids[:SHOWN]} ({len(ids)} in all)"


def _probabilities(found: TopLogprobs, ids_TK: np.ndarray) -> np.ndarray:
    """Return the probabilities of ids `(T, K)`; an id that was not returned gets its bound."""
    prob_TK = np.zeros(ids_TK.shape)
    for row, (ids, logprobs) in enumerate(zip(found.ids, found.logprobs, strict=True)):
        known = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
        prob_TK[row] = [known.get(token, logprobs[-1]) for token in ids_TK[row].tolist()]
    return np.maximum(np.exp(prob_TK), TINY)
