"""Sample a corpus from a model: prompts -> shards of rows -> one file of JSON lines.

The rows of all shards are sampled as one stream, so that a batch is full until the last rows. A
shard is written atomically when all its rows have ended. A run that was killed at any point
therefore repeats the rows of the shards that it had begun and not finished, and several ranks can
take shards in turn. A row that is sampled again has its own random numbers again, but other rows
beside it, which may change the last bits of its logits.
"""

import hashlib
import json
import logging
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import NamedTuple

import xxhash
from transformers import PreTrainedTokenizerBase

from qat.config import fingerprint
from qat.data.sources import sampled_parts
from qat.data.text import tokenizer_hash
from qat.errors import ConfigError, DataError
from qat.extensions.decode.config import SampleConfig, SampleSettings, sampled_facts
from qat.extensions.decode.prompts import Prompt, open_prompts, row_text
from qat.extensions.decode.slots import Batch, Request, open_sampler
from qat.files import held, parse_json, partial_file, whole_file, write_atomically
from qat.generate.sampling import Sampling
from qat.generate.text import closing_tokens
from qat.logs import progress
from qat.models.language_model import LanguageModel
from qat.models.load import load_teacher, load_tokenizer, model_identity
from qat.ranks import ALONE, Ranks

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the metadata in a row."""
SETTINGS = "settings.json"
"""File in the directory of the shards with the settings that decide their rows."""
TOLD = ("thinking", "temperature", "top_p", "max_new_tokens", "seed")
"""Settings that are recorded in every row."""
ROWS_TELL = ("teacher", "identity", "dtype", *TOLD[1:])
"""Facts that are recorded in every row exactly as they were requested."""


class Corpus(NamedTuple):
    """The prompts and settings of a corpus, which decide the bytes of its rows."""

    prompts: list[Prompt]
    order: list[int]
    """Number of the prompt of each row, also of those that will be dropped."""
    settings: SampleSettings
    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    """Tokens that end a row."""
    longest: int
    """Length of the model's context in tokens."""
    teacher: dict[str, str]
    """Name, identity and dtype of the model."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the whole corpus, including those that will be dropped."""
        return len(self.order)

    def prompt(self, row: int) -> Prompt:
        """Return the prompt of row number `row`."""
        return self.prompts[self.order[row]]

    def request(self, row: int) -> Request:
        """Return the sampler's request for row number `row`."""
        ids = self.prompt(row).ids
        limit = min(self.settings.max_new_tokens, self.longest - len(ids))
        return Request(ids, limit, (self.settings.seed, row))

    def batch(self) -> Batch:
        """Return the batch size and the maximum lengths of a batch."""
        settings, rows = self.settings, map(self.request, range(self.num_rows))
        lengths = {(len(request.ids) + request.limit, request.limit) for request in rows}
        num_positions, max_new_tokens = (max(each) for each in zip(*lengths, strict=True))
        size = min(settings.batch_size, self.num_rows)
        sampling = Sampling(settings.temperature, settings.top_p)
        return Batch(size, num_positions, max_new_tokens, sampling, self.ends)

    def shards(self) -> list[range]:
        """Return the row numbers of each shard."""
        size, count = self.settings.shard_size, self.num_rows
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def facts(self) -> dict[str, object]:
        """Return everything that decides the bytes of the rows."""
        digest = xxhash.xxh3_64()
        sources = {prompt.source for prompt in self.prompts}
        for prompt in self.prompts:
            digest.update(json.dumps(prompt if any(sources) else prompt[:-1]).encode())
        if len(sources) > 1:
            digest.update(json.dumps(self.order).encode())
        known = self.settings.model_dump(mode="json", exclude={"prompts"})
        return {
            **self.teacher,
            **known,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "prompts": digest.hexdigest(),
            "ends": sorted(self.ends),
        }


class Sampled(NamedTuple):
    """The result of sampling a corpus."""

    rows: int
    left_out: int
    """Rows that were dropped because the model said nothing or repeated itself."""
    tokens: int
    """New tokens of the rows, including those that end them."""
    tokens_per_s: float | None
    """New tokens per second of this run, on this rank; None if nothing was sampled."""


