"""`qat bench gguf`: the distance of GGUF files from their float teacher against their size.

All files, the teacher's too, run in llama.cpp. The numbers are those of llama.cpp's own
`llama-perplexity --kl-divergence`, over the same positions of the same contexts; but the teacher's
logits are kept in float32, where that program rounds log-probabilities to 16 bits.

Shapes: N tokens of a context, T positions that are judged, V vocabulary.
"""

import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import numpy as np
import torch
from matplotlib.axes import Axes

from qat.backend.device import select
from qat.data.packing import NO_LABEL
from qat.data.reader import TeacherCache
from qat.data.sources import whole_text
from qat.errors import CacheError, ConfigError, DataError
from qat.evaluate.judge import split_batches
from qat.extensions.bench.measure import Row
from qat.extensions.bench.results import Results, environment
from qat.extensions.lab.config import GgufConfig
from qat.extensions.lab.llamacpp import Engine, LlamaCpp, runs_on_gpu
from qat.extensions.lab.positions import CHUNK, Context, Judged, Position, text_contexts
from qat.extensions.targets import gguf
from qat.files import write_atomically
from qat.logs import progress
from qat.models.gguf_header import read_header, read_metadata
from qat.models.load import load_model, load_tokenizer
from qat.models.opening import read_config
from qat.observe.charts import SERIES, Chart, fit_scale

logger = logging.getLogger(__name__)

FLOATS = {"F32", "F16", "BF16"}
PICTURE = "kl_per_mb"
NAME_POINTS, LETTER_POINTS = 9.5, 5.0
"""Height of a name in the picture, and width of its letters, in points."""
RISE = 4.0
"""Points from a dot up to its name."""
OURS, OTHER = "file", "against"
"""The kinds of rows: files that are judged, and those that they are judged against."""
LABELS = {OURS: "files", OTHER: "--against"}
"""Their names in the picture."""


@dataclass(frozen=True)
class GgufReport:
    """The results of all files, for printing."""

    path: Path
    rows: list[Row]  # of `against`, then of the files, each in the given order

    @property
    def ratios(self) -> dict[str, float]:
        """Return the KL of each file over that of the best at no more MB, by the file's name."""
        return {row["case"]: row["over_best"] for row in self.rows if "over_best" in row}


def run_gguf(
    config: GgufConfig,
    teacher: str,
    files: Sequence[Path],
    against: Sequence[Path] = (),
    *,
    out: Path | None = None,
    open_file: Callable[[Path, int], Engine] = LlamaCpp,
) -> GgufReport:
    """Judge `files` and those they are compared with by their distance from the teacher.

    One model is in memory at a time. The teacher's logits, 4 bytes for each word of the vocabulary
    and judged position, are on the disk of `out` meanwhile.

    Raises:
        CheckpointError: a file is damaged, llama.cpp does not open it, or there is no such teacher.
        ConfigError: llama.cpp or a tokenizer is missing, vocabularies differ, a context is too
            long for the teacher, or the disk is full.
        DataError: the text is too short.
        CacheError: the cache has no held-out rows, or another vocabulary.
    """
    is_gpu = open_file is LlamaCpp and runs_on_gpu()
    backend = select("auto" if is_gpu else "cpu")
    names = dict(zip([*against, *files], case_names([*against, *files]), strict=True))
    described = {path: describe(path) for path in names}  # damaged ones, before the teacher runs
    if config.text is not None:
        whole_text(config.text)  # likewise
    longest = _longest(config)
    with Results(out, environment(backend, config)) as results:
        results.path.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=results.path) as folder:
            floats = float_file(teacher, Path(folder))
            _check_positions(config, floats)
            engine = open_file(floats, longest)
            try:
                contexts = read_contexts(config, engine, floats)
                logits = teacher_logits(engine, contexts, results.path)
            finally:
                engine.close()
        rows: list[Row] = []
        for kind, group in ((OTHER, against), (OURS, files)):
            for path in group:
                row = {"kind": kind, "case": names[path], "file": str(path), **described[path]}
                found = judge(partial(open_file, path, longest), path, contexts, logits)
                row |= found._asdict()
                if kind == OURS and (best := best_at(row["megabytes"], rows)) is not None:
                    row |= {"best": best["case"], "over_best": row["kl_nats"] / best["kl_nats"]}
                results.add(**row)
                rows.append(row)
                logger.info(
                    "%s: KL %.4g nats, %.1f MB", row["case"], found.kl_nats, row["megabytes"]
                )
        report = GgufReport(results.path, rows)
        results.finish(teacher=teacher, ratios=report.ratios)
    figure = chart(rows)
    for form in ("svg", "png"):
        write_atomically(report.path / f"{PICTURE}.{form}", figure.render(form))
    return report


