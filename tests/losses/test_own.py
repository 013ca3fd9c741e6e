"""A loss registered from outside counts wherever losses on a cache are named."""

import pytest
import torch
from cache_case import build
from torch import Tensor

from qat.data.reader import TeacherCache
from qat.errors import ConfigError
from qat.losses import register
from qat.losses.config import OWN, check_targets, parse_losses, targets_read
from qat.losses.formulas import Student, Targets, loss_from_logits, sum_valid, tail, to_targets


@pytest.fixture(autouse=True)
def _forget():
    yield
    OWN.clear()


def doubled(student: Student, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    return 2 * tail(student, targets, temperature=temperature)


def text_alone(student: Student, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    return sum_valid(student.lse() - student.label[:, 0], targets.mask & (targets.labels >= 0))


def test_it_is_a_loss_like_others(tmp_path) -> None:
    register("doubled", doubled)
    register("text_alone", text_alone, reads="labels")
    build(tmp_path / "cache")
    targets = to_targets(TeacherCache.open(tmp_path / "cache").batch(range(3)))
    logits = torch.randn(len(targets.mask), 320)
    terms = parse_losses("doubled:0.5,tail:1,text_alone,hard_ce")
    found = loss_from_logits(logits, targets, terms)
    assert found["doubled"] == 2 * found["tail"] and found["text_alone"] == found["hard_ce"]
    torch.testing.assert_close(found["loss"], 2 * found["tail"] + 2 * found["hard_ce"])
    assert targets_read(["doubled", "text_alone"]) == {"topk"}


def test_a_cache_that_lacks_what_it_reads_is_refused() -> None:
    register("doubled", doubled)
    register("text_alone", text_alone, reads="labels")
    check_targets({"text_alone": 1.0}, top_k=0, draws=50)
    with pytest.raises(ConfigError, match=r"loss=doubled reads the teacher's topk.*text_alone"):
        check_targets({"doubled": 1.0}, top_k=0, draws=50)
    with pytest.raises(ConfigError, match="loss=doubled reads the teacher's mass outside"):
        check_targets({"doubled": 1.0}, top_k=4, draws=0, has_tail=False)
    register("doubled", doubled, reads_tail=False)  # a name may be given again
    check_targets({"doubled": 1.0}, top_k=4, draws=0, has_tail=False)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("tail", {}, "name='tail' is a loss of qat's own"),
        ("loss", {}, "name='loss' is a loss of qat's own"),
        ("own_kd", {}, "own_ begins the losses on a student's own words"),
        ("my:loss", {}, "expected lower-case letters"),
        ("mine", {"reads": "logits"}, "expected topk, draws or labels"),
    ],
)
def test_mistakes(name: str, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register(name, doubled, **settings)
    assert name not in OWN
