"""The trace of TRL's SFTTrainer against the real one. TRL brings pyarrow and pandas, 250 MB: `make trl` fetches it."""

from pathlib import Path
from typing import Any

import pytest
from runtime.test_cpu_truth import LORA, MODELS, Case, canonical, shape_of
from runtime.test_trainer_truth import CASES, FP32, KEPT, OnHost, measure, model_of, settings_of

from foretune.memory.kernels import NUM_UPDATES
from foretune.memory.stack import TRL
from foretune.runtime.trace.cpu_paths import trace_on_cpu

pytestmark = [
    pytest.mark.trl,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


def sft_trainer_of(case: Case, out: Path, batch: OnHost, **more: Any) -> Any:
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>"))
    rows = [[1, 1]] * case.steps * NUM_UPDATES
    data = Dataset(InMemoryTable.from_pydict({"input_ids": rows, "labels": rows}), fingerprint="rows")
    arguments = SFTConfig(
        gradient_checkpointing=case.config.gradient_checkpointing,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        **settings_of(case, out),
        **more,
    )
    return SFTTrainer(
        model=model_of(case),
        args=arguments,
        train_dataset=data,
        data_collator=lambda _: batch,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>"),
    )


BALANCED = [
    Case("qwen3_moe", 2, 64, 1, KEPT),
    Case("qwen3_moe", 1, 64, 3, {"lora": {**LORA, "targets": "attention"}}),
]


@pytest.mark.parametrize("case", [*CASES, *BALANCED], ids=str)
def test_the_traced_peak_is_the_real_sft_trainers(case: Case, tmp_path: Path) -> None:
    traced = trace_on_cpu(case.config, shape_of(case), case.raw_config, TRL.with_(**FP32, has_triton=False))
    measured = measure(case, tmp_path, sft_trainer_of, bf16=False)
    assert abs(traced.peak_bytes - measured.peak_bytes) <= 1e-3 * measured.peak_bytes
    assert canonical(traced.events) == canonical(measured.events)


def test_trls_tiles_are_traced_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two tiles of words; the head is trained, so that both sums of products are there."""
    monkeypatch.setitem(MODELS, "llama", {**MODELS["llama"], "vocab_size": 33_000})
    case = Case("llama", 1, 40, 1, KEPT)
    traced = trace_on_cpu(case.config, shape_of(case), case.raw_config, TRL.with_(**FP32, has_triton=False))
    assert canonical(traced.events) == canonical(measure(case, tmp_path, sft_trainer_of, bf16=False).events)
