"""Write and read adapters in the file format of Hugging Face's peft.

``adapter_model.safetensors`` has ``base_model.model.LAYER.lora_A.weight`` and ``...lora_B.weight``
for each adapted layer. For each other module with a trained parameter (peft's ``modules_to_save``)
it has every tensor of that module, as ``base_model.model.MODULE.weight``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedsim import regular_files
from fedsim.adapters.layers import FACTORS, is_conv1d, low_rank_layers
from fedsim.errors import FedsimError, printable
from fedsim.models.parameters import require_finite

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

# Settings of peft's config that change what an adapter computes; LoRA here has none of them.
_UNSUPPORTED = (
    "use_rslora",
    "use_dora",
    "use_qalora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
)


def peft_files(model: nn.Module, rank: int, alpha: float) -> dict[str, bytes]:
    """Contents of the config and weights files of an adapted model, by file name.

    Raises
    ------
    FedsimError
        If a further parameter is trained that peft cannot save.
    """
    saved = _saved_modules(model)
    tensors = {key: value.detach().cpu().contiguous() for key, value in _entries(model).items()}
    config = {
        "base_model_name_or_path": None,
        "bias": "none",
        # Of the layers alone: peft wants to know whether their weights are transposed.
        "fan_in_fan_out": any(is_conv1d(m.base_layer) for m in low_rank_layers(model).values()),
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": saved or None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": _target_modules(model),
        "task_type": None,
        "use_dora": False,
        "use_rslora": False,
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    return {CONFIG: text.encode(), WEIGHTS: save(tensors, metadata={"format": "pt"})}


def load(model: nn.Module, directory: Path, rank: int, alpha: float) -> None:
    """Load the weights of such files into an adapted model; all of them, or none.

    Raises
    ------
    FedsimError
        If a file is missing or damaged, or its rank, scaling, kind of adapter or model differs.
    """
    where = f"adapter.weights = '{directory}'"
    config = _read_config(where, directory / CONFIG)
    for key, value, wanted in (
        ("peft_type", config.get("peft_type"), "LORA"),
        ("r", config.get("r"), rank),
        ("lora_alpha", config.get("lora_alpha"), alpha),
        ("bias", config.get("bias", "none"), "none"),
        *((key, config.get(key) or None, None) for key in _UNSUPPORTED),
    ):
        if value != wanted:
            setting = {"r": "adapter.rank", "lora_alpha": "adapter.alpha"}.get(key)
            allowed = f"as {setting} = {wanted}" if setting else repr(wanted) if wanted else "unset"
            raise FedsimError(
                f"{where} has {key} = {printable(repr(value))[:60]}; it must be {allowed}."
            )
    try:
        tensors = load_file(regular_files.require(directory / WEIGHTS))
    except (SafetensorError, OSError) as error:
        raise FedsimError(f"{where} has no readable {WEIGHTS} ({error}).") from None
    entries = _entries(model)
    _check(where, tensors, entries)
    with torch.no_grad():
        for key, value in entries.items():
            value.copy_(tensors[key])


def _check(where: str, tensors: Mapping[str, Tensor], entries: Mapping[str, Tensor]) -> None:
    lacks = [key for key in entries if key not in tensors]
    unknown = [key for key in tensors if key not in entries]
    if lacks or unknown:
        fault = f"lacks {lacks[0]}" if lacks else f"holds {printable(unknown[0])[:200]}"
        raise FedsimError(
            f"{where} {fault}: it belongs to other layers than those of this model's "
            "adapter.targets and model.trainable."
        )
    for key, value in entries.items():
        tensor = tensors[key]
        if tensor.shape != value.shape or tensor.is_floating_point() != value.is_floating_point():
            numbers = "floating point" if value.is_floating_point() else "of whole numbers"
            raise FedsimError(
                f"{where} has {tensor.dtype} {list(tensor.shape)} for {key}; it must be {numbers} "
                f"{list(value.shape)}."
            )
        require_finite(where, key, tensor, value.dtype)


def _read_config(where: str, path: Path) -> dict[str, Any]:
    try:
        config = json.loads(regular_files.read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise FedsimError(
            f"{where} has no readable {CONFIG} ({printable(error)}); it must be a folder in peft's "
            "format, such as `fedsim export --to peft` writes."
        ) from None
    if not isinstance(config, dict):
        raise FedsimError(f"{where} has no table in {CONFIG}.")
    return config


def _entries(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors that the file of weights holds, by their names in the file."""
    entries: dict[str, Tensor] = {}
    for name, layer in low_rank_layers(model).items():
        for factor in FACTORS:
            entries[f"{PREFIX}{name}.{factor}.weight"] = layer.get_submodule(factor).weight  # type: ignore[assignment]
    for module in _saved_modules(model):
        tensors = model.get_submodule(module).state_dict(keep_vars=True)
        entries |= {f"{PREFIX}{module}.{name}": value for name, value in tensors.items()}
    return entries


def _saved_modules(model: nn.Module) -> list[str]:
    """Names of the modules with a trained parameter that is not an adapter's.

    Raises
    ------
    FedsimError
        If the model itself has such a parameter, or a module with an adapted layer in it, or peft
        (which matches the ends of names) would confuse one of the modules with another.
    """
    adapters = low_rank_layers(model)
    inside = tuple(f"{name}." for name in adapters)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    besides = [name for name in trained if not name.startswith(inside)]
    modules = [name.rpartition(".")[0] for name in besides]
    saved = list(dict.fromkeys(modules))
    names = [name for name, _ in model.named_modules()]
    for module in saved:
        alike = [f"'{n}' ends alike" for n in names if n.endswith(module) and n != module]
        within = [f"'{n}' in its module is adapted" for n in adapters if n.startswith(f"{module}.")]
        if not module or alike or within:
            why = [*alike, *within][0] if module else "it is in no module of its own"
            name = besides[modules.index(module)]
            raise FedsimError(
                f"model.trainable names {name}, which peft cannot save: {why}; `--to safetensors` "
                "writes the whole model."
            )
    return saved


def _target_modules(model: nn.Module) -> list[str] | str:
    """peft's ``target_modules``: names of the adapted layers, or a pattern if names are ambiguous.

    peft matches a name against the ends of module names, but a pattern against whole names.
    """
    adapted = sorted(low_rank_layers(model))
    others = [name for name, _ in model.named_modules() if name not in adapted]
    if any(other.endswith(f".{name}") for name in adapted for other in [*others, *adapted]):
        return "|".join(map(re.escape, adapted))
    return adapted
