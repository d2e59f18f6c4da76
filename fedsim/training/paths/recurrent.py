"""Recurrent layers written out in products, which `torch.func` takes where it takes no torch layer.

On a GPU a step of a whole block is then one graph of products over the clients; on a CPU torch's
own layer, client by client, is faster. The equations are those of `torch.nn.RNN`, `GRU` and `LSTM`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedsim.training.paths.examples import RECURRENT
from fedsim.training.paths.masks import MaskedProduct

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], State]
"""Next state from what input and state contribute, ``[B, gates * H]`` each, and the state."""


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph and of containers; all other modules and tensors are shared."""
    leaves = [one for one in module.modules() if not [*one.children()]]
    shared = [*module.parameters(), *module.buffers(), *leaves]
    return copy.deepcopy(module, {id(one): one for one in shared})


def with_products(module: fx.GraphModule, *, masked: bool = False) -> fx.GraphModule | None:
    """The graph with its recurrent layers written out; None if it has none, or one that it cannot.

    Everything but these layers is shared, and so are their parameters. Layers with dropout between
    them are written out only if they will be ``masked``, and each is called once.
    """
    layers: dict[str, Any] = {k: m for k, m in module.named_modules() if type(m) in RECURRENT}
    lengths: dict[str, list[int]] = {name: [] for name in layers}
    for node in module.graph.nodes:
        if node.op == "call_module" and node.target in layers:
            sequences = node.args[0] if node.args else node.kwargs["input"]
            lengths[node.target].append(sequences.meta["value"].like.shape[1])
    for name, layer in layers.items():
        if layer.proj_size or (layer.dropout and not (masked and len(lengths[name]) == 1)):
            return None
    result = copied(module)
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(result.get_submodule(parent), child, Products(layer, *lengths[name][:1]))
    return result if layers else None


class Products(nn.Module):
    """A recurrent layer of torch's, with its parameters, as products.

    Parameters
    ----------
    layer : nn.RNN, nn.GRU or nn.LSTM
        Without projections.
    length : int
        Length of its sequences, for masks of dropout between its layers.
    """

    def __init__(self, layer: Any, length: int = 0) -> None:
        super().__init__()
        for name, parameter in layer.named_parameters():
            self.register_parameter(name, parameter)
        self.batch_first, self.layers = layer.batch_first, layer.num_layers
        self.ends = ("", "_reverse") if layer.bidirectional else ("",)
        self.hidden, self.bias = layer.hidden_size, layer.bias
        self.is_lstm = isinstance(layer, nn.LSTM)
        if isinstance(layer, nn.RNN):
            self.cell: Cell = _tanh if layer.nonlinearity == "tanh" else _relu
        else:
            self.cell = _lstm if self.is_lstm else _gru
        gaps = self.layers - 1 if layer.dropout else 0
        shape = (length, self.hidden * len(self.ends))
        self.dropouts = nn.ModuleList(
            MaskedProduct(layer.dropout, False, shape) for _ in range(gaps)
        )

    def forward(self, x: Tensor, start: Any = None, inputs: Any = None) -> tuple[Tensor, Any]:
        """Outputs of the last layer and the last states of all, as torch's layer gives them.

        Dropout's masks, if it has any, are among the model's ``inputs``.
        """
        steps = x.transpose(0, 1) if self.batch_first else x
        count = self.layers * len(self.ends)
        if start is None:
            zeros = steps.new_zeros(count, steps.shape[1], self.hidden)
            start = (zeros, zeros) if self.is_lstm else zeros
        given: State = start if self.is_lstm else (start,)
        last: list[State] = []
        for layer in range(self.layers):
            outputs = []
            for end in self.ends:
                state = tuple(part[len(last)] for part in given)
                out, state = self._run(steps, state, f"_l{layer}{end}", reverse=bool(end))
                outputs.append(out)
                last.append(state)
            steps = torch.cat(outputs, dim=-1)
            if layer < len(self.dropouts):
                steps = self.dropouts[layer](steps.transpose(0, 1), inputs).transpose(0, 1)
        states = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
        outputs_first = steps.transpose(0, 1) if self.batch_first else steps
        return outputs_first, states if self.is_lstm else states[0]

    def _run(self, x: Tensor, state: State, name: str, *, reverse: bool) -> tuple[Tensor, State]:
        """One direction of one layer over ``x [T, B, inputs]``: outputs, and the last state."""

        def of(kind: str) -> Tensor | None:
            return getattr(self, f"{kind}{name}") if self.bias or kind[0] == "w" else None

        weight, recurrent = of("weight_ih"), of("weight_hh")
        assert weight is not None
        assert recurrent is not None
        inputs = F.linear(x, weight, of("bias_ih"))  # of all times at once
        outputs: list[Tensor] = []
        for entry in reversed(inputs.unbind(0)) if reverse else inputs.unbind(0):
            state = self.cell(entry, F.linear(state[0], recurrent, of("bias_hh")), state)
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if reverse else outputs), state


def _tanh(x: Tensor, h: Tensor, state: State) -> State:
    return (torch.tanh(x + h),)


def _relu(x: Tensor, h: Tensor, state: State) -> State:
    return (torch.relu(x + h),)


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), h.chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return (n + z * (state[0] - n),)


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c
