"""The page of the extension is true: its code runs."""

import re
from pathlib import Path

import pytest
from cache_case import TOKENIZER, build
from tiny import tiny_model

import qat
import qat.extensions.integrations

PAGE = Path(qat.extensions.integrations.__file__).with_name("README.md")


@pytest.mark.slow
@pytest.mark.usefixtures("short_fits")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator")
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model(num_hidden_layers=1).save_pretrained("my-model")
    TOKENIZER.save_pretrained("my-model")
    build(Path("caches/mine"))
    names: dict[str, object] = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        exec(compile(code, str(PAGE), "exec"), names)
    for name in ("own-loop", "trainer"):
        assert qat.load(f"students/{name}", device="cpu").name_or_path
