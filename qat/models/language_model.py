"""A causal language model as hidden states and a head, so that nobody needs all logits at once."""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.backend.device import on
from qat.errors import CheckpointError
from qat.kernels.attention import document_mask, fits_tile, tile_bytes
from qat.kernels.head import Head
from qat.models.noise import TF32_EPS, distance, disturbed, hooked, signs
from qat.models.regions import use_packed_attention
from qat.models.rotary import rotate_by_document
from qat.models.streamed import InFiles, hidden_layer_by_layer
from qat.nn.activation import read
from qat.nn.lut_embedding import FrozenLutHead, TiedLutHead
from qat.nn.sites import open_sites
from qat.nn.swap import (
    body_of,
    embedding_dtype,
    layer_config,
    module_device,
)
from qat.nsa.swap import is_all_sparse, say_route

LOGIT_FACTORS = {
    "logit_scale": 1,
    "lm_head_multiplier": 1,
    "logits_scaling": -1,
    "logits_mup_width_multiplier": -1,
}
"""Keys of configurations by which models multiply (1) or divide (-1) logits, or what makes them."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Keys of configurations that bound logits softly."""
HALVES = (torch.bfloat16, torch.float16)
MOST_OF_NOISE = 2.0
"""How many times what a rounding in every layer changes, two ways through the body may differ."""


class LanguageModel:
    """Splits a Hugging Face causal LM into its body and its head.

    `logits(hidden(ids, positions))` is `model(ids, position_ids=positions).logits`. Positions that
    restart within a row separate packed documents: attention then stays inside each.

    With `in_files` its weights are in memory while they are needed, and no longer.
    """

    def __init__(self, model: PreTrainedModel, in_files: InFiles | None = None) -> None:
        self.model, self.in_files = model, in_files
        open_sites(model)
        if not getattr(model.base_model, "layers_are_rescaled", True):
            model.config.rescale_every = 0  # else RWKV halves weights in place where it infers
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
        """Tokens that a sequence may have; more than any where the architecture knows no limit."""
        return most_positions(self.config) or sys.maxsize

    @property
    def head(self) -> nn.Module:
        """The output embedding."""
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        """Where the input ids go."""
        if self.in_files is not None:
            return self.in_files.device
        return module_device(self.model.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in without autocast."""
        return embedding_dtype(self.model) if self.in_files is None else self.in_files.dtype

    def present(self, module: nn.Module) -> AbstractContextManager[None]:
        """A block in which a layer, the embedding or the head has its weights on the device."""
        return nullcontext() if self.in_files is None else self.in_files.present(module)

    def hidden_of(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """`hidden` of each batch of ids and positions in turn.

        Of a model that stays in its files they all go through a layer before the next one comes.
        """
        if self.in_files is not None:
            return hidden_layer_by_layer(self, [*batches])
        return (self.hidden(*batch) for batch in batches)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, *, is_packed: bool = True) -> Tensor:
        """The last hidden state as the head reads it, `(B, S, D)`; nothing waits for the device.

        `is_packed=False` promises that every row is one document, which longer sequences
        (beyond `qat.kernels.attention.MAX_TILE`) compute faster.
        """
        extra = self._attention_inputs(position_ids, is_packed) if self._is_plain else {}
        output = body_of(self.model)(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra
        )
        return self._as_read(output.last_hidden_state)

    def _as_read(self, hidden: Tensor) -> Tensor:
        """`hidden` as the head reads it: quantized, where a quantized head does that.

        And times what the model multiplies its logits with, which no kernel has to know.
        """
        if isinstance(self.head, FrozenLutHead | TiedLutHead):
            hidden = read(self.head, hidden)
        return hidden if self._gain == 1 else hidden * self._gain

    def _attention_inputs(self, position_ids: Tensor, is_packed: bool) -> dict[str, object]:
        """The mask, made here: transformers would ask the device whether rows are packed."""
        say_route(self.model, position_ids.shape[1], position_ids.device)
        is_read = is_packed and not is_all_sparse(self.model.config)
        # for layers that read none: transformers makes another where it gets None
        no_mask = position_ids.new_ones(1, 1, 1, 1, dtype=torch.bool)
        mask = document_mask(position_ids) if is_read else no_mask
        return {
            "attention_mask": mask,
            "document_positions": position_ids,
            "is_packed": is_packed,
            "tile_fits": self._tile_fits(position_ids),
        }

    def attention(self, length: int, dtype: torch.dtype) -> str:
        """How packed sequences of `length` attend in `dtype`.

        `nsa` where every layer is sparse; else `tile`, our kernel, or `sdpa`.
        """
        if is_all_sparse(self.model.config):
            return "nsa"
        positions = torch.arange(length, device=self.device)[None]
        heads = torch.empty(1, 1, length, self._head_width(), dtype=dtype, device=self.device)
        is_tile = self._is_plain and self._tile_fits(positions) and fits_tile(heads, heads)
        return "tile" if is_tile else "sdpa"

    def _tile_fits(self, position_ids: Tensor) -> bool:
        """Whether the device has room for the tile of such sequences."""
        room = on(position_ids.device).shared_memory_bytes()
        return tile_bytes(position_ids.shape[1], self._head_width()) <= room

    def _head_width(self) -> int:
        config = layer_config(self.config, 0)
        width = getattr(config, "head_dim", None)
        return width or config.hidden_size // config.num_attention_heads

    @torch.no_grad()
    def check_split(self) -> None:
        """Compare head and body, each alone, with what the whole model does on four tokens.

        And what the body does where the last of them is another one.

        Raises:
            CheckpointError: the model does something to its hidden states or logits that is not
                known here, reads tokens that come later, or computes values that are not finite.
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
        """Compare `hidden_of` with `hidden`, to the bit, where the model stays in its files.

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
        """The same head on the same hidden states: nothing but the last bit may differ.

        Where the model scales its logits and we its hidden states, what that rounding does.
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
        # negated, so that a NaN counts as different
        if not difference <= most:
            raise CheckpointError(
                f"{type(self.model).__name__} gives other logits than its head makes of its hidden "
                f"states (by up to {difference:.3g}), expected a plain or soft-capped head; choose "
                "another model"
            )

    def _off(self, found: Tensor, expected: Tensor, ids: Tensor) -> tuple[float, float]:
        """How far hidden states of `ids` are off, and how far a rounding in every layer puts them.

        That depends on the model: deep ones with large values in a few channels are far off. So it
        is measured, unless all is equal.
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
        """The bound that the model's logits are softly kept in, if there is one."""
        return softcap_of(self.config)

    def head_in(self, dtype: torch.dtype) -> Head:
        """The output embedding for computing in `dtype`; a cast that it needs is made once.

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
        """`(..., D)` as `hidden` gives it to `(..., V)`, soft-capped if the model does so.

        Without gradients a plain head of 16 bits gives float32, which no other rounding precedes.
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
    """Tokens that a sequence may have by a text configuration; None where it knows no limit."""
    found = getattr(config, "max_position_embeddings", None)
    return None if found is None or found < 1 else found  # XLNet writes -1


def softcap_of(config: Any) -> float | None:
    """The bound that a text configuration softly keeps logits in; None without one."""
    return next((cap for cap in (getattr(config, key, None) for key in SOFTCAPS) if cap), None)


@contextmanager
def judging(model: LanguageModel) -> Iterator[None]:
    """Run a block without gradients and dropout; the model's mode is put back afterwards."""
    was_training = model.model.training
    model.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.model.train(was_training)
