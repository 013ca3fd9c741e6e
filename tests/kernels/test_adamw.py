"""AdamW in bfloat16, by plain PyTorch and by the kernel: right on average, the same again."""

from collections.abc import Callable, Iterator

import pytest
import torch
from adamw_case import RATES, assert_rounded, copy, kept, moved, moving, neighbours, shared
from torch import Tensor

from qat.kernels.adamw import ManyTensors, Moving, Noise, round_stochastically, stochastic_adamw_
from qat.kernels.dispatch import computing_by

SPECIAL = [0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf")]
Step = Callable[..., None]


@pytest.fixture
def step_(is_kernel: bool) -> Iterator[Step]:
    with computing_by(kernel=is_kernel):
        yield stochastic_adamw_


def test_rounding_gives_a_neighbour_and_the_mean_is_right() -> None:
    x = torch.tensor([1.0 + 2**-10, -3.1415926, 1e-30, 7e-41])
    generator = torch.Generator().manual_seed(0)
    drawn = round_stochastically(x.repeat(20000, 1), generator).double()
    low, high = neighbours(x)
    assert ((drawn == low) | (drawn == high)).all()
    error = (drawn.mean(0) - x.double()) / (high - low)
    assert error.abs().max() < 4 * 0.5 / 20000**0.5  # four standard errors


def test_what_is_bfloat16_already_stays() -> None:
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(1000).bfloat16().float()])
    assert torch.equal(round_stochastically(x, torch.Generator()), x.bfloat16())
    noisy_nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert round_stochastically(noisy_nan, torch.Generator()).isnan().all()


@pytest.mark.parametrize(
    ("shape", "gradient_dtype"),
    [
        ((5,), torch.bfloat16),
        ((37, 11), torch.float32),
        ((3, 1024), torch.bfloat16),
        ((2, 2500), torch.bfloat16),
    ],
)
def test_a_step_is_adamw_in_float32_rounded(
    step_: Step, shape: tuple[int, ...], gradient_dtype: torch.dtype
) -> None:
    before = moving(*shape, gradient_dtype=gradient_dtype)
    after = copy(before)
    step_(after, shared(), RATES, Noise(0, 2, 0))
    for found, wanted in zip(kept(after), moved(before), strict=True):
        assert_rounded(found, wanted)


def test_the_mean_of_all_three_is_right(step_: Step) -> None:
    before = moving(8)
    many = Moving(*(tensor.repeat(4096) for tensor in before))
    step_(many, shared(), RATES, Noise(5, 2, 1))
    for found, wanted in zip(kept(many), moved(before), strict=True):
        low, high = neighbours(wanted)
        error = (found.double().view(4096, 8).mean(0) - wanted) / (high - low)
        assert error.abs().max() < 4 * 0.5 / 4096**0.5


def test_steps_below_the_spacing_add_up() -> None:
    before = moving(4000)
    before.parameter.fill_(1.0)
    rates = RATES._replace(lr=1e-4, decay=0.0)  # 2**-8 is the spacing below one
    after = copy(before)
    for step in range(10):
        after.gradient.fill_(1.0)
        after.exp_avg.fill_(1.0)
        after.exp_avg_sq.fill_(1.0)
        stochastic_adamw_(after, torch.tensor([1.0, 1.0, 1.0]), rates, Noise(0, step, 0))
    assert after.parameter.double().mean().item() == pytest.approx(1 - 1e-3, abs=1e-4)
    assert torch.equal(before.parameter - 1e-4, before.parameter)  # what rounding to nearest does


def test_noise_depends_on_seed_step_and_tensor_alone(step_: Step) -> None:
    before = moving(3000)

    def run(*numbers: int) -> Tensor:
        after = copy(before)
        torch.rand(1)  # the global generator has no part in it
        step_(after, shared(), RATES, Noise(*numbers))
        return after.parameter

    first = run(1, 2, 3)
    assert torch.equal(first, run(1, 2, 3))
    assert not any(torch.equal(first, run(*other)) for other in [(2, 2, 3), (1, 3, 3), (1, 2, 4)])


def test_nothing_moves_without_a_rate_or_with_a_factor_that_is_no_number(step_: Step) -> None:
    before = moving(100)
    after = copy(before)
    step_(after, shared(), RATES._replace(lr=0.0, decay=0.0), Noise(0, 2, 0))
    assert torch.equal(after.parameter, before.parameter)
    before.gradient[3] = float("nan")
    for factor in (float("nan"), float("inf")):
        after = copy(before)
        step_(after, shared(factor), RATES, Noise(0, 0, 0))
        assert all(torch.equal(a, b) for a, b in zip(kept(after), kept(before), strict=True))


@pytest.mark.parametrize("odd", [0, 1])  # four numbers at once, or one by one
def test_one_kernel_moves_many_tensors_as_adamw_does(odd: int) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernel itself")
    sizes = [(4 + odd,), (36 + odd, 112 + odd), (2500,), (8,)]
    rates = [(1e-2, 1e-1), (3e-3, 0.0), (1e-1, 1.0), (1.0, 0.0)]
    torch.manual_seed(0)
    first = [torch.randn(size) for size in sizes]
    theirs = [torch.nn.Parameter(tensor.double()) for tensor in first]
    groups = [
        {"params": [p], "lr": lr / 2, "weight_decay": decay}
        for p, (lr, decay) in zip(theirs, rates, strict=True)
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-12)
    ours = [(tensor, torch.zeros_like(tensor), torch.zeros_like(tensor)) for tensor in first]
    many = ManyTensors(ours, [(0.0, 0.0)] * len(rates))
    many.set_rates([(lr, lr * decay) for lr, decay in rates])
    for step in (1, 2, 3):
        gradients = [torch.randn(size) for size in sizes]
        for p, g in zip(theirs, gradients, strict=True):
            p.grad = g.double() / 2  # the factor of `shared`
        gradients[1] = gradients[1].t().contiguous().t()  # as a product may leave it
        given, theirs[3].grad = [*gradients[:3], None], None
        late = odd and step == 1  # counts of their own, if they are not the same for all
        if late:
            given[2] = theirs[2].grad = None
        for factor in (0.5, float("nan")):  # the second moves nothing
            known = shared(factor, step)
            if odd:
                known = torch.stack([known, known, shared(factor, step - 1), known])
            many.step_(given, known, 0.5, (0.9, 0.95), 1e-12)
        adamw.step()
    assert torch.equal(ours[3][0], theirs[3].float())  # it got no gradient
    for (p, m, v), wanted in zip(ours[:3], theirs, strict=False):
        state = adamw.state[wanted]
        for found, exact in ((p, wanted), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
            torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=1e-6)
