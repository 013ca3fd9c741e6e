"""On-disk cache of converted GGUF files: directories of models, which open in seconds.

The key of an entry is the SHA-256 of the file and the versions of the readers, so another file or
another release of transformers never gets it. Entries are written atomically, and their checksums
are compared before use; a damaged entry is made again. Least recently used entries are evicted.
Deleting any or all of them only costs time.
"""

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qat.config import fingerprint
from qat.errors import CheckpointError
from qat.files import LEAVING, listed_files, locked, whole_directory
from qat.logs import progress
from qat.models.directory import (
    CHECKSUMS,
    as_transformers_asks,
    check_checksums,
    save_tokenizer,
    settled_sha256,
    write_checksums,
)
from qat.models.gguf import quick_gguf
from qat.models.gguf_header import read_header
from qat.models.stored_state import packed_state_dict

logger = logging.getLogger(__name__)

T = TypeVar("T")
GGUF_CACHE = Path("~/.cache/qat/gguf")
"""Directory of the entries."""
BUDGET_BYTES = 32 * 2**30
"""The largest size of all entries together; half of the free disk space if that is less."""
FRESH_S = 600.0
"""Entries younger than this many seconds are not evicted: a process may be opening them."""
STALE_S = 86400.0
"""Partial files of a killed process are removed after this many seconds."""
WAIT_S = 3600.0
"""Timeout in seconds for another process that converts the same file."""
FORMAT = 1  # part of the key of every entry
SHARD = "256MB"
"""Shard size: several shards are hashed in parallel."""
ANY_CLASS = "PreTrainedTokenizerFast"
"""The class that loads tokenizer.json unchanged; some others rebuild their own rules."""
VOCABULARY_BYTES = 2**26
"""Upper bound on the size of a tokenizer."""
SMALL_BYTES = 2**29
"""Size of a file up to which it is converted once for all dtypes: a billion weights of 4 bits take
4 GiB in float32."""


class Config:
    """The configuration in a GGUF file."""

    file = "config.json"

    def names(self, path: Path) -> list[str]:  # noqa: ARG002
        """Return the names of entries that serve, the one to make first."""
        return ["config"]

    def num_bytes(self, path: Path) -> int:  # noqa: ARG002
        """Estimate the size of the entry: negligible."""
        return 0

    def make(self, path: Path) -> PreTrainedConfig:
        """Read the configuration of the file `path`."""
        with quick_gguf(path):
            return AutoConfig.from_pretrained(
                str(path.parent), gguf_file=path.name, local_files_only=True
            )

    def save(self, made: PreTrainedConfig, directory: Path) -> None:
        """Write the configuration to `directory`."""
        made.save_pretrained(directory)


class Vocabulary:
    """The tokenizer in a GGUF file."""

    file = "tokenizer.json"

    def names(self, path: Path) -> list[str]:  # noqa: ARG002
        """Return the names of entries that serve, the one to make first."""
        return ["tokenizer"]

    def num_bytes(self, path: Path) -> int:
        """Estimate the size of the entry: at most that of the file."""
        return min(path.stat().st_size, VOCABULARY_BYTES)

    def make(self, path: Path) -> PreTrainedTokenizerBase:
        """Build the tokenizer of the file `path`."""
        logger.info("%s: converting its tokenizer, once", path)
        with quick_gguf(path):
            return AutoTokenizer.from_pretrained(
                str(path.parent), gguf_file=path.name, local_files_only=True
            )

    def save(self, made: PreTrainedTokenizerBase, directory: Path) -> None:
        """Write the tokenizer to `directory` so that it loads as the same.

        Raises:
            NotCached: it does not load as the same.
        """
        save_tokenizer(made, directory)
        if _opens_as(made, directory):
            return
        settings = directory / "tokenizer_config.json"
        values = json.loads(settings.read_text(encoding="utf-8"))
        values["tokenizer_class"] = ANY_CLASS
        settings.write_text(json.dumps(values, indent=1), encoding="utf-8")
        if not _opens_as(made, directory):
            raise NotCached("its tokenizer does not open again as the same")


class Weights:
    """The model in a GGUF file, for loading in `dtype`.

    A float32 entry serves every dtype, because rounding from it equals rounding from the file. A
    large file is converted in `dtype` instead, which takes less memory and room.
    """

    file = "config.json"

    def __init__(self, dtype: torch.dtype, read: Callable[..., PreTrainedModel]) -> None:
        """Take the function that reads a file into main memory, `read(place, file, dtype=...)`."""
        self._dtype, self._read = dtype, read

    def names(self, path: Path) -> list[str]:
        """Return the names of entries that serve, the one to make first."""
        dtypes = (self._made_in(path), self._dtype, torch.float32)
        return [*dict.fromkeys(str(each)[6:] for each in dtypes)]

    def num_bytes(self, path: Path) -> int:
        """Estimate the size of the entry."""
        weights = sum(math.prod(tensor.shape) for tensor in read_header(path).values())
        return weights * self._made_in(path).itemsize

    def _made_in(self, path: Path) -> torch.dtype:
        return torch.float32 if path.stat().st_size <= SMALL_BYTES else self._dtype

    def make(self, path: Path) -> PreTrainedModel:
        """Dequantize the weights of the file `path`."""
        what, total = f"{path}: converting its weights, once", len(read_header(path))
        logger.info("%s", what)
        with progress(what, total, "tensors") as ticker, quick_gguf(path, ticker.advance):
            file = {"gguf_file": path.name}
            return self._read(str(path.parent), file, dtype=self._made_in(path))

    def save(self, made: PreTrainedModel, directory: Path) -> None:
        """Write the model to `directory`, tensors in 16 bits where that loses nothing."""
        made.hf_quantizer = None
        if hasattr(made.config, "quantization_config"):
            del made.config.quantization_config
        state = packed_state_dict(made)
        made.save_pretrained(directory, state_dict=state, max_shard_size=SHARD)
        # without this file the end tokens come from the configuration, as for a model read from
        # GGUF
        (directory / "generation_config.json").unlink(missing_ok=True)


