"""Generated glue of ``kernels/log_probs/``: types, and an entry point."""

from __future__ import annotations

from dataclasses import dataclass

from cupylosses.definition.base import Definition
from cupylosses.engines.log_probs.layout import (
    BLOCK_THREADS,
    LANE_THREADS,
    SECOND_BLOCK_THREADS,
    SUBWARP_THREADS,
    TOGETHER,
    resident_threads,
)
from cupylosses.engines.softmax.codegen import space_rank_name
from cupylosses.jit.glue import STORAGE
from cupylosses.jit.gpu import WARP
from cupylosses.jit.kernel import Kernel
from cupylosses.jit.sources import FUNCTOR, nested

#: Output of each entry point, by the stage that launches it.
KINDS = {
    "unreduced": "the log-probabilities and the entropy of each row, and the coefficients of its gradient",
    "from_residual": "the gradient from these coefficients",
    "hvp": "the derivatives along tangents of the values, and of the gradient",
}


@dataclass(frozen=True)
class LogProbKernel(Kernel):
    """A compiled module of this engine. Equal instances have equal source.

    ``layout`` is the kind of a layout: what owns a row. ``cluster`` is the number of blocks that share a row, ``edges``
    the maximum number of edges of a row per thread. ``mask`` is the dtype of the mask, or "" without one. ``gradient``
    is the dtype of the written gradients, "" if none are written. ``valued`` is False if a kernel of second derivatives
    does not compute the derivatives of the values.
    """

    loss: Definition
    kind: str
    layout: str
    vec_size: int
    input: str
    index: str
    mask: str
    compute: str
    gradient: str = ""
    rank: int = 1
    capped: bool = False
    entropy: bool = False
    cluster: int = 1
    edges: int = 0
    valued: bool = True

    narrow = False
    storage = property(lambda self: (self.input, self.index))

    @property
    def files(self) -> tuple[str, ...]:
        if self.kind == "hvp":
            return (*nested(FUNCTOR), "log_probs/log_prob_hvp.cuh")
        return (*FUNCTOR, "log_probs/log_probs.cuh")

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        names = (self.input, self.index, self.mask, self.gradient)
        dtypes = "-".join([STORAGE[x][1] if x else "none" for x in names])
        parts = [self.loss.name, self.kind, dtypes, STORAGE[self.compute][1], self.layout, f"x{self.vec_size}"]
        parts += [f"rank{self.rank}"] if self.rank > 1 else []
        parts += [x for x in ("capped", "entropy") if getattr(self, x)]
        parts += [f"edges{self.edges}"] if self.edges else []
        parts += [] if self.valued else ["no-value"]
        return "_".join([*parts, *([f"cluster{self.cluster}"] if self.cluster > 1 else [])])

    @property
    def entry(self) -> str:
        """Name of the kernel function."""
        return f"{self.loss.name}_{self.kind}_{STORAGE[self.input][1]}"

    @property
    def arguments(self) -> list[str]:
        input, index, compute = (STORAGE[x][0] for x in (self.input, self.index, self.compute))
        arrays = [f"const {input}* input", f"const {index}* labels"]
        arrays += [f"const {STORAGE[self.mask][0]}* mask"] if self.mask else []
        arrays += [f"const {input}* tangents"] if self.kind == "hvp" else []
        coeffs = f"LogProbCoeffs<{compute}>* coeffs"
        of_kind = {
            "unreduced": [coeffs, f"{compute}* values"],
            "from_residual": [coeffs, f"const {compute}* grad_output", "int64 result_stride"],
            "hvp": [*[f"{compute}* values"] * self.valued, f"const {compute}* grad_output"],
        }[self.kind]
        written = [f"{STORAGE[self.gradient][0]}* gradients"] if self.gradient else []
        numbers = ["double logit_scale", "double softcap", "RowStatus* status", "double divisor", "double scale"]
        return [*arrays, *written, *of_kind, *numbers]

    def glue(self) -> str:
        input, index, compute = (STORAGE[x][0] for x in (self.input, self.index, self.compute))
        types = ["Space", input, index, STORAGE[self.mask][0] if self.mask else "Absent", compute]
        types += [str(x).lower() for x in (self.capped, self.entropy)]
        types += [STORAGE[self.gradient][0]] if self.gradient and self.kind != "hvp" else []
        fixed = ["int64 ignored", "int64 site", "int64 count", "int64 label_stride", "int64 slices", "int width"]
        fixed.append("const __grid_constant__ Space space")
        of_block = SECOND_BLOCK_THREADS if self.kind == "hvp" else BLOCK_THREADS
        threads = {"block": of_block, "subwarp": SUBWARP_THREADS, "thread_per_row": LANE_THREADS}[self.layout]
        # In float32, backward also gets 64 registers per thread. They suffice, and as many threads run as in forward.
        resident = resident_threads(self.layout, self.compute, self.kind == "hvp", self.capped)
        bounds = f"{threads}, {resident // threads}"
        cluster = f" CLUSTER_DIMS({self.cluster})" if self.cluster > 1 else ""
        group, call = self._call()
        results = {
            "unreduced": "values, coeffs, nullptr, 1",
            "from_residual": "nullptr, coeffs, grad_output, result_stride",
            "hvp": f"{'values' if self.valued else 'nullptr'}, nullptr, grad_output, 1",
        }[self.kind]
        program = f"LogProbProgram<{', '.join(types)}>"
        inner = ["{space, input, labels,", f"{'mask' if self.mask else 'nullptr'},"]
        inner += [f"{'gradients' if self.gradient else 'nullptr'},", "{logit_scale, softcap}, ignored, count,"]
        inner += ["label_stride, status, site,", f"{results}}}"]
        built = " ".join(inner)
        if self.kind == "hvp":
            program = f"LogProbHvpProgram<{program}, {str(bool(self.gradient)).lower()}>"
            built = f"{{{built}, tangents}}"
        lines = [
            f"using Space = RowSpace<{space_rank_name(self.rank)}>;",
            f"using Program = {program};",
            "",
            f'extern "C" __global__ void __launch_bounds__({bounds}){cluster}',
            f"{self.entry}({', '.join([*self.arguments, *fixed])}) {{",
            f"  const Program program{built};",
            *([f"  const {group};"] if group else []),
            f"  {call};",
            "}",
        ]
        return "\n".join(lines) + "\n"

    def _call(self) -> tuple[str, str]:
        """Returns the declaration of the group that shares a row, "" if a lane processes it alone, and the call."""
        function = {"unreduced": "log_probs", "from_residual": "log_prob_gradients", "hvp": "log_prob_hvps"}[self.kind]
        valued = [str(self.valued).lower()] if self.kind == "hvp" else []
        if self.layout == "thread_per_row":
            return "", f"{function}_of_lanes{f'<{valued[0]}>' if valued else ''}(program)"
        # A softcap needs registers of its own. Its arithmetic hides memory latency with fewer loads in flight.
        together = TOGETHER // 2 if self.capped and self.kind == "unreduced" else TOGETHER
        vectors = [] if self.kind == "hvp" else [str(together)]
        sizes = ", ".join([str(self.vec_size), *vectors, str(self.edges), *valued])
        more = ", slices" if self.kind == "from_residual" else ""
        group = "SubwarpGroup group{width}"
        if self.layout == "block":
            warps = f", {SECOND_BLOCK_THREADS // WARP}" if self.kind == "hvp" else ""
            group = f"ClusterGroup<{self.cluster}{warps}> group{{}}"
        return group, f"{function}<{sizes}>(program, group{more})"
