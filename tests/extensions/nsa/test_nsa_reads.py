"""Tests of the count of blocks that sparse attention reads in logged steps of `qat train`."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from nsa_case import blocks_of_tile, documents, nsa_inputs, small
from nsa_model_case import SMALL, sparse_model
from nsa_train_case import make_sparse_place
from ranks_case import run_ranks
from safetensors.torch import load_file
from torch import Tensor
from train_case import config

from qat.convert.calibrate import TokenBatch
from qat.extensions.nsa.kernels import router
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.router import Route, attend, attend_counted
from qat.extensions.nsa.kernels.select import Inputs, select
from qat.extensions.nsa.reads import layer_reads, predicted_blocks, step_numbers
from qat.logs import read_json_lines
from qat.models.language_model import LanguageModel
from qat.observe.health import health
from qat.observe.runs import read_directory
from qat.ranks import ALONE, Ranks
from qat.train.run import RunDirectory
from qat.train.start import train_student

READ, PREDICTED = "nsa_blocks_read", "nsa_blocks_predicted"
WAYS = {
    "plain": {},
    "recomputed": {"gradient_checkpointing": True, "grad_accum_steps": 2, "batch_size": 1},
    "by layer": {"form": "layer"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of packed rows, of which the last is padded, and a sparse student."""
    return make_sparse_place(tmp_path_factory.mktemp("sparse"))


def train(place: Path, out: Path, *, ranks: Ranks = ALONE, **values: object) -> None:
    settings = {"learn": "weights,scales,gates", "lr_gates": 3e-2, "max_steps": 4, "log_every": 2}
    settings |= {"eval_every": 4, "save_every": 4, **values}
    train_student(config(place, **settings), str(place / "student"), out, resume=False, ranks=ranks)


def logged(out: Path, name: str = "metrics.jsonl") -> list[dict]:
    """The lines of a run's logged steps."""
    lines = read_json_lines(out / name)
    return [line for line in lines if line.get("kind", "train") == "train"]


