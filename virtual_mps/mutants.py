"""Mutation tests: which small fault in a shader does no test notice?

    python -m virtual_mps mutants my_shader.metal -- pytest tests/test_my_op.py

Each barrier, bound check, comparison and reduction of the shaders, and of the headers they include, is changed, one at
a time, and the tests that launch a kernel with the change run until one fails. Nothing is rebuilt and no file changes:
the shader compiler makes the change in whatever text the extension hands to Metal (compiler/mutation.py). The tests are
collected once, in a process that forks for each mutant.
"""

import contextlib
import ctypes
import dataclasses
import io
import json
import os
import select
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11
    import tomli as tomllib

import pytest

from . import activate
from .compiler import CompileError, build_runtime, cache, mutation, runtime
from .compiler.compile import check
from .compiler.kernels import read
from .compiler.mutation import Mutant
from .compiler.objects import same_code
from .compiler.preprocess import preprocess
from .compiler.source import Source

# A mutant may loop for ever. What its tests took without it, and this for compiling its kernels, is enough for others.
PATIENCE = 10  # times
COMPILING = 120  # seconds
KILLED = ("killed", "does not compile", "ran too long", "ended the process")


@dataclasses.dataclass
class Result:
    mutant: Mutant
    place: str
    outcome: str = ""
    detail: str = ""  # the test that failed, or the compiler's message


@dataclasses.dataclass(frozen=True)
class TestRun:
    seconds: float
    kernels: frozenset[str]


class Problem(Exception):
    """Why there is nothing to report."""


# ---- what there is to change ----------------------------------------------------------------------------------------
@dataclasses.dataclass
class Shader:
    path: Path
    source: Source
    functions_of: dict[str, set[str]]  # kernel function -> names that the host asks for

    @classmethod
    def load(cls, path: Path, include_dirs: Sequence[str], defines: Sequence[str]) -> "Shader":
        source = Source(preprocess(path, defines, [*include_dirs, str(path.parent)]))
        names: dict[str, set[str]] = {}
        for kernel in read(source).kernels.values():
            names.setdefault(kernel.function, set()).add(kernel.name)
        return cls(path, source, names)

    def sites(self) -> Iterator[tuple[Mutant, str]]:
        for site in mutation.sites(self.source):
            yield site.mutant, self.source.location(site.start)

    def kernels_with(self, mutant: Mutant) -> set[str]:
        reached = mutation.kernels_that_reach(self.source, mutant.function)
        return set().union(*(self.functions_of.get(function, set()) for function in reached))


# ---- the process that runs tests ------------------------------------------------------------------------------------
class _Recorder:
    """Notes how long each test takes and which kernels it launches, or only the first that fails."""

    def __init__(self, wanted: Sequence[str] | None = None):
        self.wanted = wanted
        self.runs: dict[str, TestRun] = {}
        self.failure: tuple[str, str] | None = None
        self._api = _launch_log()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.wanted is not None:
            place = {name: i for i, name in enumerate(self.wanted)}
            chosen = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in place])
            items[:] = chosen

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._api()
        start = time.monotonic()
        result = yield
        kernels = {line.rpartition("\t")[2] for line in self._api().splitlines()}
        self.runs[item.nodeid] = TestRun(time.monotonic() - start, frozenset(kernels))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failure is None:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            self.failure = (report.nodeid, " ".join(line.strip() for line in message.splitlines()[:2]))


def _launch_log() -> Callable[[], str]:
    api = ctypes.CDLL(str(build_runtime()))
    api.vmps_take_launched.restype = ctypes.c_void_p
    api.vmps_free.argtypes = [ctypes.c_void_p]

    def take() -> str:
        text = api.vmps_take_launched()
        try:
            return ctypes.string_at(text).decode()
        finally:
            api.vmps_free(text)

    return take


def _pytest(arguments: Sequence[str], plugin: object | None = None) -> int:
    """Runs pytest in this process and says nothing."""
    flags = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        status = pytest.main([*arguments, *flags], plugins=[plugin] if plugin else None)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise Problem(out.getvalue().strip() or f"pytest ended with status {int(status)}")
    return int(status)


