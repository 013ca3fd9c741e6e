"""Measure the speedup of several GPUs of one host over one GPU, at a fixed batch on each.

One launch measures both: the first rank alone, while the others wait on the host, and all together,
in turns. Training takes steps of frozen codes (scales and codebooks learn) over random batches that
lie on the host, with every exchange of a real run; reading a cache is not in it. Cache building is
the whole `build_cache`, from text to a complete manifest: as many whole shards for every rank, as
in a long build but for a remainder, and each rank says what it waited for. Weights are random: time
does not depend on them.

A student whose latent weights fill a GPU is trained by one rank that holds them whole and by all
ranks that hold their rows, in turns.

torchrun --standalone --nproc-per-node 2 speedrun/measure_ranks.py train --figures F
torchrun --standalone --nproc-per-node 2 speedrun/measure_ranks.py latent --figures F
torchrun --standalone --nproc-per-node 4 speedrun/measure_ranks.py cache --tokenizer DIR --text FILE
    --figures F
"""

import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path

import torch
from cyclopts import App
from speed_case import EXACT, FROZEN, LATENT, Figure, record_median, settled
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from qat.backend.base import Backend
from qat.backend.device import select
from qat.data.build import build_cache
from qat.data.cache import TeacherInfo
from qat.data.config import CacheSettings
from qat.data.documents import Document
from qat.data.packing import Batch
from qat.data.sources import open_source as open_text
from qat.extensions.bench.batches import open_source
from qat.extensions.bench.config import MeasureConfig, shape_called
from qat.extensions.bench.measure import Timing, time_steps
from qat.extensions.bench.student import Ours, open_student
from qat.logs import configure
from qat.models.language_model import LanguageModel
from qat.models.regions import Regions
from qat.ranks import ALONE, Ranks, joined
from qat.train.step import EAGER_STEPS

app = App(help=__doc__)
NAMES = {
    "gpu": "{}_gpu_speedup",
    "cache": "cache_{}_gpu_speedup",
    "latent": "{}_gpu_8b_speedup",
}
NUMBERS = {2: "two", 4: "four"}
GOALS = {"gpu": {2: 1.9, 4: 3.7}, "cache": {4: 3.9}, "latent": {2: 1.9}}
WARMUP = EAGER_STEPS + 1


@app.command
def train(  # noqa: PLR0917
    *,
    figures: Path,
    shape: str = "qwen3-0.6b",
    device: str = "auto",
    batch_size: int = 512,
    seq_len: int = 64,
    steps: int = 15,
    rounds: int = 4,
) -> None:
    """Append `two_gpu_speedup` or `four_gpu_speedup` to FIGURES.

    Parameters
    ----------
    batch_size
        Of each rank.
    """
    configure()
    with joined(device) as ranks:
        values = FROZEN | EXACT | {"batch_size": batch_size, "seq_len": seq_len}
        config = settled(device=device, seed=ranks.rank, **values)
        backend = select(device)
        student = open_student(shape, config)
        ours = Ours(student, config)
        made = open_source(config, student).batch(batch_size, 0, backend)
        batches = [Batch(*map(backend.pinned, made))]
        ours.optimizer.ranks = ranks
        take_step = ours.subject()

        def stretch(among: Ranks) -> float:
            """Tokens per second of `steps` steps."""
            ours.optimizer.ranks = among
            backend.synchronize()
            began = time.perf_counter()
            for step in range(steps):
                result = take_step(batches, step)
            backend.synchronize()
            return steps * result.positions / (time.perf_counter() - began)

        before = ranks.bytes_moved
        stretch(ranks)  # compiles, records
        moved = (ranks.bytes_moved - before) / steps
        alone, together = in_turns(stretch, ranks, rounds)
        take_step.close()
        if ranks.is_first:
            learnable = sum(p.numel() for p in ours.optimizer.parameters.values())
            print(f"{learnable:,} numbers learn; a step sums {moved / 2**20:.1f} MiB of each rank")
            report("gpu", alone, together, size=ranks.size, figures=figures)


