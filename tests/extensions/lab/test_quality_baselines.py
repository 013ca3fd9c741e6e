"""The baselines follow their papers' formulas, learn, and leave behind what they would deploy."""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import families
import pytest
import torch
from cache_case import TOKENIZER, build, teacher
from tiny import tiny_model
from torch import Tensor, nn
from torch.nn import functional as F

from qat.convert.calibrate import TokenBatch
from qat.data.reader import TeacherCache
from qat.errors import CacheError, ConfigError
from qat.evaluate.divergence import exact_divergence
from qat.extensions.lab.baselines import methods
from qat.extensions.lab.baselines.config import METHODS, PTQ, BaselineSettings
from qat.extensions.lab.baselines.methods import TRAINERS, time_step, train_baseline, wrap_caches
from qat.extensions.lab.baselines.reference import (
    Formed,
    RankByRank,
    even_lut,
    fewer_entries,
    more_ranks,
    nearest_entries,
    svd_scale,
)
from qat.extensions.lab.baselines.training import (
    BaselineJob,
    Deployed,
    dense_copy,
    put_plain,
    split_stacks,
    warm_up,
)
from qat.extensions.lab.baselines.uniform import (
    BlockLinear,
    Budget,
    ScaledLinear,
    gptq,
    minmax_grid,
    round_to_nearest,
    uniform_bits,
)
from qat.models.language_model import LanguageModel
from qat.nn.swap import CACHE, decoder_layers, linear_names
from qat.quant.error_feedback import damped
from qat.quant.spec import role_of

TRAINED = tuple(name for name in METHODS if name not in (*PTQ, "edgerazor"))
"""Trained methods whose library is always installed."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TeacherCache:
    place = tmp_path_factory.mktemp("quality") / "cache"
    build(place)
    return TeacherCache.open(place)


def settings(**values: object) -> BaselineSettings:
    short = {"max_steps": 30, "batch_size": 8, "warmup_steps": 3, "device": "cpu", "dtype": "fp32"}
    return BaselineSettings(**{**short, **values})


def calibration(cache: TeacherCache) -> list[TokenBatch]:
    batch = cache.batch(range(16))
    return [TokenBatch(batch.input_ids, batch.position_ids)]


def kl(student: LanguageModel, cache: TeacherCache) -> float:
    held_out = cache.batch(range(cache.num_sequences("held_out")), "held_out")
    return exact_divergence(student, teacher(), [held_out]).kl_nats


def untrained(method: str, cache: TeacherCache, **values: object) -> BaselineJob:
    """The method's student before its end-to-end training, as one would deploy it."""
    job = BaselineJob.of(teacher(), cache, settings(block_steps=0, **values).filled(method))
    put_plain(job.model, TRAINERS[method](job).deploy())
    return job


def test_rounding_to_nearest_by_hand() -> None:
    weight = torch.tensor([[-1.0, 0.5, 2.0, 0.1]])
    grid = minmax_grid(weight, 2, 4)
    assert grid.scales.item() == 1.0 and grid.zeros.item() == 1.0
    assert round_to_nearest(weight, 2, 4).tolist() == [[-1.0, 0.0, 2.0, 0.0]]
    assert uniform_bits(weight, 2, 4) == 4 * 2 + 16 + 2
    assert not round_to_nearest(torch.zeros(2, 16), 2, 16).any()


def correlated(I: int, tokens: int = 256) -> torch.Tensor:
    x = torch.randn(tokens, I) @ torch.randn(I, I)
    return x.T @ x / tokens


def test_gptq_is_optimal_brain_quantization_column_by_column() -> None:
    weight, H = torch.randn(3, 32).double(), correlated(32)
    order = damped(H).diagonal().argsort(descending=True)
    rest, done = weight.float().clone(), []
    grid = minmax_grid(weight, 2, 32)
    for i in order:  # each error spread by the inverse Hessian of the columns left
        left = [j for j in order.tolist() if j not in done]
        inverse = torch.linalg.inv(damped(H)[left][:, left])
        code = (rest[:, i] / grid.scales[:, 0]).round() + grid.zeros[:, 0]
        q = (code.clamp(0, 3) - grid.zeros[:, 0]) * grid.scales[:, 0]
        at = left.index(i.item())
        error = (rest[:, i] - q) / inverse[at, at]
        rest[:, left] -= error[:, None] * inverse[at]
        rest[:, i] = q
        done.append(i.item())
    torch.testing.assert_close(gptq(weight, H, 2, 32), rest, rtol=1e-4, atol=1e-4)


