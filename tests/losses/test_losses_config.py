"""The notation of a weighted sum of losses, and what is refused."""

import pytest

from qat.errors import ConfigError
from qat.losses.config import (
    ON_CACHE,
    WITH_TEACHER,
    check_targets,
    check_with_teacher,
    parse_losses,
    targets_read,
)


def test_parse_losses() -> None:
    assert parse_losses("tail") == {"tail": 1.0} and parse_losses("kl") == {"kl": 1.0}
    assert parse_losses("tail:2, hard_ce:0.1") == {"tail": 2.0, "hard_ce": 0.1}


def test_which_targets_losses_read() -> None:
    assert targets_read(["tail", "hard_ce"]) == {"topk"}
    assert targets_read({"tail": 1.0, "sampled": 0.5}) == {"topk", "draws"}
    assert targets_read(["hard_ce"]) == targets_read(["jsd"], with_teacher=True) == set()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tial", "has no loss called 'tial'.*did you mean tail"),
        ("", "has no loss called ''.*NAME:WEIGHT"),
        ("tail,tail:2", "names tail twice"),
        ("tail:0", "weight '0'; expected a positive number"),
        ("tail:much", "weight 'much'"),
        ("tail:nan", "weight 'nan'"),
        ("tail:inf", "weight 'inf'"),
        ("tail:", "weight ''"),
    ],
)
def test_parse_losses_refuses(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_losses(text)


def test_check_targets() -> None:
    check_targets({"tail": 1.0, "hard_ce": 1.0}, top_k=8, draws=0)
    check_targets({"sampled": 1.0}, top_k=0, draws=12)
    with pytest.raises(ConfigError, match="jsd reads the teacher's topk.*'qat cache --top-k"):
        check_targets({"jsd": 1.0}, top_k=0, draws=12)
    with pytest.raises(ConfigError, match="draws=0; rebuild.*--draws 50' or choose among tail,"):
        check_targets({"sampled": 1.0}, top_k=8, draws=0)
    with pytest.raises(ConfigError, match="kl reads every word .*--teacher DIR' or choose among "):
        check_targets({"hard_ce": 1.0, "kl": 1.0}, top_k=8, draws=12)


def test_check_with_teacher() -> None:
    check_with_teacher(dict.fromkeys(WITH_TEACHER, 1.0))
    for name in set(ON_CACHE) - set(WITH_TEACHER):
        with pytest.raises(
            ConfigError, match=f"{name} reads .*; drop --teacher or choose among kl"
        ):
            check_with_teacher({"kl": 1.0, name: 1.0})
