"""`qat bench kernels`: gates short-circuit, a slow or wrong configuration never wins."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from pydantic import ValidationError

from qat.backend.device import select
from qat.errors import BenchError, ComparisonError, ConfigError
from qat.extensions.bench.measure import Clock, Roofline
from qat.extensions.lab.config import KERNELS, KernelsConfig
from qat.extensions.lab.kernels import counters as counted
from qat.extensions.lab.kernels import run as module
from qat.extensions.lab.kernels.cases import all_cases, work_of
from qat.extensions.lab.kernels.counters import METRICS, counters, read_counters
from qat.extensions.lab.kernels.gates import (
    Inputs,
    KernelCase,
    Outputs,
    Seeds,
    Size,
    Space,
    Speed,
    compiles,
    copied,
    difference,
    is_correct,
    is_fast,
    is_lean,
    measure,
    num_bytes,
    numbers,
)
from qat.extensions.lab.kernels.resources import Compiled
from qat.extensions.lab.kernels.run import run_kernels
from qat.extensions.lab.kernels.tune import tune, write_table
from qat.extensions.lab.verbs import kernels
from qat.kernels import tuned

CPU = torch.device("cpu")
SEEDS = Seeds(CPU, 7, is_interpreted=True)
RATES = Roofline(None, 1e11, 1e10)
CLOCK = Clock(select("cpu"), repeats=8, limit_s=5.0)
SIZE = {"N": 40}


class Stops(NamedTuple):
    """A planted configuration."""

    rounds: int
    is_wrong: int = 0


def work(inputs: Inputs, size: Size) -> Outputs:
    return {"y": inputs["x"] * 2 + 1}


def planted(kernel: object = work, **changed: object) -> KernelCase:
    """A case of plain PyTorch, whose kernel may be another."""
    case = KernelCase(
        "planted",
        inputs=lambda maker, size: {"x": maker.normal(size["N"], dtype=torch.float32)},
        kernel=kernel,
        reference=work,
        size=lambda config: SIZE,
        odd=({"N": 7}, {"N": 33}),
    )
    return replace(case, **changed)


def broken(inputs: Inputs, size: Size) -> Outputs:
    raise RuntimeError("ptxas fatal: no such register")


def partial(inputs: Inputs, size: Size) -> Outputs:
    y = torch.empty_like(inputs["x"])
    y[:-1] = work(inputs, size)["y"][:-1]  # the last element is never written
    return {"y": y}


@pytest.fixture(autouse=True)
def _known_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "measure_roofline", lambda *_: RATES)
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tables")
    tuned.forget_tables()
    yield
    tuned.forget_tables()


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("kernel", "gate", "says"),
    [
        (broken, "compile", "at N=7: RuntimeError: ptxas fatal"),
        (lambda i, s: {"y": i["x"] * 2.001 + 1}, "correct", "y errs by"),
        (lambda i, s: {"y": work(i, s)["y"].sum()}, "correct", "y shape (), not (7,)"),
        (lambda i, s: {"z": i["x"]}, "correct", "results z, expected y"),
        (partial, "correct", "y the kernel gave NaN or infinity"),
    ],
)
def test_a_planted_fault_stops_at_its_gate(kernel, gate, says, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "interprets", lambda: True)
    later = [name for name in ("is_correct", "measure") if name != f"is_{gate}"]
    for name in later:
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a later gate was run"))
    report = run_kernels(
        KernelsConfig(shape="tiny", device="cpu"), tmp_path / "o", [planted(kernel)]
    )
    (row,) = rows(tmp_path / "o")
    assert (row["status"], row["gate"]) == ("FAILED", gate) and says in row["difference"]
    with pytest.raises(BenchError, match=f"'planted', did not pass the gate '{gate}': "):
        report.check()


def test_what_passes_is_timed_and_a_slow_kernel_is_not_fast(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "interprets", lambda: True)
    config = KernelsConfig(device="cpu", repeats=3, seed=5)  # the tiny shape: no kernel runs
    report = run_kernels(config, tmp_path / "o", [planted()])
    report.check()
    row, reference = rows(tmp_path / "o")
    assert row["status"] == "OK" and row["seed"] == 5 and "samples" not in row
    assert reference["case"] == "planted, reference" and len(reference["samples"]) >= 3
    assert reference["kind"] == "reference" and reference["unit"] == "s"
    assert "interpreted" in report.note and report.least is None and report.figures() == []
    slow = Speed([2.0, 2.1, 2.0], [1.0, 1.01, 1.0], 1, 320, 0.0)
    assert is_fast(slow).gate == "fast" and "separated" in is_fast(slow).difference
    assert is_fast(replace(slow, kernel_s=[0.5, 0.5, 0.5])) is None
    found = numbers(replace(slow, kernel_s=[1e-7] * 3), RATES)
    assert found["roofline_frac"] == pytest.approx(320 / 1e10 / 1e-7)
    assert found["bound"] == "memory" and found["p99_s"] == 1e-7 and found["low_s"] == 1e-7


def test_without_an_interpreter_kernels_do_not_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "interprets", lambda: False)
    config = KernelsConfig(shape="tiny", device="cpu", repeats=1)
    report = run_kernels(config, tmp_path / "o", [planted(broken)])
    assert report.rows[0]["status"] == "REFERENCE" and "did not run" in report.note


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"'atention' is in no kernel's name; choose"):
        KernelsConfig(only="atention")
    with pytest.raises(ConfigError, match="expected a GPU: interpreted kernels have no speed"):
        run_kernels(KernelsConfig(shape="tiny", device="cpu", tune=True), tmp_path / "o", [])
    with pytest.raises(ConfigError, match="student=huge is neither"):
        run_kernels(KernelsConfig(shape="huge", device="cpu"), tmp_path / "o", [])
    assert not (tmp_path / "o").exists()


def test_every_case_makes_its_inputs_and_its_reference_agrees_with_the_truth() -> None:
    every = all_cases()
    assert tuple(every) == KERNELS
    for case in every.values():
        size = case.odd[-1]
        inputs = case.inputs(SEEDS.maker(0), size)
        found, exact = case.reference(copied(inputs), size), case.truth(inputs, size)
        assert found.keys() == exact.keys(), case.name
        assert case.num_bytes(inputs, found, size) > 0
        for name, truth in exact.items():
            gap = (found[name].double() - truth.double()).abs().max()
            assert gap <= 0.02 * truth.double().abs().max().clamp_min(0.01), (case.name, name)
        speed = case.size(work_of("qwen3-0.6b"))
        assert case.flops(speed) >= 0
        if case.space is not None:
            pytest.importorskip("triton")
            space = case.space(speed)
            assert space.default not in space.others and space.others
            assert all(type(one) is type(space.default) for one in space.others)


def test_hopper_tunes_sums_of_one_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from qat.extensions.decode.kernels.lut_sums import NO_SUMS
    from qat.extensions.lab.kernels import tune as tuning

    monkeypatch.setattr(tuning, "_is_hopper", lambda: True)
    size = {"O": 9728, "I": 2560}
    space = tuning.matvec_space(size, 2, is_short=True, is_gated=True)
    assert (space.kernel, space.key) == ("lut_sums", (19456, 2560, 2))
    assert NO_SUMS in space.others
    vectors = tuning.matvec_space(size, 8, is_short=True, is_gated=True, d=4)
    assert (vectors.kernel, vectors.key) == ("vectors_sums", (19456, 2560, 2))
    assert vectors.default == space.default
    assert tuning.matvec_space(size, 4, is_short=True).kernel == "lut_mma"
    assert tuning.matvec_space(size, 2, is_short=False).kernel == "lut_matvec"


def test_a_kernel_that_triton_refuses_fails_at_compile() -> None:
    pytest.importorskip("triton")
    from broken_kernel import launch

    refusal = compiles(planted(launch), SEEDS)
    assert refusal.gate == "compile" and "at N=7" in refusal.difference


@pytest.mark.parametrize(
    "name", ["gather-dot", "top-k, block pass", "gated unit, backward", "divergence"]
)
def test_kernels_pass_in_the_interpreter(name: str) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernels themselves")
    case = all_cases()[name]
    assert compiles(case, SEEDS) is None and is_correct(case, SEEDS) is None
    twice = replace(case, kernel=lambda i, s: {n: 2 * t for n, t in case.kernel(i, s).items()})
    assert is_correct(twice, SEEDS).gate == "correct"


def test_what_is_measured_and_compared_is_what_it_says() -> None:
    exact = torch.tensor([1.0, -torch.inf]).double()
    assert difference(exact.float(), exact.float(), exact) is None
    assert "misses an infinity" in difference(torch.tensor([1.0, 5.0]), exact.float(), exact)

    speed = measure(planted(), SIZE, SEEDS, replace(CLOCK, repeats=2))
    assert speed.kernel_s == [] and len(speed.reference_s) >= 2
    assert speed.num_bytes == 2 * 4 * 40 and speed.calls == 1
    one, two = torch.empty(3, 5), torch.empty(7, dtype=torch.bfloat16)
    assert num_bytes(one, [two, {"a": (two, 3)}]) == 60 + 28


def test_a_kernel_that_spills_more_than_it_may_is_refused() -> None:
    backward = Compiled("kernels.attention._backward_kernel", 8, 255, 616, 160 * 1024, 90)
    speed = Speed([0.5] * 3, [1.0] * 3, 1, 320, 0.0, (backward, backward._replace(registers=7)))
    assert is_lean(speed) is None and is_lean(replace(speed, compiled=())) is None
    found = numbers(speed, RATES)
    named = ("registers", "spilled_bytes", "shared_bytes", "rounds")
    assert [found[name] for name in named] == [255, 616, 160 * 1024, 3]
    assert [each["registers"] for each in found["compiled"]] == [255, 7]
    for one in (
        backward._replace(spilled=624),
        backward._replace(target=100),
        backward._replace(kernel="kernels.glu._forward_kernel", spilled=8),
    ):
        refusal = is_lean(replace(speed, compiled=(backward, one)))
        assert refusal.gate == "resources" and one.kernel in refusal.difference


DRAM, TENSOR, WARPS = METRICS.values()
NCU = f"""#!/bin/sh
echo "$@" >> WORDS
[ "$LC_ALL" = C ] || exit 1
while [ "$1" != --log-file ]; do
    [ "$1" = --metrics ] && metrics="$2"
    shift
