"""Documents of varied lengths as rows: what counts is text, whatever the layout."""

import json
from pathlib import Path

import pytest
import torch
from ranks_case import run_ranks

from qat.backend.device import select
from qat.bench.batches import STEPS, BatchSource, bucket_edges, document_lengths, make_batches
from qat.bench.measure import Timing
from qat.bench.run import prepare
from qat.bench.sweep.plan import StepsConfig, SweepRun
from qat.bench.sweep.work import _laid_out, _time_ranks, rank_numbers
from qat.data.packing import NO_LABEL
from qat.errors import ConfigError
from qat.ranks import ALONE, Ranks

SOURCE = BatchSource(None, seq_len=64, top_k=4, draws=0, vocab_size=100, seed=0)
BACKEND = select("cpu")
QUICK = {"device": "cpu", "dtype": "fp32", "seq_len": 8, "batch_size": 2}


def made(layout: str):
    return make_batches(SOURCE, layout, 8, BACKEND)


def test_lengths_are_spread_like_those_of_text() -> None:
    lengths = document_lengths(10_000, 64, torch.Generator().manual_seed(0)).float()
    assert lengths.min() == 2 and abs(lengths.median() - 16) <= 1
    assert lengths.log().std() == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("layout", ["packed", "slices", "buckets"])
def test_a_step_has_the_same_positions_in_every_layout(layout: str) -> None:
    batches = made(layout)
    assert len(batches) == STEPS
    for batch in batches:
        assert batch.mask.numel() == 8 * 64 and batch.topk_ids.shape[:2] == batch.mask.shape
        # a row's text comes first, and each token but the last of a document has a next one
        assert (batch.mask.int().diff(dim=1) <= 0).all()
        labelled = batch.labels != NO_LABEL
        assert (labelled <= batch.mask).all()
        assert (batch.labels[:, :-1] == batch.input_ids[:, 1:])[labelled[:, :-1]].all()
    again = made(layout)
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(batches, again, strict=True))


def test_packing_wastes_nothing_and_buckets_less_than_slices() -> None:
    shares = {
        layout: torch.cat([batch.mask.flatten() for batch in made(layout)]).float().mean()
        for layout in ("packed", "slices", "buckets")
    }
    assert shares["packed"] == 1 and shares["slices"] < 0.45 < 0.6 < shares["buckets"]


def test_packed_positions_begin_anew_with_each_document() -> None:
    for batch in made("packed"):
        steps = batch.position_ids.diff(dim=1)
        assert ((steps == 1) | (batch.position_ids[:, 1:] == 0)).all()
        assert (batch.position_ids[:, 0] == 0).all()
        ends = torch.nn.functional.pad(batch.position_ids[:, 1:] == 0, (0, 1), value=True)
        assert torch.equal(batch.labels == NO_LABEL, ends)


def test_rows_of_a_batch_are_of_one_bucket() -> None:
    widths = {batch.mask.shape[1] for batch in made("buckets")}
    assert widths <= set(bucket_edges(64)) == {8, 16, 32, 64} and len(widths) > 2
    for batch in made("buckets"):
        lengths, edge = batch.mask.sum(1), batch.mask.shape[1]
        assert (lengths <= edge).all() and (edge == 8 or (lengths > edge // 2).all())
    assert bucket_edges(6) == [3, 6]


def test_a_layout_is_for_random_data_in_single_micro_batches() -> None:
    config = StepsConfig(**QUICK, layout="slices", grad_accum_steps=2)
    setting, _ = prepare(config, "tiny")
    with pytest.raises(ConfigError, match="expected random data in single micro-batches"):
        _laid_out(config, setting)


def test_the_loss_and_shares_of_the_peak_are_those_of_all_ranks(tmp_path: Path) -> None:
    def row(ranks: Ranks, **values: object) -> dict | None:
        group = {"sweep": "s", "verb": "bench", "student": "tiny", "command": (), "group": "-"}
        run = SweepRun(**group, settings={}, repeat=0, out=tmp_path)
        return _time_ranks(run, StepsConfig(**QUICK, steps=1, warmup=1, **values), ranks)

    shared, other = run_ranks(2, row, tmp_path)
    assert other is None
    # one rank with their micro-batches
    alone = row(ALONE, grad_accum_steps=2)
    assert shared["loss_nats"] == pytest.approx(alone["loss_nats"], rel=1e-6)
    # of one device's peak, though tokens are counted of both
    flops_per_s = shared["tokens_per_s"] / 2 * shared["flops_per_token_linears"]
    share = flops_per_s / shared["matmul_tflops"] / 1e12
    assert shared["linears_mfu_of_matmul_frac"] == pytest.approx(share)


def test_ranks_tell_the_worst_memory_and_whose_work_is_waited_for(monkeypatch) -> None:
    timing = Timing(0.0, (1.0, 3.0), 4.0, 5.0, 1.5, 8, 8, {})
    monkeypatch.setattr(Ranks, "exchange_s", lambda _: 1.0)
    others = [json.dumps([1.8, 2.0, 6.0, 4.5])]
    monkeypatch.setattr(Ranks, "texts", lambda _, mine: [mine, *others])
    found = rank_numbers(timing, Ranks(0, 2, torch.device("cpu")))
    assert found["rank_work_s"] == (1.5, 1.8) and found["slowest_rank"] == 1
    assert found["loss_nats"] == 3.5
    assert found["peak_gib"] == 6.0 and found["peak_reserved_gib"] == 5.0
    assert found["slowest_share"] == 0.9 and found["rank_spread"] == pytest.approx(0.2)
    assert rank_numbers(timing, ALONE) == {"ranks": 1}
