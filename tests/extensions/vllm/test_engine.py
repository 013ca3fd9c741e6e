"""vLLM's own engine on the CPU: it opens packed checkpoints as they are, and says what we say."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from quantized import SPECS, frozen_linear, random_weight, tiny_quantized
from safetensors.torch import load_file
from served_case import (
    NUM_TOKENS,
    PROMPTS,
    SHAPE,
    ask,
    at_once,
    chat,
    free_port,
    make,
    ours,
    serving,
    streamed,
)
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor
from train_case import train_tables
from transformers import PreTrainedModel

from qat.errors import CheckpointError
from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.directory import CHECKSUMS
from qat.models.document_attention import set_kv
from qat.models.stored_state import quantized_modules
from qat.nn.swap import linear_names, put_table, replace_module, table_names, weight_shape
from qat.quant.spec import ActivationKind, LutSpec

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; .ci/vllm runs these tests", allow_module_level=True)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[3]
SHARED = {"shared_expert_intermediate_size": 64}
# by default the engine refuses to start unless nearly all memory is free
ENGINE = {
    "enforce_eager": True,
    "max_model_len": 64,
    "disable_log_stats": True,
    "gpu_memory_utilization": 0.3,
}


def theirs(
    path: Path, dtype: str = "float32", **settings: object
) -> tuple[list[list[int]], Tensor]:
    """Greedy tokens of the engine, all prompts at once, and the log-prob of each."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(path), dtype=dtype, **ENGINE | settings)
    try:
        sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        said = [each.outputs[0] for each in llm.generate(prompts, sampling, use_tqdm=False)]
        logprobs = [[next(iter(each.values())).logprob for each in one.logprobs] for one in said]
        return [list(each.token_ids) for each in said], torch.tensor(logprobs)
    finally:
        llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": False, "num_hidden_layers": 2}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": False}),
        ("gemma3", {}),
        ("qwen3_moe", {"tie_word_embeddings": True}),
        ("qwen3_moe", {"tie_word_embeddings": False, "mlp_only_layers": [1]}),
        ("qwen2_moe", {"num_hidden_layers": 2, **SHARED}),
        ("olmoe", {"intermediate_size": 64}),
    ],
    ids=["tied", "untied", "biased", "scaled", "mixture", "every other", "shared", "normed"],
)
def test_greedy_tokens_are_ours(architecture: str, overrides: dict, tmp_path: Path) -> None:
    path = make(tmp_path / "student", architecture, **overrides)
    model = load_checkpoint(path, torch.float32)
    assert theirs(path)[0] == [ours(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("form", ["lut4", "pairs6"])
def test_greedy_tokens_are_ours_where_tables_learned(
    form: str, is_tied: bool, tmp_path: Path
) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"], tie_word_embeddings=is_tied, **SHAPE)
    for name in table_names(model):
        weight = random_weight(*weight_shape(model.get_submodule(name)), SPECS[form])
        put_table(model, name, weight, SPECS[form])
    path = train_tables(tmp_path, model.eval())
    student = load_checkpoint(path, torch.float32)
    said, found = theirs(path)
    assert said == [ours(student, prompt) for prompt in PROMPTS]
    assert (found - logprobs(student, said)).abs().max() < 1e-4


@torch.no_grad()
def logprobs(model: PreTrainedModel, said: list[list[int]]) -> Tensor:
    """Return our log-probs of the tokens that were generated after the prompts."""
    found = []
    for prompt, words in zip(PROMPTS, said, strict=True):
        logits = model(torch.tensor([prompt + words])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(words)[:, None])[:, 0])
    return torch.stack(found)


@pytest.mark.parametrize(
    ("architecture", "kind", "kv", "overrides"),
    [
        ("qwen3", "int8", None, {"tie_word_embeddings": True}),
        ("qwen3", "int8-asymmetric", 8, {"tie_word_embeddings": False}),
        ("llama", "int8-static", None, {"tie_word_embeddings": True}),
        ("qwen3", "int8-static", 4, {"tie_word_embeddings": False}),
        # 8-bit floats beside a rounded cache: one number that takes the code next to it is 6 % off
        # and moves a token, as it does between our own decoding and our own forward pass
        ("qwen3", "fp8", None, {"tie_word_embeddings": True}),
        ("gemma3", None, 4, {}),
        ("qwen3", None, 8, {"specs": [None], "tie_word_embeddings": True}),
        ("qwen3_moe", "int8-static", 8, {}),
    ],
)
def test_greedy_tokens_are_ours_where_inputs_or_caches_are_rounded(
    architecture: str, kind: ActivationKind | None, kv: int | None, overrides: dict, tmp_path: Path
) -> None:
    path = make(tmp_path / "student", architecture, kind=kind, kv=kv, **overrides)
    model = load_checkpoint(path, torch.float32)
    said, found = theirs(path)
    assert said == [ours(model, prompt) for prompt in PROMPTS]

    # a number between two codes may take either, by the last bit of what it was computed from, and
    # moves the rest of its prompt, which a median over four prompts does not see
    def apart() -> float:
        return (found - logprobs(model, said)).abs().median().item()

    noise = apart()
    assert noise < 1e-5
    if kind is not None:
        for module in quantized_modules(model).values():
            module.activation = None
        assert apart() > 100 * max(noise, 1e-6)
    if kv is not None:
        model = load_checkpoint(path, torch.float32)
        set_kv(model, None)
        assert apart() > 100 * max(noise, 1e-6)


def check_refused(path: Path, message: str, **settings: object) -> None:
    """Check that the engine does not start."""
    from vllm import LLM

    with pytest.raises(CheckpointError, match=message):
        LLM(model=str(path), **ENGINE | settings)


def test_a_cache_that_would_round_once_more_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "student", kv=4, specs=[SPECS["lut2"]])
    refusal = "--kv-cache-dtype bfloat16 would round keys and values .* in 4 bits, expected auto;"
    check_refused(path, refusal, dtype="float32", kv_cache_dtype="bfloat16")