done
case "$metrics" in
*LACKED*) echo '==ERROR== Failed to find metric regex:^LACKED\\.(avg|sum)$' > "$2"; exit 1 ;;
esac
cat > "$2" <<'END'
==PROF== Connected to process 4321 (/usr/bin/python3.11)
==PROF== Profiling "_merge_kernel" - 0: 0%....50%....100% - 2 passes
"ID","Kernel Name","Block Size","Section Name","Metric Name","Metric Unit","Metric Value"
"0","_merge_kernel","(128, 1, 1)","Command line profiler metrics","{DRAM}","%","12.5"
"1","_split_kernel","(128, 1, 1)","Command line profiler metrics","{DRAM}","%","87.5"
"1","_split_kernel","(128, 1, 1)","Command line profiler metrics","{TENSOR}","%","n/a"
"1","_split_kernel","(128, 1, 1)","Command line profiler metrics","{WARPS}","%","50"
END
"""
COUNTED = {"ncu_dram_frac": 0.875, "ncu_warps_frac": 0.5}


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch) -> Path:
    """The place of a stand-in for Nsight Compute, where nothing is yet."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(counted, "TOOLKIT", tmp_path / "toolkit/ncu")
    return tmp_path / "ncu"


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_counters_are_those_that_ncu_wrote(ncu: Path, tmp_path: Path) -> None:
    words, case = tmp_path / "words", "top-k, block pass"
    speed = Speed([1.0], [1.0], 1, 1, 0.0, (Compiled("a._b", 4, 9, 0, 0, 90),) * 2)
    config = KernelsConfig(shape="tiny", device="cuda", ncu=True)
    assert counters(case, config, speed) == {} and "ncu" in module.note_on(CLOCK.backend, config)
    text = NCU.replace("WORDS", str(words))
    write_program(counted.TOOLKIT, text)  # in CUDA's own directory, which is not on PATH
    assert counters(case, config, speed) == COUNTED
    said = words.read_text()
    assert "regex:^(_b)$" in said and said.split(" -m ")[1].split()[-2:] == ["tiny", "cuda"]
    assert "--clock-control none" in said  # the card's clocks stay as they are
    assert counters(case, config, None) == counters(case, KernelsConfig(), speed) == {}
    # a metric that this GPU lacks costs its own column alone
    write_program(ncu, text.replace("LACKED", TENSOR.partition(".")[0]))
    assert counters(case, config, speed) == COUNTED
    last = words.read_text().splitlines()[-1]
    assert DRAM in last and WARPS in last and TENSOR not in last


