"""Record or check tests/golden/fingerprints.jsonl: what a short model of each type allocates, line by line.

    python scripts/fingerprints.py [TYPE...]            write the file anew (or only these types)
    python scripts/fingerprints.py --check [TYPE...]    name each type that moved and its first difference; exit 1

The first line of the file says with which libraries it was made. Each type is one model of the catalogue at its real
widths, cut to the layers that show every kind.
"""

import argparse
import copy
import json
import platform
import sys
from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from foretune.errors import ForetuneError
from foretune.models import list_models, resolve_config, shape_from_config
from foretune.runtime.border import foreign_border
from foretune.runtime.libraries import installed_versions
from foretune.runtime.trace.fingerprint import Way, encode, first_difference, stored, take, take_again

FILE = Path(__file__).parents[1] / "tests" / "golden" / "fingerprints.jsonl"
WAYS = (Way("lora", "sdpa"), Way("lora", "eager"), Way("full", "sdpa"), Way("full", "eager"))
NUM_LAYERS_KEYS = ("num_hidden_layers", "num_layers", "n_layer")
LAYER_LISTS = ("indexer_types", "layer_types", "mlp_layer_types", "no_rope_layers")
"""What Transformers' classes work out for each layer where a config does not say it."""


# -- a model of each type, cut short ------------------------------------------------------------------------------


def models_by_type() -> dict[str, list[str]]:
    """List the catalogue's models of each type, the smallest first."""
    found: dict[str, list[str]] = {}
    for entry in sorted(list_models(), key=lambda entry: (entry.total_params, entry.id)):
        found.setdefault(entry.model_type, []).append(entry.id)
    return dict(sorted(found.items()))


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The section that says how many layers there are."""
    return config.get("text_config", config)


def layer_lists(config: dict[str, Any], num_layers: int) -> dict[str, list[Any]]:
    """What Transformers' own config says of each layer; nothing where it refuses the config."""
    from foretune.runtime.load import model_config

    try:
        with foreign_border("", "eager"):
            made = model_config(config, attention="eager").get_text_config()
    except ForetuneError:
        return {}
    lists = {key: getattr(made, key, None) or [] for key in LAYER_LISTS}
    return {key: value for key, value in lists.items() if len(value) == num_layers}


def layer_kinds(config: dict[str, Any]) -> list[Hashable]:
    """Say of each layer what it is like: its parameters, and what foretune and Transformers say of its attention."""
    shape = shape_from_config(config, id="short", source="file")
    parameters = {layer: kind.parameters for kind in shape.kinds for layer in kind.layers}
    lists = layer_lists(config, shape.num_layers)
    ours = {"sliding": shape.traits.sliding_layers, "rotary": shape.traits.rotary_layers}
    told = {**lists, **{key: value for key, value in ours.items() if value}}
    return [
        (parameters[layer], tuple((key, told[key][layer]) for key in sorted(told))) for layer in range(shape.num_layers)
    ]


