"""Models of Hugging Face's `transformers`: from a local folder, and with logits as their output.

A config reads this file, and needs no torch: modules have the type ``Any`` here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim import optional_packages
from fedsim.arguments import as_text, check_arguments
from fedsim.errors import FedsimError, printable
from fedsim.registry import register
from fedsim.settings import check_settings

_log = logging.getLogger("fedsim")

PREFIX = "hf:"
"""What stands before a folder's path in `model.name`."""


def kind_of(name: str) -> str:
    """Registered kind of a model's name: 'hf' of 'hf:FOLDER'."""
    return "hf" if name.startswith(PREFIX) else name


@register("model", "hf")
@dataclass(frozen=True)
class HuggingFaceModel:
    """A model of `transformers` from a local folder, which `model.name` names: 'hf:FOLDER'.

    Nothing is downloaded, and no code or pickled file of the folder is run: the weights must be
    safetensors, and the class is the one of `transformers` that ``config.json`` names in
    ``architectures``. A classifier has as many classes as the data.
    """

    name: str = "hf"
    """'hf:' and the folder of the model's config and weights."""
    gradient_checkpointing: bool = False
    """Whether layers are computed again in the backward pass, in place of being kept in memory."""

    def __post_init__(self) -> None:
        check_settings(self, "model.")

    def __call__(self, num_classes: int, vocabulary: int | Mapping[str, int]) -> Any:
        """Load it; of several inputs by name the tokens are ``input_ids``.

        Raises
        ------
        FedsimError
            If the package is not installed, there is no such folder, it holds no such model, or
            the model knows fewer tokens than the data have.
        """
        where, folder = f"model.name = '{self.name}'", self.name.partition(":")[2]
        if not folder or not (Path(folder) / "config.json").is_file():
            raise FedsimError(
                f"{where}; it must be 'hf:FOLDER', a local folder with a config.json and weights "
                "such as save_pretrained writes (`hf download OWNER/NAME --local-dir FOLDER` "
                "fetches one)."
            )
        optional_packages.require(where, "transformers")
        try:
            model = _loaded(folder, num_classes)
            if self.gradient_checkpointing:
                # The older name, without which a transformers before 5.24 has none.
                enable = getattr(model, "activation_checkpointing_enable", None)
                (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
                model.config.use_cache = False  # of no use in training, and warned about
        except Exception as error:  # transformers and its files may raise anything
            first = (str(error).strip().splitlines() or [""])[0]
            raise FedsimError(
                f"{where} cannot be loaded ({type(error).__name__}: {printable(first)}); it must "
                "be a folder of a model that transformers knows, with weights as safetensors."
            ) from error
        known = getattr(model.config.get_text_config(), "vocab_size", None) or 0
        if isinstance(vocabulary, Mapping):
            vocabulary = vocabulary.get("input_ids", 0)
        if vocabulary > known:
            raise FedsimError(
                f"{where} knows {known:,} tokens, and the data have {vocabulary:,} "
                "(data.vocabulary); it must know all of them."
            )
        return model


def _loaded(folder: str, num_classes: int) -> Any:
    import transformers

    local = {"local_files_only": True, "trust_remote_code": False}
    settings = transformers.AutoConfig.from_pretrained(folder, **local)
    (name,) = settings.architectures or ("none",)
    kind = getattr(transformers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ValueError(f"config.json names the architecture {name}")
    load: Any = kind
    if num_classes and "Classification" in name and settings.num_labels != num_classes:
        settings.num_labels = num_classes
    with _no_progress_bar(transformers.utils.logging):
        model, loading = load.from_pretrained(
            folder,
            config=settings,
            dtype="auto",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    if missing := sorted(loading["missing_keys"]):
        _log.warning(
            "the folder %s has no weights for %s, which start at random",
            folder,
            ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else ""),
        )
    return model


@contextmanager
def _no_progress_bar(logging: Any) -> Iterator[None]:
    """Without bars of transformers, which would be drawn into fedsim's own."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


@check_arguments
def give_logits(model: Any) -> None:
    """Make a model that is, or contains, one of `transformers` return its logits alone, in place.

    Its other outputs (a cache, a loss) are dropped, unless the caller asks for them by
    ``return_dict=True``, as ``generate`` does. Any other model stays as it is.

    Raises
    ------
    FedsimError
        If ``model`` is no `torch.nn.Module`.
    """
    if not hasattr(model, "register_forward_hook"):
        raise FedsimError(f"model is {as_text(model)}; it must be a torch.nn.Module.")
    parts = list(_pretrained(model))
    for part in parts:
        # The hooks of gradient checkpointing that make frozen embeddings' outputs need a gradient
        # are for its reentrant kind alone, and their handles cannot be copied.
        part.disable_input_require_grads()
    if parts and _logits not in model._forward_hooks.values():
        model.register_forward_hook(_logits, with_kwargs=True)


def _pretrained(model: Any) -> Iterator[Any]:
    """The parts of a model that are of transformers; none while that is not imported."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None:
        yield from (m for m in model.modules() if isinstance(m, modeling.PreTrainedModel))


def _logits(model: Any, inputs: Any, keywords: dict[str, Any], outputs: Any) -> Any:
    logits = getattr(outputs, "logits", None)
    return outputs if logits is None or keywords.get("return_dict") else logits
