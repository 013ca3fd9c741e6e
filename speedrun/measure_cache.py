"""Measures what a cached token costs at Qwen3's vocabulary, and how well it is stored.

A tiny random Qwen3 over 151,936 tokens stands in for the teacher: bytes depend on its vocabulary
and on how many of 50 draws are distinct, so its head is scaled until 12 of 50 independent ones
would be, on average, as in arXiv:2503.16870; of the cache's systematic ones it is some more.
Everything else is the real builder, with directory bytes (manifest and headers included) per token.

    python speedrun/measure_cache.py --tokenizer DIR --text FILE --figures FILE.jsonl

    python speedrun/measure_cache.py --teacher DIR --text FILE --figures FILE.jsonl

A real teacher is asked in bfloat16 and compared with itself in float32: what is lost by its body,
by logits of 16 bits (which the builder no longer forms), and by the codec.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from figures import record
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qat.data.build import build_cache
from qat.data.cache import TeacherInfo
from qat.data.codec import decode_top_k, encode_top_k, top_k
from qat.data.config import CacheSettings
from qat.data.packing import position_ids
from qat.data.reader import TeacherCache
from qat.data.sources import open_source
from qat.data.stream import blocks
from qat.models.language_model import LanguageModel
from qat.models.load import load_teacher, load_tokenizer

VOCAB = 151_936
DRAWS = 50
DISTINCT = 12.0
LENGTH = 64


def main() -> None:
    """Print bytes and accuracy for each kind of cache, and record them."""
    arguments = parse()
    if arguments.teacher:
        for way, losses in losses_of(arguments.teacher, arguments.text).items():
            print(f"{way}: " + ", ".join(f"{name} {value:.3g}" for name, value in losses.items()))
            for name, value in losses.items():
                figure, unit = f"teacher_{way}_{name}", "fraction" if name != "kl" else "nats/token"
                record(arguments.figures, figure, float(f"{value:.3g}"), unit, "stated")
        return
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer, local_files_only=True)
    sequences = arguments.sequences
    teacher = random_teacher()
    hidden_TD = hidden_of_text(teacher, tokenizer, arguments.text)
    scale_head(teacher, hidden_TD)
    for figure, kept, goal in [
        ("cache_bytes_sampled", {"top_k": 0, "draws": DRAWS}, 40),
        ("cache_bytes_top32", {"top_k": 32}, 120),
        ("cache_bytes_top64", {"top_k": 64}, 230),
    ]:
        settings = settings_for(arguments.text, num_sequences=sequences, **kept)
        value = bytes_per_token(settings, tokenizer, teacher)
        print(f"{figure}: {value:.2f} B/token (goal <= {goal})")
        record(arguments.figures, figure, round(value, 3), "bytes/token", f"<= {goal}")
    for k in (32, 64):
        error, kl = accuracy(teacher, hidden_TD, k)
        print(f"top-{k}: max |log-prob error| {error:.4f} nats, mean KL {kl:.2e} nats")
        record(arguments.figures, f"cache_logprob_error_top{k}", error, "nats", "stated")
        record(arguments.figures, f"cache_logprob_kl_top{k}", kl, "nats/token", "stated")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--tokenizer", type=Path, help="of Qwen3, for the random teacher")
    asked.add_argument("--teacher", type=Path, help="a real model on this disk, tokenizer and all")
    parser.add_argument("--text", required=True, help="anything that qat cache --data takes")
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=512)
    return parser.parse_args()


def settings_for(text: str, **overrides: int) -> CacheSettings:
    """Settings of a cache of the text, with its kind in `overrides`."""
    return CacheSettings(data=text, sequence_length=LENGTH, **overrides)


def random_teacher() -> LanguageModel:
    """A small Qwen3 with the vocabulary of the real one."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )
    return LanguageModel(Qwen3ForCausalLM(config).eval())