def cut(config: dict[str, Any], chosen: Sequence[int], num_layers: int, lists: dict[str, list[Any]]) -> dict[str, Any]:
    """Keep these layers: what is said of each layer, layer by layer, and counts of layers from one end."""
    short = copy.deepcopy(config)
    text = text_of(short)
    text.update({key: len(chosen) for key in NUM_LAYERS_KEYS if key in text})
    for key, value in {**lists, **text}.items():
        if isinstance(value, list) and len(value) in (num_layers, num_layers + 1):
            text[key] = [value[layer] for layer in chosen]
        elif isinstance(value, str) and len(value) == num_layers and "pattern" in key:
            text[key] = "".join(value[layer] for layer in chosen)
    if text["model_type"].startswith("gemma"):
        for tower in {"audio_config", "vision_config"} & short.keys():
            short[tower]["num_hidden_layers"] = 1
    if text["model_type"] == "gpt_neo":
        text["attention_types"] = [[["global", "local"], len(chosen) // 2]]
    if "first_k_dense_replace" in text:
        text["first_k_dense_replace"] = sum(layer < text["first_k_dense_replace"] for layer in chosen)
    if "num_kv_shared_layers" in text:
        text["num_kv_shared_layers"] = sum(layer >= num_layers - text["num_kv_shared_layers"] for layer in chosen)
    return short


@cache
def shortened(model: str) -> dict[str, Any]:
    """Cut a model's config to the first layer of each kind; where that is another model, to the first layers."""
    config = resolve_config(model, offline=True)
    kinds = layer_kinds(config)
    firsts = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())
    picks = firsts if len(firsts) > 1 else [0, 1], range(max(firsts[-1] + 1, 2))
    lists = layer_lists(config, len(kinds)), {}  # some classes do not let themselves be told
    for chosen, told in product(picks, lists):
        short = cut(config, chosen, len(kinds), told)
        try:
            if set(layer_kinds(short)) == set(kinds):
                return short
        except ForetuneError:
            continue
    raise SystemExit(f"{model} cannot be shortened.")


# -- rows ---------------------------------------------------------------------------------------------------------


def tries(models: list[str]) -> Iterator[tuple[str, dict[str, Any], Way]]:
    """LoRA before full training, the smallest model first, sdpa before eager."""
    for method in ("lora", "full"):
        for model in models:
            for way in WAYS:
                if way.method == method:
                    yield model, shortened(model), way


def make_row(model_type: str, models: list[str]) -> dict[str, Any]:
    """The first try that is traced; where all are refused, the first that is refused for more than its attention."""
    refused: list[dict[str, Any]] = []
    for model, config, way in tries(models):
        row = {"model_type": model_type, "model": model, **way._asdict(), "config": config}
        got = take(model, config, way)
        if got.refusal is None:
            return {**row, **encode(got.lines)}
        refused.append({**row, "refusal": got.refusal})
    return next((row for row in refused if not row["refusal"].startswith("attention is")), refused[0])


def read_rows() -> dict[str, dict[str, Any]]:
    """The file's rows by type, without its first line."""
    lines = FILE.read_text().splitlines()[1:] if FILE.exists() else []
    return {row["model_type"]: row for row in map(json.loads, lines)}


def versions() -> dict[str, str | None]:
    """Of what the file is made with; a local label (+cpu) says nothing here."""
    found = {name: (version or "").partition("+")[0] for name, version in installed_versions().items()}
    return {"python": platform.python_version(), **{name: found[name] for name in ("torch", "transformers", "peft")}}


def write(wanted: list[str]) -> None:
    """Take every wanted fingerprint anew, and say what moved."""
    catalogue, rows = models_by_type(), read_rows()
    for model_type, models in catalogue.items():
        if wanted and model_type not in wanted:
            continue
        row = make_row(model_type, models)
        before = rows.get(model_type)
        moved = first_difference(stored(before), stored(row)) if before else "new"
        if moved:
            print(f"{model_type}: {moved}", flush=True)
        rows[model_type] = row
    kept = [rows[model_type] for model_type in catalogue if model_type in rows]
    text = [json.dumps(item, separators=(",", ":")) + "\n" for item in ({"versions": versions()}, *kept)]
    FILE.write_text("".join(text))


def check(wanted: list[str]) -> int:
    """Take every wanted fingerprint again and name the first difference of each that moved."""
    num_moved = 0
    for model_type, row in read_rows().items():
        if wanted and model_type not in wanted:
            continue
        moved = first_difference(stored(row), take_again(row))
        if moved:
            num_moved += 1
            print(f"{model_type}: {moved}", flush=True)
    return 1 if num_moved else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; without any, all")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.types if name not in models_by_type()]
    if unknown:
        parser.error(f"the catalogue has no {', '.join(unknown)}")
    if arguments.check:
        return check(arguments.types)
    write(arguments.types)
    return 0


if __name__ == "__main__":
    sys.exit(main())