def test_the_converters_table_is_the_measured_one() -> None:
    expected = torch.tensor([-0.7334, -0.2002, 0.2668, 0.8])
    torch.testing.assert_close(fewer_entries(even_lut(16), 4), expected, rtol=0, atol=3e-4)


def test_full_rank_scales_are_those_of_the_groups() -> None:
    weight = torch.randn(24, 64)
    expected = weight.unflatten(1, (4, 16)).abs().amax(2).repeat_interleave(16, 1)
    torch.testing.assert_close(svd_scale(weight, 4, 16).formed(), expected)


@pytest.mark.parametrize("rank", [3, 20])
@pytest.mark.parametrize("kind", [RankByRank, Formed])
def test_the_reference_computes_its_formula(kind: type[RankByRank], rank: int) -> None:
    weight, x = torch.randn(24, 64), torch.randn(2, 5, 64)
    scale = more_ranks(svd_scale(weight, 3, 16), rank, torch.Generator())
    lut = fewer_entries(even_lut(16), 4)
    Q = nearest_entries(weight, scale, lut)
    assert torch.equal(
        Q, lut[(weight[..., None] / scale.formed()[..., None] - lut).abs().argmin(-1)]
    )
    A, B = F.normalize(scale.A, dim=0), F.normalize(scale.B, dim=1)
    W, bias = Q * (A @ torch.diag(scale.g) @ B), torch.randn(24)
    module = kind(Q, scale, bias)
    torch.testing.assert_close(module(x), x @ W.T + bias, rtol=1e-4, atol=1e-4)
    deployed = module.deployed(2)
    torch.testing.assert_close(deployed.weight, W, rtol=1e-2, atol=1e-3)
    assert deployed.stored_bits == 24 * 64 * 2 + 16 * (rank * (24 + 64) + 4)


def test_a_blocks_linear_rounds_straight_through() -> None:
    linear = nn.Linear(32, 4)
    module = BlockLinear(linear, 2, 16)
    expected = round_to_nearest(linear.weight.detach(), 2, 16)
    torch.testing.assert_close(module.quantized_weight(), expected)
    module.quantized_weight().sum().backward()
    assert module.weight.grad.abs().max() <= 1 and module.weight.grad.sum() > 0
    assert module.scales.grad.abs().sum() > 0
    frozen = ScaledLinear(module)
    x = torch.randn(3, 32)
    torch.testing.assert_close(frozen(x), module(x))
    assert frozen.deployed().stored_bits == 4 * 32 * 2 + 8 * 18


@pytest.mark.parametrize("steps", [1000, 80])
def test_both_stages_stay_within_the_steps(cache: TeacherCache, steps: int) -> None:
    budget = Budget.of(BaselineJob.of(teacher(), cache, settings(max_steps=steps)))
    spent = budget.block_steps + budget.steps + 2 * budget.num_batches / 3
    assert spent <= steps < spent + 2


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("reference", {"lr": 1e-2, "factored": False}),  # the same numbers as rank by rank, faster
        ("torchao_int2", {"lr": 1e-4}),
        ("efficientqat", {"lr": 3e-4}),
    ],
)
def test_training_comes_nearer_to_the_teacher(cache: TeacherCache, method: str, own: dict) -> None:
    before = kl(LanguageModel(untrained(method, cache).model), cache)
    trained = train_baseline(method, teacher(), TOKENIZER, cache, settings=settings(**own))
    assert kl(trained.model, cache) < before
    assert trained.steps == 30 and trained.seconds > 0 and trained.peak_gib > 0
    assert all(type(m) is nn.Linear for m in _linears(trained.model))


def test_mlps_alone_learn_as_in_the_references_recipe(cache: TeacherCache) -> None:
    job = BaselineJob.of(teacher(), cache, settings(mlp_only=True, min_lr_ratio=0.5, lr=1e-2))
    training = TRAINERS["reference"](job)
    before = training.deploy()
    training.step([job.batch(0)], 2)
    moved = {
        name: not torch.equal(before[name].weight, now.weight)
        for name, now in training.deploy().items()
    }
    assert (
        {name for name, has_moved in moved.items() if has_moved}
        == {name for name in job.names if role_of(name) == "mlp"}
        != set(job.names)
    )


