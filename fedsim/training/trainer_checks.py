"""Checks of a trainer's model, settings and calls: whatever it cannot train is refused."""

from __future__ import annotations

import copy
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.arguments import as_text, expected, require
from fedsim.array_types import Ints
from fedsim.clients.base import PERSONAL_MASK, DenseGradient, LocalAlgorithm, Step, refuse_vectors
from fedsim.errors import FedsimError
from fedsim.models.carried_buffers import carried_buffers
from fedsim.models.normalization import KEEP_FIXED, frozen_normalisation, running_statistics
from fedsim.models.parameters import refuse_gradient_hooks
from fedsim.privacy.exclusions import check_private_work
from fedsim.tasks.losses import Loss
from fedsim.training.data import ClientData

CARRIED = (torch.float16, torch.float32, torch.float64)


def check_model(model: nn.Module, *, private: bool) -> None:
    """Refuse modules whose result is not a function of one example and the parameters.

    Raises
    ------
    FedsimError
        For batch normalisation with running statistics, which a row does not contain; and for
        parameters of a dtype that no Flower array can have, or with hooks on their gradients.
    """
    refuse_gradient_hooks(model)
    for name, parameter in model.named_parameters():
        sent = parameter.requires_grad and parameter.is_floating_point()
        if sent and parameter.dtype not in CARRIED:
            raise FedsimError(
                f"model parameter '{name}' is {parameter.dtype}, which no Flower array carries; it "
                f"must be one of {', '.join(map(str, CARRIED))}."
            )
    fixed: frozenset[str] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.batchnorm._LazyNormBase):
            fixed = frozen_normalisation(model) if fixed is None else fixed
            if name in fixed:
                continue
            if _is_frozen(module):
                raise FedsimError(
                    f"model module '{name}' is a {type(module).__name__} that is not trained, and "
                    "still normalises by the batch and changes its running statistics in training "
                    f"mode; {KEEP_FIXED} (model.fix would replace what they have learnt)."
                )
            keep = f", or let clients keep it: model.personal = '{name}.*'"
            keep *= not private and any(True for _ in module.parameters())  # patterns match them
            raise FedsimError(
                f"model module '{name}' is a {type(module).__name__}: it mixes examples and keeps "
                "running statistics that an update does not carry; use nn.GroupNorm, or let "
                f"model.fix = true replace it{keep}."
            )


def _is_frozen(module: nn.Module) -> bool:
    parameters = [*module.parameters()]
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def device_of(device: torch.device | str) -> torch.device:
    """The device of this name.

    Raises
    ------
    FedsimError
        If PyTorch does not know it, or this machine does not have it.
    """
    try:
        result = torch.device(device)
    except RuntimeError:
        raise FedsimError(
            f"device is '{device}'; it must be one such as 'cpu' or 'cuda'."
        ) from None
    try:
        torch.empty(0, device=result)
    except (RuntimeError, AssertionError):  # the latter from a PyTorch built without CUDA
        raise FedsimError(
            f"device is '{device}', which PyTorch does not find on this machine; it must be one "
            "that is there, such as 'cpu'."
        ) from None
    return result


def loss_on(loss: Loss, device: torch.device) -> Loss:
    """The loss, or a copy on this device if it is a module with tensors on another one."""
    if not isinstance(loss, nn.Module):
        return loss
    tensors = (*loss.parameters(), *loss.buffers())
    is_on_device = all(tensor.device.type == device.type for tensor in tensors)
    return loss if is_on_device else copy.deepcopy(loss).to(device)


def check_call(
    vector: Tensor, sizes: Collection[int], client_ids: Ints, round: int, population: int
) -> None:
    """Refuse parameters, clients or a round that a trainer cannot train or evaluate.

    Parameters
    ----------
    vector : Tensor ``[d]``
    sizes : collection of int
        Allowed values of d.
    client_ids : int64 ``[n]``
        Each client once; sorted ids are checked fastest.
    round, population : int

    Raises
    ------
    FedsimError
    """
    if not isinstance(vector, Tensor) or vector.dim() != 1 or len(vector) not in sizes:
        raise FedsimError(
            f"vector is {_form(vector)}; it must be a tensor [d] of the parameters, with d = "
            f"{' or '.join(map(str, dict.fromkeys(sizes)))}."
        )
    if not isinstance(client_ids, np.ndarray) or client_ids.dtype.kind not in "iu":
        raise FedsimError(
            f"client_ids is {_form(client_ids)}; it must be an array of whole numbers [n], such as "
            "np.array([0, 1])."
        )
    if client_ids.ndim != 1:
        raise FedsimError(f"client_ids has shape {client_ids.shape}; it must be [n].")
    ordered = client_ids
    if not (client_ids[1:] > client_ids[:-1]).all():
        ordered = np.sort(client_ids)
        if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
            raise FedsimError(f"client_ids has {twice[0]} twice; it must have each client once.")
    first, last = (ordered[0], ordered[-1]) if len(ordered) else (0, 0)
    if first < 0 or last >= population:
        raise FedsimError(
            f"client_ids has {first if first < 0 else last}; they must be from 0 to "
            f"{population - 1}, the last of the {population} clients."
        )
    if type(round) is not int:
        require("round", round, expected(int))


