"""Record the kernel calls of a function, to run them again in one native call without Python between them.

After a pass of a model the caches hold weights: the first torch operation then takes 50 to 100 microseconds, and a
draft of a few tokens has dozens of them. A replay has none. The native library records its own calls. Torch operations
are seen here and translated; one that has no translation makes the function impossible to record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _native
from .runtime import FLAG, FLOAT, INTEGER, LONG, address, floats

log = logging.getLogger(__name__)
aten = torch.ops.aten
ALLOCATIONS = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}
CONSTANTS = {aten.arange.default, aten.ones_like.default, aten.scalar_tensor.default}  # not written to afterwards
INTEGERS = {torch.bool, FLAG, INTEGER, LONG}
NO_OPERAND = (0, 0, 0, 0, 0)
Operand = tuple[int, int, int, int, int]  # address, value, bytes of an element, strides of rows and columns in bytes


class NotRecordableError(Exception):
    """A torch operation has no translation."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Translates torch operations into calls of a recording, and keeps every tensor alive that it sees."""

    def __init__(self, native: _native.Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.native = native
        self.alive: list[object] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and skipping would import dynamo, which takes 2 seconds."""
        return False

    def end_depth(self, estimate: Tensor, is_logprob: bool = True) -> None:
        """Mark the end of a depth. estimate [1] f32: log-probability, or acceptance probability, of its token."""
        self.native.end_depth(floats(estimate, *([1] * estimate.dim())), is_logprob)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.alive.append((args, kwargs, out))
        if func.is_view or func in ALLOCATIONS or func in CONSTANTS:
            return out
        if func not in TRANSLATIONS:
            raise NotRecordableError(str(func))
        if "alpha" in kwargs:
            raise NotRecordableError(f"{func} with a factor")
        TRANSLATIONS[func](self.native, out, *args)
        return out


class Replay:
    """A recording, and the tensors that it reads and writes."""

    def __init__(self, native: _native.Recording, alive: list[object]) -> None:
        self._native, self._alive = native, alive
        self._loaded: tuple[Tensor | None, Tensor | None] = None, None  # target and source of the last `load`
        self._target = self._source = 0  # their addresses
        self._target_bytes = self._row_bytes = self._spare = 0  # spare: rows of the source beyond those of the target

    def __call__(self, depths: int = 0, least: float = 0.0, shared_noise: bool = False) -> int:
        return self._native.replay(depths, least, shared_noise)

    def load(self, target: Tensor, source: Tensor, first: int) -> None:
        """Copy rows of `source` from `first` on to `target`. Tensors that come again are not checked again."""
        if self._loaded[0] is not target or self._loaded[1] is not source:
            columns = target.shape[1]
            self._target, self._target_bytes = address(target, target.dtype), target.nbytes
            self._source = address(source, target.dtype, source.shape[0], columns)
            self._spare, self._row_bytes = source.shape[0] - target.shape[0], columns * target.itemsize
            self._loaded = target, source
        if not 0 <= first <= self._spare:
            raise ValueError(f"rows from {first} on are not in {list(source.shape)}: {len(target)} are to be copied")
        _native.copy_bytes(self._target, self._source + first * self._row_bytes, self._target_bytes)


def record(run: Callable[[Recorder], None]) -> Replay | None:
    """Run a function and record its calls. None: it uses a torch operation that cannot be recorded."""
    native = _native.Recording()
    recorder = Recorder(native)
    native.start()
    try:
        with recorder:
            run(recorder)
        if native.missing:
            raise NotRecordableError(f"{native.missing} calls of kernels that are never recorded")
    except NotRecordableError as error:
        log.debug("not recorded: %s", error)
        return None
    finally:
        native.stop()
    return Replay(native, recorder.alive)


def _copy(native: _native.Recording, target: Tensor, source: Tensor) -> None:
    if target.dtype is not source.dtype or target.dim() > 4:
        raise NotRecordableError(f"copy of {source.dtype} to {target.dtype} in {target.dim()} dimensions")
    source = source.expand(target.shape)
    native.copy(
        target.data_ptr(),
        source.data_ptr(),
        list(target.shape),
        list(target.stride()),
        list(source.stride()),
        target.itemsize,
    )


def _clone(native: _native.Recording, out: Tensor, source: Tensor) -> None:
    _copy(native, out, source)


def _copy_into(native: _native.Recording, out: Tensor, target: Tensor, source: Tensor, *_: Any) -> None:
    _copy(native, target, source)


def _cat(native: _native.Recording, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> None:
    begin = 0
    for part in parts:
        _copy(native, out.narrow(dim, begin, part.shape[dim]), part)
        begin += part.shape[dim]


def _stack(native: _native.Recording, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> None:
    for index, part in enumerate(parts):
        _copy(native, out.select(dim, index), part)


def _index_select(native: _native.Recording, out: Tensor, source: Tensor, dim: int, indices: Tensor) -> None:
    if dim != 0 or indices.dtype is not INTEGER or not (source.is_contiguous() and indices.is_contiguous()):
        raise NotRecordableError("index_select of columns, or by other indices than int32")
    count, rows = indices.shape[0], source.shape[0]
    row_bytes = source.nbytes // max(rows, 1)
    native.copy_rows(out.data_ptr(), source.data_ptr(), indices.data_ptr(), count, rows, row_bytes)


def _clear(native: _native.Recording, out: Tensor, *_: Any) -> None:
    native.clear(out.data_ptr(), out.nbytes)


def _add(native: _native.Recording, out: Tensor, left: Tensor, right: Tensor | int) -> None:
    if out.dtype in INTEGERS:
        _integers(native, "add", out, left, right)
        return
    if not isinstance(right, Tensor) or left.dtype is not FLOAT or right.dtype is not FLOAT or left.dim() != 2:
        raise NotRecordableError("addition of other tensors than fp32 matrices")
    if right.shape not in (left.shape, left.shape[1:]) or not (left.is_contiguous() and right.is_contiguous()):
        raise NotRecordableError("addition of a tensor that is neither a matrix of this shape nor a row")
    rows, columns = left.shape
    right_rows = 1 if right.dim() == 1 else rows
    native.add(out.data_ptr(), left.data_ptr(), right.data_ptr(), rows, columns, right_rows)


def _mul(native: _native.Recording, out: Tensor, left: Tensor, right: Tensor | float) -> None:
    if isinstance(right, Tensor) or left.dtype is not FLOAT or not left.is_contiguous():
        raise NotRecordableError("multiplication by a tensor")
    native.scale(out.data_ptr(), left.data_ptr(), right, left.numel())


def _fill(native: _native.Recording, out: Tensor, _: Any, shape: Any, value: float) -> None:
    if out.dtype is not FLOAT:
        raise NotRecordableError("a constant that is not fp32")
    native.fill(out.data_ptr(), value, out.numel())


def _scatter(
    native: _native.Recording, out: Tensor, target: Tensor, indices: Sequence[Tensor | None], values: Tensor
) -> None:
    """Translate `target[:, columns] = values` and `target[rows] = values` for fp32 matrices."""
    columns = indices[-1]
    if len(indices) == 1 and columns is not None and columns.dtype is LONG:
        _put_rows(native, target, columns, values)
        return
    if len(indices) != 2 or indices[0] is not None or columns is None or columns.dtype is not LONG:
        raise NotRecordableError("an assignment to other parts than columns")
    rows, count = target.shape[0], columns.shape[0]
    if tuple(values.shape[-2:]) != (rows, count)[-values.dim() :] or (values.dim() == 1 and rows > 1):
        raise NotRecordableError("an assignment of another shape")
    parts = target, values, columns
    if not (target.dtype is FLOAT and values.dtype is FLOAT and all(part.is_contiguous() for part in parts)):
        raise NotRecordableError("an assignment that is not fp32")
    addresses = target.data_ptr(), values.data_ptr(), columns.data_ptr()
    native.scatter(*addresses, rows, count, target.shape[1])


def _put_rows(native: _native.Recording, target: Tensor, rows: Tensor, values: Tensor) -> None:
    parts = target, rows, values
    fits = target.dim() == 2 and rows.dim() == 1 and values.shape == (rows.shape[0], target.shape[1])
    if not fits or target.dtype is not values.dtype or not all(part.is_contiguous() for part in parts):
        raise NotRecordableError("an assignment to rows that are not whole")
    addresses = target.data_ptr(), values.data_ptr(), rows.data_ptr()
    native.put_rows(*addresses, rows.shape[0], target.shape[0], target.shape[1] * target.itemsize)


def _sigmoid(native: _native.Recording, out: Tensor, source: Tensor) -> None:
    if source.dtype is not FLOAT or not source.is_contiguous():
        raise NotRecordableError("sigmoid of other numbers than fp32")
    native.sigmoid(out.data_ptr(), source.data_ptr(), source.numel())


def _integers(native: _native.Recording, name: str, out: Tensor, *operands: Tensor | int) -> None:
    """Translate arithmetic on integers and flags, with at most two dimensions."""
    if out.dim() > 2 or out.dtype not in INTEGERS:
        raise NotRecordableError(f"{name} of {out.dtype} in {out.dim()} dimensions")
    rows, columns = [1, 1, *out.shape][-2:]
    found = [_operand(each, out) for each in operands]
    native.integers(name, rows, columns, _operand(out, out), *found, *[NO_OPERAND] * (3 - len(found)))


def _operand(value: Tensor | int, out: Tensor) -> Operand:
    if isinstance(value, int):
        return 0, value, 0, 0, 0
    if not isinstance(value, Tensor) or value.dtype not in INTEGERS:
        raise NotRecordableError("arithmetic on integers with other operands")
    row, column = ([0, 0] + [stride * value.itemsize for stride in value.expand(out.shape).stride()])[-2:]
    return value.data_ptr(), 0, value.itemsize, row, column


def _arithmetic(name: str) -> Callable[..., None]:
    def translate(native: _native.Recording, out: Tensor, *operands: Tensor | int) -> None:
        _integers(native, name, out, *operands)

    return translate


def _clamp(native: _native.Recording, out: Tensor, source: Tensor, least: Any = None, most: Any = None) -> None:
    if (least is None) == (most is None):
        raise NotRecordableError("a clamp that has not one limit")
    _integers(native, "smaller" if least is None else "larger", out, source, most if least is None else least)


def _masked_fill(native: _native.Recording, out: Tensor, source: Tensor, mask: Tensor, value: int) -> None:
    _integers(native, "select", out, mask, value, source)


def _convert(native: _native.Recording, out: Tensor, source: Tensor) -> None:
    _integers(native, "add", out, source, 0)


def _where(native: _native.Recording, out: Tensor, flags: Tensor, chosen: Tensor, other: Tensor) -> None:
    """Translate a choice between integers, or between one row and the rows of a matrix [rows, columns] fp32."""
    if out.dtype in INTEGERS:
        _integers(native, "select", out, flags, chosen, other)
        return
    parts = flags, chosen, other
    rows = other.shape[0]
    fits = other.dim() == 2 and flags.shape == (rows, 1) and chosen.shape == other.shape[1:] and out.dtype is FLOAT
    if not fits or chosen.dtype is not FLOAT or not all(part.is_contiguous() for part in parts):
        raise NotRecordableError("a choice between other tensors than one row and a matrix")
    addresses = flags.data_ptr(), chosen.data_ptr(), other.data_ptr()
    native.choose_rows(out.data_ptr(), *addresses, rows, other.shape[1])


TRANSLATIONS: dict[Any, Callable[..., None]] = {
    aten.clone.default: _clone,
    aten.copy_.default: _copy_into,
    aten.cat.default: _cat,
    aten.cat.out: _cat,
    aten.stack.out: _stack,
    aten.index_select.default: _index_select,
    aten.new_zeros.default: _clear,
    aten.zeros_like.default: _clear,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add,
    aten.mul.Tensor: _mul,
    aten.sub.Tensor: _arithmetic("subtract"),
    aten.bitwise_and.Tensor: _arithmetic("both"),
    aten.floor_divide.default: _arithmetic("divide"),
    aten.remainder.Scalar: _arithmetic("remainder"),
    aten.eq.Scalar: _arithmetic("equal"),
    aten.ge.Scalar: _arithmetic("at_least"),
    aten.ge.Tensor: _arithmetic("at_least"),
    aten.gt.Scalar: _arithmetic("above"),
    aten.le.Tensor: _arithmetic("at_most"),
    aten.clamp.default: _clamp,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill_.Scalar: _masked_fill,
    aten._to_copy.default: _convert,
    aten.new_full.default: _fill,
    aten.index_put_.default: _scatter,
    aten.sigmoid.default: _sigmoid,
    aten.where.self: _where,
}
