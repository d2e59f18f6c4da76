"""Every planted bug is seen by the test that is about it, which passes without the bug."""

from __future__ import annotations

import pytest

from benchmarks.mutations import ROOT, Mutant, copied, killed, mutants, passes

MUTANTS = mutants()


@pytest.fixture(scope="module")
def tree():
    with copied() as tree:
        yield tree


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_list_is_of_the_code_as_it_stands(mutant: Mutant):
    mutant.planted((ROOT / mutant.file).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("test", sorted({mutant.test for mutant in MUTANTS}))
def test_without_a_bug_the_direct_tests_pass(tree, test: str):
    assert passes(tree, test)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_with_the_bug_its_direct_test_fails(tree, mutant: Mutant):
    assert killed(tree, mutant)
