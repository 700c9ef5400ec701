"""Passes of a model recorded as a list of torch's operations and kernels, on memory that stays theirs.

With few rows, what transformers does in Python between the operations takes longer than they do. A recorded pass has
the same operations with the same numbers: views are made once, and each result has a place, which serves again when
nothing refers to the result any more.

What code decides by numbers would be the same in each repetition. Where torch's operations tell of it, a pass is not
recorded; `ModelRunner.record_passes` finds the rest.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from headrace_predictor.engine.cpu.threads import kernel_threads

_MOST_BYTES = 1 << 26  # Of the results of a model's passes.
_ATEN = torch.ops.aten
_EMPTY = frozenset({_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided})
_COPIES = frozenset({_ATEN.clone, _ATEN._to_copy})
_BY_NUMBERS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], object]] = []
        self.is_complete = True
        self.places: dict[int, Tensor] = {}  # By address.
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # By size.
        self._others: list[Tensor] = []  # Kernels may have their addresses.

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = operation.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = operation(*args, **kwargs)
        self.is_complete &= _BY_NUMBERS.isdisjoint(operation.tags)
        given = {_address(one): one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        self._others += [one for address, one in given.items() if address not in self.places]
        if operation._schema.is_mutable:
            self._add(operation, args, kwargs)
        elif any(isinstance(one, Tensor) and one.numel() and _address(one) not in given for one in tree_leaves(result)):
            result = tree_map_only(Tensor, self._place, result)
            if operation.overloadpacket not in _EMPTY:
                self._add(*_in_place(operation, args, kwargs, result))
        return result

    def _add(self, operation: Any, args: Any, kwargs: Any) -> None:
        self.steps.append(partial(operation, *self.own(args), **self.own(kwargs)))

    def own(self, values: Any) -> Any:
        """The values with other tensors for those in places, which may serve again."""

        def own(tensor: Tensor) -> Tensor:
            if (place := self.places.get(_address(tensor))) is None:
                return tensor
            empty = torch.empty(0, dtype=tensor.dtype)
            return empty.set_(place.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

        return tree_map_only(Tensor, own, values)

    def _place(self, result: Tensor) -> Tensor:
        """A copy of a result in a place; it is free again when neither the copy nor a view of it exists."""
        if not result.numel():
            return result
        free = self._free[result.untyped_storage().nbytes()]
        place = free.pop() if free else torch.empty(result.untyped_storage().nbytes(), dtype=torch.uint8)
        self.places[_address(place)] = place
        memory = place.numpy()[:]  # An object of its own.
        weakref.finalize(memory, free.append, place).atexit = False
        numbers = torch.from_numpy(memory).view(result.dtype)
        return numbers.as_strided(result.shape, result.stride(), result.storage_offset()).copy_(result)


class _Watch(TorchFunctionMode):
    """Notices what no operation tells of."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._recorder.is_complete &= function is not Tensor.tolist
        return function(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _in_place(operation: Any, args: Any, kwargs: Any, result: Any) -> tuple[Any, Any, Any]:
    """What writes the result of an operation to where it is."""
    if operation.overloadpacket in _COPIES:
        return _ATEN.copy_.default, (result, args[0]), {}
    writing, names = _writing(operation)
    if writing is not None:
        return writing, args, kwargs | dict(zip(names, tree_leaves(result), strict=True))
    return partial(_copy, operation), (tree_leaves(result), args, kwargs), {}


def _copy(operation: Any, results: list[Tensor], args: Any, kwargs: Any) -> None:
    for own, new in zip(results, tree_leaves(operation(*args, **kwargs)), strict=True):
        own.copy_(new)


@cache
def _writing(operation: Any) -> tuple[Any, list[str]]:
    """The overload of an operation that takes its results, and their names there."""
    wanted = [(one.name, str(one.type)) for one in operation._schema.arguments]
    for name in operation.overloadpacket.overloads():
        other = getattr(operation.overloadpacket, name)
        outs = [one.name for one in other._schema.arguments if one.is_out]
        others = [(one.name, str(one.type)) for one in other._schema.arguments if not one.is_out]
        if len(outs) == len(operation._schema.returns) and others == wanted:
            return other, outs
    return None, []


def launch(kernel: Callable[..., object], *arguments: Any) -> None:
    """Calls what is none of torch's operations; in each repetition of a pass again. Addresses may be arguments."""
    recorder = _get_current_dispatch_mode()
    if not isinstance(recorder, _Recorder):
        kernel(*arguments)
        return
    with _disable_current_modes():
        kernel(*arguments)
    recorder.steps.append(partial(kernel, *arguments))


class _Recorded(NamedTuple):
    inputs: tuple[Tensor, ...]
    result: Tensor
    recorder: _Recorder


class Passes:
    """Recorded passes by what they differ in, beside the number of threads."""

    def __init__(self) -> None:
        self._recorded: dict[Hashable, _Recorded | None] = {}
        self._bytes = 0

    def run(self, key: Hashable, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """What `compute` returns for tensors; recorded the first time, while there is room."""
        key = key, kernel_threads()
        if key not in self._recorded and self._bytes < _MOST_BYTES:
            self._recorded[key] = None  # For good, if recording fails.
            with _Recorder() as recorder, _Watch(recorder):
                result = compute(*inputs)
            if recorder.is_complete:
                self._recorded[key] = _Recorded(inputs, recorder.own(result), recorder)
            self._bytes += sum(place.nbytes for place in recorder.places.values())
            return result.clone()
        if (recorded := self._recorded.get(key)) is None:
            return compute(*inputs)
        for own, new in zip(recorded.inputs, inputs, strict=True):
            own.copy_(new)
        for step in recorded.recorder.steps:
            step()
        return recorded.result.clone()
