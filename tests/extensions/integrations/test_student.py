"""A prepared student in a loop of one's own takes the steps of 'qat train', to the bit."""

import copy
from pathlib import Path

import pytest
import torch
from cache_case import TOKENIZER, build
from families import build as family
from loop_case import (
    assert_same,
    batches_of,
    prepared,
    steps_of_loop,
    steps_of_run,
    values_of,
    with_tables,
)
from quantized import SPECS, tiny_quantized, with_random_codes, with_rounded_inputs
from tiny import IDS, tiny_model
from torch import nn
from torch.nn import functional as F
from train_case import config, make_place
from transformers import PreTrainedModel

import qat
from qat.backend.cpu import CpuBackend
from qat.data.reader import TeacherCache
from qat.errors import ConfigError
from qat.extensions.integrations.modules import LoopJoined, LoopWeight
from qat.models.checkpoint import save_checkpoint
from qat.models.language_model import LanguageModel
from qat.models.stored_state import packed_state_dict
from qat.nn.quant_weight import quant_weights
from qat.nn.step import JoinedLinears


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("loop"))


@pytest.fixture(scope="module")
def cache(place: Path) -> TeacherCache:
    return TeacherCache.open(place / "cache")


SETTINGS = (
    {},
    {"grad_accum_steps": 2, "weight_decay": 0.1, "mlp_only": True},
    {"dtype": "bf16"},
    {"learn": "scales,codebook,norms"},
    {"learn": "lora,scales", "lora_rank": 3, "dtype": "bf16"},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_loop_of_ones_own_takes_the_steps_of_a_run(
    place: Path, cache: TeacherCache, settings: dict
) -> None:
    expected, course = steps_of_run(place, **settings)
    student = prepared(place, course)
    before = {name: value.clone() for name, value in values_of(student).items()}
    steps_of_loop(student, cache, course)
    assert_same(values_of(student), values_of(expected))
    moved = [n for n, value in values_of(student).items() if not torch.equal(value, before[n])]
    assert moved and {*moved} <= student.prepared.kinds.keys()
    wanted = packed_state_dict(expected)
    assert_same(packed_state_dict(qat.finish(student)), wanted)


STUDENTS = {
    "vectors": lambda: tiny_quantized("qwen3", SPECS["fours8_s8"]),
    "low rank": lambda: tiny_quantized("llama", SPECS["lut2_r4"]),
    "int8": lambda: with_rounded_inputs(tiny_quantized("qwen3", SPECS["lut3"]), "int8-static"),
    "tied tables": lambda: with_tables(tie_word_embeddings=True),
    "experts": lambda: with_random_codes(
        LanguageModel(family("Qwen3MoeForCausalLM")).model, SPECS["lut2"]
    ),
    "scaled embedding": lambda: tiny_quantized("gemma3", SPECS["lut2"]),
    "own head": lambda: with_tables(tie_word_embeddings=False, pad_token_id=3),
}


def with_experts() -> PreTrainedModel:
    model = LanguageModel(family("Qwen3MoeForCausalLM")).model  # which opens its stacks of experts
    return with_random_codes(model, SPECS["lut2"])


@pytest.mark.usefixtures("short_fits")
@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "bf16") for kind in STUDENTS), ("tied tables", "fp32")]
)
def test_every_format_takes_the_steps_of_a_run(tmp_path: Path, kind: str, dtype: str) -> None:
    build(tmp_path / "cache")
    save_checkpoint(STUDENTS[kind](), TOKENIZER, tmp_path / "student")
    expected, course = steps_of_run(tmp_path, dtype=dtype)
    student = prepared(tmp_path, course)
    before = {name: value.clone() for name, value in values_of(student).items()}
    steps_of_loop(student, TeacherCache.open(tmp_path / "cache"), course)
    assert_same(values_of(student), values_of(expected))
    moved = {n for n, value in values_of(student).items() if not torch.equal(value, before[n])}
    assert moved == student.prepared.kinds.keys()
    wanted = packed_state_dict(expected)
    finished = qat.finish(student)
    assert_same(packed_state_dict(finished), wanted)
    qat.save(finished, tmp_path / "finished", TOKENIZER)
    opened = qat.load(tmp_path / "finished", device="cpu", dtype="fp32")
    with torch.no_grad():
        assert torch.equal(opened(IDS).logits, finished(IDS).logits)


def test_joined_layers_take_the_steps_of_separate_ones(
    place: Path, cache: TeacherCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = config(place, dtype="bf16")
    separate = prepared(place, course)
    monkeypatch.setattr(CpuBackend, "compiles", True)  # as on a GPU
    joined = copy.deepcopy(prepared(place, course))
    assert sum(isinstance(module, LoopJoined) for module in joined.modules()) == 4
    losses = [steps_of_loop(student, cache, course) for student in (joined, separate)]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0.0)
    for name, value in values_of(joined).items():
        torch.testing.assert_close(value, values_of(separate)[name], rtol=0.0, atol=2e-2)
    logits = joined.eval()(IDS).logits
    finished = qat.finish(joined)
    assert not any(isinstance(module, JoinedLinears) for module in finished.modules())
    torch.testing.assert_close(finished(IDS).logits, logits.float(), rtol=0.0, atol=5e-2)


