"""Target `litertlm`: a bundle for LiteRT-LM (.litertlm), which runs it on phones and on a CPU.

It holds the tokenizer, the chat template, the tokens that end a text, and a program as
`qat.extensions.targets.litert` writes it, with the same weights. litert-torch's own modules give
this program a cache of keys and values: `prefill` reads a part of a prompt, `decode` reads one
token and gives its logits.

Shapes: S positions, V words.
"""

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.data.text import begin_token
from qat.errors import ExportError
from qat.export.targets import check_library
from qat.extensions.targets import litert
from qat.extensions.targets.codes import block_size
from qat.extensions.targets.shared import plain_decoder, steps, write_config
from qat.generate.text import closing_tokens
from qat.models.language_model import LanguageModel
from qat.quant.spec import LutSpec

COMPARED = litert.COMPARED
HOLDS_ADAPTERS = litert.HOLDS_ADAPTERS
HOLDS_TABLES = litert.HOLDS_TABLES
HOLDS_ACTIVATIONS = litert.HOLDS_ACTIVATIONS
FILE_NAME = "model.litertlm"
LENGTH = 1024
"""The largest number of positions in the cache of keys and values."""
PREFILL = 128
"""The number of tokens of a prompt that the program reads at a time."""
HIDDEN = -1e9
"""The number that is added to the attention scores of masked positions."""
AS_TEXT = """\
{%- set flat = namespace(messages=[]) -%}
{%- for message in messages -%}
  {%- if message.content is string or not message.content -%}
    {%- set flat.messages = flat.messages + [message] -%}
  {%- else -%}
    {%- set said = namespace(text="") -%}
    {%- for part in message.content -%}{%- set said.text = said.text + part.text -%}{%- endfor -%}
    {%- set flat.messages = flat.messages + [dict(message, content=said.text)] -%}
  {%- endif -%}
{%- endfor -%}
{%- set messages = flat.messages -%}
"""
"""Lines that are put before a chat template, to join the text parts that LiteRT-LM passes."""
HOW_TO_LOAD = """\
```python
# pip install litert-lm-api
import litert_lm

engine = litert_lm.Engine("DIR/model.litertlm", backend=litert_lm.Backend.CPU())
with engine.create_session(apply_prompt_template=False, max_output_tokens=32) as session:
    session.run_prefill(["Once upon a time"])
    print(session.run_decode().texts[0])
with engine.create_conversation() as chat:  # with the chat template
    print(chat.send_message("Tell me a story."))
```

LiteRT-LM's apps read the file too, and so does `litert-lm run` (`pip install litert-lm`).
"""
lost, scheme = litert.lost, litert.scheme


def file_bits(spec: LutSpec, shape: tuple[int, int]) -> int:
    """Return the bits of an `(O, I)` weight, whose scales stand in both parts of a program."""
    return litert.file_bits(spec, shape) + math.prod(shape) * litert.SCALE_BITS // block_size(spec)


def check(model: PreTrainedModel) -> None:
    """Refuse an architecture that is not known to become a program."""
    plain_decoder(model, "a bundle for LiteRT-LM")


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write model.litertlm, config.json and the tokenizer, in float32 alone.

    Raises:
        ExportError: there is no tokenizer, or it has no tokenizer.json; the library that makes the
            program is missing; or the float weights are larger than LiteRT's files may be.
    """
    if tokenizer is None or not tokenizer.is_fast:
        found = "no tokenizer" if tokenizer is None else "a tokenizer without tokenizer.json"
        raise ExportError(
            f"the checkpoint has {found}, expected one that a bundle can hold; copy its "
            "tokenizer.json and tokenizer_config.json into it, or export --to litert"
        )
    check_library("litert")
    program = litert.coded_program(model, _converted)
    write_config(model, tokenizer, directory)
    from litert_lm_builder import DType, LitertLmFileBuilder, Metadata, TfLiteModelType

    bundle = LitertLmFileBuilder()
    with tempfile.TemporaryDirectory() as place, (directory / FILE_NAME).open("wb") as file:
        facts, coded = Path(place, "facts"), Path(place, "program")
        facts.write_bytes(_facts(model, tokenizer).SerializeToString())
        coded.write_bytes(program)
        bundle.add_system_metadata(Metadata("Authors", "qat", DType.STRING))
        bundle.add_llm_metadata(str(facts))
        bundle.add_hf_tokenizer(str(directory / "tokenizer.json"))
        bundle.add_tflite_model(str(coded), TfLiteModelType.PREFILL_DECODE)
        bundle.build(file)


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return the logits of the bundle's program, run by LiteRT's interpreter.

    The first half of a row is read token by token for its logits, then again as a prompt.
    """
    from ai_edge_litert.interpreter import Interpreter
    from litert_lm_builder import unpack

    with tempfile.TemporaryDirectory() as place:
        unpack(str(directory / FILE_NAME), place)
        (file,) = Path(place).rglob("*.tflite")
        program = Interpreter(str(file), num_threads=torch.get_num_threads())
        rows = []
        for row in ids.numpy().astype(np.int32):
            prompt, *rest = steps(len(row))
            _, first = _read(program, {}, row, [range(place, place + 1) for place in prompt])
            state, _ = _read(program, {}, row, [prompt])
            _, second = _read(program, state, row, rest)
            rows.append(np.concatenate([*first, *second]))
    return torch.from_numpy(np.stack(rows))


