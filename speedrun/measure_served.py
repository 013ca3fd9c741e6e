"""Measures what it costs to cache a teacher through a local vLLM server.

    python speedrun/measure_served.py --teacher DIR --text FILE --figures FILE.jsonl --vllm PYTHON

PYTHON is that of an environment with vLLM, such as `.ci/vllm install` makes. One server and one
engine that is asked directly serve the teacher in float32, with as many threads. They are given
the same documents by turns: the engine's time is that of its own `generate` with as many log-probs
of the prompts, the server's is that of all of `qat cache`, from text to shards. So is that of the
same teacher in this process.

The largest difference of a log-prob is taken before anything is stored: the server's top K against
this process's logits in float32, over all tokens that count. It alone is taken of a server that
runs already, whatever its engine:

    python speedrun/measure_served.py --teacher DIR --text FILE --figures FILE.jsonl --address URL
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from figures import record

from qat.data.build import build_cache
from qat.data.cache import SERVED_AS, TeacherInfo
from qat.data.config import CacheSettings
from qat.data.engines import Line
from qat.data.packing import PackedRows, position_ids
from qat.data.served import ServedTeacher, counted_parts
from qat.data.sources import open_source
from qat.data.stream import blocks
from qat.models.language_model import LanguageModel
from qat.models.load import load_teacher, load_tokenizer

NAME = "teacher"
DIRECT = """
import json, sys, time
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