@pytest.mark.parametrize(
    "family",
    ["Qwen3ForCausalLM", "Gemma2ForCausalLM", "FalconForCausalLM", "DeepseekV32ForCausalLM"],
)
def test_a_copy_attends_as_its_model(family: str) -> None:
    model = families.build(family)
    ids = torch.arange(3, 51).view(2, 24)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        found = dense_copy(LanguageModel(model), torch.float32)(input_ids=ids, use_cache=False)
    torch.testing.assert_close(found.logits, expected)


def _linears(student: LanguageModel) -> list[nn.Module]:
    return [student.model.get_submodule(name) for name in linear_names(student.model)]


@pytest.mark.slow
@pytest.mark.parametrize(("share", "every", "rest"), [(0.5, 2, None), (0.125, 8, "int8")])
def test_edgerazor_learns_with_its_own_quantizers(
    cache: TeacherCache, share: float, every: int, rest: str | None
) -> None:
    pytest.importorskip("edgerazor")
    own = settings(lr=1e-3, int4_share=share, activations=rest, kv=rest)
    before = train_baseline(
        "edgerazor", teacher(), TOKENIZER, cache, settings=own.model_copy(update={"lr": 0.0})
    )
    found = train_baseline("edgerazor", teacher(), TOKENIZER, cache, settings=own)
    assert kl(found.model, cache) < kl(before.model, cache)
    wide = (4 + (every - 1) * math.log2(3)) / every
    assert found.linear_bits == pytest.approx(wide + 16 / 32, abs=1e-3)
    for linear in _linears(found.model):
        levels = [len(row.unflatten(0, (-1, 32))[0].unique()) for row in linear.weight]
        assert max(levels[1::every]) <= 3 < max(levels[::every]) <= 15


def in_eight_bits(**values: object) -> BaselineSettings:
    return settings(activations="int8", kv="int8", max_steps=3, **values)


def test_edgerazor_rounds_heads_as_its_own_cache_does(cache: TeacherCache) -> None:
    """The cache is that of its recipes, in blocks of a head's width, for the whole model."""
    edgerazor = pytest.importorskip("edgerazor.qat")
    float_teacher = LanguageModel(tiny_model("qwen3", head_dim=16))
    job = BaselineJob.of(float_teacher, cache, settings(kv="int8").filled("edgerazor"))
    training = TRAINERS["edgerazor"](job)
    put_plain(job.model, training.deploy())
    student, other = (
        LanguageModel(dense_copy(LanguageModel(job.model), torch.float32)).model for _ in range(2)
    )
    training.finish(student)
    function = {"kv_cache_function": methods.INPUTS, "kv_block_size": 16}
    its_own = edgerazor.QAT({"function": function, "select": {"target_types": ["kv_cache"]}})

    def own_cache() -> object:
        kept = its_own.create_kv_cache(other.config)
        update = kept.update  # which takes nothing by the names of transformers 5.24
        kept.update = lambda *heads, **_more: update(*heads)
        return kept

    ids = torch.randint(0, 320, (2, 12))
    with torch.no_grad():
        expected = other(ids, **{CACHE: own_cache()}).logits
        assert torch.equal(student(ids, use_cache=False).logits, expected)
        assert not torch.equal(other(ids, use_cache=False).logits, expected)
    said = []
    for model, past in ((student, None), (other, own_cache())):
        how = {"max_new_tokens": 6, "do_sample": False, CACHE: past}
        mask = torch.ones_like(ids)
        found = model.generate(
            ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **how
        )
        said.append(torch.stack(found.logits))
    assert torch.equal(*said)


def test_rounded_heads_leave_packed_documents_apart(cache: TeacherCache) -> None:
    pytest.importorskip("edgerazor")
    job = BaselineJob.of(teacher(), cache, in_eight_bits().filled("edgerazor"))
    training = TRAINERS["edgerazor"](job)
    judged = LanguageModel(dense_copy(LanguageModel(job.model), torch.float32))
    training.finish(judged.model)
    ids = torch.randint(0, 320, (1, 12))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    how = {"position_ids": positions, "use_cache": False}
    with torch.no_grad():
        alone = judged.hidden(ids[:, 5:], positions[:, 5:])
        packed = judged.hidden(ids, positions)[:, 5:]
        torch.testing.assert_close(packed, alone, rtol=0, atol=0.1)
        alone = job.model.base_model(ids[:, 5:], use_cache=False).last_hidden_state
        packed = job.model.base_model(ids, **how).last_hidden_state[:, 5:]
        torch.testing.assert_close(packed, alone, rtol=0, atol=0.1)


