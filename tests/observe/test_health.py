"""The table of a run's health: what is asked, and what each answer is called."""

import math
import random
from pathlib import Path

import pytest
from observe.synthetic import write_lines, write_run

from qat.cli.train import show_health
from qat.errors import CheckpointError
from qat.observe.health import Check, health, worst
from qat.observe.page import write_report
from qat.observe.runs import TrainingRun, read_directory
from qat.process import GAPS

CALM = {
    "mem_alloc_mib": 1000.0,
    "mem_reserved_mib": 1200.0,
    "host_rss_mib": 2000.0,
    "data_wait_s": 0.002,
    "gpu_temp_c": 61.0,
}
FACTS = {"recompiles": 0, "fallback": None}


@pytest.fixture
def calm(tmp_path: Path) -> TrainingRun:
    run = read_directory(write_run(tmp_path / "calm"))
    return with_beats(run, lambda _: {**CALM, **FACTS})


def with_beats(run: TrainingRun, values) -> TrainingRun:
    """The run with `values(i)` in its heartbeat number i."""
    beats = [{**beat, **values(i)} for i, beat in enumerate(run.heartbeats)]
    return TrainingRun(**{**vars(run), "heartbeats": beats})


def answer(run: TrainingRun, name: str) -> Check:
    (found,) = [check for check in health(run) if check.name == name]
    return found


def test_a_calm_run_is_healthy(calm: TrainingRun) -> None:
    checks = health(calm)
    assert worst(checks) == "ok" and len(checks) == 17
    assert answer(calm, "waiting for data").found == "0.5 % of a step"
    assert answer(calm, "GPU, hottest") == Check("GPU, hottest", "ok", "61 C", "80 C")
    assert answer(calm, "host memory").found == "2,000 to 2,000 MiB"


def test_retries_of_the_allocator_count_over_all_ranks(calm: TrainingRun) -> None:
    none = {"alloc_retries": 0, "alloc_failures": 0}
    run = with_beats(calm, lambda _: none)
    assert answer(run, "allocator retries") == Check("allocator retries", "ok", "none", "none")
    # counts are those since the process began: the last ones count
    other = [{**none, "step": 1, "alloc_retries": 2}, {"alloc_retries": 3, "alloc_failures": 1}]
    found = answer(TrainingRun(**{**vars(run), "others": [other]}), "allocator retries")
    assert found.state == "look" and found.found.startswith("3, 1 in vain: lower the batch, or set")
    assert GAPS in found.found


def test_kernels_that_ran_as_plain_pytorch_are_named(calm: TrainingRun) -> None:
    none = with_beats(calm, lambda _: {"plain_kernels": {}})
    assert answer(none, "plain kernels") == Check("plain kernels", "ok", "none", "none")
    once = with_beats(calm, lambda _: {"plain_kernels": {"head": 2, "topk": 1}})
    found = Check("plain kernels", "look", "head 2 times, topk 1 times", "none")
    assert answer(once, "plain kernels") == found
    more = with_beats(calm, lambda i: {"plain_kernels": {"head": i}})
    assert answer(more, "plain kernels").found.endswith("times, and more and more")


def test_operators_of_an_xla_run_that_the_host_computed_are_named(calm: TrainingRun) -> None:
    assert answer(with_beats(calm, lambda _: {"host_fallbacks": {}}), "on the host").state == "ok"
    slow = with_beats(calm, lambda _: {"host_fallbacks": {"aten::bucketize": 3}})
    assert answer(slow, "on the host") == Check("on the host", "look", "aten::bucketize", "nothing")


def with_layers(run: TrainingRun, **changes: object) -> TrainingRun:
    """The run with two layers of sparse attention, the second one changed."""
    gates = {"compressed_frac": 0.1, "selected_frac": 0.7, "window_frac": 0.2}
    gates |= {"gate_entropy_frac": 0.7, "gate_largest_frac": 0.7, "collapse_frac": 0.0}
    plain = {"layer": 0, "route": "flex", "is_fallback": False, "recall_frac": 0.98, **gates}
    plain |= {"limit_frac": 0.5, "blocks_read": 7.5, "blocks_predicted": 7.5, "full_frac": 0.5}
    layers = [plain, {**plain, "layer": 1, **changes}]
    evals = [*run.evals[:-1], run.evals[-1] | {"nsa_layers": layers}]
    return TrainingRun(**{**vars(run), "evals": evals})