def weights(out: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint, those of the optimizer too."""
    found = RunDirectory(out).pointed("latest").rglob("*.safetensors")
    return {f"{path.parent.name}/{k}": v for path in found for k, v in load_file(path).items()}


def events(out: Path, kind: str = "blocks_read") -> list[dict]:
    path = out / "events.jsonl"
    return [each for each in read_json_lines(path) if each["kind"] == kind] if path.exists() else []


def reads_fewer(inputs: Inputs, config: NSAConfig) -> Tensor:
    """A selection whose last tile lacks the first of its blocks."""
    selection = select(inputs, config)
    last = selection[:, :, -1]
    last.scatter_(-1, last.int().argmax(-1, keepdim=True), False)
    return selection


@pytest.mark.parametrize("way", WAYS)
def test_every_logged_step_has_both_and_trains_to_the_same_bits(
    place: Path, tmp_path: Path, way: str
) -> None:
    train(place, tmp_path / "run", **WAYS[way])
    for name in ("metrics.jsonl", "heartbeat-rank0.jsonl"):
        lines = logged(tmp_path / "run", name)
        assert [line["step"] for line in lines] == [2, 4]
        assert all(line[READ] == line[PREDICTED] > 1 for line in lines), name
    assert not events(tmp_path / "run")
    assert READ in (tmp_path / "run" / "training.csv").read_text().splitlines()[0]
    found = {check.name: check.state for check in health(read_directory(tmp_path / "run"))}
    assert found["blocks read in steps"] == "ok"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qat.train.judge.Judge.count_reads", lambda *_: {})
        train(place, tmp_path / "uncounted", **WAYS[way])
    assert READ not in logged(tmp_path / "uncounted")[0]
    counted, expected = weights(tmp_path / "run"), weights(tmp_path / "uncounted")
    assert counted.keys() == expected.keys()
    assert all(torch.equal(counted[key], expected[key]) for key in expected)


def test_a_selection_that_reads_fewer_is_reported_once(
    place: Path, tmp_path: Path, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(router, "select", reads_fewer)
    train(place, tmp_path / "run", log_every=1)
    lines = logged(tmp_path / "run")
    assert len(lines) == 4 and all(line[READ] < line[PREDICTED] for line in lines)
    (event,) = events(tmp_path / "run")
    assert event["step"] == 1 and event["blocks_read"] < event["blocks_predicted"]
    assert event["off"] == 2 and event["selections"] == 2 * 8  # rows, tiles
    assert sum("blocks a query are read" in record.message for record in caplog.records) == 1
    run = read_directory(tmp_path / "run")
    soaked = replace(run, evals=[])  # with --skip-first-eval
    for each in (run, soaked):
        (check,) = [c for c in health(each) if "in steps" in c.name]
        assert check.state == "bad" and "step 1" in check.found
    # a version that did not count
    older = replace(run, steps=[{"step": 1, "loss_nats": 1.0}])
    assert not [c for c in health(older) if "in steps" in c.name]


@pytest.mark.parametrize("values", [{}, {"shard_latents": True, "form": "layer"}])
def test_each_rank_counts_its_own_rows(place: Path, tmp_path: Path, values: dict) -> None:
    def act(ranks: Ranks) -> str:
        train(place, tmp_path / "run", ranks=ranks, batch_size=2, **values)
        return "done"

    assert run_ranks(2, act, tmp_path) == ["done"] * 2
    for name in ("metrics.jsonl", "heartbeat-rank0.jsonl", "heartbeat-rank1.jsonl"):
        lines = logged(tmp_path / "run", name)
        assert len(lines) == 2 and all(line[READ] == line[PREDICTED] > 1 for line in lines), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_compiled_layers_compile_no_more_for_a_logged_step(
    place: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    graphs = []
    for log_every in (4, 1):
        torch.compiler.reset()
        train(place, tmp_path / f"{log_every}", compile="on", log_every=log_every)
        last = logged(tmp_path / f"{log_every}", "heartbeat-rank0.jsonl")[-1]
        assert last["compiled"] and last["fallback"] is None and last[READ] == last[PREDICTED]
        graphs.append((last["graphs"], last["recompiles"]))
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("tile", [1, 16, 32])
def test_what_is_read_and_predicted_is_the_definitions(tile: int, is_packed: bool) -> None:
    settings = small(select_tile=tile)
    inputs = nsa_inputs(settings, 150, first=documents(150) if is_packed else None)
    route = Route("reference", "reference", "asked for")
    out, read = attend_counted(inputs, settings, route)
    assert torch.equal(out, attend(inputs, settings, route))
    for row, head, t in ((0, 0, 0), (0, 1, 1), (1, 0, read.shape[2] - 1)):
        assert read[row, head, t] == len(blocks_of_tile(inputs, settings, (row, head, t)))
    assert torch.equal(predicted_blocks(inputs, settings)[:, None].expand_as(read), read)


def test_the_count_is_of_the_selection_that_is_read(monkeypatch) -> None:
    inputs = nsa_inputs(SMALL, 150)
    route = Route("reference", "reference", "asked for")
    whole = attend_counted(inputs, SMALL, route)
    monkeypatch.setattr(router, "select", reads_fewer)
    out, read = attend_counted(inputs, SMALL, route)
    assert (whole[1] - read).sum() == (whole[1] != read).sum() == 2 * 2
    assert torch.equal(out, attend(inputs, SMALL, route)) and not torch.equal(out, whole[0])


def batch(length: int) -> TokenBatch:
    ids = torch.randint(320, (2, length), generator=torch.Generator().manual_seed(0))
    return TokenBatch(ids, torch.arange(length).expand(2, -1))


def test_packed_and_padded_rows_are_counted_by_document() -> None:
    packed = torch.cat([torch.arange(40), torch.arange(90)])
    padded = torch.cat([torch.arange(100), torch.zeros(30, dtype=torch.long)])
    rows = batch(130)._replace(position_ids=torch.stack([packed, padded]))
    expected = 0
    for row in rows.position_ids.tolist():
        for leader in range(0, 130, SMALL.select_tile):
            start = leader - row[leader]
            blocks = leader // SMALL.select_block + 1 - start // SMALL.select_block
            expected += min(blocks, SMALL.num_selected)
    for layer in layer_reads(LanguageModel(sparse_model(max_position_embeddings=256)), rows):
        assert (layer.read, layer.predicted, layer.off) == (expected, expected, 0)


@pytest.mark.parametrize("min_len", [0, 100, 128])
def test_dense_attention_reads_every_block(min_len: int) -> None:
    settings = SMALL.model_copy(update={"min_len": min_len})
    layers = layer_reads(LanguageModel(sparse_model(config=settings)), batch(100))
    assert [(layer.layer, layer.off) for layer in layers] == [(0, 0), (1, 0)]
    tiles = [min(tile + 1, 7 if min_len > 100 else SMALL.num_selected) for tile in range(7)]
    assert all(layer.read == layer.predicted == 2 * sum(tiles) for layer in layers)


def test_dense_attention_where_sparse_is_due_is_reported(monkeypatch) -> None:
    model, found = LanguageModel(sparse_model()), []

    def event(kind: str, **facts: object) -> None:
        found.append((kind, facts))

    route = Route("auto", "dense", "by mistake")
    monkeypatch.setattr("qat.extensions.nsa.attention.choose", lambda *_, **__: route)
    for _ in range(2):
        numbers = step_numbers(model, batch(100), event)
        assert numbers[READ] == 4.0 and numbers[PREDICTED] == pytest.approx(22 / 7)
    ((kind, facts),) = found
    assert kind == "blocks_read" and facts["off"] == 2 * 3
