"""The parts of a run by themselves: fingerprints, micro batches, the loss scale of fp16, whole files."""

import json
import os
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs.made_run import configured
from torch import Tensor, nn

from foretune import durable
from foretune.contract import BatchSettings, OptimizerSettings
from foretune.data import EncodedRows, Example, StoreWriter, open_store
from foretune.durable import publish_folder, replace_file, staged, verify_folder
from foretune.errors import NonFiniteLossError, RunDirectoryError, SaveError
from foretune.runtime.digest import digest, sha256_of
from foretune.runtime.feed import Feed, Rows, on_device
from foretune.runtime.optimizer import make_optimizer
from foretune.runtime.run_folder import open_run
from foretune.runtime.update import Batch, run_update

# -- fingerprints


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int8]),
    st.data(),
)
def test_a_change_of_one_element_or_two_changes_the_fingerprint(size: int, dtype: torch.dtype, data: Any) -> None:
    values = torch.arange(size).remainder(97).to(dtype)
    before, one = digest(values), data.draw(st.integers(0, size - 1))
    assert digest(values.clone()) == before
    changed = values.clone()
    changed[one] += 1
    assert digest(changed) != before
    other = data.draw(st.integers(0, size - 1))
    if values[one] != values[other]:
        swapped = values.clone()
        swapped[one], swapped[other] = values[other].clone(), values[one].clone()
        assert digest(swapped) != before


def test_a_fingerprint_knows_the_sign_of_zero_and_a_tensor_in_strides() -> None:
    zeros = torch.zeros(4)
    assert digest(zeros) != digest(-zeros)
    table = torch.arange(12.0).view(3, 4)
    assert digest(table.t()) == digest(table.t().contiguous())
    assert sha256_of([("a", table)]) != sha256_of([("b", table)]) != sha256_of([("b", table.view(4, 3))])


# -- micro batches


def feed_of(folder: Path, lengths: list[int], **batch: Any) -> Feed:
    examples = [
        Example(number + 1, array("I", range(1, length + 1)), bytes([0] + [1] * (length - 1)), 0)
        for number, length in enumerate(lengths)
    ]
    with StoreWriter(folder) as writer:
        writer.append(EncodedRows.of(examples))
        writer.publish(folder / "store", {})
    config = configured(folder).config
    return Feed(
        Rows(open_store(folder / "store"), array("I", lengths)),
        config.with_(batch=BatchSettings.create(**{"sequence_length": 16, **batch})),
        0,
    )


def test_every_row_is_in_one_micro_batch_of_each_epoch_and_none_is_wider_than_the_widest(tmp_path: Path) -> None:
    lengths = [3, 7, 2, 9, 4, 4, 6]
    feed = feed_of(tmp_path, lengths, micro_batch_size=2)
    widest = feed.widest_shape()
    assert (widest.rows, widest.tokens, feed.batches_per_epoch) == (2, 9, 4)
    for epoch in range(3):
        rows = [number for batch in feed.plan(epoch) for row in batch for number in row]
        assert sorted(rows) == list(range(7))
        for batch in feed.plan(epoch):
            host = feed.batch(batch)
            assert len(host.input_ids) * len(host.input_ids[0]) <= widest.rows * widest.tokens
    assert [number for batch in feed.evaluation_batches() for (number,) in batch] == [3, 1, 6, 4, 5, 0, 2]


def test_targets_are_labels_shifted_by_one_and_positions_go_with_packed_rows_alone(tmp_path: Path) -> None:
    feed = feed_of(tmp_path, [3, 4], micro_batch_size=1, packing=True)
    host = feed.batch(((0, 1),))
    packed = on_device(host, torch.device("cpu"), feed.config.batch)
    assert packed.input_ids_BS.tolist() == [[1, 2, 3, 1, 2, 3, 4]]
    assert packed.position_ids_BS is not None
    assert packed.position_ids_BS.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert packed.targets_BS.tolist() == [[2, 3, -100, 2, 3, 4, -100]]
    assert int((packed.targets_BS != -100).sum()) == host.num_supervised == 5
    alone = on_device(host, torch.device("cpu"), feed.config.batch.with_(packing=False))
    assert alone.position_ids_BS is None


# -- the loss scale of fp16


