"""Wrong uses of every command, and the faults that some of them need; each has one error that says what to do next.

A case is a command as it is typed in the folder that `prepare` makes, and what is hidden, planted or full meanwhile.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from data.made import made_tokenizer
from runs.made_run import copy_model, write_config, write_rows
from safetensors.torch import load_file

from foretune.models import hub

__all__ = ["CASES", "Case", "prepare"]

Fault = Callable[[pytest.MonkeyPatch], None]


class Case(NamedTuple):
    """A wrong use: what is typed, and what is the matter with the machine (None: nothing)."""

    line: str
    fault: Fault | None = None
    encodes: bool = False
    """Whether rows are encoded, by another process that takes a second to start."""


# -- faults --------------------------------------------------------------------------------------------------------


def without(*hidden: str) -> Fault:
    """Hide libraries."""
    return versions(dict.fromkeys(hidden))


def versions(planted: dict[str, str | None]) -> Fault:
    """Let libraries have other versions, or none."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        from importlib.metadata import PackageNotFoundError

        from foretune.runtime import libraries

        version = libraries.version

        def found(name: str) -> str:
            if name not in planted:
                return version(name)
            other = planted[name]
            if other is None:
                raise PackageNotFoundError(name)
            return other

        patch.setattr(libraries, "version", found)

    return fault


def hub_answers(status: int, code: str | None = None, *, had_token: bool = True) -> Fault:
    """Let the hub answer, at the border where it is asked."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        patch.delenv("HF_HUB_OFFLINE")
        patch.setattr(hub, "_get", lambda _: hub.Answer(status, code, None, b"", had_token))

    return fault


def hub_unreachable(patch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> hub.Answer:
        raise ConnectionError("Name or service not known")

    patch.delenv("HF_HUB_OFFLINE")
    patch.setattr(hub, "_get", refuse)


def disk_fails(point: str, number: int) -> Fault:
    """Let the disk fail from a point on, whenever something is written."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        reached = []

        def at(here: str) -> None:
            if here == point:
                reached.append(here)
            if reached and not here.startswith("remove"):
                raise OSError(number, os.strerror(number))

        patch.setattr("foretune.durable.at", at)

    return fault


def no_new_files(patch: pytest.MonkeyPatch) -> None:
    """Let a text file be refused, as a folder does in which one may not write (root may write in all others)."""

    def refuse(file: str, *_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), file)

    patch.setattr("foretune.cli.files.open", refuse, raising=False)


def no_new_folders(patch: pytest.MonkeyPatch) -> None:
    """Let folders be refused here, as a read-only file system does."""
    make, here = os.mkdir, Path.cwd()

    def refuse(path: Any, *arguments: Any, **keywords: Any) -> None:
        if not Path(path).absolute().is_relative_to(here):
            return make(path, *arguments, **keywords)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    patch.setattr("os.mkdir", refuse)


def no_card(patch: pytest.MonkeyPatch) -> None:
    """Let no driver answer, whatever this machine has."""
    from foretune import devices
    from foretune.devices.detect import Detection
    from foretune.runtime import preflight

    nothing = Detection((), reason="no NVIDIA driver answers (NVML Shared Library Not Found)")
    patch.setattr(preflight, "detect_devices", lambda: nothing)
    patch.setattr(devices, "detect_devices", lambda: nothing)
    patch.setattr("torch.cuda.is_available", lambda: False)


def busy(patch: pytest.MonkeyPatch) -> None:
    """Let another process hold runs/first."""
    from filelock import FileLock, Timeout

    acquire = FileLock.acquire

    def held(lock: Any, *arguments: Any, **keywords: Any) -> Any:
        if lock.lock_file.endswith("first/lock"):
            raise Timeout(lock.lock_file)
        return acquire(lock, *arguments, **keywords)

    patch.setattr(FileLock, "acquire", held)


