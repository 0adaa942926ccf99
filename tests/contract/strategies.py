"""Configurations that keep every rule, over all fields."""

from typing import Any

from hypothesis import strategies as st

from foretune.contract import TrainingConfig

# Text without control characters and surrogates, and not blank: what a text field may hold.
texts = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=12).filter(
    lambda text: bool(text.strip())
)
tricky = st.sampled_from(
    ["no", "on", "null", "~", "1e-4", "0x1F", "12:30", "2024-01-01", "a: b", "#x", "- x", "[x]", "{x}", "'x'", '"x"',
     "a\\b", "é\u2028", "\U0001f600", "&x", "*x", "!x", "%x", "@x", "`x`", "|", ">", "<<", " x ", ".nan", "true", "1."]
)  # fmt: skip
names = st.one_of(texts, tricky)
paths = names.map(lambda text: f"/data/{text.replace('/', '_')}")
positives = st.floats(min_value=1e-300, max_value=1e9, allow_subnormal=False)
shares = st.floats(min_value=0.0, max_value=1.0, exclude_max=True)
counts = st.integers(1, 10**9)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def lora_settings(draw: st.DrawFn) -> dict[str, Any]:
    modules = draw(st.lists(names, unique=True, max_size=4))
    cut = draw(st.integers(0, len(modules)))
    targets = draw(st.sampled_from(["all-linear", "attention", "mlp"])) if cut == 0 else modules[:cut]
    return {
        "rank": draw(st.integers(1, 65536)),
        "alpha": draw(positives),
        "dropout": draw(shares),
        "targets": targets,
        "modules_to_save": modules[cut:],
        "use_dora": draw(st.booleans()),
        "use_rslora": draw(st.booleans()),
    }


@st.composite
def optimizer_settings(draw: st.DrawFn, *, cpu: bool) -> dict[str, Any]:
    name = draw(st.sampled_from(["adamw", "sgd"] if cpu else ["adamw", "sgd", "adamw_8bit", "paged_adamw_8bit"]))
    settings: dict[str, Any] = {
        "name": name,
        "learning_rate": draw(positives),
        "weight_decay": draw(st.floats(0, 1e9)),
        "max_grad_norm": draw(maybe(positives)),
    }
    if name in ("adamw", "sgd"):
        settings["implementation"] = draw(st.sampled_from([None, "fused", "foreach"]))
    if name == "sgd":
        settings["momentum"] = draw(shares)
    else:
        settings |= {"beta1": draw(shares), "beta2": draw(shares), "epsilon": draw(positives)}
    return settings


@st.composite
def formats(draw: st.DrawFn, *, cpu: bool) -> dict[str, Any]:
    lora = draw(maybe(lora_settings()))
    dtypes = ["fp32"] if cpu else ["bf16", "fp32"] if lora is None else ["bf16", "fp16", "fp32"]
    if lora is not None and lora.get("modules_to_save"):
        dtypes = [dtype for dtype in dtypes if dtype != "fp16"]
    precision = {"dtype": draw(st.sampled_from(dtypes))}
    quantization = None
    if lora is not None:
        precision["adapter_dtype"] = draw(st.sampled_from(["fp32", "bf16"]))
    if lora is not None and not cpu and draw(st.booleans()):
        scheme = draw(st.sampled_from(["nf4", "int8"]))
        nf4 = {
            "double_quant": draw(maybe(st.booleans())),
            "compute_dtype": draw(maybe(st.sampled_from(["bf16", "fp16", "fp32"]))),
        }
        quantization = {"scheme": scheme, **(nf4 if scheme == "nf4" else {})}
    return {"lora": lora, "precision": precision, "quantization": quantization}


@st.composite
def data_settings(draw: st.DrawFn) -> dict[str, Any]:
    train = draw(maybe(paths))
    held_out = draw(st.sampled_from([None, "data", "split"]))
    evaluation: dict[str, Any] = {}
    if held_out == "data":
        evaluation = {"data": draw(paths.filter(lambda path: path != train))}
    elif held_out == "split":
        evaluation = {"split": draw(st.floats(1e-300, 0.999, allow_subnormal=False))}
    if held_out is not None:
        evaluation["every_updates"] = draw(maybe(counts))
    supervision = draw(st.sampled_from(["all_tokens", "assistant_only"]))
    spans = draw(st.sampled_from(["verified", "template"])) if supervision == "assistant_only" else "verified"
    data = {
        "train": train,
        "supervision": supervision,
        "spans": spans,
        "truncation": draw(st.sampled_from(["error", "right"])),
        "allow_template_rewrite": draw(st.booleans()),
        "template_date": draw(maybe(st.dates().map(str))),
    }
    return {"data": data, "evaluation": evaluation}


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    updates = draw(maybe(counts))
    return {
        "updates": updates,
        "epochs": draw(maybe(positives)) if updates is None else None,
        "shape": draw(st.sampled_from(["constant", "linear", "cosine"])),
        "warmup_updates": draw(st.integers(0, 10**9 if updates is None else updates - 1)),
    }


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    packing = draw(st.booleans())
    return {
        "micro_batch_size": draw(st.integers(1, 1 << 20)),
        "accumulation_steps": draw(st.integers(1, 1 << 20)),
        "sequence_length": draw(st.integers(1, 1 << 30)),
        "packing": packing,
        "sort_by_length": False if packing else draw(st.booleans()),
    }


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, Any]:
    settings = {"every_updates": draw(maybe(counts)), "every_minutes": draw(maybe(positives))}
    has_cadence = any(value is not None for value in settings.values())
    return {**settings, "keep": draw(st.integers(1, 1000)) if has_cadence else 1}


@st.composite
def model_sources(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()):
        return {"id": draw(paths)}
    owner = draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,8}", fullmatch=True))
    name = draw(st.from_regex(r"[A-Za-z0-9_.-]{1,8}", fullmatch=True).filter(lambda text: set(text) != {"."}))
    return {"id": f"{owner}/{name}", "revision": draw(maybe(names))}


@st.composite
def configs(draw: st.DrawFn) -> TrainingConfig:
    """Draw any configuration that keeps the rules, with absolute paths (as a loaded one has)."""
    cpu = draw(st.booleans())
    shape = draw(formats(cpu=cpu))
    is_16_bit = shape["precision"]["dtype"] != "fp32"
    fields = {
        **shape,
        **draw(data_settings()),
        "model": draw(model_sources()),
        "device": "cpu" if cpu else "cuda",
        "optimizer": draw(optimizer_settings(cpu=cpu)),
        "schedule": draw(schedules()),
        "batch": draw(batches()),
        "attention": draw(st.sampled_from(["sdpa", "eager", *(["flash_attention_2"] if is_16_bit else [])])),
        "gradient_checkpointing": draw(st.booleans()),
        "loss": draw(st.sampled_from(["stock", "chunked", *([] if cpu else ["liger"])])),
        "checkpoint": draw(checkpoints()),
        "output": draw(maybe(paths)),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }
    return TrainingConfig.create(**fields)
