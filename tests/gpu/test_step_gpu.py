"""One training step on CUDA: compiled, recorded, without waiting. Run with `-m gpu`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_case import no_synchronisation
from teacher_targets import targets_of
from tiny import tiny_model
from torch import Tensor, nn
from train_case import config

from qat.backend.base import DTYPES
from qat.backend.device import select
from qat.convert.quantize import quantize_model
from qat.data.packing import Batch
from qat.models.language_model import LanguageModel
from qat.nn.latent import add_adapters, to_latent
from qat.nn.swap import decoder_layers, with_tables
from qat.quant.spec import PRESETS
from qat.train.learnable import learnable, weights_in_scope
from qat.train.optim import Optimizer
from qat.train.step import EAGER_STEPS, TrainingStep

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_compiled_yet")]
B, S, K, V = 4, 64, 8, 320
LORA = {"learn": "lora", "lora_rank": 4, "lr_lora": 3e-2}
TAUGHT = {"has_teacher": True, "loss": "kl:1,hard_ce:0.1"}


def step_of(
    place: Path,
    preset: str = "q2a4",
    *,
    has_teacher: bool = False,
    table_bits: int = 0,
    **values: object,
) -> TrainingStep:
    """Return the step of a tiny model, with a float teacher beside it that is wider."""
    settings = config(place, device="cuda", **{"dtype": "bf16", "compile": "on", **values})
    model = LanguageModel(tiny_model(hidden_size=64, intermediate_size=128, initializer_range=0.1))
    plan = PRESETS[preset]
    if table_bits:
        plan = with_tables(plan, model.model, table_bits)
    quantize_model(model, plan, workers=1)
    model.model.cuda()
    names = weights_in_scope(model.model, "e2e")
    if "weights" in settings.kinds:
        dtype, is_hosted = DTYPES[settings.latent_dtype], settings.offload == "latents"
        to_latent(model.model, names, dtype=dtype, is_hosted=is_hosted)
    if "lora" in settings.kinds:
        add_adapters(model.model, names, settings.lora_rank, seed=0)
    teacher = None
    if has_teacher:
        wide = tiny_model(hidden_size=96, initializer_range=0.2)
        wide = wide.to("cuda", select("cuda").dtype(settings.dtype)).requires_grad_(False)
        teacher = LanguageModel(wide)
    by_kind = learnable(model.model, names, settings.kinds)
    return TrainingStep(model, Optimizer(model.model, by_kind, settings), settings, teacher)


def batch(seed: int, sequences: int = B, length: int = S) -> Batch:
    """Two documents a row, in pinned memory."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(sequences * length, V, generator=generator)
    rows = [value.unflatten(0, (sequences, length)) for value in targets_of(logits, K, draws=5)]
    mask, labels, ids, logprobs, tail, sample_ids, counts = rows
    positions = (torch.arange(length) % (length // 2 + 1)).expand(sequences, length)
    tokens = torch.randint(V, (sequences, length), generator=generator)
    made = Batch(tokens, positions, mask, labels, ids, logprobs, tail, sample_ids, counts)
    return Batch(*(tensor.contiguous().pin_memory() for tensor in made))


def course(step: TrainingStep, steps: int, accumulate: int = 1) -> list[float]:
    losses = []
    for number in range(steps):
        batches = [batch(10 * number + part) for part in range(accumulate)]
        result = step(batches, number)
        losses.append((result.sums["loss"] / result.valid_tokens).item())
    return losses


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"learn": "scales,codebook", "loss": "candidates"},
        {"loss": "sampled:1,hard_ce:0.1"},
        {"gradient_checkpointing": True},
        {"dtype": "fp16"},
        {"latent_dtype": "bf16"},
        {"latent_dtype": "bf16", "offload": "latents", "form": "layer"},
        {"compile": "off"},
        {"form": "layer"},
        {"table_bits": 4},
        {"table_bits": 2, "latent_dtype": "bf16", "offload": "latents", "form": "layer"},
        {"table_bits": 4, "learn": "scales,codebook"},
        TAUGHT | {"table_bits": 4, "loss": "kl"},
        {"form": "layer", "gradient_checkpointing": True, "learn": "scales,codebook"},
        *(LORA | more for more in ({}, {"gradient_checkpointing": True}, {"dtype": "fp16"})),
        *(TAUGHT | more for more in ({}, {"gradient_checkpointing": True}, {"dtype": "fp16"})),
        *({"has_teacher": True, "loss": loss} for loss in ("kl", "cakld")),
    ],
    ids=str,
)
def test_a_step_never_waits_for_the_device(tmp_path: Path, values: dict) -> None:
    step, batches = step_of(tmp_path, **values), [batch(1)]
    for number in range(EAGER_STEPS + 1):
        step(batches, number)
    with no_synchronisation():
        step(batches, EAGER_STEPS + 1)
    facts = step.compile_facts()
    assert facts["cuda_graph"] and (facts["fallback"] is None or "has_teacher" not in values)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("preset", "values"),
    [
        ("q2a4", {"learn": "weights,scales,codebook"}),
        ("q2a4", {"learn": "scales,codebook"}),
        ("q2a4", {"learn": "scales,norms"}),
        ("v2a2", {"learn": "weights,scales,codebook"}),
        ("v2a2", {"learn": "scales,codebook"}),
        ("q2a4", LORA),
        ("q2a4", LORA | {"learn": "lora,scales,codebook"}),
        ("q2a4", TAUGHT),
        ("q2a4", {"learn": "weights,scales,codebook", "table_bits": 4}),
    ],
)
def test_a_recorded_step_is_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, values: dict, accumulate: int
) -> None:
    recorded = step_of(tmp_path, preset, **values)
    found = course(recorded, 6, accumulate)
    assert recorded.compile_facts()["cuda_graph"]
    monkeypatch.setattr("qat.train.step.GRAPH_TOKENS", 0)
    eager = step_of(tmp_path, preset, **values)
    expected = course(eager, 6, accumulate)
    assert not eager.compile_facts()["cuda_graph"]
    assert found == pytest.approx(expected, rel=1e-4)
    learn = values.get("learn", "")
    assert found[-1] < found[0] or learn == "scales,norms" or "lora" in learn


