"""What every operator is tested for; `tests/test_<op>.py` adds the cases and what is particular to the operator."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF)


@dataclass(frozen=True)
class Case:
    """One way to call an operator.

    Attributes:
        name: the test id.
        make: argument name -> tensor, drawn in float32 on the CPU from the seeded generator.
        ours: the operator, called with those tensors by name.
        stock: the same in stock PyTorch; in float64 it is the reference, in the tested dtype its error is the measure.
        constant: arguments that get no gradient.
        keep_dtype: arguments that keep the dtype they are made in.
        handed_on: arguments whose gradient is the incoming gradient itself.
        factor: how much larger than stock's an error may be.
        rows: how many rows have statistics.
        saved: names of the arguments that backward keeps; "<output>" and "<row>" stand for the output and for one
            float per row.
    """

    name: str
    make: Callable[[], dict[str, Tensor]]
    ours: Callable[..., Any]
    stock: Callable[..., Any]
    saved: tuple[str, ...]
    constant: tuple[str, ...] = ()
    keep_dtype: tuple[str, ...] = ()
    handed_on: tuple[str, ...] = ()
    factor: float = 2.0
    rows: Callable[[dict[str, Tensor]], int] = field(default=lambda tensors: 0)

    def tensors(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        made = self.make()
        return {
            name: t.to(device) if name in self.keep_dtype or not t.is_floating_point() else t.to(device, dtype)
            for name, t in made.items()
        }

    def differentiable(self, tensors: dict[str, Tensor]) -> list[str]:
        return [name for name, t in tensors.items() if name not in self.constant and t.is_floating_point()]


def on_device(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The same arguments with their tensors on `device`; those on meta and sparse ones are there to be refused."""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not isinstance(value, Tensor) or value.is_meta or value.layout is not torch.strided:
            return value
        return value.detach().to(device).requires_grad_(value.requires_grad)

    return {name: moved(value) for name, value in arguments.items()}


def outputs(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def run(function: Callable[..., Any], tensors: dict[str, Tensor], names: list[str], grads: list[Tensor] | None = None):
    """Outputs, and gradients of the named tensors; incoming gradients are those given, else drawn."""
    tensors = {name: t.detach().requires_grad_(name in names) for name, t in tensors.items()}
    results = outputs(function(**tensors))
    if grads is None:
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(r.shape, generator=generator).to(r) for r in results]
    wanted = [tensors[name] for name in names]
    if not wanted:
        return results, []
    return results, list(torch.autograd.grad(results, wanted, [g.to(r) for g, r in zip(grads, results, strict=True)]))


def assert_accurate(ours: Tensor, stock: Tensor, exact: Tensor, what: str, factor: float = 2.0) -> None:
    """`ours` is at most `factor` times as far from the float64 value as stock is, plus a rounding to its dtype.

    The factor leaves room for another order of summation, the rounding for where stock happens to be exact. Half
    precision is rounded to once, at the end; in float32 the last product and the last sum both round.
    """
    assert ours.dtype == stock.dtype, f"{what}: {ours.dtype}, stock gives {stock.dtype}"
    assert ours.shape == exact.shape, f"{what}: shape {tuple(ours.shape)}, expected {tuple(exact.shape)}"
    if exact.numel() == 0:
        return
    rounding = torch.finfo(ours.dtype).eps * exact.abs().max().item() * (2 if ours.dtype == torch.float32 else 1)
    error, allowed = ((t.detach().cpu().double() - exact).abs().max().item() for t in (ours, stock))
    assert error <= factor * allowed + rounding, f"{what}: error {error:.3g}, stock has {allowed:.3g}"


def assert_rounding_only(a: Tensor, b: Tensor) -> None:
    """Equal but for the order of sums: another layout may be served by another kernel of the host's BLAS, and a
    vectorised loop rounds differently from its tail."""
    scale = b.abs().max().item() if b.numel() else 0.0
    torch.testing.assert_close(a, b, rtol=0, atol=8 * torch.finfo(b.dtype).eps * scale)


