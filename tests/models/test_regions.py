"""Layers run region by region: recomputed or not, the model and its gradients stay the same."""

from functools import partial

import pytest
import torch
from quantized import gradients
from tiny import tiny_model

from qat.models import regions
from qat.models.language_model import LanguageModel
from qat.models.regions import Regions, as_written, compile_facts
from qat.nn.swap import decoder_layers

B, S = 5, 8
IDS = torch.arange(B * S).view(B, S) % 300
POSITIONS = (torch.arange(S) % 5).expand(B, S)  # two documents a row


@pytest.mark.parametrize(
    ("architecture", "every", "slice_tokens"),
    [("qwen3", 1, 2**15), ("qwen3", 2, 2 * S), ("llama", 1, 2 * S), ("gemma3", 2, 2**15)],
)
def test_recomputed_layers_have_the_same_gradients(
    monkeypatch, architecture, every, slice_tokens
) -> None:
    monkeypatch.setattr(regions, "SLICE_TOKENS", slice_tokens)
    model = LanguageModel(tiny_model(architecture))
    _, expected = gradients(model, IDS, POSITIONS)
    way = Regions(model.model, is_compiled=False, recompute_every=every)
    way.install()
    _, actual = gradients(model, IDS, POSITIONS)
    way.remove()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("every", "calls"), [(None, 4), (1, 8), (2, 6), (3, 6), (5, 5)])
def test_every_nth_layer_runs_twice(every, calls) -> None:
    model = LanguageModel(tiny_model(num_hidden_layers=4))
    way = Regions(model.model, is_compiled=False, recompute_every=every)
    way.install()
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    for layer in decoder_layers(model.model):
        layer.mlp.register_forward_pre_hook(note)
    gradients(model, IDS, POSITIONS)
    way.remove()
    assert count == calls


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_equal_layers_share_one_graph_with_their_recomputation(monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    model = LanguageModel(tiny_model(num_hidden_layers=4))
    _, expected = gradients(model, IDS, POSITIONS)
    before = compile_facts().graphs
    way = Regions(model.model, is_compiled=True, recompute_every=1)
    way.install()
    _, actual = gradients(model, IDS, POSITIONS)
    way.remove()
    assert compile_facts().graphs - before == 2  # a layer and the last norm
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_what_the_compiler_refuses_is_judged_as_it_is_written(monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    model = LanguageModel(tiny_model(num_hidden_layers=2))
    ids = torch.randint(50, (2, 9))
    expected = model.hidden(ids, torch.arange(9).expand(2, 9))
    for layer in decoder_layers(model.model):
        layer.mlp.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    way = Regions(model.model, is_compiled=True, recompute_every=None)
    way.install()
    with torch.no_grad():
        found = model.hidden(ids, torch.arange(9).expand(2, 9))
    assert torch.equal(found, expected)
    assert caplog.text.count("they run uncompiled, more slowly") == 1
    with pytest.raises(torch._dynamo.exc.Unsupported):  # a step is begun anew by who takes it
        model.hidden(ids, torch.arange(9).expand(2, 9))
    way.remove()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_graphs_that_were_kept_are_counted_and_their_place_is_said(
    tmp_path, monkeypatch, caplog
) -> None:
    caplog.set_level("INFO", logger="qat")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    regions._say_where_kept.cache_clear()
    found = [compile_facts().kept]
    for _ in range(2):
        torch.compiler.reset()  # as in a process of its own
        model = LanguageModel(tiny_model())
        way = Regions(model.model, is_compiled=True, recompute_every=None)
        way.install()
        with torch.no_grad():
            model.hidden(IDS, POSITIONS)
        way.remove()
        found.append(compile_facts().kept)
    assert found[1] == found[0] and found[2] == found[1] + 2  # a layer and the last norm
    assert [str(tmp_path) in each for each in caplog.messages] == [True]


def test_removed_regions_leave_nothing_behind() -> None:
    model = LanguageModel(tiny_model())
    way = Regions(model.model, is_compiled=True, recompute_every=1)
    way.install()
    layer = decoder_layers(model.model)[0]
    assert "forward" in vars(layer)
    with as_written(model.model):
        assert "forward" not in vars(layer)
    assert "forward" in vars(layer)
    way.remove()
    assert not any("forward" in vars(layer) for layer in decoder_layers(model.model))