def best_at(megabytes: float, rows: Sequence[Row]) -> Row | None:
    """Return the row of `OTHER` with the least KL among those of no more MB; None without any.

    If all are larger, it is the smallest: with its additional MB the comparison errs in its favour.
    The teacher itself, at a KL of 0, does not count.
    """
    others = [row for row in rows if row["kind"] == OTHER and row["kl_nats"] > 0]
    if not others:
        return None
    limit = max(megabytes, min(row["megabytes"] for row in others))
    return min((r for r in others if r["megabytes"] <= limit), key=lambda row: row["kl_nats"])


def case_names(paths: Sequence[Path]) -> list[str]:
    """Return a short name of each file: its stem, or its directory if exports are all named alike.

    Raises:
        ConfigError: a file is named twice.
    """
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is named twice, expected each file once; drop one of them")
    found = [_export_name(path.absolute()) for path in paths]
    return found if len(set(found)) == len(found) else [str(path) for path in paths]


def _export_name(path: Path) -> str:
    if path.name != gguf.FILE_NAME:
        return path.stem
    is_of_run = path.parts[-3:-1] == ("export", "gguf")
    return path.parents[2 if is_of_run else 0].name


def describe(path: Path) -> Row:
    """Return the size of a file: MB, bits over all weights, and the share of weights by type."""
    weights: Counter[str] = Counter()
    bits = 0.0
    for tensor in read_header(path).values():
        count = math.prod(tensor.shape)
        weights[tensor.type] += count
        bits += count * tensor.bits
    total = weights.total()
    return {
        "megabytes": path.stat().st_size / 1e6,
        "bits_per_weight": bits / total,
        "types": {name: round(count / total, 4) for name, count in weights.most_common()},
    }


def float_file(teacher: str, directory: Path) -> Path:
    """Return a GGUF file of the teacher's float weights; written to `directory` if there is none.

    A GGUF file of floats is used as it is. One of quantized weights is dequantized as the teacher
    of a student is: in llama.cpp quantized weights would be multiplied by rounded activations.

    Raises:
        CheckpointError: there is no such model.
        ExportError: its architecture cannot be written.
    """
    path = Path(teacher)
    if path.is_file() and {tensor.type for tensor in read_header(path).values()} <= FLOATS:
        return path
    logger.info("writing the teacher's weights as floats to %s", directory / gguf.FILE_NAME)
    model = load_model(teacher, device="cpu", dtype="fp32").model
    gguf.check(model)
    gguf.write(model, load_tokenizer(teacher), directory)
    return directory / gguf.FILE_NAME


def _longest(config: GgufConfig) -> int:
    if config.cache_dir is None:
        return config.context
    return TeacherCache.open(config.cache_dir).manifest.settings.sequence_length


def _check_positions(config: GgufConfig, path: Path) -> None:
    """Refuse contexts of a text that the teacher, the GGUF file at `path`, has no positions for."""
    limit = getattr(read_config(str(path)), "max_position_embeddings", config.context)
    if config.text is not None and config.context > limit:
        raise ConfigError(
            f"context={config.context}, but the teacher has positions for {limit} tokens; use "
            f"--context {limit} or less"
        )


def read_contexts(config: GgufConfig, teacher: Engine, path: Path) -> list[Context]:
    """Return the contexts of the text, or of the cache's held-out rows.

    `path` is the teacher's file.
    """
    if config.cache_dir is not None:
        cache = TeacherCache.open(config.cache_dir)
        words = cache.manifest.teacher.vocab_size
        if words != teacher.vocab_size:
            raise CacheError(
                f"cache_dir={config.cache_dir} is for a vocabulary of {words}, but {path} has "
                f"{teacher.vocab_size} words, expected one model; choose the teacher's cache"
            )
        return list(cache_contexts(cache, config.contexts))
    fields = read_metadata(path)
    if "tokenizer.ggml.tokens" not in fields:
        raise ConfigError(
            f"{path} holds no tokenizer, expected one for text={config.text}; give token ids: "
            "--cache-dir CACHE"
        )
    tokens = teacher.tokens(whole_text(config.text))
    found = list(text_contexts(tokens, teacher.begin_token(), config.context))
    if not found:
        raise DataError(
            f"text={config.text} holds {len(tokens)} tokens, expected context={config.context} or "
            "more; give a longer text or a smaller --context"
        )
    return found[: config.contexts or None]


