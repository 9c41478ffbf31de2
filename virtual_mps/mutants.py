"""Mutation tests: which small fault in a shader does no test notice?

    python -m virtual_mps mutants my_shader.metal -- pytest tests/test_my_op.py

Each barrier, bound check, comparison and reduction of the shaders, and of the headers they include, is changed, one at
a time, and the tests that launch a kernel with the change run until one fails. Nothing is rebuilt and no file changes:
the shader compiler makes the change in whatever text the extension hands to Metal (compiler/mutation.py). The tests are
collected once, in a process that forks for each mutant.
"""

import collections
import contextlib
import ctypes
import dataclasses
import functools
import io
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

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

# A mutant may loop for ever: a test may take this many times what it took without it, and a bit. Processor time, for
# others may use the machine too.
PATIENCE = 10
AND_A_BIT = 5  # seconds
# It may also wait for ever, and use none. This long on the clock without the end of a test is too long on any machine.
SILENCE = 1200  # seconds
KILLED = ("killed", "does not compile", "ran too long", "ended the process")


@dataclasses.dataclass
class Result:
    mutant: Mutant
    place: str
    outcome: str = ""
    detail: str = ""  # the test that failed, or the compiler's message


@dataclasses.dataclass(frozen=True)
class TestRun:
    seconds: float  # of processor time, without what compilers took
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
    """Notes how long each test takes, which kernels it launches, and the first that fails."""

    def __init__(self) -> None:
        self.runs: dict[str, TestRun] = {}
        self.failure: tuple[str, str] | None = None
        self._api = _launch_log()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._api()
        start = time.process_time()
        result = yield
        kernels = {line.rpartition("\t")[2] for line in self._api().splitlines()}
        self.runs[item.nodeid] = TestRun(time.process_time() - start, frozenset(kernels))
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


class _Collected:
    """A plugin: what to do with the tests that pytest has collected, instead of running them."""

    def __init__(self, use: Callable[[pytest.Session], int]):
        self._use = use
        self.result: int | None = None
        self.error: BaseException | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.items and not session.testsfailed:
            try:
                self.result = self._use(session)
            except BaseException as error:  # pytest would make a report of it
                self.error = error
        return True


def _with_tests(arguments: Sequence[str], use: Callable[[pytest.Session], int]) -> int:
    """Collects tests in this process, without a word, and gives what `use` makes of them."""
    flags = ["-q", "--no-header", "--capture=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    plugin = _Collected(use)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        status = pytest.main([*arguments, *flags], plugins=[plugin])
    if plugin.error:
        raise plugin.error
    if plugin.result is None:
        raise Problem(out.getvalue().strip() or f"pytest ended with status {int(status)}")
    return plugin.result


def _run(session: pytest.Session, items: Sequence[pytest.Item], go_on: Callable[[_Recorder], bool]) -> _Recorder:
    """Runs tests in this process; `go_on` is asked after each."""
    recorder = _Recorder()
    session.config.pluginmanager.register(recorder)
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if not go_on(recorder):
            break
    return recorder


class Child:
    """A fork of this process that computes something, and may take too long or die.

    compute: is given a function to call now and then, as a sign of life.
    silence: seconds after which no sign of life is a sign of its end.
    """

    def __init__(self, compute: Callable[[Callable[[], None]], object], environment: dict[str, str], silence: float):
        self._silence = silence
        self.deadline = time.monotonic() + silence
        self._text = b""
        self._ended = False
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
            answer = json.dumps(compute(lambda: os.write(sending, b"\n")))
        except BaseException:  # whatever it is, the other side is to hear of it
            answer = json.dumps({"problem": traceback.format_exc()})
        with os.fdopen(sending, "w") as pipe:
            pipe.write(answer)
        os._exit(0)

    def read(self) -> None:
        """To be called when there is something in the pipe."""
        piece = os.read(self.pipe, 1 << 16)
        self._text += piece
        self._ended = not piece
        self.deadline = time.monotonic() + self._silence

    def is_over(self) -> bool:
        return self._ended or self.deadline <= time.monotonic()

    def answer(self) -> dict | None:
        """What it computed; None if it took too long, and an empty answer if it died."""
        while not self.is_over():
            wait_for_any([self])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pipe)
        if not self._ended or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF):
            return None
        answer = json.loads(self._text) if self._text.strip() else {}
        if "problem" in answer:
            raise Problem(answer["problem"])
        return answer


