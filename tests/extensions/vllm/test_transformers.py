"""Transformers alone, without our loop, decodes from packed weights and serves them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from served_case import (
    NUM_TOKENS,
    PROMPTS,
    ask,
    at_once,
    chat,
    free_port,
    make,
    ours,
    serving,
    streamed,
)
from tiny import tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils.import_utils import is_serve_available

from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.generate.text import generate_text, open_generator
from qat.models.directory import CHECKSUMS
from qat.nn.quant_linear import quant_linears

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # a Llama: of Qwen3 the server reads answers by the marks of its own chats
    return make(tmp_path_factory.mktemp("made") / "student", "llama", tie_word_embeddings=True)


def opened(path: Path) -> PreTrainedModel:
    """Open a model by transformers alone; its generation continues after an end token."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
    )
    return model


def together(model: PreTrainedModel, **settings: object) -> list[list[int]]:
    """Return the tokens of `generate` for all prompts at once, padded on the left."""
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in PROMPTS])
    said = model.generate(ids, attention_mask=mask, **settings)
    return said[:, longest:].tolist()


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3_moe"])
def test_batches_say_what_the_dense_export_says(architecture: str, tmp_path: Path) -> None:
    path = make(tmp_path / "student", architecture, num_hidden_layers=2, hidden_size=64)
    packed = opened(path)
    expected = [ours(packed, prompt) for prompt in PROMPTS]
    assert together(packed) == expected
    assert together(packed, cache_implementation="static") == expected
    export_model(str(path), ExportConfig(to="dense", dtype="fp32"), tmp_path / "dense")
    assert together(opened(tmp_path / "dense")) == expected
    # no weight was left formed
    assert all(linear.formed is None for linear in quant_linears(packed).values())


def test_qat_generate_says_the_same(student: Path) -> None:
    model, (generator, tokenizer) = (
        opened(student),
        open_generator(str(student), device="cpu", dtype="fp32"),
    )
    ids = tokenizer("the cat sat", return_tensors="pt").input_ids
    said = until_end(model.generate(ids)[0, ids.shape[1] :].tolist())
    words = {"raw": True, "temperature": 0, "max_new_tokens": NUM_TOKENS}
    found = generate_text(generator, tokenizer, "the cat sat", **words).text
    assert found == tokenizer.decode(said, skip_special_tokens=True)


@pytest.mark.slow
def test_requests_that_come_and_go_say_the_same(student: Path) -> None:
    model = opened(student)
    expected = [ours(model, prompt) for prompt in PROMPTS]
    model.generation_config.eos_token_id = -1
    # else it takes most of the machine's memory for its cache
    pages = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    said = model.generate_batch(
        PROMPTS, generation_config=model.generation_config, continuous_batching_config=pages
    )
    assert [each.generated_tokens for each in said.values()] == expected


@pytest.mark.slow
def test_the_page_runs_as_written_without_a_token_to_pad_with(
    student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(student, tmp_path / "student")
    (path / CHECKSUMS).unlink()
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(path)
    page = (ROOT / "qat/extensions/vllm/README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    said = {}
    exec(code.replace("checkpoints/q2", str(path)), said)
    assert len(said["answers"]) == len(said["prompts"]) == 2
    assert len(said["answer"].generated_tokens) <= 32 and capsys.readouterr().out


def command(path: Path, port: int = 0) -> list[str]:
    return [
        sys.executable, "-m", "qat.extensions.vllm.transformers", "serve", str(path),
        "--device", "cpu", "--dtype", "float32", "--continuous-batching", "--cb-num-blocks", "8",
        "--cb-max-batch-tokens", "64", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


needs_server = pytest.mark.skipif(
    not is_serve_available(), reason="the web packages of transformers[serving] are not installed"
)


@pytest.mark.slow
@needs_server
def test_an_endpoint_answers_two_at_once_and_streams(student: Path, tmp_path: Path) -> None:
    port, words = free_port(), ("the cat sat", "the dog saw the mat")
    with serving(command(student, port), port, tmp_path / "log"):
        choices = at_once(lambda w: ask(port, student, w), words)
        model, tokenizer = opened(student), tiny_tokenizer()
        for w in words:
            expected = tokenizer.decode(until_end(ours(model, chat(w))), skip_special_tokens=True)
            assert choices[w]["message"]["content"] == expected
        pieces = streamed(ask(port, student, words[1], stream=True))
    said = "".join(piece["delta"].get("content") or "" for piece in pieces)
    # the server streams no half of a character, which an answer of 16 tokens may end in
    assert len(pieces) > 2
    assert said == choices[words[1]]["message"]["content"].rstrip("\ufffd")


def until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(0)] if 0 in tokens else tokens


def refused(path: Path) -> str:
    done = subprocess.run(command(path), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_what_cannot_be_served_is_one_line(student: Path, tmp_path: Path) -> None:
    assert refused(tmp_path / "none").startswith(f"qat: {tmp_path}/none does not exist")
    if not is_serve_available():
        assert refused(student).startswith("qat: the server of transformers misses packages of its")
        return
    newer = shutil.copytree(student, tmp_path / "newer")
    config = json.loads((newer / "config.json").read_text())
    config["quantization_config"]["format"] = 99
    (newer / "config.json").write_text(json.dumps(config))
    (newer / CHECKSUMS).unlink()
    assert refused(newer).startswith("qat: quantization_config has format=99, expected format=")