def test_lengths_that_were_never_run_are_compiled_before_one_is_recorded(tmp_path: Path) -> None:
    step = step_of(tmp_path)
    for number, length in enumerate((S, S - 16, S - 32, S - 32, S - 16, S)):
        step([batch(number, length=length)], number)
        assert step.compile_facts()["cuda_graph"] == (number >= 4)


@pytest.mark.parametrize("preset", ["q2a4", "v2a2"])
@pytest.mark.parametrize(
    "values",
    [
        {"learn": "weights"},
        {"learn": "weights", "gradient_checkpointing": True, "latent_dtype": "bf16"},
        {"learn": "scales,codebook"},
        {"learn": "weights", "compile": "off"},
    ],
    ids=str,
)
def test_weights_formed_by_layer_take_the_same_steps(
    tmp_path: Path, preset: str, values: dict
) -> None:
    steps = {form: step_of(tmp_path, preset, form=form, **values) for form in ("whole", "layer")}
    whole, by_layer = (course(step, 6, 2) for step in steps.values())
    assert all(step.compile_facts()["cuda_graph"] for step in steps.values())
    assert by_layer[0] == whole[0] and by_layer == pytest.approx(whole, rel=1e-4)
    if values["learn"] == "weights":  # sums of scales and codebooks may be taken in another order
        moved = [step.optimizer.parameters.values() for step in steps.values()]
        assert all(torch.equal(mine, its) for mine, its in zip(*moved, strict=True))


@pytest.mark.parametrize("preset", ["q2a4", "v2a2"])
@pytest.mark.parametrize("learn", ["weights", "weights,scales,codebook"])
@pytest.mark.parametrize("form", ["whole", "layer"])
def test_latent_weights_on_the_host_take_the_same_steps(
    tmp_path: Path, preset: str, learn: str, form: str
) -> None:
    kept = {"learn": learn, "form": form, "latent_dtype": "bf16"}
    here, away = (step_of(tmp_path, preset, offload=o, **kept) for o in ("none", "latents"))
    expected, found = course(here, 6, 2), course(away, 6, 2)
    assert away.compile_facts()["cuda_graph"] and away.optimizer.hosted
    assert found[0] == expected[0] and found == pytest.approx(expected, rel=1e-3)
    if learn == "weights":  # a kernel sums what scales learn in the order of its codes' form
        theirs = here.optimizer.state()
        assert found == expected
        for name, tensor in away.optimizer.state().items():  # some of it lies on the host
            assert torch.equal(tensor.cpu(), theirs[name].cpu()), name


def reads(_layer: nn.Module, inputs: tuple[Tensor]) -> None:
    inputs[0].sum().item()


def copies(_layer: nn.Module, inputs: tuple[Tensor]) -> None:
    torch.ones(3).to(inputs[0].device)


@pytest.mark.parametrize("waiting", [reads, copies])
def test_a_model_that_waits_is_not_recorded(tmp_path: Path, waiting: Callable) -> None:
    plain, waits = (step_of(tmp_path, compile="off") for _ in range(2))
    decoder_layers(waits.student.model)[0].register_forward_pre_hook(waiting)
    expected, found = course(plain, 5), course(waits, 5)
    assert plain.compile_facts()["cuda_graph"] and not waits.compile_facts()["cuda_graph"]
    assert found == pytest.approx(expected, rel=1e-4)
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp32"])
@pytest.mark.parametrize(("values", "rel"), [({}, 3e-3), (TAUGHT, 1e-2)])
def test_compiled_layers_compute_what_is_written(
    tmp_path: Path, values: dict, rel: float, dtype: str
) -> None:
    compiled = course(step_of(tmp_path, dtype=dtype, **values), 4)
    written = course(step_of(tmp_path, dtype=dtype, compile="off", **values), 4)
    assert compiled == pytest.approx(written, rel=rel)
    if not values:  # the teacher's own numbers depend on the dtype
        cpu_like = course(step_of(tmp_path, dtype="fp32", compile="off"), 4)
        assert compiled == pytest.approx(cpu_like, rel=1e-2)


def test_recomputed_slices_compute_the_same(tmp_path: Path, monkeypatch) -> None:
    plain = course(step_of(tmp_path), 4)
    monkeypatch.setattr("qat.models.regions.SLICE_TOKENS", 3 * S)
    sliced = step_of(tmp_path, gradient_checkpointing=True)
    assert course(sliced, 4) == pytest.approx(plain, rel=3e-3)
    assert sliced.compile_facts()["fallback"] is None


def test_equal_layers_share_their_graphs(tmp_path: Path) -> None:
    step = step_of(tmp_path)
    course(step, 4)
    facts = step.compile_facts()
    assert facts["compiled"] and facts["fallback"] is None
    # the first layer's input needs no gradient, the others' does; and the last norm
    assert facts["graphs"] <= 4


def test_longer_sequences_run_too(tmp_path: Path) -> None:
    step = step_of(tmp_path)
    result = step([batch(3, sequences=2, length=200)], 0)
    assert bool(result.sums["loss"].isfinite()) and select("cuda").records