def test_a_layer_that_would_keep_what_is_not_rounded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import qwen3

    path = make(tmp_path / "student", kv=4, specs=[SPECS["lut2"]])
    told = qwen3.Attention

    def untold(*given: object, quant_config: object, **named: object) -> object:
        return told(*given, **named)

    monkeypatch.setattr(qwen3, "Attention", untold)
    refusal = r"rounds keys and values, but model.layers.0.self_attn.attn of vLLM is a Attention"
    check_refused(path, refusal)


def check_equal_but_for_ties(model: PreTrainedModel, said: list[list[int]]) -> None:
    """Check that the engine generates our tokens, up to where two tokens are equally likely."""
    for prompt, words in zip(PROMPTS, said, strict=True):
        expected = ours(model, prompt)
        if words == expected:
            continue
        same = next(i for i, (a, b) in enumerate(zip(words, expected, strict=True)) if a != b)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + words[:same]])).logits[0, -1].float()
        lead = logits[expected[same]] - logits[words[same]]
        assert lead <= 2**-6 * logits.abs().max()  # two roundings of the largest


def test_bfloat16_differs_at_ties_alone(tmp_path: Path) -> None:
    path = make(tmp_path / "student", tie_word_embeddings=True)
    check_equal_but_for_ties(load_checkpoint(path, torch.bfloat16), theirs(path, "bfloat16")[0])


def test_the_engines_own_class_reads_our_compressed_tensors(tmp_path: Path) -> None:
    """Integers of four bits, which vLLM multiplies with on a CPU too; no plug-in is asked."""
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM's product with integers of four bits on a CPU needs AVX-512")
    spec = LutSpec(bits=4, codebook="int", group_size=32, scale_bits=8)
    model = tiny_quantized("qwen3", spec, **SHAPE)
    save_checkpoint(model.eval(), tiny_tokenizer(), tmp_path / "packed")
    out = tmp_path / "out"
    export_model(str(tmp_path / "packed"), ExportConfig(to="compressed-tensors", dtype="bf16"), out)
    student = load_checkpoint(tmp_path / "packed", torch.bfloat16)
    check_equal_but_for_ties(student, theirs(out, "bfloat16")[0])