def strided_copies(t: Tensor) -> dict[str, Tensor]:
    """The same values in other layouts: behind an offset, with gaps, transposed, and misaligned for vectors of 4."""
    offset = t.new_empty(t.numel() + 3)[3:].view(t.shape).copy_(t)
    gaps = t.new_full((*t.shape, 2), float("nan"))[..., 1].copy_(t) if t.is_floating_point() else t
    layouts = {"offset": offset, "gaps": gaps}
    if t.dim() >= 2:
        layouts["transposed"] = t.transpose(0, -1).contiguous().transpose(0, -1)
        wide = t.new_empty(*t.shape[:-1], t.shape[-1] + 5)
        layouts["slice"] = wide[..., 2 : 2 + t.shape[-1]].copy_(t)
    return layouts


class _Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Writes down the calls of this package's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "torch_metalk":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


class OpTests:
    """Inherit, set `cases` and `op` (the name of the forward operator)."""

    cases: tuple[Case, ...] = ()
    op: str = ""

    @staticmethod
    def more_calls(device: torch.device | str) -> Iterator[Callable[[], Any]]:
        """Calls, forward and backward, that ask for kernels of the operator which no case asks for; for the check that
        the host and the shaders agree on every kernel, where nothing is calculated."""
        return iter(())

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_matches_float64(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        tensors = case.tensors(dtype, device)
        exact_tensors = {n: t.cpu().double() if t.is_floating_point() else t.cpu() for n, t in tensors.items()}
        names = case.differentiable(tensors)
        exact, _ = run(case.stock, exact_tensors, names)
        grads = [torch.randn(e.shape) for e in exact]
        # Incoming gradients are rounded to the dtype they arrive in, for the reference too.
        ours, our_grads = run(case.ours, tensors, names, grads)
        rounded = [g.to(o.dtype).double() for g, o in zip(grads, ours, strict=True)]
        exact, exact_grads = run(case.stock, exact_tensors, names, rounded)
        stock, stock_grads = run(case.stock, {n: t.cpu() for n, t in tensors.items()}, names, grads)
        for i, triple in enumerate(zip(ours, stock, exact, strict=True)):
            assert_accurate(*triple, f"output {i}", case.factor)
        for name, *triple in zip(names, our_grads, stock_grads, exact_grads, strict=True):
            assert_accurate(*triple, f"gradient of {name}", case.factor)
            assert triple[0].dtype == tensors[name].dtype

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_checked_mode(self, case: Case, dtype: torch.dtype, checked_device: torch.device) -> None:
        """No kernel of the operator does what checked mode reports: with vectors, and with misaligned rows."""
        self.test_matches_float64(case, dtype, checked_device)
        self.test_any_layout(case, "slice", dtype, checked_device)

    @pytest.mark.parametrize("layout", ["offset", "gaps", "transposed", "slice"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_any_layout(self, case: Case, layout: str, dtype: torch.dtype, device: torch.device) -> None:
        tensors = case.tensors(dtype, device)
        names = case.differentiable(tensors)
        expected, expected_grads = run(case.ours, tensors, names)
        for name, t in tensors.items():
            strided = strided_copies(t).get(layout)
            if strided is None:
                continue
            results, grads = run(case.ours, tensors | {name: strided}, names)
            for a, b in zip(results + grads, expected + expected_grads, strict=True):
                assert_rounding_only(a, b)
            if layout == "gaps":
                assert all(g.isfinite().all() for g in grads), name

    def test_strided_incoming_gradient(self, case: Case, device: torch.device) -> None:
        tensors = case.tensors(torch.float32, device)
        names = case.differentiable(tensors)
        results, _ = run(case.ours, tensors, names)
        for layout in ("offset", "gaps", "transposed"):
            dense = [torch.randn(r.shape, device=device) for r in results]
            strided = [strided_copies(d).get(layout, d) for d in dense]
            kept = [s.clone() for s in strided]
            _, expected = run(case.ours, tensors, names, dense)
            _, grads = run(case.ours, tensors, names, strided)
            for name, a, b in zip(names, grads, expected, strict=True):
                assert_rounding_only(a, b)
                if name not in case.handed_on:
                    assert a.stride() == torch.empty_like(a).stride(), f"the gradient of {name} has gaps"
            assert all(torch.equal(a, b) for a, b in zip(strided, kept, strict=True)), (
                "an incoming gradient was written"
            )

    def test_inputs_are_not_written(self, case: Case, device: torch.device) -> None:
        tensors = case.tensors(torch.float32, device)
        kept = {name: t.clone() for name, t in tensors.items()}
        run(case.ours, tensors, case.differentiable(tensors))
        assert all(torch.equal(tensors[name], kept[name]) for name in tensors)

    def test_ten_runs_are_bit_identical(self, case: Case, device: torch.device) -> None:
        tensors = case.tensors(torch.bfloat16, device)
        names = case.differentiable(tensors)
        first = [t for part in run(case.ours, tensors, names) for t in part]
        for _ in range(9):
            again = [t for part in run(case.ours, tensors, names) for t in part]
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    def test_gradcheck(self, case: Case) -> None:
        tensors = case.tensors(torch.float64)
        tensors = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
        names = case.differentiable(tensors)
        for name in names:
            tensors[name].requires_grad_()

        def function(*values):
            return case.ours(**(tensors | dict(zip(names, values, strict=True))))

        assert torch.autograd.gradcheck(function, [tensors[name] for name in names], check_undefined_grad=True)

    def test_gradcheck_in_float32(self, case: Case, device: torch.device) -> None:
        """The compiled kernels have no float64. Each gradient is the slope along itself and along a random direction;
        with a step of 0.02 a central difference is off by 7e-5 of the third derivative and by 6e-8 / 0.02 of the value.
        Single elements are compared with float64 above. (gradcheck makes two calls for each element, and its fast mode
        misses errors of 5 %.)"""
        if device.type == "cpu":
            pytest.skip("the eager twins are checked in float64")
        tensors = case.tensors(torch.float32, device)
        names = case.differentiable(tensors)
        weights = [torch.randn(r.shape) for r in outputs(case.ours(**tensors))]
        _, grads = run(case.ours, tensors, names, weights)

        def loss(name: str, x: Tensor) -> float:
            results = outputs(case.ours(**(tensors | {name: x})))
            return sum((r.cpu().double() * w).sum().item() for r, w in zip(results, weights, strict=True))

        for name, grad in zip(names, grads, strict=True):
            for direction in (grad, torch.randn_like(grad)):
                step = direction * (0.02 / max(direction.norm().item(), 1e-9))
                slope = (loss(name, tensors[name] + step) - loss(name, tensors[name] - step)) / 0.04
                expected = (grad.cpu().double() * step.cpu()).sum().item() / 0.02
                assert abs(slope - expected) <= 2e-3 * (1 + abs(expected)), f"{name}: {slope}, expected {expected}"

    def test_each_gradient_alone(self, case: Case, device: torch.device) -> None:
        """`needs_input_grad` is honoured: asking for one gradient gives the same values."""
        tensors = case.tensors(torch.float32, device)
        names = case.differentiable(tensors)
        _, together = run(case.ours, tensors, names)
        for name, expected in zip(names, together, strict=True):
            _, (alone,) = run(case.ours, tensors, [name])
            assert_rounding_only(alone, expected)

    def test_second_derivative_raises(self, case: Case, device: torch.device) -> None:
        tensors = case.tensors(torch.float32, device)
        leaves = {n: t.requires_grad_(n in case.differentiable(tensors)) for n, t in tensors.items()}
        wanted = [t for t in leaves.values() if t.requires_grad]
        results = outputs(case.ours(**leaves))
        incoming = [torch.ones_like(r, requires_grad=True) for r in results]
        grads = torch.autograd.grad(results, wanted, incoming, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            sum(g.sum() for g in grads if g.grad_fn is not None and "NotDiff" in g.grad_fn.name()).backward()

    def test_backward_keeps_what_it_says(self, case: Case, device: torch.device) -> None:
        tensors = case.tensors(torch.float32, device)
        leaves = {n: t.clone().requires_grad_(n in case.differentiable(tensors)) for n, t in tensors.items()}
        kept: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            kept[t.untyped_storage()._cdata] = t.numel() * t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            results = outputs(case.ours(**leaves))
        sizes = {n: t.numel() * t.element_size() for n, t in leaves.items()}
        sizes["<output>"] = sum(r.numel() * r.element_size() for r in results)
        sizes["<row>"] = 4 * case.rows(tensors)
        assert sum(kept.values()) == sum(sizes[name] for name in case.saved)

    def test_graph_is_freed_without_the_collector(self, case: Case, device: torch.device) -> None:
        """A tensor kept anywhere but in `save_for_backward` would keep itself alive, or outlive the graph."""
        tensors = case.tensors(torch.float32, device)
        names = case.differentiable(tensors)
        leaves = {n: t.clone().requires_grad_(n in names) for n, t in tensors.items()}
        gc.disable()
        try:
            results = outputs(case.ours(**leaves))
            refs = [weakref.ref(t) for t in (*leaves.values(), *results)]
            sum(r.sum() for r in results).backward()
            del results, leaves
            assert not any(ref() is not None for ref in refs)
        finally:
            gc.enable()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_opcheck(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        """Every operator that the case reaches, with the arguments it got there, in forward and backward."""
        tensors = case.tensors(dtype, device)
        leaves = {n: t.requires_grad_(n in case.differentiable(tensors)) for n, t in tensors.items()}
        with _Recorder() as recorder:
            results = outputs(case.ours(**leaves))
            sum(r.float().square().sum() for r in results).backward()
        calls = recorder.calls
        names = [func.name() for func, _ in calls]
        assert names == [f"torch_metalk::{self.op}", f"torch_metalk::{self.op}_backward"]
        for i, (func, args) in enumerate(calls):
            args = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), args)
            if i == 0:  # with gradients: the operator must give its own, whichever way it is reached
                wanted = {t.data_ptr() for n, t in leaves.items() if t.requires_grad}
                args = _require_grad_like(args, calls[0][1], wanted)
            torch.library.opcheck(func, args, test_utils=_opchecks(dtype, device))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_compiles_without_a_break(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        tensors = case.tensors(dtype, device)
        names = case.differentiable(tensors)
        expected, expected_grads = run(case.ours, tensors, names)
        torch.compiler.reset()  # one frame serves all cases here, and its number of recompilations is limited
        compiled = torch.compile(case.ours, backend="aot_eager", fullgraph=True)
        results, grads = run(compiled, tensors, names)
        for a, b in zip(results + grads, expected + expected_grads, strict=True):
            assert torch.equal(a, b)


class ForwardOpTests(OpTests):
    """The same for an operator without gradient: of its cases all arguments are constant."""

    test_strided_incoming_gradient = None
    test_gradcheck = None
    test_gradcheck_in_float32 = None
    test_each_gradient_alone = None
    test_second_derivative_raises = None
    test_backward_keeps_what_it_says = None
    test_graph_is_freed_without_the_collector = None

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_opcheck(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        with _Recorder() as recorder:
            case.ours(**case.tensors(dtype, device))
        ((func, args),) = recorder.calls
        assert func.name() == f"torch_metalk::{self.op}"
        torch.library.opcheck(func, args, test_utils=_opchecks(dtype, device))


def _opchecks(dtype: torch.dtype, device: torch.device) -> list[str]:
    checks = ["test_schema", "test_faketensor"]
    if device.type != "mps":  # torch has it for the CPU, CUDA and XPU only
        checks.append("test_autograd_registration")
        # Tracing knows a dtype and a device by the fake kernels alone, which the checks above compare for each. What
        # traced operators calculate on other dtypes and devices, `test_compiles_without_a_break` compares.
        if dtype == torch.float32:
            checks.append("test_aot_dispatch_dynamic")
    return checks


def _require_grad_like(args: Any, recorded: Any, wanted: set[int]) -> Any:
    flat, spec = torch.utils._pytree.tree_flatten(args)
    flat_recorded = torch.utils._pytree.tree_leaves(recorded)
    for t, r in zip(flat, flat_recorded, strict=True):
        if isinstance(t, Tensor) and r.data_ptr() in wanted:
            t.requires_grad_()
    return torch.utils._pytree.tree_unflatten(flat, spec)
