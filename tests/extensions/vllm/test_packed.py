"""Packed tensors as an engine holds them: formed as the model's, cut for several processes."""

import errno
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from covering import covering
from huggingface_hub.errors import HFValidationError
from quantized import KINDS, ROUNDINGS, SPECS, frozen_linear, random_weight, rounding, with_adapter
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

import qat.extensions.vllm.packed
from qat.errors import CheckpointError
from qat.extensions.vllm.packed import (
    Experts,
    Format,
    Part,
    Stored,
    check_cut,
    lut_embedding,
    lut_experts,
    lut_linear,
    num_processes,
    read_config,
    refused_path,
    rounded_heads,
)
from qat.models.hf_quantizer import FORMAT, QatConfig, read_headers
from qat.models.stored_state import packed_state_dict
from qat.nn.lut_embedding import FrozenLutEmbedding
from qat.nn.quant_linear import QuantLinear
from qat.quant.activation import quantize_tokens
from qat.quant.kv import fake_quantize_heads
from qat.quant.spec import ActivationKind, ActivationSpec, KvSpec, LutSpec

O, I = 24, 64
MODULES = {"model.layers.0.mlp.up_proj": LutSpec(bits=2, group_size=16).model_dump()}


def stored_tensors(linear: QuantLinear) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint holds of a linear."""
    state = packed_state_dict(torch.nn.ModuleDict({"it": linear}))
    return {name.removeprefix("it."): tensor for name, tensor in state.items()}


def part_of(
    linear: QuantLinear,
    rows: int,
    columns: int = I,
    rank: int = 0,
    name: str = "it",
    input_scale: int = 1,
) -> Part:
    """`input_scale`: which static scale its input has, where it is quantized so."""
    read = None if linear.activation is None else linear.activation.spec
    scale = input_scale if read is not None and read.is_static else 0
    stored = Stored(name, linear.spec, linear.lora_rank, read, scale)
    return Part.of(stored, rows, linear.in_features, columns=columns, rank=rank)


def held(linear: QuantLinear, part: Part, rows: slice | Tensor) -> list[Tensor]:
    """The tensors of a part in the order of operators, of the shapes that were announced."""
    tensors = stored_tensors(linear)
    names = part.stored.format.names()
    cut = [part.cut(name, tensors[name], lambda total: rows) for name in names]
    expected = part.tensors(torch.float32)
    assert {(n, t.shape, t.dtype) for n, t in zip(names, cut, strict=True)} == {
        (n, t.shape, t.dtype) for n, t in expected.items()
    }
    return cut


def operands(*linears: QuantLinear, scales: Sequence[int] = ()) -> tuple[list[Tensor], list[int]]:
    """The tensors and formats of whole linears; `scales`: as `input_scale` of `part_of`."""
    numbers = scales or [1] * len(linears)
    parts = [
        part_of(linear, linear.out_features, input_scale=number)
        for linear, number in zip(linears, numbers, strict=True)
    ]
    pairs = zip(linears, parts, strict=True)
    weights = [t for linear, part in pairs for t in held(linear, part, slice(0, part.out_features))]
    return weights, [number for part in parts for number in part.stored.format]


@pytest.mark.parametrize(("name", "is_adapted"), covering(SPECS, [False, True]))
def test_an_operator_multiplies_by_what_the_model_does(name: str, is_adapted: bool) -> None:
    linear = frozen_linear(O, I, SPECS[name])
    if is_adapted:
        with_adapter(linear)
    x, bias = torch.randn(3, I, dtype=torch.bfloat16), torch.randn(O, dtype=torch.bfloat16)
    y = lut_linear(x, *operands(linear), bias)
    assert torch.equal(y, F.linear(x, linear.quantized_weight(torch.bfloat16), bias))


def test_parts_of_one_linear_keep_their_formats() -> None:
    linears = [frozen_linear(O, I, SPECS[name]) for name in ("lut2", "fours8_s8", "int4_r3")]
    dense, x = torch.randn(8, I), torch.randn(2, 5, I)
    weights, formats = operands(*linears)
    y = lut_linear(x, [*weights, dense], [*formats, *Format()], None)
    whole = torch.cat([*(linear.quantized_weight() for linear in linears), dense])
    torch.testing.assert_close(y, F.linear(x, whole))


@pytest.mark.parametrize("name", KINDS)
def test_pieces_of_several_processes_make_the_whole(name: str) -> None:
    linear = with_adapter(frozen_linear(O, I, SPECS[name]))
    x, size = torch.randn(3, I), 2
    expected = F.linear(x, linear.quantized_weight())
    by_row, by_column = [], 0
    for rank in range(size):
        part = part_of(linear, O // size)
        weights = held(linear, part, part.rows(O, rank, size))
        by_row.append(lut_linear(x, weights, [*part.stored.format], None))
        part = part_of(linear, O, I // size, rank)
        weights = held(linear, part, part.rows(O, rank, size))
        by_column += lut_linear(x[:, part.columns], weights, [*part.stored.format], None)
    assert torch.equal(torch.cat(by_row, -1), expected)
    torch.testing.assert_close(by_column, expected, rtol=1e-4, atol=1e-4)


def rounded_linear(
    kind: ActivationKind, spec: LutSpec, bits: int = 32, scale: float = 0.02
) -> QuantLinear:
    linear = frozen_linear(O, I, spec)
    linear.activation = rounding(kind, scale, bits)
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "bits"), ROUNDINGS)
def test_an_input_is_rounded_as_the_model_rounds_it(
    kind: ActivationKind, bits: int, dtype: torch.dtype
) -> None:
    linear = with_adapter(rounded_linear(kind, SPECS["lut2"], bits))
    x, bias = torch.randn(3, I, dtype=dtype), torch.randn(O, dtype=dtype)
    weights, formats = operands(linear)
    weight, read = linear.quantized_weight(dtype), linear.activation(x)
    assert not torch.equal(read, x)
    assert torch.equal(lut_linear(x, weights, formats, bias), F.linear(read, weight, bias))
    torch.library.opcheck(lut_linear, (x, weights, formats, bias))
    expected = F.linear(read, weight).view(3, 2, -1)[torch.arange(3), torch.tensor([1, 0, 1])]
    y = lut_experts(x, torch.tensor([1, 0, 1]), weights, formats, 2)
    torch.testing.assert_close(y, expected)
    rows = lut_embedding(torch.tensor([7, 0]), weights, formats, I, dtype)
    assert torch.equal(rows, weight[[7, 0]])  # a table reads no input


def test_parts_that_round_alike_read_one_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("quantize_tokens", "quantize_static"):
        true = getattr(qat.extensions.vllm.packed, name)

        def counted(*given: object, true: object = true, name: str = name) -> Tensor:
            calls.append(name)
            return true(*given)

        monkeypatch.setattr(qat.extensions.vllm.packed, name, counted)
    x, bias = torch.randn(2, 5, I), torch.randn(4 * O)
    rounded = [
        ("int8", "lut2", 0.0),
        ("int8", "int4_r3", 0.0),
        ("int8-static", "lut3", 0.02),
        ("int8-static", "lut4", 0.03),
    ]
    for scales, expected in (
        ((1, 1, 1, 2), ["quantize_tokens", "quantize_static", "quantize_static"]),
        ((1, 1, 2, 2), ["quantize_tokens", "quantize_static"]),
    ):
        linears = [rounded_linear(kind, SPECS[name], scale=s) for kind, name, s in rounded]
        if scales[2] == scales[3]:
            linears[3].activation = linears[2].activation
        y = lut_linear(x, *operands(*linears, scales=scales), bias)
        products = [F.linear(m.activation(x), m.quantized_weight()) for m in linears]
        torch.testing.assert_close(y, torch.cat(products, -1) + bias)
        assert calls == expected
        calls.clear()


@pytest.mark.parametrize(("kind", "bits"), ROUNDINGS)
def test_a_piece_of_a_token_is_rounded_as_the_whole(kind: ActivationKind, bits: int) -> None:
    linear, x, size = rounded_linear(kind, SPECS["lut2"], bits), torch.randn(3, I), 2
    pieces = x.chunk(size, -1)
    ends = torch.cat([torch.stack(piece.aminmax(dim=-1), -1) for piece in pieces], -1)
    for rank, piece in enumerate(pieces):
        part = part_of(linear, O, I // size, rank)
        weights, formats = held(linear, part, slice(0, O)), [*part.stored.format]
        given = ends if part.needs_token_range else None
        assert part.needs_token_range == (kind != "int8-static")
        read, weight = linear.activation(x), linear.quantized_weight()
        expected = F.linear(read[:, part.columns].contiguous(), weight[:, part.columns])
        assert torch.equal(lut_linear(piece, weights, formats, None, given), expected)
    assert not part_of(linear, O).needs_token_range
    if kind != "int8-static":
        assert not torch.equal(quantize_tokens(piece, kind), read[:, part.columns])


@pytest.mark.parametrize("bits", [4, 8])
def test_heads_are_rounded_as_a_cache_rounds_them(bits: int) -> None:
    x = torch.randn(5, 2, 16, dtype=torch.bfloat16)
    assert torch.equal(rounded_heads(x, bits), fake_quantize_heads(x, bits))
    torch.library.opcheck(rounded_heads, (x, bits))


def test_processes_beyond_the_heads_of_keys_hold_the_same_rows() -> None:
    part = part_of(frozen_linear(O, I, SPECS["lut2"]), O // 2)
    assert [part.rows(O, rank, 4).start for rank in range(4)] == [0, 0, 12, 12]
    with pytest.raises(CheckpointError, match="it has 24 rows in the checkpoint, of which 3"):
        part.rows(O, 0, 3)


@pytest.mark.parametrize(("name", "unit"), [("lut3", "group of 32"), ("fours10_r2", "vector of 4")])
def test_a_size_that_splits_a_group_is_refused(name: str, unit: str) -> None:
    linear = frozen_linear(O, I, SPECS[name])
    with pytest.raises(CheckpointError, match=f"^it: .* over 32 processes .* splits a {unit};"):
        part_of(linear, O, I // 32)


def test_tables_are_looked_up_by_rows_and_padded_with_zeros() -> None:
    spec = SPECS["lut4"]
    table = FrozenLutEmbedding(random_weight(O, I, spec), spec, torch.bfloat16)
    part = Part.of(Stored("it", spec), O, I, columns=I, rank=0)
    tensors = {"packed": table.packed, "codebook": table.codebook, "scales": table.scales.half()}
    cut = [part.cut(n, tensors[n], lambda total: slice(8, O)) for n in part.stored.format.names()]
    ids = torch.tensor([[0, 15, 3], [7, 7, 15]])
    rows = lut_embedding(ids, cut, [*part.stored.format], I, torch.bfloat16)
    assert torch.equal(rows, table(ids + 8))
    padding = lut_embedding(torch.tensor([16, 23]), cut, [*part.stored.format], I, torch.float32)
    assert not padding.any()


E = 3


@pytest.mark.parametrize(("name", "num_rows"), covering(KINDS, [1, 2, 3, 11]))
def test_each_row_is_multiplied_with_its_expert(name: str, num_rows: int) -> None:
    linear = with_adapter(frozen_linear(E * O, I, SPECS[name]))
    x, experts = torch.randn(num_rows, I), torch.randint(E, (num_rows,))
    y = lut_experts(x, experts, *operands(linear), E)
    chosen = linear.quantized_weight().view(E, O, I)[experts]
    torch.testing.assert_close(y, torch.einsum("noi,ni->no", chosen, x), rtol=1e-4, atol=1e-4)


def test_two_processes_hold_half_of_each_expert() -> None:
    """Gates and ups lie one below the other in an expert, and each gives its half."""
    linear = frozen_linear(E * 2 * O, I, SPECS["lut2"])
    pieces = []
    for rank in range(2):
        piece = Experts(E, range(E), rank, 2)
        places = piece.rows(E * 2 * O, name="it", matrices=2, width=O)
        part = part_of(linear, E * O)
        weights = held(linear, part, places)
        x = torch.ones(E, I)
        y = lut_experts(x, torch.arange(E), weights, [*part.stored.format], E)
        pieces.append(y.view(E, 2, -1))
    expected = linear.quantized_weight().sum(1).view(E, 2, O)
    torch.testing.assert_close(torch.cat(pieces, -1), expected, rtol=1e-4, atol=1e-4)


def test_a_process_holds_whole_experts() -> None:
    places = Experts(5, [4, 1]).rows(5 * 2, name="it", matrices=1, width=2)
    assert places.tolist() == [8, 9, 2, 3]
    with pytest.raises(CheckpointError, match="it has 12 rows .* expected 10, those of 5 experts"):
        Experts(5, [4, 1]).rows(12, name="it", matrices=1, width=2)


def test_a_compiler_sees_one_operator() -> None:
    linear = frozen_linear(O, I, SPECS["pairs6"])
    x, (weights, formats) = torch.randn(3, I), operands(linear)
    torch.library.opcheck(lut_linear, (x, weights, formats, None))
    ids = torch.tensor([[1, 2]])
    for rows in ([1], [0, 2, 0]):
        experts = torch.tensor(rows)
        torch.library.opcheck(lut_experts, (x[: len(rows)], experts, weights, formats, 3))
    torch.library.opcheck(lut_embedding, (ids, weights, formats, I, torch.bfloat16))


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_a_damaged_scale_of_an_input_is_refused(scale: float) -> None:
    linear = rounded_linear("int8-static", SPECS["lut2"])
    with pytest.raises(CheckpointError, match=r"it.activation.scale is .*, expected a positive"):
        part_of(linear, O).cut("activation.scale", torch.tensor(scale), lambda total: slice(0, 1))


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("scales", lambda t: t[:, 1:], r"it.scales is \(24, 7\) torch.float16, expected \(24, 8\)"),
        ("scales", Tensor.float, r"it.scales is .* torch.float32, expected .* torch.float16 by"),
        ("scale_in", lambda t: t, "the checkpoint holds it.scale_in, expected codebook, packed,"),
    ],
)
def test_a_tensor_of_another_form_is_refused(key: str, change: object, message: str) -> None:
    linear = frozen_linear(O, I, SPECS["lut4"])
    tensors = {"scale_in": torch.zeros(1, I), **stored_tensors(linear)}
    with pytest.raises(CheckpointError, match=message):
        part_of(linear, O).cut(key, change(tensors[key]), lambda total: slice(0, total))


def test_an_index_beyond_a_ternary_codebook_is_refused() -> None:
    linear = frozen_linear(O, I, SPECS["ternary"])
    packed = stored_tensors(linear)["packed"] | 3
    with pytest.raises(CheckpointError, match=r"it.packed holds index 3, but .* 3 levels"):
        part_of(linear, O).cut("packed", packed, lambda total: slice(0, total))


def test_a_config_is_read_as_it_is_written() -> None:
    (up, values), head = *MODULES.items(), LutSpec(bits=4).model_dump()
    modules = {up: values | {"lora_rank": 5}, "lm_head": head}
    stored = {"format": FORMAT, "features": ["lora"], "modules": modules}
    read, kv = read_config({"quant_method": "qat", **stored})
    assert kv is None
    assert read[up] == Stored(up, LutSpec(bits=2, group_size=16), 5)
    assert read["lm_head"] == Stored("lm_head", LutSpec(bits=4))
    assert QatConfig(**stored).specs() == {name: each.spec for name, each in read.items()}


def test_inputs_and_caches_of_a_config_are_read() -> None:
    static = {"bits": 2, "activation": {"kind": "int8-static", "scale_bits": 16}}
    modules = {
        "q": static,
        "k": static | {"input_scale_of": "q"},
        "o": static,
        "up": {"bits": 2, "activation": {"kind": "fp8"}},
        "down": {"bits": 2},
    }
    values = {"quant_method": "qat", "format": 7, "modules": modules, "kv": {"bits": 4}}
    read, kv = read_config(values)
    assert kv == KvSpec(bits=4)
    roundings = {name: stored.format.rounding for name, stored in read.items()}
    assert roundings["q"] == roundings["k"] != roundings["o"]
    assert [stored.input_scale > 0 for stored in read.values()] == [True] * 3 + [False] * 2
    assert read["o"].activation == ActivationSpec(kind="int8-static", scale_bits=16)
    assert read["up"].activation == ActivationSpec(kind="fp8")
    assert roundings["down"] == Format().rounding


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": 14}, "format=14, expected format=13"),
        ({"format": FORMAT, "features": ["nsa"]}, r"sparse attention \(feature 'nsa'\)"),
        ({"format": 2}, r"sparse attention \(feature 'nsa'\)"),
        (
            {"format": 7, "modules": {"a": {"bits": 2, "activation": {"kind": "int4"}}}},
            "quantization_config of a",
        ),
        ({"format": 7}, r"\['activations'\] and quantizes the inputs of 0 modules"),
        ({"kv": {"bits": 3}}, "kv of quantization_config"),
        ({"modules": {"a": {"bits": 2, "codebook": "fp4"}}}, "quantization_config of a"),
    ],
)
def test_what_no_engine_takes_is_refused(values: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        read_config({"quant_method": "qat", "format": 1, "modules": MODULES} | values)
    assert "\n" not in str(refusal.value)


def test_a_path_without_a_model_is_refused_and_a_run_names_its_checkpoint(tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "step-000100"
    assert "does not exist" in str(refused_path(f"{tmp_path}/none"))
    assert "does not exist" in str(refused_path("runs/q2/checkpoints/step-1"))
    assert "without a model in it" in str(refused_path(f"{tmp_path}"))
    step.mkdir(parents=True)
    (step / "config.json").write_text("{}")
    (tmp_path / "best").write_text("checkpoints/step-000100")
    refusal = str(refused_path(f"{tmp_path}"))
    assert refusal.endswith(f"expected a model directory; serve the one in it: {step}")
    for source in (f"{step}", "owner/name", "s3://bucket/runs/q2", "--port"):
        assert refused_path(source) is None
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").touch()
    for source in (tmp_path / "gguf", tmp_path / "gguf" / "model.gguf"):
        assert "holds a GGUF file, expected" in str(refused_path(f"{source}"))


def test_a_class_that_the_engine_lacks_is_one_line(tmp_path: Path) -> None:
    error = ValueError("Value error, Model architectures ['MoonForCausalLM'] are not supported")
    config = {"architectures": ["MoonForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert refused_path(f"{tmp_path}", error) is None  # a float model is the engine's to speak of
    config["quantization_config"] = {"quant_method": "qat"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refusal = str(refused_path(f"{tmp_path}", error))
    assert "has architectures=['MoonForCausalLM'], expected a class that vLLM has; serv" in refusal
    assert refused_path(f"{tmp_path}", ValueError("max_model_len is 0")) is None


@pytest.mark.parametrize(
    ("error", "is_refused"),
    [
        (HFValidationError("Repo id must be in the form"), True),
        (OSError("none is not a local folder"), True),
        (OSError(errno.EADDRINUSE, "Address already in use"), False),
        (RuntimeError("Engine core initialization failed"), False),
    ],
)
def test_a_path_without_a_model_is_refused_if_the_engine_missed_it(
    error: Exception, is_refused: bool, tmp_path: Path
) -> None:
    assert (refused_path(f"{tmp_path}/none", error) is not None) == is_refused


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("vllm serve d", 1),
        ("vllm serve d -tp 2", 2),
        ("vllm serve d --tensor-parallel-size=4 --port 8000", 4),
        ("vllm serve d --tensor-parallel-size 2 -tp 3", 3),
        ("vllm serve d -tp many", 1),
        ("python ask.py -tp 2", 1),
    ],
)
def test_the_number_of_processes_is_read_from_the_command(words: str, expected: int) -> None:
    assert num_processes(words.split()) == expected


@pytest.mark.parametrize("left", [0, 4, 60, -1])
def test_weights_that_were_cut_short_are_refused_by_their_header(tmp_path: Path, left: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(8, 6)}, path)
    assert read_headers([path]) == {"w": ((8, 6), "F32")}
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read .*: copy it anew"):
        read_headers([path])


def test_processes_that_split_a_group_are_refused_before_they_start(tmp_path: Path) -> None:
    spec, name = LutSpec(bits=2, group_size=16), "model.layers.0.mlp.down_proj"
    modules = {name: Stored(name, spec), "model.layers.0.mlp.up_proj": Stored("up", spec)}
    scales = {
        f"{name}.scales": torch.zeros(8, 6),
        "model.layers.0.mlp.up_proj.scales": torch.ones(3, 7),
    }
    save_file(scales, tmp_path / "model.safetensors")
    headers = read_headers([tmp_path / "model.safetensors"])
    for size in (1, 2, 3, 6, 5):  # five do not divide 96 inputs, which is the engine's to say
        check_cut(headers, modules, size)
    refusal = (
        f"{name}: tensor parallelism over 4 processes gives each 24 of its 96 input features, "
        "which splits a group of 16; choose a size that leaves each a multiple of 16"
    )
    with pytest.raises(CheckpointError, match=refusal):
        check_cut(headers, modules, 4)