def _form(value: object) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"a {type(value).__name__} of shape {list(value.shape)} and {value.dtype}"
    return as_text(value)


def check_settings(
    algorithm: LocalAlgorithm,
    data: ClientData,
    test: ClientData | None,
    counts: object,
    max_grad_norm: float,
    *,
    private: bool,
) -> None:
    """Refuse test data of other clients, a negative norm, and what example-level privacy excludes.

    Raises
    ------
    FedsimError
    """
    if test is not None and test.population != data.population:
        raise FedsimError(
            f"there are test examples of {test.population} clients and training examples of "
            f"{data.population}; both must be of the same clients."
        )
    if not max_grad_norm >= 0:
        raise FedsimError(f"client.max-grad-norm is {max_grad_norm}; it must be 0 or more.")
    if not private:
        return
    check_private_work(counts, max_grad_norm)
    data.require_disjoint()
    refuse_vectors(algorithm)


def check_algorithm(algorithm: LocalAlgorithm, *, personal: bool) -> None:
    """Refuse algorithms that conflict with personal parameters, or mix clients.

    A bound limits what a client's own row adds to a sum, not what it does to other clients' rows.

    Raises
    ------
    FedsimError
    """
    name = algorithm.label
    if algorithm.receives and personal:
        raise FedsimError(
            f"model.personal is set, but {name} (client.name) is sent "
            f"{', '.join(algorithm.receives)} beside the parameters, made of all that is trained; "
            "it must be unset, or client.name another algorithm."
        )
    if personal and _scales(algorithm):
        raise FedsimError(
            f"model.personal is set, but {name} (client.name) scales what a client has trained, "
            "what it keeps as well; it must be unset, or client.name another algorithm."
        )
    if algorithm.separates_personal and not personal:
        raise FedsimError(
            f"model.personal is empty; {name} (client.name) needs the "
            "patterns of the parameters that each client keeps to itself, such as 'head.*'."
        )
    if _mixes_clients(algorithm, personal=personal):
        raise FedsimError(
            f"client.name names {name}, which mixes clients: on made-up gradients a client's "
            "result in a block of several differs from that alone, so that a bound of its own "
            "update does not limit what it adds to the sum. It must treat each row of its state by "
            "itself; sums and means are over the last dimension, never the first."
        )


_CLIENTS, _WIDTH, _STEPS = 3, 8, 6


def _mixes_clients(algorithm: LocalAlgorithm, *, personal: bool) -> bool:
    """Whether a client of a block ends differently than it does alone, on made-up gradients.

    False if that cannot be tested: the algorithm draws random numbers, or fails, as it will again
    when its clients run it.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            results, repeated = (_rounds(algorithm, slice(None), personal) for _ in range(2))
            if not _agree(results, repeated):
                return False
            rows = [slice(k, k + 1) for k in range(_CLIENTS)]
            return not all(
                _agree({k: v[row] for k, v in results.items()}, _rounds(algorithm, row, personal))
                for row in rows
            )
    except Exception:  # a user's code may raise anything: it is reported where clients run it
        return False


def _rounds(algorithm: LocalAlgorithm, clients: slice, personal: bool) -> dict[str, Tensor]:
    """Results of two rounds of these made-up clients, by name, ``[n, ...]``."""
    algorithm = copy.deepcopy(algorithm)  # it may keep state of its own
    generator = torch.Generator().manual_seed(0)

    def normal_rows(rows: int) -> Tensor:
        # Drawn for all clients every time: a client alone gets the same values as in the block.
        values = torch.randn(rows, _WIDTH, generator=generator, dtype=torch.float64)
        return values.expand(_CLIENTS, -1)[clients].clone()

    round_results: dict[str, Tensor] = {}
    carried: dict[str, Tensor] = {}
    for number in (1, 2):
        start = normal_rows(_CLIENTS if personal else 1)
        numbers = {k: start.new_full((len(start),), v) for k, v in algorithm.numbers().items()}
        for name, width in algorithm.receives.items():
            numbers[name] = normal_rows(1) if width == "model" else normal_rows(1)[:, :1]
        if algorithm.separates_personal:
            numbers[PERSONAL_MASK] = (torch.arange(_WIDTH) < 2).to(start).expand_as(start)
        state = algorithm.init(start.clone(), numbers)
        state |= {name: values for name, values in carried.items() if name in state}
        for index in range(_STEPS):
            algorithm.point(state)
            algorithm.step(state, DenseGradient(normal_rows(_CLIENTS)), Step(number, index))
        theta = algorithm.finish(state)
        carried = {name: state[name] for name in algorithm.carried if name in state}
        results = {"update": theta - start, **carried}
        results |= {**algorithm.report(state), **algorithm.send(state)}
        round_results |= {f"{name} {number}": values.clone() for name, values in results.items()}
    return round_results


def _agree(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two sets of results are equal up to rounding."""
    return all(
        torch.allclose(values.double(), other[name].double(), rtol=1e-6, atol=1e-12, equal_nan=True)
        for name, values in one.items()
    )