def test_an_error_of_ncu_is_in_the_row_and_below_the_table(ncu: Path) -> None:
    speed = Speed([1.0], [1.0], 1, 1, 0.0, (Compiled("a._b", 4, 9, 0, 0, 90),))
    config = KernelsConfig(shape="tiny", device="cuda", ncu=True)
    refusal = "==ERROR== ERR_NVGPUCTRPERM"
    for text, said in (
        (f"echo '{refusal}' >&2; echo '==WARNING== No kernels were profiled' >&2", refusal),
        ("echo 'No such device' >&2", "No such device"),
        ("true", "it counted no kernel"),
        ("echo '==ERROR== Failed to find metric regex:^other$' >&2", "==ERROR== Failed to find"),
    ):
        write_program(ncu, f"#!/bin/sh\n{text}; exit 1\n")
        row = counters("top-k, block pass", config, speed)
        assert row["ncu_error"].startswith(said)
        assert said in module.note_on(CLOCK.backend, config, [{}, row])


def test_counters_are_read_from_both_pages_of_ncu() -> None:
    """The page `raw` has a column for each metric, and its first line below is of units."""
    lines = [
        f'"ID","Kernel Name","Grid Size","{DRAM}","{WARPS}","launch__grid_size"',
        '"","","","%","%",""',
        '"0","_b","(1,200, 1, 1)","12.5","nan","1,200"',
        '"1","_b","(1,200, 1, 1)","1,012.5","50.0","1,200"',
        '"2","_b"',
    ]
    assert read_counters(lines) == {"ncu_dram_frac": 10.125, "ncu_warps_frac": 0.5}
    assert read_counters(["==PROF== Disconnected"]) == {}


