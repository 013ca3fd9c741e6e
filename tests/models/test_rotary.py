"""The outputs for a document do not depend on those that are packed or batched with it."""

import copy

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from qat.models.language_model import LanguageModel
from qat.models.rotary import with_older_names

SHORT, LONG = 7, 40
LIMIT = 32
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0 + i for i in range(8)],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
FAMILIES = {
    "longrope": (
        "Phi3",
        {
            "max_position_embeddings": 128,
            "original_max_position_embeddings": LIMIT,
            "rope_parameters": LONGROPE,
        },
    ),
    "dynamic": ("Llama", {"max_position_embeddings": LIMIT, "rope_parameters": DYNAMIC}),
    "mscale": (
        "Phimoe",
        {
            "max_position_embeddings": 128,
            "num_local_experts": 2,
            "rope_parameters": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.3},
        },
    ),
    "by layer": (
        "Gemma3",
        {
            "max_position_embeddings": LIMIT,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": PLAIN},
        },
    ),
}


def family(name: str) -> PreTrainedModel:
    """A random model whose angles depend on a length, large enough to tell."""
    kind, more = FAMILIES[name]
    config = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, config)(**copy.deepcopy({**SHAPE, **more}))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval()


def packed(*lengths: int) -> tuple[Tensor, Tensor]:
    """Ids and positions `(1, S)` of documents of these lengths."""
    torch.manual_seed(1)
    ids = torch.randint(1, 64, (1, sum(lengths)))
    return ids, torch.cat([torch.arange(length) for length in lengths])[None]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_document_is_read_with_the_angles_of_its_own_length(name: str) -> None:
    lengths = SHORT, LONG, LIMIT, LIMIT + 1, SHORT
    ids, positions = packed(*lengths)
    model = LanguageModel(family(name))
    with torch.no_grad():
        found = model.logits(model.hidden(ids, positions)).split(lengths, 1)
        # fresh each time: transformers' dynamic base also depends on the texts before
        alone = [family(name)(input_ids=part).logits for part in ids.split(lengths, 1)]
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_batch_change_nothing_in_each_other(name: str) -> None:
    ids, positions = packed(LONG, LONG)
    ids, positions = ids.view(2, LONG), positions.view(2, LONG).clone()
    positions[1, SHORT:] = 0  # padding
    model = LanguageModel(family(name))
    with torch.no_grad():
        together = model.hidden(ids, positions)
        alone = model.hidden(ids[1:, :SHORT], positions[1:, :SHORT])
    torch.testing.assert_close(together[1:, :SHORT], alone, rtol=1e-3, atol=1e-3)


def test_a_model_that_was_opened_twice_is_changed_once() -> None:
    model = family("longrope")
    LanguageModel(model)
    once = model.model.rotary_emb.forward
    LanguageModel(model)
    assert model.model.rotary_emb.forward is once
    other = copy.deepcopy(model).model.rotary_emb
    assert other.forward._module is other


def test_generation_beyond_the_limit_is_that_of_transformers() -> None:
    ids, _ = packed(LIMIT - 4)
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = family("longrope").generate(ids, **how)
    assert LanguageModel(family("longrope")).model.generate(ids, **how).equal(expected)


BASE = {"rope_theta": 500000.0}
SCALED = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "default": {},
}


def without_new_names(values: dict) -> dict:
    """Return the part of a config.json that transformers 4 sees."""
    return {
        key: without_new_names(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key != "rope_parameters"
    }


def round_trips(config: transformers.PreTrainedConfig) -> dict:
    """The config.json, once both generations of transformers read the same settings in it."""
    values = with_older_names(config, config.to_diff_dict())
    for read in (values, without_new_names(values)):
        again = type(config).from_dict(copy.deepcopy(read)).get_text_config()
        ropes = again.rope_parameters
        for rope in (ropes, *ropes.values()):
            if isinstance(rope, dict):
                rope.pop("type", None)
        assert ropes == config.get_text_config().rope_parameters
    return values


@pytest.mark.parametrize("kind", SCALED)
def test_both_generations_of_transformers_read_the_same_angles(kind: str) -> None:
    rope = {"rope_type": kind, **BASE, **SCALED[kind]}
    values = round_trips(transformers.LlamaConfig(**SHAPE, rope_parameters=rope))
    assert values["rope_theta"] == 500000.0
    if kind == "default":
        assert "rope_scaling" not in values
    else:
        assert values["rope_scaling"] == {"rope_type": kind, "type": kind, **SCALED[kind]}


def test_phi_has_the_keys_that_transformers_4_demands() -> None:
    kind, more = FAMILIES["longrope"]
    values = round_trips(getattr(transformers, f"{kind}Config")(**copy.deepcopy({**SHAPE, **more})))
    assert values["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}
    assert values["original_max_position_embeddings"] == LIMIT


@pytest.mark.parametrize("has_images", [False, True])
def test_gemma_has_two_bases_also_inside_a_model_that_sees(has_images: bool) -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 2000000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    }
    config = transformers.Gemma3TextConfig(**SHAPE, rope_parameters=ropes)
    if has_images:
        config = transformers.Gemma3Config(text_config=config.to_dict())
    values = round_trips(config)
    values = values["text_config"] if has_images else values
    assert (values["rope_theta"], values["rope_local_base_freq"]) == (2000000.0, 20000.0)
    assert values["rope_scaling"] == {"rope_type": "linear", "type": "linear", "factor": 8.0}


def test_sections_of_three_axes_are_kept() -> None:
    rope = {"rope_type": "default", **BASE, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2VLTextConfig(**SHAPE, rope_parameters=rope)
    assert round_trips(config)["rope_scaling"]["mrope_section"] == [2, 3, 3]


def test_a_family_that_warns_of_older_names_gets_none() -> None:
    ropes = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 2e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    }
    config = transformers.Gemma4TextConfig(**SHAPE, rope_parameters=ropes)
    assert "rope_scaling" not in with_older_names(config, config.to_diff_dict())


def test_layers_without_rotary_settings_have_no_older_names() -> None:
    config = transformers.Gemma3TextConfig(**SHAPE)
    config.rope_parameters = {"full_attention": None, "sliding_attention": None}
    assert with_older_names(config, {}) == {}
