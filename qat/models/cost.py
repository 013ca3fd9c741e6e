"""Costs of a model: parameters, bits per weight, bytes and FLOPs, and peak rates of devices."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import PreTrainedModel

from qat.backend.base import VISITORS, placed
from qat.errors import ConfigError, QatError, nearest
from qat.kernels.nsa.config import NSAConfig
from qat.models.checkpoint import load_skeleton
from qat.models.directory import adapted, resolve
from qat.models.language_model import LanguageModel
from qat.models.stored_state import packed_state_dict
from qat.nn.lut_embedding import FrozenLutTable, lut_tables
from qat.nn.quant_linear import KIND_OF, FrozenLutLinear, QuantLinear
from qat.nn.sites import experts_of
from qat.nn.step import quant_linears
from qat.nn.swap import decoder_layers, layer_config, linear_names, table_names
from qat.nsa.swap import nsa_config
from qat.quant.weight import STORED_DTYPES, dtype_as_stored, packed_width


def parameter_count(model: nn.Module) -> int:
    """Count the parameters of the model without quantization; a tied head counts once.

    A quantized linear counts as its `O * I` weights and its bias, a quantized table as `V * D`.
    """
    linears = quant_linears(model)
    inside = {id(p) for linear in linears.values() for p in linear.parameters()}
    plain = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    plain += sum(_num_weights(table) for table in lut_tables(model).values())
    biases = sum(m.bias.numel() for m in linears.values() if m.bias is not None)
    return plain + biases + sum(map(_num_weights, linears.values()))


def quantized_parameter_count(model: nn.Module) -> int:
    """Count the weights of the linears that are stored as indices."""
    return sum(_num_weights(linear) for linear in quant_linears(model).values())


def stored_bits(module: QuantLinear | FrozenLutTable) -> int:
    """Return the bits of this weight in a checkpoint: packed indices, scales, codebook, adapter."""
    spec, bits = module.spec, 8 * _packed_bytes(module)
    is_table = isinstance(module, FrozenLutTable)
    tensors = module.weight_tensors() if is_table else module.weight_parameters()
    for name in tensors.keys() & STORED_DTYPES.keys():
        itemsize = dtype_as_stored(name, spec.stored_bits(name)).itemsize
        bits += 8 * itemsize * tensors[name].numel()
    return bits


def bits_per_weight(module: QuantLinear | FrozenLutTable) -> float:
    """Return the bits per weight including scales, codebook and adapter."""
    return stored_bits(module) / _num_weights(module)


def model_bits_per_weight(model: nn.Module) -> float:
    """Return the bits per weight over all quantized linears, without tables; NaN if none."""
    linears = quant_linears(model).values()
    weights = sum(_num_weights(linear) for linear in linears)
    return sum(map(stored_bits, linears)) / weights if weights else math.nan


def whole_model_bits(model: nn.Module) -> float:
    """Return the bits per weight over the whole model, with tables, norms and all else stored."""
    return 8 * tensor_bytes(model) / parameter_count(model)


def tensor_bytes(model: nn.Module) -> int:
    """Return the bytes of the tensors in a checkpoint of this model; a tied head counts once."""
    tensors = {t.data_ptr(): t for t in packed_state_dict(model).values()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def float_table_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of floating-point tables in a checkpoint of this model."""
    stored = packed_state_dict(model)
    tables = {
        t.data_ptr(): t for n in table_names(model) if (t := stored.get(f"{n}.weight")) is not None
    }
    return sum(t.numel() * t.element_size() for t in tables.values())


