"""`qat cache`: run the teacher once and keep what the student will learn from."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from qat.cli.parser import OTHERS
from qat.config import Required
from qat.data.config import CacheConfig, ImportConfig
from qat.errors import CacheError, CheckpointError, ConfigError, HubError, QatError
from qat.files import described
from qat.hooks import hooks, load

if TYPE_CHECKING:
    from rich.table import Table

    from qat.data.cache import Manifest
    from qat.data.reader import TeacherCache
    from qat.data.sources import DataSource

CACHES = Path("caches")
META = "meta.json"  # the file that marks a cache of the reference system
SAMPLE_TOKENS = 48

cache_app = App(
    name="cache",
    help="Build, import, inspect or verify a teacher cache.",
    help_format="markdown",
    help_epilogue="Example: qat cache --teacher MODEL --data FILE --out caches/mine",
    group_parameters=OTHERS,
)


@cache_app.default
def cache(
    *, config: Annotated[CacheConfig, Parameter(name="*")], out: Path | None = None
) -> dict[str, object]:
    """Build a teacher cache; an interrupted build goes on where it stopped.

    Args:
        out: Directory to build in; by default caches/NAME, NAME saying what the cache holds.
    """
    from qat.cli.inputs import check_inputs, check_positions
    from qat.data.cache import check_place
    from qat.data.sources import check_source
    from qat.data.template import start_rendering

    try:
        check_inputs(models=[config.described_by], out=out or CACHES)
    except (CheckpointError, HubError) as error:
        if not config.is_served or config.tokenizer is not None:
            raise
        raise ConfigError(
            f"{error}; or name its tokenizer and config.json with --tokenizer, if only the server "
            "calls it so"
        ) from None
    if out is not None:
        check_place(out)
    found = check_source(config.data, config.format, config.text_field)
    if found != "plain" and config.thinking != "none":
        start_rendering()
    if not config.is_served:
        check_positions(config.sequence_length, [config.teacher], setting="sequence_length")
    from qat.backend.device import select
    from qat.data.build import build_cache, open_shared
    from qat.data.stream import blocks
    from qat.models.block_process import blocks_apart
    from qat.models.teacher_cache import cache_teacher, with_length
    from qat.ranks import joined

    backend, joining = select(config.device), joined(config.device, exchange=False)
    with backend.session(config.xla_cache_dir), joining as ranks, ExitStack() as stack:
        config, source = with_length(config, open_shared(config, ranks), ranks)
        settings, apart = config.settings(source.format), None
        if ranks.is_first and backend.batches_ahead:  # the device is not the host's CPU
            apart = stack.enter_context(blocks_apart(config, settings))
        opened = cache_teacher(config, ranks)
        out = out or CACHES / suggested_name(config, source)
        manifest = build_cache(
            settings,
            **opened._asdict(),
            found=apart or blocks(source.rows, opened.tokenizer, settings),
            out=out,
            batch_size=config.batch_size,
            ranks=ranks,
        )
    return dict(out=out, **cache_numbers(out, manifest)) if ranks.is_first else {}


@cache_app.command(
    name="import", help_epilogue="Example: qat cache import THEIR_CACHE --teacher MODEL"
)
def import_(
    source: Required[Path],
    *,
    config: Annotated[ImportConfig, Parameter(name="*")] = ImportConfig(),  # noqa: B008 - frozen
    out: Path | None = None,
) -> dict[str, object]:
    """Turn a cache of Anemll/qwen3_apple_style_2bit_qat_lora into one of ours.

    It has no tail: train on it with --loss candidates.

    Args:
        source: Its directory, with meta.json and shard_*.pt.
        out: Directory to make; by default caches/NAME, NAME as SOURCE is called.
    """
    from qat.cli.inputs import check_inputs

    out = out or CACHES / source.resolve().name
    check_inputs(models=[config.teacher], folders=[source], out=out)
    if not [*source.glob(META), *source.glob(f"*/{META}")]:
        raise CacheError(
            f"{source} {described(source)} and holds no {META}, expected a cache of the reference "
            f"system; name the directory with {META} and shard_*.pt"
        )
    from qat.convert.importing import load_importer

    manifest = load_importer("anemll").import_cache(source, config, out)
    return dict(out=out, has_tail=manifest.has_tail, **cache_numbers(out, manifest))


@cache_app.command(help_epilogue="Example: qat cache info caches/mine")
def info(directory: Required[Path]) -> dict[str, object]:
    """Show what a cache holds, with a sample of its text where the tokenizer is at hand."""
    from qat.cli.inputs import check_inputs

    check_inputs(caches=[directory])
    from qat.data.reader import TeacherCache
    from qat.logs import Terminal

    opened = TeacherCache.open(directory)
    numbers = cache_numbers(directory, opened.manifest)
    console = Terminal()
    console.print(_info_table(opened.manifest, numbers))
    sample = _sample_text(opened)
    if sample:
        console.print(sample, highlight=False)
    return dict(directory=directory, **numbers)


@cache_app.command(help_epilogue="Example: qat cache verify caches/mine")
def verify(directory: Required[Path]) -> dict[str, object]:
    """Read every byte of a cache and compare it with what was written."""
    from qat.cli.inputs import check_inputs

    check_inputs(caches=[directory])
    from rich.table import Table

    from qat.data.shard_file import check_shards, raise_if_any_damaged
    from qat.logs import Terminal

    manifest, findings = check_shards(directory)
    table = Table("shard", "sequences", "bytes", "state")
    for shard, problem in findings:
        table.add_row(shard.file, str(shard.sequences), f"{shard.bytes:,}", problem or "ok")
    Terminal().print(table)
    raise_if_any_damaged(directory, findings)
    return dict(directory=directory, shards=len(findings), state=manifest.state, damaged=0)


def suggested_name(config: CacheConfig, source: "DataSource") -> str:
    """The default name of a cache: {data}_{format}_think_{mode}_L{L}_K{K}_R{R}."""
    data = re.sub(r"[^A-Za-z0-9.-]+", "-", source.name)
    return (
        f"{data}_{source.format}_think_{config.thinking}"
        f"_L{config.sequence_length}_K{config.top_k}_R{config.draws}"
    )


def cache_numbers(directory: Path, manifest: "Manifest") -> dict[str, float | int | str | None]:
    """Return what a cache holds, in numbers."""
    num_bytes = sum(path.stat().st_size for path in directory.iterdir())
    tokens, ppl = manifest.total("tokens"), manifest.teacher_ppl
    return {
        "fingerprint": manifest.fingerprint,
        "sequences": sum(shard.sequences for shard in manifest.of_split("train")),
        "held_out_sequences": sum(shard.sequences for shard in manifest.of_split("held_out")),
        "tokens": tokens,
        "counted_tokens": manifest.total("counted"),
        "teacher_ppl": None if ppl is None else float(f"{ppl:.5g}"),
        "bytes": num_bytes,
        "bytes_per_token": round(num_bytes / tokens, 2) if tokens else None,
    }


def _info_table(manifest: "Manifest", numbers: dict[str, float | int | str | None]) -> "Table":
    from rich.table import Table

    from qat.data.build import what_counts

    settings, teacher = manifest.settings, manifest.teacher
    table = Table("cache", manifest.fingerprint)
    table.add_row("teacher", f"{teacher.name} ({teacher.identity}, {teacher.dtype})")
    table.add_row("data", f"{settings.data} ({settings.format}, thinking {settings.thinking})")
    table.add_row("targets", f"{what_counts(manifest)} (--targets {settings.targets})")
    if numbers["teacher_ppl"] is not None:
        table.add_row("teacher's perplexity", f"{numbers['teacher_ppl']:,} on what counts")
    table.add_row("vocabulary", f"{teacher.vocab_size:,}, tokenizer {manifest.tokenizer}")
    whole = {"documents": "whole documents", "stream": "documents cut anywhere"}[manifest.rows]
    table.add_row("sequence length", f"{settings.sequence_length}, {whole}")
    table.add_row("top-K", f"{settings.top_k}{'' if manifest.has_tail else ' (tail unknown)'}")
    table.add_row("draws", str(settings.draws))
    if manifest.negatives:
        table.add_row("random tokens", str(manifest.negatives))
    table.add_row("training sequences", f"{numbers['sequences']:,}")
    table.add_row("held-out sequences", f"{numbers['held_out_sequences']:,}")
    table.add_row("tokens", f"{numbers['tokens']:,} ({numbers['counted_tokens']:,} counted)")
    for name in dict.fromkeys(shard.source for shard in manifest.shards if shard.source):
        own = sum(shard.tokens for shard in manifest.shards if shard.source == name)
        table.add_row(f"tokens of {name}", f"{own:,} ({own / manifest.total('tokens'):.1%})")
    per_token = numbers["bytes_per_token"]
    words = "" if per_token is None else f" ({per_token} per token)"
    table.add_row("bytes", f"{numbers['bytes']:,}{words}")
    return table


def _sample_text(opened: "TeacherCache") -> str | None:
    """A line with the start of the first sequence, if the teacher's directory is here.

    What is there now, or whoever names it, says nothing of the cache itself: another tokenizer,
    or none, is told and is no error.
    """
    from qat.data.text import tokenizer_hash
    from qat.models.load import load_tokenizer

    name = opened.manifest.teacher.name
    if not Path(name).is_dir() or opened.num_sequences("train") == 0:
        return None
    try:
        tokenizer = load_tokenizer(name)
    except QatError as error:
        return f"no text is shown: {error}"
    if (found := tokenizer_hash(tokenizer)) != opened.manifest.tokenizer:
        return f"no text is shown: {name} has tokenizer {found} now"
    ids = opened.batch([0]).input_ids[0, :SAMPLE_TOKENS]
    return f"first sequence: {tokenizer.decode(ids)!r}"


for _verb in hooks("qat.cache").values():
    cache_app.command(load(_verb))
