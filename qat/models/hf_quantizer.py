"""Packed checkpoints as a transformers quantization method called `qat`.

Importing this module registers it. `from_pretrained` then builds the model on the meta device, this
quantizer swaps in `FrozenLutLinear` modules and tables, and the stored tensors are loaded into
them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qat.errors import CheckpointError, ConfigError
from qat.hooks import hooks
from qat.models.attention import (
    SPARSE,
    attends_sparsely,
    check_attention,
    kv_spec,
    load_sparse_attention,
)
from qat.models.decoding import read_packed
from qat.models.directory import check_checksums
from qat.models.stored_state import (
    INPUT_SCALE,
    has_input_scale,
    quantized_modules,
    weight_parts,
)
from qat.nn.activation import ActivationQuantizer
from qat.nn.lut_embedding import quant_tables
from qat.nn.quant_linear import FrozenLutLinear, QuantLinear, quant_linears
from qat.nn.quant_weight import QuantWeight
from qat.nn.sites import open_sites
from qat.nn.swap import put_table, replace_module, table_names, weight_shape
from qat.quant.lora import Lora
from qat.quant.spec import ActivationSpec, KvSpec, LutSpec
from qat.quant.weight import (
    dtype_as_stored,
    empty_weight,
    from_stored,
)

if TYPE_CHECKING:  # this file is imported while transformers itself still is
    from transformers import PreTrainedConfig, PreTrainedModel

QUANT_METHOD = "qat"
FORMAT = 13
"""Number of the checkpoint format, whose `features` say what a reader must support."""
FEATURES = ("activations", "kv", "lora", "nsa", "tables", "vectors")
"""Features that a checkpoint may list: quantized inputs, quantized keys and values, adapters,
sparse attention (config.json defines it under `nsa`), a codebook for some rows, and of vectors."""
LEGACY_CODEBOOKS = ((), ("vectors",), ("trellis",))
"""Codebook feature by its number in formats 1 to 12; trellises are no longer read."""
Headers = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of every tensor of some files, by name."""
NEEDS_QAT = "none for transformers alone: run 'import qat' before from_pretrained"
"""The value of the weights file name in config.json.

transformers ignores a quantization method that it does not have, and would initialize every missing
weight at random. An unreadable name of the weights file is an error, which quotes this line;
`QatHfQuantizer` removes the name before files are read.
"""
LORA_RANK = "lora_rank"
"""Key of a module with an adapter, stored with the keys of its spec."""
ACTIVATION = "activation"
"""Key of a module whose input is quantized: the table of its `ActivationSpec`."""
SHARED_SCALE = "input_scale_of"
"""Key of a module that shares the static scale of another one with the same input: its name."""
SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int8: "I8",
}