def wait_for_any(children: Sequence[Child]) -> None:
    """Until one of them says something, or is silent for too long."""
    soonest = min(child.deadline for child in children) - time.monotonic()
    ready = select.select([child.pipe for child in children], [], [], max(soonest, 0))[0]
    for child in children:
        if child.pipe in ready:
            child.read()


def limit_processor_time(seconds: float) -> None:
    """Ends this process when it has used that much more; `Child` then says that it took too long."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


# ---- one mutant -----------------------------------------------------------------------------------------------------
def _baseline(session: pytest.Session, jobs: int) -> dict[str, TestRun]:
    def compute(items: Sequence[pytest.Item], alive: Callable[[], None]) -> dict:
        def go_on(so_far: _Recorder) -> bool:
            alive()
            return so_far.failure is None

        recorder = _run(session, items, go_on)
        runs = {name: (run.seconds, sorted(run.kernels)) for name, run in recorder.runs.items()}
        return {"failure": recorder.failure, "runs": runs}

    shares = [share for i in range(jobs) if (share := session.items[i::jobs])]
    children = [Child(functools.partial(compute, share), {}, SILENCE) for share in shares]
    while waiting := [child for child in children if not child.is_over()]:
        wait_for_any(waiting)
    runs = {}
    for answer in [child.answer() for child in children]:
        if not answer:
            raise Problem("the process of the tests died")
        if answer["failure"]:
            raise Problem("a test fails without any mutant: {}: {}".format(*answer["failure"]))
        runs |= answer["runs"]
    return {name: TestRun(seconds, frozenset(kernels)) for name, (seconds, kernels) in runs.items()}


@dataclasses.dataclass
class Tests:
    """What the mutants are tried on, and in which order."""

    session: pytest.Session
    runs: dict[str, TestRun]
    seconds: float | None  # of processor time that a mutant gets
    killers: list[str] = dataclasses.field(default_factory=list)  # the latest first

    def of(self, kernels: set[str]) -> list[pytest.Item]:
        """Tests that launch any of the kernels. First those that have killed mutants, for the next one of a function is
        likely to die of what the last one did; then the fastest of each function, the next of each, and so on."""
        items = [item for item in self.session.items if self.runs[item.nodeid].kernels & kernels]
        items.sort(key=lambda item: self.runs[item.nodeid].seconds)
        killers = {name: i for i, name in enumerate(self.killers)}
        seen: collections.Counter[str] = collections.Counter()
        place = {}
        for item in items:
            function = item.nodeid.partition("[")[0]
            place[item] = (killers.get(item.nodeid, len(killers)), seen[function])
            seen[function] += 1
        return sorted(items, key=place.__getitem__)

    def run(self, items: Sequence[pytest.Item], alive: Callable[[], None]) -> _Recorder:
        """Until one fails, or the time is over."""
        limits = iter([self.runs[item.nodeid].seconds for item in items[1:]])

        def go_on(recorder: _Recorder) -> bool:
            alive()
            limit_processor_time(PATIENCE * next(limits, 0) + AND_A_BIT)
            return recorder.failure is None and (self.seconds is None or sum(os.times()[:4]) < self.seconds)

        limit_processor_time(PATIENCE * self.runs[items[0].nodeid].seconds + AND_A_BIT)
        return _run(self.session, items, go_on)

    def killed_by(self, name: str) -> None:
        self.killers = [name, *(other for other in self.killers if other != name)]


def _try(
    mutant: Mutant, shaders: Sequence[Shader], tests: Tests, items: Sequence[pytest.Item], alive: Callable[[], None]
) -> dict:
    """In a child: the outcome, and what tells of it."""
    recorder = tests.run(items, alive)
    if recorder.failure:
        complaint = _complaint(mutant, shaders) if "error: " in recorder.failure[1] else None
        if complaint:
            return {"outcome": "does not compile", "detail": complaint}
        return {"outcome": "killed", "detail": ": ".join(recorder.failure)}
    is_equivalent = _is_equivalent(mutant)
    if len(recorder.runs) == len(items):
        return {"outcome": "equivalent" if is_equivalent else "survived", "detail": ""}
    detail = f"{len(recorder.runs)} of {len(items)} tests were run"
    if is_equivalent:
        detail += "; the kernels that they compiled have the same machine code without it"
    return {"outcome": "survived", "detail": detail}


def _complaint(mutant: Mutant, shaders: Sequence[Shader]) -> str | None:
    """The compiler's, if it refuses the mutant."""
    for shader in shaders:
        changed = mutation.apply(shader.source.text.decode(), mutant)
        try:
            if changed is not None:
                check(changed, instantiate=True)
        except CompileError as error:
            return str(error).splitlines()[0]
    return None


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


