"""Packed examples: which model classes keep them apart, held against what small models of every type do."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from memory.runs import golden, shape_of
from torch import Tensor, nn

from foretune.contract import TrainingConfig
from foretune.errors import UnsupportedError
from foretune.memory import FORETUNE, PROFILES, estimate_memory
from foretune.memory.families import DECODERS
from foretune.memory.packing import KEEP_APART, LEAKS, leaks_because
from foretune.models import REMOTE_CODE_TYPES, WITHOUT_CLASS
from foretune.runtime.load import build_model, model_config
from foretune.runtime.qualify import require_rows_apart, require_runnable

FINGERPRINTS = [row for row in golden("fingerprints.jsonl")[1:] if "refusal" not in row]
CONFIGS: dict[str, dict[str, Any]] = {
    row["model_type"]: row["config"] for row in [*FINGERPRINTS, *golden("families.jsonl")]
}
BIASED, ROTARY = "falcon with linear biases", "falcon"
CONFIGS |= {BIASED: {**CONFIGS[ROTARY], "alibi": True}, ROTARY: {**CONFIGS[ROTARY], "alibi": False}}
QUICK = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "cohere2", "hunyuan_v1_moe"),
    *("opt", "lfm2", "gpt_oss", "granitemoehybrid", "bloom", "qwen3_5", ROTARY, BIASED),
)
WITHOUT_SDPA = ("deepseek_v4", "falcon_mamba", "gemma4", "mamba")
"""Beside those whose shape says so; gemma4 has a tower that refuses it."""
ENTANGLED = {family for leak in LEAKS for family in leak.families}
AT_MOST: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 512),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "shared_intermediate_size", "ffn_dim"), 256),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 4),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "index_topk"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), 16),
}
"""Sizes that are cut; heads and widths stay, for they go together."""
LENGTHS = (17, 13), (9, 21)
"""Of the examples of two rows; the rest is padding."""
WIDTH = 36


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_model(raw: dict[str, Any]) -> nn.Module:
    """A model of real heads and little else, with untrained weights in fp32."""
    torch.manual_seed(0)
    attention = "eager" if raw["model_type"] in WITHOUT_SDPA or shape_of(raw).refuses_sdpa else "sdpa"
    made = model_config(raw, attention=attention)
    text: Any = made.get_text_config()
    for key, most in AT_MOST.items():
        size = getattr(text, key, None)
        if isinstance(size, list):
            setattr(text, key, [most] * len(size))
        elif isinstance(size, int) and size > most:
            setattr(text, key, most)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, key, 0)
    return build_model(made, dtype=torch.float32, device="cpu", attention=attention).eval()


def largest_difference(model: nn.Module) -> float:
    """Of the logits of packed examples to those of the same examples alone, relative."""
    with torch.no_grad():
        examples = [[torch.randint(1, 500, (length,)) for length in row] for row in LENGTHS]
        ids_BS = torch.stack([filled(row, torch.zeros(WIDTH, dtype=torch.long)) for row in examples])
        places = [[torch.arange(length) for length in row] for row in LENGTHS]
        positions_BS = torch.stack([filled(row, torch.arange(WIDTH)) for row in places])
        packed = model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False).logits
        worst = 0.0
        for row, of_row in zip(packed, examples, strict=True):
            begin = 0
            for example in of_row:
                alone = model(input_ids=example[None], use_cache=False).logits[0]
                inside = row[begin : begin + len(example)]
                worst = max(worst, float((inside - alone).norm() / alone.norm()))
                begin += len(example)
    return worst


def filled(parts: list[Tensor], rest: Tensor) -> Tensor:
    """Put examples one behind the other, and padding, which is a sequence of its own, after them."""
    return torch.cat([*parts, rest[: WIDTH - sum(map(len, parts))]])


def check(name: str) -> None:
    raw = CONFIGS[name]
    with warnings.catch_warnings():  # of old names in a config, of kernels that are not installed
        warnings.simplefilter("ignore")
        difference = largest_difference(small_model(raw))
    assert (difference < 1e-4) == (leaks_because(shape_of(raw)) is None), f"{name}: {difference:.1e}"


@pytest.mark.parametrize("name", QUICK)
def test_a_class_keeps_examples_apart_where_the_table_says_so(name: str) -> None:
    check(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in QUICK])
def test_every_other_class_keeps_examples_apart_where_the_table_says_so(name: str) -> None:
    check(name)


def test_every_type_that_is_estimated_or_traced_is_in_the_table() -> None:
    types = {shape_of(raw).model_type for raw in CONFIGS.values()}
    assert types == KEEP_APART | ENTANGLED
    assert not KEEP_APART & ENTANGLED
    text_alone = {*DECODERS} - {"gemma3", "gemma4"}
    assert text_alone - types == {*REMOTE_CODE_TYPES, *WITHOUT_CLASS}


@pytest.mark.parametrize("name", ["gpt_oss", "lfm2", "bloom", BIASED])
def test_both_engines_refuse_a_class_that_does_not_by_name(name: str) -> None:
    shape = shape_of(CONFIGS[name])
    config = packed(attention="eager")
    with pytest.raises(UnsupportedError, match=f"is a {shape.model_type}: ") as estimated:
        estimate_memory(config, shape)
    with pytest.raises(UnsupportedError) as traced:
        require_rows_apart(config, shape)
    for caught in (estimated, traced):
        assert [(p.field, p.hint) for p in caught.value.problems] == [("batch.packing", "Set batch.packing: false.")]
    require_rows_apart(config.with_(batch=config.batch.with_(packing=False)), shape)


def test_what_nobody_has_checked_is_refused_too() -> None:
    with pytest.raises(UnsupportedError, match="nobody has checked"):
        require_rows_apart(packed(), shape_of(CONFIGS["llama"]).with_(model_type="novel"))


def test_other_loops_and_the_flash_attn_package_are_refused_with_packed_rows() -> None:
    require_runnable(packed(), FORETUNE)
    for config, stack in ((packed(), PROFILES["trainer"]), (packed(attention="flash_attention_2"), FORETUNE)):
        with pytest.raises(UnsupportedError) as caught:
            require_runnable(config, stack)
        assert [problem.field for problem in caught.value.problems] == ["batch.packing"]


def packed(**fields: Any) -> TrainingConfig:
    batch = {"micro_batch_size": 2, "sequence_length": 64, "packing": True}
    model = {"id": "test/model"}
    return TrainingConfig.create(model=model, precision={"dtype": "bf16"}, batch=batch, lora={}, **fields)
