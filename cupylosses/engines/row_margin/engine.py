"""The margin-loss engine: implements the protocol of :mod:`cupylosses.engines.base`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

from cupylosses import checks, interop
from cupylosses.adoption import LIBRARIES, adopted
from cupylosses.call import Call, Parts
from cupylosses.engines.base import (
    ARGUMENTS,
    DTYPE,
    SHAPES,
    Apart,
    Engine,
    Machine,
    Plan,
    Question,
    TensorSpec,
    Wanted,
)
from cupylosses.engines.cache import SettingsCache
from cupylosses.engines.device import Device
from cupylosses.engines.row_margin import checks as margin_checks
from cupylosses.engines.row_margin import reference as margin_reference
from cupylosses.engines.row_margin.call import Rows, Static, without
from cupylosses.engines.row_margin.definition import MarginLoss
from cupylosses.engines.row_margin.layout import gathered, read_apart, reads_steps, takes_lists
from cupylosses.engines.row_margin.plan import MarginPlan, rows_of
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax import labels
from cupylosses.engines.softmax.definition import IGNORED
from cupylosses.engines.softmax.engine import row_major
from cupylosses.engines.softmax.layout import classes_last
from cupylosses.interop import ITEMSIZE
from cupylosses.reference_math import divide

#: Settings that have already been checked.
_SETTINGS = SettingsCache()


class MarginEngine(Engine):
    """Engine of losses in which the scores of labels should exceed those of other classes by a margin."""

    name = "row_margin"
    needs_chip = True
    contracts = True
    Definition: ClassVar[Any] = MarginLoss
    Static: ClassVar[Any] = Static

    # Arguments

    def bind(
        self, loss: MarginLoss, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        first, second, weight, mask, normalizer = arrays
        known = interop.known_kinds
        library = known.get(type(first))
        if not (
            library in LIBRARIES
            and known.get(type(second)) == library
            and (weight is None or known.get(type(weight)) == library)
            and (mask is None or known.get(type(mask)) == library)
        ):
            named = [(n, x) for n, x in zip(loss.array_names, arrays[:4], strict=False) if x is not None]
            names = [n for n, _ in named]
            by_name = dict(zip(names, adopted(loss, names, [x for _, x in named])[1], strict=True))
            first, second, weight, mask = (by_name.get(n) for n in loss.array_names[:4])
        present = (first, second) if weight is None and mask is None else _present(first, second, weight, mask)
        rank = first.ndim

        def make() -> tuple[Static, tuple[float, ...]]:
            return checked_settings(loss, first.shape, arrays, settings, legacy)

        if normalizer is None and (not legacy or legacy[0] is legacy[1] is None):
            key = (loss, rank, weight is None, mask is None)
            static, scalars = _SETTINGS.find(key, settings, make, loss.default_settings)
        else:
            static, scalars = make()
        if normalizer is not None:
            normalizer = checks.normalizer(loss, normalizer, static.reduction)
        if rank == 1 and not loss.several and static.reduction != "none" and tuple(second.shape) == (1,):
            # The label of a single row. torch also accepts it with one dimension; its unreduced value then has that
            # dimension.
            present = (first, second.reshape(()), *present[2:])
        return loss, present, static, scalars, normalizer

    def names(self, call: Call) -> list[str]:
        return Rows(call).names

    def check(self, call: Call) -> None:
        margin_checks.arrays(Rows(call))

    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        return checks.dtype_name(call.arrays[0])

    # Plans

    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> Plan:
        return MarginPlan(self, call, tensors, promoted, machine)

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Returns the arrays that kernels read from copies, with the strides of these.

        Scores are copied if their classes, or those of the gradient, are not contiguous, unless a layout reads and
        writes them in place: because neighbouring rows are adjacent in memory, classes have small gaps, or there are
        few scores. Class weights are copied if they are not contiguous.
        """
        loss: Any = call.loss
        x, dim, copies = tensors[0], call.static.class_dim, {}
        if call.static.has_tangent:
            # Second derivatives read scores and tangents of any strides in place.
            gaps = call.static.weighted and tensors[2].strides != (1,) and tensors[2].shape[0] > 1
            return {2: (1,)} if gaps else {}
        apart = x.shape[dim] > 1 and not x.strides[dim] == x.gradient.strides[dim] == 1
        rows = without(x.shape, dim)
        # Layouts with a thread per list need rows that are contiguous, or adjacent to each other in memory.
        lists = loss.several and self._takes_lists(call, tensors, machine)
        apart = apart and (lists or not gathered(rows, x.shape[dim]))
        if apart and read_apart(rows, rows_of(x, dim, 0), rows_of(x.gradient, dim, 0), loss.several):
            apart = loss.several and not (len(rows) == 1 and lists)
        of_rows, of_gradients = rows_of(x, dim, 0), rows_of(x.gradient, dim, 0)
        apart = apart and not reads_steps(rows, x.shape[dim], of_rows, of_gradients, loss.several)
        if 0 not in x.shape and (apart or x.misalignment % ITEMSIZE[x.dtype]):
            copies[0] = classes_last(x.shape, dim)
        if call.static.weighted and tensors[2].strides != (1,) and tensors[2].shape[0] > 1:
            copies[2] = (1,)
        return copies

    def _takes_lists(self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine) -> bool:
        """True if, in a call with lists of labels, each row is processed by one thread."""
        loss: Any = call.loss
        x, dim = tensors[0], call.static.class_dim
        linear, labels = loss.is_linear(call.static.flags), tensors[1].shape[dim]
        rows = prod(without(x.shape, dim))
        return takes_lists(rows, x.shape[dim], labels, ITEMSIZE[x.dtype], linear, machine.chip) > 0

    def raise_reported(self, device: Device) -> None:
        labels.raise_reported(device)

    def waits(self, call: Call) -> bool:
        return bool(call.static.check == "sync")

    # Formulas

    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        return margin_reference.evaluate(Rows(call), promoted, readable)

    def floating(self, call: Call) -> Wanted:
        return tuple([i == 0 for i in range(len(call.arrays))])

    # Transforms

    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        static, rows = call.static, Rows(call).shape
        return [row_major(static.out_dtype or promoted, rows if static.reduction == "none" else ())]

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        """Splits a reduced loss into a call that returns a float64 value per row, and a quotient that the array library
        computes. For values per row, a batch dimension is one more dimension of rows; and there are few of them to sum.
        """
        static = call.static
        if traced or static.reduction == "none":
            return None
        per_row = call._replace(
            static=static._replace(reduction="none", out_dtype="float64", normalized=False), normalizer=None
        )

        def finish(xp: Any, values: list[Any]) -> Any:
            rows = Rows(call)
            by = margin_reference.divisor(xp, rows, margin_reference.counted_rows(xp, rows))
            return xp.astype(divide(xp, xp.sum(values[0]), by), getattr(xp, static.out_dtype or promoted))

        return Apart((per_row,), finish)

    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        """Returns the call that computes a value per row, and the ``grad_output`` of each row."""
        xp = interop.namespace(grad_output)
        static = call.static._replace(reduction="none", out_dtype="float64", check="off", normalized=False)
        upstream = xp.astype(grad_output, xp.float64)
        if call.static.reduction != "none":
            # With a divisor of 0, no row has a gradient, and neither has that gradient itself: 0 * inf must not occur.
            # The reciprocal is multiplied, as in the kernels.
            if isinstance(divisor, (int, float)):
                upstream = upstream * (1.0 / divisor if divisor else 0.0)
            else:
                empty = divisor == 0
                upstream = xp.where(empty, 0.0, upstream) * (1.0 / xp.where(empty, xp.ones_like(divisor), divisor))
            upstream = xp.broadcast_to(upstream, Rows(call).shape)
        return call._replace(static=static, normalizer=None), upstream

    def jvp(self, call: Call, moving: Wanted, tangents: tuple[Any, ...]) -> Call:
        static = call.static._replace(has_tangent=tuple(moving))
        return call._replace(static=static, arrays=(*call.arrays, *tangents))

    def contracted(self, xp: Any, call: Call, gradients: Sequence[Any], tangents: Sequence[Any]) -> Any:
        slopes = xp.astype(gradients[0], xp.float64)
        # A gradient of 0 times an infinite tangent must not give NaN.
        terms = xp.where(slopes == 0, xp.zeros_like(slopes), slopes * tangents[0])
        return xp.sum(terms, axis=call.static.class_dim)

    def primal(self, call: Call) -> tuple[Call, Wanted, tuple[Any, ...]]:
        moving = tuple([bool(x) for x in call.static.has_tangent])
        count = len(call.arrays) - sum(moving)
        base = call._replace(arrays=call.arrays[:count], static=call.static._replace(has_tangent=()))
        return base, moving, call.arrays[count:]

    def batched(self, call: Call, dims: Sequence[int | None], size: int) -> Call | None:
        static, arrays = call.static, list(call.arrays)
        mask = 2 + static.weighted
        if static.weighted and dims[2] is not None:
            return None  # kernels read one set of class weights
        rank = arrays[0].ndim - (dims[0] is not None)
        for i, d in enumerate(dims):
            x = arrays[i]
            if i < 2 or i >= mask + static.masked:
                arrays[i] = x.expand(size, *x.shape) if d is None else x.movedim(d, 0)
            elif static.masked and i == mask and d is not None:
                x = x.movedim(d, 0)
                arrays[i] = x.reshape(size, *(1,) * (rank - x.ndim), *x.shape[1:])
        return call._replace(arrays=tuple(arrays), static=static._replace(class_dim=static.class_dim + 1))

    # Warm-up

    def placeholders(
        self, loss: MarginLoss, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns dtypes and shapes of all arrays. Labels are int64 unless a dtype is named for them. Lists have a
        place per class unless a shape is named for them.
        """
        any_loss: Any = loss
        scores = tuple(shapes[0])
        dim = softmax_checks.class_dimension(any_loss, options.get("class_dim"), scores)
        rows = (*scores[:dim], *scores[dim + 1 :])
        target = tuple(shapes[-1]) if len(shapes) > 1 else scores if loss.several else rows
        first, second = (x.name for x in loss.operands)
        return {
            "weight": (dtypes[0], scores[dim : dim + 1]),
            "mask": ("bool", rows),
            "normalizer": ("float64", ()),
            first: (dtypes[0], scores),
            second: (dtypes[-1] if len(dtypes) > 1 else "int64", target),
        }

    # Standing in for torch's functions

    def differs(
        self, loss: MarginLoss, call: Call, takes: Callable[[Question], str | None], autocast: bool
    ) -> str | None:
        rows, static = Rows(call), call.static
        shape, target = tuple(rows.input.shape), tuple(rows.target.shape)
        if static.masked or static.normalized or static.ignore_index != IGNORED or static.out_dtype:
            return ARGUMENTS
        if 0 in shape or len(shape) > 2 or static.class_dim != len(shape) - 1:
            return SHAPES
        if target != (shape if loss.several else rows.shape):
            return SHAPES
        if loss.several and rows.values != loss.values():
            return ARGUMENTS
        dtypes = [checks.dtype_name(x) for x in call.arrays]
        if autocast:
            dtypes = ["float32" if x in checks.FLOATING and x != "float64" else x for x in dtypes]
        reduction = ("reduction", static.reduction)
        small = ((1, 2), (1, 2) if loss.several else (1,), (2,))
        if takes(Question(tuple(zip(rows.names, small, dtypes, strict=False)), (reduction,))) == dtypes[0]:
            return None
        plain = (rows.names[0], (1, 2), "float32"), (rows.names[1], small[1], "int64")
        return DTYPE if takes(Question(plain, (reduction,))) is not None else ARGUMENTS


def _present(*arrays: Any) -> tuple[Any, ...]:
    return tuple([x for x in arrays if x is not None])


def checked_settings(
    loss: MarginLoss,
    shape: Sequence[int],
    arrays: tuple[Any, ...],
    settings: tuple[Any, ...],
    legacy: tuple[Any, ...],
) -> tuple[Static, tuple[float, ...]]:
    """Checks the settings of a call, and returns its static part and scalars. Dtypes and shapes are checked where plans
    are made.
    """
    _, _, weight, mask, normalizer = arrays
    any_loss: Any = loss
    arguments = dict(zip(loss.setting_names, settings, strict=True))
    reduction = arguments["reduction"]
    if legacy and any([x is not None for x in legacy]):
        reduction = checks.legacy_reduction(loss, *legacy)
    out_dtype = arguments["out_dtype"]
    static = Static(
        weighted=weight is not None,
        masked=mask is not None,
        class_dim=softmax_checks.class_dimension(any_loss, arguments["class_dim"], tuple(shape)),
        ignore_index=softmax_checks.ignore_index(any_loss, arguments.get("ignore_index", IGNORED), "indices"),
        reduction=checks.reduction(loss, reduction),
        out_dtype=None if out_dtype is None else checks.out_dtype(loss, out_dtype),
        flags=tuple([checks.flag(loss, x, arguments[x.name]) for x in loss.flags]),
        check=softmax_checks.check_of_targets(any_loss, arguments["check_targets"]),
        normalized=normalizer is not None,
    )
    return static, tuple([checks.parameter(loss, x, arguments[x.name]) for x in loss.parameters])


ROW_MARGIN = MarginEngine()
