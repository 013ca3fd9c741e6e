"""Blocks that gather their queries, interpreted, against the reference; choices and lists too."""

import pytest
import torch
from nsa_case import documents, nsa_inputs, small
from torch import Tensor

from qat.errors import ConfigError
from qat.extensions.nsa.kernels import gather, reference, router
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.select import Inputs, select
from qat.extensions.nsa.reads import predicted_blocks

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels")
APART = {"compress_block": 8, "compress_stride": 8, "select_tile": 1, "mode": "merged"}


@pytest.fixture(autouse=True)
def _loops_have_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Triton's interpreter count a loop to a computed end; NumPy 2.4 refuses its scalars."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.mark.parametrize(
    ("heads", "is_packed", "bound"),
    [((5, 1), True, 0.4), pytest.param((3, 3), True, 0, marks=pytest.mark.slow)],
)
def test_the_kernel_chooses_what_the_reference_does(
    heads: tuple[int, int], is_packed: bool, bound: float
) -> None:
    config = small(**APART, bound=bound, num_selected=3)
    for length in (1, 83):
        first = documents(length) if is_packed else None
        inputs = nsa_inputs(config, length, heads=heads, width=12, first=first, dtype=torch.float32)
        found = gather.chosen(inputs, config)
        wanted = gather.ranks_of(select(inputs, config), inputs, config)
        assert torch.equal(found, wanted), length


def test_what_the_kernel_chooses_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(**APART, num_selected=3)
    inputs = nsa_inputs(config, 83, first=documents(83), dtype=torch.float32)
    predicted = predicted_blocks(inputs, config)[:, None].expand(2, 2, 83)
    assert torch.equal(gather.read_by_query(inputs, config), predicted)
    choose = gather.chosen

    def chosen(*args: object) -> Tensor:
        ranks = choose(*args)
        ranks[0, 1, 30] = 0
        return ranks

    monkeypatch.setattr(gather, "chosen", chosen)
    monkeypatch.setattr(router, "select", None)  # the kernel alone selects
    out, read = router.attend_counted(inputs, config, router.Route("auto", "gather", ""))
    assert (read != predicted).nonzero().tolist() == [[0, 0, 30]]
    assert torch.equal(out, gather.attend(inputs, config))


def test_ties_go_to_the_lower_block() -> None:
    config = small(**APART, num_selected=4)
    inputs = nsa_inputs(config, 140, heads=(1, 1), dtype=torch.float32)
    inputs = inputs._replace(query=torch.zeros_like(inputs.query))
    found = gather.chosen(inputs, config)
    assert torch.equal(found, gather.ranks_of(select(inputs, config), inputs, config))
    assert found[0, :, 139].tolist() == [1, 2, 0, 0, 0, 0, 0, 3, 4]


def results(inputs: Inputs, config: NSAConfig, way: object) -> list[Tensor]:
    learned = [tensor.detach().clone().requires_grad_() for tensor in inputs[:3]]
    out = way(inputs._replace(query=learned[0], key=learned[1], value=learned[2]))
    torch.manual_seed(1)
    weights = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), learned)]


@pytest.mark.parametrize(
    ("heads", "width", "length", "is_packed", "tile"),
    [
        ((2, 1), 16, 53, False, 1),
        ((2, 2), 8, 17, False, 8),
        pytest.param((5, 1), 24, 70, True, 1, marks=pytest.mark.slow),
        pytest.param((4, 2), 16, 66, True, 8, marks=pytest.mark.slow),
    ],
)
def test_output_and_gradients_are_the_references(
    heads: tuple[int, int], width: int, length: int, is_packed: bool, tile: int
) -> None:
    config = small(mode="merged", select_tile=tile, num_selected=3)
    first = documents(length) if is_packed else None
    inputs = nsa_inputs(config, length, heads=heads, width=width, first=first, dtype=torch.float32)
    selection = select(inputs, config)
    ours = results(inputs, config, lambda i: gather.attend(i, config, selection))
    theirs = results(inputs, config, lambda i: reference.attend(i, selection, config))
    for name, found, wanted in zip(("out", "query", "key", "value"), ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.slow
def test_lists_longer_than_a_chunk_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "CHUNK", 32)
    monkeypatch.setattr(gather, "MOST_BYTES", 1)  # a row of heads at a time
    config = small(mode="merged", select_tile=1, num_selected=3)
    inputs = nsa_inputs(config, 120, dtype=torch.float32)
    selection = select(inputs, config)
    ours = results(inputs, config, lambda i: gather.attend(i, config, selection))
    theirs = results(inputs, config, lambda i: reference.attend(i, selection, config))
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("held", "launched"), [(128, [128]), (40, [128, 128, 64, 32]), (8, None)])
def test_backward_takes_as_many_rows_as_a_gpu_holds(
    held: int, launched: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(gather, "_FITTING", {})
    asked = []

    def launch(ROWS: int, **_: int) -> None:
        asked.append(ROWS)
        if held < ROWS:
            raise triton.OutOfResources(ROWS, held, "shared memory")

    def run() -> None:
        sizes = {"G": 2, "D": 64, "BLOCK": 32, "ROWS": 128}
        gather._launch_in_room(launch, sizes, torch.device("cpu"))

    if launched is None:
        with pytest.raises(ConfigError, match=r"select_block=32.*16 bytes.*at most 8"):
            run()
        assert asked[-1] == gather.LEAST
        return
    run()
    run()
    assert asked == [*launched, launched[-1]]  # what was too large is not asked for again
