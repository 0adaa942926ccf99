"""What a run hands over: weights, tokenizer, the form of its prompts, where answers stop, and proof that it reloads.

Staged beside its place, compared with the living tensors, synced and renamed: it is there whole or not at all.
"""

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from foretune import __version__
from foretune.data import Message, TemplateProblem, format_instruction
from foretune.durable import at, publish_folder, staged, write_file
from foretune.errors import RunDirectoryError, SaveError, UnsupportedError
from foretune.evidence import BaseIdentity, Padding
from foretune.models import read_safetensors_header
from foretune.runtime.live import Live, at_rest
from foretune.runtime.tokenizer import ModelTokenizer
from foretune.values import Value, encode_json

__all__ = [
    "ARTIFACT",
    "PROBE",
    "ArtifactFacts",
    "PromptFormat",
    "about_prompts",
    "copy_tokenizer",
    "probe_logits",
    "prompt_format",
    "read_artifact",
    "read_probe",
    "save_artifact",
    "write_generation",
    "write_probe",
    "written_prompt",
]

ARTIFACT, PROBE, CARD = "artifact.json", "probe.safetensors", "README.md"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
GENERATION = "generation_config.json"
SHARD = "4GB"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
QUESTION = "What is the capital of France?"
"""Asked in the example and in the probe: no row of the user's is handed on."""
PROBE_TOKENS, PROBE_KEPT = 48, 4
"""Tokens of the probe's random row, and how many of its last places keep their logits."""
Count = Annotated[int, Meta(ge=0)]


class PromptFormat(Value, frozen=True, kw_only=True):
    """How prompts were written in training, and so must be written afterwards."""

    kind: Literal["messages", "instruction", "both"]
    sha256: str
    """Of the chat template, and of the form of instructions where there were any."""
    example_prompt: str
    """One prompt as a model sees it."""
    template_date: str | None = None
    """What the template was told where it asks for today's date."""


class ArtifactFacts(Value, frozen=True, kw_only=True):
    """What an artifact says about itself."""

    schema: Literal["foretune.artifact/1"] = "foretune.artifact/1"
    version: str
    """Of foretune."""
    kind: Literal["adapter", "model"]
    base: BaseIdentity
    format: PromptFormat
    stop_ids: tuple[int, ...]
    """Tokens at which an answer ends: what closes answers in the rows, and what the base stops at."""
    pad: Padding
    weight_dtype: str
    adapter_dtype: str | None = None
    num_tensors: Count
    num_bytes: Count
    fingerprint: str
    """Of the configuration."""
    updates: Count


def read_artifact(folder: Path) -> ArtifactFacts:
    """Read what an artifact says about itself. Raises RunDirectoryError."""
    try:
        return msgspec.json.decode((folder / ARTIFACT).read_bytes(), type=ArtifactFacts)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunDirectoryError(
            f"{folder} is no artifact of foretune: {error}.", hint="Name a run's folder."
        ) from error


# -- the form of prompts


def prompt_format(
    tokenizer: ModelTokenizer, *, num_conversations: int, num_instructions: int, template_date: str | None
) -> PromptFormat:
    """Describe how the rows' prompts were written, with one example of it."""
    form = format_instruction("{instruction}", "{input}")
    template = tokenizer.template or ""
    kind: Literal["messages", "instruction", "both"] = "messages"
    if num_instructions:
        kind = "both" if num_conversations else "instruction"
    parts = {"messages": (template,), "instruction": (form,), "both": (template, form)}[kind]
    return PromptFormat(
        kind=kind,
        sha256=sha256("\0".join(parts).encode()).hexdigest(),
        example_prompt=written_prompt(tokenizer, "instruction" if kind == "instruction" else "messages", QUESTION),
        template_date=template_date,
    )


def written_prompt(tokenizer: ModelTokenizer, kind: Literal["messages", "instruction"], question: str) -> str:
    """Write a question as a prompt. Raises UnsupportedError where the chat template does not take it."""
    if kind == "instruction":
        return format_instruction(question)
    try:
        return tokenizer.render([Message("user", question)], add_generation_prompt=True).text
    except TemplateProblem as problem:
        raise UnsupportedError(f"The chat template does not take a question alone: {problem}") from problem


# -- the probe