class Line(nn.Module):
    """A step of two weights; `factor` makes its gradients overflow."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.tensor([1.0, 2.0])), factor

    def forward(self, input_ids_BS: Tensor, targets_BS: Tensor, _: Tensor | None) -> Tensor:
        return (self.weight * input_ids_BS - targets_BS).square().sum() * self.factor


def updated(step: Line, scaler: torch.amp.GradScaler | None) -> tuple[Any, list[float]]:
    asked = OptimizerSettings.create(name="sgd", learning_rate=0.1, implementation="foreach")
    batches = [Batch(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0]]))]
    trained = list(step.parameters())
    optimizer = make_optimizer(asked, trained)
    done = run_update(step, batches, 2, optimizer, asked, trained, scaler=scaler)  # type: ignore[arg-type]
    return done, step.weight.tolist()


def test_a_scaled_update_is_the_plain_one() -> None:
    plain, weights = updated(Line(), None)
    scaled, same = updated(Line(), torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert same == pytest.approx(weights, rel=1e-6)
    assert scaled.losses == plain.losses
    assert scaled.gradient_norm == pytest.approx(plain.gradient_norm)
    assert not scaled.was_skipped


def test_an_update_that_overflows_is_skipped_and_the_scale_is_halved() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    done, weights = updated(Line(2.0**70), scaler)
    assert (done.was_skipped, done.gradient_norm, weights) == (True, None, [1.0, 2.0])
    assert scaler.get_scale() == 2.0**59


def test_a_loss_that_is_no_number_is_no_overflow() -> None:
    with pytest.raises(NonFiniteLossError):
        updated(Line(float("inf")), torch.amp.GradScaler("cpu"))


# -- the disk


@pytest.mark.parametrize(("mask", "folder", "file"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600)], ids=oct)
def test_a_folder_is_published_whole_with_the_permissions_that_new_files_have(
    tmp_path: Path, mask: int, folder: int, file: int
) -> None:
    tmp_path.chmod(0o777)  # as /tmp: who may write there may not therefore write here
    before = os.umask(mask)
    try:
        final = published(tmp_path)
    finally:
        os.umask(before)
    assert final.stat().st_mode & 0o777 == folder
    assert {path.stat().st_mode & 0o777 for path in final.iterdir()} <= {file, 0o644 & ~mask}


def published(tmp_path: Path) -> Path:
    final = tmp_path / "artifact"
    with staged(final) as draft:
        (draft / "weights").write_bytes(b"abc")
        publish_folder(draft, final)
    return final


def test_a_folder_is_published_whole(tmp_path: Path) -> None:
    final = tmp_path / "artifact"
    with staged(final) as draft:
        (draft / "weights").write_bytes(b"abc")
        assert not final.exists()
        publish_folder(draft, final)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact"]
    assert json.loads((final / "manifest.json").read_text())["weights"]["size"] == 3
    verify_folder(final)
    (final / "weights").write_bytes(b"abd")
    with pytest.raises(SaveError, match="differs from its manifest"):
        verify_folder(final)


def test_a_name_that_is_taken_is_refused_even_by_an_empty_folder(tmp_path: Path) -> None:
    final = tmp_path / "artifact"
    with staged(final) as draft:
        final.mkdir()
        with pytest.raises(SaveError, match="exists already"):
            publish_folder(draft, final)
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


def test_a_record_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    replace_file(path, b"one")

    def at(point: str) -> None:
        if point.startswith("replace"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable, "at", at)
    with pytest.raises(OSError, match="Input/output"):
        replace_file(path, b"two")
    assert path.read_bytes() == b"one"
    monkeypatch.undo()
    replace_file(path, b"three")
    assert path.read_bytes() == b"three"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_a_run_is_not_begun_through_a_link_or_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "file").write_text("")
    for name, words in (("link", "symbolic link"), ("file", "is a file")):
        with pytest.raises(RunDirectoryError, match=words), open_run(tmp_path / name, resumes=False):
            pass


def test_the_second_process_is_told_who_holds_a_folder(tmp_path: Path) -> None:
    with (
        open_run(tmp_path / "run", resumes=False),
        pytest.raises(RunDirectoryError, match="is busy"),
        open_run(tmp_path / "run", resumes=False),
    ):
        pass
