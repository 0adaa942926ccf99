"""The model card of a merged model: what it is, what was measured, and how to go on to GGUF by another tool."""

from foretune.evidence import MergeCheck
from foretune.runtime.artifact import ArtifactFacts, about_prompts

__all__ = ["merge_card"]

FENCE = "`" * 3
OUTTYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
"""What llama.cpp's converter calls a format (`--outtype`)."""


def merge_card(facts: ArtifactFacts, check: MergeCheck, name: str) -> str:
    """Write the card. `facts` name the base as others may see it; `name` is the folder's."""
    base = facts.base
    revision = f", revision {base.resolved_revision}" if base.resolved_revision else ""
    return (
        f"---\nlibrary_name: transformers\nbase_model: {base.id}\nbase_model_relation: finetune\n---\n\n"
        f"# A fine-tune of {base.id}, merged\n\n"
        f"Made by foretune {facts.version} from {base.id}{revision} ({base.model_class}): adapters of "
        f"{facts.updates:,} updates, merged into the base's weights ({facts.weight_dtype}).\n\n"
        f"## Is it what was trained?\n\n**{check.verdict.capitalize()}.** {check.because}\n\n"
        f"{''.join(f'- {line}{chr(10)}' for line in check.measured())}\n"
        f"{about_prompts(facts)}\n"
        f"{_gguf(facts, name)}"
    )


def _gguf(facts: ArtifactFacts, name: str) -> str:
    outtype = OUTTYPES[facts.weight_dtype]
    return (
        "## GGUF\n\nforetune does not make GGUF files. llama.cpp (https://github.com/ggml-org/llama.cpp) converts this "
        "folder, where it knows the architecture, and quantizes the result:\n\n"
        f"{FENCE}sh\npython convert_hf_to_gguf.py {name} --outfile {name}.gguf --outtype {outtype}\n"
        f"llama-quantize {name}.gguf {name}-Q4_K_M.gguf Q4_K_M\n{FENCE}\n\n"
        "What was measured above is about this folder, not about what is made of it.\n"
    )