def probe_rows(example_ids: list[int], vocab_size: int) -> list[Tensor]:
    """Return two rows of tokens: the example's prompt, and one that the seed 0 draws."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, vocab_size, (1, PROBE_TOKENS), generator=generator)
    return [torch.tensor([example_ids], dtype=torch.int64), drawn]


def probe_logits(model: nn.Module, rows: list[Tensor]) -> list[Tensor]:
    """Return the logits of the last places of each row, in fp32 on the CPU, without dropout."""
    found, device = [], next(model.parameters()).device
    with at_rest(model):
        for row in rows:
            logits = model(input_ids=row.to(device), use_cache=False).logits
            found.append(logits[0, -PROBE_KEPT:].float().cpu().contiguous())
    return found


def write_probe(draft: Path, rows: list[Tensor], logits: list[Tensor]) -> None:
    """Write the rows of the probe, and the logits that a model has at the last places of each."""
    probe = {f"ids.{number}": row for number, row in enumerate(rows)}
    save_file(probe | {f"logits.{number}": each for number, each in enumerate(logits)}, draft / PROBE)


def read_probe(artifact: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows of an artifact's probe, and the logits that were stored with them."""
    with safe_open(artifact / PROBE, "pt") as file:
        count = sum(name.startswith("ids.") for name in file.keys())  # noqa: SIM118 - it is no dictionary
        rows = [file.get_tensor(f"ids.{number}") for number in range(count)]
        return rows, [file.get_tensor(f"logits.{number}") for number in range(count)]


# -- saving


def copy_tokenizer(source: Path, draft: Path) -> None:
    """Copy the files of a tokenizer, its chat template among them, as they are."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, draft / name)


def save_artifact(
    run: Path, live: Live, facts: Mapping[str, Any], *, tokenizer_folder: Path, example_ids: list[int]
) -> tuple[Path, ArtifactFacts]:
    """Write the artifact below a run's folder, verified. `facts` are those of ArtifactFacts that a run knows.

    Raises SaveError, and leaves nothing then.
    """
    kind: Literal["adapter", "model"] = "model" if live.config.lora is None else "adapter"
    final = run / kind
    with staged(final) as draft:
        at("save weights")
        written = (
            _write_model(draft, live, facts["stop_ids"]) if kind == "model" else _write_adapter(draft, live, facts)
        )
        _compare(written, live)
        copy_tokenizer(tokenizer_folder, draft)
        rows = probe_rows(example_ids, live.facts.shape.vocab_size)
        write_probe(draft, rows, probe_logits(live.model, rows))
        entries = [tensor for path in written for tensor in read_safetensors_header(path).values()]
        made = ArtifactFacts(
            version=__version__,
            kind=kind,
            num_tensors=len(entries),
            num_bytes=sum(tensor.num_bytes for tensor in entries),
            **facts,
        )
        write_file(draft / ARTIFACT, f"{encode_json(made)}\n".encode())
        write_file(draft / CARD, _card(made).encode())
        publish_folder(draft, final)
    return final, made


def _write_adapter(draft: Path, live: Live, facts: Mapping[str, Any]) -> list[Path]:
    """Write the adapters as PEFT names them, so that PEFT loads them too."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(live.model, save_embedding_layers=False)
    save_file({name: each.detach().contiguous().cpu() for name, each in state.items()}, draft / ADAPTER_WEIGHTS)
    wrapper: Any = live.model
    settings = wrapper.peft_config["default"].to_dict()
    base: BaseIdentity = facts["base"]
    settings |= {"base_model_name_or_path": base.id, "revision": base.resolved_revision, "inference_mode": True}
    text = json.dumps(settings, indent=2, sort_keys=True, default=_plain)
    write_file(draft / ADAPTER_CONFIG, text.encode())
    return [draft / ADAPTER_WEIGHTS]


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _write_model(draft: Path, live: Live, stop_ids: tuple[int, ...]) -> list[Path]:
    """Write the whole model by its own class, which ties and names its weights as the base's files do."""
    base: Any = live.base
    own = getattr(base, "generation_config", None)
    base.config.use_cache = True
    try:
        if own is not None:  # Transformers reads many that it refuses to write (a temperature without do_sample)
            base.generation_config = type(own)()
        base.save_pretrained(draft, max_shard_size=SHARD)
    finally:
        base.config.use_cache = False
        if own is not None:
            base.generation_config = own
    write_generation(draft, own, stop_ids)
    return sorted(draft.glob("*.safetensors"))


