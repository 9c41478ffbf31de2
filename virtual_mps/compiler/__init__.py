"""Compiles unmodified Metal sources for the CPU: preprocess, rewrite, clang."""

from .runtime import build_runtime
from .toolchain import CompileError

__all__ = ["CompileError", "build_runtime"]
