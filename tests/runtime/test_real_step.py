"""The step on real tensors: its numbers against Transformers' own, and against itself in other arrangements."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretune.contract import LoraSettings, OptimizerSettings
from foretune.errors import MissingDependencyError, UnsupportedError
from foretune.runtime.adapters import attach_adapters
from foretune.runtime.checkpointing import enable_checkpointing
from foretune.runtime.load import build_model, model_config
from foretune.runtime.loss import IGNORED, liger_loss_sum, probe_head_map
from foretune.runtime.optimizer import make_optimizer
from foretune.runtime.step import TrainingStep
from foretune.runtime.update import Batch, run_update

VOCABULARY = 199
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 48, "n_head": 4, "n_layer": 2, "bos_token_id": 0, "eos_token_id": 0}
SILENT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "model_type": "llama"},
    "qwen3": {**COMMON, "model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True},
    "gemma2": {**COMMON, "model_type": "gemma2", "head_dim": 12, "final_logit_softcapping": 2.0, "sliding_window": 8},
    "granite": {**COMMON, "model_type": "granite", "logits_scaling": 4.0},
    "cohere": {**COMMON, "model_type": "cohere", "logit_scale": 0.25},
    "gpt2": {**GPT2, **SILENT, "model_type": "gpt2"},
}
SETTINGS = OptimizerSettings(learning_rate=1e-2)
NUM_TRAINER_UPDATES = 20


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are made in one order, whatever the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def real_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    attention = "eager" if name == "gemma2" else "sdpa"
    torch.manual_seed(1)
    made = model_config(MODELS[name], attention=attention)
    return build_model(made, dtype=dtype, device="cpu", attention=attention).train()


def real_step(name: str, *, is_chunked: bool = False) -> TrainingStep:
    base = real_model(name)
    return TrainingStep(base, base, is_chunked=is_chunked)


def rows_of(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor], num_unsupervised: int = 0) -> Batch:
    """Rows padded on the right, targets shifted; the first tokens of each row and the padding carry no loss."""
    longest = max(len(row) for row in rows)
    ids_BS = torch.zeros(len(rows), longest, dtype=torch.long)
    targets_BS = torch.full((len(rows), longest), IGNORED)
    for number, row in enumerate(rows):
        ids_BS[number, : len(row)] = row
        targets_BS[number, num_unsupervised : len(row) - 1] = row[num_unsupervised + 1 :]
    return Batch(ids_BS, targets_BS)


def count_targets(batches: list[Batch]) -> int:
    return sum(int((batch.targets_BS != IGNORED).sum()) for batch in batches)


def update_with(step: TrainingStep, batches: list[Batch], num_updates: int = 3) -> list[float]:
    """Train on the same batches; returns the mean loss of each update."""
    trained = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
    optimizer, num_targets = make_optimizer(SETTINGS, trained), count_targets(batches)
    return [
        sum(run_update(step, batches, num_targets, optimizer, SETTINGS, trained).losses) for _ in range(num_updates)
    ]


# -- against Transformers
def test_the_losses_and_weights_of_twenty_updates_are_the_stock_trainers(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    seen: list[tuple[Tensor, Tensor]] = []
    losses: list[float] = []

    def collate(rows: list[Tensor]) -> dict[str, Tensor]:
        ids_BS = padded(rows).input_ids_BS
        labels_BS = ids_BS.where(ids_BS != 0, IGNORED)
        seen.append((ids_BS, labels_BS))
        return {"input_ids": ids_BS, "labels": labels_BS}

    class Recorded(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    lengths = [5 + 3 * number % 11 for number in range(2 * NUM_TRAINER_UPDATES)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=NUM_TRAINER_UPDATES,
        learning_rate=SETTINGS.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=SETTINGS.max_grad_norm,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    stock = real_model("llama")
    Recorded(model=stock, args=arguments, train_dataset=rows_of(lengths), data_collator=collate).train()

    step = real_step("llama")
    trained = list(step.model.parameters())
    optimizer = make_optimizer(SETTINGS, trained)
    own = []
    for ids_BS, labels_BS in seen[:NUM_TRAINER_UPDATES]:
        targets_BS = nn.functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORED)
        batches = [Batch(ids_BS, targets_BS)]
        own += run_update(step, batches, count_targets(batches), optimizer, SETTINGS, trained).losses
    assert own == pytest.approx(losses, rel=1e-5)
    for mine, theirs in zip(trained, stock.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_summed_loss_and_its_gradients_are_the_models_own(name: str) -> None:
    ids_BS, targets_BS, _ = padded(rows_of([9, 14]), num_unsupervised=2)
    step, stock = real_step(name), real_model(name)
    loss = step(ids_BS, targets_BS) / count_targets([Batch(ids_BS, targets_BS)])
    loss.backward()
    labels_BS = nn.functional.pad(targets_BS[:, :-1], (1, 0), value=IGNORED)
    expected = stock(input_ids=ids_BS, labels=labels_BS).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert_same_gradients(step.model, stock)


def assert_same_gradients(one: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            scale = max(float(theirs.grad.abs().max()), 1e-6)
            torch.testing.assert_close(mine.grad / scale, theirs.grad / scale, rtol=0, atol=tolerance, msg=name)


# -- against itself
def test_four_microsteps_are_one_large_batch_whatever_the_rows_lengths() -> None:
    rows = rows_of([4, 23, 9, 16])
    large, accumulated = real_step("llama"), real_step("llama")
    losses = update_with(large, [padded(rows, num_unsupervised=2)])
    assert update_with(accumulated, [padded([row], num_unsupervised=2) for row in rows]) == pytest.approx(
        losses, rel=1e-5
    )
    for one, other in zip(large.parameters(), accumulated.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_chunked_loss_and_its_gradients_are_the_stock_ones(name: str) -> None:
    batch = padded(rows_of([200, 150, 177, 30]), num_unsupervised=3)  # 800 tokens: four chunks
    stock, chunked = real_step(name), real_step(name, is_chunked=True)
    loss, expected = chunked(*batch), stock(*batch)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert_same_gradients(chunked.model, stock.model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_fused_loss_is_given_what_the_stock_one_is_made_of(name: str) -> None:
    def fused(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, bias_V: Tensor | None) -> Tensor:
        logits_TV = torch.nn.functional.linear(hidden_TH, weight_VH, bias_V)
        return torch.nn.functional.cross_entropy(logits_TV, targets_T, reduction="sum")

    batch = padded(rows_of([20, 15, 17]), num_unsupervised=3)
    stock, base = real_step(name), real_model(name)
    step = TrainingStep(base, base, is_chunked=False, fused_loss=fused)
    loss, expected = step(*batch), stock(*batch)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert_same_gradients(base, stock.model)


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_a_fused_loss_is_refused_where_logits_are_changed(name: str) -> None:
    base = real_model(name)
    with pytest.raises(UnsupportedError, match="changes its logits"):
        TrainingStep(base, base, is_chunked=False, fused_loss=lambda *_: torch.zeros(()))


def test_liger_that_is_not_there_is_named() -> None:
    with pytest.raises(MissingDependencyError, match="liger-kernel"):
        liger_loss_sum(torch.zeros(2, 4), torch.zeros(8, 4), torch.zeros(2, dtype=torch.long), None)


@pytest.mark.parametrize(
    ("name", "head_map", "factor"),
    [("llama", "identity", 1.0), ("gemma2", "soft-cap", 2.0), ("granite", "divide", 4.0), ("cohere", "multiply", 0.25)],
)
def test_probing_finds_what_follows_the_head(name: str, head_map: str, factor: float) -> None:
    found = probe_head_map(real_model(name))
    assert (found.name, found.factor) == (head_map, factor)


def test_a_model_that_changes_its_logits_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = real_model("granite")
    original = type(model).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        outputs.logits = outputs.logits.sin()
        return outputs

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(UnsupportedError, match="GraniteForCausalLM changes its logits"):
        probe_head_map(model)


def test_probing_leaves_the_model_as_it_was() -> None:
    model = real_model("gemma2")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    modules = list(model.named_modules())
    probe_head_map(model)
    assert list(model.named_modules()) == modules
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def with_adapters(base: nn.Module, dropout: float = 0.0) -> TrainingStep:
    targets = ["q_proj", "v_proj", "down_proj"]
    torch.manual_seed(2)
    model = attach_adapters(base, LoraSettings(rank=4, dropout=dropout), targets)
    return TrainingStep(model.train(), base, is_chunked=False)


def test_adapters_are_fp32_and_learn_while_the_bf16_base_stays() -> None:
    base = real_model("llama", torch.bfloat16)
    frozen = {id(parameter): parameter.clone() for parameter in base.parameters()}
    step = with_adapters(base)
    trained = {name: p.clone() for name, p in step.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name and p.dtype is torch.float32 for name, p in trained.items())
    losses = update_with(step, [padded(rows_of([12, 17]))])
    assert losses[-1] < losses[0]
    parameters = dict(step.model.named_parameters())
    assert any(not torch.equal(parameters[name], before) for name, before in trained.items())
    assert all(torch.equal(p, frozen[id(p)]) for p in parameters.values() if not p.requires_grad)
    assert all(p.grad is None for p in parameters.values())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_changes_no_loss(dropout: float) -> None:
    batches = [padded(rows_of([12, 17])), padded(rows_of([8, 5], seed=1))]
    losses = []
    for is_checkpointed in (False, True):
        step = with_adapters(real_model("llama"), dropout)
        if is_checkpointed:
            enable_checkpointing(step.base)
        torch.manual_seed(3)
        losses.append(update_with(step, batches))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", MODELS)
def test_padding_on_the_right_without_a_mask_changes_no_loss(name: str) -> None:
    rows = rows_of([5, 31, 18])
    step = real_step(name)
    with torch.no_grad():
        alone = sum(step(*padded([row])) for row in rows)
        together = step(*padded(rows))
    torch.testing.assert_close(together, alone)