def open_corpus(
    source: str, config: SampleConfig, ranks: Ranks = ALONE
) -> tuple[LanguageModel, Corpus]:
    """Open the model `source` and the corpus to sample from it.

    Raises:
        CheckpointError: there is no such model, or it has no tokenizer.
        ConfigError, DataError: see `qat.extensions.decode.prompts.open_prompts`.
    """

    def opened() -> tuple[LanguageModel, Corpus]:
        trust, settings = config.trust_remote_code, config.settings()
        tokenizer = load_tokenizer(source, trust_remote_code=trust)
        model = load_teacher(
            source, device=config.device, dtype=config.dtype, trust_remote_code=trust
        )
        prompts, order = open_prompts(settings, model, tokenizer)
        ends = {*closing_tokens(model, tokenizer.eos_token_id)}
        if settings.prompts is None:
            ends |= set(prompts[0].ids)  # the begin token of a next text ends this one
        teacher = {
            "teacher": source,
            "identity": model_identity(source, trust_remote_code=trust),
            "dtype": str(model.dtype).removeprefix("torch."),
        }
        about = settings, tokenizer, frozenset(ends), model.longest, teacher
        return model, Corpus(prompts, order, *about)

    return ranks.sync_errors(opened)


def write_corpus(model: LanguageModel, corpus: Corpus, out: Path, ranks: Ranks = ALONE) -> Sampled:
    """Sample the corpus from `model`, which is modified, into `out`, or resume an earlier run.

    A finished file of the same settings is kept. All ranks share one `out`; their number is free,
    and may change before a resume.

    Raises:
        ConfigError: `out`, or an unfinished run for it, belongs to other settings.
        DataError: no row holds text.
    """
    facts = corpus.facts()
    run = fingerprint(facts)
    parts = sampled_parts(out)
    ranks.check_same(rows=run)
    with ExitStack() as stack:
        lock = held(out) if ranks.is_first else nullcontext()
        ranks.sync_errors(lambda: stack.enter_context(lock))
        is_done = ranks.sync_errors(lambda: ranks.is_first and _is_done(out, facts, run))
        if ranks.texts(str(is_done))[0] == "True":
            logger.info("%s is complete already: nothing to do", out)
            return _summary(out, corpus.num_rows, None)
        ranks.sync_errors(lambda: _begin(parts, facts) if ranks.is_first else None)
        speed = ranks.sync_errors(
            lambda: _sample_shards(model, corpus, parts, run=run, ranks=ranks)
        )
        # all ranks end together, and raise the first rank's error if it has one
        ranks.sync_errors(lambda: _join(corpus, parts, out, run) if ranks.is_first else None)
        return _summary(out, corpus.num_rows, speed)


def variety(text: str) -> float:
    """Return a text's compressed over its plain size: near 0 if repetitive, above 1 for a word."""
    found = text.encode()
    return len(zlib.compress(found)) / len(found)


def _is_done(out: Path, facts: dict[str, object], run: str) -> bool:
    """Return whether `out` is a complete corpus of these settings.

    Raises:
        ConfigError: `out` is another file, or has other settings.
    """
    old = sampled_facts(out)
    if old is None:
        return False
    if old["run"] == run:
        return True
    # a row's own `format` and `thinking` have another meaning than the settings
    told = {name: old.get(name, facts[name]) for name in ROWS_TELL}
    raise ConfigError(
        f"out={out} holds rows of other prompts or settings{_differences(told, facts)}; choose "
        "another --out or remove it"
    )


def _begin(parts: Path, facts: dict[str, object]) -> None:
    """Create the directory of the shards, or check that the existing one has the same settings."""
    path = parts / SETTINGS
    if not path.exists():
        parts.mkdir(exist_ok=True)
        write_atomically(path, json.dumps(facts))
        return
    try:
        old = parse_json(path.read_bytes())
    except ValueError:
        old = None
    if old != facts:
        said = _differences(old, facts) if isinstance(old, dict) else ""
        raise ConfigError(
            f"{parts} holds a corpus that was begun with other settings{said}; go on with those, "
            "choose another --out or remove that folder"
        )


def _differences(old: dict[str, object], new: dict[str, object]) -> str:
    """Describe the settings that two corpora both record and that differ."""
    names = [name for name in new if name in old and old[name] != new[name]]
    pairs = "; ".join(f"{name}={old[name]}, now asked for {name}={new[name]}" for name in names)
    return f" ({pairs})" if pairs else ""