def _run_all(results: Sequence[Result], shaders: Sequence[Shader], tests: Tests, jobs: int) -> Iterator[Result]:
    """Gives each result with its outcome, as it comes to be known."""
    waiting, running = list(results), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            result = waiting.pop(0)
            kernels = set().union(*(shader.kernels_with(result.mutant) for shader in shaders))
            items = tests.of(kernels)
            if not items:
                result.outcome = "survived" if kernels else "in no kernel"
                result.detail = "no test launches a kernel with it" if kernels else ""
                yield result
                continue
            compute = functools.partial(_try, result.mutant, shaders, tests, items)
            running[Child(compute, {mutation.VARIABLE: result.mutant.environment()}, SILENCE)] = result
        if running:
            wait_for_any(list(running))
        for child in [child for child in running if child.is_over()]:
            result = running.pop(child)
            answer = child.answer()
            if answer is None:
                result.outcome = "ran too long"
            elif not answer:
                result.outcome = "ended the process"
            else:
                result.outcome, result.detail = answer["outcome"], answer["detail"]
            if result.outcome == "killed":
                tests.killed_by(result.detail.partition(": ")[0])
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
    seconds: float | None,
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
    told = sys.stdout
    return _with_tests(
        arguments, lambda session: _all(list(results.values()), shaders, session, reasons, jobs, seconds, told)
    )


def _all(
    results: Sequence[Result],
    shaders: Sequence[Shader],
    session: pytest.Session,
    reasons: dict[tuple[str, Mutant], str],
    jobs: int,
    seconds: float | None,
    told: TextIO,
) -> int:
    runs = _baseline(session, jobs)
    used = [run.seconds for run in runs.values() if run.kernels]
    first = f"{len(results)} mutants; {len(used)} of {len(runs)} tests launch kernels, in {sum(used):.0f} s"
    print(first, file=told, flush=True)
    missing = []
    for result in _run_all(results, shaders, Tests(session, runs, seconds), jobs):
        reason = reasons.pop((_file(result), result.mutant), None)
        if result.outcome == "survived" and reason:
            result.outcome = "survived with a reason"
        elif result.outcome == "survived":
            missing.append(result)
        elif reason and result.outcome in KILLED:
            missing.append(result)
            result.outcome += ", though mutants.toml says that it survives"
        detail = f"\n    {result.detail}" if result.detail else ""
        print(f"{result.outcome:16} {_short(result.place)}  {result.mutant}{detail}", file=told, flush=True)
    files = {_file(result) for result in results}
    with contextlib.redirect_stdout(told):
        return _report(results, missing, {key for key in reasons if key[0] in files})


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
