"""Processes that work together: sums, copies, texts, and failing alike."""

import pytest
import torch
from ranks_case import run_ranks

from qat import ranks as module
from qat.errors import CacheError, ConfigError
from qat.ranks import ALONE, Ranks, SimulatedRanks, joined


def test_sums_over_ranks_buckets_dtypes_and_layouts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BUCKET_BYTES", 40)

    def act(ranks: Ranks) -> dict:
        me = float(ranks.rank + 1)
        tensors = [
            torch.full((3, 2), me),
            torch.full((2, 3), me, dtype=torch.bfloat16).t(),
            torch.full((), me),
            torch.full((4,), 2**40 + ranks.rank),
        ]
        ranks.sum_(tensors)
        return {"sums": [t.tolist() for t in tensors], "moved": ranks.bytes_moved}

    for found in run_ranks(3, act, tmp_path):
        first, second, third, counts = found["sums"]
        assert first == [[6.0, 6.0]] * 3 and second == [[6.0, 6.0]] * 3 and third == 6.0
        assert counts == [3 * 2**40 + 3] * 4
        assert found["moved"] == 4 * (6 + 6 + 1) + 8 * 4


@pytest.mark.parametrize("count", [9, 7, 2])
def test_rows_are_gathered_and_summed_however_many_there_are(tmp_path, count):
    def act(ranks: Ranks) -> dict:
        whole = torch.arange(count * 2.0).view(count, 2)
        mine = whole[ranks.rows(count)]
        summed = ranks.sum_rows((whole * (ranks.rank + 1)).bfloat16())()
        out = torch.empty(count, 2, dtype=torch.bfloat16)
        return {
            "rows": len(mine),
            "gathered": torch.equal(ranks.gather_rows(mine, count), whole),
            "into": torch.equal(ranks.gather_rows(mine.bfloat16(), count, out), out)
            and torch.equal(out.float(), whole),
            "octets": ranks.gather_rows(mine.byte(), count).tolist() == whole.byte().tolist(),
            "summed": summed.dtype == torch.float32 and torch.equal(summed, 6 * mine),
        }

    found = run_ranks(3, act, tmp_path)
    assert sum(each.pop("rows") for each in found) == count
    assert all(all(each.values()) for each in found)


def test_a_rehearsal_is_of_ranks_that_all_hold_the_same():
    alone = SimulatedRanks(0, 2, torch.device("cpu"))
    tensor, rows = torch.ones(4, 2), torch.ones(2, 2)
    alone.sum_([tensor])
    assert torch.equal(tensor, torch.full((4, 2), 2.0))
    assert torch.equal(alone.gather_rows(rows, 4), torch.ones(4, 2))
    assert torch.equal(alone.sum_rows(tensor)(), torch.full((2, 2), 4.0))


@pytest.mark.parametrize("is_safe", [False, True])
def test_few_exchanges_are_under_way_and_end_in_their_order(tmp_path, is_safe):
    def act(ranks: Ranks) -> dict:
        ranks.is_safe = is_safe
        done: list[int] = []
        for number in range(module.UNDER_WAY + 2):
            ranks.defer(lambda number=number: done.append(number))
        early = [*done]
        ranks.finish_deferred()
        room = torch.full((4, 2), -1.0)
        with ranks.async_gathers() as end:
            ranks.gather_rows(torch.full((2, 2), float(ranks.rank)), 4, room)
            alone = ranks.gather_rows(torch.ones(1, 1), 2)  # nobody gave memory: it is there now
            under_way = len(ranks._begun)
        end()
        return {
            "early": early,
            "under_way": under_way,
            "done": done,
            "room": room[:, 0].tolist(),
            "alone": alone.sum().item(),
        }

    for found in run_ranks(2, act, tmp_path):
        every = [*range(module.UNDER_WAY + 2)]
        assert found["early"] == (every if is_safe else [0, 1]) and found["done"] == every
        assert found["under_way"] == (0 if is_safe else 1)
        assert found["room"] == [0.0, 0.0, 1.0, 1.0] and found["alone"] == 2.0


def test_ranks_tell_each_other_texts_and_copies(tmp_path):
    def act(ranks: Ranks) -> list:
        beside = ranks.apart()
        copied = beside.copy_from_first(torch.tensor([ranks.rank + 5]))
        ranks.wait()
        said = ranks.texts("\N{LATIN SMALL LETTER E WITH ACUTE}" * ranks.rank)
        return [said, copied.item(), ranks.is_first, ranks.texts("")]

    e = "\N{LATIN SMALL LETTER E WITH ACUTE}"
    found = run_ranks(3, act, tmp_path)
    assert found == [[["", e, e + e], 5, rank == 0, ["", "", ""]] for rank in range(3)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CacheError("no cache here"), ("CacheError", "rank 1: no cache here")),
        (OSError(28, "disk full"), ("ConfigError", "rank 1: [Errno 28] disk full")),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(tmp_path, error, expected):
    def act(ranks: Ranks) -> None:
        def fail() -> None:
            if ranks.rank == 1:
                raise error

        ranks.sync_errors(fail)

    for found in run_ranks(2, act, tmp_path):
        assert (found["kind"], found["error"]) == expected


def test_ranks_that_were_given_something_else_are_named(tmp_path):
    def act(ranks: Ranks) -> None:
        ranks.check_same(settings="same", cache_content="abc" if ranks.rank < 2 else "def")

    expected = "rank 2 has cache_content=def, rank 0 has abc; give all ranks the same cache_content"
    assert {found["error"] for found in run_ranks(3, act, tmp_path)} == {expected}


def test_one_process_exchanges_nothing():
    tensor = torch.ones(2)
    ALONE.sum_([tensor])
    ALONE.wait()
    ALONE.check_same(x="y")
    assert tensor.tolist() == [1.0, 1.0]
    assert (
        ALONE.apart() is ALONE and ALONE.texts("a") == ["a"] and ALONE.sync_errors(lambda: 3) == 3
    )
    assert ALONE.copy_from_first(tensor) is tensor
    with joined("cpu") as ranks:
        assert ranks is ALONE
    with joined("cpu", is_safe=True) as ranks:
        assert ranks.is_safe and ranks.size == 1 and not ALONE.is_safe


def test_under_a_launcher_every_rank_needs_a_device_of_its_own(monkeypatch):
    said = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    for name, value in {**said, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="device=cuda:0, but 2 ranks need a device each"):
        with joined("cuda:0"):
            pass
    with pytest.raises(ConfigError, match="device=xla, but 2 ranks would exchange tensors"):
        with joined("xla"):
            pass