class Child:
    """A fork of this process that computes something, and may take too long or die."""

    def __init__(self, compute: Callable[[], object], environment: dict[str, str], seconds: float):
        self.deadline = time.monotonic() + seconds
        receiving, sending = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(sending)
            self.pipe = receiving
            return
        try:
            os.setpgid(0, 0)  # the compilers that it starts end with it
            os.environ.update(environment)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            answer = json.dumps(compute())
        except BaseException:  # whatever it is, the other side is to hear of it
            answer = json.dumps({"problem": traceback.format_exc()})
        with os.fdopen(sending, "w") as pipe:
            pipe.write(answer)
        os._exit(0)

    def answer(self) -> dict | None:
        """What it computed; None if it took too long, and an empty answer if it died."""
        text = b""
        while (left := self.deadline - time.monotonic()) > 0:
            if select.select([self.pipe], [], [], left)[0]:
                if not (piece := os.read(self.pipe, 1 << 16)):
                    break
                text += piece
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)
        if left <= 0:
            return None
        answer = json.loads(text) if text else {}
        if "problem" in answer:
            raise Problem(answer["problem"])
        return answer


# ---- one mutant -----------------------------------------------------------------------------------------------------
def _baseline(arguments: Sequence[str]) -> dict[str, TestRun]:
    def compute() -> dict:
        recorder = _Recorder()
        _pytest(arguments, recorder)
        runs = {name: (run.seconds, sorted(run.kernels)) for name, run in recorder.runs.items()}
        return {"failure": recorder.failure, "runs": runs}

    answer = Child(compute, {}, 24 * 3600).answer()
    if not answer:
        raise Problem("the process of the tests died")
    if answer["failure"]:
        raise Problem("a test fails without any mutant: {}: {}".format(*answer["failure"]))
    return {name: TestRun(seconds, frozenset(kernels)) for name, (seconds, kernels) in answer["runs"].items()}


def _try(mutant: Mutant, shaders: Sequence[Shader], arguments: Sequence[str], tests: Sequence[str]) -> dict:
    """In a child: the outcome, and what tells of it."""
    for shader in shaders:
        changed = mutation.apply(shader.source.text.decode(), mutant)
        try:
            if changed is not None:
                check(changed, instantiate=True)
        except CompileError as error:
            return {"outcome": "does not compile", "detail": str(error).splitlines()[0]}
    recorder = _Recorder(tests)
    _pytest([*arguments, "-x"], recorder)
    if recorder.failure:
        return {"outcome": "killed", "detail": ": ".join(recorder.failure)}
    return {"outcome": "equivalent" if _is_equivalent(mutant) else "survived", "detail": ""}


def _folders_of(mutant: Mutant) -> list[Path]:
    return list((cache.root() / runtime.compiler_id()).glob(f"*.{mutant.digest}"))


def _is_equivalent(mutant: Mutant) -> bool:
    """Whether every kernel that was compiled for it has the code that it has without it."""
    compiled = [
        file
        for folder in _folders_of(mutant)
        if not folder.is_symlink()
        for file in folder.glob("*.so")
        if not file.is_symlink()
    ]
    originals = [file.parent.with_name(file.parent.name.partition(".")[0]) / file.name for file in compiled]
    return bool(compiled) and all(
        original.exists() and same_code(file, original) for file, original in zip(compiled, originals, strict=True)
    )


def _forget(mutant: Mutant) -> None:
    for folder in _folders_of(mutant):
        if folder.is_symlink():
            folder.unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _run_all(
    results: Sequence[Result], shaders: Sequence[Shader], arguments: Sequence[str], runs: dict[str, TestRun], jobs: int
) -> Iterator[Result]:
    """Gives each result with its outcome, as it comes to be known."""
    waiting, running = list(results), {}
    recent: list[str] = []  # tests that have killed: where one fails, the next mutant of the function is likely to
    while waiting or running:
        while waiting and len(running) < jobs:
            result = waiting.pop(0)
            kernels = set().union(*(shader.kernels_with(result.mutant) for shader in shaders))
            tests = [name for name, run in runs.items() if run.kernels & kernels]
            if not tests:
                result.outcome, result.detail = "survived", "no test launches a kernel with it"
                yield result
                continue
            tests.sort(key=lambda name: (recent.index(name) if name in recent else len(recent), runs[name].seconds))
            seconds = COMPILING + PATIENCE * sum(runs[name].seconds for name in tests)
            compute = lambda m=result.mutant, t=tests: _try(m, shaders, arguments, t)  # noqa: E731
            child = Child(compute, {mutation.VARIABLE: result.mutant.environment()}, seconds)
            running[child.pipe] = (child, result)
        if not running:
            return
        soonest = min(child.deadline for child, _ in running.values()) - time.monotonic()
        ready = select.select(list(running), [], [], max(soonest, 0))[0]
        late = [pipe for pipe, (child, _) in running.items() if child.deadline <= time.monotonic()]
        for pipe in {*ready, *late}:
            child, result = running.pop(pipe)
            answer = child.answer()
            if answer is None:
                result.outcome = "ran too long"
            elif not answer:
                result.outcome = "ended the process"
            else:
                result.outcome, result.detail = answer["outcome"], answer["detail"]
            if result.outcome == "killed":
                name = result.detail.partition(": ")[0]
                recent = [name, *(other for other in recent if other != name)]
            _forget(result.mutant)
            yield result