def model_bytes(path: Path) -> int:
    """Return the bytes of the safetensors files of a model directory."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


MEGABYTE = 1e6
SIZE_COLUMNS = ("MB of the source", "MB", "bits per weight", "in linears")
"""Headings of `Sizes.cells`."""


class Sizes(NamedTuple):
    """The sizes of a model and of the one that it came from."""

    source_megabytes: float | None
    """Weights of the source in 10**6 bytes; None if its files are not on this disk."""
    megabytes: float
    """Weights of the result in 10**6 bytes."""
    bits_per_weight: float
    """Bits per weight over all weights, with tables, norms, scales and codebooks."""
    linear_bits: float
    """Bits per weight of the quantized linears alone; NaN without any."""

    def cells(self) -> tuple[str, str, str, str]:
        """Return a table row for the headings `SIZE_COLUMNS`."""
        return (
            "-" if self.source_megabytes is None else f"{self.source_megabytes:.1f}",
            f"{self.megabytes:.1f}",
            f"{self.bits_per_weight:.3f}",
            "-" if math.isnan(self.linear_bits) else f"{self.linear_bits:.3f}",
        )

    def rounded(self) -> dict[str, float | None]:
        """Return the sizes by name, rounded to four decimals; None for an unknown one."""
        return {
            name: None if value is None or math.isnan(value) else round(value, 4)
            for name, value in self._asdict().items()
        }

    def warning(self, reason: str) -> str | None:
        """Return a warning with `reason` if the result is not smaller than its source, or None."""
        if self.source_megabytes is None or self.megabytes < self.source_megabytes:
            return None
        return (
            f"WARNING: {self.megabytes:.1f} MB are not smaller than the source of "
            f"{self.source_megabytes:.1f} MB: {reason}"
        )


def source_megabytes(source: str) -> float | None:
    """Return the size of the model's weights in 10**6 bytes; None if they are not on this disk."""
    try:
        if not Path(source).exists():  # local files only: a report may name a deleted path
            source = snapshot_download(source, local_files_only=True)
        path = Path(adapted(source) or resolve(source))
    except (QatError, OSError, ValueError):
        return None
    files = [path] if path.is_file() else path.glob("*.safetensors")
    size = sum(file.stat().st_size for file in files)
    size = size or sum(file.stat().st_size for file in path.glob("*.bin"))
    return size / MEGABYTE if size else None


def checkpoint_sizes(directory: Path, source: str | None) -> Sizes:
    """Compute the sizes of a packed checkpoint; only its configuration and file sizes are read.

    Raises:
        CheckpointError: it is not a packed checkpoint.
    """
    model, size = load_skeleton(directory), model_bytes(directory)
    return Sizes(
        source_megabytes=None if source is None else source_megabytes(source),
        megabytes=size / MEGABYTE,
        bits_per_weight=8 * size / parameter_count(model),
        linear_bits=model_bits_per_weight(model),
    )


def _num_weights(module: QuantLinear | FrozenLutTable) -> int:
    return module.out_features * module.in_features


def _packed_bytes(module: QuantLinear | FrozenLutTable) -> int:
    spec, count = module.spec, module.in_features // module.spec.vector_size
    return module.out_features * packed_width(count, spec.bits, spec.trellis_bits)


# Memory of a training step on one device.


class Moved(Protocol):
    """The settings of a step that determine its memory."""

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of parameter that learn."""

    @property
    def optimizer(self) -> str:
        """The optimizer of latent weights."""

    @property
    def latent_dtype(self) -> str:
        """The dtype of latent weights."""

    @property
    def offload(self) -> str:
        """State on the host: `none`, `moments` of latent weights, or `latents` and moments."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a device holds during training, without activations, logits and workspaces."""

    stored: int
    """Packed indices or latent weights, scales, codebooks, adapters, and all unquantized
    tensors."""
    gradients: int
    """Gradients of everything that learns."""
    moments: int
    """Moments of AdamW; with offload, the part that is on the device at one time, with latent
    weights."""
    formed: int
    """All formed weights."""
    largest_layer: int
    """Formed weights of the largest layer; of two layers if devices prefetch the next one."""
    pinned: int
    """Pinned host memory."""

    def total(self, *, by_layer: bool) -> int:
        """Return all bytes on the device, with weights formed at once or layer by layer."""
        formed = self.largest_layer if by_layer else self.formed
        return self.stored + self.gradients + self.moments + formed


