"""Generation: seeded, streamed, chat template or not, and a look at whether it is language."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from tiny import VOCAB, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from qat.backend.base import Backend
from qat.backend.device import seeded
from qat.errors import ConfigError
from qat.generate import text as module
from qat.generate.text import closing_tokens, encode_prompt, generate_text, repeated_frac
from qat.models.language_model import LanguageModel

PROMPT = "the cat sat"


@pytest.fixture
def model() -> LanguageModel:
    return LanguageModel(tiny_model(initializer_range=0.3))


def test_greedy_equals_a_plain_loop(model: LanguageModel) -> None:
    tokenizer = tiny_tokenizer()
    ids = encode_prompt(tokenizer, PROMPT, raw=True)
    said = generate_text(model, tokenizer, PROMPT, max_new_tokens=8, temperature=0.0, raw=True)
    expected = ids
    for _ in range(said.num_tokens):
        with torch.no_grad():
            following = model.model(expected).logits[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, following], dim=1)
    assert said.text == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)


def test_rows_filled_to_one_shape_hold_the_same_tokens(model: LanguageModel, monkeypatch) -> None:
    """Fixed shapes have a loop of their own, which ends at the last token that is allowed."""
    ids = torch.tensor([[5, 9, 12], [7, 3, 20]])
    config = GenerationConfig(max_new_tokens=6, do_sample=False)
    free = module.continue_rows(model, ids, config)
    ending = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=[free[0][2]])
    ended = module.continue_rows(model, ids, ending)
    assert [*map(len, free)] == [6, 6] and len(ended[0]) <= 3
    monkeypatch.setattr(Backend, "is_traced", True)
    assert module.continue_rows(model, ids, config) == free
    assert module.continue_rows(model, ids, ending) == ended


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama's: a token that begins a text, and words w1, w2 with their spaces."""
    vocabulary = {"<s>": 0} | {f"\u2581w{n}": n for n in range(1, VOCAB)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")


def test_a_continued_text_keeps_the_space_before_its_next_word(model: LanguageModel) -> None:
    pieces = []
    said = generate_text(
        model, word_tokenizer(), "w1 w2", max_new_tokens=3, temperature=0.0, stream=pieces.append
    )
    assert "".join(pieces) == said.text and said.text.startswith(" w")


def test_a_held_out_prompt_begins_with_its_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    S = 8
    row = SimpleNamespace(
        input_ids=torch.arange(S)[None],
        position_ids=torch.arange(S)[None],
        mask=torch.ones(1, S, dtype=torch.bool),
    )
    reader = Mock(sequence_length=S)
    reader.batch.return_value = row
    monkeypatch.setattr(module.TeacherCache, "open", lambda _: reader)
    assert module.held_out_prompt("cache", word_tokenizer()) == "w1 w2 w3"


HELD_OUT = [
    ("he saw the hou", "he saw the house", "he saw the"),
    ("he saw the house", "he saw the house.", "he saw the house"),
    ("he did no", "he did not go", "he did"),
    ("he didn", "he didn't go", "he didn"),  # else little would be left
    ("that he didn", "that he didn't go", "that he"),
    ("he paid 5 \ufffd", "he paid 5 \u20ac", "he paid 5"),
    ("\u4f60\u597d", "\u4f60\u597d\u5417", "\u4f60\u597d"),  # no spaces between words
    ("one", "one", "one"),
    ("he saw the ", "he saw the house", "he saw the"),
]


def test_a_held_out_prompt_ends_with_a_whole_word() -> None:
    for prompt, document, kept in HELD_OUT:
        assert module._whole_words(prompt, document) == kept, prompt


def test_sampling_settings_all_matter_and_the_seed_decides(model: LanguageModel) -> None:
    def said(seed: int = 3, **settings: float) -> str:
        settings = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 1.0, **settings}
        with seeded(seed):
            return generate_text(model, tiny_tokenizer(), PROMPT, **settings).text

    assert said() == said()
    assert len({said(), said(seed=4), said(temperature=3.0), said(temperature=0.0)}) == 4
    assert said(top_p=0.01) == said(temperature=0.0)


