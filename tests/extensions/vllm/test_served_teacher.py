"""A cache of what vLLM's own server says, and whether it still says what was recorded of it."""

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from cache_case import TOKENIZER
from engine_case import (
    NAME,
    RECORDED,
    Recorder,
    check_equal,
    played,
    recorded_build,
    recorded_teacher,
)
from served_case import free_port, serving
from tiny import VOCAB

from qat.errors import ConfigError
from qat.extensions.served.engines import Client
from qat.extensions.served.teacher import ServedTeacher

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; .ci/vllm runs these tests", allow_module_level=True)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the recorded teacher, without /v1."""
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    recorded_teacher().model.save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    words = [
        str(Path(sys.executable).parent / "vllm"), "serve", str(folder / "model"),
        "--served-model-name", NAME, "--enforce-eager", "--dtype", "float32",
        "--max-model-len", "128", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    with serving(words, port, folder / "log"):
        yield f"http://127.0.0.1:{port}"


def check_same(mine: object, known: object) -> None:
    """Check that two answers are equal, but for log-probs in their fourth digit."""
    if isinstance(known, dict):
        assert isinstance(mine, dict) and mine.keys() == known.keys()
        for name in known:
            check_same(mine[name], known[name])
    elif isinstance(known, list):
        assert isinstance(mine, list)
        for pair in zip(mine, known, strict=True):
            check_same(*pair)
    else:
        assert mine == (pytest.approx(known, abs=1e-3) if isinstance(known, float) else known)


def test_its_cache_is_that_of_the_same_teacher_here(root: str, tmp_path: Path) -> None:
    recorder = Recorder(root)
    with played(recorder) as address:
        found = recorded_build(address, tmp_path / "served")
    # to keep a new one: copy this file to tests/data
    fresh = tmp_path / RECORDED.name
    exchange = sorted(recorder.exchange, key=lambda each: json.dumps(each["body"]))
    fresh.write_text(json.dumps(exchange, separators=(",", ":")) + "\n", encoding="utf-8")
    check_equal(found, recorded_build(recorded_teacher(), tmp_path / "local"))
    known = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert [each["body"] for each in exchange] == [each["body"] for each in known], fresh
    for mine, theirs in zip(exchange, known, strict=True):
        check_same(mine, theirs)


@torch.no_grad()
def test_its_log_probs_are_ours_to_a_thousandth(root: str) -> None:
    ids = torch.randint(4, VOCAB, (96,), generator=torch.Generator().manual_seed(0))
    is_first, is_last = torch.arange(96) == 0, torch.arange(96) == 95
    asked = ServedTeacher(f"{root}/v1", NAME, VOCAB)
    asked.check(TOKENIZER, 96, 20)
    with closing(Client(f"{root}/v1")) as client:
        said = asked.top_logprobs(client, (ids.numpy(), is_first.numpy(), ~is_last.numpy()), 20)
    model = recorded_teacher()
    exact = model.logits(model.hidden(ids[None], torch.arange(96)[None]))[0, :-1].log_softmax(-1)
    found = torch.from_numpy(said.logprobs)
    expected = exact.gather(1, torch.from_numpy(said.ids)).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.exp(), exact.topk(20).values.double().exp(), rtol=0, atol=1e-5)
    following = exact.gather(1, ids[1:, None])[:, 0].double()
    torch.testing.assert_close(torch.from_numpy(said.next_logprob), following, rtol=0, atol=1e-3)


def test_its_limits_are_told(root: str) -> None:
    asked = ServedTeacher(f"{root}/v1", NAME, VOCAB)
    with pytest.raises(ConfigError, match=r"answers 400 .*; start vLLM with --max-logprobs 21, or"):
        asked.check(TOKENIZER, 96, 21)
    with pytest.raises(ConfigError, match="reads at most 127 tokens and the one that it writes"):
        asked.check(TOKENIZER, 128, 5)
    with pytest.raises(ConfigError, match="serves tiny, expected other"):
        ServedTeacher(f"{root}/v1", "other", VOCAB).check(TOKENIZER, 96, 5)
