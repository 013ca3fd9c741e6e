"""What the scripts about stops share: a small cache, a small student, and children to be killed."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from qat.convert.quantize import quantize_model
from qat.data.build import build_cache
from qat.data.cache import TeacherInfo
from qat.data.config import CacheSettings
from qat.models.checkpoint import save_checkpoint
from qat.models.language_model import LanguageModel
from qat.models.load import model_identity
from qat.quant.spec import PRESETS

VOCAB = 300
SEQUENCE_LENGTH = 32


def tiny_model(width: int, layers: int) -> Qwen3ForCausalLM:
    """A random model over bytes."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=max(16, width // 2),
    )
    return Qwen3ForCausalLM(config).eval()


def make_student(out: Path, *, width: int = 64, layers: int = 2) -> None:
    """A random student at two and four bits."""
    model = tiny_model(width, layers)
    quantize_model(LanguageModel(model), PRESETS["q2a4"])
    save_checkpoint(model, byte_tokenizer(), out)


def make_teacher(out: Path) -> None:
    """The teacher of `build` on disk, to run beside a student."""
    tiny_model(32, 2).save_pretrained(out)
    byte_tokenizer().save_pretrained(out)


def build(out: Path, *, text: Path | None = None, teacher: Path | None = None) -> None:
    """A cache of a few shards, by a random teacher over the lines of `text` (by default ours).

    If that one lies at `teacher`, the cache knows it as such.
    """
    identity = "0" * 32 if teacher is None else model_identity(str(teacher))
    lines = (text or Path(build_cache.__code__.co_filename)).read_text().splitlines()
    build_cache(
        CacheSettings(
            data="source",
            sequence_length=SEQUENCE_LENGTH,
            top_k=16,
            draws=10,
            shard_size=8,
            held_out=0.1,
        ),
        tokenizer=byte_tokenizer(),
        teacher=LanguageModel(tiny_model(32, 2)),
        info=TeacherInfo(
            name="random", identity=identity, vocab_size=VOCAB, max_positions=None, dtype="float32"
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


def fork(act: Callable[[], object], log: Path) -> int:
    """The process id of a child that does `act` and is gone; what it says goes to `log`.

    No thread may run in this process: a child would find their locks held.
    """
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        torch.set_num_threads(1)  # makes its pool anew, before two threads race to do so
        act()
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def killed(
    act: Callable[[], object], log: Path, kill: Callable[[Callable[[], bool]], None] | None
) -> bool:
    """Whether a child that does `act` was killed; `kill` returns when it is time for that.

    `kill` is given a function that says whether the child has ended by itself. None lets it end.

    Raises:
        RuntimeError: the child failed, or somebody else killed it (no memory is left, say).
    """
    child = fork(act, log)
    ended: list[int] = []

    def has_ended() -> bool:
        if not ended:
            found, status = os.waitpid(child, os.WNOHANG)
            ended.extend([status] if found else [])
        return bool(ended)

    if kill is not None:
        kill(has_ended)
        if not has_ended():
            os.kill(child, signal.SIGKILL)
    status = ended[0] if ended else os.waitpid(child, 0)[1]
    if kill and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"a child failed with {status}, see {log}:\n{log.read_text()}")
    return False


def after(seconds: float) -> Callable[[Callable[[], bool]], None]:
    """A `kill` so many seconds after the child began."""

    def wait(has_ended: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not has_ended():
            time.sleep(0.002)

    return wait


def contents(directory: Path, ignored: tuple[str, ...] = ()) -> dict[str, bytes]:
    """The bytes of each file below `directory`, by name, less what is or lies in `ignored`."""
    found = {}
    for path in sorted(directory.rglob("*")):
        parts = path.relative_to(directory).parts
        is_ignored = any(fnmatch(part, pattern) for part in parts for pattern in ignored)
        if path.is_file() and not is_ignored:
            found["/".join(parts)] = path.read_bytes()
    return found
