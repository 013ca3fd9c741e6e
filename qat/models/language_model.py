"""A causal language model as hidden states and a head, so that not all logits exist at once."""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.backend.device import on
from qat.errors import CheckpointError
from qat.kernels.attention import document_mask, fits_tile, tile_bytes
from qat.kernels.head import Head
from qat.models.attention import is_all_sparse, sparse_attention
from qat.models.document_attention import use_packed_attention
from qat.models.noise import TF32_EPS, distance, disturbed, hooked, signs
from qat.models.rotary import rotate_by_document
from qat.nn.activation import read
from qat.nn.lut_embedding import FrozenLutHead, TiedLutHead
from qat.nn.sites import open_sites
from qat.nn.swap import (
    body_of,
    embedding_dtype,
    layer_config,
    module_device,
    settle_tie,
)

if TYPE_CHECKING:
    from qat.models.streamed import InFiles

LOGIT_FACTORS = {
    "logit_scale": 1,
    "lm_head_multiplier": 1,
    "logits_scaling": -1,
    "logits_mup_width_multiplier": -1,
}
"""Configuration keys of factors that multiply (1) or divide (-1) the logits or their inputs."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Configuration keys of a soft cap on logits."""
HALVES = (torch.bfloat16, torch.float16)
"""The 16-bit floating-point dtypes."""
MOST_OF_NOISE = 2.0
"""Largest allowed difference of two ways through the body, as a multiple of what a rounding in
every layer changes."""