BLOCK_OF_MOMENTS = 256
"""8-bit moments that share a float32 scale."""
LATENT_BYTES = {"fp32": 4, "bf16": 2}
HOSTED = {"none": 0, "moments": 2, "latents": 3}
"""Tensors of a latent weight's size on the host, by `offload`."""


def step_bytes(
    model: PreTrainedModel,
    learning: Collection[str],
    config: Moved,
    dtype: torch.dtype,
    *,
    parts: int = 1,
) -> StepBytes:
    """Return the memory of a step of `model` in `dtype` when the linears called `learning` train.

    The result does not depend on whether linears already have latent weights, and the model may be
    on `meta`. Each of `parts` devices holds its rows of the latent weights. Everything but linears
    counts as frozen in `dtype`: norms, gates and routers are small.
    """
    stored = gradients = moments = 0.0
    latents, each, hosted = [], LATENT_BYTES[config.latent_dtype], HOSTED[config.offload]
    linears, layers = quant_linears(model), decoder_layers(model)
    for name, linear in linears.items():
        kinds = set(config.kinds) if name in learning else set()
        if "weights" in kinds:
            latents.append(each * _num_weights(linear) / parts)
            stored += _packed_bytes(linear) if config.offload == "latents" else latents[-1]
        else:
            held = linear.packed if isinstance(linear, FrozenLutLinear) else linear.weight
            stored += held.nbytes
        for local, parameter in linear.weight_parameters().items():
            if local == "weight":
                continue
            stored += parameter.nbytes
            if KIND_OF[local] in kinds:
                gradients += parameter.nbytes
                moments += 2 * parameter.nbytes
    gradients += sum(latents)
    pinned = 0
    if hosted:
        moments += hosted * VISITORS * max(latents, default=0)
        blocks = [math.ceil(latent) for latent in latents]
        # moments, and latent weights if these are offloaded
        for away in (2 * blocks, (hosted - 2) * blocks):
            pinned += sum(placed(away)[1])
    else:
        is_eight = config.optimizer == "adamw8bit"
        moments += 2 * sum(latents) * ((1 + 4 / BLOCK_OF_MOMENTS) / each if is_eight else 1)
    inside = {id(t) for m in linears.values() for t in (*m.parameters(), *m.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in inside:
            is_wide = tensor.is_floating_point() and tensor.itemsize > dtype.itemsize
            stored += tensor.numel() * (dtype.itemsize if is_wide else tensor.itemsize)
    tables = map(_num_weights, lut_tables(model).values())
    # the float weight that a head forms from its table and keeps
    stored += dtype.itemsize * max(tables, default=0)
    formed = sum(map(_num_weights, linears.values()))
    largest = max(sum(map(_num_weights, quant_linears(layer).values())) for layer in layers)
    held = min(2, parts) * largest
    formed, held = formed * dtype.itemsize, held * dtype.itemsize
    return StepBytes(*map(round, (stored, gradients, moments, formed, held, pinned)))


# Model FLOPs of a training step.
#
# A multiplication and an addition count as two. Recomputation, forming weights and the optimizer
# never count: they must show up as a lower MFU. Shapes: S sequence, H heads, D width, V vocabulary.


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs per position of one training step, in three parts."""

    linears: float
    """Linears of the decoder: 6 per weight that learns, 4 per weight that only propagates
    gradients."""
    head: float
    """The head, 4 per weight: logits and their gradient for the hidden states. The candidates loss
    alone only needs K rows of the head."""
    attention: float
    """Scores and weighted sums of causal attention, forward and backward."""

    @property
    def total(self) -> float:
        """The sum of all three."""
        return self.linears + self.head + self.attention


WITHOUT_SCORES = ("linear_attention", "conv", "mamba", "mamba2", "recurrent", "moe", "mlp")
"""Layer types in configurations that have no attention scores."""
CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")
"""Names in configurations for the number of experts per token."""


class Objective(Protocol):
    """The settings of a step that determine its FLOPs."""

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of parameter that learn."""

    @property
    def losses(self) -> Collection[str]:
        """Names of the losses."""


def token_flops(
    student: LanguageModel, learning: Collection[str], config: Objective, *, S: int, K: int
) -> TokenFlops:
    """Return the FLOPs of one position when the linears in `learning` train, in sequences of S."""
    teaches_weights = bool({"weights", "scales", "codebook"} & set(config.kinds))
    linears = 0.0
    for name, weights in _weights_used(student).items():
        linears += (6 if teaches_weights and name in learning else 4) * weights
    V, D = student.head.out_features, student.head.in_features
    rows = K if set(config.losses) == {"candidates"} else V
    return TokenFlops(linears, 4.0 * rows * D, 3 * _attention_flops(student, S))


@dataclass(frozen=True)
class StepWork:
    """The work of a training step on a device, per position unless stated otherwise."""

    matmul_flops: float
    """FLOPs of the decoder's linears and the head, with recomputation."""
    attention_flops: float
    elements: float
    """Numbers read and written by the linears; traffic of norms, gates, rotations and the loss is a
    multiple of them."""
    weights: float
    """Weights of the linears; they are moved once per step, however many positions it has."""
    layers: int
    """Decoder layers; in a small step their launch overhead dominates."""


def step_work(student: LanguageModel, flops: TokenFlops, *, recompute: float = 0.0) -> StepWork:
    """Return the work of a step of cost `flops` that repeats a fraction `recompute` of the forward.

    Args:
        student: the model that trains.
        flops: FLOPs of the student's step, at the length of its sequences.
        recompute: 1 with gradient checkpointing, 0 without.
    """
    used, D = _weights_used(student), student.head.in_features
    elements = flops.head / (4 * D) + D
    for name, weights in used.items():
        linear = student.model.get_submodule(name)
        elements += weights / linear.in_features + weights / linear.out_features
    return StepWork(
        matmul_flops=flops.linears + flops.head + recompute * 2 * sum(used.values()),
        attention_flops=flops.attention * (1 + recompute / 3),
        elements=elements * (1 + recompute / 3),
        weights=sum(_linear_weights(student).values()),
        layers=student.config.num_hidden_layers,
    )


def forward_flops(model: LanguageModel, S: int) -> float:
    """Return the FLOPs per position of a forward pass with all logits, as a teacher runs it."""
    weights = sum(_weights_used(model).values())
    head = model.head.out_features * model.head.in_features
    return 2.0 * (weights + head) + _attention_flops(model, S)


def _linear_weights(model: LanguageModel) -> dict[str, float]:
    linears = {name: model.model.get_submodule(name) for name in linear_names(model.model)}
    return {name: float(each.out_features * each.in_features) for name, each in linears.items()}


def _weights_used(model: LanguageModel) -> dict[str, float]:
    """Return the weights of each linear that a token uses; for experts, those of chosen ones."""
    used = _linear_weights(model)
    for name in used:
        owner, _, key = name.rpartition(".")
        if experts := experts_of(model.model.get_submodule(owner), key):
            chosen = (getattr(model.config, key, None) for key in CHOSEN_EXPERTS)
            used[name] *= next(filter(None, chosen), 1) / experts
    return used


def _attention_flops(model: LanguageModel, S: int) -> float:
    """Return the FLOPs per position of scores and weighted sums in a forward pass.

    For sparse attention these are those of its branches, without the few queries that select.
    """
    sparse, flops = nsa_config(model.model), 0.0
    layers = range(model.config.num_hidden_layers)
    swapped = () if sparse is None else layers if sparse.layers is None else sparse.layers
    kinds = getattr(model.config, "layer_types", None)
    for layer in layers:
        settings = layer_config(model.config, layer)
        heads = getattr(settings, "num_attention_heads", None)
        if heads is None or (kinds is not None and kinds[layer] in WITHOUT_SCORES):
            continue
        head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // heads
        keys = _mean_keys(settings, layer, S, sparse if layer in swapped else None)
        flops += 4.0 * heads * head_dim * keys
    return flops


def _mean_keys(settings: object, layer: int, S: int, sparse: NSAConfig | None) -> float:
    """Return the average number of keys per query in one layer: causal, and inside its window.

    With `sparse` attention pooled keys are included.
    """
    if sparse is not None:
        selected = _mean_within(sparse.selected_keys, S)
        if sparse.mode == "merged":
            return selected
        compressed = sum(sparse.num_compressed(length) for length in range(1, S + 1)) / S
        return selected + _mean_within(sparse.window, S) + compressed
    kinds = getattr(settings, "layer_types", None)
    window = getattr(settings, "sliding_window", None)
    is_local = kinds is not None and kinds[layer] == "sliding_attention" and window
    return _mean_within(window if is_local else S, S)


def _mean_within(reach: int, S: int) -> float:
    """Return how many of the last `reach` keys a causal query sees on average."""
    reach = min(S, reach)
    return (reach * (reach + 1) / 2 + (S - reach) * reach) / S


TERA, GIGA = 1e12, 1e9


# Peak rates of devices, from their makers' data sheets.
#
# Dense peaks without sparsity, boost clock; FLOP/s are those with float32 accumulation, in which
# training computes: GeForce boards run fp16 and bf16 with it at half their fp16-accumulation rate,
# professional boards of the same chips at the full rate. Memory is the size that a driver reports,
# a little less than the advertised one.
#
# Sources: NVIDIA data sheets of V100 (2020), T4, L4, L40S, A10, A40, A100 (2021), H100 (SXM5 and
# PCIe), H200, HGX B200, RTX A6000; NVIDIA white papers GA102, Ada (also of RTX 6000) and RTX
# Blackwell (also of RTX PRO 6000), appendix tables; AMD's data sheet of Instinct MI300X; Google
# Cloud's documentation of TPU v4, v5e, v5p and v6e. A dash there is None here: no native units.


@dataclass(frozen=True)
class Device:
    """Peak rates of one kind of device."""

    name: str
    marks: tuple[str, ...]
    """Lower-case words that must all be in its reported name."""
    memory_gib: float
    peak_tflops: dict[str, float | None]
    """Dense peak of fp32, tf32, bf16 and fp16 matmuls; None if not native."""
    bandwidth_gb_s: float
    dtype: str
    """The dtype to train in."""

    def peak_flops(self, dtype: str) -> float | None:
        """Return peak FLOP/s in `dtype` (fp32, tf32, bf16, fp16), or None if it is not native."""
        tera = self.peak_tflops.get(dtype)
        return None if tera is None else tera * TERA

    @property
    def bandwidth(self) -> float:
        """Peak memory bandwidth in bytes per second."""
        return self.bandwidth_gb_s * GIGA


def _peaks(fp32: float | None, tf32: float | None, bf16: float | None, fp16: float | None) -> dict:
    return {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16}


DEVICES = (
    Device("T4", ("tesla t4",), 14.6, _peaks(8.1, None, None, 65), 320, "fp16"),
    Device("L4", ("nvidia l4",), 22.0, _peaks(30.3, 60, 121, 121), 300, "bf16"),
    Device("A10", ("nvidia a10",), 22.0, _peaks(31.2, 62.5, 125, 125), 600, "bf16"),
    Device("V100-PCIe", ("v100", "pcie"), 15.7, _peaks(14, None, None, 112), 900, "fp16"),
    Device("V100-16", ("v100", "16gb"), 15.7, _peaks(15.7, None, None, 125), 900, "fp16"),
    Device("V100-32", ("v100", "32gb"), 31.7, _peaks(15.7, None, None, 125), 900, "fp16"),
    Device("A40", ("nvidia a40",), 44.4, _peaks(37.4, 74.8, 149.7, 149.7), 696, "bf16"),
    Device("L40S", ("l40s",), 44.4, _peaks(91.6, 183, 362.05, 362.05), 864, "bf16"),
    Device("A6000", ("rtx a6000",), 47.4, _peaks(38.7, 77.4, 154.8, 154.8), 768, "bf16"),
    Device("RTX6000-Ada", ("rtx 6000 ada",), 47.4, _peaks(91.1, 182.1, 364.2, 364.2), 960, "bf16"),
    Device("RTX6000-PRO", ("rtx pro 6000",), 94.9, _peaks(126, 251.9, 503.8, 503.8), 1792, "bf16"),
    Device("A100-40", ("a100", "40gb"), 39.4, _peaks(19.5, 156, 312, 312), 1555, "bf16"),
    Device("A100-80", ("a100", "80gb"), 79.2, _peaks(19.5, 156, 312, 312), 2039, "bf16"),
    Device("RTX3090", ("rtx 3090",), 23.6, _peaks(35.6, 35.6, 71, 71), 936, "bf16"),
    Device("RTX4090", ("rtx 4090",), 23.5, _peaks(82.6, 82.6, 165.2, 165.2), 1008, "bf16"),
    Device("RTX5090", ("rtx 5090",), 31.4, _peaks(104.8, 104.8, 209.5, 209.5), 1792, "bf16"),
    Device("H100-PCIe", ("h100", "pcie"), 79.1, _peaks(51, 378, 756, 756), 2000, "bf16"),
    Device("H100", ("h100",), 79.1, _peaks(67, 494.7, 989.4, 989.4), 3350, "bf16"),
    Device("H200", ("h200",), 139.8, _peaks(67, 494.7, 989.4, 989.4), 4800, "bf16"),
    Device("B200", ("b200",), 178.4, _peaks(75, 1125, 2250, 2250), 7700, "bf16"),
    Device("MI300X", ("mi300x",), 191.5, _peaks(163.4, 653.7, 1307.4, 1307.4), 5300, "bf16"),
    Device("TPU-v5e", ("tpu v5 lite",), 15.7, _peaks(None, None, 197, None), 819, "bf16"),
    Device("TPU-v4", ("tpu v4",), 31.2, _peaks(None, None, 275, None), 1228, "bf16"),
    Device("TPU-v5p", ("tpu v5p",), 94.7, _peaks(None, None, 459, None), 2765, "bf16"),
    Device("TPU-v6e", ("tpu v6 lite",), 31.2, _peaks(None, None, 918, None), 1640, "bf16"),
)


def device_called(reported: str) -> Device | None:
    """Return the entry for a name as a driver reports it (`NVIDIA H200`), or None if unknown.

    Marks are whole words, so that `NVIDIA A10` does not match `NVIDIA A100`.
    """
    words = f" {reported.lower().replace('-', ' ')} "
    for device in DEVICES:
        if all(f" {mark} " in words for mark in device.marks):
            return device
    return None


def devices_named(names: tuple[str, ...]) -> tuple[Device, ...]:
    """Return the entries called `names` (in any case), or all if `names` is empty.

    Raises:
        ConfigError: a name is not in the table.
    """
    known = {device.name.lower(): device for device in DEVICES}
    for name in names:
        if name.strip().lower() not in known:
            near = nearest(name, known)
            raise ConfigError(
                f"plan={name} is no device of the table; choose among "
                f"{', '.join(device.name for device in DEVICES)}, or compile for v4, v5e, v5p, v6e"
                + (f"; did you mean {known[near[0]].name}?" if near else "")
            )
    return tuple(known[name.strip().lower()] for name in names) or DEVICES
