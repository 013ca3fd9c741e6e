"""Measures how near imported files of the reference system come to what it computed itself.

DATA_DIR holds the float model `base`, checkpoints as the reference system saves them, `cache_*`
directories in its format, and `expected.safetensors` with `input_ids` and, by checkpoint, the
float32 logits of its own forward. Every checkpoint is imported, opened and compared; every cache is
imported, its targets are compared with the stored logits, and so is the loss `candidates` on them
with the reference's formula.

python speedrun/measure_legacy.py DATA_DIR --figures FILE.jsonl
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedTokenizerFast

from qat.anemll.cache import import_cache
from qat.anemll.checkpoint import import_checkpoint
from qat.anemll.pickles import read_pickle
from qat.data.codec import max_error
from qat.data.config import ImportConfig
from qat.data.reader import TeacherCache
from qat.errors import CacheError
from qat.evaluate.divergence import KD_TEMPERATURE, cached_divergence
from qat.evaluate.judge import split_batches
from qat.models.load import load_model

GOAL = 1e-5
RANGE_ROUNDING = 1.036
"""How far above the largest distance a cache's stored range may be."""


def main() -> None:
    """Print the difference of every checkpoint and cache, and record the largest of logits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    expected = load_file(arguments.data / "expected.safetensors")
    names = sorted(expected.keys() - {"input_ids", "base_logits"})
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        worst = 0.0
        for name in names:
            difference = logit_difference(arguments.data, name, expected, place / name)
            print(f"{name:24s} {difference:.3g}")
            worst = max(worst, difference)
        teacher = with_tokenizer(arguments.data / "base", place / "teacher")
        caches = sorted(arguments.data.glob("cache_*"))
        kept = [check_cache(cache, teacher, place / cache.name, place / name) for cache in caches]
    print(f"largest difference of a logit: {worst:.3g}, of {len(names)} checkpoints")
    if arguments.figures:
        from figures import record

        goal = f"<= {GOAL:g}"
        record(arguments.figures, "legacy_max_logit_diff", worst, "logits", goal, runs=len(names))
    raise SystemExit(not (worst <= GOAL and all(kept)))


@torch.no_grad()
def logit_difference(data: Path, name: str, expected: dict[str, Tensor], out: Path) -> float:
    """The largest difference of a logit of the imported checkpoint `name`."""
    import_checkpoint(data / name, str(data / "base"), out)
    model = load_model(str(out), device="cpu", dtype="fp32").model
    logits = model(input_ids=expected["input_ids"]).logits
    return (logits - expected[name]).abs().max().item()


def with_tokenizer(base: Path, place: Path) -> Path:
    """A copy of the float model with a tokenizer of as many words, for it may have none."""
    shutil.copytree(base, place)
    place.chmod(0o755)
    size = AutoConfig.from_pretrained(base).vocab_size
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(place)
    return place


def check_cache(source: Path, teacher: Path, out: Path, student: Path) -> bool:
    """Whether targets of an imported cache, and a student's loss on it, are those of its files."""
    manifest = import_cache(source, ImportConfig(teacher=str(teacher), held_out=0.0), out)
    cache = TeacherCache.open(out)
    stored = joined([read_pickle(path, CacheError) for path in sorted(source.glob("shard_*.pt"))])
    batch = cache.batch(range(manifest.total("sequences")))
    logits = stored["topk_logits"].float()
    exact = logits.log_softmax(-1).gather(-1, stored["topk_idx"].argsort(-1))
    found = batch.topk_logprobs[:, :-1].gather(-1, batch.topk_ids[:, :-1].argsort(-1))
    spread = (logits.amax(-1) - logits.amin(-1)).max().item()
    limit = max_error(RANGE_ROUNDING * spread, logits.shape[-1])
    error = (found - exact).abs().max().item()
    model = load_model(str(student), device="cpu", dtype="fp32")
    kd = cached_divergence(model, split_batches(cache, "train", batch_size=8)).kd_nats
    formula = kd_by_formula(model.model, stored)
    print(f"{source.name}: log-probs within {error:.2g} (at most {limit:.2g}) nats, ", end="")
    print(f"KD {kd:.6f} (by its formula {formula:.6f}) nats")
    same_ids = torch.equal(
        batch.topk_ids[:, :-1].sort(-1).values, stored["topk_idx"].long().sort(-1).values
    )
    return same_ids and error <= limit and abs(kd - formula) <= 1e-3 * formula


def joined(shards: list[dict[str, object]]) -> dict[str, Tensor]:
    """The tensors of all shards, one after the other."""
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


@torch.no_grad()
def kd_by_formula(student: torch.nn.Module, stored: dict[str, Tensor]) -> float:
    """`T^2 mean(sum_k p (log p - log q))` over the K tokens, both sides normalised over them."""
    ids = stored["topk_idx"].long()
    found = student(input_ids=stored["input_ids"].long()).logits[:, :-1].gather(-1, ids)
    log_p = F.log_softmax(stored["topk_logits"].float() / KD_TEMPERATURE, -1)
    log_q = F.log_softmax(found.float() / KD_TEMPERATURE, -1)
    return KD_TEMPERATURE**2 * (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


if __name__ == "__main__":
    main()