@pytest.mark.usefixtures("short_fits")
def test_micro_batches_name_the_words_of_a_table_together(tmp_path: Path) -> None:
    build(tmp_path / "cache")
    save_checkpoint(with_tables(), TOKENIZER, tmp_path / "student")
    expected, course = steps_of_run(tmp_path, grad_accum_steps=2)
    student = prepared(tmp_path, course)
    steps_of_loop(student, TeacherCache.open(tmp_path / "cache"), course)
    found, wanted = values_of(student), values_of(expected)
    for name, value in found.items():  # micro-batches are added in another order
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6)


def test_losses_of_logits_are_those_of_hidden_states(place: Path, cache: TeacherCache) -> None:
    student = prepared(place, config(place))
    (batch,) = batches_of(cache, 0, 1)
    how = {"position_ids": batch.position_ids}
    for loss in ("tail", "sampled", "hard_ce", "tail:1,hard_ce:0.5"):
        without = qat.loss(student(batch.input_ids, with_logits=False, **how), batch, loss=loss)
        usual = qat.loss(student(batch.input_ids, **how), batch, loss=loss)
        torch.testing.assert_close(usual, without)


def test_a_live_teacher_gives_the_textbook_kl(place: Path) -> None:
    student, teacher = prepared(place, config(place)), tiny_model(seed=3)
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[:, -3:] = False
    with torch.no_grad():
        log_p = teacher(IDS).logits.log_softmax(-1)
    log_q = student(IDS).logits.log_softmax(-1)
    each = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    with torch.no_grad():
        taught = teacher(IDS)
    found = qat.loss(student(IDS), teacher=taught, mask=mask)
    torch.testing.assert_close(found, each[mask].mean())
    torch.testing.assert_close(qat.loss(student(IDS), teacher=taught), each[:, :-1].mean())
    taught.logits[:, -3:] = torch.nan
    assert torch.equal(qat.loss(student(IDS), teacher=taught, mask=mask), found)


def test_a_teacher_without_logits_gives_the_same_loss(place: Path, cache: TeacherCache) -> None:
    student, teacher = prepared(place, config(place)), qat.as_teacher(tiny_model(seed=3))
    (batch,) = batches_of(cache, 0, 1)
    found = []
    for with_logits in (False, True):
        how = {"position_ids": batch.position_ids, "with_logits": with_logits}
        with torch.no_grad():
            taught = teacher(batch.input_ids, **how)
        out = student(batch.input_ids, **how)
        found.append(qat.loss(out, batch, teacher=taught, loss="kl:1,reverse_kl:0.5"))
    torch.testing.assert_close(*found)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


def test_losses_over_the_first_words_of_a_padded_head(cache: TeacherCache) -> None:
    V = cache.manifest.teacher.vocab_size
    student = qat.prepare(with_tables(vocab_size=V + 5, tie_word_embeddings=True), None)
    (batch,) = batches_of(cache, 0, 1)
    how = {"position_ids": batch.position_ids}
    usual = student(batch.input_ids, **how)
    usual.logits = usual.logits[..., :V]
    expected = qat.loss(usual, batch)
    gradients = []
    for totals in (qat.totals(student, [batch]), None):
        out = student(batch.input_ids, with_logits=False, **how)
        loss = qat.loss(out._replace(head=out.head.words(0, V)), batch, totals=totals)
        torch.testing.assert_close(loss, expected)
        student.zero_grad()
        loss.backward()
        gradients.append({n: p.grad for n, p in student.named_parameters() if p.grad is not None})
    assert_same(*gradients)
    of_table = gradients[0]["model.embed_tokens.weight"]
    assert len(of_table) == V + 5 and of_table[:V].any() and not of_table[V:].any()