def test_sparse_attention_is_asked_about(calm: TrainingRun) -> None:
    for name, changes, state, found in (
        ("block recall", {}, "ok", "98 % in layer 0"),
        ("block recall", {"recall_frac": 0.8}, "look", "80 % in layer 1"),
        ("blocks left out", {}, "ok", "50 % of queries"),
        ("selected branch", {"selected_frac": 0.01}, "look", "1 % in layer 1"),
        ("collapsed gates", {}, "ok", "0 % in layer 0"),
        ("collapsed gates", {"collapse_frac": 0.91}, "look", "91 % in layer 1"),
        ("gate entropy", {"gate_entropy_frac": 0.4}, "look", "40 % in layer 1"),
        ("largest gate", {"gate_largest_frac": 0.95}, "look", "95 % in layer 1"),
        ("window branch", {"window_frac": 0.01}, "look", "1 % in layer 1"),
        ("blocks read", {}, "ok", "7.50 blocks a query in layer 0"),
        ("blocks read", {"blocks_read": 7.6}, "bad", "7.60 blocks a query in layer 1"),
        ("selections at the limit", {"full_frac": 0.6}, "ok", "60 % of queries in layer 1"),
        (
            "selections at the limit",
            {"full_frac": 0.6, "recall_frac": 0.8},
            "look",
            "60 % of queries in layer 1",
        ),
        ("attention fallbacks", {}, "ok", "none"),
        (
            "attention fallbacks",
            {"is_fallback": True, "route": "reference"},
            "look",
            "layers 1: reference",
        ),
    ):
        check = answer(with_layers(calm, **changes), name)
        assert (check.state, check.found) == (state, found)
    began = with_layers(calm, collapse_frac=1.0, gate_entropy_frac=0.0, gates_learn=False)
    for name, found in (("collapsed gates", "100 %"), ("gate entropy", "0 %")):
        check = answer(began, name)
        assert (check.state, check.found) == ("ok", f"{found} in layer 1, where they began")


def test_a_loss_that_no_longer_moves(calm: TrainingRun) -> None:
    for slope, state, word in (
        (-2e-3, "ok", "nats"),
        (0.0, "look", "nats, no longer moves"),
        (2e-3, "look", "nats, rises"),
    ):
        noise = random.Random(0)
        losses = [1 + slope * step + noise.gauss(0, 0.05) for step in range(200)]
        steps = [{**row, "loss_nats": loss} for row, loss in zip(calm.steps, losses, strict=True)]
        check = answer(TrainingRun(**{**vars(calm), "steps": steps}), "loss")
        assert check.state == state and check.found.endswith(word)
        few = TrainingRun(**{**vars(calm), "steps": steps[:39]})
        assert "loss" not in {each.name for each in health(few)}


STEPS, JUDGED = range(1, 401), range(0, 401, 40)


def learned(calm: TrainingRun, training, held_out, noise: float, seed: int = 0) -> TrainingRun:
    """The run with these curves over 400 steps, both with normal noise; its text is read 8 times.

    The same held-out sequences are judged every time, so their noise is a fifth.
    """
    draw = random.Random(seed)
    steps = [{"step": i, "loss_nats": training(i) + draw.gauss(0, noise)} for i in STEPS]
    evals = [{"step": i, "kl_tail_nats": held_out(i) + draw.gauss(0, noise / 5)} for i in JUDGED]
    info = {"cache_sequences": {"train": 800}, "sequences_per_step": 16}
    return TrainingRun(**{**vars(calm), "steps": steps, "evals": evals, "info": info})


def falling(floor: float, pace: float = 100):
    return lambda step: floor + 0.1 * math.exp(-step / pace)