@register_quantization_config(QUANT_METHOD)
class QatConfig(QuantizationConfigMixin):
    """The `quantization_config` of a packed checkpoint: its features and each module's spec.

    `kv` is the format of quantized keys and values. Formats 1 to 12, written until version 0.1, are
    read as well.
    """

    def __init__(
        self,
        format: int = 0,
        features: list | None = None,
        modules: dict | None = None,
        kv: dict | None = None,
        **others: object,
    ) -> None:
        others.pop("quant_method", None)
        is_legacy = type(format) is int and 1 <= format < FORMAT and features is None
        if not is_legacy and (type(format) is not int or format != FORMAT):
            raise CheckpointError(
                f"quantization_config has format={format!r:.80}, expected format={FORMAT} or one "
                "of 1 to 12 without features; use the version of qat that wrote this checkpoint, "
                "or convert the model anew"
            )
        modules = {} if modules is None else modules
        is_table = isinstance(modules, dict) and all(type(m) is dict for m in modules.values())
        if others or not is_table:
            raise CheckpointError(
                f"quantization_config has keys {sorted(others)} and modules={modules!r:.80}, "
                "expected only format, features, kv and a table of a table for each module; "
                "convert the model anew"
            )
        if is_legacy:
            features = _legacy_features(format, modules, kv)
        elif not isinstance(features, list) or not all(isinstance(f, str) for f in features):
            raise CheckpointError(
                f"quantization_config has features={features!r:.80}, expected a list of names; "
                "the file is damaged: copy it anew"
            )
        unknown = sorted(set(features) - set(FEATURES))
        if unknown:
            raise CheckpointError(
                f"quantization_config has features={', '.join(unknown)!r:.80}, which this version "
                f"of qat does not read, expected some of {', '.join(FEATURES)}; use the version of "
                "qat that wrote this checkpoint"
            )
        if not modules and not {"nsa", "kv"} & set(features):
            raise CheckpointError(
                "quantization_config has modules={}, expected a table for each quantized module; "
                "convert the model anew"
            )
        self.quant_method = QUANT_METHOD
        self.format = FORMAT
        self.features = sorted(set(features))
        self.modules = modules
        if kv is not None:
            self.kv = kv

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return the configuration of `model` in its current state.

        Raises:
            CheckpointError: it has no quantized linear or table, and dense attention.
        """
        modules, kv = quantized_modules(model), kv_spec(model.config)
        if not modules and not attends_sparsely(model) and kv is None:
            raise CheckpointError(
                f"{type(model).__name__} has no quantized layers, expected some; quantize it with "
                "'qat convert' first"
            )
        entries = {name: m.spec.model_dump() for name, m in modules.items()}
        owners: dict[int, str] = {}
        for name, module in modules.items():
            if isinstance(module, QuantLinear) and module.lora_rank > 0:
                entries[name][LORA_RANK] = module.lora_rank
            if module.activation is None:
                continue
            entries[name][ACTIVATION] = module.activation.spec.model_dump()
            owner = owners.setdefault(id(module.activation), name)
            if has_input_scale(module) and owner != name:
                entries[name][SHARED_SCALE] = owner
        specs = [module.spec for module in modules.values()]
        features = _features(entries, specs, attends_sparsely(model), kv is not None)
        return cls(FORMAT, features, entries, kv and kv.model_dump())

    def kv_spec(self) -> KvSpec | None:
        """Return the format of keys and values; None if they are not quantized.

        Raises:
            CheckpointError: it has unknown keys or values out of range.
        """
        values = getattr(self, "kv", None)
        if values is None:
            return None
        try:
            return KvSpec.parse(values, "kv of quantization_config")
        except ConfigError as error:
            raise CheckpointError(f"{error}; convert the model anew") from None

    def specs(self) -> dict[str, LutSpec]:
        """Return each quantized module's spec as it is computed with.

        Raises:
            CheckpointError: a spec has unknown keys or values out of range.
        """
        others, found = (LORA_RANK, ACTIVATION, SHARED_SCALE), {}
        try:
            for name, entry in self.modules.items():
                values = {key: value for key, value in entry.items() if key not in others}
                found[name] = LutSpec.parse(values, f"quantization_config of {name}")
        except ConfigError as error:
            raise CheckpointError(f"{error}; convert the model anew") from None
        return found

    def lora_ranks(self) -> dict[str, int]:
        """Return the rank of each module's adapter; modules without one are left out.

        Raises:
            CheckpointError: a rank is no positive integer.
        """
        ranks = {n: values[LORA_RANK] for n, values in self.modules.items() if LORA_RANK in values}
        for name, rank in ranks.items():
            if type(rank) is not int or rank < 1:
                raise CheckpointError(
                    f"quantization_config of {name} has {LORA_RANK}={rank!r}, expected a positive "
                    "integer; the file is damaged: copy it anew"
                )
        return ranks

    def activations(self) -> dict[str, ActivationSpec]:
        """Return how each module's input is quantized; modules without that are left out.

        Raises:
            CheckpointError: a spec has unknown keys or values, or the owner of a shared scale is
                wrong.
        """
        tables = {n: v[ACTIVATION] for n, v in self.modules.items() if ACTIVATION in v}
        try:
            specs = {
                name: ActivationSpec.parse(values, f"quantization_config of {name}")
                for name, values in tables.items()
            }
        except ConfigError as error:
            raise CheckpointError(f"{error}; convert the model anew") from None
        statics = {name for name, spec in specs.items() if spec.is_static}
        owners = statics - self.scale_owners().keys()
        for name, owner in self.scale_owners().items():
            if name not in statics or owner not in owners:
                raise CheckpointError(
                    f"quantization_config of {name} has {SHARED_SCALE}={owner!r:.80}, expected a "
                    "module with a static scale of its own; the file is damaged: copy it anew"
                )
        if ("activations" in self.features) != bool(specs):
            raise CheckpointError(
                f"quantization_config has features={self.features} and quantizes the inputs of "
                f"{len(specs)} modules, which do not go together; the file is damaged: copy it anew"
            )
        return specs

    def scale_owners(self) -> dict[str, str]:
        """Return the owner of the static scale for each module that shares another one's."""
        return {n: v[SHARED_SCALE] for n, v in self.modules.items() if SHARED_SCALE in v}