def test_gradients_of_logits_reach_everything_that_learns(place: Path, cache: TeacherCache) -> None:
    student = prepared(place, config(place))
    (batch,) = batches_of(cache, 0, 1)
    how = {"position_ids": batch.position_ids}
    found = []
    for with_logits in (False, True):
        student.zero_grad()
        qat.loss(student(batch.input_ids, with_logits=with_logits, **how), batch).backward()
        found.append({n: p.grad for n, p in student.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() == student.prepared.kinds.keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_a_state_dict_goes_on_where_it_was_saved(place: Path, cache: TeacherCache) -> None:
    course = config(place)
    first = prepared(place, course)
    steps_of_loop(first, cache, course)
    second = prepared(place, course)
    assert not second.load_state_dict(first.state_dict()).missing_keys
    for student in (first, second):
        steps_of_loop(student, cache, course)
    assert_same(values_of(second), values_of(first))


@pytest.mark.usefixtures("short_fits")
def test_a_deep_copy_learns_alone(tmp_path: Path) -> None:
    build(tmp_path / "cache")
    save_checkpoint(with_tables(tie_word_embeddings=True), TOKENIZER, tmp_path / "student")
    cache, course = TeacherCache.open(tmp_path / "cache"), config(tmp_path, dtype="bf16")
    student = prepared(tmp_path, course)
    twin = copy.deepcopy(student)
    before = {name: value.clone() for name, value in values_of(student).items()}
    losses = steps_of_loop(twin, cache, course)
    assert_same(values_of(student), before)
    assert all(map(torch.equal, losses, steps_of_loop(student, cache, course)))
    assert_same(values_of(twin), values_of(student))
    assert_same(packed_state_dict(qat.finish(twin)), packed_state_dict(qat.finish(student)))


def test_recomputed_layers_change_nothing(place: Path, cache: TeacherCache) -> None:
    course = config(place, dtype="bf16")
    plain, recomputed = prepared(place, course), prepared(place, course)
    name = "activation_checkpointing_enable"  # of transformers from 5.24
    getattr(recomputed, name, recomputed.gradient_checkpointing_enable)()
    losses = steps_of_loop(plain, cache, course), steps_of_loop(recomputed, cache, course)
    assert all(map(torch.equal, *losses))
    assert_same(values_of(recomputed), values_of(plain))


def test_it_still_generates_and_casts(place: Path) -> None:
    student = prepared(place, config(place))
    wanted = student.generate(IDS[:1, :4], max_new_tokens=4, do_sample=False)
    logits = student(IDS).logits
    student.to(torch.float64)
    assert {w.codebook.dtype for w in quant_weights(student).values()} == {torch.float32}
    student.to(torch.float32)
    assert torch.equal(student(IDS).logits, logits)
    finished = qat.finish(student)
    assert torch.equal(finished.generate(IDS[:1, :4], max_new_tokens=4, do_sample=False), wanted)
    assert not any(isinstance(weight, LoopWeight) for weight in quant_weights(finished).values())


def test_prepare_draws_no_random_number_and_quantizes(place: Path) -> None:
    model = tiny_model(num_hidden_layers=1)
    torch.manual_seed(5)
    wanted = torch.rand(2)
    torch.manual_seed(5)
    student = qat.prepare(model, "q2a2", group_size=16, mlp_only=True)
    assert torch.equal(torch.rand(2), wanted)
    assert {n.split(".")[3] for n in student.prepared.kinds} == {"mlp"}
    plain = qat.quantize(tiny_model(num_hidden_layers=1), "q2a2", group_size=16)
    assert_same(packed_state_dict(qat.finish(student)), packed_state_dict(plain))


def test_rows_without_positions_are_a_document_each(place: Path, cache: TeacherCache) -> None:
    (batch,) = batches_of(cache, 0, 1)
    student = prepared(place, config(place))
    whole = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    given = student(batch.input_ids, position_ids=whole, with_logits=False)
    assert torch.equal(student(batch.input_ids, with_logits=False).hidden, given.hidden)
    assert not torch.equal(whole, batch.position_ids)


def test_mistakes(place: Path, cache: TeacherCache) -> None:
    (batch,) = batches_of(cache, 0, 1)
    student = prepared(place, config(place))
    out = student(batch.input_ids, position_ids=batch.position_ids)
    states = student(batch.input_ids, position_ids=batch.position_ids, with_logits=False)
    few = states._replace(head=states.head.words(0, 300))
    for act, message in (
        (lambda: qat.prepare(student, None), "prepared already"),
        (lambda: qat.prepare(tiny_model(), None), "no quantized linears"),
        (lambda: qat.prepare(tiny_model(), "q2a2", learn="sclaes"), "learn='sclaes'"),
        (lambda: qat.prepare(tiny_model(), "q2a2", max_steps=3), "max_steps is unknown"),
        (lambda: qat.finish(tiny_model()), "Qwen3ForCausalLM is not a prepared student"),
        (lambda: qat.param_groups(nn.Linear(1, 1)), "Linear is not a prepared student"),
        (lambda: qat.param_groups(student, lr=-1.0), "lr"),
        (lambda: qat.as_teacher(tiny_model(), dtype="fp8"), "dtype='fp8'"),
        (lambda: qat.loss(out), "neither a batch"),
        (lambda: qat.loss(out, batch, loss="kl"), "reads every word"),
        (lambda: qat.loss(out, teacher=tiny_model(vocab_size=300)(IDS)), "same tokens and words"),
        (lambda: qat.loss(states, teacher=few), "and the teacher's 300"),
    ):
        with pytest.raises(ConfigError, match=message):
            act()
    for weight in quant_weights(student).values():
        weight.codebook.data = weight.codebook.data.bfloat16()
    with pytest.raises(ConfigError, match="expected float32"):
        student(IDS)
