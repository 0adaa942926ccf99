"""Write src/foretune/models/catalogue.jsonl from the collected model facts (the folder is the first argument).

A config is reduced to the keys without which the described model would be another one: each key is dropped in turn,
and stays dropped where the ModelShape is the same without it. Models that the collection's README warns about (counts
that no published total confirms, open tying) are left out.

    python scripts/catalogue_build.py FOLDER_OF_CONFIGS > src/foretune/models/catalogue.jsonl
"""

import json
import re
import sys
from itertools import takewhile
from pathlib import Path

from foretune.errors import ForetuneError
from foretune.models.families import shape_from_config
from foretune.models.shape import ModelShape

LEFT_OUT = re.compile(
    r"Falcon-H1-1\.5B-Base|Zamba2|Kimi-Linear|MiniMax-M|mamba2-.*-hf|recurrentgemma-9b|Codestral-22B|Mamba-Codestral"
    r"|Ministral-3|mpt-7b|gpt-j|opt-66b|gemma-3n|Qwen1\.5-0\.5B|Qwen1\.5-1\.8B|Jamba-Reasoning-3B|glm-edge|MiniCPM5"
    r"|helium-1-2b|h2o-danube3|gemma4_unified|Phi-3-small|Phi-4-multimodal|Kimi-K3|Llama-3_3-Nemotron-Super",
    re.IGNORECASE,
)


NO_WINDOW = {"sliding_window": None}
STARCODER2_DROPOUTS = {"attention_dropout": 0.1, "embedding_dropout": 0.1, "residual_dropout": 0.1}
STATED: dict[str, dict] = {
    # The collection wrote these configs from dimensions, without the window, and the class's default (4096) would be
    # wrong. None: model cards and published configs say that there is none (Mistral-Nemo's config.json is quoted in
    # kevinstephano/thunder_model_blocks; the card of 7B-Instruct-v0.2 says "No Sliding-Window Attention"; the
    # documentation of exaone4 gives hybrid attention to the 32B only).
    "mistralai/Mistral-7B-Instruct-v0.2": NO_WINDOW,
    "mistralai/Mistral-Large-Instruct-2407": NO_WINDOW,
    "mistralai/Mistral-Nemo-Base-2407": NO_WINDOW,
    "mistralai/Mistral-Small-24B-Base-2501": NO_WINDOW,
    "mistralai/Mistral-Small-3.1-24B-Base-2503": NO_WINDOW,
    "nvidia/Mistral-NeMo-Minitron-8B-Base": NO_WINDOW,
    "LGAI-EXAONE/EXAONE-4.0-1.2B": NO_WINDOW,
    "mistralai/Ministral-8B-Instruct-2410": {"sliding_window": 32768},
    "google/gemma-3-270m": {"sliding_window": 512},
    # As the vendored config of the 7B has it, trained in the same way.
    "bigcode/starcoder2-3b": STARCODER2_DROPOUTS,
    "bigcode/starcoder2-15b": STARCODER2_DROPOUTS,
}


def completed(config: dict, row: dict) -> dict:
    """State what the collection leaves open and the class's default would get wrong."""
    stated = STATED.get(row["id"], {})
    section = config.get("text_config", config)
    assert not stated.keys() & section.keys(), row["id"]
    section.update(stated)
    return config


OWNERS = {"mistralai/Mistral-7B-Instruct-v0.1": "mistralai/Mistral-7B-v0.1"}
"""Aliases whose name begins like another model's: the first Instruct slides as its base does, v0.2 does not."""


def shared_start(a: str, b: str) -> str:
    """Return the letters with which both begin."""
    return "".join(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def settled_aliases(rows: list[dict]) -> dict[str, list[str]]:
    """Give each alias to one model: the one whose name begins most like it; an id is nobody's alias."""
    ids = {row["id"].lower() for row in rows}
    claims: dict[str, list[str]] = {}
    for row in rows:
        for alias in row.get("aliases", []):
            claims.setdefault(alias, []).append(row["id"])
    settled: dict[str, list[str]] = {row["id"]: [] for row in rows}
    for alias, owners in claims.items():
        if alias.lower() not in ids:
            best = OWNERS.get(alias) or max(
                owners, key=lambda owner: (len(shared_start(owner.lower(), alias.lower())), -len(owner))
            )
            settled[best].append(alias)
    return settled


def shape_of(config: dict, row: dict) -> ModelShape:
    """Describe the model."""
    return shape_from_config(config, id=row["id"], source="catalogue")


def without_quantization(config: dict) -> dict:
    """Drop what describes the published checkpoint rather than the architecture."""
    gone = ("quantization_config", "auto_map")
    return {k: without_quantization(v) if isinstance(v, dict) else v for k, v in config.items() if k not in gone}


def reduced(config: dict, row: dict) -> dict:
    """Drop every key that does not change the shape."""
    target = shape_of(config, row)

    def try_without(section: dict, whole: dict) -> None:
        for key in list(section):
            if key == "model_type":
                continue
            value = section.pop(key)
            try:
                same = shape_of(whole, row) == target
            except ForetuneError:
                same = False
            if same:
                continue
            section[key] = value
            if isinstance(value, dict):
                try_without(value, whole)

    whole = json.loads(json.dumps(config))
    try_without(whole, whole)
    return whole


def source_of(row: dict) -> str:
    """Shorten the source."""
    text = re.sub(
        r" \(PyPI\)| embedded hf_models\.json(: \S+)?| model_configs/\S+| python/\S+ \[\S+\]| src/\S+ \S+",
        "",
        row["source"],
    )
    stated = STATED.get(row["id"])
    window = f"; {', '.join(stated)} from the model's card or published configs" if stated else ""
    return f"{row['source_kind']}: {text}{window}"


def entry(row: dict, aliases: list[str], root: Path) -> dict:
    """Make one line."""
    config = completed(without_quantization(json.loads((root / row["config"]).read_text())), row)
    organisation = row["id"].split("/")[0] + "/"
    shape = shape_of(config, row)
    assert shape.total_params == row["total_params"], row["id"]
    return {
        "id": row["id"],
        "aliases": [alias.removeprefix(organisation) for alias in sorted(aliases)],
        "model_type": row["model_type"],
        "total_params": row["total_params"],
        "context_length": row.get("context_length"),
        "licence": row.get("licence"),
        "gated": row.get("gated"),
        "published_only_as": row.get("quant_in_config"),
        "source": source_of(row),
        "config": reduced(config, row),
    }


def main() -> None:
    """Print the catalogue."""
    root = Path(sys.argv[1])
    rows = [json.loads(line) for line in (root / "index.jsonl").read_text().splitlines()]
    kept = [row for row in rows if row["built"] and not LEFT_OUT.search(row["id"])]
    aliases = settled_aliases(kept)
    for row in sorted(kept, key=lambda row: row["id"].lower()):
        fields = {key: value for key, value in entry(row, aliases[row["id"]], root).items() if value not in (None, [])}
        sys.stdout.write(json.dumps(fields, separators=(",", ":"), ensure_ascii=False) + "\n")
    print(f"{len(kept)} of {len(rows)} models", file=sys.stderr)


if __name__ == "__main__":
    main()