@app.command
def cache(
    *,
    tokenizer: Path,
    text: str,
    figures: Path,
    scratch: Path | None = None,
    shape: str = "qwen3-0.6b",
    device: str = "auto",
    shards: int = 192,
    rounds: int = 1,
) -> None:
    """Append `cache_four_gpu_speedup` to FIGURES; a build of one shard a rank comes first.

    Parameters
    ----------
    text
        Anything that `qat cache --data` takes; repeated until it fills all shards.
    scratch
        Where the caches lie until they are deleted.
    shards
        Of each rank where all build, 65,536 tokens each; one alone builds as many in all.
    """
    configure()
    logging.getLogger(build_cache.__module__).setLevel(logging.DEBUG)
    with joined(device) as ranks:
        words = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        teacher, info = random_teacher(shape, len(words), select(device))
        settings = CacheSettings(data=text, sequence_length=64, held_out=0)

        def build(among: Ranks, shards: int = shards) -> float:
            """Tokens per second of a whole build."""
            count = ranks.size * shards * settings.shard_size
            with tempfile.TemporaryDirectory(dir=scratch) as mine:
                place = Path(among.texts(mine)[0], "cache")
                began = time.perf_counter()
                manifest = build_cache(
                    settings.model_copy(update={"num_sequences": count}),
                    tokenizer=words,
                    teacher=teacher,
                    info=info,
                    documents=documents(text),
                    out=place,
                    ranks=among,
                )
                seconds = time.perf_counter() - began
                among.wait()
                return manifest.total("tokens") / seconds

        build(ranks, 1)  # compiles
        alone, together = in_turns(build, ranks, rounds)
        if ranks.is_first:
            report("cache", alone, together, size=ranks.size, figures=figures)


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
    Regions(model, is_compiled=backend.compiles, recompute_every=None).install()
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
    return chain.from_iterable(repeat(list(open_text(text).documents)))


@app.command
def latent(  # noqa: PLR0917
    *,
    figures: Path,
    shape: str = "qwen3-8b",
    device: str = "auto",
    batch_size: int = 32,
    seq_len: int = 512,
    steps: int = 5,
    rounds: int = 2,
    form: str = "auto",
) -> None:
    """Append `two_gpu_8b_speedup` to FIGURES: all ranks with sharded latent weights over one rank.

    Both recompute layers. Each turn makes the student anew, as both together fit no GPU.

    Parameters
    ----------
    batch_size
        Of each rank.
    form
        How both form weights: all at once, by layer, or as each finds room.
    """
    configure()
    with joined(device) as ranks:
        values = LATENT | EXACT | {"batch_size": batch_size, "seq_len": seq_len, "steps": steps}
        values |= {"latent_dtype": "bf16", "form": form, "gradient_checkpointing": True}
        config = settled(device=device, **values)

        def turn(among: Ranks) -> float:
            """Tokens per second of all steps."""
            return timed(shape, config, among).tokens_per_s

        alone, together = in_turns(turn, ranks, rounds)
        if ranks.is_first:
            report("latent", alone, together, size=ranks.size, figures=figures)


def timed(shape: str, config: MeasureConfig, ranks: Ranks) -> Timing:
    """Steps of a student that is made for them, over batches of each rank's own.

    Several ranks shard the latent weights.
    """
    backend = select(config.device)
    student = open_student(shape, config)
    ours = Ours(student, config, ranks=ranks, is_sharded=ranks.size > 1)
    made = open_source(config, student).batch(config.batch_size, ranks.rank, backend)
    lessons = enumerate(repeat([Batch(*map(backend.pinned, made))]))
    take_step = ours.subject()
    backend.free_memory()
    timing = time_steps(take_step, lessons, backend, warmup=WARMUP, steps=config.steps)
    take_step.close()
    del student, ours, take_step
    backend.free_memory()
    return timing


def in_turns(
    run: Callable[[Ranks], float], ranks: Ranks, rounds: int
) -> tuple[list[float], list[float]]:
    """Return the results of `run` on the first rank alone and on all ranks, `rounds` each.

    All ranks go first: where a run compiles, they do so at the same time.
    """
    alone, together = [], []
    for _ in range(rounds):
        together.append(run(ranks))
        ranks.wait()
        if ranks.is_first:
            alone.append(run(ALONE))
        ranks.wait()
    return alone, together


def report(
    kind: str, alone: list[float], together: list[float], *, size: int, figures: Path
) -> None:
    """Print both speeds and append how many times as fast `size` ranks are as one.

    Raises:
        SystemExit: no figure is asked for of that many.
    """
    one, all_ = statistics.median(alone), statistics.median(together)
    print(f"1 rank: {one:,.0f} tokens/s; {size} ranks: {all_:,.0f} tokens/s")
    ratios = [many / single for many, single in zip(together, alone, strict=True)]
    if size not in NUMBERS:
        value = statistics.median(ratios)
        raise SystemExit(f"{value:.3f} x one rank; figures are asked for of 2 and 4 only")
    goal = f">= {GOALS[kind][size]}" if size in GOALS[kind] else ""
    figure = Figure(NAMES[kind].format(NUMBERS[size]), "x of one", goal)
    record_median(figures, figure, ratios, digits=3)


if __name__ == "__main__":
    app()
