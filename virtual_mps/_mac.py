"""Lets code find itself on a Mac: what it imports as `sys` and `platform` says Darwin on arm64.

Only the code named is told so. What it calls, setuptools and PyTorch above all, has to know the truth.
"""

import builtins
import functools
import importlib.machinery
import platform
import sys
import types
from collections.abc import Collection


def _seen_as(module: types.ModuleType, **values: object) -> types.ModuleType:
    """The module, but for some of its attributes."""
    view = types.ModuleType(module.__name__, module.__doc__)
    view.__getattr__ = functools.partial(getattr, module)
    vars(view).update(values)
    return view


@functools.cache
def builtins_on_a_mac() -> dict[str, object]:
    """The built-in names to execute such code with."""
    views = {
        "sys": _seen_as(sys, platform="darwin"),
        "platform": _seen_as(platform, system=lambda: "Darwin", machine=lambda: "arm64"),
    }

    def import_(name, globals=None, locals=None, fromlist=(), level=0):
        return views[name] if name in views else builtins.__import__(name, globals, locals, fromlist, level)

    return vars(builtins) | {"__import__": import_}


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        module.__builtins__ = builtins_on_a_mac()
        super().exec_module(module)


class _Finder:
    def __init__(self, packages: Collection[str]):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.packages:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def tell(packages: Collection[str]) -> None:
    """Has the modules of these packages find themselves on a Mac, from their import on."""
    sys.meta_path.insert(0, _Finder(packages))