def cache_contexts(cache: TeacherCache, count: int) -> Iterator[Context]:
    """Yield the documents in the first `count` held-out rows (0: all), each as a context.

    Judged are the positions that count in a loss.
    """
    for batch in chain.from_iterable(split_batches(cache, "held_out", 1, count).values()):
        ids, labels = batch.input_ids[0], batch.labels[0]
        counts = batch.mask[0] & (labels != NO_LABEL)
        starts = [*(batch.position_ids[0] == 0).nonzero()[:, 0].tolist(), len(ids)]
        for begin, end in zip(starts, starts[1:], strict=False):
            places = counts[begin:end].nonzero()[:, 0]
            if len(places):
                inside = ids[begin : begin + int(places[-1]) + 1]  # padding follows
                yield Context(inside.tolist(), places, labels[begin:end][places])


def teacher_logits(engine: Engine, contexts: Sequence[Context], directory: Path) -> np.memmap:
    """Return the teacher's logits at all judged positions, `(T, V)` float32, in a temporary file.

    Raises:
        ConfigError: the disk has no room.
    """
    shape = sum(len(each.places) for each in contexts), engine.vocab_size
    octets, free = 4 * math.prod(shape), shutil.disk_usage(directory).free
    if octets > free:
        raise ConfigError(
            f"out={directory} has {free / 1e9:.1f} GB free, expected {octets / 1e9:.1f} for the "
            "teacher's logits; choose fewer --contexts or another --out"
        )
    # deleted with its last user; not in the system's folder, which may be in memory
    with TemporaryFile(dir=directory) as file:
        kept = np.memmap(file, np.float32, "w+", shape=shape)
    at = 0
    with progress("running the teacher", len(contexts), "contexts") as ticker:
        for each in contexts:
            kept[at : at + len(each.places)] = engine.logits(each.ids)[each.places].numpy()
            at += len(each.places)
            ticker.advance(1)
    return kept


def judge(
    open_file: Callable[[], Engine], path: Path, contexts: Sequence[Context], teacher: np.ndarray
) -> Judged:
    """Compare a file with the teacher's logits `(T, V)` at all judged positions.

    Raises:
        ConfigError: the vocabularies differ.
    """
    engine, found, at = open_file(), [], 0
    try:
        if engine.vocab_size != teacher.shape[1]:
            raise ConfigError(
                f"{path} has {engine.vocab_size} words and the teacher {teacher.shape[1]}, "
                "expected the same; give the teacher that this file came from"
            )
        with progress(f"running {path.name}", len(contexts), "contexts") as ticker:
            for each in contexts:
                logits = engine.logits(each.ids)
                rows = zip(each.places.split(CHUNK), each.labels.split(CHUNK), strict=True)
                for places, labels in rows:
                    theirs = torch.from_numpy(np.array(teacher[at : at + len(places)]))
                    found.append(Position.of(logits[places], theirs, labels))
                    at += len(places)
                ticker.advance(1)
    finally:
        engine.close()
    return Judged.of(Position(*map(torch.cat, zip(*found, strict=True))))


def chart(rows: Sequence[Row]) -> Chart:
    """Chart the KL of all files against their size."""
    caption = "Down is closer to the teacher, left is smaller; all files run in llama.cpp."
    return Chart(PICTURE, "KL per megabyte", caption, partial(_paint, rows))


def _paint(rows: Sequence[Row], axes: Axes) -> None:
    dots: dict[tuple[float, float], tuple[str, list[str]]] = {}  # equal files share a dot
    for kind, color in zip((OURS, OTHER), SERIES, strict=False):
        line = sorted((r["megabytes"], r["kl_nats"]) for r in rows if r["kind"] == kind)
        places = zip(*line, strict=True) if line else ((), ())
        axes.plot(*places, "o-", color=color, label=LABELS[kind] if line else None)
        for row in rows:
            if row["kind"] == kind:
                dots.setdefault((row["megabytes"], row["kl_nats"]), (color, []))[1].append(
                    row["case"]
                )
    axes.set_xlabel("MB")
    axes.set_ylabel("KL, nats a token")
    fit_scale(axes.yaxis, [row["kl_nats"] for row in rows])
    axes.margins(x=0.15, y=0.1)
    if len({row["kind"] for row in rows}) > 1:
        axes.legend(loc="upper right")
    placed: list[tuple[float, float, float]] = []  # left, right and height of names, in points
    for dot in sorted(dots, key=lambda dot: -dot[1]):  # downwards, each name below those above it
        left, height = 72 / axes.figure.dpi * axes.transData.transform(dot)
        color, names = dots[dot]
        text = ", ".join(names)
        right = left + LETTER_POINTS * len(text)
        above = [h - NAME_POINTS for a, b, h in placed if a < right and left < b]
        lowest = min([height, *above])
        placed.append((left, right, lowest))
        # above the line, which falls to the right
        place, style = (7, lowest - height + RISE), {"color": color, "fontsize": 8, "va": "center"}
        axes.annotate(text, dot, place, textcoords="offset points", **style)
