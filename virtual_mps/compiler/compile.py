"""The verbs: a source becomes a library folder, and a kernel of a library a shared object.

A library folder holds `source.ii` (the preprocessed text), `options.json` and `table.json` (see executor.h).
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import cache, constants, flops, instrument, kernels, mutation, runtime, strict, toolchain
from .messages import ENTRY, readable
from .preprocess import preprocess
from .rewrite import rewrite
from .source import Source
from .toolchain import CompileError

# A lane's stack is 64 KiB; what is left is for the functions that are not inlined and for a signal handler.
MAX_FRAME = 48 * 1024
# Vectors may lie at the alignment of their elements, which Apple's GPUs tolerate. Of the instructions clang emits for
# this machine only aligned moves mind.
UNALIGNED_MOVES = {"vmovaps": "vmovups", "vmovapd": "vmovupd", "vmovdqa": "vmovdqu"}
FRAME_LIMIT = [f"-Wframe-larger-than={MAX_FRAME}", "-Werror=frame-larger-than"]


@dataclass(frozen=True)
class Options:
    defines: tuple[str, ...] = ()
    fast_math: bool = False
    language: int = 0


def compile_library(text: str, directory: Path, options: Options, preprocessed: bool = False) -> None:
    """Reads a source, checks that it compiles, and writes its library folder."""
    if not preprocessed:
        text = preprocess(text, options.defines, language=options.language, fast_math=options.fast_math)
    if mutant := mutation.active():
        original = _original(directory)
        if not original.exists():
            _write_library(text, original, options)
        mutated = mutation.apply(text, mutant)
        if mutated is None:
            directory.symlink_to(original)
        else:
            _write_library(mutated, directory, options)
    else:
        _write_library(text, directory, options)


def _original(directory: Path) -> Path:
    """Of a mutant's library folder, that of the library as it is."""
    return directory.with_name(directory.name.partition(".")[0])


def _write_library(text: str, directory: Path, options: Options) -> None:
    source = Source(text)
    offer = kernels.read(source)
    strict.check_source(source, offer, options.language)
    with cache.new_directory(directory) as scratch:
        (scratch / "source.ii").write_text(text)
        (scratch / "options.json").write_text(json.dumps(asdict(options)))
        (scratch / "table.json").write_text(json.dumps(offer.table(), indent=1))


def check(text: str, language: int = 0, instantiate: bool = False, werror: bool = False) -> list[str]:
    """Reads a preprocessed source as Apple's compiler does, and gives its warnings: see strict.check_source."""
    source = Source(text)
    return strict.check_source(source, kernels.read(source), language, instantiate, werror)


def compile_kernel(
    directory: Path, name: str, values: Mapping[str, bytes], output: Path, instrumented: bool = False
) -> None:
    """Compiles one kernel of a library folder for one set of function constants.

    values: by the constant's name, or by its index in decimal.
    instrumented: the kernel asks the executor for every address; see instrument.py.
    """
    source = Source((directory / "source.ii").read_text())
    options = Options(**json.loads((directory / "options.json").read_text()))
    offer = kernels.read(source)
    kernel = offer.kernels.get(name)
    if kernel is None:
        raise CompileError(_no_such_kernel(name, offer))
    mutant = mutation.active()
    if mutant and kernel.function not in mutation.kernels_that_reach(source, mutant.function):
        same = _original(directory) / output.name
        if not directory.is_symlink():
            if not same.exists():
                compile_kernel(same.parent, name, values, same, instrumented)
            output.symlink_to(same)
            return
    literals = _constant_literals(offer, values)
    code = _translation_unit(source, offer, literals, _entry(kernel))
    with cache.new_file(output) as scratch:
        assembly = scratch.with_suffix(".s")
        flags = [*toolchain.code_flags(options.fast_math), "-S"]
        try:
            if kernel.is_instance or offer.function_constants:
                strict.check_kernel(source, offer, literals, _entry(kernel), options.language)
            if instrumented:
                _instrumented(code, flags, assembly)
            else:
                _clang(code, [*flags, "-o", str(assembly)])
        except CompileError as error:
            raise CompileError(_explain(str(error), kernel)) from None
        assembly.write_text(_finish_assembly(assembly.read_text()))
        _link(assembly, scratch)


def _instrumented(code: str, flags: Sequence[str], assembly: Path) -> None:
    module = assembly.with_suffix(".ll")
    flags = [*flags, *instrument.FLAGS]
    _clang(code, [*flags, "-Xclang", "-disable-llvm-passes", "-emit-llvm", "-o", str(module)])
    text = flops.mark(module.read_text())
    # An unrolled loop has its accesses many times over, each to be instrumented.
    module.write_text(re.sub(r'"llvm\.loop\.unroll\.(enable|full)"', '"unroll on a GPU"', text))
    _clang_ir(module, [*flags, "-emit-llvm", "-o", str(module)])
    module.write_text(instrument.instrument(module.read_text()))
    # Optimised already; what came in since is to be inlined.
    _clang_ir(module, [*toolchain.machine_flags(), "-O1", "-fPIC", "-S", *FRAME_LIMIT, "-o", str(assembly)])