@register_quantizer(QUANT_METHOD)
class QatHfQuantizer(HfQuantizer):
    """Loads and saves packed checkpoints strictly: tensors may be neither missing nor extra."""

    requires_calibration = True
    is_trainable = True
    packed: dict[str, Tensor] | None = None
    """The tensors that `save_pretrained` writes."""
    decodes: ClassVar[bool] = True
    """True if stored scales and levels are converted to those that are computed with."""

    @classmethod
    @contextmanager
    def leaving_as_stored(cls) -> Iterator[None]:
        """Open checkpoints with tensors as stored inside the block, for comparison only."""
        cls.decodes = False
        try:
            yield
        finally:
            cls.decodes = True

    def is_serializable(self, **_: object) -> bool:
        """Return True: `save_pretrained` writes a packed checkpoint."""
        return True

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors of a packed checkpoint, for `save_pretrained`.

        Raises:
            CheckpointError: nothing was packed: transformers alone would write a directory that
                opens without `qat`, with random weights.
        """
        if self.packed is None:
            raise CheckpointError(
                "save_pretrained cannot mark a checkpoint as one that needs qat, so that "
                "transformers alone would make up its weights; save it with qat.save(model, out)"
            )
        model.config.quantization_config = QatConfig.of(model)
        return dict(self.packed), {}

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Restore the default weights file name; transformers calls this before it looks for files.

        Raises:
            CheckpointError: the configuration names an attention kernel to fetch.
        """
        check_attention(config)
        if getattr(config, "transformers_weights", None) == NEEDS_QAT:
            del config.transformers_weights
        return config

    update_tp_plan = update_attn_implementation
    """The hook that transformers up to 5.19 calls instead."""

    def update_weight_conversions(self, weight_conversions: list, *model: PreTrainedModel) -> list:
        """Return the conversions that rename tensors; ours are stored as modules hold them.

        Later versions of transformers also pass the model.
        """
        others = [
            each
            for each in weight_conversions
            if each._original_source_patterns != each._original_target_patterns
        ]
        return super().update_weight_conversions(others, *model)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        # verify checksums even when transformers opens the checkpoint directly
        if checkpoint_files:
            check_checksums(Path(checkpoint_files[0]).parent, weights=True)
            let_push()
        self._swap_attention(model)
        kv = self.quantization_config.kv_spec()
        if kv is not None:
            # here, because it imports transformers, which is incomplete when this file is imported
            from qat.models.document_attention import set_kv

            set_kv(model, kv)
        open_sites(model)
        config, tables = self.quantization_config, table_names(model)
        put_empty_formats(model, config.specs(), config.activations())
        for name, owner in config.scale_owners().items():
            model.get_submodule(name).activation = model.get_submodule(owner).activation
        for name in config.modules:
            # every tensor is read, so nothing is left to initialize; some modules would need a
            # linear's weight for it. Buffers that are not stored must still be computed, by the
            # module that holds them or, as in Falcon H1, by the model, which holds the embedding
            owner = model.get_submodule(name.rpartition(".")[0])
            buffers, stored = owner.named_buffers(recurse=name in tables), owner.state_dict()
            owner._is_hf_initialized = all(key in stored for key, _ in buffers)
        for name, rank in config.lora_ranks().items():
            set_empty_adapter(name, model.get_submodule(name), rank)
        if checkpoint_files is not None:
            check_tensors(model, checkpoint_files)

    def _swap_attention(self, model: PreTrainedModel) -> None:
        """Swap in sparse attention, whose parameters are loaded later."""
        ours, is_sparse = self.quantization_config, attends_sparsely(model)
        specs, found = list(ours.specs().values()), ours.features
        if ("nsa" in found) != is_sparse:
            kinds = ("dense", "sparse")
            raise CheckpointError(
                f"the checkpoint was written with {kinds['nsa' in found]} attention "
                f"(features={found}), but {SPARSE!r} of its config.json makes it "
                f"{kinds[is_sparse]}; put back the config.json that it came with, or change its "
                "attention with 'qat convert --attention'"
            )
        expected = _features(ours.modules, specs, is_sparse, ours.kv_spec() is not None)
        if found != expected:
            raise CheckpointError(
                f"quantization_config has features={found}, expected {expected} from what it "
                "quantizes; the file is damaged: copy it anew"
            )
        if is_sparse:
            load_sparse_attention().restore(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        if not self.decodes:
            return
        for linear in quant_linears(model).values():
            for key, parameter in linear.weight_parameters().items():
                parameter.data = from_stored(key, parameter.data, linear.spec.stored_bits(key))
                parameter.requires_grad_()  # uint8 tensors cannot require gradients
        for table in quant_tables(model).values():
            for key, parameter in table.weight_parameters().items():
                stored_bits = table.spec.stored_bits(key)
                parameter.data = from_stored(key, parameter.data, stored_bits)
        for name, module in quantized_modules(model).items():
            _check_indices(name, module)
            scale = None if module.activation is None else module.activation.scale
            if scale is not None and not scale.is_meta:
                check_input_scale(name, scale.item())


def let_push() -> None:
    """Let packed models push themselves to a hub, where the extension that does so is installed."""
    if point := hooks("qat.publish").get("student"):
        point.load()()


def check_tensors(model: PreTrainedModel, files: list[str]) -> None:
    """Compare names, shapes and stored dtypes in safetensors `files` with what `model` needs.

    Raises:
        CheckpointError: a file is damaged, or a tensor is missing, extra or of another shape.
    """
    found = read_headers(files)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = expected.keys() - found.keys() - set(model.all_tied_weights_keys)
    _refuse("misses", sorted(missing))
    _refuse("holds tensors that the model has no place for:", sorted(found.keys() - expected))
    shared = sorted(found.keys() & expected.keys())
    _refuse(
        "holds wrong shapes:",
        [
            f"{k} {found[k][0]} instead of {expected[k]}"
            for k in shared
            if found[k][0] != expected[k]
        ],
    )
    dtypes = _stored_dtypes(model)
    _refuse(
        "holds wrong dtypes:",
        [f"{k} {found[k][1]} instead of {dtypes[k]}" for k in dtypes if found[k][1] != dtypes[k]],
    )


def _stored_dtypes(model: nn.Module) -> dict[str, str]:
    dtypes = {}
    for name, module in quantized_modules(model).items():
        dtypes[f"{name}.packed"] = SAFETENSORS_NAMES[torch.uint8]
        for key in weight_parts(module):
            stored = dtype_as_stored(key, module.spec.stored_bits(key))
            dtypes[f"{name}.{key}"] = SAFETENSORS_NAMES[stored]
        if has_input_scale(module):
            dtypes[f"{name}.{INPUT_SCALE}"] = SAFETENSORS_NAMES[torch.float32]
    return dtypes


def put_empty_formats(
    model: PreTrainedModel, specs: Mapping[str, LutSpec], activations: Mapping[str, ActivationSpec]
) -> None:
    """Replace the modules in `specs` by quantized modules without values on the meta device.

    Those in `activations` quantize their inputs, with a scale of their own if it is static.

    Raises:
        CheckpointError: there is no such module, or the spec does not fit its shape.
    """
    tables = table_names(model)
    for name, spec in specs.items():
        if name in tables:
            put_empty_table(model, name, spec)
        else:
            replace_module(model, name, empty_linear(model, name, spec))
    for name, activation in activations.items():
        scale = torch.empty((), device="meta") if activation.is_static else None
        model.get_submodule(name).activation = ActivationQuantizer(activation, scale)


def empty_linear(model: PreTrainedModel, name: str, spec: LutSpec) -> FrozenLutLinear:
    """Return a linear without values on the meta device, with the shape of the linear `name`.

    Raises:
        CheckpointError: there is no such linear, or the spec does not fit its shape.
    """
    try:
        linear = model.get_submodule(name)
    except AttributeError:
        linear = None
    if not isinstance(linear, nn.Linear | QuantLinear):
        raise CheckpointError(
            f"quantization_config names {name}, but {type(model).__name__} has no linear layer of "
            "that name; load the checkpoint with AutoModelForCausalLM, or convert the model anew"
        )
    O, I = weight_shape(linear)
    _check_groups(name, spec, O, I)
    with torch.device("meta"):
        frozen = FrozenLutLinear(empty_weight(spec, O, I), linear.bias, spec)
    read_packed(frozen)
    return frozen


def put_empty_table(model: PreTrainedModel, name: str, spec: LutSpec) -> None:
    """Replace the embedding or head called `name` by a table without values on the meta device.

    Raises:
        CheckpointError: the spec does not fit its shape.
    """
    shape = weight_shape(model.get_submodule(name))
    _check_groups(name, spec, *shape)
    with torch.device("meta"):
        put_table(model, name, empty_weight(spec, *shape), spec)


def set_empty_adapter(name: str, linear: nn.Module, rank: int) -> None:
    """Give the linear called `name` an adapter without values on the meta device.

    Raises:
        CheckpointError: it is a table, or `rank` is above the smaller side of its weight.
    """
    if not isinstance(linear, QuantLinear):
        raise CheckpointError(
            f"quantization_config of {name} has {LORA_RANK}={rank}, expected none for a table, "
            "which takes no adapter; the file is damaged: copy it anew"
        )
    O, I = linear.out_features, linear.in_features
    if rank > min(O, I):
        raise CheckpointError(
            f"quantization_config of {name} has {LORA_RANK}={rank}, expected at most {min(O, I)} "
            f"for a weight of {O} x {I}; the file is damaged: copy it anew"
        )
    linear.set_lora(Lora(torch.empty(O, rank, device="meta"), torch.empty(rank, I, device="meta")))


def _features(
    modules: dict[str, dict], specs: Collection[LutSpec], is_sparse: bool, has_kv: bool
) -> list[str]:
    """Return the features of a checkpoint in order."""
    has = {
        "activations": any(ACTIVATION in entry for entry in modules.values()),
        "kv": has_kv,
        "lora": any(LORA_RANK in entry for entry in modules.values()),
        "nsa": is_sparse,
        "tables": any(spec.table_rows for spec in specs),
        "vectors": any(spec.vector_size > 1 for spec in specs),
    }
    return [feature for feature in FEATURES if has[feature]]


def _legacy_features(format: int, modules: dict[str, dict], kv: dict | None) -> list[str]:
    """Return the features of formats 1 to 12, whose numbers counted attention, codebooks, inputs.

    format = 1 + nsa + 2 * (1 for vectors, 2 for trellises) + 6 * activations
    """
    rest, is_sparse = divmod(format - 1, 2)
    has_activations, codebook = divmod(rest, 3)
    features = [*LEGACY_CODEBOOKS[codebook]]
    features += ["nsa"] * is_sparse + ["activations"] * has_activations
    features += ["lora"] * any(LORA_RANK in entry for entry in modules.values())
    return features + ["kv"] * (kv is not None)


def _check_groups(name: str, spec: LutSpec, out_features: int, in_features: int) -> None:
    if spec.scale == "group":
        try:
            spec.check_shape(name, out_features, in_features)
        except ConfigError as error:
            raise CheckpointError(f"quantization_config of {error}") from None


def _check_indices(name: str, module: QuantWeight) -> None:
    if module.spec.num_levels == 2**module.spec.bits or module.codebook.is_meta:
        return
    largest = int(module.indices().max())
    if largest >= module.spec.num_levels:
        raise CheckpointError(
            f"{name}.packed holds index {largest}, but the codebook has {module.spec.num_levels} "
            "levels; the file is damaged: copy it anew"
        )


def check_input_scale(name: str, scale: float) -> None:
    """Refuse an impossible static scale for the input of module `name`.

    Raises:
        CheckpointError: it is not positive, or not finite.
    """
    if not 0 < scale < math.inf:
        raise CheckpointError(
            f"{name}.{INPUT_SCALE} is {scale}, expected a positive number; the file is damaged: "
            "copy it anew"
        )


def read_headers(files: Iterable[str | Path]) -> Headers:
    """Return shape and dtype of every tensor in `files`, by name; no data is read.

    Raises:
        CheckpointError: a file is no safetensors file, or is shorter than its header states.
    """
    found = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    view = tensors.get_slice(name)
                    found[name] = (tuple(view.get_shape()), view.get_dtype())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({error}); the file is damaged: copy it anew"
            ) from None
    return found


def _refuse(fault: str, items: list[str]) -> None:
    if items:
        shown = ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
        raise CheckpointError(
            f"the checkpoint {fault} {shown}; expected exactly the tensors that its config.json "
            "describes: copy it anew or convert the model anew"
        )
