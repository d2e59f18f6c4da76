"""Compiled parts give what they should, or are not there."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from release_helpers import plan_of
from slow_cases import slow_but
from tensor_bytes import same_bytes
from test_dense import builds, built_by

from fedsim.kernels import building, classes, convolutions, dense, normals, rows
from fedsim.kernels.building import UNFUSED
from fedsim.kernels.normals import sums_of_normals
from fedsim.kernels.rows import TILE, add_rounded, is_supported, pairwise_sums, squared_norms
from fedsim.mechanisms import Clipping, NoPrivacy, Normalization, PerLayer, Releaser
from fedsim.mechanisms.releaser import NoiseSource, prefetched
from fedsim.privacy import Independent
from fedsim.rows import DenseRows, Layout
from fedsim.rows.norms import norms_of

compiled = pytest.mark.skipif(
    rows._compiled() is None or normals._compiled() is None, reason="there is no C compiler"
)

AWKWARD = [
    0.0,
    -0.0,
    5e-324,
    -1e-310,
    1e-45,
    3e-39,
    1.5,
    -2.75,
    1e30,
    3e38,
    np.inf,
    -np.inf,
    np.nan,
]


@st.composite
def blocks(draw):
    """Rows ``[n, d]`` around the length of a tile, with awkward numbers among them."""
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    n, d = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 7, TILE - 1, TILE, TILE + 3]))
    seed = draw(st.integers(0, 2**32 - 1))
    block = np.random.default_rng(seed).normal(size=(n, d)).astype(dtype)
    for _ in range(draw(st.integers(0, 5))):
        row, column = draw(st.integers(0, n - 1)), draw(st.integers(0, d - 1))
        with np.errstate(over="ignore"):
            block[row, column] = draw(st.sampled_from(AWKWARD))
    return torch.from_numpy(block)


@compiled
@given(blocks())
def test_norms_are_those_of_halving_to_the_byte(block) -> None:
    assert is_supported(block)
    assert same_bytes(squared_norms(block), pairwise_sums(block.double().square()))


@compiled
@given(blocks(), st.sampled_from([1.0, 2.0**30, 3e-7, 0.0]), st.booleans())
def test_rounded_sums_are_torchs_to_the_byte(block, factor, finer) -> None:
    factors = torch.full((len(block),), factor, dtype=torch.float64)
    coarse = torch.zeros(block.shape[1], dtype=torch.float64)
    fine = torch.zeros_like(coarse) if finer else None
    add_rounded(block, factors, coarse, fine, 2.0**32)
    wanted, wanted_fine = torch.zeros_like(coarse), torch.zeros_like(coarse)
    for row in block.double() * factors[:, None]:
        wanted += row.trunc()
        wanted_fine += ((row - row.trunc()) * 2.0**32).trunc()
    assert same_bytes(coarse, wanted)
    assert fine is None or same_bytes(fine, wanted_fine)


@compiled
def test_rows_with_gaps_of_any_sort_have_the_norms_of_their_copies() -> None:
    block = torch.randn(7, 400, generator=torch.Generator().manual_seed(0))
    views = [block[:, 3:], block[::2], block.T, block[:, ::3], block[:1].expand(5, 400)]
    for view in views:
        assert torch.equal(norms_of(view), norms_of(view.clone()))
        clipping = Releaser(
            plan_of(Clipping(1.0), Independent(1.0), 1.0),
            Layout.of({"w": torch.zeros(view.shape[1])}),
        )
        sums = []
        for given_rows in (view, view.clone()):
            total = clipping.start({})
            total.add(DenseRows(given_rows))
            sums.append(total.grids["sum"].value())
        assert torch.equal(*sums)


@compiled
@pytest.mark.parametrize("build", [name for name in builds() if name != "native"])
def test_every_processor_and_compiler_gives_the_bytes_of_numpy_and_torch(
    build, tmp_path, monkeypatch
) -> None:
    """As it is loaded a library's results are compared with theirs, to the byte."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module, archives in ((rows, ()), (classes, ()), (normals, (normals.ARCHIVE,))):
        source = f"{module.__name__.rpartition('.')[2]}.c"
        assert module._self_test(
            built_by(monkeypatch, build, source, archives=archives, sums=UNFUSED)
        )


@pytest.mark.parametrize("d", [1, 3, 100, TILE, 3 * TILE + 5, TILE * TILE + 1])
def test_halving_sums_everything_once(d) -> None:
    assert float(pairwise_sums(torch.ones(d, dtype=torch.float64))) == d


