"""Imports mutants of the reference system's files: each is refused in one line, or imported.

Counted as clean is a case that ends in time, within its memory, either with a `QatError` of one
line and nothing left, or with a whole checkpoint or cache; every hundredth of these is opened.

python tests/stress/fuzz_legacy.py --cases 10000 --figures FILE.jsonl
"""

import collections
import logging
import re
import shutil
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
from fuzzing import Outcomes, TookTooLong, asked_for, bounded_memory, in_time, settle
from legacy_mutants import SHAPE, Mutant, base_model, honest_cache, honest_checkpoints, mutate
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from qat.data.config import ImportConfig
from qat.data.reader import TeacherCache
from qat.errors import QatError
from qat.extensions.anemll.cache import import_cache
from qat.extensions.anemll.checkpoint import import_checkpoint
from qat.models.load import load_model

TIME_S = 10.0
MEMORY_BYTES = 2**30
OPENED = 100
"""Of so many imports, one is opened."""


def main() -> None:
    """Run the cases, print what came of them, and record the number of clean ones."""
    seeds, figures = asked_for(__doc__)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        with bounded_memory(MEMORY_BYTES):
            outcomes = fuzz(Path(name), seeds)
    settle("legacy_fuzz_cases", outcomes, figures)


def fuzz(place: Path, seeds: range) -> Outcomes:
    """How often each kind of mutant came to which end."""
    model = base_model()
    base = place / "base"
    model.save_pretrained(base)
    word_tokenizer().save_pretrained(base)
    honest = [*honest_checkpoints(model), honest_cache()]
    outcomes: Outcomes = collections.Counter()
    for seed in seeds:
        mutant = mutate(honest, seed)
        outcome = run(place, mutant, base, opens=seed % OPENED == 0)
        if outcome.startswith("WRONG"):
            outcome = outcome.replace("WRONG", f"WRONG: seed {seed}", 1)
        outcomes[mutant.kind, outcome] += 1
    return outcomes


def run(place: Path, mutant: Mutant, base: Path, *, opens: bool) -> str:
    """What came of one mutant: `imported`, the kind of refusal, or what was wrong."""
    source, target = place / "source", place / "target"
    for directory in (source, target):
        directory.mkdir()
    for name, data in mutant.files.items():
        (source / name).write_bytes(data)
    out = target / "out"
    try:
        with in_time(TIME_S), warnings.catch_warnings(action="ignore"):
            take(mutant, source, base, out)
        return judge(out, mutant, opens=opens)
    except QatError as error:
        if list(target.iterdir()):
            return "WRONG: refused, yet something is left"
        return refusal(str(error))
    except (Exception, TookTooLong):  # noqa: BLE001  any other end is what is looked for
        return f"WRONG: {traceback.format_exc()}"
    finally:
        shutil.rmtree(source)
        shutil.rmtree(target)


def take(mutant: Mutant, source: Path, base: Path, out: Path) -> None:
    """Import the files in `source`."""
    if mutant.is_cache:
        settings = ImportConfig(teacher=str(base), held_out=0.2, keep_negatives=True)
        import_cache(source, settings, out)
    else:
        import_checkpoint(source, str(base), out)


def judge(out: Path, mutant: Mutant, *, opens: bool) -> str:
    """What came of a mutant that was imported."""
    wanted = "manifest.json" if mutant.is_cache else "model.safetensors"
    if not (out / wanted).is_file() or len(list(out.parent.iterdir())) != 1:
        return "WRONG: imported, yet not whole"
    if opens and mutant.is_cache:
        cache = TeacherCache.open(out)
        cache.batch(range(cache.num_sequences("train")))
    elif opens:
        load_model(str(out), device="cpu", dtype="fp32")
    return "imported"


def refusal(message: str) -> str:
    """The kind of a refusal, from its one line."""
    if "\n" in message:
        return f"WRONG: a message of several lines: {message}"
    if not re.search(r"expected|add --|mend|copy|move|name ", message):
        return f"WRONG: a message that helps nobody: {message}"
    return "refused"


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of as many words as the model has."""
    words = {f"w{i}": i for i in range(SHAPE["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1")


if __name__ == "__main__":
    main()