def test_the_engines_own_class_reads_the_names_of_model_optimizer(tmp_path: Path) -> None:
    """Its kernels for these need an NVIDIA GPU; what it makes of the numbers does not."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
        dequantize_to_dtype,
    )

    spec = LutSpec(bits=4, codebook="e2m1", group_size=16, scale_bits=8)
    model = tiny_model("qwen3", **SHAPE)
    for name in linear_names(model)[1:]:  # the first stays in floating point
        replace_module(model, name, frozen_linear(*model.get_submodule(name).weight.shape, spec))
    save_checkpoint(model.eval(), tiny_tokenizer(), tmp_path / "packed")
    out = tmp_path / "out"
    export_model(str(tmp_path / "packed"), ExportConfig(to="modelopt", dtype="bf16"), out)
    inside = json.loads((out / "config.json").read_text())["quantization_config"]
    assert ModelOptNvFp4Config.override_quantization_method(inside, None) == "modelopt_fp4"
    for said in (inside, json.loads((out / "hf_quant_config.json").read_text())):
        config = ModelOptNvFp4Config.from_config(said)
        assert (config.quant_method, config.group_size) == ("W4A16_NVFP4", 16)
        assert {*config.exclude_modules} == {linear_names(model)[0], "lm_head"}
    tensors = load_file(out / "model.safetensors")
    for name in linear_names(model)[1:]:
        parts = (tensors[f"{name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
        found = dequantize_to_dtype(*parts, torch.float32, swizzle=False)
        assert torch.equal(found, model.get_submodule(name).quantized_weight())


def run(*words: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


PARALLEL = """
import json, sys, test_engine
from pathlib import Path
if __name__ == "__main__":
    settings = json.loads(sys.argv[2]) | {"tensor_parallel_size": 2}
    said, _ = test_engine.theirs(Path(sys.argv[1]), **settings)
    print("SAID", json.dumps(said), flush=True)
