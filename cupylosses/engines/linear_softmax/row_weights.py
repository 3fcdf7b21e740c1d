"""Launches that apply the weights of rows around the row kernels (``kernels/linear_softmax/row_weights.cuh``).

    loss = (1 / d) sum_n w_n l_n      in a mean, d is the sum of the weights of the rows that count

Row kernels write one value per row, and the gradient for one ``grad_output`` per row. The weights multiply the
values and these grad_outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupylosses.call import Call
from cupylosses.definition.base import Definition
from cupylosses.engines.composite import CompositePlan, Inputs
from cupylosses.engines.device import UNDIVIDED, Device, Divisor
from cupylosses.jit import compiler
from cupylosses.jit.glue import STORAGE
from cupylosses.jit.kernel import Kernel

#: Threads per block, and names of device functions, by kind of kernel.
_THREADS = {"weigh": 256, "sum": 1024, "divisor": 1024}
_FUNCTIONS = {"weigh": "weigh_rows", "sum": "sum_weighted_rows", "divisor": "sum_row_weights"}


@dataclass(frozen=True)
class RowWeightKernel(Kernel):
    """A kernel that applies or sums the weights of rows.

    ``kind`` is "weigh" or "sum", which read losses or grad_outputs of dtype ``read``, or "divisor", which reads labels
    of dtype ``read`` and class weights of dtype ``of_classes``. ``weights`` is the dtype of the row weights, ``result``
    the dtype of the output.
    """

    loss: Definition
    kind: str
    read: str
    weights: str
    result: str = "float64"
    of_classes: str = "float64"

    compute = "float64"
    vec_size = 1
    narrow = False
    counted = False
    storage = property(lambda self: (self.weights,))
    files = ("linear_softmax/row_weights.cuh",)

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        dtypes = [STORAGE[x][1] for x in (self.read, self.weights, self.result, self.of_classes)]
        return "_".join([self.loss.name, "row_weights", self.kind, "-".join(dtypes)])

    @property
    def entry(self) -> str:
        """Name of the kernel function."""
        return f"{self.loss.name}_row_weights_{self.kind}"

    @property
    def arguments(self) -> list[str]:
        read, weights, result = (STORAGE[x][0] for x in (self.read, self.weights, self.result))
        divisor = ["double multiple", "const double* count"]
        return {
            "divisor": [f"const {read}* labels", f"const {STORAGE[self.of_classes][0]}* class_weights",
                        "const bool* mask", f"const {weights}* weights", "double* total"],
            "weigh": [f"const {read}* from", "int64 step", f"const {weights}* weights", *divisor, f"{result}* to"],
            "sum": [f"const {read}* losses", f"const {weights}* weights", *divisor, f"{result}* value"],
        }[self.kind]  # fmt: skip

    def glue(self) -> str:
        fixed = ["rows", "ignored", "classes"] if self.kind == "divisor" else ["rows"]
        names = [x.rpartition(" ")[2].lstrip("*") for x in self.arguments]
        arguments = ", ".join([*self.arguments, *(f"int64 {x}" for x in fixed)])
        return (
            f'extern "C" __global__ void __launch_bounds__({_THREADS[self.kind]}) {self.entry}({arguments}) {{\n'
            f"  {_FUNCTIONS[self.kind]}({', '.join([*names, *fixed])});\n}}\n"
        )


class RowWeights:
    """Launches of one plan whose rows are weighted by the array at position ``at``."""

    def __init__(self, plan: CompositePlan, at: int, rows: int) -> None:
        self._plan, self._at, self.rows = plan, at, rows
        self.dtype = plan.tensors[at].dtype
        self._launchers: dict[tuple[str, ...], compiler.Launcher] = {}

    def launcher(self, kind: str, *dtypes: str, fixed: tuple[int, ...] = ()) -> compiler.Launcher:
        """Returns the launcher of a kernel. ``dtypes`` are its `read`, `result` and `of_classes`."""
        key = (kind, *dtypes)
        launcher = self._launchers.get(key)
        if launcher is None:
            kernel = RowWeightKernel(self._plan.loss, kind, dtypes[0], self.dtype, *dtypes[1:])
            threads = _THREADS[kind]
            blocks = min(-(-self.rows // threads), 8 * self._plan.machine.processors) if kind == "weigh" else 1
            launcher = self._plan.machine.launcher(kernel, blocks, threads, (self.rows, *fixed))
            self._launchers[key] = launcher
        return launcher

    def weigh(
        self,
        device: Device,
        arrays: Sequence[Any],
        read: int,
        step: int,
        dtypes: tuple[str, str],
        divisor: Divisor = UNDIVIDED,
        to: Any = None,
    ) -> Any:
        """Multiplies the row weights by the numbers at address ``read``, divides, and returns the products.

        There is one number (``step`` 0) or one per row (``step`` 1). The products are written to ``to``, or to a new
        array. ``dtypes`` are the dtypes of the numbers and of the products.
        """
        products = device.empty((self.rows,), (1,), dtypes[1]) if to is None else to
        weights, below = device.address(arrays[self._at]), divisor.number_and_count
        self.launcher("weigh", *dtypes)(device.stream(), read, step, weights, *below, device.address(products))
        return products

    def sum(
        self, device: Device, arrays: Sequence[Any], losses: Any, dtypes: tuple[str, str], divisor: Divisor, value: Any
    ) -> None:
        """Stores the weighted sum of the ``losses`` of all rows, divided, in ``value``."""
        weights = device.address(arrays[self._at])
        launch = self.launcher("sum", *dtypes)
        launch(device.stream(), device.address(losses), weights, *divisor.number_and_count, device.address(value))


class WeightSumPlan(CompositePlan):
    """Plan of the divisor of a mean of weighted rows."""

    def __init__(self, plan: Any, weights: RowWeights) -> None:
        super().__init__(plan.engine, Call(plan.loss, (), plan.static), plan.tensors, plan.promoted, plan.machine)
        self.result, self.shape, self.strides, self.scalar = "float64", (), (), True
        self.differentiable = self.speculative = self.nothing
        self.divisor, self.counted, self.partials, self.records, self.slot = 1.0, False, 0, 0, 0
        self._weights, self._indices, self._at = weights, plan.indices, plan.at
        self._classes, self._ignored = plan.classes, plan.static.ignore_index

    def run_value(self, inputs: Inputs, auxiliary: Sequence[int]) -> Any:
        """Returns the divisor. ``inputs.arrays`` holds addresses instead of arrays."""
        device, arrays, *_ = inputs
        at, dtypes = self._at, [x.dtype for x in self.tensors]
        labels, of_classes = (0, "int64"), (0, "float64")
        if self._indices:
            labels = arrays[2], dtypes[2]
            if "weight" in at and self.loss.mean_of_weights:
                of_classes = arrays[at["weight"]], dtypes[at["weight"]]
        mask = arrays[at["mask"]] if "mask" in at else 0
        total = device.empty((), (), "float64")
        fixed = self._ignored, self._classes
        launch = self._weights.launcher("divisor", labels[1], "float64", of_classes[1], fixed=fixed)
        weights = arrays[at["token_weight"]]
        launch(device.stream(), labels[0], of_classes[0], mask, weights, device.address(total))
        return total

    def run_value_and_gradients(self, *_: Any) -> tuple[Any, Any]:
        raise NotImplementedError("a divisor has no gradients")

    def run_gradients(self, *_: Any) -> list[Any]:
        raise NotImplementedError("a divisor has no gradients")
