"""Checks of paths on a command line, before torch is imported: a wrong one costs no wait."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from qat.data.cache import MANIFEST, read_manifest
from qat.data.sources import check_source
from qat.errors import ConfigError, DataError
from qat.files import KINDS, described, real
from qat.losses.config import fitting_loss
from qat.models.directory import resolve, stored_config
from qat.train.step_config import StepConfig

MODEL, CACHE = KINDS["config.json"], KINDS["manifest.json"]
NO_TEXTS = set(KINDS.values()) - {CACHE}  # directories of files, but none to learn from

logger = logging.getLogger(__name__)

Step = TypeVar("Step", bound=StepConfig)


def check_inputs(
    *,
    models: Iterable[str | None] = (),
    caches: Iterable[str | Path | None] = (),
    calibration: str | None = None,
    folders: Iterable[Path | None] = (),
    texts: Iterable[Path | None] = (),
    out: Path | None = None,
) -> None:
    """Refuse what is not there, or not what it should be, and an `out` that cannot be made.

    Each is None where the user names none; caches may be addresses, which are not asked here.
    """
    models, caches = [*models], [*caches]
    if out is not None:
        _check_out(out)
        _check_outside(out, [*models, *caches, calibration])
    for cache in caches:
        if cache is not None and "://" not in str(cache):
            read_manifest(Path(cache))
    _check_files(texts, folders)
    if calibration is not None and not (Path(calibration) / MANIFEST).exists():
        if (found := described(Path(calibration))) in NO_TEXTS:
            raise ConfigError(
                f"calibration={calibration} {found}, expected a teacher cache or a text; name one "
                "of those"
            )
        check_source(calibration, setting="calibration")
    for model in models:
        if model is not None:
            resolve(model)


def check_positions(tokens: int | None, models: Iterable[str | None], *, setting: str) -> None:
    """Refuse more tokens in a row than a model has positions for, by its config.json."""
    for model in models:
        values = {} if model is None else stored_config(model)
        inner = values.get("text_config")
        limit = (inner if isinstance(inner, dict) else values).get("max_position_embeddings")
        if isinstance(limit, int) and 0 < limit < (tokens or 0):
            raise ConfigError(
                f"{setting}={tokens}, but {model} has positions for {limit} tokens; "
                f"use --{setting.replace('_', '-')} {limit} or less"
            )


def with_fitting_loss(config: Step, cache_dir: str | Path | None) -> Step:
    """`config` with a loss that the cache can give, said in a line, where the user named none."""
    if cache_dir is None or "://" in str(cache_dir) or "loss" in config.model_fields_set:
        return config
    manifest = read_manifest(Path(cache_dir))
    settings = manifest.settings
    loss = fitting_loss(settings.top_k, settings.draws, has_tail=manifest.has_tail)
    if loss == config.loss:
        return config
    lacks = "holds draws alone" if manifest.has_tail else "was imported without the teacher's tail"
    logger.warning("%s %s: learning with --loss %s", cache_dir, lacks, loss)
    return config.model_copy(update={"loss": loss})


def _check_files(texts: Iterable[Path | None], folders: Iterable[Path | None]) -> None:
    for text in texts:
        if text is not None and not text.is_file():
            found = "is a directory" if text.is_dir() else "is not there"
            raise DataError(f"{text} {found}, expected a text file; check the path")
    for folder in folders:
        if folder is not None and not folder.is_dir():
            raise DataError(f"{folder} is no directory, expected one; check the path")


def _check_outside(out: Path, sources: Iterable[str | Path | None]) -> None:
    """Refuse an `out` inside a model or a cache that is read, which would hold foreign files."""
    for source in sources:
        if source is None or described(Path(source)) not in (MODEL, CACHE):
            continue
        if real(Path(source)) in real(out).parents:
            raise ConfigError(
                f"out={out} lies inside {source}, which is read, expected a directory beside it; "
                "choose another --out"
            )


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file, expected a directory; choose another --out")
    above = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        found = "may not be written by you" if above.is_dir() else "is a file"
        raise ConfigError(
            f"out={out} cannot be made: {above} {found}; expected a directory of yours: choose "
            "another --out or change who may write there"
        )
