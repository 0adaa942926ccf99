"""The trace against the truth of a CPU: the same step on real tensors, its bytes read off torch's own profiler."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from foretune.contract import TrainingConfig
from foretune.memory.figures import facts_of
from foretune.memory.kernels import NUM_UPDATES
from foretune.models import ModelShape, shape_from_config
from foretune.runtime.adapters import attach_adapters
from foretune.runtime.checkpointing import enable_checkpointing
from foretune.runtime.load import build_model, model_config
from foretune.runtime.loss import IGNORED
from foretune.runtime.optimizer import make_optimizer
from foretune.runtime.step import TrainingStep
from foretune.runtime.trace.cpu_paths import trace_on_cpu
from foretune.runtime.update import Batch, run_update

VOCABULARY = 1000
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 128, "n_head": 4, "n_layer": 2, "bos_token_id": 0, "eos_token_id": 0}
WINDOW = {"sliding_window": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
ROUTER = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MAMBA = {"n_heads": 8, "d_head": 16, "d_state": 16, "expand": 2, "chunk_size": 16, "n_groups": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "tie_word_embeddings": False},
    "qwen3": {**GROUPED, "head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {**GROUPED, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32},
    "gemma3_text": {**GROUPED, **WINDOW, "head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {**GROUPED, **WINDOW},
    "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "phi3": {**COMMON, "num_key_value_heads": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "gpt2": GPT2,
    "gpt_neox": COMMON,
    "falcon": {**COMMON, "alibi": False, "parallel_attn": True, "bias": False, "multi_query": True},
    "qwen3_moe": {**GROUPED, **EXPERTS, "head_dim": 32, "num_experts": 4},
    "deepseek_v3": {**COMMON, **EXPERTS, **LATENT, **ROUTER, "num_key_value_heads": 4},
    "olmo2": {**COMMON, "num_key_value_heads": 4},
    "mamba2": {
        **{key: COMMON[key] for key in ("vocab_size", "num_hidden_layers", "bos_token_id", "eos_token_id")},
        "hidden_size": 64,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "expand": 2,
        "chunk_size": 16,
        "n_groups": 1,
    },
    "granitemoehybrid": {
        **GROUPED,
        **{f"mamba_{key}": value for key, value in MAMBA.items()},
        "hidden_size": 64,
        "intermediate_size": 128,
        "shared_intermediate_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["mamba", "attention"],
        "logits_scaling": 4.0,
        "position_embedding_type": "rope",
    },
}
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "model_type": "llama",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MODELS["SmolLM2-135M"] = SMOLLM2
LORA: dict[str, Any] = {"rank": 8, "targets": "all-linear"}
DROPOUT: dict[str, Any] = {**LORA, "dropout": 0.05}
KEPT: dict[str, Any] = {"gradient_checkpointing": False}
CHUNKED: dict[str, Any] = {"loss": "chunked"}
EAGER: dict[str, Any] = {"attention": "eager"}
FOREACH: dict[str, Any] = {"optimizer": {"implementation": "foreach", "max_grad_norm": None}}
MOMENTUM: dict[str, Any] = {"optimizer": {"name": "sgd", "momentum": 0.9, "implementation": "foreach"}}
SGD: dict[str, Any] = {"optimizer": {"name": "sgd"}}
PACKED: dict[str, Any] = {"batch": {"packing": True}}


class Case(NamedTuple):
    """One small fine-tune: `rows` x `length` tokens, `steps` microsteps an update."""

    model: str
    rows: int
    length: int
    steps: int
    fields: dict[str, Any]

    def __str__(self) -> str:
        words = [self.model, "lora" if "lora" in self.fields else "full"]
        words += [f"{key}={value}" for key, value in self.fields.items() if isinstance(value, (str, bool))]
        chosen = self.fields.get("lora", {})
        words += [word for word in ("dropout", "use_dora", "use_rslora") if chosen.get(word)]
        words += [f"and {name}" for name in chosen.get("modules_to_save", ())]
        words += [f"{key}={value}" for key, value in self.fields.get("optimizer", {}).items() if value is not None]
        words += list(self.fields.get("batch", {}))
        return "-".join([*words, f"{self.rows}x{self.length}x{self.steps}"])

    @property
    def config(self) -> TrainingConfig:
        batch: dict[str, Any] = {"micro_batch_size": self.rows, "sequence_length": self.length}
        batch |= {"accumulation_steps": self.steps, **self.fields.get("batch", {})}
        fields = {"model": {"id": "test/model"}, "precision": {"dtype": "fp32"}, **self.fields, "batch": batch}
        return TrainingConfig.create(**fields)

    @property
    def raw_config(self) -> dict[str, Any]:
        return {"model_type": self.model, **MODELS[self.model]}


CASES = [
    Case("llama", 2, 64, 1, {}),
    Case("llama", 2, 64, 1, {**KEPT, **FOREACH}),
    Case("llama", 1, 100, 3, {"lora": DROPOUT}),
    Case("llama", 4, 128, 1, CHUNKED),
    Case("qwen3", 1, 64, 1, KEPT),
    Case("qwen3", 2, 200, 1, {"lora": DROPOUT, **CHUNKED}),
    Case("qwen3", 2, 64, 3, FOREACH),
    Case("gemma2", 2, 64, 1, EAGER),
    Case("gemma2", 1, 96, 3, {"lora": LORA, **EAGER, **KEPT}),
    Case("gemma2", 3, 200, 1, {**EAGER, **CHUNKED}),
    Case("phi3", 2, 64, 1, {**KEPT, **SGD}),
    Case("phi3", 2, 64, 3, {"lora": DROPOUT}),
    Case("gpt2", 2, 64, 1, {}),
    Case("gpt2", 1, 64, 3, {"lora": {**DROPOUT, "targets": ["c_attn", "c_proj"]}, **KEPT}),
    Case("gpt2", 3, 100, 1, {**KEPT, **CHUNKED, **MOMENTUM}),
    Case("gpt_neox", 2, 64, 3, KEPT),
    Case("gpt_neox", 1, 200, 1, {"lora": DROPOUT}),
    Case("falcon", 2, 64, 1, KEPT),
    Case("falcon", 1, 96, 3, {"lora": DROPOUT}),
    Case("falcon", 4, 80, 1, {**CHUNKED, "lora": LORA}),
    Case("qwen3_moe", 2, 64, 1, KEPT),
    Case("qwen3_moe", 1, 64, 3, {}),
    Case("qwen3_moe", 2, 64, 1, {"lora": {**DROPOUT, "targets": "attention"}}),
    Case("qwen3_moe", 4, 80, 1, CHUNKED),
    Case("deepseek_v3", 4, 80, 1, CHUNKED),
    Case("granitemoehybrid", 4, 80, 1, CHUNKED),
    Case("deepseek_v3", 2, 64, 1, {}),
    Case("deepseek_v3", 1, 64, 3, {"lora": {**LORA, "targets": ["o_proj", "q_a_proj", "kv_b_proj"]}, **KEPT}),
    Case("olmo2", 2, 64, 1, KEPT),
    Case("olmo2", 2, 150, 1, {"lora": DROPOUT, **CHUNKED}),
    Case("mamba2", 2, 64, 1, EAGER),
    Case("mamba2", 1, 48, 3, {**EAGER, **KEPT}),
    Case("mamba2", 4, 80, 1, {**EAGER, **CHUNKED}),
    Case("granitemoehybrid", 2, 64, 1, {}),
    Case("granitemoehybrid", 1, 48, 3, KEPT),
    Case("llama", 2, 64, 1, {"lora": {**LORA, "use_dora": True}}),
    Case("qwen3", 2, 48, 3, {"lora": {**DROPOUT, "use_dora": True}, **KEPT}),
    Case("llama", 2, 64, 1, {"lora": {**LORA, "use_rslora": True}}),
    Case("llama", 2, 64, 1, {"lora": {**LORA, "modules_to_save": ["lm_head", "embed_tokens"]}}),
    Case("llama", 1, 100, 3, {"lora": {**LORA, "modules_to_save": ["embed_tokens"]}, **KEPT}),
    Case("llama", 2, 96, 1, {"lora": {**LORA, "modules_to_save": ["lm_head"]}, **CHUNKED}),
    Case("llama", 2, 64, 1, PACKED),
    Case("llama", 1, 100, 3, {**PACKED, **EAGER, **KEPT, "lora": DROPOUT}),
    Case("qwen3", 1, 64, 1, {**PACKED, **KEPT}),
    Case("qwen3", 2, 96, 1, {**PACKED, **EAGER, **CHUNKED}),
    Case("gemma3_text", 2, 64, 1, PACKED),
    Case("gemma3_text", 1, 96, 1, {**PACKED, **EAGER, **KEPT}),
    Case("mistral", 2, 64, 3, {**PACKED, "lora": LORA}),
    Case("mistral", 2, 64, 1, {**PACKED, **EAGER, **KEPT}),
    Case("qwen2", 3, 48, 1, {**PACKED, **KEPT}),
    Case("qwen2", 1, 64, 1, {**PACKED, **EAGER}),
    Case("phi3", 2, 64, 1, {**PACKED, "lora": DROPOUT}),
    Case("phi3", 2, 64, 1, {**PACKED, **EAGER, **KEPT}),
    Case("olmo2", 2, 64, 1, PACKED),
    Case("olmo2", 1, 64, 1, {**PACKED, **EAGER, **KEPT}),
    Case("gpt2", 2, 64, 1, PACKED),
]
REAL = [
    Case("SmolLM2-135M", 2, 128, 1, {"lora": LORA}),
    Case("SmolLM2-135M", 1, 128, 2, {"lora": DROPOUT, **KEPT, **CHUNKED}),
    Case("SmolLM2-135M", 1, 64, 1, {}),
    Case("SmolLM2-135M", 2, 128, 1, {**PACKED, "lora": LORA}),
]
"""The width and depth of a real model."""
SCALAR_BYTES = 64
"""A CPU keeps Python's numbers as tensors of 4 and 8 bytes; births up to this size are not compared one by one."""


