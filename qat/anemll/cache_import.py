"""`qat cache import`: a cache of the reference system as ours, with its tokenizer's hash."""

from pathlib import Path

from qat.anemll.cache import Wish, write_cache
from qat.anemll.shards import cache_root, read_meta
from qat.data.cache import Manifest
from qat.data.config import ImportConfig
from qat.data.text import tokenizer_hash
from qat.errors import CacheError, CheckpointError, HubError
from qat.files import check_free
from qat.models.directory import atomic_directory
from qat.models.load import load_config, load_tokenizer


def import_cache(source: Path, config: ImportConfig, out: Path) -> Manifest:
    """Write the cache of the reference system at `source` as ours to `out`, whole or not at all.

    The tokenizer is that of `config.teacher`, or of the model that its `meta.json` names: students
    must have the same.

    Raises:
        ConfigError: `out` is not empty.
        CacheError: `source` is no such cache or damaged, or its tokenizer cannot be opened.
        CheckpointError: `out` cannot be written.
    """
    check_free(out)
    root = cache_root(source)
    meta = read_meta(root)
    name = config.teacher or meta.tokenizer
    try:
        tokenizer = tokenizer_hash(load_tokenizer(name))
    except (CheckpointError, HubError) as error:
        raise CacheError(
            f"the tokenizer that made the tokens of {root} cannot be opened ({str(error)[:200]}), "
            "and students must have the same; add --teacher MODEL, a model with that tokenizer"
        ) from None
    _check_vocabulary(name, meta.vocab_size, root)
    wish = Wish(meta, tokenizer, config.held_out, config.keep_negatives)
    with atomic_directory(out) as partial:
        return write_cache(root, wish, partial)


def _check_vocabulary(name: str, vocab_size: int, root: Path) -> None:
    """Refuse a model of another vocabulary than that of the teacher whose words were kept."""
    has = load_config(name).get_text_config().vocab_size
    if has != vocab_size:
        raise CacheError(
            f"teacher={name} has {has} words, but the teacher of {root} had {vocab_size}; expected "
            "the same vocabulary: add --teacher MODEL, the model that made the cache"
        )
