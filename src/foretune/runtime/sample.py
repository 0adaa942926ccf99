"""A model and rows to try everything on: tiny, random, made here in a second, without network.

The architecture, the tokenizer's kind and the template's form are those of published models; the weights are random
and the sizes the smallest that still have every part.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretune.data.samples import sample_instructions, sample_messages
from foretune.durable import publish_folder, staged
from foretune.errors import RunDirectoryError
from foretune.runtime.libraries import require_libraries, require_text_libraries

__all__ = ["make_sample_model", "sample_rows"]

SEED = 0
PAD, OPEN, CLOSE = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 512
SIZES: Mapping[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '" + OPEN + "' ~ message.role ~ '\n' ~ message.content ~ '" + CLOSE + "\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '" + OPEN + "assistant\n' }}{% endif %}"
)


def make_sample_model(folder: str | Path, sizes: Mapping[str, int] = SIZES) -> Path:
    """Make a tiny random Llama with a byte-level BPE tokenizer and a chat template, and return its folder.

    About 0.1 million parameters in fp32: config.json, safetensors, tokenizer files. The same every time. The folder
    is there whole or not at all.

    Raises MissingDependencyError and UnsupportedError (the extra `train`), RunDirectoryError where the folder exists,
    SaveError where the disk does not take it.

        model = make_sample_model("sample-model")
        config = build_config({"model.id": str(model), "device": "cpu", "precision.dtype": "fp32", "lora.rank": 4})
    """
    require_libraries("torch", "transformers")
    require_text_libraries()
    final = Path(folder)
    if final.exists():
        raise RunDirectoryError(f"{final} exists already.", hint="Choose another folder; nothing is overwritten.")
    with staged(final) as draft:
        tokenizer = _tokenizer()
        tokenizer.save_pretrained(draft)
        (draft / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        _write_model(draft, tokenizer, sizes)
        publish_folder(draft, final)
    return final


def sample_rows() -> tuple[dict[str, Any], ...]:
    """Return rows that a model can learn, in both forms: conversations, and instructions with the same answers.

    Each is what a line of a JSONL file holds (docs/data.md). They need no library.

    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in sample_rows()))
    """
    return (*sample_messages(), *sample_instructions())


def _tokenizer() -> Any:
    """Train a byte-level BPE on the rows: no text is unknown to it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, OPEN, CLOSE],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((json.dumps(row) for row in sample_rows()), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=CLOSE, pad_token=PAD)


def _write_model(draft: Path, tokenizer: Any, sizes: Mapping[str, int]) -> None:
    """Write a model with weights of their own seed; the process' random numbers stay as they are."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    names = {"architectures": [LlamaForCausalLM.__name__], "dtype": "float32", "tie_word_embeddings": True}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, **names, **sizes, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        state = LlamaForCausalLM(config).state_dict()
    del state["lm_head.weight"]  # tied: the embeddings are written once
    save_file(state, draft / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(draft)
