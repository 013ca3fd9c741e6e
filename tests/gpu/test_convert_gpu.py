"""Quantizing on CUDA: the kernels against their references, whole fits against the CPU's."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from column_case import block, block_of_vectors, values
from tiny import VOCAB, tiny_model

from qat.convert.calibrate import TokenBatch
from qat.convert.quantize import quantize_model
from qat.kernels.column_sweep import COLUMN_OPS, RecordedSweeps, nearest_vectors
from qat.models import streamed
from qat.models.document_attention import quantize_kv
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_teacher
from qat.models.stored_state import packed_state_dict
from qat.nn.swap import linear_names, table_names
from qat.quant import vectors
from qat.quant.codebook import nearest_level
from qat.quant.error_feedback import REFERENCE, Columns, damped, fit_all_to_inputs, output_error
from qat.quant.spec import PRESETS, KvSpec, LutSpec, PlanRule, QuantPlan
from qat.quant.weight import dequantize

pytestmark = pytest.mark.gpu

SPECS = {
    "lut2": LutSpec(bits=2),
    "lut4": LutSpec(bits=4, group_size=64),
    "lut2_s8": LutSpec(bits=2, group_size=16, scale_bits=8),
    "int3": LutSpec(bits=3, codebook="int", group_size=128),
    "wide groups": LutSpec(bits=2, group_size=256),
    "low rank": LutSpec(bits=2, scale="low_rank", rank=4),
    "vectors": LutSpec(bits=8, vector_size=4, group_size=32, scale_bits=8),
    "pairs": LutSpec(bits=6, vector_size=2, group_size=64),
    "vectors of low rank": LutSpec(bits=8, vector_size=8, scale="low_rank", rank=4),
}


def moment(features: int) -> torch.Tensor:
    x = torch.randn(4 * features, features) @ (torch.randn(features, features) / features**0.5)
    return (x.T @ x / len(x)).cuda()


def on_gpu(columns: Columns) -> Columns:
    held = {n: t.cuda() for n, t in vars(columns).items() if isinstance(t, torch.Tensor)}
    return replace(columns, **held)


@pytest.mark.parametrize("scale_bits", [16, 8])
@pytest.mark.parametrize(("B", "O", "C"), [(32, 6144, 4), (8, 1000, 16), (128, 77, 4), (20, 33, 2)])
def test_kernels_equal_their_references(B: int, O: int, C: int, scale_bits: int) -> None:
    columns, target, coupling = block(B, O, C, 1)
    columns = replace(on_gpu(columns), scale_bits=scale_bits)
    target, coupling = target.cuda(), 0.3 * coupling.cuda()
    diagonal = torch.rand(B, device="cuda") + 0.5
    found = []
    for ops in (COLUMN_OPS, REFERENCE):
        own, aim = deepcopy(columns), target.clone()
        ops.refit(own, aim, coupling, diagonal)
        ops.settle(own, aim, coupling)
        found.append(own)
    ours, theirs = found
    # a scale, or a level, that lies between two values may take either
    is_same = torch.isclose(ours.scales, theirs.scales, rtol=1e-5)
    assert is_same.float().mean() > 0.99
    step = {16: 2e-3, 8: 0.13}[scale_bits]
    torch.testing.assert_close(ours.scales, theirs.scales, rtol=step, atol=0)
    assert torch.isclose(ours.chosen, theirs.chosen)[:, is_same[0]].float().mean() > 0.99
    torch.testing.assert_close(ours.residual, columns.weight - ours.chosen * ours.scales)


@pytest.mark.parametrize(("B", "O", "C", "d", "group_size"), [
    (32, 3072, 256, 4, 32), (32, 1000, 64, 2, 2), (24, 77, 256, 8, 1), (128, 500, 4096, 4, 4),
])  # fmt: skip
def test_kernels_of_vectors_equal_their_references(
    B: int, O: int, C: int, d: int, group_size: int
) -> None:
    columns, target, coupling = block_of_vectors(B, O, C, d, B // group_size)
    columns, target, coupling = on_gpu(columns), target.cuda(), coupling.cuda()
    found = []
    for ops in (COLUMN_OPS, REFERENCE):
        own, aim = deepcopy(columns), target.clone()
        if group_size == B:
            ops.refit(own, aim, 0.2 * coupling, columns.metric)
        ops.settle(own, aim, coupling)
        found.append(own)
    ours, theirs = found
    # a scale, or a vector, that lies between two values may take either
    assert torch.isclose(ours.scales, theirs.scales, rtol=1e-5).float().mean() > 0.99
    assert (ours.indices == theirs.indices).float().mean() > 0.99
    assert torch.equal(ours.chosen, values(columns.levels, ours.indices))
    S = ours.scales.repeat_interleave(group_size, 0)
    torch.testing.assert_close(ours.residual, columns.weight - ours.chosen * S)


@pytest.mark.parametrize(("C", "d"), [(256, 4), (64, 2), (4096, 8)])
def test_nearest_codewords_equal_the_references(C: int, d: int) -> None:
    weight, S = torch.randn(300, 1024).cuda(), torch.rand(300, 1024).cuda() - 0.2
    codebook, importance = torch.randn(C, d).cuda(), moment(1024).diagonal().expand(300, 1024)
    ours = nearest_vectors(weight, S, codebook, importance)
    theirs = vectors.nearest_vectors(weight, S, codebook, importance)
    assert ours.dtype == theirs.dtype and (ours == theirs).float().mean() > 0.999


@pytest.mark.parametrize("C", [2, 3, 16, 256])
def test_the_nearest_level_is_the_cpus(C: int) -> None:
    levels = torch.randn(C).sort().values
    middles = (levels[1:] + levels[:-1]) / 2
    edges = torch.tensor([torch.inf, -torch.inf, 0.0])
    values = torch.cat([torch.randn(1000), levels, middles, middles.nextafter(edges[0]), edges])
    values = values[: len(values) // 7 * 7].view(-1, 7)
    for each in (values, values.T):
        ours = nearest_level(each.cuda(), levels.cuda())
        assert ours.dtype == torch.uint8 and ours.is_contiguous()
        assert torch.equal(ours.cpu(), nearest_level(each, levels))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_fits_are_as_good_as_the_references_and_the_cpus(spec: LutSpec) -> None:
    weights = [torch.randn(rows, 512) for rows in (96, 33)]
    H = moment(512)
    errors = []
    for device, ops in (("cuda", COLUMN_OPS), ("cuda", REFERENCE), ("cpu", REFERENCE)):
        own = [weight.to(device) for weight in weights]
        fits = fit_all_to_inputs(own, spec, H.to(device), ops)
        D = damped(H.to(device))
        pairs = zip(own, fits, strict=True)
        errors.append(sum(output_error(weight, fit.quantized, D) for weight, fit in pairs))
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
    assert errors[0] == pytest.approx(errors[2], rel=0.02)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_recorded_sweeps_fit_to_the_same_bits(spec: LutSpec) -> None:
    recorded = COLUMN_OPS._replace(sweeps=RecordedSweeps())
    for _ in range(2):  # the second fit replays the graph of the first
        weights, H = [torch.randn(rows, 512, device="cuda") for rows in (96, 33)], moment(512)
        for ours, theirs in zip(
            fit_all_to_inputs(weights, spec, H, recorded),
            fit_all_to_inputs(weights, spec, H, COLUMN_OPS),
            strict=True,
        ):
            assert ours.output_error == theirs.output_error
            assert torch.equal(dequantize(ours.quantized), dequantize(theirs.quantized))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_model_in_its_files_becomes_what_it_becomes_in_memory(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "SHARE", share)
    model = tiny_model(initializer_range=0.2).bfloat16()
    model.save_pretrained(tmp_path / "float")
    ids = torch.randint(VOCAB, (8, 12), generator=torch.Generator().manual_seed(5))
    batches = [TokenBatch(ids, torch.arange(12).expand_as(ids))]
    for calibration in ([], batches):
        states = []
        for folder in (None, tmp_path):
            source = str(tmp_path / "float")
            student = load_model(source, device="cuda", dtype="fp32", folder=folder)
            quantize_kv(student.model, KvSpec(bits=4), student.device)
            report = quantize_model(student, PRESETS["q2a4"], calibration=calibration)
            assert report.kv is not None and report.kv.bits == 4
            states.append(packed_state_dict(student.model))
        for name, tensor in states[0].items():
            assert torch.equal(tensor.cpu(), states[1][name].cpu())


def test_a_teacher_on_the_disk_says_what_one_on_the_device_says(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "float")
    ids = torch.arange(24, device="cuda").view(2, 12)
    batch = ids, torch.arange(12, device="cuda").expand(2, 12)
    found = []
    for device_map in (None, "disk"):
        teacher = load_teacher(str(tmp_path / "float"), device="cuda", device_map=device_map)
        with torch.no_grad():
            (hidden,) = teacher.hidden_of([batch])
            found.append(teacher.logits(hidden))
    assert torch.equal(*found)


@pytest.mark.parametrize("table", [SPECS["lut2_s8"], SPECS["pairs"]], ids=["levels", "pairs"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_converted_as_well_as_on_the_cpu(tied: bool, table: LutSpec) -> None:
    ids = torch.randint(VOCAB, (8, 12), generator=torch.Generator().manual_seed(5))
    batches = [TokenBatch(ids, torch.arange(12).expand_as(ids))]
    table = table.model_copy(update={"group_size": 16})
    errors = []
    for device in ("cpu", "cuda"):
        made = tiny_model(initializer_range=0.2, tie_word_embeddings=tied)
        model = LanguageModel(made.to(device))
        tables = table_names(made)
        rules = [PlanRule(pattern=name, spec=table) for name in tables]
        plan = QuantPlan(name="p", rules=(*rules, *PRESETS["q2a4"].rules))
        report = quantize_model(model, plan, calibration=batches)
        assert {m.name for m in report.modules} == {*linear_names(made), *tables}
        linears = [m.weighted_error for m in report.modules if m.name not in tables]
        errors.append([sum(linears) / len(linears)])
        errors[-1] += [m.relative_error for m in report.modules if m.name in tables]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)