# ---- reasons and report ---------------------------------------------------------------------------------------------
def _reasons(path: Path | None) -> dict[tuple[str, Mutant], str]:
    """By file and mutant: why it is right that it survives."""
    if path is None or not path.exists():
        return {}
    reasons = {}
    for entry in tomllib.loads(path.read_text()).get("survivor", []):
        try:
            file, reason = entry.pop("shader"), entry.pop("reason")
            reasons[file, Mutant(**entry)] = reason
        except (KeyError, TypeError) as error:
            wanted = "shader, function, fault, text, reason, and perhaps occurrence"
            raise Problem(f"{path}: a survivor has {wanted}: {error}") from None
    return reasons


def _toml(file: str, mutant: Mutant) -> str:
    values = {"shader": file, **dataclasses.asdict(mutant)}
    if mutant.occurrence == 1:
        del values["occurrence"]
    return "\n".join(
        ["[[survivor]]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), 'reason = ""']
    )


def _file(result: Result) -> str:
    return Path(result.place.rsplit(":", 2)[0]).name


def mutants(
    paths: Sequence[Path],
    arguments: Sequence[str],
    reasons_file: Path | None,
    include_dirs: Sequence[str],
    defines: Sequence[str],
    jobs: int,
    only_list: bool,
) -> int:
    """The command; its exit status."""
    shaders = [Shader.load(path, include_dirs, defines) for path in paths]
    results: dict[Mutant, Result] = {}
    for shader in shaders:
        for mutant, place in shader.sites():
            results.setdefault(mutant, Result(mutant, place))
    if only_list:
        for result in results.values():
            print(f"{_short(result.place)}  {result.mutant}")
        return 0
    reasons = _reasons(reasons_file)
    os.environ.setdefault("VIRTUAL_MPS_CHECK", "1")
    activate()
    _pytest([*arguments, "--collect-only"])
    runs = _baseline(arguments)
    used = sum(bool(run.kernels) for run in runs.values())
    seconds = sum(run.seconds for run in runs.values())
    print(
        f"{len(results)} mutants; {used} of {len(runs)} tests launch kernels; they all take {seconds:.0f} s", flush=True
    )
    missing = []
    for result in _run_all(list(results.values()), shaders, arguments, runs, jobs):
        reason = reasons.pop((_file(result), result.mutant), None)
        if result.outcome == "survived" and reason:
            result.outcome, result.detail = "survived with a reason", reason
        elif result.outcome == "survived":
            missing.append(result)
        elif reason:
            missing.append(result)
            result.outcome += ", though mutants.toml says that it survives"
        detail = f"\n    {result.detail}" if result.detail else ""
        print(f"{result.outcome:16} {_short(result.place)}  {result.mutant}{detail}", flush=True)
    return _report(
        results.values(), missing, {key for key in reasons if key[0] in {_file(r) for r in results.values()}}
    )


def _short(place: str) -> str:
    file, line, _ = place.rsplit(":", 2)
    return f"{Path(file).name}:{line}"


def _report(results: Sequence[Result], missing: Sequence[Result], stale: set[tuple[str, Mutant]]) -> int:
    counts: dict[str, int] = {}
    for result in results:
        counts[result.outcome] = counts.get(result.outcome, 0) + 1
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    survivors = [result for result in missing if result.outcome == "survived"]
    if survivors:
        print("\nNo test notices these. Add a test, or record why none can:\n")
        print("\n\n".join(_toml(_file(result), result.mutant) for result in survivors))
    for file, mutant in sorted(stale, key=str):
        print(f"\nA reason is recorded for a mutant that there is not: {file}: {mutant}")
    return int(bool(missing or stale))
