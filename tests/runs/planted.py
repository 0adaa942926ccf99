"""What can go wrong with a living run, each where a library or we could have brought it about."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from runs.made_live import BF16, LORA, NF4
from torch import nn

from foretune.contract import OptimizerSettings, PrecisionSettings, QuantizationSettings
from foretune.runtime.checkpointing import enable_checkpointing
from foretune.runtime.live import Live
from foretune.runtime.step import TrainingStep

SGD = OptimizerSettings.create(name="sgd", momentum=0.9, learning_rate=0.01)


class Planted(NamedTuple):
    """A deviation: what it does to a living run, and under which field it is found."""

    field: str
    plant: Callable[[Live], Any]
    fields: dict[str, Any] = {}  # noqa: RUF012 - never changed
    """Of the configuration."""


def layer(live: Live, number: int = 0) -> Any:
    return live.base.model.layers[number]


def query(live: Live) -> Any:
    return layer(live).self_attn.q_proj


def group(live: Live) -> dict[str, Any]:
    return live.optimizer.param_groups[0]


def some_trained(live: Live) -> nn.Parameter:
    return next(iter(live.trained.values()))


def recast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    parameter.data = parameter.data.to(dtype)


# -- what can be planted


def one_element(parameter: torch.Tensor) -> None:
    flat = parameter.data.view(-1)
    flat[-1] = flat[-1].nextafter(torch.tensor(9.0)) if flat.is_floating_point() else flat[-1] ^ 1


def two_swapped(parameter: nn.Parameter) -> None:
    flat = parameter.data.view(-1)
    flat[[2, 5]] = flat[[5, 2]]


def replaced(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.detach() * 1.001, requires_grad=False)


def on_meta(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.detach().to("meta"), requires_grad=False)


def buffer_on_meta(live: Live) -> None:
    live.base.model.rotary_emb.inv_freq = live.base.model.rotary_emb.inv_freq.to("meta")


def without_adapter(live: Live) -> None:
    layer(live).self_attn.q_proj = query(live).base_layer


def adapter_unasked(live: Live) -> None:
    from peft import LoraConfig
    from peft.tuners.lora.layer import Linear

    layer(live).mlp.up_proj = Linear(layer(live).mlp.up_proj, "default", LoraConfig(r=4), r=4, lora_alpha=8)


def other_rank(live: Live) -> None:
    query(live).lora_A["default"], query(live).lora_B["default"] = nn.Linear(32, 2, False), nn.Linear(2, 32, False)


def adapter_made_inactive(live: Live) -> None:
    query(live).set_adapter([])


def attention_of_one_layer(live: Live) -> None:
    other = copy.copy(layer(live).self_attn.config)
    other._attn_implementation = "eager"
    layer(live).self_attn.config = other


def other_optimizer(live: Live) -> None:
    live.optimizer = torch.optim.SGD(live.trained.values(), lr=0.01)


def frozen_in_group(live: Live) -> None:
    group(live)["params"].append(live.base.model.norm.weight)


def held_twice(live: Live) -> None:
    live.optimizer.param_groups.append({**group(live), "params": [some_trained(live)]})


def own_group(live: Live, **changes: Any) -> None:
    """Move one weight to a group of its own, as optimizers with exceptions have them."""
    taken = group(live)["params"].pop()
    live.optimizer.param_groups.append({**group(live), "params": [taken], **changes})


PLANTED: dict[str, Planted] = {
    # formats and places
    "a norm in bf16": Planted("precision.dtype", lambda live: recast(live.base.model.norm.weight, torch.bfloat16)),
    "a norm in int8": Planted("precision.dtype", lambda live: recast(live.base.model.norm.weight, torch.int8)),
    "a norm in fp32 where nothing is quantized": Planted(
        "precision.dtype", lambda live: recast(live.base.model.norm.weight, torch.float32), {"precision": BF16}
    ),
    "a trained weight in bf16": Planted(
        "precision.dtype", lambda live: recast(query(live).weight, torch.bfloat16), {"lora": None}
    ),
    "an adapter in bf16": Planted(
        "precision.adapter_dtype", lambda live: recast(query(live).lora_A["default"].weight, torch.bfloat16)
    ),
    "an adapter in fp32 where bf16 is asked for": Planted(
        "precision.adapter_dtype",
        lambda live: recast(query(live).lora_A["default"].weight, torch.float32),
        {"precision": PrecisionSettings.create(dtype="bf16", adapter_dtype="bf16")},
    ),
    "a copy that is trained whole in another dtype": Planted(
        "lora.modules_to_save (dtype)",
        lambda live: recast(live.base.lm_head.modules_to_save["default"].weight, torch.bfloat16),
        {"lora": LORA.with_(modules_to_save=("lm_head",))},
    ),
    "a weight left on meta": Planted("device", lambda live: on_meta(live.base.model.norm)),
    "an adapter left on meta": Planted("device", lambda live: on_meta(query(live).lora_B["default"])),
    "a buffer left on meta": Planted("device", buffer_on_meta),
    # what is trained
    "one element of the base": Planted(
        "base weights that are not trained", lambda live: one_element(query(live).base_layer.weight)
    ),
    "two elements swapped": Planted(
        "base weights that are not trained", lambda live: two_swapped(live.base.model.embed_tokens.weight)
    ),
    "another weight in the place of the loaded one": Planted(
        "base weights that are not trained", lambda live: replaced(query(live).base_layer)
    ),
    "a bias that was not loaded": Planted(
        "base weights that are not trained",
        lambda live: setattr(query(live).base_layer, "bias", nn.Parameter(torch.zeros(32), requires_grad=False)),
    ),
    "a frozen weight that wants gradients": Planted(
        "trainable parameters", lambda live: live.base.model.norm.requires_grad_(True)
    ),
    "an adapter that is frozen": Planted(
        "trainable parameters", lambda live: query(live).lora_B["default"].requires_grad_(False)
    ),
    "a weight frozen in full training": Planted(
        "trainable parameters", lambda live: query(live).requires_grad_(False), {"lora": None}
    ),
    "a frozen weight with a gradient": Planted(
        "gradients of frozen weights",
        lambda live: setattr(live.base.model.norm.weight, "grad", torch.zeros(32)),
    ),
    # adapters
    "a layer without its adapter": Planted("lora.targets", without_adapter),
    "an adapter on a layer unasked": Planted(
        "lora.targets", adapter_unasked, {"lora": LORA.with_(targets="attention")}
    ),
    "another rank on one layer": Planted("lora.rank", other_rank),
    "another scaling on one layer": Planted("lora.scaling", lambda live: query(live).scale_layer(2.0)),
    "dropout on one layer": Planted(
        "lora.dropout", lambda live: query(live).lora_dropout.update({"default": nn.Dropout(0.5)})
    ),
    "no dropout on one layer": Planted(
        "lora.dropout",
        lambda live: query(live).lora_dropout.update({"default": nn.Identity()}),
        {"lora": LORA.with_(dropout=0.25)},
    ),
    "a layer that lost DoRA": Planted(
        "lora.use_dora", lambda live: query(live).lora_variant.clear(), {"lora": LORA.with_(use_dora=True)}
    ),
    "no adapters where some are asked for": Planted("lora.targets", lambda live: live.model.base_model.unload()),
    "an adapter where none is asked for": Planted("lora", adapter_unasked, {"lora": None}),
    "all adapters switched off": Planted("adapters", lambda live: live.model.base_model.disable_adapter_layers()),
    "one adapter switched off": Planted("adapters", adapter_made_inactive),
    "an adapter merged": Planted("adapters", lambda live: query(live).merge()),
    "a trained copy switched off": Planted(
        "adapters",
        lambda live: live.base.lm_head.enable_adapters(False),
        {"lora": LORA.with_(modules_to_save=("lm_head",))},
    ),
    # the program
    "another attention in one layer": Planted("attention", attention_of_one_layer),
    "another attention in the whole": Planted("attention", lambda live: live.base.set_attn_implementation("eager")),
    "a cache": Planted("use_cache", lambda live: setattr(live.base.config, "use_cache", True)),
    "a layer that keeps its activations": Planted(
        "gradient_checkpointing", lambda live: setattr(layer(live), "gradient_checkpointing", False)
    ),
    "checkpointing in its reentrant form": Planted(
        "gradient_checkpointing", lambda live: enable_checkpointing(live.base, is_reentrant=True)
    ),
    "checkpointing unasked": Planted(
        "gradient_checkpointing", lambda live: enable_checkpointing(live.base), {"gradient_checkpointing": False}
    ),
    "another loss": Planted("loss", lambda live: setattr(live.step, "head_map", None), {"loss": "chunked"}),
    "a fused loss": Planted("loss", lambda live: setattr(live.step, "fused_loss", print), {"loss": "chunked"}),
    "a layer in evaluation mode": Planted("training mode", lambda live: layer(live).eval()),
    "one dropout in evaluation mode": Planted(
        "training mode", lambda live: query(live).lora_dropout.eval(), {"lora": LORA.with_(dropout=0.25)}
    ),
    # the optimizer
    "another optimizer": Planted("optimizer.name", other_optimizer),
    "a trained weight that is in no group": Planted("optimizer's parameters", lambda live: group(live)["params"].pop()),
    "a trained weight that is in two groups": Planted("optimizer's parameters", held_twice),
    "a frozen weight in a group": Planted("optimizer's parameters", frozen_in_group),
    "another rate": Planted("optimizer.learning_rate", lambda live: group(live).update(lr=0.02)),
    "another rate in one group": Planted("optimizer.learning_rate", lambda live: own_group(live, lr=0.02)),
    "weight decay in one group": Planted("optimizer.weight_decay", lambda live: own_group(live, weight_decay=0.1)),
    "other betas": Planted("optimizer.beta1, beta2, epsilon", lambda live: group(live).update(betas=(0.9, 0.95))),
    "another epsilon": Planted("optimizer.beta1, beta2, epsilon", lambda live: group(live).update(eps=1e-6)),
    "no momentum": Planted("optimizer.momentum", lambda live: group(live).update(momentum=0.0), {"optimizer": SGD}),
    "another kernel": Planted("optimizer.implementation", lambda live: group(live).update(fused=False, foreach=True)),
    "no kernel": Planted("optimizer.implementation", lambda live: group(live).update(fused=None, foreach=None)),
}

# -- a quantized base


def quantized(live: Live) -> Any:
    return query(live).base_layer


def requantized(live: Live, **settings: Any) -> None:
    """Quantize one layer again, in another way."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    weight = dequantize_4bit(quantized(live).weight.data, quantized(live).weight.quant_state)
    wanted = {"quant_type": "nf4", "compress_statistics": True, **settings}
    quantized(live).weight = Params4bit(weight, requires_grad=False, **wanted).to("cpu")


