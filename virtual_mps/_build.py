"""Builds the native half, once for each state of its sources, PyTorch, Python and clang.

The result is a folder:
    _virtual_mps.so   the device and the Metal framework; a Python module
    module.o          to be linked into every library that is built from .mm files
    include/          the distribution's Objective-C headers, adapted (they are not ours to ship)
    real_kernels.KEY  the ops that have a kernel in PyTorch's MPS backend, one file for each of its dispatch keys
"""

import fcntl
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import EnvironmentProblem, _environment
from ._real_kernels import KEYS, real_kernels
from .compiler import cache

PACKAGE = Path(__file__).resolve().parent
OUR_HEADERS = PACKAGE / "include"

# The oldest of clang's runtimes with ARC, object subscripting and private instance variables; objc/module.cpp adapts
# what it emits to GCC's libobjc.
OBJC_FLAGS = [
    "-fobjc-runtime=gnustep-1.9",
    "-Xclang",
    "-fobjc-dispatch-method=legacy",
    "-fblocks",
    "-fexceptions",
    "-fobjc-exceptions",
    "-fconstant-string-class=NSConstantString",
    "-DGNUSTEP",
    "-DGNUSTEP_BASE_LIBRARY=1",
    "-DGNU_RUNTIME=1",
    "-D_NATIVE_OBJC_EXCEPTIONS",
    "-Wno-nullability-completeness",
]
OBJC_LIBRARIES = ["-lgnustep-base", "-l:libobjc.so.4"]


def torch_root() -> Path:
    """Where PyTorch is, without importing it."""
    return Path(importlib.util.find_spec("torch").origin).parent


def sources() -> list[Path]:
    folders = (PACKAGE / name for name in ("device", "metal", "objc"))
    return sorted(file for folder in folders for file in folder.iterdir() if file.suffix in (".cpp", ".mm"))


def _inputs() -> list[Path]:
    """Everything in this package that the result depends on."""
    headers = [file for folder in ("device", "metal", "objc", "include") for file in (PACKAGE / folder).rglob("*.h")]
    scripts = [Path(__file__).resolve(), PACKAGE / "_real_kernels.py"]
    return sorted([*sources(), *headers, PACKAGE / "executor/executor.h", *scripts])


def include_flags(built: Path) -> list[str]:
    """For code that includes Apple's headers. Ours come first, then the adapted ones of the distribution."""
    return [
        f"-I{OUR_HEADERS}",
        "-isystem",
        str(built / "include"),
        "-isystem",
        str(_environment.gnustep_headers()),
    ]


def native() -> Path:
    """The folder with the native half, built now if the cache has none for the present state."""
    _environment.check_platform()
    key = cache.digest(
        _environment.check_torch(),
        str(torch_root()),
        sysconfig.get_config_var("SOABI"),
        _environment.clang(),
        str(_environment.objc_headers()),
        str(_environment.gnustep_headers()),
        *(part for file in _inputs() for part in (str(file.relative_to(PACKAGE)), file.read_bytes())),
    )
    folder = cache.root() / "native" / key[:16]
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"virtual_mps cannot write its cache, {cache.root()} ({error.strerror}): set VIRTUAL_MPS_CACHE to a folder"
        ) from None
    # Building twice at once would be harmless, and slow.
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            print("virtual_mps: building the native half (once for this state of the machine)", file=sys.stderr)
            with cache.new_directory(folder) as scratch:
                _build_into(scratch)
    return folder


def _build_into(folder: Path) -> None:
    _adapt_headers(folder / "include")
    for key in KEYS:
        (folder / f"real_kernels.{key}").write_text("".join(f"{name}\n" for name in real_kernels(key)))
    torch = torch_root()
    flags = [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-pthread",
        "-DAT_PER_OPERATOR_HEADERS",
        "-DTORCH_EXTENSION_NAME=_virtual_mps",
        "-Wno-inconsistent-missing-override",
        *include_flags(folder),
        "-isystem",
        str(torch / "include"),
        "-isystem",
        str(torch / "include/torch/csrc/api/include"),
        "-isystem",
        sysconfig.get_path("include"),
    ]
    objects = {source: folder / f"{source.name}.o" for source in sources()}

    def compile_one(source: Path) -> None:
        objc = OBJC_FLAGS if source.suffix == ".mm" else []
        _run([_environment.clang(), *flags, *objc, "-c", str(source), "-o", str(objects[source])])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, objects))
    _run(
        [
            _environment.clang(),
            "-shared",
            *map(str, objects.values()),
            "-o",
            str(folder / "_virtual_mps.so"),
            f"-L{torch / 'lib'}",
            f"-Wl,-rpath,{torch / 'lib'}",
            "-ltorch_python",
            "-ltorch",
            "-ltorch_cpu",
            "-lc10",
            *OBJC_LIBRARIES,
        ]
    )
    for source, built in objects.items():
        if source.name == "module.cpp":
            built.rename(folder / "module.o")
        else:
            built.unlink()


def _adapt_headers(folder: Path) -> None:
    """Copies the few headers of the distribution that modern Objective-C cannot use as they are."""
    foundation = folder / "Foundation"
    foundation.mkdir(parents=True)
    for header in (_environment.gnustep_headers() / "Foundation").glob("NS*.h"):
        text = header.read_text(errors="surrogateescape")
        # +[NSString stringWith...] returns id there and instancetype at Apple, whose result takes dot syntax.
        noun = header.stem.removeprefix("NS")
        noun = noun if noun[:2].isupper() else noun[0].lower() + noun[1:]
        adapted = re.sub(rf"(?m)^\+ *\(id\) *(?={noun})", "+ (instancetype) ", text)
        if adapted != text:
            (foundation / header.name).write_text(adapted, errors="surrogateescape")
    objc = folder / "objc"
    objc.mkdir()
    for header in _environment.objc_headers().glob("*.h"):
        text = header.read_text(errors="surrogateescape")
        if header.name == "runtime.h":
            # ARC does not let code look into an object.
            text = text.replace("object->class_pointer", "*(Class *)VMPS_PLAIN_POINTER(object)")
            text = (
                "#ifdef __OBJC__\n#define VMPS_PLAIN_POINTER(object) ((__bridge void *)(object))\n"
                "#else\n#define VMPS_PLAIN_POINTER(object) (object)\n#endif\n" + text
            )
        (objc / header.name).write_text(text, errors="surrogateescape")


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode == 0:
        return
    missing = re.search(r"fatal error: '([^']+)' file not found", result.stderr)
    hint = ""
    if missing and "/" not in missing[1] and "." not in missing[1]:
        hint = "The C++ standard library's headers are missing: apt install g++\n"
    elif "cannot find -lgnustep-base" in result.stderr:
        hint = "GNUstep is missing: apt install libgnustep-base-dev\n"
    elif "cannot find -l:libobjc.so.4" in result.stderr:
        hint = "The Objective-C runtime is missing: apt install libobjc4\n"
    raise EnvironmentProblem(
        f"virtual_mps: building the native half failed.\n{hint}{shlex.join(command)}\n{result.stderr.strip()}"
    )
