"""How fast a teacher cache is built, and what extraction adds to the teacher's bare forward.

The teacher has a published shape and random weights; its time does not depend on them. Tokenizer
and text are real. One batch after another, a bare forward (hidden states, then logits in chunks,
thrown away) takes turns with the same forward and extraction. The build is the whole `build_cache`,
from text to a complete manifest, after a build of one shard outside the clock that compiles.

python speedrun/measure_cache_speed.py --tokenizer DIR --text FILE --figures figures.jsonl
python speedrun/measure_cache_speed.py head --figures figures.jsonl
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import torch
from cyclopts import App
from figures import record
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from qat.backend.base import Backend
from qat.backend.device import select
from qat.bench.config import shape_called
from qat.data.build import build_cache
from qat.data.cache import TeacherInfo
from qat.data.codec import Request, ask, encode_top_k
from qat.data.config import CacheSettings
from qat.data.packing import position_ids
from qat.data.shard import AskPlan, make_plan
from qat.data.sources import Document, open_source
from qat.data.stream import blocks
from qat.kernels.topk import summarize, top_k_of_blocks
from qat.models.language_model import LanguageModel
from qat.models.regions import Regions

app = App(help=__doc__)
ROUNDS = 20  # batches of each kind, bare and with extraction
WARM_UP = 3


@app.default
def measure(
    *,
    tokenizer: Path,
    text: str,
    figures: Path,
    shape: str = "qwen3-0.6b",
    device: str = "auto",
    tokens: int = 5_000_000,
    length: int = 64,
    top_k: int = 64,
) -> None:
    """Append `cache_tok_s` and `cache_extraction_percent` to FIGURES.

    Parameters
    ----------
    text
        Anything that `qat cache --data` takes; repeated until TOKENS tokens are there.
    """
    backend = select(device)
    words = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    teacher, info = random_teacher(shape, len(words), backend)
    settings = CacheSettings(
        data=text, sequence_length=length, top_k=top_k, num_sequences=tokens // length
    )
    plan = make_plan(teacher, settings, info.vocab_size)
    ids, positions = one_batch(settings, words, plan, backend)
    bare_ms, asked_ms = compare(plan, ids, positions, backend)
    percent = 100 * (asked_ms / bare_ms - 1)
    batch_tokens = ids.numel()
    print(f"{batch_tokens} tokens: bare {bare_ms:.2f} ms, with extraction {asked_ms:.2f} ms")
    print(stages(plan, ids, positions, backend))
    build(settings.model_copy(update={"num_sequences": settings.shard_size}), words, teacher, info)
    tok_s = build(settings, words, teacher, info)
    print(f"whole build: {tok_s:,.0f} tokens/s; bare {1e3 * batch_tokens / bare_ms:,.0f} tokens/s")
    record(figures, "cache_tok_s", round(tok_s), "tokens/s", ">= 350000")
    record(
        figures, "cache_extraction_percent", round(percent, 2), "% of the bare forward", "<= 15",
        runs=ROUNDS,
    )  # fmt: skip


@app.command
def head(
    *, figures: Path, shape: str = "qwen3-0.6b", device: str = "auto", length: int = 64
) -> None:
    """Append `cache_exact_head_percent`: what logits in float32 add to asking the teacher.

    The head's logits as they are, and rounded to the teacher's dtype as by its own module, take
    turns in one process: the top 64 of a batch, body and all. It needs neither text nor tokenizer.
    """
    backend = select(device)
    teacher, info = random_teacher(shape, 0, backend)
    plan = make_plan(teacher, CacheSettings(data="none", sequence_length=length), info.vocab_size)
    ids = backend.pinned(torch.randint(info.vocab_size, (plan.batch_size, length)))
    positions = backend.pinned(torch.arange(length).expand(plan.batch_size, -1).contiguous())
    request = Request(64, 0, plan.chunk, stream=0)
    exact, ratios = teacher.logits, []
    for number in range(ROUNDS + WARM_UP):
        ms = []
        for logits in (teacher.head, exact) if number % 2 else (exact, teacher.head):
            teacher.logits = logits
            run = partial(ask, teacher, ids, positions, request=request, first_place=0)
            ms.append(milliseconds(run, backend))
        rounded_ms, exact_ms = ms if number % 2 else reversed(ms)
        if number >= WARM_UP:
            ratios.append(exact_ms / rounded_ms)
            print(f"{ids.numel()} tokens: rounded {rounded_ms:.2f} ms, exact {exact_ms:.2f} ms")
    percent = 100 * (statistics.median(ratios) - 1)
    print(f"logits in float32 add {percent:.2f} %")
    record(
        figures, "cache_exact_head_percent", round(percent, 2), "% of rounded logits", "<= 1",
        runs=ROUNDS,
    )  # fmt: skip


def random_teacher(
    shape: str, num_words: int, backend: Backend
) -> tuple[LanguageModel, TeacherInfo]:
    """A teacher of a published shape, compiled where `qat cache` would compile it."""
    sizes = shape_called(shape)
    config = AutoConfig.for_model(**{**sizes, "vocab_size": max(num_words, sizes["vocab_size"])})
    torch.manual_seed(0)
    with backend.device:
        model = AutoModelForCausalLM.from_config(config, dtype=backend.dtype("auto")).eval()
    teacher = LanguageModel(model)
    Regions(model, is_compiled=backend.compiles(), recompute_every=None).install()
    info = TeacherInfo(
        name=f"random {shape}",
        identity="0" * 32,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    return teacher, info


def documents(text: str) -> Iterator[Document]:
    """The documents of the text, over and over."""
    return chain.from_iterable(repeat(list(open_source(text).documents)))


def one_batch(
    settings: CacheSettings, words: PreTrainedTokenizerBase, plan: AskPlan, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Tokens and positions of a batch of the text, pinned on the host."""
    packed = next(blocks(documents(settings.data), words, settings)).packed
    ids = torch.from_numpy(packed.tokens[: plan.batch_size]).long()
    positions = position_ids(torch.from_numpy(packed.starts[: plan.batch_size]))
    return backend.pinned(ids), backend.pinned(positions)