def _clang_ir(module: Path, arguments: Sequence[str]) -> None:
    result = toolchain.run([toolchain.clang(), "-x", "ir", "-Wno-everything", *arguments, str(module)])
    if result.returncode:
        raise CompileError(result.stderr.strip())


def _constant_literals(offer: kernels.Offer, values: Mapping[str, bytes]) -> dict[str, str]:
    literals = {}
    for constant in offer.function_constants.values():
        value = values.get(constant.name, values.get(str(constant.index)))
        if value is not None:
            literals[constant.name] = constants.literal(constant, value)
    return literals


def _explain(message: str, kernel: kernels.Kernel) -> str:
    """What clang says about our own lines, in terms of the kernel."""
    if "stack frame size (" in message:
        limit = f"more than {MAX_FRAME} bytes, which is what virtual_mps has for a thread"
        return f"{kernel.location}: error: the local variables of kernel '{kernel.name}' take {limit}"
    if f"{ENTRY}:" not in message:
        return message
    if "no matching function for call to 'run'" in message:
        wanted = kernel.expression.removeprefix("&::")
        return f"{kernel.location}: error: no kernel function for '{kernel.name}' matches {wanted}"
    return f"{kernel.location}: error: kernel '{kernel.name}': {message}"


def _no_such_kernel(name: str, offer: kernels.Offer) -> str:
    near = difflib.get_close_matches(name, offer.kernels, n=3) or sorted(offer.kernels)[:8]
    return f"virtual_mps: the library has no kernel '{name}'; it has {', '.join(near) or 'none'}" + (
        " and more" if len(near) < len(offer.kernels) else ""
    )


def _translation_unit(source: Source, offer: kernels.Offer, literals: Mapping[str, str], entry: str) -> str:
    """The source's functions are internal, so that code is generated only for what the entry needs."""
    body = rewrite(source, offer, literals).apply().decode()
    return f"""#include "vmps/metal.h"
#pragma clang attribute push(__attribute__((internal_linkage)), apply_to = function)
{body}
# 1 "{ENTRY}"
#pragma clang attribute pop
{entry}
"""


def _entry(kernel: kernels.Kernel) -> str:
    """Code that tells the executor how to call the kernel."""
    sources, image = [], []
    for p in kernel.parameters:
        origin = {"buffer": "buffer", "threadgroup": "threadgroup_memory"}.get(p.kind, p.attribute)
        sources.append(f"{{{_if_present(p, f'vmps::source::{origin}', 'vmps::source::absent')}, {p.index}}}")
        if p.kind != "builtin":
            kind = {"buffer": "0", "threadgroup": "1"}[p.kind]
            constant = int(p.address_space == "constant")
            image.append(f'{{{_if_present(p, kind, "-1")}, {p.index}, "{p.name}", {constant}}}')
    # Both lists end with an entry that stands for nothing: C++ has no empty arrays.
    sources.append("{vmps::source::absent, 0}")
    image.append("{-1, 0, nullptr, 0}")
    return (
        f"static constexpr vmps::parameter vmps_parameters[] = {{{', '.join(sources)}}};\n"
        f"static const vmps_image_parameter vmps_image_parameters[] = {{{', '.join(image)}}};\n"
        f"VMPS_KERNEL({kernel.max_threads}, {kernel.expression})"
    )


def _if_present(parameter: kernels.Parameter, given: str, absent: str) -> str:
    """The function constant that a parameter depends on may itself be computed from others: let clang decide."""
    condition = parameter.function_constant
    return f"({condition}) ? {given} : {absent}" if condition else given


def _clang(code: str, arguments: Sequence[str]) -> None:
    command = [
        *(toolchain.clang(), *toolchain.read_flags(), "-Wno-everything", "-ferror-limit=8", "-fno-caret-diagnostics"),
        *FRAME_LIMIT,
        *(*arguments, "-"),
    ]
    result = toolchain.run(command, input=code)
    if result.returncode:
        raise CompileError(readable(result.stderr))


def _finish_assembly(assembly: str) -> str:
    lines = []
    for line in assembly.splitlines():
        mnemonic, tab, operands = line.lstrip("\t").partition("\t")
        lines.append(f"\t{UNALIGNED_MOVES[mnemonic]}{tab}{operands}" if mnemonic in UNALIGNED_MOVES else line)
    waits = int("vmps_wait_simdgroup" in assembly or "vmps_wait_threadgroup" in assembly)
    lines += ["\t.section .rodata", "\t.balign 4", "\t.globl vmps_kernel_waits", "\t.hidden vmps_kernel_waits"]
    lines += ["vmps_kernel_waits:", f"\t.long {waits}", ""]
    return "\n".join(lines)


def _link(assembly: Path, output: Path) -> None:
    command = [
        toolchain.clang(),
        *toolchain.machine_flags(),
        "-shared",
        "-nostartfiles",
        "-x",
        "assembler",
        str(assembly),
    ]
    command += ["-x", "none", str(runtime.build_runtime()), "-lm", "-Wl,-z,defs", "-o", str(output)]
    result = toolchain.run(command)
    if result.returncode:
        raise CompileError(result.stderr.strip())