def not_quantized(live: Live) -> None:
    query(live).base_layer = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16).requires_grad_(False)


def in_eight_bits(live: Live) -> None:
    from bitsandbytes.nn import Linear8bitLt

    query(live).base_layer = Linear8bitLt(32, 32, bias=False, has_fp16_weights=False).to("cpu").requires_grad_(False)


def in_four_bits(live: Live) -> None:
    from bitsandbytes.nn import Linear4bit

    query(live).base_layer = Linear4bit(32, 32, bias=False, quant_type="nf4").to("cpu").requires_grad_(False)


def state_of(live: Live) -> Any:
    return quantized(live).weight.quant_state


FOUR: dict[str, Any] = {"precision": BF16, "quantization": NF4}
EIGHT: dict[str, Any] = {"precision": BF16, "quantization": QuantizationSettings.create(scheme="int8")}
PLANTED |= {
    "a layer in 16 bits beside nf4": Planted("quantization.scheme", not_quantized, FOUR),
    "a layer in int8 beside nf4": Planted("quantization.scheme", in_eight_bits, FOUR),
    "a layer in 16 bits beside int8": Planted("quantization.scheme", not_quantized, EIGHT),
    "a layer in nf4 beside int8": Planted("quantization.scheme", in_four_bits, EIGHT),
    "a layer in fp4": Planted("quantization (kind)", lambda live: requantized(live, quant_type="fp4"), FOUR),
    "a layer whose scales are not quantized": Planted(
        "quantization.double_quant", lambda live: requantized(live, compress_statistics=False), FOUR
    ),
    "a layer that lost its state": Planted(
        "quantization (state)", lambda live: setattr(quantized(live).weight, "quant_state", None), FOUR
    ),
    "another compute dtype": Planted(
        "quantization.compute_dtype", lambda live: setattr(quantized(live), "compute_dtype", torch.float32), FOUR
    ),
    "a compute dtype that the first input chooses": Planted(
        "quantization.compute_dtype", lambda live: setattr(quantized(live), "compute_type_is_set", False), FOUR
    ),
    "a 4-bit number": Planted(
        "base weights that are not trained", lambda live: one_element(quantized(live).weight), FOUR
    ),
    "a scale": Planted("base weights that are not trained", lambda live: one_element(state_of(live).absmax), FOUR),
    "the scale of a scale": Planted(
        "base weights that are not trained", lambda live: one_element(state_of(live).state2.absmax), FOUR
    ),
    "the mean of the scales": Planted(
        "base weights that are not trained", lambda live: state_of(live).offset.add_(1e-3), FOUR
    ),
    "an embedding in fp32 beside nf4": Planted(
        "precision.dtype", lambda live: recast(live.base.model.embed_tokens.weight, torch.float32), FOUR
    ),
    "one element of an int8 weight": Planted(
        "base weights that are not trained", lambda live: one_element(quantized(live).weight), EIGHT
    ),
}