def write_generation(draft: Path, own: Any, stop_ids: tuple[int, ...]) -> None:
    """Write a base's own settings of generation, where it has some, with the tokens at which an answer ends."""
    if own is not None:
        settings = copy.deepcopy(own)
        settings.eos_token_id = list(stop_ids)
        (draft / GENERATION).write_text(settings.to_json_string(), encoding="utf-8")


def _compare(files: list[Path], live: Live) -> None:
    """Read every tensor back: named, of some size, finite, and equal to the living one. Raises SaveError."""
    living = dict(_living(live))
    seen = set()
    for path in files:
        header = read_safetensors_header(path)
        with safe_open(path, "pt") as file:
            for name, entry in header.items():
                seen.add(name)
                tensor = file.get_tensor(name)
                if entry.num_bytes == 0:
                    raise _not_whole(path, name, "is empty")
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    raise _not_whole(path, name, "holds values that are not finite")
                if name in living and not _same_bits(tensor, living[name].detach().cpu()):
                    raise _not_whole(path, name, "differs from the tensor that was trained")
    lacking = sorted(name for name in _needed(live, living) if name not in seen)
    if lacking:
        raise _not_whole(files[0] if files else Path("the artifact"), lacking[0], "is missing")


def _living(live: Live) -> Iterator[tuple[str, Tensor]]:
    if live.config.lora is None:
        yield from _as_stored(live.base, dict(live.base.named_parameters()) | dict(_kept_buffers(live.base))).items()
        return
    from peft import get_peft_model_state_dict

    yield from get_peft_model_state_dict(live.model, save_embedding_layers=False).items()


def _kept_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    kept = model.state_dict()
    return ((name, kept[name]) for name, _ in model.named_buffers() if name in kept)


def _as_stored(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors as its checkpoints have them: under other names, and experts one by one.

    By the function that writes them (modeling_utils.py, save_pretrained): it shows what is lost on the way to the
    disk, and not what that function loses.
    """
    if not getattr(model, "_weight_conversions", None):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    stored: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return stored


def _needed(live: Live, living: dict[str, Tensor]) -> Iterator[str]:
    """Names that a file must hold. Of a whole model those of its parameters, each storage once."""
    if live.config.lora is not None:
        yield from living
        return
    buffers = {name for name, _ in live.base.named_buffers()}
    yield from (name for name in living if name not in buffers)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


def _not_whole(path: Path, name: str, what: str) -> SaveError:
    return SaveError(
        f"{path.name} is not what was trained: {name} {what}.",
        hint="Nothing was handed over. Check the disk; if it is sound, please report this.",
    )


def _card(facts: ArtifactFacts) -> str:
    base = facts.base
    revision = f", revision {base.resolved_revision}" if base.resolved_revision else ""
    what = "adapters for" if facts.kind == "adapter" else "a fine-tune of"
    return (
        f"---\nlibrary_name: {'peft' if facts.kind == 'adapter' else 'transformers'}\nbase_model: {base.id}\n---\n\n"
        f"# {what.capitalize()} {base.id}\n\n"
        f"Made by foretune {facts.version} from {base.id}{revision} ({base.model_class}), {facts.updates:,} updates. "
        f"Weights in {facts.weight_dtype}"
        f"{'' if facts.adapter_dtype is None else f', adapters in {facts.adapter_dtype}'}.\n\n"
        f"{about_prompts(facts)}"
    )


def about_prompts(facts: ArtifactFacts) -> str:
    """Write the sections that every model card has: how prompts are written, and what nobody has said."""
    fence = "`" * 3
    return (
        f"## Prompts\n\nWritten as {facts.format.kind} in training, and to be written so again; one as the model sees "
        f"it:\n\n{fence}text\n{facts.format.example_prompt}\n{fence}\n\n"
        f"An answer ends at one of these tokens: {', '.join(map(str, facts.stop_ids))}.\n\n"
        f"## Not said here\n\nWhich rows it was trained on, what its licence is (the base's applies), and how good it "
        "is.\n"
    )
