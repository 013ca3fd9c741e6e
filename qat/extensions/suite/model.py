"""A model that answers the requests of lm-eval, fast where it generates."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from qat.backend.device import on
from qat.data.text import check_vocabulary, text_ids
from qat.extensions.decode.slots import Batch, Request, Sampler, open_sampler
from qat.extensions.suite.answers import Answer
from qat.extensions.suite.engine import VllmSampler
from qat.extensions.suite.harness import open_harness
from qat.extensions.suite.plan import SuiteSettings
from qat.generate.sampling import Sampling
from qat.generate.text import closing_tokens
from qat.models.language_model import LanguageModel, judging
from qat.models.load import load_model
from qat.models.regions import as_written
from qat.nn.step import form_weights

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

SLOTS = 256
"""Answers that grow at once in vLLM and where a step is recorded and replayed, unless
`--batch-size` is given: there a step of many costs little more than one of few."""


class Asked(NamedTuple):
    """A request for a generated answer."""

    ids: list[int]
    """Tokens of the prompt."""
    limit: int
    """Most new tokens."""
    until: list[str]
    """Texts that end the answer."""


class Model:
    """An open model. It judges given answers first: generating takes its weights apart."""

    def __init__(
        self, source: str, tokenizer: PreTrainedTokenizerBase, config: SuiteSettings
    ) -> None:
        self._model: LanguageModel = load_model(source, device=config.device, dtype=config.dtype)
        self._source, self._tokenizer, self._config = source, tokenizer, config
        self._ends = {*closing_tokens(self._model, tokenizer.eos_token_id)}
        self._harness: Any = None
        self._sampler: Sampler | None = None
        records = on(self._model.device).records or config.engine == "vllm"
        is_asked = "batch_size" in config.model_fields_set
        self.width = SLOTS if records and not is_asked else config.batch_size
        """Number of requests that are answered at once."""

    def close(self) -> None:
        """Let go of the weights, and end an engine."""
        if isinstance(self._sampler, VllmSampler):
            self._sampler.close()
        self._harness = self._sampler = None

    def judge(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Return each given answer's log-probability, and whether it is the most likely one."""
        if self._harness is None:
            form_weights(self._model.model, self._model.dtype)
            size = self._config.batch_size
            self._harness = open_harness(self._model, self._tokenizer, size)
        with judging(self._model), as_written(self._model.model):
            found = self._harness.loglikelihood(requests, disable_tqdm=True)
        return [(float(logprob), bool(is_greedy)) for logprob, is_greedy in found]

    def prepare(self, requests: Sequence[Instance]) -> list[Asked]:
        """Get ready to generate the answers of all `requests`, and return them as tokens."""
        asked = [self._asked(request) for request in requests]
        largest = max(max(each.ids) for each in asked)
        check_vocabulary(largest, self._model.config.vocab_size)
        batch = Batch(
            num_slots=min(self.width, len(asked)),
            num_positions=max(len(each.ids) + each.limit for each in asked),
            max_new_tokens=max(each.limit for each in asked),
            sampling=Sampling(0.0),
            ends=self._ends,
        )
        if self._config.engine == "vllm":
            dtype, backend = self._model.dtype, on(self._model.device)
            del self._model  # the engine loads its own
            self._harness = None
            backend.free_memory()
            self._sampler = VllmSampler(self._source, str(dtype).removeprefix("torch."), batch)
        else:
            self._sampler = open_sampler(self._model, batch)
        return asked

    def generate(self, asked: Mapping[str, Asked]) -> Iterator[Answer]:
        """Yield the most likely answers, token by token, of prepared requests as they end.

        `asked` holds the requests by their hashes.
        """
        assert self._sampler is not None, "prepare comes first"
        names = list(asked)
        # greedy: the random streams are drawn from but decide nothing
        rows = (Request(each.ids, each.limit, (0, 0)) for each in asked.values())
        for place, ids in self._sampler.sample(rows):
            yield self._answer(names[place], asked[names[place]], ids)

    def _asked(self, request: Instance) -> Asked:
        from lm_eval.models.utils import normalize_gen_kwargs

        prompt, how = request.args
        how = normalize_gen_kwargs(how)
        if self._tokenizer.chat_template and self._config.thinking != "none":
            ids = self._tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        else:
            ids = text_ids(prompt, self._tokenizer)
        # like the harness: of what is longer than the model's window the beginning is left out
        limit = min(how["max_gen_toks"], self._model.longest // 2)
        return Asked(ids[-(self._model.longest - limit) :], limit, list(filter(None, how["until"])))

    def _answer(self, name: str, asked: Asked, ids: list[int]) -> Answer:
        """Return an answer up to what ends it."""
        said = ids[:-1] if ids and ids[-1] in self._ends else ids
        text = self._decoded(said)
        stop = min((at for at in map(text.find, asked.until) if at >= 0), default=None)
        if stop is not None:
            # the fewest tokens that hold the text before the stop and the first of its characters
            count = bisect.bisect_right(
                range(len(said) + 1), stop, key=lambda n: len(self._decoded(said[:n]))
            )
            ids, text = said[:count], text[:stop]
        return Answer(request=name, text=text, ids=ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