@pytest.mark.parametrize(("after_s", "code"), [(0.85, 0), (0.95, 1), (None, 2)])
def test_kernels_are_to_beat_earlier_ones(after_s, code, tmp_path, monkeypatch, capsys) -> None:
    """By 10 %: 15 % less time is enough, 5 % is not, and two samples are no comparison."""
    same = {"kind": "kernel", "case": "planted", "unit": "s", "shape": "tiny", "device": "gpu"}

    def write(name: str, samples: list[float]) -> Path:
        path = tmp_path / name / "results.jsonl"
        path.parent.mkdir()
        reference = {**same, "case": "planted, reference", "kind": "reference", "samples": [9.0]}
        path.write_text(json.dumps({**same, "samples": samples}) + "\n" + json.dumps(reference))
        return path.parent

    after = write("after", [1.0, 1.0] if after_s is None else [after_s, after_s, after_s + 1e-3])
    report = module.KernelsReport(after, [], RATES, "", [])
    monkeypatch.setattr(module, "run_kernels", lambda config, out: report)
    config = KernelsConfig(beat=write("before", [1.0, 1.001, 0.999]), by="10%")
    with pytest.raises(SystemExit) as ended:
        kernels(config=config)
    verdict = ("faster", "not faster by 10%", "not comparable")[code]
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ended.value.code == code and said["verdict"] == verdict and len(said["cases"]) == 1
    gains = [KernelsConfig(beat=tmp_path, by=by).gain for by in ("0.2", "12.5%")]
    assert gains == [0.2, 0.125]
    with pytest.raises(ValidationError, match="expected above 0%"):
        KernelsConfig(beat=tmp_path, by="100%")
    with pytest.raises(ValidationError, match="by=10% without beat, expected"):
        KernelsConfig(by="10%")
    with pytest.raises(ComparisonError):
        kernels(config=KernelsConfig(beat=tmp_path / "none"))


