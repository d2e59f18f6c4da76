"""Releases in fixed cases: what goes in, whatever makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    CoordinateClipping,
    NoiseSource,
    NoPrivacy,
    Normalization,
    NormBound,
    PerLayer,
    PrivateScalar,
    QuantileClipping,
)
from fedsim.rows import DenseRows, Layout, LinearPart, OuterRows

MECHANISMS: dict[str, Any] = {
    "clipping": Clipping(0.8),
    "loose clipping": Clipping(100.0),
    "norm bound": NormBound(2.0),
    "normalisation": Normalization(0.8),
    "smooth normalisation": Normalization(0.8, smoothing=0.1),
    "coordinates": CoordinateClipping(0.3),
    "quantile": QuantileClipping(initial_clip_norm=0.5, bit_noise=1.0),
    "adaclip": AdaClip(clip_norm=0.8),
    "adaclip clamped after": AdaClip(
        clip_norm=0.8, gamma=0.5, clamp="post", beta2=0.999, center=False, h2=4.0
    ),
    "literal adaclip": AdaClip(h2=1e-2, literal=True),
    "first phase": AdaptiveNoise(clip_norm=0.8, threshold=1e9, beta=3.0),
    "second phase": AdaptiveNoise(clip_norm=0.8, threshold=0.0, beta=3.0),
    "optimal shape": AdaptiveNoise(
        clip_norm=0.8, threshold=4e-4, beta=3.0, noise_shape="optimal", switch="root"
    ),
    "raw statistics": AdaptiveNoise(
        clip_norm=0.8, threshold=0.0, beta=3.0, unsafe_non_private_raw_statistics=True
    ),
    "layers": PerLayer(Clipping(0.5)),
    "mixed layers": PerLayer(
        (("0.*", QuantileClipping(bit_noise=1.0)), ("*", AdaClip(0.5))), shares=(0.25, 0.75)
    ),
    "scattered layers": PerLayer(
        (("*.bias", Normalization(0.2)), ("*", QuantileClipping(bit_noise=1.0)))
    ),
    "raw layers": PerLayer(AdaptiveNoise(0.8, 0.0, 3.0, unsafe_non_private_raw_statistics=True)),
    "scalar": PrivateScalar(AdaClip(clip_norm=0.8), name="loss", high=4.0, fraction=0.2),
    "scalars": PrivateScalar(
        PrivateScalar(QuantileClipping(bit_noise=1.0), "loss"), "accuracy", fraction=0.5
    ),
    "silent scalar": PrivateScalar(Clipping(0.7), fraction=0.0),
    "scalar of layers": PrivateScalar(
        PerLayer(QuantileClipping(bit_noise=2.0)), name="accuracy", fraction=0.3
    ),
    "no privacy": NoPrivacy("uniform"),
    "weighted": NoPrivacy("num-examples"),
    "no privacy by layer": PerLayer(NoPrivacy("uniform")),
}
WITHOUT_NOISE = ("no privacy", "weighted", "no privacy by layer")
WITHOUT_SHARES = (*WITHOUT_NOISE, "raw statistics", "raw layers")
ROUNDS = 3
Result = tuple[Tensor, Mapping[str, Tensor], Mapping[str, Any]]


class Implementation(Protocol):
    """What makes the releases of a case: each a (mean, state, side_scalars)."""

    def server(
        self, mechanism: Any, state: Any, layout: Layout, blocks: Any, z: float, source: NoiseSource
    ) -> Result: ...

    def shares(
        self, mechanism: Any, state: Any, layout: Layout, block: Any, z: float,
        sources: list[NoiseSource], server: NoiseSource,
    ) -> tuple[Tensor, Result]: ...  # fmt: skip

    def owners(self, mechanism: Any, layout: Layout, z: float, rounds: Any) -> Iterator[Result]: ...


def layout_of(dtype: torch.dtype) -> Layout:
    """Two linear layers, 5 to 3 to 2, without the second's bias."""
    return Layout.of(
        {
            "0.weight": torch.empty(3, 5, dtype=dtype),
            "0.bias": torch.empty(3, dtype=dtype),
            "2.weight": torch.empty(2, 3, dtype=dtype),
        }
    )


def factors(rng: np.random.Generator, lead: tuple[int, ...], dtype: torch.dtype) -> OuterRows:
    """Rows of `layout_of` as factors, of sizes far apart."""
    size = 10.0 ** rng.integers(-4, 2, (*lead, 1))
    a, b, c, e = (
        torch.from_numpy(rng.normal(size=(*lead, width)) * (size if width == 3 else 1)).to(dtype)
        for width in (5, 3, 3, 2)
    )
    return OuterRows((LinearPart(a, b), LinearPart(c, e, bias=False)))