# -- the folder ----------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Make everything that the cases are typed beside; the folder is the current one."""
    from foretune.cli.app import run

    model = copy_model(Path())
    write_config(
        Path("run.yaml"), Path(), model=Path("model"), num_rows=8, schedule__epochs=1.0, checkpoint__every_updates=2
    )
    write_config(Path("full.yaml"), Path(), model=Path("model"), lora=None, num_rows=8, schedule__epochs=1.0)
    _rewrite("full.yaml", "runs/first", "runs/full")
    for name in ("run.yaml", "full.yaml"):
        assert run(("train", name)) == 0
    assert run(("merge", "runs/first")) == 0
    shutil.copytree("runs/first", "runs/failed")
    record = json.loads(Path("runs/failed/record.json").read_text())
    Path("runs/failed/record.json").write_text(json.dumps({**record, "outcome": "oom"}))
    shutil.copytree("runs/first", "runs/damaged")
    weights = Path("runs/damaged/adapter/adapter_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    _configs()
    _models(model)
    _rows()
    _foreign()


def _rewrite(name: str, old: str, new: str, to: str | None = None) -> None:
    text = Path(name).read_text()
    assert old in text
    Path(to or name).write_text(text.replace(old, new))


def _configs() -> None:
    Path("typo.yaml").write_text("model: {id: gpt2}\nprecision: {dtype: bf16}\nlora: {rnk: 8}\n")
    Path("broken.yaml").write_text("model: {id: gpt2\nprecision: {dtype: bf16}\n")
    Path("empty.yaml").write_text("")
    Path("bare.yaml").write_text("model: {id: ./model}\nprecision: {dtype: fp32}\ndevice: cpu\n")
    _rewrite("run.yaml", "runs/first", "runs/new", "new.yaml")
    recipe = Path("old-recipe")
    recipe.mkdir()
    shutil.copy("new.yaml", recipe / "config.yaml")
    (recipe / "recipe.json").write_text('{"foretune": "0.0.1"}')
    _rewrite("run.yaml", "runs/first", "runs/failed", "changed.yaml")
    _rewrite("changed.yaml", "learning_rate: 0.01", "learning_rate: 0.02")


def _models(model: Path) -> None:
    import torch

    pickled = Path("pickled")
    shutil.copytree(model, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    quantized = Path("quantized")
    shutil.copytree(model, quantized)
    config = json.loads((quantized / "config.json").read_text())
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": gptq}))
    plain = Path("plain")
    shutil.copytree(model, plain)
    (plain / "chat_template.jinja").unlink()
    shutil.rmtree(plain / "tokenizer", ignore_errors=True)
    made_tokenizer("words").save_pretrained(plain)
    weights = Path("weights-only")
    weights.mkdir()
    shutil.copy(model / "model.safetensors", weights)


def _rows() -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]}
    Path("empty.jsonl").write_text("")
    write_rows(Path("long.jsonl"), [row, {"instruction": "Is it? " * 200, "output": "Yes."}])
    write_rows(Path("role.jsonl"), [row, {"messages": [{"role": "human", "content": "Hi"}, row["messages"][1]]}])
    write_rows(Path("keys.jsonl"), [{"prompt": "Is it?", "completion": "Yes."}])
    Path("array.json").write_text(json.dumps([row, row], indent=1))
    Path("broken.jsonl").write_text(json.dumps(row) + "\n{'messages': []}\n")
    write_rows(Path("sharegpt.jsonl"), [{"conversations": [{"from": "narrator", "value": "Hi"}]}])
    scored = {"instruction": "Is it?", "output": "Yes.", "score": 3}
    write_rows(Path("scored.jsonl"), [scored])


def _foreign() -> None:
    configs = Path(__file__).parents[1] / "foreign/configs"
    shutil.copy(configs / "axolotl/qlora_packed.yml", "axolotl.yml")
    shutil.copy(configs / "llama_factory/lora_chat.yaml", "llama_factory.yaml")
    shutil.copy(configs / "trl/lora.yaml", "trl.yaml")
    shutil.copy(configs / "canifinetune/qlora.yaml", "canifinetune.yaml")
    Path("canifinetune-recipe.yaml").write_text(
        "model_id: gpt2\nmethod: lora\nseq_len: 512\nmicro_batch_size: 1\nsave_steps: 100\n"
    )


# -- the cases -----------------------------------------------------------------------------------------------------