@torch.no_grad()
def hidden_of_text(teacher: LanguageModel, tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Hidden states of the text's first 1,024 tokens, packed as a cache would, `(T, D)`."""
    settings = settings_for(text, shard_size=16, num_sequences=16, held_out=0.0)
    block = next(blocks(open_source(text).documents, tokenizer, settings))
    ids = torch.from_numpy(block.packed.tokens).long()
    positions = position_ids(torch.from_numpy(block.packed.starts))
    return teacher.hidden(ids, positions).flatten(0, 1)


@torch.no_grad()
def scale_head(teacher: LanguageModel, hidden_TD: Tensor) -> None:
    """Scale the head until `DRAWS` independent draws would have `DISTINCT` ids (bisection)."""
    logits_TV = teacher.logits(hidden_TD)
    low, high = 1.0, 257.0
    for _ in range(12):
        middle = (low + high) / 2
        is_too_flat = distinct_ids(middle * logits_TV) > DISTINCT
        low, high = (middle, high) if is_too_flat else (low, middle)
    teacher.head.weight.mul_(high)
    distinct = distinct_ids(high * logits_TV)
    print(f"head scaled by {high:.2f}: {distinct:.2f} distinct ids of {DRAWS} independent draws")


def distinct_ids(logits_TV: Tensor) -> float:
    """How many distinct ids independent draws of a token are expected to have, on average."""
    probs = (part_TV.softmax(-1) for part_TV in logits_TV.split(64))
    expected = [-(DRAWS * (-p).log1p()).expm1().sum(-1) for p in probs]  # 1 - (1 - p)^n, summed
    return torch.cat(expected).mean().item()


def bytes_per_token(
    settings: CacheSettings, tokenizer: PreTrainedTokenizerBase, teacher: LanguageModel
) -> float:
    """Bytes of the whole directory over tokens that are not padding."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "cache")
        manifest = build_cache(
            settings,
            tokenizer=tokenizer,
            teacher=teacher,
            info=TeacherInfo(
                name="random-qwen3",
                identity="0" * 32,
                vocab_size=VOCAB,
                max_positions=LENGTH,
                dtype="float32",
            ),
            documents=open_source(settings.data).documents,
            out=out,
        )
        if settings.draws:
            batch = TeacherCache.open(out).batch(range(256))
            distinct = (batch.sample_counts > 0).sum(-1)[batch.mask].float().mean()
            print(f"distinct ids in the cache: {distinct:.2f}")
        return sum(path.stat().st_size for path in out.iterdir()) / manifest.total("tokens")


@torch.no_grad()
def accuracy(teacher: LanguageModel, hidden_TD: Tensor, k: int) -> tuple[float, float]:
    """Largest error of a stored log-prob, and mean KL(exact || decoded) over tokens, in nats."""
    logits_TV = teacher.logits(hidden_TD)
    rows = encode_top_k(top_k(logits_TV, k), len(logits_TV) // LENGTH, VOCAB)
    ids, logprobs = decode_top_k(rows, length=LENGTH, k=k, vocab_size=VOCAB)
    exact = torch.log_softmax(logits_TV.double(), -1).gather(-1, ids.flatten(0, 1))
    difference = exact - logprobs.flatten(0, 1)
    kl = (exact.exp() * difference).sum(-1).mean()
    return round(difference.abs().max().item(), 5), float(f"{kl.item():.3g}")


@torch.no_grad()
def losses_of(directory: Path, text: str, k: int = 64) -> dict[str, dict[str, float]]:
    """What each part of a cache from a bfloat16 teacher loses against one in float32.

    `whole` is what a student learns from instead of the exact teacher: all parts together.
    """
    tokenizer = load_tokenizer(str(directory))
    halved, exact = (load_teacher(str(directory), device="cpu", dtype=d) for d in ("bf16", "fp32"))
    hidden_TD = hidden_of_text(halved, tokenizer, text)
    truth_TV = exact.logits(hidden_of_text(exact, tokenizer, text))
    ours_TV, rounded_TV = halved.logits(hidden_TD), halved.head(hidden_TD).float()
    return {
        "codec": loss(ours_TV, ours_TV, k),
        "16_bit_logits": loss(ours_TV, rounded_TV, k, by_codec=False),
        "body": loss(truth_TV, ours_TV, k, by_codec=False),
        "whole": loss(truth_TV, ours_TV, k),
        "whole_of_16_bit_logits": loss(truth_TV, rounded_TV, k),
    }


def loss(truth_TV: Tensor, logits_TV: Tensor, k: int, *, by_codec: bool = True) -> dict[str, float]:
    """Of the top K of these logits and their tail, as stored or as they are, against the truth."""
    top = top_k(logits_TV, k)
    ids, logprobs = top.ids, (logits_TV.gather(1, top.ids) - top.log_sum_exp[:, None]).double()
    if by_codec:
        T, V = logits_TV.shape
        found = decode_top_k(encode_top_k(top, T // LENGTH, V), length=LENGTH, k=k, vocab_size=V)
        ids, logprobs = (part.flatten(0, 1) for part in found)
    log_p = torch.log_softmax(truth_TV.double(), -1)
    log_p_TK = log_p.gather(1, ids)
    tail_T = log_p.scatter(1, ids, -torch.inf).logsumexp(1)
    kl_T = (log_p_TK.exp() * (log_p_TK - logprobs)).sum(1)
    kl_T += tail_T.exp() * (tail_T - top.tail_logprob)
    return {
        "kl": kl_T.mean().item(),
        "argmax_changed": (ids[:, 0] != truth_TV.argmax(1)).double().mean().item(),
        "neighbours_tied": (top.distances.diff(dim=1) == 0).double().mean().item(),
    }


if __name__ == "__main__":
    main()