def _read(
    program: Any, state: dict[str, np.ndarray], row: np.ndarray, parts: list[range]
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Run parts of a row, `decode` for one token, else `prefill`; return the cache and logits."""
    names = program.get_signature_list()
    (prefill,) = [name for name in names if name.startswith("prefill")]
    found = []
    for part in parts:
        forward = program.get_signature_runner("decode" if len(part) == 1 else prefill)
        given = {
            name: np.zeros(told["shape"], told["dtype"])
            for name, told in forward.get_input_details().items()
        } | state
        given["tokens"][0, : len(part)] = row[part]
        given["input_pos"][:] = part.start + np.arange(len(given["input_pos"]))
        cached = np.arange(given["mask"].shape[-1])
        given["mask"][0, 0] = np.where(cached > given["input_pos"][:, None], HIDDEN, 0)
        state = forward(**given)
        if "logits" in state:
            found.append(state.pop("logits")[0])
    return state, found


def _converted(made: PreTrainedModel) -> Any:
    """Return LiteRT's float program with a cache, of `prefill` and `decode`."""
    from litert_torch._convert.interface import Converter  # what its exporter of models uses
    from litert_torch.generative.export_hf.core import exportable_module

    length = min(LENGTH, made.config.max_position_embeddings)
    how = exportable_module.ExportableModuleConfig(
        model="", prefill_lengths=[min(PREFILL, length)], cache_length=length
    )
    made.set_attn_implementation("lrt_transposed_attention")
    converter = Converter()
    for kind in (
        exportable_module.LiteRTExportableModuleForDecoderOnlyLMPrefill,
        exportable_module.LiteRTExportableModuleForDecoderOnlyLMGenerate,
    ):
        module = kind(made, how).eval()
        for name, (inputs, _) in module.get_sample_inputs(made.config).items():
            converter.add_signature(name, module, sample_kwargs=inputs)
    return converter.convert(strict_export=False)


def _facts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return LiteRT-LM's metadata: the length, tokens that begin and end a text, the template."""
    from litert_lm_builder.runtime.proto.llm_metadata_pb2 import LlmMetadata

    template = tokenizer.chat_template or ""
    facts = LlmMetadata(
        max_num_tokens=min(LENGTH, model.config.max_position_embeddings),
        jinja_prompt_template=template and AS_TEXT + template,
        supports_thinking="<think>" in template,
        supports_function_calling="tools" in template,
    )
    facts.llm_model_type.generic_model.SetInParent()
    begin = begin_token(tokenizer)
    # LiteRT-LM puts it before chats too, and renders `bos_token` of a template as nothing
    is_put = "bos_token" in template or tokenizer("a").input_ids[:1] == [begin]
    if begin is not None and (is_put or not template):
        facts.start_token.token_ids.ids.append(begin)
    for end in closing_tokens(LanguageModel(model), tokenizer.eos_token_id):
        facts.stop_tokens.add().token_ids.ids.append(end)
    if facts.supports_thinking:
        facts.channels.add(channel_name="thought", start="<think>", end="</think>")
    return facts