CASES: dict[str, Case] = {
    # typos
    "a command with a typo": Case("foretune estimat --model gpt2"),
    "a subcommand with a typo": Case("foretune models lst"),
    "a command of another tool": Case("foretune finetune run.yaml"),
    "an option with a typo": Case("foretune estimate --modle gpt2"),
    "an option that needs a value": Case("foretune estimate --model"),
    "an argument too many": Case("foretune train new.yaml runs/new"),
    "a missing argument": Case("foretune train"),
    "a model id with a typo": Case("foretune estimate --model Qwen/Qwen2.5-0.5 --offline"),
    "a model that is not named": Case("foretune estimate --gpu 3090"),
    "a GPU with a typo": Case("foretune estimate --model gpt2 --gpu 'RTX 3091'"),
    "a GPU of several sizes": Case("foretune devices show a100"),
    "a GPU that no card has the name of": Case("foretune devices show Voodoo2"),
    "a key with a typo": Case("foretune config validate typo.yaml"),
    "a --set key with a typo": Case("foretune estimate --model gpt2 --set lora.rnk=8"),
    "a --set without a value": Case("foretune estimate --model gpt2 --set lora.rank"),
    "a value that is none of the choices": Case("foretune estimate --model gpt2 --dtype bf61"),
    "a method with a typo": Case("foretune estimate --model gpt2 --method qlra"),
    "a number that is a word": Case("foretune estimate --model gpt2 --rank eight"),
    "a memory that is no size": Case("foretune estimate --model gpt2 --vram lots"),
    "an objective with a typo": Case("foretune recommend --model gpt2 --vram 8 --objective fastest"),
    "a stack with a typo": Case("foretune estimate --model gpt2 --stack axlotl"),
    "a shell that is not known": Case("foretune completion powershell"),
    "a help topic with a typo": Case("foretune help exit-code"),
    "a choice of data convert": Case("foretune data convert --from sharegtp sharegpt.jsonl out.jsonl"),
    "an option that is missing": Case("foretune data convert sharegpt.jsonl out.jsonl"),
    "a format with a typo": Case("foretune evaluate runs/first --format mesages"),
    "an engine with a typo": Case("foretune score --engine estimate"),
    "a number out of its range": Case("foretune train new.yaml --workers 0"),
    "an option of doctor with a typo": Case("foretune doctor --selftset"),
    "a value for a flag": Case("foretune models list --json=yes"),
    "an option of config show with a typo": Case("foretune config show run.yaml --orgin"),
    "a key to leave out with a typo": Case("foretune config import trl.yaml --without use_pfet"),
    "a tool with a typo": Case("foretune config import trl.yaml --tool tlr"),
    "a name in place of a file": Case("foretune devices detect 3090"),
    "a model without a name": Case("foretune models show ''"),
    # flags that do not go together
    "a device named twice": Case("foretune estimate --model gpt2 --gpu 3090 --vram 24"),
    "--check without a device": Case("foretune estimate --model gpt2 --check"),
    "--accept without --check": Case("foretune estimate --model gpt2 --vram 8 --accept tight"),
    "--free without a device": Case("foretune estimate --model gpt2 --free 8"),
    "--rank of full training": Case("foretune estimate --model gpt2 --method full --rank 8"),
    "a search without a device": Case("foretune recommend --model gpt2"),
    "two searches at once": Case("foretune recommend --model gpt2 --vram 8 --max batch --objective least-memory"),
    "a plot that is no SVG": Case("foretune estimate --model gpt2 --plot step.png"),
    "two configurations into one plot": Case("foretune estimate --config run.yaml --config full.yaml --plot a.svg"),
    "--import beside --config": Case("foretune estimate --config run.yaml --import axolotl.yml"),
    "lengths beside rows": Case("foretune estimate --model gpt2 --lengths a.txt --data rows.jsonl"),
    "a card for a run on the CPU": Case("foretune estimate --config run.yaml --gpu 3090"),
    "a recipe of another tool's stack": Case("foretune recipe new --model gpt2 --stack trl --offline"),
    "--detect without a card": Case("foretune estimate --model gpt2 --detect", no_card),
    # the wrong file or folder
    "a folder to train": Case("foretune train model"),
    "a run's folder as --config": Case("foretune estimate --config runs/first"),
    "a configuration that is not there": Case("foretune train runn.yaml"),
    "a configuration with broken YAML": Case("foretune config validate broken.yaml"),
    "an empty configuration": Case("foretune train empty.yaml"),
    "a model's config.json as configuration": Case("foretune train model/config.json"),
    "rows as configuration": Case("foretune train rows.jsonl"),
    "weights as a model": Case("foretune models show model/model.safetensors"),
    "a folder without a config.json": Case("foretune models show ./weights-only"),
    "a folder without a run to evaluate": Case("foretune evaluate model"),
    "a run that does not exist to evaluate": Case("foretune evaluate runs/none"),
    "a configuration whose run is not made yet": Case("foretune evaluate new.yaml"),
    "a configuration without an output to evaluate": Case("foretune evaluate bare.yaml"),
    "a run that failed to evaluate": Case("foretune evaluate runs/failed"),
    "rows that are not there to evaluate on": Case("foretune evaluate runs/first --data held-out.jsonl"),
    "a run whose files were changed to evaluate": Case("foretune evaluate runs/damaged"),
    "a format that was not trained": Case("foretune evaluate runs/first --format instruction --prompt Hi"),
    "a full run to merge": Case("foretune merge runs/full"),
    "a run to merge twice": Case("foretune merge runs/first"),
    "a run that failed to merge": Case("foretune merge runs/failed"),
    "a recipe into a folder that is used": Case("foretune recipe runs --model gpt2 --vram 8 --offline"),
    "a quickstart into a folder that is used": Case("foretune quickstart runs"),
    "a configuration over another": Case("foretune config init run.yaml"),
    "a configuration into no folder": Case("foretune config init configs/run.yaml"),
    "a chat template that is not there": Case(
        "foretune data check rows.jsonl --model ./model --chat-template mine.jinja"
    ),
    "lengths that are not there": Case("foretune estimate --model gpt2 --offline --lengths lengths.txt"),
    "observations that are not there": Case("foretune score mine.jsonl"),
    "rows as observations": Case("foretune score rows.jsonl"),
    # configurations of others
    "a configuration of axolotl to train": Case("foretune train axolotl.yml"),
    "a configuration of LLaMA-Factory to estimate": Case("foretune estimate --config llama_factory.yaml"),
    "a configuration of TRL to validate": Case("foretune config validate trl.yaml"),
    "a configuration of canifinetune to train": Case("foretune train canifinetune.yaml"),
    "a foreign configuration that leaves something open": Case("foretune config import trl.yaml --output ours.yaml"),
    "a foreign configuration that is not there": Case("foretune config import axolotl.yaml"),
    "an old recipe of canifinetune": Case("foretune config import canifinetune-recipe.yaml"),
    "our configuration to import": Case("foretune config import run.yaml"),
    "a recipe of another version": Case("foretune train old-recipe/config.yaml"),
    # runs
    "an output that holds a run": Case("foretune train run.yaml"),
    "a run without an output": Case("foretune train bare.yaml"),
    "a run that is busy": Case("foretune train run.yaml --resume", busy, encodes=True),
    "nothing to resume": Case("foretune train new.yaml --resume", encodes=True),
    "a finished run to resume": Case("foretune train run.yaml --resume", encodes=True),
    "a run to resume with another setting": Case("foretune train changed.yaml --resume", encodes=True),
    "a plan that does not fit": Case("foretune recipe big --model llama-3.1-8b --method full --vram 8 --offline"),
    "CUDA without a card": Case("foretune train new.yaml --set device=cuda", no_card),
    "bf16 on the CPU": Case("foretune train new.yaml --set precision.dtype=bf16"),
    "two devices": Case("foretune train new.yaml --set device=cuda:0,1"),
    "LoRA on a layer that is not there": Case("foretune estimate --model gpt2 --targets q_proj,v_proj --offline"),
    "LoRA on a layer that is not there, in a run": Case("foretune train new.yaml --set 'lora.targets=[c_attn]'"),
    "a base with pickled weights": Case("foretune train new.yaml --set model.id=./pickled"),
    "a base that is quantized already": Case("foretune train new.yaml --set model.id=./quantized"),
    "a quantized base to estimate": Case("foretune estimate --model ./quantized --method qlora"),
    # rows
    "rows that are not there": Case("foretune data check rows.json --model ./model"),
    "no rows are named": Case("foretune data check --model ./model"),
    "no tokenizer is named": Case("foretune data check rows.jsonl"),
    "a file without a row": Case("foretune data check empty.jsonl --model ./model", encodes=True),
    "a row that is too long": Case("foretune data check long.jsonl --model ./model --seq-len 128", encodes=True),
    "a row with a wrong role": Case("foretune data check role.jsonl --model ./model", encodes=True),
    "rows of another format": Case("foretune data check keys.jsonl --model ./model", encodes=True),
    "an array in place of lines": Case("foretune data check array.json --model ./model", encodes=True),
    "a line that is not JSON": Case("foretune data check broken.jsonl --model ./model", encodes=True),
    "a model without a chat template": Case("foretune data check rows.jsonl --model ./plain", encodes=True),
    "rows with a wrong role, in a run": Case("foretune train new.yaml --set data.train=role.jsonl", encodes=True),
    "a speaker that is not known": Case("foretune data convert --from sharegpt sharegpt.jsonl out.jsonl"),
    "a key that would be lost": Case("foretune data convert --from alpaca scored.jsonl out.jsonl"),
    "rows to convert that are not there": Case("foretune data convert --from alpaca alpaca.json out.jsonl"),
    "rows converted onto rows": Case("foretune data convert --from openai rows.jsonl keys.jsonl"),
    # the machine and the hub
    "torch is not installed": Case("foretune train new.yaml", without("torch", "peft")),
    "torch is not installed for a trace": Case("foretune trace --model gpt2 --vram 8 --offline", without("torch")),
    "torch is not installed for a quickstart": Case("foretune quickstart first-steps", without("torch")),
    "Transformers is not installed": Case("foretune data check rows.jsonl --model ./model", without("transformers")),
    "PEFT is not installed": Case("foretune evaluate runs/first", without("peft")),
    "bitsandbytes is not installed": Case(
        "foretune trace --model gpt2 --method qlora --offline", without("bitsandbytes")
    ),
    "a version that is not tested": Case("foretune train new.yaml", versions({"transformers": "4.57.1"})),
    "a gated model": Case("foretune estimate --model me/gated", hub_answers(403, "GatedRepo")),
    "a gated model, without a token": Case(
        "foretune estimate --model me/gated", hub_answers(401, "GatedRepo", had_token=False)
    ),
    "a model that the hub does not have": Case("foretune models show me/nothing", hub_answers(404, "RepoNotFound")),
    "a revision that the hub does not have": Case(
        "foretune models show me/it --revision v2", hub_answers(404, "RevisionNotFound")
    ),
    "a hub that cannot be reached": Case("foretune estimate --model me/it", hub_unreachable),
    "a hub that fails": Case("foretune estimate --model me/it", hub_answers(503)),
    "offline, and not in the cache": Case("foretune models show me/it --offline"),
    "offline, and weights not in the cache": Case("foretune train new.yaml --set model.id=gpt2 --offline"),
    "offline, and no tokenizer in the cache": Case("foretune data check rows.jsonl --model gpt2 --offline"),
    "a full disk during a run": Case("foretune train new.yaml", disk_fails("stage", errno.ENOSPC), encodes=True),
    "a full disk at the start of a run": Case(
        "foretune train new.yaml", disk_fails("write .record.json.new", 28), encodes=True
    ),
    "a full disk for a recipe": Case(
        "foretune recipe new --config new.yaml --offline", disk_fails("stage", errno.ENOSPC)
    ),
    "a full disk for a merge": Case("foretune merge runs/first --output m", disk_fails("stage", errno.ENOSPC)),
    "a read-only folder for a run": Case("foretune train new.yaml", no_new_folders, encodes=True),
    "a read-only folder for a quickstart": Case("foretune quickstart first-steps", no_new_folders),
    "no permission to write a configuration": Case("foretune config init mine.yaml", no_new_files),
}