def spins(inputs: Inputs, size: Size) -> Outputs:
    """Compute as many passes as the configuration says."""
    chosen = tuned.chosen("planted", (40,), Stops(20), CPU)
    for _ in range(chosen.rounds):
        y = work({"x": inputs["x"].repeat(200)}, size)["y"][: size["N"]]
    return {"y": y + 1 if chosen.is_wrong else y}


def tunable(*others: Stops) -> KernelCase:
    space = Space("planted", (40,), Stops(20), others)
    return planted(spins, space=lambda size: space)


def tuned_by(*others: Stops) -> object:
    return tune(tunable(*others), SIZE, seeds=SEEDS, clock=CLOCK, keep=2)


def test_a_slow_configuration_never_wins_and_a_wrong_one_is_refused() -> None:
    found = tuned_by(Stops(80), Stops(2, is_wrong=1))
    assert found.adopted is None and found.ratio == 1.0
    assert "errs by" in found.refused[Stops(2, is_wrong=1)]
    assert found.best[-1].configuration == Stops(80)
    assert found.row()["effective"] == {"rounds": 20, "is_wrong": 0}


def test_a_fast_configuration_is_adopted_and_read_back(tmp_path: Path) -> None:
    found = tuned_by(Stops(80), Stops(2))
    assert found.adopted.configuration == Stops(2) and found.ratio > 1
    path = tuned.table_path("cpu")
    write_table(path, [found], {"device": "cpu", "triton": None})
    assert tuned.chosen("planted", (40,), Stops(20), CPU) == Stops(2)
    assert tuned.chosen("planted", (41,), Stops(20), CPU) == Stops(20)
    entry = tuned.used()["planted 40"]
    assert entry["source"] == "table" and entry["effective"]["rounds"] == 2
    assert entry["requested"]["rounds"] == 20
    kept = tuned.read_table(path)
    assert kept == {"measured": {"device": "cpu"}, "planted": {"40": {"rounds": 2, "is_wrong": 0}}}
    write_table(path, [tuned_by(Stops(80))], {"device": "cpu"})
    assert "planted" not in tuned.read_table(path)
    assert tuned.chosen("planted", (40,), Stops(20), CPU) == Stops(20)
    assert tuned.table_path("NVIDIA H200").name == "nvidia_h200.toml"
    with tuned.forcing("planted", (1,), Stops(3)), tuned.forcing("planted", (1,), Stops(4)):
        assert tuned.chosen("planted", (1,), Stops(20), CPU) == Stops(4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[planted.40]\nrounds = 3\n", "expected whole numbers called rounds, is_wrong"),
        ('[planted.40]\nrounds = "a"\nis_wrong = 0\n', "expected whole numbers called"),
        ("planted", "is no TOML"),
    ],
)
def test_a_damaged_table_is_refused(text: str, says: str) -> None:
    path = tuned.table_path("cpu")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        tuned.chosen("planted", (40,), Stops(20), CPU)


def test_the_verb_prints_a_table_and_fails_with_the_gate(tmp_path, monkeypatch, capsys) -> None:
    from qat.extensions.lab.verbs import kernels

    monkeypatch.setattr(module, "interprets", lambda: True)
    config = KernelsConfig(shape="tiny", device="cpu", repeats=1)
    monkeypatch.setattr(module, "cases_named", lambda only: [planted()])
    assert kernels(config=config, out=tmp_path / "o")["kernels"] == 1
    assert "kernels were interpreted" in capsys.readouterr().out
    monkeypatch.setattr(module, "cases_named", lambda only: [planted(broken)])
    with pytest.raises(BenchError, match="gate 'compile'"):
        kernels(config=config, out=tmp_path / "p")
    assert "planted failed the gate compile: at N=7" in capsys.readouterr().out