"""


def parallel(path: Path, folder: Path, **settings: object) -> subprocess.CompletedProcess:
    """Two processes, each with half of every weight; workers import a file, so it is one."""
    script = folder / "parallel.py"
    script.write_text(PARALLEL, encoding="utf-8")
    tests = os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parent)])
    words = (script, path, json.dumps(settings))
    return run(*words, PYTHONPATH=tests, VLLM_CPU_OMP_THREADS_BIND="0|1")


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each of two processes")
@pytest.mark.parametrize(
    ("architecture", "overrides", "settings"),
    [
        ("qwen3", {"tie_word_embeddings": True}, {}),
        ("qwen2_moe", SHARED, {}),  # half of each expert
        ("qwen3_moe", {}, {"enable_expert_parallel": True}),  # three of five experts, and two
        ("qwen3", {"kind": "int8-asymmetric", "kv": 4}, {}),
        ("qwen2_moe", {"kind": "fp8", "intermediate_size": 128} | SHARED, {}),
    ],
    ids=["rows", "pieces", "experts", "rounded", "rounded pieces"],
)
def test_two_processes_say_the_same(
    architecture: str, overrides: dict, settings: dict, tmp_path: Path
) -> None:
    path = make(tmp_path / "student", architecture, **overrides)
    done = parallel(path, tmp_path, **settings)
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert said, done.stdout[-2000:] + done.stderr[-4000:]
    model = load_checkpoint(path, torch.float32)
    assert json.loads(said[0][5:]) == [ours(model, prompt) for prompt in PROMPTS]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each of two processes")
def test_a_number_of_processes_that_splits_a_group_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "student", specs=[SPECS["lut3"]], intermediate_size=96)
    done = parallel(path, tmp_path)
    assert done.returncode != 0
    refusal = (
        "down_proj: tensor parallelism over 2 processes gives each 48 of its 96 input features, "
        "which splits a group of 32; choose a size that leaves each a multiple of 32"
    )
    assert refusal in done.stdout + done.stderr


def serve(path: Path, port: int) -> list[str]:
    return [
        str(Path(sys.executable).parent / "vllm"), "serve", "--enforce-eager", "--dtype",
        "float32", "--max-model-len", "64", "--host", "127.0.0.1", "--port", str(port), str(path),
    ]  # fmt: skip


def tokens(port: int, path: Path, words: str, **settings: object) -> bytes:
    return ask(port, path, words, ignore_eos=True, return_token_ids=True, **settings)


def test_an_endpoint_answers_two_at_once_and_streams(tmp_path: Path) -> None:
    path, port = make(tmp_path / "student", tie_word_embeddings=True), free_port()
    words = ("the cat sat", "the dog saw the mat")
    with serving(serve(path, port), port, tmp_path / "log"):
        choices = at_once(lambda w: tokens(port, path, w), words)
        model = load_checkpoint(path, torch.float32)
        for w in words:
            assert choices[w]["token_ids"] == ours(model, chat(w))
        pieces = streamed(tokens(port, path, words[0], stream=True))
    said = [token for piece in pieces for token in piece.get("token_ids") or []]
    assert len(pieces) > 2 and said == choices[words[0]]["token_ids"]


def test_the_notebook_serves_a_run(tmp_path: Path) -> None:
    """Its cells that need vLLM, as a shell runs them; tests/notebooks run the others."""
    make(tmp_path / "q2/checkpoints/step-000002", tie_word_embeddings=True)
    (tmp_path / "q2/best").write_text("checkpoints/step-000002\n")
    values = {
        "OUT": str(tmp_path),
        "VLLM": str(Path(sys.executable).parent),
        "PORT": str(free_port()),
        "FLAGS": "--enforce-eager --dtype float32 --max-model-len 64",
    }
    notebook = json.loads((ROOT / "notebooks/serve.ipynb").read_text(encoding="utf-8"))
    cells = {
        cell["id"]: "".join(cell["source"])
        for cell in notebook["cells"]
        if "needs-vllm" in cell["metadata"].get("tags", ())
    }
    said = {}
    for name, command in cells.items():
        assert command.startswith("!")
        done = subprocess.run(
            ["bash", "-c", command[1:]],
            env=os.environ | values,
            stdout=subprocess.PIPE,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, (name, (tmp_path / "vllm.log").read_text()[-4000:])
        said[name] = done.stdout
    assert [*cells] == ["serve", "wait", "ask", "stop"]
    choice = json.loads(said["ask"])["choices"][0]
    assert choice["message"]["content"] and choice["finish_reason"] in ("stop", "length")


def refused(path: Path, *more: str) -> str:
    done = subprocess.run(
        [*serve(path, free_port()), *more], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    path = make(tmp_path / "student")
    (path / CHECKSUMS).unlink()
    config = json.loads((path / "config.json").read_text())
    stored = config["quantization_config"]
    for change, refusal in (
        ({"quantization_config": stored | {"format": 99}}, "qat: quantization_config has format="),
        ({"architectures": ["MoonForCausalLM"]}, f"qat: {path} has architectures=['MoonForCausal"),
    ):
        (path / "config.json").write_text(json.dumps(config | change))
        assert refused(path).startswith(refusal)
    assert refused(path.parent / "runs/none").startswith(f"qat: {path.parent}/runs/none does not")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (path / "config.json").write_text(json.dumps(config))
    assert refused(path).startswith(f"qat: {weights} cannot be read (")
    narrow = make(tmp_path / "narrow", specs=[SPECS["lut3"]], intermediate_size=96)
    words = refused(narrow, "--tensor-parallel-size", "2")
    assert words.startswith(
        "qat: model.layers.0.mlp.down_proj: tensor parallelism over 2 processes"
    )


def test_experts_of_a_family_that_vllm_looks_for_elsewhere_are_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "student", "mixtral", num_local_experts=4, specs=[SPECS["lut2"]])
    refusal = r"mlp.experts.\w+ holds experts of a mixtral, expected one of olmoe, qwen2_moe, "
    check_refused(path, refusal)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "student")
    shutil.copy(path / "tokenizer.json", path / "model.safetensors")
    check_refused(path, r"model.safetensors differs from its SHA-256")
