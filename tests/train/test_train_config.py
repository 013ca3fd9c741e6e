"""Settings of a run: what holds if nothing is said, and which exclude each other."""

import pytest

from qat.errors import ConfigError
from qat.train.config import TrainConfig

RATES = {
    "lr": 0.01,
    "lr_scales": 0.001,
    "lr_codebook": 0.001,
    "lr_lora": 0.01,
    "lr_norms": 0.001,
    "lr_gates": 0.003,
    "lr_router": 0.001,
    "min_lr_ratio": 0.0,
    "weight_decay": 0.0,
    "beta2": 0.95,
    "clip_grad_norm": 1.0,
}


def settings(**values: object) -> TrainConfig:
    return TrainConfig(**{"cache_dir": "cache", **values})


def test_a_recipe_that_says_little_means_the_same_in_years() -> None:
    found = settings()
    assert {name: getattr(found, name) for name in RATES} == RATES
    assert (found.lora_rank, found.temperature, found.warmup_steps) == (16, 1.0, 50)
    assert (found.eval_every, found.save_every, found.keep, found.log_every) == (100, 100, 2, 10)
    assert not (found.trust_remote_code or found.shard_latents or found.gradient_checkpointing)


def test_settings_that_cannot_be() -> None:
    for values, message in (
        ({"mlp_only": True, "e2e": True}, "exclude each other"),
        ({"mlp_only": True, "attention_only": True}, "exclude each other"),
        ({"attention_only": True, "e2e": True}, "exclude each other"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio=1.5"),
        ({"optimizer": "adamw8bit", "learn": "scales"}, "latent weights, but learn=scales"),
        ({"latent_dtype": "bf16", "learn": "scales"}, "latent weights, but learn=scales"),
        ({"learn": "scales,weights,lora"}, "lora is for frozen codes, which weights would move"),
        ({"learn": "weights,bias"}, "learn='weights,bias': choose among weights, scales"),
        ({"learn": ""}, "learn='': choose among"),
        ({"max_steps": 0}, "max_steps=0: Input should be greater than 0$"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"temperature": 0}, "temperature=0"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"schedule": "linear"}, "schedule='linear'"),
        ({"lr_biases": 1}, "lr_biases is unknown"),
        (
            {"shard_latents": True, "form": "layer", "on_policy": 0.5, "teacher": "t"},
            "form=layer, shard_latents=True, on_policy=0.5",
        ),
        ({"shard_latents": True, "learn": "scales"}, "it divides latent weights"),
        ({"offload": "moments"}, "only bf16 latent weights and their bf16 moments can lie"),
        (
            {"offload": "moments", "latent_dtype": "bf16", "optimizer": "adamw8bit"},
            "use --optimizer adamw --latent-dtype bf16, or drop it",
        ),
        ({"shard_latents": True, "optimizer": "adamw8bit"}, "8 bits are not divided"),
        (
            {"shard_latents": True, "offload": "latents", "latent_dtype": "bf16"},
            "stay on their devices; use --offload moments, or drop one of the two",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainConfig.parse({"cache_dir": "cache", **values}, "recipe")
