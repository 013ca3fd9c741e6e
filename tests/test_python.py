"""The functions of `import qat`, and that the page about them is true."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cache_case import TOKENIZER, texts
from cache_case import build as build_cache
from tiny import tiny_model
from transformers import PreTrainedModel

import qat
from qat.cli import run_verb
from qat.convert.checkpoint import convert_checkpoint
from qat.convert.config import ConvertConfig
from qat.data.reader import TeacherCache
from qat.errors import CacheError, ConfigError
from qat.losses.config import OWN
from qat.models.checkpoint import load_checkpoint
from qat.models.stored_state import packed_state_dict
from qat.nn.quant_linear import quant_linears

pytestmark = pytest.mark.usefixtures("short_fits")

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```|^    (qat .*?)$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def own_losses():
    """Forget afterwards what the test registered."""
    yield OWN
    OWN.clear()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A float model with its tokenizer, a text and a cache."""
    place = tmp_path_factory.mktemp("python")
    save_float(one_layer(), place / "my-model")
    (place / "my-texts.txt").write_text("\n\n".join(texts(200)))
    build_cache(place / "cache")
    return place


def one_layer(seed: int = 0) -> PreTrainedModel:
    return tiny_model(seed=seed, num_hidden_layers=1)


def save_float(model: PreTrainedModel, out: Path) -> None:
    model.save_pretrained(out)
    TOKENIZER.save_pretrained(out)


def same_state(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    a, b = packed_state_dict(a), packed_state_dict(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_the_page_runs(place: Path, monkeypatch, own_losses) -> None:
    monkeypatch.chdir(place)
    names: dict[str, object] = {}
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 5
    for code, command in blocks:
        if command:
            run_verb(shlex.split(command)[1:])
        else:
            exec(compile(code, str(PAGE), "exec"), names)
    assert names["report"].final.is_dir() and names["best"].name_or_path


def test_import_is_light_and_tells_what_there_is() -> None:
    script = (
        "import sys, qat\n"
        "assert {'quantize', 'load', 'save', 'distill', 'losses'} <= set(dir(qat))\n"
        "assert qat.losses.register\n"
        "sys.exit(str({'torch', 'transformers'} & set(sys.modules) or ''))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stderr.strip() == ""
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = qat.quantise


def test_quantize_is_the_verb(place: Path, tmp_path: Path) -> None:
    directory = place / "cache"
    config = ConvertConfig(to="q2a4", group_size=16, calibration=str(directory), device="cpu")
    convert_checkpoint(str(place / "my-model"), config, tmp_path / "verb")
    model = qat.load(place / "my-model", device="cpu", dtype="fp32")
    opened = TeacherCache.open(directory)
    assert qat.quantize(model, "q2a4", calibration=opened, group_size=16) is model
    qat.save(model, tmp_path / "cache")
    assert same_state(load_checkpoint(tmp_path / "verb"), qat.load(tmp_path / "cache"))
    assert (tmp_path / "cache" / "tokenizer.json").exists()


def test_tokens_of_any_length_calibrate(place: Path) -> None:
    tokens = [torch.randint(0, 320, (24,)), torch.randint(0, 320, (5, 32))]
    model = qat.quantize(one_layer(), "q2a2", calibration=tokens, group_size=16)
    assert all(linear.reader is not None for linear in quant_linears(model).values())
    plain = qat.quantize(one_layer(), "q2a2", group_size=16)
    assert not same_state(model, plain)
    with pytest.raises(ConfigError, match="rows of up to 200 tokens, expected 2 to 128"):
        qat.quantize(one_layer(), "q2a2", calibration=[torch.zeros(200)])


def test_mistakes_of_quantize() -> None:
    for to, settings, message in (
        ("q9", {}, "to=q9 is neither a file nor a preset"),
        ("q2a4", {"group_sise": 4}, "group_sise is unknown; did you mean 'group_size'"),
        (None, {"bits_budget": 3.0}, "without a text to measure sensitivities"),
        ("q2a4", {"calibration": ["a text"]}, "not loaded from a directory with a tokenizer"),
    ):
        with pytest.raises(ConfigError, match=message):
            qat.quantize(one_layer(), to, **settings)


SHORT = {"max_steps": 4, "batch_size": 4, "eval_every": 2, "save_every": 2, "device": "cpu"}


def test_distill_in_memory_is_distill_of_the_directory(place: Path, tmp_path: Path) -> None:
    model = qat.quantize(one_layer(), "q2a2", group_size=16)
    qat.save(model, tmp_path / "student", TOKENIZER)
    paths = place / "cache", tmp_path / "student"
    of_directory = qat.distill(paths[1], paths[0], out=tmp_path / "a", **SHORT)
    cache = TeacherCache.open(place / "cache")
    of_memory = qat.distill(model, cache, out=tmp_path / "b", tokenizer=TOKENIZER, **SHORT)
    assert of_memory.best == of_directory.best
    assert same_state(qat.load(of_memory.final), qat.load(of_directory.final))


@pytest.mark.slow
def test_distill_goes_on(place: Path, tmp_path: Path) -> None:
    def student() -> PreTrainedModel:
        return qat.quantize(one_layer(), "q2a2", group_size=16)

    where = {"out": tmp_path / "run", "tokenizer": TOKENIZER, **SHORT}
    first = qat.distill(student(), place / "cache", **where)
    again = qat.distill(student(), place / "cache", resume=True, **where)
    assert again == first
    other = qat.quantize(one_layer(seed=1), "q2a2", group_size=16)
    with pytest.raises(ConfigError, match="the student was changed since"):
        qat.distill(other, place / "cache", resume=True, **where)


def test_distill_wants_the_tokenizer_of_the_cache(place: Path, tmp_path: Path) -> None:
    model = qat.quantize(one_layer(), "q2a2", group_size=16)
    with pytest.raises(ConfigError, match="give tokenizer="):
        qat.distill(model, place / "cache", out=tmp_path / "run", **SHORT)
    with pytest.raises(CacheError, match="holds no manifest|no cache|is not"):
        qat.distill(model, tmp_path, out=tmp_path / "run", tokenizer=TOKENIZER, **SHORT)
