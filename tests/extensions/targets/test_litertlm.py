"""Target litertlm: a bundle whose program computes our logits and which LiteRT-LM continues.

What makes a bundle needs litert-torch: `.ci/engine litert` installs it and runs these.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from coded import MIXED, SHAPE, mixed
from tiny import tiny_model, tiny_tokenizer

from qat.errors import ExportError
from qat.export.config import ExportConfig
from qat.export.model import check_equal, export_model
from qat.extensions.targets import litertlm
from qat.nn.quant_linear import quant_linears

needs_litert = pytest.mark.skipif(
    find_spec("litert_lm") is None, reason="needs litert-torch: bash .ci/engine litert"
)
WORDS = 16


def test_a_bundle_needs_a_tokenizer_and_both_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", **SHAPE)
    with pytest.raises(ExportError, match="no tokenizer, expected"):
        litertlm.write(model, None, Path("nowhere"))
    monkeypatch.setitem(sys.modules, "litert_torch", None)
    with pytest.raises(ExportError, match="^litert_torch "):
        litertlm.write(model, tiny_tokenizer(), Path("nowhere"))


@needs_litert
@pytest.mark.filterwarnings("ignore")  # what its modules do as they are imported
def test_a_bundle_speaks_as_our_student(tmp_path: Path) -> None:
    import litert_lm

    student, out = mixed(tmp_path / "student", MIXED, None), tmp_path / "out"
    report = export_model(str(tmp_path / "student"), ExportConfig(to="litertlm"), out)
    assert 0 < report.logits_max_diff < 1e-4 and report.bytes > 0
    engine = litert_lm.Engine(str(out / litertlm.FILE_NAME), cache_dir=":nocache")
    tokenizer, prompt = tiny_tokenizer(), "the cat sat"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    ours = student.generate(ids, do_sample=False, max_new_tokens=WORDS)[0, ids.shape[1] :]
    greedy = litert_lm.SamplerConfig(top_k=1, top_p=1.0, temperature=0.0)
    with engine.create_session(
        apply_prompt_template=False, sampler_config=greedy, max_output_tokens=WORDS
    ) as session:
        session.run_prefill([prompt])
        (said,) = session.run_decode().texts
    assert said == tokenizer.decode(ours).removesuffix(tokenizer.eos_token)
    with engine.create_conversation() as chat:  # with the template in the bundle
        turn = [{"role": "user", "content": "the dog"}]
        rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        assert chat.render_message_to_string("the dog").startswith(rendered)
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m.content }}\n{% endfor %}"
    )
    with engine.create_conversation(chat_template=litertlm.AS_TEXT + template) as chat:
        assert chat.render_message_to_string("the dog") == "user: the dog\n"
    with torch.no_grad():
        next(iter(quant_linears(student).values())).scales *= 1.25
    with pytest.raises(ExportError, match="gives other logits"):
        check_equal("litertlm", student, out)


@needs_litert
def test_what_begins_and_ends_a_text_is_in_the_bundle() -> None:
    model, tokenizer = tiny_model("llama", **SHAPE), tiny_tokenizer()
    model.generation_config.eos_token_id = [3, tokenizer.eos_token_id]
    tokenizer.bos_token = "<|system|>"
    for template, begins, thinks in (
        (None, True, False),
        ("{{ messages }}", False, False),
        ("{{ bos_token }}{{ tools }}<think>", True, True),
    ):
        tokenizer.chat_template = template
        facts = litertlm._facts(model, tokenizer)
        assert [list(each.token_ids.ids) for each in facts.stop_tokens] == [[3], [0]]
        begin = [tokenizer.bos_token_id] if begins else []
        assert list(facts.start_token.token_ids.ids) == begin
        assert facts.supports_thinking == facts.supports_function_calling == thinks
        assert facts.jinja_prompt_template.endswith(template or "")
        assert facts.max_num_tokens == model.config.max_position_embeddings
