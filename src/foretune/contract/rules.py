"""What may not stand together: one table. The settings page and the tests list it.

A rule speaks of what is asked for; whether this machine can do it (bfloat16 on this card) is checked before a run.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from foretune.contract.config import TrainingConfig
from foretune.contract.paths import is_path_like
from foretune.contract.scalars import echo
from foretune.errors import Problem

__all__ = ["RULES", "Rule", "Violation", "broken_rules", "experimental_choices", "rule_problems"]


class Violation(NamedTuple):
    """What was got and why it cannot work, and what to do."""

    message: str
    hint: str


class Rule(NamedTuple):
    """A claim about several fields that every configuration keeps."""

    name: str
    fields: tuple[str, ...]
    claim: str
    check: Callable[[TrainingConfig], Violation | None]
    is_about_qualification: bool = False
    """The request makes sense, but foretune is not qualified for it (UnsupportedError)."""


def broken_rules(config: TrainingConfig, *, doubtful: Collection[str] = ()) -> list[tuple[Rule, Violation]]:
    """Return every rule that the configuration breaks, with the reason.

    `doubtful` are fields and sections whose value nobody can tell yet; a rule that reads one of them is not checked.
    """
    found = [(rule, rule.check(config)) for rule in RULES if not _reads(rule, doubtful)]
    return [(rule, violation) for rule, violation in found if violation is not None]


def _reads(rule: Rule, doubtful: Collection[str]) -> bool:
    """Whether a field of the rule, or the section that holds it, is among them."""
    return any(field in doubtful or field.partition(".")[0] in doubtful for field in rule.fields)


def rule_problems(
    config: TrainingConfig, places: Mapping[str, str | None], doubtful: Collection[str] = ()
) -> list[tuple[Problem, bool]]:
    """Return a problem for each broken rule, at the first of its fields that somebody wrote.

    `places` gives the place of each dotted field. The flag says that the problem is one of qualification. `doubtful`
    is as in `broken_rules`.
    """
    problems = []
    for rule, violation in broken_rules(config, doubtful=doubtful):
        written = [place for place in map(places.get, rule.fields) if place is not None]
        problem = Problem(violation.message, violation.hint, written[0] if written else None, rule.fields[0])
        problems.append((problem, rule.is_about_qualification))
    return problems


def experimental_choices(config: TrainingConfig) -> tuple[str, ...]:
    """Return the choices that are accepted but not qualified for release, as `field: value`."""
    choices = []
    if config.attention == "flash_attention_2":
        choices.append("attention: flash_attention_2")
    if config.loss == "liger":
        choices.append("loss: liger")
    return tuple(choices)


# --- device and parallelism


def _device(config: TrainingConfig) -> Violation | None:
    if config.device in ("cpu", "cuda"):
        return None
    message = f"device is {echo(config.device)}, for which foretune is not qualified; it is for cpu and cuda."
    if config.device.startswith("cuda") or "," in config.device or config.device.isdigit():
        return Violation(message, "Write cuda, and choose the card with CUDA_VISIBLE_DEVICES=N.")
    return Violation(message, "Write cuda for an NVIDIA card, else cpu with precision.dtype: fp32.")


def _parallelism(config: TrainingConfig) -> Violation | None:
    if config.parallelism == "single":
        return None
    message = f"parallelism is {config.parallelism}, for which foretune is not qualified; it is for single."
    if config.parallelism == "ddp":
        message += (
            " More cards would not lower the need of one: each holds all of it, and buckets of gradients beside it."
        )
    elif config.quantization is not None:
        message += " A quantized base is loaded whole before it is sharded, so each card would need room for all of it."
    return Violation(message, "Write parallelism: single; choose one card with CUDA_VISIBLE_DEVICES=N.")


def _cpu_dtype(config: TrainingConfig) -> Violation | None:
    if config.device != "cpu" or config.precision.dtype == "fp32":
        return None
    message = f"device is cpu, but precision.dtype is {config.precision.dtype}; on a CPU only fp32 is trained."
    return Violation(message, "Set precision.dtype: fp32.")


def _cpu_quantization(config: TrainingConfig) -> Violation | None:
    if config.device != "cpu" or config.quantization is None:
        return None
    message = f"device is cpu, but quantization is {config.quantization.scheme}, which is trained on CUDA only."
    return Violation(message, "Set quantization: null (or --method lora), or device: cuda.")


def _cuda_only(field: str, value: str, wanted: str) -> Violation:
    return Violation(f"{field} is {value}, which needs CUDA, but device is cpu.", f"Set {field}: {wanted}.")


def _cpu_optimizer(config: TrainingConfig) -> Violation | None:
    if config.device != "cpu" or config.optimizer.name in ("adamw", "sgd"):
        return None
    return _cuda_only("optimizer.name", config.optimizer.name, "adamw")


def _cpu_attention(config: TrainingConfig) -> Violation | None:
    if config.device != "cpu" or config.attention != "flash_attention_2":
        return None
    return _cuda_only("attention", config.attention, "sdpa")


def _cpu_loss(config: TrainingConfig) -> Violation | None:
    if config.device != "cpu" or config.loss != "liger":
        return None
    return _cuda_only("loss", config.loss, "chunked")


# --- formats


def _full_fp16(config: TrainingConfig) -> Violation | None:
    if config.lora is not None or config.precision.dtype != "fp16":
        return None
    message = (
        "precision.dtype is fp16 and lora is null: weights that are trained in fp16 lose small updates and overflow."
    )
    return Violation(message, "Set precision.dtype: bf16 or fp32, or train adapters (lora: {} or --method lora).")


def _quantized_needs_lora(config: TrainingConfig) -> Violation | None:
    if config.quantization is None or config.lora is not None:
        return None
    message = f"quantization is {config.quantization.scheme} and lora is null: quantized weights are not trainable."
    return Violation(message, "Train adapters (lora: {} or --method qlora), or set quantization: null.")


def _int8_options(config: TrainingConfig) -> Violation | None:
    quantization = config.quantization
    if quantization is None or quantization.scheme != "int8":
        return None
    given = [
        f"quantization.{name}: {echo(value).strip(chr(39))}"
        for name, value in (("double_quant", quantization.double_quant), ("compute_dtype", quantization.compute_dtype))
        if value is not None
    ]
    if not given:
        return None
    message = f"quantization.scheme is int8, which has no use for {' and '.join(given)} (an option of nf4)."
    return Violation(message, "Remove it, or set quantization.scheme: nf4.")


def _adapter_dtype_needs_lora(config: TrainingConfig) -> Violation | None:
    if config.lora is not None or config.precision.adapter_dtype == "fp32":
        return None
    message = f"precision.adapter_dtype is {config.precision.adapter_dtype}, but lora is null: there are no adapters."
    return Violation(message, "Remove precision.adapter_dtype, or train adapters (lora: {} or --method lora).")


def _adapter_fp16(config: TrainingConfig) -> Violation | None:
    if config.precision.adapter_dtype != "fp16":
        return None
    message = "precision.adapter_dtype is fp16: gradients of fp16 weights cannot be unscaled, so loss scaling fails."
    return Violation(message, "Set precision.adapter_dtype: fp32 (PEFT's default) or bf16.")


def _fp16_modules(config: TrainingConfig) -> Violation | None:
    if config.precision.dtype != "fp16" or config.lora is None or not config.lora.modules_to_save:
        return None
    message = (
        "precision.dtype is fp16 and lora.modules_to_save names modules, which are trained in that format: gradients "
        "of fp16 weights cannot be unscaled, so loss scaling fails."
    )
    return Violation(message, "Leave lora.modules_to_save out, or set precision.dtype: bf16 or fp32.")


def _flash_dtype(config: TrainingConfig) -> Violation | None:
    if config.attention != "flash_attention_2" or config.precision.dtype != "fp32":
        return None
    message = "attention is flash_attention_2, which computes in 16 bits only, but precision.dtype is fp32."
    return Violation(message, "Set attention: sdpa, or precision.dtype: bf16.")


# --- adapters


def _repeated(names: tuple[str, ...]) -> str | None:
    return next((name for index, name in enumerate(names) if name in names[:index]), None)


def _names_once(config: TrainingConfig) -> Violation | None:
    if config.lora is None:
        return None
    targets = config.lora.targets if isinstance(config.lora.targets, tuple) else ()
    for field, names in (("lora.targets", targets), ("lora.modules_to_save", config.lora.modules_to_save)):
        repeated = _repeated(names)
        if repeated is not None:
            return Violation(f"{field} names {echo(repeated)} twice.", "Name each module once.")
    return None


def _adapted_or_saved(config: TrainingConfig) -> Violation | None:
    if config.lora is None or not isinstance(config.lora.targets, tuple):
        return None
    both = next((name for name in config.lora.targets if name in config.lora.modules_to_save), None)
    if both is None:
        return None
    message = f"{echo(both)} stands in lora.targets and in lora.modules_to_save; a module is adapted or trained whole."
    return Violation(message, "Remove it from one of them.")


# --- optimizer and schedule


def _momentum(config: TrainingConfig) -> Violation | None:
    optimizer = config.optimizer
    if optimizer.momentum == 0 or optimizer.name == "sgd":
        return None
    message = f"optimizer.momentum is {optimizer.momentum:g}, but {optimizer.name} has none (it is beta1 there)."
    return Violation(message, "Remove optimizer.momentum, or set optimizer.name: sgd.")


def _adamw_options(config: TrainingConfig) -> Violation | None:
    optimizer = config.optimizer
    if optimizer.name != "sgd":
        return None
    defaults = type(optimizer)()
    names = [name for name in ("beta1", "beta2", "epsilon") if getattr(optimizer, name) != getattr(defaults, name)]
    if not names:
        return None
    given = ", ".join(f"optimizer.{name}" for name in names)
    message = f"optimizer.name is sgd, which has no use for {given} (of AdamW)."
    return Violation(message, "Remove it, or set optimizer.name: adamw.")


def _implementation(config: TrainingConfig) -> Violation | None:
    optimizer = config.optimizer
    if optimizer.implementation is None or optimizer.name in ("adamw", "sgd"):
        return None
    message = (
        f"optimizer.implementation is {optimizer.implementation}, a kernel of torch's adamw and sgd, but "
        f"optimizer.name is {optimizer.name}, which brings its own."
    )
    return Violation(message, "Remove optimizer.implementation, or set optimizer.name: adamw.")


def _length(config: TrainingConfig) -> Violation | None:
    schedule = config.schedule
    if schedule.updates is None or schedule.epochs is None:
        return None
    message = (
        f"schedule.updates is {schedule.updates} and schedule.epochs is {schedule.epochs:g}; one decides the length."
    )
    return Violation(message, "Remove one of them.")


def _warmup(config: TrainingConfig) -> Violation | None:
    schedule = config.schedule
    if schedule.updates is None or schedule.warmup_updates < schedule.updates:
        return None
    message = (
        f"schedule.warmup_updates is {schedule.warmup_updates} of {schedule.updates} updates: the learning rate would "
        "never reach its peak."
    )
    return Violation(message, "Set fewer warmup_updates than updates.")


# --- data, evaluation, checkpoints, model


def _packing(config: TrainingConfig) -> Violation | None:
    if not (config.batch.packing and config.batch.sort_by_length):
        return None
    message = "batch.packing and batch.sort_by_length are both true; packed rows are all of one length."
    return Violation(message, "Set one of them to false.")


def _spans(config: TrainingConfig) -> Violation | None:
    if config.data.spans == "verified" or config.data.supervision == "assistant_only":
        return None
    message = (
        f"data.spans is {config.data.spans}, but data.supervision is {config.data.supervision}: no span is looked for."
    )
    return Violation(message, "Remove data.spans, or set data.supervision: assistant_only.")


def _template_date(config: TrainingConfig) -> Violation | None:
    text = config.data.template_date
    if text is None or _is_day(text):
        return None
    return Violation(f"data.template_date is {echo(text)}, and no day.", "Write it as 2026-01-31.")


def _is_day(text: str) -> bool:
    """Whether a text is a day of the calendar as ISO 8601 writes it. (datetime costs 2 ms of every start.)"""
    year, month, day = text[:4], text[5:7], text[8:]
    if [len(text), text[4:5], text[7:8]] != [10, "-", "-"] or not f"{year}{month}{day}".isdecimal():
        return False
    is_leap = int(year) % 4 == 0 and (int(year) % 100 != 0 or int(year) % 400 == 0)
    days = (31, 29 if is_leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
    return int(year) > 0 and 1 <= int(month) <= 12 and 1 <= int(day) <= days[int(month) - 1]


def _held_out(config: TrainingConfig) -> Violation | None:
    if config.evaluation.data is None or config.evaluation.split is None:
        return None
    message = (
        f"evaluation.data is given and evaluation.split is {config.evaluation.split:g}; one says what is held out."
    )
    return Violation(message, "Remove one of them.")


def _other_rows(config: TrainingConfig) -> Violation | None:
    if config.evaluation.data is None or config.evaluation.data != config.data.train:
        return None
    message = f"evaluation.data and data.train are the same file, {echo(config.data.train)}."
    return Violation(message, "Name other rows, or hold some out with evaluation.split.")


def _evaluation_cadence(config: TrainingConfig) -> Violation | None:
    evaluation = config.evaluation
    if evaluation.every_updates is None or evaluation.data is not None or evaluation.split is not None:
        return None
    message = f"evaluation.every_updates is {evaluation.every_updates}, but there is nothing to evaluate on."
    return Violation(message, "Set evaluation.data or evaluation.split.")


def _keep(config: TrainingConfig) -> Violation | None:
    checkpoint = config.checkpoint
    if checkpoint.keep == 1 or checkpoint.every_updates is not None or checkpoint.every_minutes is not None:
        return None
    message = f"checkpoint.keep is {checkpoint.keep}, but no checkpoint is ever saved."
    return Violation(message, "Set checkpoint.every_updates or checkpoint.every_minutes.")


def _revision(config: TrainingConfig) -> Violation | None:
    if config.model.revision is None or not is_path_like(config.model.id):
        return None
    message = f"model.revision is {echo(config.model.revision)}, but model.id is a path, which has no revisions."
    return Violation(message, "Remove model.revision, or name a hub id.")


RULES: tuple[Rule, ...] = (
    Rule("device", ("device",), "the device is `cpu` or `cuda` (the default card)", _device, True),
    Rule("parallelism", ("parallelism",), "one device does the work: `single`", _parallelism, True),
    Rule("cpu-fp32", ("precision.dtype", "device"), "`device: cpu` needs explicit fp32", _cpu_dtype),
    Rule(
        "cpu-unquantized",
        ("quantization.scheme", "quantization", "device"),
        "`device: cpu` takes no quantization",
        _cpu_quantization,
    ),
    Rule("cpu-optimizer", ("optimizer.name", "device"), "`device: cpu` takes torch's adamw or sgd", _cpu_optimizer),
    Rule("cpu-attention", ("attention", "device"), "`device: cpu` takes sdpa or eager attention", _cpu_attention),
    Rule("cpu-loss", ("loss", "device"), "`device: cpu` takes the stock or the chunked loss", _cpu_loss),
    Rule("no-full-fp16", ("precision.dtype", "lora"), "weights that are trained are never held in fp16", _full_fp16),
    Rule(
        "quantized-base-is-frozen",
        ("quantization.scheme", "quantization", "lora"),
        "a quantized base is trained through adapters only",
        _quantized_needs_lora,
    ),
    Rule(
        "int8-options",
        ("quantization.double_quant", "quantization.compute_dtype", "quantization.scheme"),
        "`double_quant` and `compute_dtype` are options of nf4",
        _int8_options,
    ),
    Rule(
        "adapter-dtype-needs-adapters",
        ("precision.adapter_dtype", "lora"),
        "`adapter_dtype` needs `lora`",
        _adapter_dtype_needs_lora,
    ),
    Rule("no-fp16-adapters", ("precision.adapter_dtype",), "adapters are never held in fp16", _adapter_fp16),
    Rule(
        "no-fp16-modules",
        ("lora.modules_to_save", "precision.dtype"),
        "modules that are trained whole are never held in fp16",
        _fp16_modules,
    ),
    Rule("flash-16-bit", ("attention", "precision.dtype"), "flash attention needs a 16-bit dtype", _flash_dtype),
    Rule("names-once", ("lora.targets", "lora.modules_to_save"), "a module is named once in a list", _names_once),
    Rule(
        "adapted-or-whole",
        ("lora.modules_to_save", "lora.targets"),
        "a module is adapted or trained whole, not both",
        _adapted_or_saved,
    ),
    Rule("momentum", ("optimizer.momentum", "optimizer.name"), "`momentum` belongs to sgd", _momentum),
    Rule(
        "adamw-options",
        ("optimizer.beta1", "optimizer.beta2", "optimizer.epsilon", "optimizer.name"),
        "`beta1`, `beta2` and `epsilon` belong to AdamW",
        _adamw_options,
    ),
    Rule(
        "implementation",
        ("optimizer.implementation", "optimizer.name"),
        "`implementation` belongs to torch's adamw and sgd",
        _implementation,
    ),
    Rule("one-length", ("schedule.epochs", "schedule.updates"), "`updates` and `epochs` exclude each other", _length),
    Rule("warmup", ("schedule.warmup_updates", "schedule.updates"), "the warm-up is shorter than the run", _warmup),
    Rule(
        "packing-or-sorting",
        ("batch.sort_by_length", "batch.packing"),
        "`packing` and `sort_by_length` exclude each other",
        _packing,
    ),
    Rule("spans", ("data.spans", "data.supervision"), "`spans: template` needs `assistant_only`", _spans),
    Rule("template-date", ("data.template_date",), "`template_date` is a day", _template_date),
    Rule("held-out-once", ("evaluation.split", "evaluation.data"), "`data` and `split` exclude each other", _held_out),
    Rule("other-rows", ("evaluation.data", "data.train"), "evaluation rows are not the training rows", _other_rows),
    Rule(
        "evaluation-cadence",
        ("evaluation.every_updates", "evaluation.data", "evaluation.split"),
        "`evaluation.every_updates` needs rows to evaluate on",
        _evaluation_cadence,
    ),
    Rule(
        "keep",
        ("checkpoint.keep", "checkpoint.every_updates", "checkpoint.every_minutes"),
        "`checkpoint.keep` above 1 needs a cadence",
        _keep,
    ),
    Rule("revision", ("model.revision", "model.id"), "a path has no revision", _revision),
)
"""Every rule. A new one goes here and nowhere else."""
