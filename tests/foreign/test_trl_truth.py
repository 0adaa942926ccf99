"""Files for `trl sft` by TRL's own parser (TRL 1.16, of no extra): what it reads is what is imported.

make trl
"""

from pathlib import Path
from typing import Any

import pytest

from foretune.foreign import import_config

pytestmark = pytest.mark.trl

FILES = sorted((Path(__file__).parent / "configs/trl").glob("*.yaml"))
OURS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def parsed(file: Path, folder: Path) -> tuple[Any, Any, Any]:
    """Return TRL's arguments of script, training and model."""
    from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    arguments = ["--config", str(file), "--use_cpu", "--output_dir", str(folder)]
    script, training, model, _ = parser.parse_args_and_config(arguments, return_remaining_strings=True)
    return script, training, model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_trl_reads_what_is_imported(file: Path, tmp_path: Path) -> None:
    _, training, model = parsed(file, tmp_path)
    imported = import_config(file)
    settings = {one.field: one.value for one in (*imported.settings, *imported.priced)}
    expected: dict[str, Any] = {
        "model.id": model.model_name_or_path,
        "batch.micro_batch_size": training.per_device_train_batch_size,
        "batch.accumulation_steps": training.gradient_accumulation_steps,
        "optimizer.learning_rate": training.learning_rate,
        "optimizer.max_grad_norm": training.max_grad_norm,
        "precision.dtype": OURS[model.dtype],
        "gradient_checkpointing": training.gradient_checkpointing,
        "seed": training.seed,
    }
    if training.max_steps > 0:
        expected["schedule.updates"] = training.max_steps
    else:
        expected["schedule.epochs"] = training.num_train_epochs
    if training.max_length is not None:
        expected["batch.sequence_length"] = training.max_length
    if model.use_peft:
        expected |= {"lora.rank": model.lora_r, "lora.alpha": model.lora_alpha, "lora.dropout": model.lora_dropout}
    assert {field: settings.get(field) for field in expected} == expected
    held_as_computed = imported.stack.autocast == ("bf16" if training.bf16 else "fp16" if training.fp16 else "none")
    assert held_as_computed