@compiled
def test_rows_of_many_tiles_are_halved_twice() -> None:
    row = torch.randn(1, TILE * TILE + 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(squared_norms(row), pairwise_sums(row.double().square()))


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "mechanism",
    [Clipping(1.0), Normalization(0.5), PerLayer(Clipping(1.0)), NoPrivacy(weighting="uniform")],
)
def test_a_release_has_the_same_bytes_with_and_without_a_compiler(
    monkeypatch, mechanism, dtype
) -> None:
    layout = Layout.of({"w": torch.zeros(70, 70, dtype=dtype), "b": torch.zeros(70, dtype=dtype)})
    block = torch.randn(9, layout.d, generator=torch.Generator().manual_seed(1)).to(dtype)
    multiplier = 0.0 if isinstance(mechanism, NoPrivacy) else 1.0

    def released(block: torch.Tensor) -> bytes:
        releaser = Releaser(plan_of(mechanism, Independent(multiplier), 9.0), layout)
        total = releaser.start(mechanism.init(layout))
        assert total.add(DenseRows(block)).tolist() == block.isfinite().all(1).tolist()
        return b"".join(tensor.numpy().tobytes() for tensor in total.state().values())

    for spoilt in (None, 0.0, float("nan"), 1e-30):
        if spoilt is not None:
            block[3] = spoilt
        fast = released(block)
        with monkeypatch.context() as without:
            without.setattr(rows, "_compiled", lambda: None)
            assert not is_supported(block)
            assert released(block) == fast


@compiled
@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize(("count", "terms"), [(1024, 1), (1025, 4), (70_001, 4)])
def test_normals_are_numpys_and_leave_the_generator_where_numpy_does(before, count, terms) -> None:
    ours, numpys = (np.random.Generator(np.random.Philox(key=5)) for _ in range(2))
    for generator in (ours, numpys):
        generator.bit_generator.random_raw(before)
        generator.integers(2**31, dtype=np.uint32)  # half a word is left over
    wanted = sum(numpys.standard_normal(count) for _ in range(terms))
    assert sums_of_normals(ours, count, terms).tobytes() == wanted.tobytes()
    assert repr(ours.bit_generator.state) == repr(numpys.bit_generator.state)


@compiled
def test_a_counter_at_its_end_begins_anew() -> None:
    most = 2**64 - 1
    draws = []
    for drawn in (lambda g: g.standard_normal(5000), lambda g: sums_of_normals(g, 5000, 1)):
        philox = np.random.Philox(
            key=3, counter=np.array([most - 100, most, most, 7], dtype=np.uint64)
        )
        draws.append((drawn(np.random.Generator(philox)).tobytes(), repr(philox.state)))
    assert draws[0] == draws[1]


def test_other_generators_draw_as_they_do() -> None:
    ours, numpys = np.random.default_rng(0), np.random.default_rng(0)
    wanted = numpys.standard_normal(5000) + numpys.standard_normal(5000)
    assert sums_of_normals(ours, 5000, 2).tobytes() == wanted.tobytes()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(building.DISABLED, raising=False)
    return tmp_path / "fedsim"


@compiled
def test_a_library_is_built_once_and_is_its_users_alone(cache, monkeypatch, caplog) -> None:
    building._announce.cache_clear()
    assert building.library("rows.c", rows._self_test) is not None
    assert building.library("classes.c", classes._self_test) is not None
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # which is shown
    (cache / next(path.name for path in cache.iterdir() if "classes" in path.name)).unlink()
    (built,) = cache.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700
    assert built.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    assert building.library("rows.c", rows._self_test) is not None


@pytest.mark.skipif(
    shutil.which("cc") is None or os.environ.get(building.DISABLED) == "0",
    reason="there is no C compiler, or none is wanted",
)
def test_where_there_is_a_compiler_the_compiled_parts_are_in_use() -> None:
    assert rows._compiled() is not None
    assert normals._compiled() is not None
    assert convolutions.is_compiled(torch.float32)
    assert dense.is_compiled(torch.float32)