class LanguageModel:
    """Splits a Hugging Face causal LM into its body and its head.

    `logits(hidden(ids, positions))` is `model(ids, position_ids=positions).logits`. Positions that
    restart within a row separate packed documents: attention then stays inside each.

    With `in_files` weights are in memory only while they are needed.
    """

    def __init__(self, model: PreTrainedModel, in_files: "InFiles | None" = None) -> None:
        self.model, self.in_files = model, in_files
        open_sites(model)
        settle_tie(model)
        if not getattr(model.base_model, "layers_are_rescaled", True):
            model.config.rescale_every = 0  # otherwise RWKV halves weights in place for inference
        self._is_plain = use_packed_attention(model)
        rotate_by_document(model)
        if in_files is not None:
            in_files.install(model)
        self._cast_head: Tensor | None = None
        factors = {key: getattr(self.config, key, None) or 1.0 for key in LOGIT_FACTORS}
        self._gain = math.prod(value ** LOGIT_FACTORS[key] for key, value in factors.items())

    @property
    def config(self) -> Any:
        """The text part of the model's configuration."""
        return self.model.config.get_text_config()

    @property
    def longest(self) -> int:
        """The largest number of tokens in a sequence; `sys.maxsize` if there is no limit."""
        return most_positions(self.config) or sys.maxsize

    @property
    def head(self) -> nn.Module:
        """The output embedding of the model."""
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        """The device of the input ids."""
        if self.in_files is not None:
            return self.in_files.device
        return module_device(self.model.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in without autocast."""
        return embedding_dtype(self.model) if self.in_files is None else self.in_files.dtype

    def present(self, module: nn.Module) -> AbstractContextManager[None]:
        """Keep the weights of a layer, the embedding or the head on the device inside the block."""
        return nullcontext() if self.in_files is None else self.in_files.present(module)

    def hidden_of(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Yield `hidden` of each batch of ids and positions in turn.

        If the model stays in its files, all batches go through a layer before the next one is
        loaded.
        """
        if self.in_files is not None:
            return self.in_files.hidden_of(self, [*batches])
        return (self.hidden(*batch) for batch in batches)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, *, is_packed: bool = True) -> Tensor:
        """Return the last hidden state as the head reads it, `(B, S, D)`; never synchronizes.

        `is_packed=False` promises that every row is one document, which is faster for longer
        sequences (beyond `qat.kernels.attention.MAX_TILE`).
        """
        extra = self._attention_inputs(position_ids, is_packed) if self._is_plain else {}
        output = body_of(self.model)(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra
        )
        return self._as_read(output.last_hidden_state)

    def _as_read(self, hidden: Tensor) -> Tensor:
        """Return `hidden` as the head reads it: quantized if a quantized head quantizes its input.

        It is also multiplied by the model's logit factor, so that kernels need not apply it.
        """
        if isinstance(self.head, FrozenLutHead | TiedLutHead):
            hidden = read(self.head, hidden)
        return hidden if self._gain == 1 else hidden * self._gain

    def _attention_inputs(self, position_ids: Tensor, is_packed: bool) -> dict[str, object]:
        """Make the mask here: transformers would synchronize to see if rows are packed."""
        sparse = sparse_attention(self.model)
        if sparse is not None:
            sparse.choose_backend(self.model, position_ids.shape[1], position_ids.device)
        is_read = is_packed and not is_all_sparse(self.model.config)
        # a placeholder for layers that read no mask: transformers replaces None
        no_mask = position_ids.new_ones(1, 1, 1, 1, dtype=torch.bool)
        mask = document_mask(position_ids) if is_read else no_mask
        return {
            "attention_mask": mask,
            "document_positions": position_ids,
            "is_packed": is_packed,
            "tile_fits": self._tile_fits(position_ids),
        }

    def attention(self, length: int, dtype: torch.dtype) -> str:
        """Return how packed sequences of `length` attend in `dtype`.

        `nsa` if every layer is sparse; else `tile`, our kernel, or `sdpa`.
        """
        if is_all_sparse(self.model.config):
            return "nsa"
        positions = torch.arange(length, device=self.device)[None]
        heads = torch.empty(1, 1, length, self._head_width(), dtype=dtype, device=self.device)
        is_tile = self._is_plain and self._tile_fits(positions) and fits_tile(heads, heads)
        return "tile" if is_tile else "sdpa"

    def _tile_fits(self, position_ids: Tensor) -> bool:
        """Return whether the tile of such sequences fits in the device's shared memory."""
        room = on(position_ids.device).shared_memory_bytes()
        return tile_bytes(position_ids.shape[1], self._head_width()) <= room

    def _head_width(self) -> int:
        config = layer_config(self.config, 0)
        width = getattr(config, "head_dim", None)
        return width or config.hidden_size // config.num_attention_heads

    @torch.no_grad()
    def check_split(self) -> None:
        """Compare head and body, each run separately, with the whole model on four tokens.

        Also compare the body's earlier outputs when the last token is another one.

        Raises:
            CheckpointError: the model changes its hidden states or logits in a way that is not
                supported here, reads later tokens, or computes values that are not finite.
        """
        if self.head is None:
            raise CheckpointError(
                f"{type(self.model).__name__} has no output embedding, expected a causal language "
                "model; choose another model"
            )
        ids = torch.arange(4, device=self.device)[None] % self.config.vocab_size
        bodies: list[Tensor] = []
        # OPT's head skips the base model
        parts = {self.model.get_decoder(), body_of(self.model)} - {self.model}
        with hooked(parts, lambda _m, _a, output: bodies.append(output[0])):
            whole = self.model(input_ids=ids, use_cache=False).logits
        if not bodies or not whole.isfinite().all():
            found = "logits that are not finite" if bodies else "logits without its base model"
            raise CheckpointError(
                f"{type(self.model).__name__} gives {found} in {self.dtype}, expected numbers from "
                "its head; try --dtype bf16 or fp32, copy the weights anew, or choose another model"
            )
        self._check_head(bodies[-1], whole)
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        found = self.hidden(ids, positions)
        off, noise = self._off(found, self._as_read(bodies[-1]), ids)
        if not off <= MOST_OF_NOISE * noise:
            raise CheckpointError(
                f"{type(self.model).__name__} computes other hidden states where documents are "
                f"packed (off by {off:.2g} of their size, where rounding gives {noise:.2g}), "
                "expected the same; choose another model"
            )
        before = slice(0, ids.shape[1] - 1)
        other = self.hidden(ids.index_fill(1, positions[0, -1:], 0), positions)
        off, noise = self._off(other[:, before], found[:, before], ids)
        if not off <= MOST_OF_NOISE * noise:
            raise CheckpointError(
                f"{type(self.model).__name__} reads tokens that come later (another last one "
                f"changes the hidden states before it by {off:.2g} of their size, where rounding "
                f"gives {noise:.2g}), expected a causal language model; choose another model"
            )

    @torch.no_grad()
    def check_layers(self) -> None:
        """Compare `hidden_of` with `hidden`, bit by bit, if the model stays in its files.

        Raises:
            CheckpointError: this architecture cannot be run layer by layer.
        """
        if self.in_files is None:
            return
        ids = torch.arange(4, device=self.device)[None] % self.config.vocab_size
        batch = ids, torch.arange(4, device=self.device)[None]
        (found,) = self.hidden_of([batch])
        if not torch.equal(found, self.hidden(*batch)):
            raise CheckpointError(
                f"{type(self.model).__name__} computes other hidden states layer by layer, which "
                "--device-map disk needs, expected the same; choose another"
            )

    def _check_head(self, body: Tensor, whole: Tensor) -> None:
        """Compare the logits of the head on the same hidden states: only the last bit may differ.

        If the model scales logits and we scale hidden states, the effect of that rounding is
        allowed too.
        """
        wished = getattr(self.head, "in_features", body.shape[-1])
        if body.shape[-1] != wished:
            raise CheckpointError(
                f"{type(self.model).__name__} makes {wished} features of its {body.shape[-1]} "
                "hidden ones before the head, expected nothing between; choose another model"
            )
        # some compute in 16 bits and return float32
        eps = max(torch.finfo(dtype).eps for dtype in (whole.dtype, self.dtype))
        hidden = self._as_read(body)
        split = self.logits(hidden)
        difference = (split.float() - whole.float().to(split.device)).abs().max().item()
        most = eps * whole.abs().max().item()
        if self._gain != 1:
            off = self.logits(
                hidden + hidden.abs() * eps * signs(hidden, torch.Generator().manual_seed(0))
            )
            most += MOST_OF_NOISE * (off.float() - split.float()).abs().max().item()
        # negated, so that NaN counts as different
        if not difference <= most:
            raise CheckpointError(
                f"{type(self.model).__name__} gives other logits than its head makes of its hidden "
                f"states (by up to {difference:.3g}), expected a plain or soft-capped head; choose "
                "another model"
            )

    def _off(self, found: Tensor, expected: Tensor, ids: Tensor) -> tuple[float, float]:
        """Return the distance of hidden states of `ids`, and that by a rounding in every layer.

        The second depends on the model and is large for deep ones with large values in a few
        channels. So it is measured, unless all values are equal.
        """
        off = distance(found, expected)
        if off == 0:
            return 0.0, 0.0
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        plain = self.hidden(ids, positions)
        with disturbed(self.model, max(torch.finfo(expected.dtype).eps, TF32_EPS)):
            return off, distance(self.hidden(ids, positions), plain)

    @property
    def softcap(self) -> float | None:
        """The soft cap on the model's logits, or None."""
        return softcap_of(self.config)

    def head_in(self, dtype: torch.dtype) -> Head:
        """Return the output embedding for computing in `dtype`; casts are cached.

        So is the whole table of a quantized one.
        """
        head = self.head
        if isinstance(head, FrozenLutHead | TiedLutHead):
            return Head(head.weight_in(dtype), head.bias, self.softcap)
        weight, bias = head.weight, head.bias
        if weight.dtype != dtype and not weight.requires_grad:
            if self._cast_head is None or self._cast_head.dtype != dtype:
                self._cast_head = weight.detach().to(dtype)
            weight = self._cast_head
        return Head(weight, bias, self.softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map `(..., D)` from `hidden` to logits `(..., V)`, soft-capped if the model does so.

        Without gradients a plain 16-bit head returns float32, without an intermediate rounding.
        """
        with self.present(self.head):
            return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        head, softcap = self.head, self.softcap
        hidden = hidden.to(module_device(head))
        if type(head) is nn.Linear and not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(head.weight.dtype)  # Mamba2's residual stream is float32
        if type(head) is nn.Linear and hidden.dtype == head.weight.dtype in HALVES:
            if not torch.is_grad_enabled():
                return Head(head.weight, head.bias, softcap).exact_logits(hidden)
        is_table = isinstance(head, FrozenLutHead | TiedLutHead)
        logits = head.product(hidden) if is_table else head(hidden)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def most_positions(config: Any) -> int | None:
    """Return the most tokens of a sequence by a text configuration; None if there is no limit."""
    found = getattr(config, "max_position_embeddings", None)
    return None if found is None or found < 1 else found  # XLNet writes -1


def softcap_of(config: Any) -> float | None:
    """Return the soft cap on logits in a text configuration; None without one."""
    return next((cap for cap in (getattr(config, key, None) for key in SOFTCAPS) if cap), None)


@contextmanager
def judging(model: LanguageModel) -> Iterator[None]:
    """Run a block without gradients and dropout, then restore the model's mode."""
    was_training = model.model.training
    model.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.model.train(was_training)
