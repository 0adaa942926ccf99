"""Templates of the dense and classic families: what is recorded for a few layers is emitted for all."""

from typing import Any

import pytest
from memory.runs import all_layers, shape_of, templated

from foretune.contract import TrainingConfig, build_config
from foretune.memory import estimate_memory
from foretune.memory.families import DECODERS
from foretune.memory.templates import Recording
from foretune.models import REMOTE_CODE_TYPES

NUM_LAYERS = 9
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "num_hidden_layers": NUM_LAYERS,
}
LONG = 18
MIXED = ["sliding_attention", "full_attention", "full_attention"] * 6
CHANGES: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": NUM_LAYERS, "n_head": 4},
    "codegen": {"n_embd": 64, "n_head": 4, "n_layer": NUM_LAYERS, "rotary_dim": 8},
    "cohere2": {"num_hidden_layers": LONG, "sliding_window": 8, "layer_types": MIXED},
    "cwm": {"num_hidden_layers": LONG, "sliding_window": 8, "layer_types": MIXED, "head_dim": 16},
    "exaone4": {"num_hidden_layers": LONG, "sliding_window": 8, "layer_types": MIXED},
    "falcon": {"alibi": True, "multi_query": False, "parallel_attn": False},
    "gpt_bigcode": {"n_embd": 64, "n_head": 4, "n_layer": NUM_LAYERS, "n_positions": 64},
    "gpt_neo": {
        "num_hidden_layers": LONG,
        "num_heads": 4,
        "max_position_embeddings": 64,
        "attention_types": [[["local", "global", "global"], 6]],
    },
    "granite_swa": {"num_hidden_layers": LONG, "sliding_window": 8, "layer_types": MIXED},
    "helium": {"head_dim": 16},
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": NUM_LAYERS, "rotary_dim": 8},
    "ministral": {"num_hidden_layers": LONG, "sliding_window": 8, "layer_types": MIXED, "head_dim": 16},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": NUM_LAYERS, "max_seq_len": 64},
    "olmo3": {"num_hidden_layers": LONG, "sliding_window": 8, "layer_types": MIXED},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "xglm": {"d_model": 64, "attention_heads": 4, "num_layers": NUM_LAYERS, "ffn_dim": 128},
}
"""What a small model of the type needs beside SMALL; windows are mixed where the family has them."""
TYPES = """
    apertus arcee bitnet bloom codegen cohere cohere2 cwm ernie4_5 exaone exaone4 falcon glm glm4 gpt_bigcode gpt_neo
    gptj granite granite_swa helium hunyuan_v1_dense hyperclovax internlm3 jais2 ministral ministral3 mpt nanochat
    nemotron olmo olmo3 opt persimmon phi seed_oss stablelm starcoder2 xglm
""".split()  # noqa: SIM905 - a table


def config(method: str, *overrides: str, attention: str = "eager") -> TrainingConfig:
    changes = ["batch.accumulation_steps=3", "batch.sequence_length=32", f"attention={attention}", *overrides]
    return build_config({"model.id": "a/model"}, overrides=changes, method=method).config


@pytest.mark.parametrize("method", ["full", "qlora"])
@pytest.mark.parametrize("model_type", TYPES)
def test_templates_of_dense_and_classic_families_emit_what_recording_every_layer_does(
    model_type: str, method: str
) -> None:
    shape = shape_of({**SMALL, "model_type": model_type, **CHANGES.get(model_type, {})})
    chosen = config(method, f"gradient_checkpointing={str(method == 'full').lower()}")
    short, whole = templated(chosen, shape), Recording.of(*all_layers(chosen, shape))
    assert shape.num_layers in (NUM_LAYERS, LONG)
    assert short.expand() == whole.expand()
    assert short.walk() == whole.walk()
    assert len(short.stand_ins.recorded) < shape.num_layers


@pytest.mark.parametrize("model_type", [name for name, known in REMOTE_CODE_TYPES.items() if known in DECODERS])
def test_a_remote_code_type_says_whose_program_it_is_given(model_type: str) -> None:
    answer = estimate_memory(config("lora"), shape_of({**SMALL, "model_type": model_type}))
    known = estimate_memory(config("lora"), shape_of({**SMALL, "model_type": REMOTE_CODE_TYPES[model_type]}))
    assert answer.allocated_bytes == known.allocated_bytes
    assert any(f"no class for {model_type}" in text for text in answer.assumptions)
