"""Combinations of settings: all of them for the conformance suite, for `make test` so many that every pair occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

Case = Mapping[str, object]
Factors = Mapping[str, Sequence]
Possible = Callable[[Case], bool]


def pairwise(factors: Factors, possible: Possible) -> Iterator[Case]:
    """Cases in which every possible pair of settings occurs: each starts from a pair that is missing, and each further
    setting is the one that adds most of the missing pairs."""

    def pairs(case: Case) -> set:
        return set(itertools.combinations(((name, case[name]) for name in factors if name in case), 2))

    settings = [[(name, value) for value in values] for name, values in factors.items()]
    missing = {
        pair for a, b in itertools.combinations(settings, 2) for pair in itertools.product(a, b) if possible(dict(pair))
    }
    while missing:
        case = dict(min(missing, key=repr))
        for name, values in factors.items():
            if name not in case:
                choices = [case | {name: value} for value in values if possible(case | {name: value})]
                case = max(choices, key=lambda choice: len(pairs(choice) & missing))
        missing -= pairs(case)
        yield case


def every(factors: Factors, possible: Possible) -> Iterator[Case]:
    cases = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return (case for case in cases if possible(case))


def parametrize(metafunc: pytest.Metafunc, factors: Factors, possible: Possible, key: Sequence[str]) -> None:
    """Gives a test its `cases`: of the selection one at a time, of all those that share the settings named by `key`."""
    if "cases" not in metafunc.fixturenames:
        return
    # The option belongs to the conformance suite, and is not known where that is not named on the command line.
    if metafunc.config.getoption("--conformance", "sample") == "all":
        cases = every(factors, possible)
    else:
        key, cases = tuple(factors), pairwise(factors, possible)
    groups = itertools.groupby(cases, key=lambda case: ", ".join(f"{name} {case[name]}" for name in key))
    metafunc.parametrize("cases", [pytest.param(list(group), id=name) for name, group in groups])


def check_selection(factors: Factors, possible: Possible) -> list[Case]:
    """The selection; fails unless every possible pair of settings occurs in it, and nothing else."""
    selected = list(pairwise(factors, possible))
    for (a, values), (b, others) in itertools.combinations(factors.items(), 2):
        for value, other in itertools.product(values, others):
            found = any(case[a] == value and case[b] == other for case in selected)
            assert found == possible({a: value, b: other}), (a, value, b, other)
    assert all(possible(case) for case in selected)
    return selected
