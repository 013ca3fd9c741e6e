"""Kills a cache build with SIGKILL at random instants; the finished cache must not show it.

python speedrun/measure_cache_resume.py --kills 20 --figures FILE.jsonl
"""

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch
from figures import record
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from qat.data.build import build_cache
from qat.data.cache import TeacherInfo
from qat.data.config import CacheSettings
from qat.models.language_model import LanguageModel

VOCAB = 300


def main() -> None:
    """Kill as many builds as asked, compare, and record how many left no trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # children are forked: no thread pool may exist before
    with tempfile.TemporaryDirectory() as scratch:
        equal = kill_and_compare(Path(scratch), arguments.kills, random.Random(arguments.seed))
    print(f"{equal} of {arguments.kills} killed builds ended byte-equal")
    if arguments.figures:
        goal = ">= 20, all byte-equal"
        record(arguments.figures, "cache_resume_kills", equal, "builds", goal)
    raise SystemExit(equal != arguments.kills)


def kill_and_compare(scratch: Path, kills: int, rng: random.Random) -> int:
    """How many of `kills` killed builds, started again, equal an unbroken one in every file."""
    started = time.monotonic()
    build_in_child(scratch / "whole", None)
    duration_s = time.monotonic() - started
    equal = 0
    for kill in range(kills):
        out = scratch / f"killed-{kill}"
        while build_in_child(out, rng.uniform(0.0, duration_s)):
            out = scratch / f"{out.name}x"  # it ended before the signal: not a kill
        left = sorted(path.name for path in out.iterdir()) if out.exists() else []
        build_in_child(out, None)
        is_equal = contents(out) == contents(scratch / "whole")
        print(f"kill {kill + 1}: {len(left)} files were there, byte-equal: {is_equal}")
        equal += is_equal
    return equal


def build_in_child(out: Path, kill_after_s: float | None) -> bool:
    """Whether a forked build ran to its end before it was killed."""
    child = os.fork()
    if child == 0:
        build(out)
        os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"the build in {out} failed")
    return os.WIFEXITED(status)


def build(out: Path) -> None:
    """A cache of a few shards, by a random teacher over the bytes of two source files."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    files = [Path(__file__), Path(build_cache.__code__.co_filename)]
    lines = [line for file in files for line in file.read_text().splitlines()]
    build_cache(
        CacheSettings(data="source", sequence_length=32, top_k=16, draws=10, shard_size=8),
        tokenizer=byte_tokenizer(),
        teacher=LanguageModel(Qwen3ForCausalLM(config).eval()),
        info=TeacherInfo(
            name="random", identity="0", vocab_size=VOCAB, max_positions=None, dtype="float32"
        ),
        documents=filter(str.strip, lines),
        out=out,
        batch_size=4,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, **{letter: i for i, letter in enumerate(alphabet, start=1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def contents(directory: Path) -> dict[str, bytes]:
    """The bytes of each file, by name."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


if __name__ == "__main__":
    main()