def _sample_shards(
    model: LanguageModel, corpus: Corpus, parts: Path, *, run: str, ranks: Ranks
) -> float | None:
    """Sample this rank's missing shards; return new tokens per second, None without any.

    The seconds are those of the sampling, from the first request to the end of the last row.
    """
    mine = list(enumerate(corpus.shards()))[ranks.rank :: ranks.size]
    missing = [(number, rows) for number, rows in mine if rows_in(parts, number, run) is None]
    if not missing:
        return None
    sampler = open_sampler(model, corpus.batch())
    done = sum(len(rows) for _, rows in mine) - sum(len(rows) for _, rows in missing)
    num_tokens = 0
    with (
        progress("sampling", corpus.num_rows, "rows", done=done * ranks.size) as ticker,
        ThreadPoolExecutor(1) as writer,
    ):
        # a background thread decodes and writes a shard while the next ones are sampled
        written: Future[None] = Future()
        written.set_result(None)
        unfinished: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)
        began = time.perf_counter()
        requests = (corpus.request(row) for _, rows in missing for row in rows)
        for place, ids in sampler.sample(requests):
            num_tokens += len(ids)
            ticker.advance(ranks.size)
            # all shards but a last one have this size
            index, within = divmod(place, corpus.settings.shard_size)
            number, rows = missing[index]
            unfinished[number][rows[within]] = ids
            if len(unfinished[number]) == len(rows):
                written.result()
                said, path = unfinished.pop(number), _shard(parts, number)
                written = writer.submit(_write_shard, corpus, said, path=path, run=run)
        seconds = time.perf_counter() - began
        written.result()
    return round(num_tokens / seconds, 1)


def _shard(parts: Path, number: int) -> Path:
    return parts / f"{number:06d}.jsonl"


def _write_shard(corpus: Corpus, said: Mapping[int, list[int]], *, path: Path, run: str) -> None:
    """Write a shard of these rows, given as the new tokens of each row number."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in _written_rows(corpus, said, run))
    content = "".join(lines).encode()
    write_atomically(path, _head(path, run, content) + content)


def _head(path: Path, run: str, content: bytes) -> bytes:
    """Return the first line of a shard, with the hash that a resumed run checks."""
    sha256 = hashlib.sha256(content).hexdigest()
    return json.dumps({"shard": path.name, "run": run, "sha256": sha256}).encode() + b"\n"


def rows_in(parts: Path, number: int, run: str) -> bytes | None:
    """Return the lines of an intact shard; None if it has to be sampled."""
    path = _shard(parts, number)
    if not path.exists():
        return None
    head, _, content = path.read_bytes().partition(b"\n")
    if head + b"\n" == _head(path, run, content):
        return content
    logger.warning("%s was changed since it was written: its rows are sampled again", path)
    return None


def _written_rows(
    corpus: Corpus, said: Mapping[int, list[int]], run: str
) -> Iterator[dict[str, object]]:
    """Yield the rows as they are written, in their order, without those that are dropped."""
    settings = corpus.settings.model_dump(mode="json", include={*TOLD})
    for number, ids in sorted(said.items()):
        prompt, is_ended = corpus.prompt(number), ids[-1] in corpus.ends
        row, answer = row_text(prompt, ids[:-1] if is_ended else ids, corpus.tokenizer)
        if not answer.strip() or variety(answer) < corpus.settings.least_variety:
            continue
        of_row = {"thinking": prompt.mode, "row": number, "tokens": len(ids), "ended": is_ended}
        of_row |= {"source": prompt.source} if prompt.source else {}
        about = {"format": FORMAT, "run": run, **corpus.teacher, **settings, **of_row}
        yield {**row, "sampled": about}


def _join(corpus: Corpus, parts: Path, out: Path, run: str) -> None:
    """Concatenate all shards into `out` and delete them."""
    count = len(corpus.shards())
    with whole_file(out, partial_file(out)) as file:
        for number in range(count):
            content = rows_in(parts, number, run)
            if content is None:
                raise ConfigError(
                    f"{parts} lacks shard {number} of {count}, expected a folder that all ranks "
                    "see; choose such an --out, or run the same command again"
                )
            file.write(content)
        if file.tell() == 0:
            _remove(parts, count)
            raise DataError(
                f"none of {corpus.num_rows} rows holds a text that is not left out, expected some; "
                "lower --least-variety, or look at what the model answers with 'qat generate'"
            )
    _remove(parts, count)


def _remove(parts: Path, count: int) -> None:
    """Delete the files that a run wrote to the directory of shards, and the directory if empty."""
    for path in (*(_shard(parts, number) for number in range(count)), parts / SETTINGS):
        path.unlink(missing_ok=True)
        partial_file(path).unlink(missing_ok=True)
    try:
        parts.rmdir()
    except OSError:
        logger.info("%s stays: it holds files that qat did not write", parts)


def _summary(out: Path, num_rows: int, speed: float | None) -> Sampled:
    with out.open(encoding="utf-8") as file:
        counts = [parse_json(line)["sampled"]["tokens"] for line in file]
    return Sampled(len(counts), num_rows - len(counts), sum(counts), speed)