def test_the_checkpoints_sampling_settings_do_not_leak_in(model: LanguageModel) -> None:
    def said() -> str:
        with seeded(0):
            return generate_text(model, tiny_tokenizer(), PROMPT, max_new_tokens=12).text

    before = said()
    model.model.generation_config.top_k = 1
    model.model.generation_config.repetition_penalty = 5.0
    assert said() == before


def test_the_prompt_is_a_users_message_unless_raw() -> None:
    tokenizer = tiny_tokenizer()
    chat = tokenizer.decode(encode_prompt(tokenizer, PROMPT)[0])
    assert chat == f"<|user|>{PROMPT}<|end|><|assistant|>"
    assert tokenizer.decode(encode_prompt(tokenizer, PROMPT, raw=True)[0]) == PROMPT
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_prompt(tokenizer, PROMPT)[0]) == PROMPT
    with pytest.raises(ConfigError, match="prompt='' holds no token"):
        encode_prompt(tokenizer, "")
    tokenizer.bos_token = "<|system|>"
    begun = [tokenizer.bos_token_id, *tokenizer(PROMPT).input_ids]
    assert encode_prompt(tokenizer, PROMPT, raw=True).tolist() == [begun]


def test_generation_stops_at_the_end_token(model: LanguageModel) -> None:
    tokenizer = tiny_tokenizer()
    free = generate_text(model, tokenizer, PROMPT, max_new_tokens=6, temperature=0.0)
    first = tokenizer(free.text, add_special_tokens=False)["input_ids"][0]
    model.model.generation_config.eos_token_id = [first, 1]
    assert generate_text(model, tokenizer, PROMPT, temperature=0.0).num_tokens == 1


def test_generation_stops_at_the_tokenizers_end_too(model: LanguageModel) -> None:
    """A chat template ends a turn with it, even if the generation settings name another end."""
    tokenizer = tiny_tokenizer()
    free = generate_text(model, tokenizer, PROMPT, max_new_tokens=6, temperature=0.0)
    first = tokenizer(free.text, add_special_tokens=False)["input_ids"][0]
    model.model.generation_config.eos_token_id = 1
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)
    assert generate_text(model, tokenizer, PROMPT, temperature=0.0).num_tokens == 1
    assert closing_tokens(model, first) == [1, first] and closing_tokens(model, None) == [1]


def test_a_token_that_has_no_embedding_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    small = LanguageModel(tiny_model(vocab_size=len(tokenizer)))
    tokenizer.add_special_tokens({"pad_token": "<|beyond|>"})
    with pytest.raises(ConfigError, match=f"gave token {len(tokenizer) - 1}, but the model's"):
        generate_text(small, tokenizer, "the cat <|beyond|>", raw=True)


def test_repetition_is_told() -> None:
    assert repeated_frac([1, 2, 3]) == 0.0
    assert repeated_frac(list(range(20))) == 0.0
    assert repeated_frac([7] * 13) == pytest.approx(0.9)
    assert repeated_frac([1, 2] * 4, n=2) == pytest.approx(1 - 2 / 7)


@pytest.mark.parametrize("key", ["image_token_id", "image_token_index"])
def test_a_prompt_with_a_picture_is_refused(key: str, model: LanguageModel) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    prompt = "what is on <image> the mat"
    model.model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    generate_text(model, tokenizer, prompt, max_new_tokens=1)  # a model of text alone
    setattr(model.model.config, key, tokenizer.convert_tokens_to_ids("<image>"))
    generate_text(model, tokenizer, PROMPT, max_new_tokens=1)
    with pytest.raises(ConfigError, match="holds '<image>', which stands for image input, expe"):
        generate_text(model, tokenizer, prompt, max_new_tokens=1)