class Measured(NamedTuple):
    """What the profiler saw, under the names of a CpuTrace."""

    resident_bytes: int
    peak_bytes: int
    events: list[int]


@pytest.fixture(autouse=True, scope="module")
def libraries_are_not_collected() -> Iterator[None]:
    """The collector would walk all of torch and Transformers four times a case."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def measure(case: Case) -> Measured:
    shape = shape_of(case)
    gc.collect()
    with one_thread(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = train(case.config, shape, case.raw_config)
        with record_function("end"):
            del kept
    results: Any = profiler.profiler
    return read(results.kineto_results.experimental_event_tree())


@contextmanager
def one_thread() -> Iterator[None]:
    """Kernels have workspaces for each thread; a death must come from a reference count, not from the collector."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)


def train(config: TrainingConfig, shape: ModelShape, raw_config: dict[str, Any]) -> tuple[Any, ...]:
    """Two updates of the runtime's own step on real tensors. Returns what must outlive them."""
    torch.manual_seed(0)
    made = model_config(raw_config, attention=config.attention)
    base = build_model(made, dtype=torch.float32, device="cpu", attention=config.attention)
    step = TrainingStep(base, base, is_chunked=config.loss == "chunked")
    if config.lora is not None:
        step.model = attach_adapters(base, config.lora, [p.name for p in facts_of(config, shape).adapted])
    if config.gradient_checkpointing:
        enable_checkpointing(base)
    step.model.train()
    trained = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(config.optimizer, trained)
    gc.collect()
    with record_function("begin"):
        pass
    for _ in range(NUM_UPDATES):
        batches = (batch_of(config) for _ in range(config.batch.accumulation_steps))
        run_update(step, batches, 10, optimizer, config.optimizer, trained)
    return step, optimizer


