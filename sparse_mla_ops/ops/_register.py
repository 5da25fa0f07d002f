"""How a typed function becomes a registered operator.

The function that `register_op` decorates is the operator's *contract*: it checks its arguments, on metadata only, and
returns freshly allocated outputs. It is the fake implementation as it stands. The real one calls it too, then has a
backend fill the outputs, so that the two can never differ in shape, stride, dtype or in what they refuse.

`torch.library.Library` is used directly: `torch.library.custom_op` costs 20 µs of host time per call where this costs
7 (10 tensor arguments, one of them mutated). What `custom_op` would have caught does not arise: outputs come from the
contract only, so they alias no input, and defining a name twice is an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from sparse_mla_ops import registry

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("sparse_mla_ops", "FRAGMENT")


class _Plan(NamedTuple):
    """What a call came to, to be repeated for arguments of the same metadata without checking and choosing again."""

    outputs: tuple[tuple[torch.Size, torch.dtype], ...]
    returns_tuple: bool
    replay: registry.Replay


MOST_PLANS = 4096
"""Per operator; beyond it they are forgotten and made anew."""
_all_plans: list[dict[tuple[Any, ...], _Plan]] = []


def forget_plans() -> None:
    """Choose and check every call anew: after a change that no argument shows, as of settings in a test."""
    for plans in _all_plans:
        plans.clear()


def _look_at(args: tuple[Any, ...], state: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int | None]]:
    """(all that checks, choices and launches depend on, the address of each argument that is a tensor).

    Written for speed: a replayed call spends a good part of its time here.
    """
    key: list[Any] = [state]
    addresses: list[int | None] = []
    for arg in args:
        if isinstance(arg, Tensor):
            address = arg.data_ptr()
            key += (arg.dtype, arg.shape, arg.stride(), arg.get_device(), address & 15)
            addresses.append(address)
        else:
            key.append(arg)
            addresses.append(None)
    return tuple(key), addresses


def register_op(*, rows: str, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated contract as `torch.ops.sparse_mla_ops.<its name>` and return the public function.

    rows: the argument that gives T, by its first dimension or, if an int, by its value. With T = 0 the operator returns
        before it looks for a backend: HIP aborts on an empty grid.
    mutates_args: the arguments that backends write; exactly these are `Tensor(a!)` in the schema.

    The last parameter of the contract is `backend: str | None = None`. A backend's function is called with the outputs
    first, then the arguments without `backend`. If it returns a `registry.Replay`, later calls with the same metadata
    (shapes, strides, dtypes, devices, alignment, numbers) are repeated by it.
    """

    def register(contract: Callable[P, R]) -> Callable[P, R]:
        name = contract.__name__
        parameters = inspect.signature(contract).parameters
        if list(parameters)[-1] != "backend":
            raise TypeError(f"{name}: the last parameter of an operator is `backend`, got {list(parameters)}")
        defaults = tuple(parameter.default for parameter in parameters.values())
        rows_at = list(parameters).index(rows)
        plans: dict[tuple[Any, ...], _Plan] = {}
        _all_plans.append(plans)

        def fake(*args: Any) -> Any:
            args += defaults[len(args) :]
            registry.check_backend_name(args[-1])
            return contract(*args)  # type: ignore[call-arg]

        def real(*args: Any) -> Any:
            args += defaults[len(args) :]  # the dispatcher leaves trailing defaults out
            if args[0].is_cuda and args[0].get_device() != torch.cuda.current_device():
                with torch.cuda.device(args[0].device):  # launches go to the current device
                    return real(*args)
            # Host time matters where a launch takes less of it than the checks do.
            key: tuple[Any, ...] = ()
            if args[0].is_cuda and (state := registry.state()) is not None:
                key, addresses = _look_at(args, state)
                if (plan := plans.get(key)) is not None:
                    fresh = tuple([args[0].new_empty(shape, dtype=dtype) for shape, dtype in plan.outputs])
                    plan.replay(args[0], fresh, addresses)
                    return fresh if plan.returns_tuple else fresh[0] if fresh else None

            *arguments, backend = args
            registry.check_backend_name(backend)
            outputs = contract(*args)  # type: ignore[call-arg]
            count = args[rows_at]
            if (count if isinstance(count, int) else count.shape[0]) == 0:
                return outputs
            run = registry.pick(name, arguments, backend)
            filled: tuple[Any, ...] = () if outputs is None else outputs if isinstance(outputs, tuple) else (outputs,)
            with torch.no_grad():  # there is no backward: a backend made of torch operations must not record one
                replay = run(*filled, *arguments)
            if key and replay is not None:
                if len(plans) >= MOST_PLANS:
                    plans.clear()
                specs = tuple((output.shape, output.dtype) for output in filled)
                plans[key] = _Plan(specs, isinstance(outputs, tuple), replay)
            return outputs

        _LIBRARY.define(name + torch.library.infer_schema(contract, mutates_args=mutates_args))
        for key in ("CPU", "CUDA"):  # HIP tensors dispatch under the CUDA key
            _LIBRARY.impl(name, real, key)
        torch.library.register_fake(f"sparse_mla_ops::{name}", fake, lib=_LIBRARY)
        registry.declare(contract)
        op = getattr(torch.ops.sparse_mla_ops, name).default

        # A function of the same signature, as namedtuple makes one: Python binds keywords, which costs the dispatcher
        # several microseconds.
        signature = ", ".join(
            name if parameter.default is parameter.empty else f"{name}=defaults[{i}]"
            for i, (name, parameter) in enumerate(parameters.items())
        )
        public = eval(f"lambda {signature}: op({', '.join(parameters)})", {"op": op, "defaults": defaults})
        functools.update_wrapper(public, contract)
        return cast(Callable[P, R], public)

    return register
