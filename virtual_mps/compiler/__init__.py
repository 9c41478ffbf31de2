"""Compiles unmodified Metal sources for the CPU.

preprocess  clang -E with empty <metal_*> headers: what macros and includes make of the source
source      its syntax tree (tree-sitter), in which Metal's own words have C++ stand-ins; edits by offset
kernels     what it offers: kernels, their parameters, instantiations, function constants
rewrite     the edits that make it C++ with address spaces, for one set of function constants
compile     the edited source, after include/vmps/metal.h, through clang to one shared object a kernel
instrument  for checked mode and counters: calls to the executor around every access to memory
runtime     libvmps_executor.so, which loads and runs those objects, and calls this package for what its cache lacks

`executor.h` is the way in from C; `virtual_mps.executor` from Python. All results are cached on disk by content.
"""

from .runtime import build_runtime
from .toolchain import CompileError

__all__ = ["CompileError", "build_runtime"]