Part = Config | Vocabulary | Weights
PARTS = {"config": Config(), "tokenizer": Vocabulary()}
"""The parts that need no settings."""


class NotCached(Exception):  # noqa: N818 - no error: the file is read without the cache
    """Raised if no cache entry can be used; the message has the reason."""


def opened(source: str, part: Part, read: Callable[[str, dict[str, str]], T]) -> T:
    """Apply `read` to the cache entry for a part of a GGUF file, or to the file without one.

    `read` gets the path and the GGUF file as arguments of `from_pretrained`.
    """
    place, file = as_transformers_asks(source)
    path = Path(place, file["gguf_file"])
    try:
        entry = _entry(path, part)
    except NotCached as reason:
        logger.info("%s: %s, so it is converted each time", path, reason)
    else:
        try:
            return read(str(entry), {})
        except (OSError, ValueError, SafetensorError):
            if entry.is_dir():
                raise
            # the entry was removed after the comparison
    with quick_gguf(path):
        return read(place, file)


def as_floats() -> dict[str, object]:
    """Return settings with which transformers leaves no weight of a GGUF file packed."""
    # releases before 5.18 always dequantize
    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def _opens_as(tokenizer: PreTrainedTokenizerBase, directory: Path) -> bool:
    again = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    return all(
        of(again) == of(tokenizer)
        for of in (
            lambda each: each.backend_tokenizer.to_str(),
            lambda each: {kind: str(token) for kind, token in each.special_tokens_map.items()},
            lambda each: each.chat_template,
        )
    )


def _entry(path: Path, part: Part) -> Path:
    """Return the entry for a part of the file; create it if there is none."""
    try:
        root = GGUF_CACHE.expanduser()
    except RuntimeError as error:  # a process of no known user, as in some containers
        raise NotCached(f"there is no {GGUF_CACHE} ({error})") from error
    digest = settled_sha256(path)
    read_by = fingerprint([FORMAT, *(version(name) for name in ("transformers", "gguf"))])
    found = [root / f"{digest}-{read_by}-{name}" for name in part.names(path)]
    for entry in found:
        if _is_sound(entry, part):
            return entry
    entry = found[0]
    with ExitStack() as stack:
        with _writing(root):
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_entry_lock(entry, path))
        if _is_sound(entry, part):  # another process has just made it
            return entry
        if entry.is_dir():
            logger.warning("%s is damaged, and made again", entry)
        with _writing(root):
            shutil.rmtree(entry, ignore_errors=True)
            _make_room(root, part.num_bytes(path))
        made = part.make(path)
        if settled_sha256(path) != digest:
            raise NotCached("it changed while it was converted")
        with _writing(root), whole_directory(entry, durable=False) as partial:
            part.save(made, partial)
            write_checksums(partial)
    return entry


def _is_sound(entry: Path, part: Part) -> bool:
    """Return whether an entry is undamaged; if so, mark it as most recently used."""
    if not (entry / CHECKSUMS).is_file():
        return False
    try:
        check_checksums(entry, weights=True, has=part.file)
        # a file more may change how the others are read
        if {each.name for each in entry.iterdir()} != listed_files(entry / CHECKSUMS, [CHECKSUMS]):
            return False
        os.utime(entry)
    except (CheckpointError, OSError):  # OSError: another process is removing it
        return False
    return True


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise NotCached(f"{root} cannot be written ({error})") from error


@contextmanager
def _entry_lock(entry: Path, path: Path) -> Iterator[None]:
    """Hold the lock of an entry; if another process has it, log that and wait."""
    lock = entry.with_name(f".{entry.name}.lock")
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(lock, entry))
        except TimeoutError:
            logger.info("%s: another process is converting it; waiting for that one", path)
            stack.enter_context(locked(lock, entry, wait_s=WAIT_S))
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _make_room(root: Path, num_bytes: int) -> None:
    """Remove stale partial files, then the least recently used entries, until `num_bytes` fit."""
    now, entries = time.time(), []
    for directory in filter(Path.is_dir, root.iterdir()):
        with suppress(FileNotFoundError):  # another process may be evicting too
            used = directory.stat().st_mtime
            if LEAVING.fullmatch(directory.name) and now - used > STALE_S:
                shutil.rmtree(directory, ignore_errors=True)
                continue
            size = sum(file.stat().st_size for file in directory.iterdir())
            entries.append((used, size, directory))
    taken = sum(size for _, size, _ in entries)
    budget = min(BUDGET_BYTES, (shutil.disk_usage(root).free + taken) // 2)
    for used, size, directory in sorted(entries):
        if taken + num_bytes <= budget or now - used <= FRESH_S:
            break
        leaving = directory.with_name(f".{directory.name}.old-{token_hex(4)}")
        with suppress(FileNotFoundError):
            directory.rename(leaving)  # atomic, so that no process opens half of it
            shutil.rmtree(leaving, ignore_errors=True)
            logger.info("%s made room for another file", directory)
        taken -= size
    if taken + num_bytes > budget:
        raise NotCached(
            f"{num_bytes / 2**30:.1f} GiB do not fit into the {budget / 2**30:.1f} GiB of {root}"
        )