if __name__ == "__main__":
    path, k, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    documents = json.loads(sys.stdin.readline())
    llm = LLM(model=path, dtype="float32", enforce_eager=True, max_logprobs=k,
              max_model_len=context, disable_log_stats=True)
    how = SamplingParams(max_tokens=1, prompt_logprobs=k)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in documents]
    llm.generate(prompts[:4], how, use_tqdm=False)
    print("READY", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        found = llm.generate(prompts, how, use_tqdm=False)
        took = time.perf_counter() - began
        assert all(len(each.prompt_logprobs[-1]) >= k for each in found)
        print("TOOK", took, flush=True)
"""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # threads that are bound would all be bound to the same core
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def main() -> None:
    """Print and record the difference, and the times by turns."""
    arguments = parse()
    torch.set_num_threads(1)
    settings = CacheSettings(
        data=arguments.text,
        sequence_length=arguments.length,
        top_k=arguments.top_k,
        num_sequences=arguments.sequences,
        held_out=0.0,
        shard_size=max(1, arguments.sequences // 4),
    )
    tokenizer = load_tokenizer(arguments.teacher)
    packed = [b.packed for b in blocks(open_source(settings.data).documents, tokenizer, settings)]
    model = load_teacher(arguments.teacher, device="cpu", dtype="fp32")
    with served(arguments) as address:
        teacher = ServedTeacher(address, arguments.name, model.head.out_features)
        teacher.check(tokenizer, settings.sequence_length, settings.top_k)
        worst, mean = difference(teacher, address, model, packed, k=settings.top_k)
        figure, goal = "served_diff", "stated"
        if arguments.vllm:
            figure, goal = "server_cache_diff", "<= 0.001"
        keep(arguments, figure, worst, "nats", goal)
        keep(arguments, f"{figure}_mean", mean, "nats", "stated")
        if arguments.vllm is None:
            return
        documents = documents_of(packed)
        num_tokens = sum(map(len, documents))
        times: dict[str, list[float]] = {"server": [], "engine": [], "here": []}
        with direct(arguments, documents) as go, tempfile.TemporaryDirectory() as folder:
            for turn in range(arguments.rounds):
                times["engine"].append(go())
                for way, who in (("server", teacher), ("here", model)):
                    began = time.perf_counter()
                    build_cache(
                        settings,
                        tokenizer=tokenizer,
                        teacher=who,
                        info=about(way, model),
                        documents=open_source(settings.data).documents,
                        out=Path(folder, f"{way}{turn}"),
                    )
                    times[way].append(time.perf_counter() - began)
                print({way: f"{num_tokens / took[-1]:.0f} tokens/s" for way, took in times.items()})
    for figure, other, goal in [
        ("server_cache_overhead", "engine", "<= 1.15"),
        ("server_cache_over_process", "here", "stated"),
    ]:
        ratios = [a / b for a, b in zip(times["server"], times[other], strict=True)]
        keep(arguments, figure, statistics.median(ratios), "ratio", goal, ratios)
    for way, took in times.items():
        speeds = [num_tokens / each for each in took]
        keep(arguments, f"server_cache_tokens_per_s_{way}", statistics.median(speeds), "1/s",
             "stated", speeds)  # fmt: skip


def keep(  # noqa: PLR0917
    arguments: argparse.Namespace,
    figure: str,
    value: float,
    unit: str,
    goal: str,
    runs: Sequence[float] = (0.0,),
) -> None:
    """Print and record a figure, the median of `runs` if there are several."""
    figure += f"_{arguments.label}" if arguments.label else ""
    print(f"{figure}: {value:.4g} {unit} (goal {goal})")
    spread = float(f"{statistics.stdev(runs):.2g}") if len(runs) > 1 else None
    record(
        arguments.figures, figure, float(f"{value:.4g}"), unit, goal, runs=len(runs), spread=spread
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", required=True, help="a model's directory")
    parser.add_argument("--text", required=True, help="anything that qat cache --data takes")
    parser.add_argument("--figures", type=Path, required=True)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--vllm", type=Path, help="Python of vLLM's environment")
    asked.add_argument("--address", help="of a server that has the teacher, http://HOST/v1")
    parser.add_argument("--name", default=NAME, help="what that server calls the teacher")
    parser.add_argument("--label", default="", help="behind the name of every figure")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def documents_of(packed: list[PackedRows]) -> list[list[int]]:
    """What a server is sent of packed sequences."""
    return [
        tokens[part].tolist()
        for rows in packed
        for tokens, starts, mask in zip(*rows[:3], strict=True)
        for part in counted_parts(starts, mask)
    ]


@torch.no_grad()
def difference(
    teacher: ServedTeacher,
    address: str,
    model: LanguageModel,
    packed: list[PackedRows],
    *,
    k: int,
) -> tuple[float, float]:
    """The largest and the mean difference of the server's log-probs from this process's, nats."""
    worst, total, count = 0.0, 0.0, 0
    with closing(Line(address)) as line:
        for rows in packed:
            for row in zip(*rows[:3], strict=True):
                said = teacher.likeliest(line, *row, k=k)
                tokens, starts = (torch.from_numpy(each)[None] for each in row[:2])
                hidden = model.hidden(tokens.long(), position_ids(starts))[0]
                exact = model.logits(hidden[torch.from_numpy(said.places)]).log_softmax(-1)
                found = exact.gather(1, torch.from_numpy(said.ids)).double()
                gaps = (found - torch.from_numpy(said.logprobs)).abs()
                worst, total = max(worst, gaps.max().item()), total + gaps.sum().item()
                count += gaps.numel()
    return worst, total / count


def about(way: str, model: LanguageModel) -> TeacherInfo:
    """What a manifest says of the teacher."""
    return TeacherInfo(
        name=NAME,
        identity=f"{SERVED_AS}{'0' * 12}" if way == "server" else "0" * 32,
        vocab_size=model.head.out_features,
        max_positions=None,
        dtype="unknown" if way == "server" else "float32",
    )


@contextmanager
def served(arguments: argparse.Namespace) -> Iterator[str]:
    """The address of a server of the teacher, which is started if none is named."""
    if arguments.address:
        yield arguments.address
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = [
        arguments.vllm.parent / "vllm", "serve", arguments.teacher,
        "--served-model-name", arguments.name,
        "--dtype", "float32", "--enforce-eager", "--max-logprobs", arguments.top_k,
        "--max-model-len", arguments.length + 1, "--host", "127.0.0.1", "--port", port,
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [*map(str, words)],
            stdout=log,
            stderr=log,
            env=os.environ | ENVIRONMENT,  # noqa: TID251
        )
        try:
            for _ in range(600):
                if server.poll() is not None:
                    log.seek(0)
                    sys.exit(log.read().decode(errors="replace")[-2000:])
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                    break
                except OSError:
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(60)


@contextmanager
def direct(arguments: argparse.Namespace, documents: list[list[int]]) -> Iterator:
    """A function that has the engine read all documents, and gives the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "direct.py")
        script.write_text(DIRECT, encoding="utf-8")
        words = [arguments.vllm, script, arguments.teacher, arguments.top_k, arguments.length + 1]
        engine = subprocess.Popen(
            [*map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,  # noqa: TID251
        )

        def until(mark: str) -> str:
            for said in engine.stdout:
                if said.startswith(mark):
                    return said.removeprefix(mark)
            sys.exit(f"the engine ended with {engine.wait()}")

        def go() -> float:
            print("go", file=engine.stdin, flush=True)
            return float(until("TOOK"))

        try:
            print(json.dumps(documents), file=engine.stdin, flush=True)
            until("READY")
            yield go
        finally:
            engine.stdin.close()
            engine.wait(60)


if __name__ == "__main__":
    main()