@compiled
@pytest.mark.parametrize(
    ("source", "before", "after"),
    slow_but(5, [
        ("rows.c", "trunc((double)x[i] * factor)", "rint((double)x[i] * factor)"),
        ("normals.c", "words[k] << 55", "words[k] << 56"),
        ("convolutions.c", "dense[places[o] * outputs + o] +=", "dense[places[o] * outputs + o] ="),
        ("dense.c", "outputs[o] < 0 ? 0 : outputs[o]", "outputs[o]"),
        ("classes.c", "1.0f / 720", "1.0f / 721"),
        ("rows.c", "trunc((value - whole) * scale)", "(value - whole) * scale"),
        ("rows.c", "coarse[i] += whole", "coarse[i] = whole"),
        ("rows.c", "(s[0] + s[4]) + (s[2] + s[6])", "(s[0] + s[2]) + (s[4] + s[6])"),
        ("rows.c", "if (size % TILE) {", "if (0) {"),
        ("rows.c", "rows += stride", "rows += size"),
        ("rows.c", "(ptrdiff_t)row * stride", "(ptrdiff_t)row * (ptrdiff_t)size"),
        ("normals.c", "ROUNDS = 10", "ROUNDS = 9"),
        ("normals.c", "add ? out[done] + value : value", "value"),
        ("normals.c", "s->state->used = BLOCK - left % BLOCK", "s->state->used = BLOCK"),
        ("convolutions.c", "n * image + offsets[places[o]]", "offsets[places[o]]"),
        ("convolutions.c", "value > most", "value >= most + 1"),
        ("convolutions.c", "place += across", "place += length"),
        ("convolutions.c", "first * layer->next", "first"),
        ("convolutions.c", "biases[o] = bias ? bias[o] : 0", "biases[o] = 0"),
        ("convolutions.c", "row * step + start", "row * length + start"),
        ("convolutions.c", "into[i] += total", "into[i] = total"),
        ("convolutions.c", "UINT64_C(1) << (o % WORD)", "UINT64_C(1) << (o % 32)"),
        ("convolutions.c", "left < LANES ? left : LANES", "left < LANES ? left : LANES - 1"),
        ("convolutions.c", "from + o * most", "from"),
        ("dense.c", "values[i] <= 0 ? 0", "values[i] < 0 ? 0"),
        ("dense.c", "outputs[o] += row[l->bias + o]", "outputs[o] -= row[l->bias + o]"),
        ("dense.c", "if (whole < size)", "if (0)"),
        ("dense.c", "memcpy(sums + r * stride + last, ends[r], sizeof ends[r]);", ";"),
        ("dense.c", "at = l + together <= lefts ? l", "at = lefts ? 0"),
        ("dense.c", "old ? old + last : NULL", "NULL"),
        ("dense.c", "of_inputs[i] + (l->bias >= 0)", "of_inputs[i]"),
        ("dense.c", "-*rates;", "-rates[0] * (clients > 1);"),
        ("dense.c", "bias += scaled", "bias -= scaled"),
        ("dense.c", "x = buffer + l->values;", ""),
        ("dense.c", "(l - 1)->deltas : inputs", "(l - 1)->values : inputs"),
        ("dense.c", "xs += x_stride, buffer += net->size", "buffer += net->size"),
        ("classes.c", "x < LEAST ? 0 : x", "series * power"),
        ("classes.c", "row[k] > largest", "row[k] < largest"),
        ("classes.c", "row[targets[i]] -= 1;", ""),
        ("classes.c", "outputs += stride;", "outputs += size;"),
        ("classes.c", "b->targets + batch * rows", "b->targets"),
    ]),
)  # fmt: skip
def test_a_bug_in_what_is_compiled_is_seen_as_it_is_loaded(
    cache, tmp_path, monkeypatch, source, before, after
) -> None:
    text = Path(building.__file__).with_name(source).read_text()
    assert before in text
    (tmp_path / source).write_text(text.replace(before, after))
    monkeypatch.setattr(building, "__file__", str(tmp_path / "building.py"))
    module = {
        "rows.c": rows,
        "normals.c": normals,
        "convolutions.c": convolutions,
        "dense.c": dense,
        "classes.c": classes,
    }[source]
    module._compiled.cache_clear()
    try:
        assert module._compiled(*([torch.float32] if module is dense else [])) is None
    finally:
        module._compiled.cache_clear()
    assert len(list(cache.iterdir())) == 1  # it was compiled, and left out


@compiled
@pytest.mark.parametrize("spoil", ["directory", "library"])
def test_what_others_could_have_written_is_not_loaded(cache, spoil) -> None:
    assert building.library("rows.c", rows._self_test) is not None
    (built,) = cache.iterdir()
    (cache if spoil == "directory" else built).chmod(0o777)
    assert building.library("rows.c", rows._self_test) is None


@compiled
def test_without_a_compiler_or_where_it_is_unwanted_or_wrong_there_is_none(
    cache, monkeypatch
) -> None:
    assert building.library("rows.c", lambda loaded: False) is None
    with monkeypatch.context() as unwanted:
        unwanted.setenv(building.DISABLED, "0")
        assert building.library("rows.c", rows._self_test) is None
    (built,) = cache.iterdir()
    built.unlink()
    no_library = cache / "none.so"
    no_library.write_bytes(b"no library")
    with monkeypatch.context() as spoilt:
        spoilt.setattr(building, "built", lambda *_: no_library)
        assert building.library("rows.c", rows._self_test) is None
    no_library.unlink()
    with monkeypatch.context() as failed:
        failed.setattr(building.shutil, "which", lambda name: "/bin/false")
        assert building.library("rows.c", rows._self_test) is None
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    assert building.library("rows.c", rows._self_test) is None
    assert list(cache.iterdir()) == []


def test_noise_that_is_prefetched_builds_nothing_in_its_thread(monkeypatch) -> None:
    """A worker that is forked meanwhile would wait for what the building holds locked."""
    built_in = []

    def library(*_: object, **__: object) -> None:
        built_in.append(threading.current_thread())

    monkeypatch.setattr(normals, "library", library)
    normals._compiled.cache_clear()
    try:
        source = prefetched(NoiseSource(np.random.Generator(np.random.Philox(key=1))), [5000])
        assert len(source.normal(5000)) == 5000
    finally:
        normals._compiled.cache_clear()
    assert built_in == [threading.current_thread()]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only a process knows")
def test_naming_a_library_starts_no_process(monkeypatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("nobody may be waited for")

    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.setattr("platform._uname_cache", None)
    assert building._processor()
