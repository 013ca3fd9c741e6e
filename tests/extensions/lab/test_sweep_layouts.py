"""Documents of varied lengths as rows, packed or in buckets, and what several ranks report."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from ranks_case import run_ranks

from qat.backend.device import select
from qat.data.packing import NO_LABEL, Batch
from qat.errors import ConfigError
from qat.extensions.bench.batches import BatchSource
from qat.extensions.bench.measure import Timing
from qat.extensions.bench.run import prepare
from qat.extensions.lab.buckets import default_buckets
from qat.extensions.lab.sweep.layouts import (
    STEPS,
    bucketed_batches,
    document_lengths,
    packed_batches,
)
from qat.extensions.lab.sweep.plan import StepsConfig, SweepRun
from qat.extensions.lab.sweep.work import _laid_out, _time_ranks, other_attention, rank_numbers
from qat.ranks import ALONE, Ranks

SOURCE = BatchSource(None, seq_len=64, top_k=4, draws=0, vocab_size=100, seed=0)
BACKEND = select("cpu")
QUICK = {"device": "cpu", "dtype": "fp32", "seq_len": 8, "batch_size": 2}


def made() -> list[Batch]:
    return packed_batches(SOURCE, 8, BACKEND)


def test_lengths_are_spread_like_those_of_text() -> None:
    lengths = document_lengths(10_000, 64, torch.Generator().manual_seed(0)).float()
    assert lengths.min() == 2 and abs(lengths.median() - 16) <= 1
    assert lengths.log().std() == pytest.approx(0.8, abs=0.05)


def test_packed_positions_begin_anew_with_each_document() -> None:
    batches = made()
    assert len(batches) == STEPS
    for batch in batches:
        assert batch.mask.shape == batch.topk_ids.shape[:2] == (8, 64) and batch.mask.all()
        steps = batch.position_ids.diff(dim=1)
        assert ((steps == 1) | (batch.position_ids[:, 1:] == 0)).all()
        assert (batch.position_ids[:, 0] == 0).all()
        # each token but the last of a document has a next one
        ends = torch.nn.functional.pad(batch.position_ids[:, 1:] == 0, (0, 1), value=True)
        assert torch.equal(batch.labels == NO_LABEL, ends)
        assert (batch.labels[:, :-1] == batch.input_ids[:, 1:])[~ends[:, :-1]].all()
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(batches, made(), strict=True))


BOUNDARIES = [(8, 16, 32, 64), (24, 64), (64,)]


def bucketed(boundaries: tuple[int, ...]) -> list[Batch]:
    return bucketed_batches(SOURCE, 8, boundaries, BACKEND)


@pytest.mark.parametrize("boundaries", BOUNDARIES)
def test_rows_of_a_batch_are_of_one_bucket(boundaries: tuple[int, ...]) -> None:
    batches = bucketed(boundaries)
    assert len(batches) == STEPS
    assert {batch.mask.shape[1] for batch in batches} == set(boundaries)
    for batch in batches:
        lengths, edge = batch.mask.sum(1), batch.mask.shape[1]
        below = max((each for each in boundaries if each < edge), default=0)
        assert ((lengths > below) & (lengths <= edge)).all()
        assert 8 * 64 - edge < batch.mask.numel() <= 8 * 64
        # a row's text comes first, and each token but the last of a document has a next one
        assert (batch.mask.int().diff(dim=1) <= 0).all()
        labelled = batch.labels != NO_LABEL
        assert torch.equal(labelled.sum(1), lengths - 1)
        assert (batch.labels[:, :-1] == batch.input_ids[:, 1:])[labelled[:, :-1]].all()
    again = bucketed(boundaries)
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(batches, again, strict=True))


def test_more_buckets_waste_less() -> None:
    masks = [[batch.mask.flatten() for batch in bucketed(each)] for each in BOUNDARIES]
    four, two, one = (torch.cat(each).float().mean() for each in masks)
    assert one < 0.45 < two < four and four > 0.6
    assert default_buckets(64) == (8, 16, 32, 64) and default_buckets(6) == (3, 6)


def test_boundaries_are_a_setting_and_end_with_a_row() -> None:
    values = {**QUICK, "layout": "buckets", "steps": 4, "warmup": 2}
    config = StepsConfig(**values, bucket_lengths="8,5")
    setting, _ = prepare(config, "tiny")
    shapes = [micro[0].mask.shape[1] for _, micro in islice(_laid_out(config, setting), STEPS)]
    assert set(shapes) == {5, 8}
    with pytest.raises(ConfigError, match="bucket_lengths=2,4 of rows of 8, expected the longest"):
        _laid_out(StepsConfig(**values, bucket_lengths="2,4"), setting)
    with pytest.raises(ConfigError, match="bucket_lengths='4,8' with layout='rows', expected"):
        StepsConfig.parse({**QUICK, "bucket_lengths": "4,8"}, "group")


def test_the_cost_of_buckets_is_that_of_all_their_steps(tmp_path: Path) -> None:
    values = {**QUICK, "layout": "buckets", "bucket_lengths": "3,8", "steps": STEPS, "warmup": 2}
    group = {"sweep": "s", "verb": "bench", "student": "tiny", "command": (), "group": "-"}
    run = SweepRun(**group, settings={}, repeat=0, out=tmp_path)
    config = StepsConfig(**values)
    found = _time_ranks(run, config, ALONE)
    setting, _ = prepare(config, "tiny")
    valid = sum(int(m[0].mask.sum()) for _, m in islice(_laid_out(config, setting), STEPS))
    assert found["cost_s"] == pytest.approx(sum(found["samples"]) / valid)
    assert found["valid_tokens_per_s"] == pytest.approx(1 / found["cost_s"])


@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_a_forced_attention_kernel_is_the_one_that_ran(tmp_path: Path, kernel: str) -> None:
    group = {"sweep": "s", "verb": "bench", "student": "tiny", "command": (), "group": "-"}
    run = SweepRun(**group, settings={}, repeat=0, out=tmp_path, strict=True)
    config = StepsConfig(**QUICK, steps=1, warmup=2, attention_kernel=kernel)
    found = _time_ranks(run, config, ALONE)
    assert found["fallbacks"] == [] and found["effective"]["attention"]
    assert all(kernel in name for name in found["effective"]["attention"])


def test_a_forced_attention_kernel_that_cannot_run_is_refused(tmp_path: Path) -> None:
    group = {"sweep": "s", "verb": "bench", "student": "tiny", "command": (), "group": "-"}
    run = SweepRun(**group, settings={}, repeat=0, out=tmp_path)
    config = StepsConfig(**QUICK, steps=1, warmup=2, attention_kernel="efficient")
    with pytest.raises(ConfigError, match="attention_kernel=efficient cannot run .*; choose"):
        _time_ranks(run, config, ALONE)


def test_another_attention_operator_than_the_forced_one_is_said() -> None:
    tile, math = "qat::tile_attention", "aten::_scaled_dot_product_attention_math"
    assert other_attention("math", {"attention": [math]}) == []
    assert other_attention("auto", {"attention": [tile]}) == []
    said = other_attention("flash", {"attention": [tile]})
    assert said == ["attention_kernel=flash ran as qat::tile_attention"]
    assert other_attention("flash", {}) == ["attention_kernel=flash ran as no operator of PyTorch"]


def test_a_layout_is_for_random_data_in_single_micro_batches() -> None:
    config = StepsConfig(**QUICK, layout="packed", grad_accum_steps=2)
    setting, _ = prepare(config, "tiny")
    with pytest.raises(ConfigError, match="expected random data in single micro-batches"):
        _laid_out(config, setting)


@pytest.mark.slow
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