def compare(plan: AskPlan, ids: Tensor, positions: Tensor, backend: Backend) -> tuple[float, float]:
    """Median milliseconds of a bare batch and of one with extraction, taking turns."""
    settings = plan.settings
    request = Request(settings.top_k, 0, plan.chunk, stream=0)

    def bare() -> None:
        for hidden_TD in hidden_chunks(plan, ids, positions, backend):
            plan.teacher.logits(hidden_TD)

    def asked() -> None:
        ask(
            plan.teacher,
            hidden_states(plan, ids, positions, backend),
            ids,
            request=request,
            first_place=0,
        )

    times_ms: dict[Callable[[], None], list[float]] = {bare: [], asked: []}
    for number in range(ROUNDS + WARM_UP):
        for run, times in times_ms.items():
            ms = milliseconds(run, backend)
            if number >= WARM_UP:
                times.append(ms)
    return statistics.median(times_ms[bare]), statistics.median(times_ms[asked])


@torch.no_grad()
def milliseconds(run: Callable[[], object], backend: Backend) -> float:
    """Device time of one call, launches included."""
    backend.synchronize()
    first = backend.mark()
    run()
    return 1e3 * backend.seconds_between(first, backend.mark())


def hidden_states(plan: AskPlan, ids: Tensor, positions: Tensor, backend: Backend) -> Tensor:
    """The batch's hidden states, `(B, S, D)`."""
    (hidden,) = plan.teacher.hidden_of([(backend.to_device(ids), backend.to_device(positions))])
    return hidden


def hidden_chunks(
    plan: AskPlan, ids: Tensor, positions: Tensor, backend: Backend
) -> tuple[Tensor, ...]:
    """The same in the chunks that logits are formed from."""
    return hidden_states(plan, ids, positions, backend).flatten(0, 1).split(plan.chunk)


@torch.no_grad()
def stages(plan: AskPlan, ids: Tensor, positions: Tensor, backend: Backend) -> str:
    """Where the time of one chunk goes, in words."""
    hidden = hidden_states(plan, ids, positions, backend)
    hidden_TD = hidden.flatten(0, 1).split(plan.chunk)[0]
    logits = plan.teacher.logits(hidden_TD)
    found = summarize(logits)
    k = plan.settings.top_k
    request = Request(k, 0, plan.chunk, stream=0)
    top = ask(plan.teacher, hidden, ids, request=request, first_place=0).top
    runs = {
        "head": lambda: plan.teacher.logits(hidden_TD),
        "summarize": lambda: summarize(logits),
        "select": lambda: top_k_of_blocks(logits, k, found),
    }
    medians = {
        name: statistics.median(milliseconds(run, backend) for _ in range(5))
        for name, run in runs.items()
    }
    parts = ", ".join(f"{name} {ms:.2f} ms" for name, ms in medians.items())
    encode_ms = statistics.median(
        milliseconds(lambda: encode_top_k(top, len(ids), plan.vocab_size), backend)
        for _ in range(5)
    )
    return f"a chunk of {len(hidden_TD)} tokens: {parts}; encoding the batch {encode_ms:.2f} ms"


def build(
    settings: CacheSettings,
    words: PreTrainedTokenizerBase,
    teacher: LanguageModel,
    info: TeacherInfo,
) -> float:
    """Tokens per second of a whole build, both splits, without padding."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        manifest = build_cache(
            settings,
            tokenizer=words,
            teacher=teacher,
            info=info,
            documents=documents(settings.data),
            out=Path(folder, "cache"),
        )
        return manifest.total("tokens") / (time.perf_counter() - began)


if __name__ == "__main__":
    app()