def batch_of(config: TrainingConfig) -> Batch:
    """Random tokens; the last third of each row is padding, and where rows are packed the first two are examples."""
    size = config.batch.micro_batch_size, config.batch.sequence_length
    ids_BS, targets_BS = torch.randint(VOCABULARY, size), torch.randint(VOCABULARY, size)
    targets_BS[:, size[1] * 2 // 3 :] = IGNORED
    if not config.batch.packing:
        return Batch(ids_BS, targets_BS)
    positions = [place % -(-size[1] // 3) for place in range(size[1])]
    return Batch(ids_BS, targets_BS, torch.tensor([positions] * size[0]))


def read(tree: list[Any]) -> Measured:
    """Follow the addresses: births and deaths between the marks `begin` and `end`, and what was alive before."""
    found, todo = [], list(tree)
    while todo:
        event = todo.pop()
        todo.extend(event.children)
        found.append(event)
    found.sort(key=lambda event: event.start_time_ns)
    names = [event.name for event in found]
    begin, end = names.index("begin"), names.index("end")
    alive: dict[int, int] = {}
    resident, events = 0, []
    for position, event in enumerate(found[:end]):
        if event.tag != _EventType.Allocation:
            continue
        size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
        if size > 0:
            alive[address] = size
        else:
            size = -alive.pop(address, 0)  # what was born before the profiler began is none of ours
        if position < begin:
            resident += size
        else:
            events.append(size)
    return Measured(resident, resident + max(accumulate(events)), events)


def shape_of(case: Case) -> ModelShape:
    return shape_from_config(case.raw_config, id="test/model", source="file")


def canonical(events: list[int]) -> list[int]:
    return [size for size in events if abs(size) > SCALAR_BYTES]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in REAL)], ids=str)
def test_the_traced_peak_is_the_profilers_and_so_is_every_event(case: Case) -> None:
    traced, measured = trace_on_cpu(case.config, shape_of(case), case.raw_config), measure(case)
    assert abs(traced.resident_bytes - measured.resident_bytes) <= 1e-4 * measured.resident_bytes
    assert abs(traced.peak_bytes - measured.peak_bytes) <= 1e-3 * measured.peak_bytes
    if "mamba" not in case.model and "hybrid" not in case.model:  # convolutions' workspaces are left out
        assert canonical(traced.events) == canonical(measured.events)
