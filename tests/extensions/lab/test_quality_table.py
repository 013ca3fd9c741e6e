"""The table's arithmetic, and its pictures."""

import statistics

import pytest

from qat.extensions.lab.pages import markdown_table
from qat.extensions.lab.quality.run import COMMON, best, cells, charts, summarise

TEXTS = ("own", "other")


def row(recipe: str, seed: int, text: str, kl: float, **values: object) -> dict[str, object]:
    method = "teacher" if recipe == "teacher" else "qat"
    common = {**dict.fromkeys(COMMON, 1.0), "tokens": 2_000_000, "peak_gib": None}
    names = {"recipe": recipe, "method": method, "seed": seed, "text": text, "workers": 1}
    return {**names, "kl_nats": kl, "top1_frac": 0.5, "ppl": 9.0, **common, **values}


def rows() -> list[dict[str, object]]:
    return [
        *(row("teacher", 0, text, 0.0, seconds=0.0, steps=0) for text in TEXTS),
        *(row("a|b", seed, "own", kl) for seed, kl in enumerate((0.30, 0.10, 0.20))),
        *(row("a|b", seed, "other", 1.0) for seed in range(3)),
        *(row("best", 0, text, kl) for text, kl in zip(TEXTS, (0.1, 9.0), strict=True)),
        *(row("converted", 0, text, 7.0, seconds=0.0, steps=0) for text in TEXTS),
    ]


def test_mean_and_spread_over_seeds() -> None:
    lines = summarise(rows(), TEXTS)
    assert [line.recipe for line in lines] == ["teacher", "best", "a|b", "converted"]
    assert best(lines).recipe == "best"
    found = lines[2]
    assert found.num_seeds == 3 and found.workers == (1,)
    assert found.stats["kl_nats.own"].mean == pytest.approx(0.2)
    assert found.stats["kl_nats.own"].std == pytest.approx(statistics.stdev([0.3, 0.1, 0.2]))
    assert found.stats["kl_nats.other"].std == 0.0
    assert found.stats["peak_gib"] is None and lines[1].stats["kl_nats.own"].std is None


def test_the_page_shows_what_was_measured() -> None:
    headings, body = cells(summarise(rows(), TEXTS), TEXTS)
    shown = dict(zip(headings, body[2], strict=True))
    assert shown["KL own"] == "0.2000 +- 0.1000" and shown["KL other"] == "1.0000"
    assert shown["GiB"] == "-" and shown["Mtokens"] == "2.00"
    text = markdown_table(*cells(summarise(rows(), TEXTS), TEXTS))
    assert text.count("\n") == 6 and r"| a\|b | 3 |" in text


def test_pictures() -> None:
    found = charts(summarise(rows(), TEXTS), "own")
    assert list(found) == ["kl_bits.svg", "kl_seconds.svg"]
    assert all(b"<svg" in picture for picture in found.values())
    assert charts(summarise(rows()[:2], TEXTS), "own") == {}
