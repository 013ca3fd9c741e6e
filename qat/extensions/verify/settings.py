"""The configurations of two models: sizes, norms, rotary embeddings, tied heads."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from qat.errors import ConfigError
from qat.extensions.verify.facts import Finding, Side
from qat.nn.swap import head_dim
from qat.quant.spec import name_in_layer

COMPARED = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "hidden_activation", "layer_types",
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "logit_scale",
    "logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier",
    "num_experts_per_tok", "norm_topk_prob", "max_position_embeddings",
)  # fmt: skip
"""Settings that change what a model computes, or for how long a text."""
SAME_ACTIVATION = (["swish", "silu"], ["silu", "swish"])
"""Pairs of names for one activation."""
PRECISION = 1e-5
"""Relative difference of settings and angles that rounding to float32 explains."""
SIZES = {
    "vocab_size": "a vocabulary of {} words",
    "hidden_size": "a width of {}",
    "num_hidden_layers": "{} layers",
}
"""Settings of a model's shape, and how they are said."""


def check_same_model(reference: Side, file: Side) -> None:
    """Refuse a file of another model.

    Raises:
        ConfigError: its vocabulary, its width, its number of layers or the parts of its layers are
            others.
    """
    ours, theirs = reference.config.get_text_config(), file.config.get_text_config()
    for name, words in SIZES.items():
        expected, found = getattr(ours, name, None), getattr(theirs, name, None)
        if None not in (expected, found) and expected != found:
            raise ConfigError(
                f"{file.source} has {words.format(found)} and {reference.source} "
                f"{words.format(expected)}, expected one model in two forms; give the model that "
                "the file was made from"
            )
    kinds = [{name_in_layer(name) for name in side.weights} for side in (reference, file)]
    if file.program is None and ours.model_type != theirs.model_type and kinds[0] != kinds[1]:
        raise ConfigError(
            f"{file.source} is a {theirs.model_type} and {reference.source} a {ours.model_type}, "
            "expected one model in two forms; give the model that the file was made from"
        )


def compare_settings(reference: Side, file: Side) -> Iterator[Finding]:
    """Yield settings of `file` that differ from those of `reference`."""
    ours, theirs = reference.config.get_text_config(), file.config.get_text_config()
    pairs = {name: [getattr(each, name, None) for each in (theirs, ours)] for name in COMPARED}
    pairs["head_dim"] = [head_dim(theirs), head_dim(ours)]
    for name, (found, expected) in pairs.items():
        if None not in (found, expected) and not _is_same(found, expected):
            yield Finding("settings", name, f"{found}, expected {expected}")


def _is_same(found: object, expected: object) -> bool:
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=PRECISION)
    return found == expected or [found, expected] in SAME_ACTIVATION


def compare_rope(reference: Side, file: Side) -> Iterator[Finding]:
    """Yield rotary frequencies of `file` that differ from those of `reference`."""
    ours, theirs = _frequencies(reference.model.model), {}
    if file.model is not None:
        theirs = _frequencies(file.model.model)
    elif file.frequencies is not None and len(ours) == 1:
        theirs = dict.fromkeys(ours, file.frequencies)
    for name in ours.keys() & theirs.keys():
        found, expected = theirs[name], ours[name]
        is_near = {"rtol": PRECISION, "atol": PRECISION**2}
        if found.shape != expected.shape or not torch.allclose(found, expected, **is_near):
            words = f"{_said(file.config)}, expected {_said(reference.config)}"
            slowest = f"the slowest is {found.min():.4g}, expected {expected.min():.4g}"
            yield Finding("rope", name, f"{words}; {slowest}")
            return


def _frequencies(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the frequencies of each rotary embedding, times the factor of its angles."""
    return {
        name: buffer.float().cpu() * float(getattr(module, "attention_scaling", 1.0))
        for path, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
        for name in [f"{path}.{key}"]
        if key.endswith("inv_freq") and "original" not in key
    }


def _said(config: PreTrainedConfig) -> str:
    given = config.get_text_config().rope_parameters or {}
    return ", ".join(f"{key}={value}" for key, value in sorted(given.items()) if value is not None)


def compare_ties(reference: Side, file: Side) -> Iterator[Finding]:
    """Yield a head that is tied in `file` alone; another one's weights are compared as such."""
    if file.is_tied and not reference.is_tied:
        words = "the file computes logits with the embedding, the reference has a head of its own"
        yield Finding("tied-head", "head", words)