@pytest.mark.parametrize("noise", [0.0, 0.003, 0.01])
@pytest.mark.parametrize(
    ("training", "held_out", "state"),
    [
        (falling(0.05), falling(0.06), "ok"),
        # what is read again is learned a little better, and held-out text still gains
        (lambda i: 0.15 - 2e-4 * i, lambda i: 0.16 - 1.2e-4 * i, "ok"),
        (falling(0.05, 20), falling(0.06, 20), "ok"),  # neither moves any more
        (lambda i: 0.15 - 2e-4 * i, lambda i: 0.16, "look"),
        (lambda i: 0.15 - 2e-4 * i, lambda i: 0.12 + 2e-7 * (i - 150) ** 2, "look"),
    ],
)
def test_over_fitting_is_named(calm: TrainingRun, training, held_out, state, noise: float) -> None:
    for seed in range(20):
        check = answer(learned(calm, training, held_out, noise, seed), "over-fitting")
        assert check.state == state, check
        assert "read 8 times" in check.found and ("more text" in check.found) == (state == "look")


def test_a_student_that_became_worse_is_named(calm: TrainingRun) -> None:
    def judged(*found: tuple[int, float | None]) -> TrainingRun:
        evals = [{"step": step, "kl_tail_nats": nats} for step, nats in found]
        return TrainingRun(**{**vars(calm), "evals": evals})

    worse = answer(judged((0, 0.12), (4, 0.1), (8, 2.5)), "held-out")
    assert worse == Check("held-out", "look", "0.12 to 2.5 nats", "no rise since step 0")
    assert answer(judged((0, 0.12), (8, 0.11)), "held-out").state == "ok"
    assert answer(judged((0, 0.12), (8, 0.12)), "held-out").state == "ok"
    # without an evaluation before the first step there is nothing to compare with
    for run in (judged((0, 0.12)), judged((4, 0.1), (8, 0.2)), judged((0, None), (8, 0.1))):
        assert "held-out" not in {check.name for check in health(run)}


def test_over_fitting_needs_evaluations_to_compare(calm: TrainingRun) -> None:
    run = learned(calm, falling(0.05), falling(0.06), 0.0)
    early = TrainingRun(**{**vars(run), "evals": run.evals[:4]})
    assert "over-fitting" not in {check.name for check in health(early)}
    unknown = TrainingRun(**{**vars(run), "info": {}})
    assert unknown.epochs() is None and "read" not in answer(unknown, "over-fitting").found


