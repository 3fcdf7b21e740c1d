"""Engine of linear softmax losses: implements the protocol of :mod:`cupylosses.engines.base`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd, prod
from typing import Any, NamedTuple

from cupylosses import checks, interop
from cupylosses.adoption import common_library
from cupylosses.call import Call, Parts
from cupylosses.engines.base import (
    ARGUMENTS,
    DTYPE,
    SHAPES,
    Apart,
    Machine,
    Plan,
    Question,
    TensorSpec,
    Wanted,
)
from cupylosses.engines.cache import SettingsCache
from cupylosses.engines.linear_softmax import checks as linear_checks
from cupylosses.engines.linear_softmax import reference as linear_reference
from cupylosses.engines.linear_softmax.call import Logits, Static, inner_rows, logits_shape, positions
from cupylosses.engines.linear_softmax.chunks import most_rows, pads_classes, pads_features
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from cupylosses.engines.linear_softmax.plan import LinearPlan, PackedPlan
from cupylosses.engines.linear_softmax.second import LinearHvpPlan
from cupylosses.engines.softmax import reference as softmax_reference
from cupylosses.engines.softmax.call import Rows
from cupylosses.engines.softmax.definition import IGNORED
from cupylosses.engines.softmax.engine import SoftmaxEngine, checked_settings, row_major
from cupylosses.engines.strides import dense_strides
from cupylosses.interop import ITEMSIZE

#: Maximum number of elements of a matrix that is read in place although gaps make it unaligned. A 16-bit matrix is
#: still copied if its copy would be aligned.
SMALL_MATRIX = 1 << 17
#: Minimum alignment in bytes that the lines of a 16-bit copy need for products to gain by it; for small matrices it
#: is 16.
LEAST_ALIGNMENT = 8
#: Maximum number of classes, by element size in bytes, up to which products of non-contiguous inputs take no longer
#: than a copy and its products. For 16-bit inputs the limit applies only if a copy would be better aligned; otherwise
#: they are read in place for any number of classes.
FEW_CLASSES = {2: 128, 4: 1024, 8: 1024}
#: Cache of checked settings.
_SETTINGS = SettingsCache()


class LinearSoftmaxEngine(SoftmaxEngine):
    """Softmax losses of a linear layer's output. Rows and results are inherited from the softmax engine."""

    name = "linear_softmax"
    contracts = False
    Definition = LinearSoftmaxLoss
    Static = Static

    def rows(self, call: Call) -> Rows:
        return inner_rows(call)

    # Arguments

    def bind(
        self, loss: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        *operands, normalizer = arrays
        named = {name: x for name, x in zip(loss.array_names, operands, strict=False) if x is not None}
        library, present = common_library(loss, [*named], (*named.values(),))
        named = dict(zip(named, present, strict=True))
        if library == "torch":
            from cupylosses.torch_compat import operands_of_linear

            layer = [x for x in ("input", "linear_weight", "linear_bias") if x in named]
            named |= zip(layer, operands_of_linear([named[x] for x in layer]), strict=True)
        input, weight, target = named["input"], named["linear_weight"], named["target"]
        linear_checks.operands(loss, input, weight, named.get("linear_bias"), target)
        if normalizer is None:
            key = loss, *named, input.dtype, target.dtype, len(input.shape), len(weight.shape)
            static, scalars = _SETTINGS.find(key, settings, lambda: _static(loss, named, settings, None))
        else:
            static, scalars = _static(loss, named, settings, normalizer)
            normalizer = checks.normalizer(loss, normalizer, static.reduction)
        if static.adds:
            linear_checks.main_grad(loss, named["main_grad"], weight, library)
        if static.masked or static.token_weighted:
            shape, dim = logits_shape(tuple(input.shape), tuple(weight.shape)), static.class_dim
            rows = shape[:dim] + shape[dim + 1 :]
            if static.token_weighted:
                linear_checks.token_weight(loss, named["token_weight"], rows)
            for name in ("mask", "token_weight"):
                if name in named and linear_checks.broadcasts(named[name], shape, dim):
                    named[name] = interop.namespace(input).broadcast_to(named[name], rows)
        # In the order of `positions`, which is that of the arguments.
        return loss, (*named.values(),), static, scalars, normalizer

    def names(self, call: Call) -> list[str]:
        return list(positions(call.static))

    def check(self, call: Call) -> None:
        linear_checks.dtypes(call.loss, layer_of(positions(call.static), call.arrays))
        super().check(call)

    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        logits = call.static.logits_dtype or checks.dtype_name(call.arrays[0])
        return checks.promote([logits, checks.dtype_name(call.arrays[2])])

    # Plans

    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> Plan:
        kind = PackedPlan if call.static.skip_ignored else LinearPlan
        if any(call.static.has_tangent):
            kind = LinearHvpPlan
        return kind(self, call, tensors, promoted, machine)

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Returns the arrays to copy. The input matrix and the weight may stay transposed or keep gaps."""
        return contiguous_copies(tensors)

    # Formulas

    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        return linear_reference.evaluate(call, promoted, readable)

    def floating(self, call: Call) -> Wanted:
        at = positions(call.static)
        differentiable = [0, 1, at.get("linear_bias"), *[2] * (call.static.kind != "indices")]
        return tuple([i in differentiable for i in range(len(call.arrays))])

    # Transforms

    def has_residual(self, call: Call) -> bool:
        return False

    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        static, rows = call.static, self.rows(call).shape
        specs = [row_major(static.out_dtype or promoted, rows if static.reduction == "none" else ())]
        compute = "float64" if self.promoted(call) == "float64" else "float32"
        specs += [row_major(compute, rows)] if static.lse else []
        return specs + ([row_major("float32", ())] if static.accuracy else [])

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        linear_checks.not_transformed(call.loss, call.static)
        return super().apart(call, promoted, wanted, traced)

    def compared(self, call: Call) -> tuple[Any, Any]:
        """Computes the logits by matrix products of its own, in the same chunks as the kernels."""
        static, at, rows = call.static, positions(call.static), self.rows(call)
        layer = [call.arrays[at[x]].detach() for x in ("input", "linear_weight", "linear_bias") if x in at]
        xp = interop.namespace(layer[0])
        input, weight, *bias = [x.to(xp.float32) for x in layer] if static.logits_dtype == "float32" else layer
        classes, depth = weight.shape[:-1], weight.shape[-1]
        matrix, dtype = weight.reshape(-1, depth).T, checks.dtype_name(weight)
        count = most_rows(static, matrix.shape[1] * ITEMSIZE[dtype], depth * matrix.shape[1] * ITEMSIZE[dtype])
        labels = softmax_reference.counted_rows(xp, rows).labels.reshape(-1, *classes[1:])
        label_logits, largest = [], []
        for x, label in zip(input.reshape(-1, depth).split(count), labels.split(count), strict=True):
            z = bias[0].reshape(-1).addmm(x, matrix) if bias else x @ matrix
            z = z.reshape(-1, *classes)
            label_logits.append(z.gather(1, label.unsqueeze(1)).squeeze(1))
            largest.append(z.amax(1))
        return xp.concat(label_logits).reshape(rows.shape), xp.concat(largest).reshape(rows.shape)

    def divisor(self, xp: Any, call: Call) -> Any:
        return linear_reference.divisor(xp, call, self.rows(call))

    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        linear_checks.not_transformed(call.loss, call.static)
        return super().divided_by(call, divisor, grad_output)

    def jvp(self, call: Call, moving: Wanted, tangents: tuple[Any, ...]) -> Call:
        static = call.static._replace(has_tangent=tuple(moving), lse=False, accuracy=False)
        return call._replace(static=static, arrays=(*call.arrays, *tangents))

    def batched(self, call: Call, dims: Sequence[int | None], size: int) -> Call | None:
        """Turns a batch of inputs into more rows. Batches of weights are left to the reference formula."""
        at, arrays = positions(call.static), list(call.arrays)
        shared = [at[x] for x in ("linear_weight", "linear_bias", "weight") if x in at]
        if len(arrays) > len(at) or any([dims[i] is not None for i in shared]):
            return None
        for i, d in enumerate(dims):
            if i not in shared:
                arrays[i] = arrays[i].expand(size, *arrays[i].shape) if d is None else arrays[i].movedim(d, 0)
        static = call.static._replace(class_dim=call.static.class_dim + 1)
        return call._replace(arrays=tuple(arrays), static=static)

    # Warm-up

    def placeholders(
        self, loss: Any, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Takes the shapes of `input` and `linear_weight`.

        The target holds class indices unless a floating dtype is given for it.
        """
        input, weight = tuple(shapes[0]), tuple(shapes[min(1, len(shapes) - 1)])
        rows, classes = input[:-1], weight[0]
        target = dtypes[-1] if len(dtypes) > 2 else "int64"
        return {
            "input": (dtypes[0], input),
            "linear_weight": (dtypes[0], weight),
            "target": (target, rows if target in checks.INTEGER else (*rows, classes)),
            "linear_bias": (dtypes[0], (classes,)),
            "weight": (dtypes[0], (classes,)),
            "mask": ("bool", rows),
            "token_weight": ("float32", rows),
            "main_grad": ("float64" if dtypes[0] == "float64" else "float32", weight),
            "normalizer": ("float64", ()),
        }

    def trained(self, call: Call) -> Wanted:
        return self.floating(call)

    # Standing in for torch's functions

    def differs(self, loss: Any, call: Call, takes: Callable[[Question], str | None], autocast: bool) -> str | None:
        static, arrays, at = call.static, call.arrays, positions(call.static)
        input, linear_weight, target = arrays[:3]
        # torch has classes in the second dimension of logits. K-dimensional weights are left to the reference formula.
        if input.ndim > 2 or linear_weight.ndim > 2 or 0 in (*input.shape, *linear_weight.shape):
            return SHAPES
        rows, indices = self.rows(call), static.kind == "indices"
        if tuple(target.shape) != (rows.shape if indices else tuple(rows.operands[0].shape)):
            return SHAPES
        weight = arrays[at["weight"]] if static.weighted else None
        if (
            static.masked
            or static.normalized
            or static.token_weighted
            or static.adds
            or getattr(weight, "requires_grad", False)
        ):
            return ARGUMENTS
        dtypes = [checks.dtype_name(x) for x in arrays]
        if autocast:
            dtypes = ["float32" if x in checks.FLOATING and x != "float64" else x for x in dtypes]
        ones = (1,) * (input.ndim - 1)
        shapes = {"input": (*ones, 2), "linear_weight": (2, 2), "target": ones if indices else (*ones, 2)}
        small_arrays = tuple([(x, shapes.get(x, (2,)), dtype) for x, dtype in zip(at, dtypes, strict=True)])
        changed = [(s.name, 1.0) for s, x in zip(loss.parameters, rows.parameters, strict=True) if x != s.default]
        reduction = ("reduction", static.reduction)
        if takes(Question(small_arrays, (*changed, reduction))) == checks.promote([dtypes[0], dtypes[2]]):
            return None
        plain = (("input", (1, 2), "float32"), ("linear_weight", (2, 2), "float32"), ("target", (1,), "int64"))
        return DTYPE if takes(Question(plain, (reduction,))) is not None else ARGUMENTS


def _static(
    loss: LinearSoftmaxLoss, named: Mapping[str, Any], settings: tuple[Any, ...], normalizer: Any
) -> tuple[Static, tuple[float, ...]]:
    """Returns the checked settings and scalars. They depend on dtypes, ranks, and which arrays are present."""
    input, weight = named["input"], named["linear_weight"]
    shape = logits_shape(tuple(input.shape), tuple(weight.shape))
    arguments = dict(zip(loss.setting_names, settings, strict=True))
    layer = linear_checks.settings(loss, arguments, checks.dtype_name(input))
    if arguments["ignore_index"] is None:
        arguments["ignore_index"] = IGNORED
    arguments |= {"class_dim": len(shape) - len(weight.shape) + 1, "inplace_backward": False}
    static, scalars = checked_settings(
        loss.inner,
        Logits(shape, checks.dtype_name(input)),
        named["target"],
        named.get("weight"),
        named.get("mask"),
        normalizer,
        tuple([arguments[x] for x in loss.inner.setting_names]),
        (),
    )
    linear_checks.skips(loss, static, layer[-1])
    return Static(*static, "linear_bias" in named, *layer, "token_weight" in named, "main_grad" in named), scalars


def layer_of(at: Mapping[str, int], arrays: Sequence[Any]) -> dict[str, Any]:
    """Returns the operands of the layer by name."""
    return {name: arrays[at[name]] for name in ("input", "linear_weight", "linear_bias") if name in at}


def contiguous_copies(tensors: tuple[TensorSpec, ...]) -> dict[int, tuple[int, ...]]:
    """Returns the arrays of a linear layer and its rows that must be copied, with the strides of the copies.

    Kernels need contiguous arrays. The factors of products, an input matrix and a weight, may also be transposed or
    have gaps between their rows or columns, if the products take no longer for that or read padded copies anyway.
    """
    copies = {}
    rows, features, classes = prod(tensors[0].shape[:-1]), tensors[0].shape[-1], tensors[1].shape[0]
    sizes = rows, features, classes, tensors[0].dtype
    inputs = tensors[1].ndim == 2 and pads_features(*sizes)
    padded = inputs, inputs or (tensors[1].ndim == 2 and pads_classes(*sizes))
    for i, x in enumerate(tensors):
        wanted = dense_strides(x.shape, (0,) * len(x.shape))
        in_place = x.strides == wanted or 0 in x.shape
        if i < 2 and padded[i] and _lines_of(x) is not None:
            in_place = True
        elif i == 0:
            in_place = in_place or _input_is_read_in_place(x, classes)
        elif i == 1:
            in_place = in_place or _weight_is_read_in_place(x)
        if not in_place:
            copies[i] = wanted
    return copies


class _Lines(NamedTuple):
    """The contiguous lines of a matrix: its rows, or its columns if it is transposed."""

    have_gaps: bool
    #: Alignment of their addresses in bytes, at most 16.
    alignment: int


def _lines_of(x: TensorSpec) -> _Lines | None:
    """Returns the lines of a matrix; None if it is no matrix, has no contiguous lines, or they overlap."""
    if x.ndim != 2 or 1 not in x.strides:
        return None
    inner = 1 if x.strides[1] == 1 else 0
    step, length = x.strides[1 - inner], x.shape[inner]
    if step < length:
        return None
    return _Lines(step > length, gcd(16, x.misalignment, step * ITEMSIZE[x.dtype]))


def _weight_is_read_in_place(x: TensorSpec) -> bool:
    """True if products read a weight in place: a copy would take longer than unaligned products lose.

    This holds for a weight whose lines are aligned to 16 bytes or have no gaps, and for a small one, unless a 16-bit
    copy would be better aligned.
    """
    lines = _lines_of(x)
    if lines is None or _is_aligned_by_a_copy(x, lines):
        return False
    return lines.alignment == 16 or not lines.have_gaps or prod(x.shape) <= SMALL_MATRIX


def _input_is_read_in_place(x: TensorSpec, classes: int) -> bool:
    """True if products of the inputs take no longer than a copy and its products.

    The more classes there are, the smaller is a copy's share of the time.
    """
    lines = _lines_of(x)
    if lines is None:
        return False
    size = ITEMSIZE[x.dtype]
    if classes <= FEW_CLASSES[size]:
        return True
    return not _is_aligned_by_a_copy(x, lines) if size == 2 else prod(x.shape) <= SMALL_MATRIX


def _is_aligned_by_a_copy(x: TensorSpec, lines: _Lines) -> bool:
    """True if a 16-bit matrix is less aligned than a copy would be, and the copy is aligned enough to pay."""
    least, of_copy = 16 if prod(x.shape) <= SMALL_MATRIX else LEAST_ALIGNMENT, gcd(16, x.shape[1] * 2)
    return ITEMSIZE[x.dtype] == 2 and lines.alignment < of_copy and of_copy >= least


LINEAR_SOFTMAX = LinearSoftmaxEngine()