def test_edgerazor_refuses_inputs_and_heads_that_it_does_not_reach(
    mixtures_cache: TeacherCache,
) -> None:
    states = families.build("MambaForCausalLM")
    with pytest.raises(ConfigError, match="layers of MambaForCausalLM do not keep keys and"):
        wrap_caches(states, lambda cache: cache)
    pytest.importorskip("edgerazor")
    own = in_eight_bits()
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM multiplies with its experts itself"):
        train_baseline("edgerazor", mixture(), TOKENIZER, mixtures_cache, settings=own)
    heads_alone = own.model_copy(update={"activations": None})
    found = train_baseline("edgerazor", mixture(), TOKENIZER, mixtures_cache, settings=heads_alone)
    assert 0 < kl(found.model, mixtures_cache)


class Doubled:
    """Hands values on to a cache, twice as large."""

    def __init__(self, cache: object) -> None:
        self.cache = cache

    def update(self, key: Tensor, value: Tensor, *rest: object, **more: object) -> object:
        return self.cache.update(key, 2 * value, *rest, **more)

    def __getattr__(self, name: str) -> object:
        return getattr(self.cache, name)


@pytest.mark.parametrize(
    "family",
    [
        "Qwen3ForCausalLM",
        "GPT2LMHeadModel",  # whose layers get the cache by its place
        "Llama4ForCausalLM",  # whose layers ask it how long it is
    ],
)
@torch.no_grad()
def test_layers_hand_the_same_on_whether_they_keep_it_or_not(family: str) -> None:
    model, ids = families.build(family), torch.arange(12).view(2, 6) * 23 % 320
    plain = model(ids, use_cache=False).logits
    wrap_caches(model, Doubled)
    how = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    how |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "min_new_tokens": 3}
    found = model.generate(ids, **how)
    whole = model(found.sequences, use_cache=False).logits
    assert not torch.allclose(whole[:, :6], plain, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(torch.stack(found.logits, 1), whole[:, 5:-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "family",
    [
        "GitForCausalLM",  # has no sdpa
        "Llama4ForCausalLM",  # is its own base
        "LlavaForConditionalGeneration",  # is opened as one of images and text
    ],
)
def test_a_step_of_a_model_unlike_most(family: str, tmp_path: Path) -> None:
    float_teacher = LanguageModel(families.build(family))
    build(tmp_path / "cache", teacher=float_teacher)
    own = settings(group_size=16, max_steps=1)
    own_cache = TeacherCache.open(tmp_path / "cache")
    made = train_baseline("torchao_int2", float_teacher, TOKENIZER, own_cache, settings=own)
    assert made.steps == 1


@pytest.mark.parametrize("method", PTQ)
def test_quantizing_alone_takes_no_step(cache: TeacherCache, method: str) -> None:
    float_teacher = teacher()
    how = {"settings": settings(plan="q2a2"), "calibration": calibration(cache)}
    found = train_baseline(method, float_teacher, TOKENIZER, cache, **how)
    assert found.steps == 0 and found.linear_bits == 2 + 18 / 32
    assert 0 < kl(found.model, cache)
    for linear, name in zip(_linears(found.model), linear_names(found.model.model), strict=True):
        rows = linear.weight.unflatten(1, (-1, 32))
        assert max(len(group.unique()) for row in rows for group in row) <= 4
        assert not torch.equal(linear.weight, float_teacher.model.get_submodule(name).weight)
    assert time_step(method, float_teacher, cache, settings=settings(), steps=2) == 0.0


def mixture() -> LanguageModel:
    model = families.build("Qwen3MoeForCausalLM")
    model.lm_head.weight.data *= 20
    return LanguageModel(model)


@pytest.fixture(scope="module")
def mixtures_cache(tmp_path_factory: pytest.TempPathFactory) -> TeacherCache:
    place = tmp_path_factory.mktemp("mixture") / "cache"
    build(place, teacher=mixture())
    return TeacherCache.open(place)


@pytest.mark.parametrize("method", [*PTQ, *TRAINED])
def test_every_expert_is_quantized_by_itself(mixtures_cache: TeacherCache, method: str) -> None:
    float_teacher, own = mixture(), settings(plan="q2a2", max_steps=4)
    how = {"settings": own, "calibration": calibration(mixtures_cache)}
    found = train_baseline(method, float_teacher, TOKENIZER, mixtures_cache, **how)
    names = linear_names(found.model.model)
    assert names == linear_names(float_teacher.model)
    stack = found.model.model.get_submodule("model.layers.1.mlp.experts.gate_up_proj").weight
    assert len(stack) == 4 * 64 and stack.isfinite().all()
    for expert in stack.chunk(4):
        if method == "reference":  # levels of its own under a scale of low rank of its own
            assert torch.linalg.matrix_rank(expert) > 2
        else:
            groups = expert.unflatten(1, (-1, 32)).flatten(0, 1)
            assert max(len(group.unique()) for group in groups) <= 4
    held_out = [mixtures_cache.batch(range(4), "held_out")]
    assert 0 < exact_divergence(found.model, float_teacher, held_out).kl_nats


def test_split_experts_compute_what_the_stack_did() -> None:
    model = mixture().model
    ids = torch.arange(24).view(2, 12)
    before = model(ids, use_cache=False).logits
    split_stacks(model)
    assert len(linear_names(model)) == 4 * (4 + 2 * 4)
    assert torch.equal(model(ids, use_cache=False).logits, before)
    put_plain(model, {"model.layers.0.self_attn.q_proj": Deployed(torch.zeros(64, 64), 1)})
    assert len(linear_names(model)) == 4 * (4 + 2)
    model.model.layers[0].self_attn.q_proj.weight.data = (
        mixture().model.model.layers[0].self_attn.q_proj.weight
    )
    assert torch.equal(model(ids, use_cache=False).logits, before)


def test_what_cannot_be_compiled_runs_eagerly(cache: TeacherCache) -> None:
    job = BaselineJob.of(teacher(), cache, settings().filled("torchao_int2"))
    weight = job.model.get_submodule(job.names[0]).weight
    step = job.step([weight], job.kd_loss(), steps=3)
    before = weight.detach().clone()

    def break_off(*_args: object, **_named: object) -> None:
        raise torch._dynamo.exc.Unsupported("no such luck")

    for layer in decoder_layers(job.model):
        layer.forward = break_off
    warm_up(step, job)
    assert torch.equal(weight, before) and weight.grad is None
    assert not step.compile_facts()["compiled"]
    step([job.batch(0)], 0)
    assert not torch.equal(weight, before)


def test_what_a_user_gets_wrong_is_one_line(
    cache: TeacherCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(method: str, **values: object) -> None:
        train_baseline(method, teacher(), TOKENIZER, cache, settings=settings(**values))

    refusals: list[tuple[Callable[[], None], str]] = [
        (lambda: train("awq"), "method='awq' is unknown; choose among reference, torchao_int2"),
        (lambda: train("gptq"), "method=gptq, but there are no calibration batches"),
        (lambda: train("rtn", group_size=24), "group_size=24 does not divide rows of 32"),
        (lambda: train("rtn", kv="int8"), "kv=int8 is given for method=rtn, expected method=edger"),
        (lambda: train("rtn", mlp_only=True), "mlp_only=true is given for method=rtn, expected"),
        (lambda: train("gptq", activations="int8"), "activations=int8 is given for method=gptq"),
        (lambda: train("efficientqat", loss="jsd"), "loss=jsd, but the baselines know"),
    ]
    for refuse, message in refusals:
        with pytest.raises(ConfigError, match=message):
            refuse()
    monkeypatch.setattr(methods, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"torchao is not installed; .*\[adam8bit\]"):
        train("torchao_int2")
    monkeypatch.setitem(sys.modules, "edgerazor.log", None)
    with pytest.raises(ConfigError, match=r"edgerazor is not installed; .*\[edgerazor\]"):
        train("edgerazor")
    other = LanguageModel(tiny_model(vocab_size=321))
    with pytest.raises(CacheError, match="over a vocabulary of 320"):
        train_baseline("rtn", other, TOKENIZER, cache, settings=settings())