# -- what only updates bring about


def state(live: Live) -> dict[str, Any]:
    return live.optimizer.state[some_trained(live)]


def moved(live: Live, name: str, **to: Any) -> None:
    state(live)[name] = state(live)[name].to(**to)


EIGHT_BIT_ADAM = OptimizerSettings.create(name="adamw_8bit", learning_rate=0.01)
PLANTED_AFTER: dict[str, Planted] = {
    "an infinite weight": Planted(
        "values of trained weights", lambda live: some_trained(live).data[0].fill_(float("inf"))
    ),
    "a weight that is no number": Planted(
        "values of trained weights", lambda live: some_trained(live).data[0].fill_(float("nan"))
    ),
    "a state in bf16": Planted("optimizer states (dtype)", lambda live: moved(live, "exp_avg", dtype=torch.bfloat16)),
    "a state elsewhere": Planted("optimizer states (device)", lambda live: moved(live, "exp_avg_sq", device="meta")),
    "a weight without its states": Planted(
        "optimizer states", lambda live: live.optimizer.state.pop(some_trained(live))
    ),
    "a weight without its second moment": Planted("optimizer states", lambda live: state(live).pop("exp_avg_sq")),
    "a weight without momentum": Planted(
        "optimizer states", lambda live: state(live).update(momentum_buffer=None), {"optimizer": SGD}
    ),
    "momentum in bf16": Planted(
        "optimizer states (dtype)",
        lambda live: moved(live, "momentum_buffer", dtype=torch.bfloat16),
        {"optimizer": SGD},
    ),
    "an 8-bit optimizer's state in bf16": Planted(
        "optimizer states (dtype)",
        lambda live: moved(live, "state1", dtype=torch.bfloat16),
        {"optimizer": EIGHT_BIT_ADAM},
    ),
    "one step too many for one weight": Planted("optimizer steps", lambda live: state(live)["step"].add_(1)),
    "an 8-bit optimizer's step too many": Planted(
        "optimizer steps", lambda live: state(live).update(step=2), {"optimizer": EIGHT_BIT_ADAM}
    ),
}

# -- steps that let the examples of a packed row see each other


class WithoutPositions(TrainingStep):
    """Takes every row for one example."""

    def forward(self, input_ids_BS: Any, targets_BS: Any, position_ids_BS: Any = None) -> Any:
        return super().forward(input_ids_BS, targets_BS)


def by_class(live: Live) -> None:
    live.step.__class__ = WithoutPositions


def by_backbone(live: Live, changes: Callable[[Any], dict[str, Any]]) -> None:
    """Let the backbone be called otherwise, as a library's wrapper could."""

    def changed(_: Any, inputs: Any, keywords: dict[str, Any]) -> Any:
        return inputs, {**keywords, **changes(keywords["input_ids"])}

    live.base.model.register_forward_pre_hook(changed, with_kwargs=True)


LEAKS: dict[str, Callable[[Live], Any]] = {
    "a step that drops positions": by_class,
    "a backbone that gets no positions": lambda live: by_backbone(live, lambda ids: {"position_ids": None}),
    "an attention mask": lambda live: by_backbone(live, lambda ids: {"attention_mask": torch.ones_like(ids)}),
    "a cache that is used": lambda live: by_backbone(live, lambda ids: {"use_cache": True}),
}
