"""A student of many formats, as engines are given one, and what we say after its prompts."""

import json
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import torch
from quantized import SPECS, frozen_linear, random_weight, with_adapter, with_rounded_inputs
from tiny import ARCHITECTURES, tiny_model, tiny_tokenizer
from tiny import SHAPE as TINY
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qat.models.checkpoint import save_checkpoint
from qat.models.document_attention import set_kv
from qat.models.stored_state import quantized_modules
from qat.nn.sites import open_sites, unseen_input
from qat.nn.swap import linear_names, put_table, replace_module, table_names, weight_shape
from qat.quant.spec import ActivationKind, KvSpec, LutSpec

PROMPTS = [[5, 6, 7], [100, 3, 44, 212, 9, 31, 7], [270], [17] * 9]
NUM_TOKENS = 16
FORMATS = [*SPECS.values()]
# in this order the answers are characters; of half ones a server streams nothing
FORMATS.insert(10, FORMATS.pop(FORMATS.index(SPECS["sparse"])))
FORMATS.insert(8, None)  # the keys of the second layer stay in floating point
SHAPE = {"head_dim": 64, "num_hidden_layers": 3, "num_key_value_heads": 2}
MIXTURE = {
    "hidden_size": 128,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
"""Settings of a mixture of experts, whose width suits families that have no `head_dim`."""


def make(
    path: Path,
    architecture: str = "qwen3",
    specs: Iterable[LutSpec | None] = FORMATS,
    kind: ActivationKind | None = None,
    kv: int | None = None,
    **overrides: object,
) -> Path:
    """A student whose linears take `specs` in turn, every third with an adapter, and tables.

    `architecture` is one of the tiny models, or a mixture's `model_type`. Inputs are rounded by
    `kind`, keys and values to `kv` bits.
    """
    if architecture in ARCHITECTURES:
        model = tiny_model(architecture, **SHAPE | overrides)
    else:
        settings = TINY | SHAPE | MIXTURE | overrides
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings))
        open_sites(model)
    for index, (name, spec) in enumerate(zip(linear_names(model), cycle(specs))):
        if spec is None:
            continue
        old = model.get_submodule(name)
        linear = frozen_linear(*old.weight.shape, spec, bias=old.bias is not None)
        replace_module(model, name, with_adapter(linear) if index % 3 == 0 else linear)
    for name in table_names(model):
        spec = SPECS["lut4" if "embed" in name else "int3_s8"]
        put_table(model, name, random_weight(*weight_shape(model.get_submodule(name)), spec), spec)
    if kind is not None:
        with_rounded_inputs(model, kind)
        for name, module in quantized_modules(model).items():
            owner, _, own = name.rpartition(".")
            if unseen_input(model.get_submodule(owner), own) is not None:
                module.activation = None
    if kv is not None:
        set_kv(model, KvSpec(bits=kv))
    save_checkpoint(model.eval(), tiny_tokenizer(), path)
    return path


@torch.no_grad()
def ours(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy tokens by whole forwards."""
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def chat(words: str) -> list[int]:
    """The tokens of a message and of what stands before its answer."""
    messages = [{"role": "user", "content": words}]
    prompt = tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=True)
    return list(prompt["input_ids"])


def free_port() -> int:
    """A port of loopback that nobody listens to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def ask(port: int, path: Path, words: str, **settings: object) -> bytes:
    """Return an endpoint's answer to a message."""
    body = {
        "model": str(path),
        "messages": [{"role": "user", "content": words}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
    } | settings
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


@contextmanager
def serving(command: list[str], port: int, log: Path) -> Iterator[None]:
    """A server that answers at `port` until the block ends."""
    with open(log, "w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        for _ in range(240):
            assert server.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        yield
    finally:
        server.terminate()
        server.wait(60)


def at_once(answer: Callable[[str], bytes], words: Iterable[str]) -> dict[str, dict]:
    """The first choice of each answer to messages that are sent at the same time."""
    answers: dict[str, bytes] = {}
    threads = [threading.Thread(target=lambda w=w: answers.update({w: answer(w)})) for w in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {w: json.loads(answers[w])["choices"][0] for w in words}


def streamed(answer: bytes) -> list[dict]:
    """The first choice of each piece of a streamed answer."""
    lines = answer.decode().splitlines()
    return [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
