"""A student drafts for its teacher: the text is the teacher's, to the token or in distribution."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli_case import call, said
from covering import covering
from tiny import save_tiny, tiny_model, tiny_tokenizer
from torch import Tensor
from torch.nn import functional as F

from qat.backend.cpu import CpuBackend
from qat.backend.device import seeded
from qat.extensions.decode.decoder import Decoder
from qat.extensions.decode.draft import Drafted
from qat.extensions.decode.rewind import rewindable
from qat.generate.sampling import Sampling, until_end
from qat.generate.text import continue_rows, generation_config
from qat.models.language_model import LanguageModel

RANGE = {"initializer_range": 0.3}
GREEDY = Sampling(0.0)


class Markov:
    """A model whose next word depends on the last one alone, so that all of it can be counted."""

    records = False

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        config = SimpleNamespace(vocab_size=len(logits))
        self.model = SimpleNamespace(device=logits.device, config=config)

    def begin(self, ids: Tensor, num_positions: int) -> Tensor:
        return self._logits[ids[0, -1:]]

    def __call__(self, tokens: Tensor, position: Tensor) -> Tensor:
        return self._logits[tokens]


def off_by(counts: Tensor, probs: Tensor) -> float:
    """Return how many standard deviations the chi-square of words after each word is too large."""
    expected = counts.sum(1, keepdim=True) * probs
    is_possible = expected > 0
    if counts[~is_possible].any():
        return torch.inf
    freedom = int(is_possible.sum()) - len(probs)
    found = ((counts - expected).square() / expected)[is_possible].sum()
    return float((found - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize(
    ("num_words", "sampling"), covering([3, 4, 6], [Sampling(1.0), Sampling(0.6, top_p=0.8)])
)
def test_words_follow_the_teachers_distribution(num_words: int, sampling: Sampling) -> None:
    """The draft's table has fewer rows than the teacher's, as many, or more."""
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(4, 4, generator=generator)
    draft = torch.randn(num_words, num_words, generator=generator)
    drafted = Drafted(Markov(teacher), Markov(draft), 3)
    with seeded(0):
        (row,) = drafted.generate(torch.tensor([[0]]), sampling, max_new_tokens=2000)
    counts = torch.zeros(4, 4)
    for word, following in zip(row, row[1:], strict=False):
        counts[word, following] += 1
    assert 1.2 < drafted.accepted_length < 3.8  # some are taken, some not
    assert off_by(counts, sampling.probs(teacher)) < 3
    other = F.pad(draft, (0, 4 - num_words) * 2, value=-9.0)  # what it would say alone
    assert off_by(counts, sampling.probs(other)) > 30


def changed(scale: float) -> LanguageModel:
    """The teacher with its weights off by `scale` of themselves."""
    model, generator = tiny_model(**RANGE), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + scale * torch.randn(parameter.shape, generator=generator))
    return LanguageModel(model)


@pytest.mark.parametrize("kind", ["model", "step", "graph"])
def test_greedy_tokens_are_the_teachers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row, its pieces and its end; the better the draft, the fewer passes of the teacher."""
    if kind == "graph":  # a replay runs the work again
        monkeypatch.setattr(CpuBackend, "records", True)
        monkeypatch.setattr(CpuBackend, "record", lambda self, run: (run, None))

    def drafted(scale: float) -> Drafted:
        pair = changed(0), changed(scale)
        if kind == "model":
            return Drafted(*map(rewindable, pair), 3)
        return Drafted(*(rewindable(Decoder(model)) for model in pair), 3)

    lengths = []
    for scale, num_prompt in ((0, 5), (0.03, 1), (0.03, 5), (1, 5)):
        ids, pieces = torch.arange(7, 7 + num_prompt)[None], []
        expected = continue_rows(changed(0), ids, generation_config([], 20, 0.0, 1.0))
        generator = drafted(scale)
        assert generator.generate(ids, GREEDY, max_new_tokens=20, seen=pieces.append) == expected
        assert sum((row for (row,) in pieces), []) == expected[0]
        lengths.append(generator.accepted_length)
        ends = {expected[0][11]}
        row = until_end(expected[0], ends)
        assert generator.generate(ids, GREEDY, max_new_tokens=20, ends=ends) == [row]
    assert lengths[0] == 4 > lengths[2] > lengths[3] >= 1
    generator.generate(ids, GREEDY, max_new_tokens=1)
    assert generator.accepted_length is None  # the prompt's pass said all
    with pytest.raises(ValueError, match="2 prompts at once"):
        generator.generate(ids.repeat(2, 1), GREEDY, max_new_tokens=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, a student, one with another tokenizer, and one that reads a sliding window."""
    folder = tmp_path_factory.mktemp("drafts")
    save_tiny(folder / "teacher", **RANGE)
    save_tiny(folder / "student", **RANGE, num_hidden_layers=1)
    filled = tiny_tokenizer()
    filled.add_tokens(f"[PAD{len(filled)}]")  # as in a GGUF file with a larger table
    filled.save_pretrained(folder / "student")
    save_tiny(folder / "window", "gemma3")
    save_tiny(folder / "other")
    tiny_tokenizer(262).save_pretrained(folder / "other")
    return folder


def test_the_verb_says_the_accepted_length(folders: Path, monkeypatch, capsys) -> None:
    words = ["generate", folders / "teacher", "--prompt", "the cat", "--device", "cpu"]
    words += ["--max-new-tokens", 12, "--temperature", 0]
    assert call(monkeypatch, *words) == 0
    alone = said(capsys)
    assert call(monkeypatch, *words, "--draft", folders / "student", "--draft-tokens", 2) == 0
    found = said(capsys)
    assert 1 <= found.pop("accepted_length") <= 3 and found.pop("tokens_per_s") > 0
    assert found.pop("draft") == str(folders / "student")
    del alone["tokens_per_s"]
    assert found == alone


def test_mistakes_are_one_line(folders: Path, monkeypatch, capsys) -> None:
    teacher, student = folders / "teacher", folders / "student"
    for model, words, message in (
        (teacher, (folders / "other",), f"draft={folders / 'other'} calls token 262 None"),
        (teacher, (folders / "nowhere",), "nowhere"),
        (teacher, (student, "--draft-tokens", 0), "draft_tokens='0': Input should be greater"),
        (teacher, (folders / "window",), "Gemma3ForCausalLM keeps DynamicSlidingWindowLayer"),
        (folders / "window", (student,), "Gemma3ForCausalLM keeps DynamicSlidingWindowLayer"),
    ):
        assert call(monkeypatch, "generate", model, "--device", "cpu", "--draft", *words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