def row_scalars(mechanism: Any, rows: Tensor) -> dict[str, Tensor]:
    """Scalars that go with dense rows ``[n, d]``."""
    return {
        name: rows[:, k].abs().double() * 3 for k, name in enumerate(mechanism.side_scalar_names)
    }


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every case, by name."""
    for name, mechanism in MECHANISMS.items():
        for dtype in (torch.float32, torch.float64):
            for z in (0.0, 0.7):
                if z and name in WITHOUT_NOISE:
                    continue
                for way in ("server", "factors", "shares", "owners", "owners factors"):
                    if way == "shares" and name in WITHOUT_SHARES:
                        continue
                    if way.startswith("owners") and mechanism.side_scalar_names:
                        continue
                    if name == "weighted" and way != "server":
                        continue
                    given = {"mechanism": mechanism, "dtype": dtype, "z": z, "way": way}
                    yield f"{name}, {str(dtype)[6:]}, z={z}, {way}", given


def released(
    implementation: Implementation, mechanism: Any, dtype: torch.dtype, z: float, way: str
) -> list[Result | Tensor]:
    """All that the rounds of a case release."""
    layout = layout_of(dtype)
    if way.startswith("owners"):
        return list(implementation.owners(mechanism, layout, z, _owners(dtype, way)))
    state, found = mechanism.init(layout), []
    for t in range(ROUNDS):
        rng = np.random.default_rng([11, t])
        outer = factors(rng, (9,), dtype)
        rows = outer.dense().clone()
        rows[3] *= 1e-30
        rows[4, 2] = torch.nan
        rows[5] *= 1e20
        source = NoiseSource(np.random.default_rng([5, t]), hardened=t == 1)
        weights = np.array([1.0, 0, 0.5, 1, 1, 1, 1, 0.25, 1])
        if mechanism.weighting == "num-examples":
            weights = weights * 40
        if way == "shares":
            sources = [NoiseSource(np.random.default_rng([6, t, k]), t == 1) for k in range(9)]
            shares, result = implementation.shares(
                mechanism, state, layout, (rows, row_scalars(mechanism, rows)), z, sources, source
            )
            found.append(shares)
        else:
            parts = [slice(0, 2), slice(2, 9)]
            blocks = [
                (
                    outer[part.start : part.stop,] if way == "factors" else DenseRows(rows[part]),
                    weights[part],
                    {k: v[part] for k, v in row_scalars(mechanism, rows.nan_to_num()).items()},
                )
                for part in parts
            ]
            result = implementation.server(mechanism, state, layout, blocks, z, source)
        found.append(result)
        state = result[1]
    return found


def _owners(dtype: torch.dtype, way: str) -> Iterator[tuple[int, list[Any], list[NoiseSource]]]:
    """Rounds of four owners, the last of whom leaves after the first: blocks and sources.

    A block is (rows ``[k, B, d]``, weights, counts, owners).
    """
    for t in range(ROUNDS):
        active = 4 if t == 0 else 3
        rng = np.random.default_rng([12, t])
        blocks = []
        for owners in (slice(None), torch.tensor([0, 2])):
            n = active if isinstance(owners, slice) else 2
            outer = factors(rng, (n, 6), dtype)
            counts = [6, 4, 5, 6][:n]
            weights = torch.zeros(n, 6, dtype=torch.float64)
            for k, count in enumerate(counts):
                weights[k, :count] = 1
            weights[0, 1] = 0
            rows = outer.dense().clone()
            rows[1, 2] *= 1e15
            rows[0, 3, 1] = torch.inf
            blocks.append((outer if "factors" in way else DenseRows(rows), weights, counts, owners))
        yield (
            active,
            blocks,
            [NoiseSource(np.random.default_rng([7, t, k]), t == 1) for k in range(active)],
        )


def digest(found: list[Any]) -> tuple[str, list[float]]:
    """sha256 of everything released, and the last mean."""
    sha, mean = hashlib.sha256(), torch.empty(0)
    for result in found:
        if isinstance(result, Tensor):
            sha.update(result.contiguous().numpy().tobytes())
            continue
        mean, state, side_scalars = result
        sha.update(mean.contiguous().numpy().tobytes())
        for name in sorted(state):
            if not name.endswith(".columns"):
                sha.update(name.encode() + state[name].contiguous().numpy().tobytes())
        for name in sorted(side_scalars):
            sha.update(f"{name} {float(side_scalars[name])!r}".encode())
    return sha.hexdigest(), mean.flatten()[:6].tolist()