def check_statistics(
    model: nn.Module, algorithm: LocalAlgorithm, personal: Collection[str], *, private: bool
) -> list[str]:
    """Refuse batch statistics that clients cannot keep to themselves, or buffers of two models.

    Parameters
    ----------
    model : nn.Module
    algorithm : LocalAlgorithm
    personal : collection of str
        Names of the trained parameters that clients keep.
    private : bool
        Whether clients protect their examples.

    Returns
    -------
    list of str
        Names of the parameters that are such statistics, or buffers that updates carry.

    Raises
    ------
    FedsimError
    """
    carried = carried_buffers(model)
    averaged = [] if carried is None else carried.averaged
    if carried is not None and private:
        raise FedsimError(
            f"the model changes its buffers {', '.join(averaged + carried.restored)} as it runs, "
            "and client.mechanism is set; it must leave them as they are."
        )
    if averaged:
        _check_steps(algorithm, f"changes its buffer {averaged[0]} as it runs")
    return [*_check_layers(model, algorithm, personal, private=private), *averaged]


def _check_layers(
    model: nn.Module, algorithm: LocalAlgorithm, personal: Collection[str], *, private: bool
) -> list[str]:
    """Names of running statistics that are parameters; refused if they cannot be a client's own."""
    statistics = running_statistics(model)
    if not statistics:
        return []
    layer = statistics[0].rpartition(".")[0]
    if private:
        raise FedsimError(
            f"model module '{layer}' normalises by the batch, so that no gradient belongs to one "
            "example, and client.mechanism is set; use nn.GroupNorm (model.fix = true)."
        )
    if not {*statistics} <= {*personal}:
        raise FedsimError(
            f"model module '{layer}' keeps running statistics; they and its parameters must be "
            "among what is trained (model.trainable) and what clients keep (model.personal)."
        )
    _check_steps(algorithm, f"module '{layer}' keeps running statistics of one model")
    return statistics


def _check_steps(algorithm: LocalAlgorithm, what: str) -> None:
    """Refuse an algorithm that trains several models, or does not send the one that it trains."""
    trained = copy.deepcopy(algorithm)  # it may keep state of its own
    state = trained.example_state(1)
    for index in range(_STEPS):
        if trained.point(state) is not state["theta"]:
            raise FedsimError(
                f"model {what}, and {algorithm.label} (client.name) takes gradients at others too; "
                "it must be another algorithm, such as sgd, adam or fedrep."
            )
        trained.step(state, DenseGradient(torch.zeros_like(state["theta"])), Step(1, index))
    if _scales(algorithm):
        raise FedsimError(
            f"model {what}, and {algorithm.label} (client.name) scales what a client has trained; "
            "it must be another algorithm, such as sgd, adam or fedrep."
        )


def _scales(algorithm: LocalAlgorithm) -> bool:
    """Whether a client sends something else than the parameters that it has trained."""
    algorithm = copy.deepcopy(algorithm)
    state = algorithm.example_state(1)
    for index in range(_STEPS):
        algorithm.step(state, DenseGradient(torch.zeros_like(state["theta"])), Step(1, index))
    state["theta"].add_(1.0)
    return not torch.equal(algorithm.finish(state), torch.ones_like(state["theta"]))
