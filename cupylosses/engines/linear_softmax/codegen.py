"""Small kernels between matrix products and row kernels (``kernels/linear_softmax/chunks.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass

from cupylosses.definition.base import Definition
from cupylosses.interop import ITEMSIZE
from cupylosses.jit.glue import STORAGE
from cupylosses.jit.kernel import Kernel

#: Threads per block, by kind; and columns that a block of `add_to_bias` sums.
THREADS = {"rescale": 256, "add": 256, "add_unaligned": 256, "narrow": 256, "bias": 1024}
BIAS_COLUMNS = 32


@dataclass(frozen=True)
class ChunkKernel(Kernel):
    """A kernel between matrix products and row kernels.

    ``kind`` is "snapshot", "widen", "finish", "rescale", "add", "add_unaligned", "bias" or "narrow". ``dtype`` is the
    dtype of the gradients, ``result`` the dtype of the loss; "narrow" reads ``dtype`` and writes ``result``.
    """

    loss: Definition
    kind: str
    dtype: str
    result: str

    compute = property(lambda self: "float64" if self.dtype == "float64" else "float32")
    storage = property(lambda self: (self.dtype,))
    vec_size = property(lambda self: 16 // ITEMSIZE[self.dtype] if self.kind in ("rescale", "add") else 1)
    narrow = False
    counted = False
    files = ("linear_softmax/chunks.cuh",)

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        return "_".join([self.loss.name, self.kind, STORAGE[self.dtype][1], STORAGE[self.result][1]])

    @property
    def entry(self) -> str:
        """Name of the kernel function."""
        return self.title

    @property
    def arguments(self) -> list[str]:
        dtype, result = STORAGE[self.dtype][0], STORAGE[self.result][0]
        added = [f"const {result}* grad_output", "const double* used", "double* expected", f"const {dtype}* gradient",
                 f"{STORAGE[self.compute][0]}* main_grad"]  # fmt: skip
        return {
            "add": added,
            "add_unaligned": added,
            "snapshot": ["const double* expected", "double* used"],
            "widen": [f"const {result}* grad_output", "double* expected", "double* used"],
            "finish": ["const double* shares", f"{result}* value"],
            "rescale": [f"const {result}* grad_output", "const double* used", "double* expected", f"{dtype}* gradient"],
            "bias": [f"const {dtype}* gradient", "double* sums", f"{result}* bias", "int64 rows", "int64 first",
                     "int64 last"],
            "narrow": [f"const {dtype}* from", f"{result}* to", "int64 count"],
        }[self.kind]  # fmt: skip

    def glue(self) -> str:
        names = [x.rpartition(" ")[2].lstrip("*") for x in self.arguments]
        more = {
            "finish": ["chunks"],
            "rescale": ["count"],
            "add": ["count"],
            "add_unaligned": ["count"],
            "bias": ["classes", "pitch"],
        }
        fixed = more.get(self.kind, [])
        function = {
            "snapshot": "snapshot_expected",
            "widen": "widen_grad_output",
            "finish": "finish_value",
            "rescale": f"rescale<{self.vec_size}, {STORAGE[self.compute][0]}>",
            "add": f"add_rescaled<{self.vec_size}>",
            "add_unaligned": f"add_rescaled<{self.vec_size}>",
            "bias": "add_to_bias",
            "narrow": "narrow_all",
        }[self.kind]
        threads = THREADS.get(self.kind, 32)
        arguments = ", ".join([*self.arguments, *(f"int64 {x}" for x in fixed)])
        single = "if (threadIdx.x == 0) " if self.kind not in THREADS else ""
        return (
            f'extern "C" __global__ void __launch_bounds__({threads}) {self.entry}({arguments}) {{\n'
            f"  {single}{function}({', '.join([*names, *fixed])});\n}}\n"
        )
