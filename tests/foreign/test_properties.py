"""What holds for any file of any tool: no key is lost, none counts twice, and nothing but ConfigError is raised."""

import json
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretune.errors import ConfigError, ForetuneError
from foretune.foreign import TOOLS, build_imported, import_config
from foretune.foreign.reader import flatten, read_foreign

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 1 << 40),
    st.floats(0, 1),
    st.sampled_from(
        ["auto", "", "true", "lora", "qlora", "full", "steps", "epoch", "no", "none", "1e-4", "float16", "bf16", "nf4",
         "cosine", "constant", "adamw_torch", "sgd", "all", "flash_attention_2", "sdpa", "{}", "a,b", "rows.jsonl"]
    ),
    st.lists(st.sampled_from(["q_proj", "v_proj", "lm_head"]), max_size=3),
    st.just({}),
    st.dictionaries(st.sampled_from(["use_reentrant", "path", "type", "x"]), st.booleans(), max_size=2),
)  # fmt: skip
EXTRA = ["nonsense", "model", "data-set", "datasets", "special_tokens", "fsdp_config", "env"]


def documents(tool: str) -> st.SearchStrategy[dict[str, Any]]:
    keys = [key for key in TOOLS[tool].keys if "." not in key and "[" not in key]
    base = {"loss_mode": "all"} if tool == "canifinetune" else {}  # a recipe of 0.4
    return st.dictionaries(st.sampled_from([*keys, *EXTRA]), VALUES, max_size=25).map(lambda drawn: {**base, **drawn})


@pytest.mark.parametrize("tool", TOOLS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_file_is_accounted_for_or_refused(tool: str, data: st.DataObject) -> None:
    document = data.draw(documents(tool))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file.json"
        file.write_text(json.dumps(document))
        try:
            imported = import_config(file, tool=tool)
        except ConfigError:
            return
        keys = [key for key, _, _ in flatten(read_foreign(file).keys, TOOLS[tool].keys)]
        assert Counter(entry.key for entry in imported.entries if entry.place is not None) == Counter(keys)
        assert {key for one in imported.decisions for key in one.keys} == {
            entry.key for entry in imported.of("refused", "to decide", "unknown")
        }
        assert (imported.config is None) == bool(imported.decisions)
        with suppress(ForetuneError):
            build_imported(imported, "estimate")


@pytest.mark.parametrize("tool", TOOLS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_leaving_out_every_blocked_key_leaves_none(tool: str, data: st.DataObject) -> None:
    document = data.draw(documents(tool))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file.json"
        file.write_text(json.dumps(document))
        try:
            blocked = [entry.key for entry in import_config(file, tool=tool).of("refused", "unknown")]
            imported = import_config(file, tool=tool, without=blocked)
        except ConfigError:
            return
        assert not {entry.key for entry in imported.of("refused", "unknown")} & set(blocked)