def test_dense_and_merged_layers_have_fewer_questions(calm: TrainingRun) -> None:
    merged = with_layers(calm, limit_frac=0.0)
    for layer in merged.evals[-1]["nsa_layers"]:
        layer.update(selected_frac=None, limit_frac=0.0)
    names = {check.name for check in health(merged)}
    assert "selected branch" not in names and "block recall" not in {c.name for c in health(calm)}
    assert answer(merged, "blocks left out").state == "look"


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is written without what takes a second to draw."""
    monkeypatch.setattr("qat.observe.page.run_charts", lambda runs: [])


@pytest.mark.usefixtures("no_pictures")
def test_the_page_has_a_table_of_layers(calm: TrainingRun, tmp_path: Path) -> None:
    lines = [*calm.steps, *with_layers(calm, selected_frac=None).evals]
    kinds = [{**line, "kind": "eval" if "ppl" in line else "train"} for line in lines]
    write_lines(tmp_path / "calm" / "metrics.jsonl", kinds)
    page = write_report([tmp_path / "calm"], tmp_path / "page.html").page.read_text()
    assert "by layer" in page and "<td>flex</td><td>98.0</td>" in page
    assert "<td>10.0</td><td>-</td>" in page


def test_what_nobody_measured_is_not_asked(tmp_path: Path) -> None:
    run = read_directory(write_run(tmp_path / "old"))
    names = {check.name for check in health(run)}
    assert "speed" in names and "stalls" in names
    assert not names & {"host memory", "waiting for data", "compiler", "GPU, hottest"}
    waiting = with_beats(run, lambda _: CALM)
    few = TrainingRun(**{**vars(run), "heartbeats": waiting.heartbeats[:5]})
    assert not {"speed", "waiting for data"} & {check.name for check in health(few)}


def test_a_number_beyond_its_limit_is_marked(calm) -> None:
    for name, values, state, found in (
        ("speed", lambda i: {"tokens_per_s": 100.0 + 60 * (i % 3 == 0)}, "look", "within 60 %"),
        ("host memory", lambda i: {"host_rss_mib": 2000.0 + 20 * i}, "look", "2,040 to 2,380 MiB"),
        ("device memory", lambda i: {"mem_alloc_mib": 1000.0 + 2 * i}, "ok", "1,004 to 1,038"),
        ("waiting for data", lambda _: {"data_wait_s": 0.1}, "look", "25 % of a step"),
        ("compiler", lambda _: {"recompiles": 3, "fallback": None}, "look", "3 graphs"),
        ("compiler", lambda _: {"recompiles": 0, "fallback": "no"}, "look", "as written"),
        ("GPU, hottest", lambda i: {"gpu_temp_c": 60 + i}, "ok", "79 C"),
        ("GPU, hottest", lambda i: {"gpu_temp_c": 65 + i}, "look", "84 C"),
        ("GPU, hottest", lambda i: {"gpu_temp_c": 75 + i}, "bad", "94 C"),
    ):
        check = answer(with_beats(calm, values), name)
        assert check.state == state and found in check.found


def test_memory_of_a_process_is_not_asked_for_twice(calm: TrainingRun) -> None:
    run = with_beats(calm, lambda _: {"mem_reserved_mib": None})
    names = {check.name for check in health(run)}
    assert "host memory" in names and "device memory" not in names


def test_events_are_counted_with_their_steps(calm: TrainingRun) -> None:
    events = [{"kind": "stall", "step": step} for step in range(7)]
    run = TrainingRun(**{**vars(calm), "events": [*events, {"kind": "slow_rank", "step": 9}]})
    assert answer(run, "stalls") == Check("stalls", "bad", "7 (step 0, 1, 2, 3, 4, ...)", "none")
    assert answer(run, "slow ranks")[1:3] == ("look", "1 (step 9)")
    assert worst(health(run)) == "bad"


@pytest.mark.parametrize(("own_s", "state"), [(0.22, "ok"), (0.3, "look")])
def test_the_slowest_rank_is_named(tmp_path: Path, own_s: float, state: str) -> None:
    path = write_run(tmp_path / "run")
    for rank in range(3):
        line = {"step": 1, "tokens_per_s": 9.0, "step_s": 0.4, "peak_gib": 1.5}
        line["exchange_s"] = 0.4 - (own_s if rank == 2 else 0.2)
        write_lines(path / f"heartbeat-rank{rank}.jsonl", [line] * 3)
    run = read_directory(path)
    assert len(run.others) == 2
    check = answer(run, "slowest rank")
    assert check[1:] == (state, f"rank 2: {own_s / 0.2:.2f} x the others", "1.2 x")


def test_what_was_forced_resumed_and_skipped_is_told(calm: TrainingRun) -> None:
    steps = [{**row, "grad_norm": float(row["step"] > 20)} for row in calm.steps]
    run = TrainingRun(**{**vars(calm), "forced": ["disk"], "resumed": [40, 80], "steps": steps})
    assert answer(run, "forced")[1:3] == ("look", "disk")
    assert answer(run, "resumed")[1:3] == ("ok", "2 (step 40, 80)")
    assert answer(run, "skipped steps")[1:3] == ("look", "10 %")


@pytest.mark.usefixtures("no_pictures")
def test_page_and_terminal_show_the_table(tmp_path: Path, capsys) -> None:
    path = write_run(tmp_path / "run")
    write_lines(path / "events-rank1.jsonl", [{"kind": "stall", "step": 120}])
    (path / "run.json").write_text('{"forced": ["memory"], "resumed": [{"step": 150}]}')
    html = write_report([path], tmp_path / "report.html").page.read_text("utf-8")
    assert '<td>stalls</td><td>1 (step 120)</td><td>none</td><td class="bad">bad</td>' in html
    show_health(path)
    shown = capsys.readouterr().out
    for text in ("1 (step 120)", "memory", "bad"):
        assert text in shown
    assert "resumed" not in shown  # which is ok


def test_a_healthy_run_has_no_table_on_the_terminal(tmp_path: Path, capsys) -> None:
    show_health(write_run(tmp_path / "run"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("facts", ['{"resumed": 3}', '{"resumed": [{}]}', "[1]", '{"forced": 1}'])
def test_damaged_facts_are_named_and_spoil_no_finished_run(tmp_path, caplog, facts: str) -> None:
    path = write_run(tmp_path / "run")
    (path / "run.json").write_text(facts)
    with pytest.raises(CheckpointError, match="run holds a damaged JSON file"):
        read_directory(path)
    show_health(path)
    assert "no table of the run's health" in caplog.text
