"""What is known of a module by its type."""

from __future__ import annotations

from torch import nn


def is_torchs_own(module: nn.Module) -> bool:
    """Whether a module is an unmodified one of torch's: without hooks or a forward of its own."""
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and "forward" not in vars(module)
        and not has_hooks(module)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called before or after the module."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks)
