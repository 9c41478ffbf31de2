"""Objective-C as extensions write it today, under ARC."""

import re

import pytest

SCENES = {
    "literals": "q 7 2.5 2",
    "classes": "4t2.552copy52",
    "protocols": "1100",
    "categories": "abab",
    "deallocation": "3",
    "weak_references": "111",
    "blocks": "35 30 1",
    "cxx_containers": "64/a/b",
    "cxx_exceptions": "through a block",
    "objc_exceptions": "value 3 finally a string any",
    "enumeration": "ab",
}


@pytest.fixture(scope="module")
def objc(build_extension):
    return build_extension("objc", extra_cflags=["-fobjc-arc"])


@pytest.mark.parametrize(("name", "expected"), SCENES.items(), ids=SCENES)
def test_scene(objc, capfd, name, expected):
    for _ in range(3):  # a wrong reference count shows when things are done again
        assert objc.run(name) == expected
    assert "autorelease called without pool" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unrecognised_selector", "NSInvalidArgumentException.*lowercaseString"),
        ("array_out_of_bounds", "NSRangeException"),
    ],
)
def test_uncaught_objective_c_exceptions_reach_python(objc, name, message):
    with pytest.raises(RuntimeError, match=re.compile(message, re.DOTALL)):
        objc.run(name)


def test_autorelease_on_a_thread_without_a_pool(objc, capfd):
    import threading

    results = []
    thread = threading.Thread(target=lambda: results.append(objc.run("literals")))
    thread.start()
    thread.join()
    assert results == [SCENES["literals"]]
    assert "autorelease called without pool" not in capfd.readouterr().err
