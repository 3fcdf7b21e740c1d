"""Generated glue of ``kernels/log_probs/``: types, and two entry points."""

from __future__ import annotations

from dataclasses import dataclass

from cupylosses.definition.base import Definition
from cupylosses.engines.log_probs.layout import BLOCK_THREADS, LANE_THREADS, SUBWARP_THREADS, TOGETHER, resident_threads
from cupylosses.engines.softmax.codegen import space_rank_name
from cupylosses.jit.glue import STORAGE
from cupylosses.jit.kernel import Kernel
from cupylosses.jit.sources import FUNCTOR

FILES = (*FUNCTOR, "log_probs/log_probs.cuh")

#: Output of each entry point, by the stage that launches it.
KINDS = {
    "unreduced": "the log-probabilities and the entropy of each row, and the coefficients of its gradient",
    "from_residual": "the gradient from these coefficients",
}


@dataclass(frozen=True)
class LogProbKernel(Kernel):
    """A compiled module of this engine. Equal instances have equal source.

    ``layout`` is the kind of a layout: what owns a row. ``cluster`` is the number of blocks that share a row, ``edges``
    the maximum number of edges of a row per thread. ``mask`` is the dtype of the mask, or "" without one. ``gradient``
    is the dtype of the written gradients, "" in forward.
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

    narrow = False
    files = FILES
    storage = property(lambda self: (self.input, self.index))

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        names = (self.input, self.index, self.mask, self.gradient)
        dtypes = "-".join([STORAGE[x][1] if x else "none" for x in names])
        parts = [self.loss.name, self.kind, dtypes, STORAGE[self.compute][1], self.layout, f"x{self.vec_size}"]
        parts += [f"rank{self.rank}"] if self.rank > 1 else []
        parts += [x for x in ("capped", "entropy") if getattr(self, x)]
        parts += [f"edges{self.edges}"] if self.edges else []
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
        coeffs = f"LogProbCoeffs<{compute}>* coeffs"
        of_kind = {
            "unreduced": [coeffs, f"{compute}* values"],
            "from_residual": [coeffs, f"const {compute}* grad_output", "int64 result_stride"],
        }[self.kind]
        written = [f"{STORAGE[self.gradient][0]}* gradients"] if self.gradient else []
        numbers = ["double logit_scale", "double softcap", "RowStatus* status", "double divisor", "double scale"]
        return [*arrays, *written, *of_kind, *numbers]

    def glue(self) -> str:
        input, index, compute = (STORAGE[x][0] for x in (self.input, self.index, self.compute))
        forward = self.kind == "unreduced"
        types = ["Space", input, index, STORAGE[self.mask][0] if self.mask else "Absent", compute]
        types += [str(x).lower() for x in (self.capped, self.entropy)]
        types += [STORAGE[self.gradient][0]] if self.gradient else []
        lanes = self.layout == "thread_per_row"
        group = f"ClusterGroup<{self.cluster}> group{{}}" if self.layout == "block" else "SubwarpGroup group{width}"
        fixed = ["int64 ignored", "int64 site", "int64 count", "int64 label_stride", "int64 slices", "int width"]
        fixed.append("const __grid_constant__ Space space")
        threads = {"block": BLOCK_THREADS, "subwarp": SUBWARP_THREADS, "thread_per_row": LANE_THREADS}[self.layout]
        # In float32, backward also gets 64 registers per thread. They suffice, and as many threads run as in forward.
        bounds = f"{threads}, {resident_threads(self.compute) // threads}"
        cluster = f" CLUSTER_DIMS({self.cluster})" if self.cluster > 1 else ""
        # A softcap needs registers of its own. Its arithmetic hides memory latency with fewer loads in flight.
        sizes = f"{self.vec_size}, {TOGETHER // 2 if self.capped and forward else TOGETHER}, {self.edges}"
        function = "log_probs" if forward else "log_prob_gradients"
        call = f"{function}<{sizes}>(program, group{'' if forward else ', slices'})"
        if lanes:
            call = f"{function}_of_lanes(program)"
        results = "values, coeffs, nullptr, 1" if forward else "nullptr, coeffs, grad_output, result_stride"
        lines = [
            f"using Space = RowSpace<{space_rank_name(self.rank)}>;",
            f"using Program = LogProbProgram<{', '.join(types)}>;",
            "",
            f'extern "C" __global__ void __launch_bounds__({bounds}){cluster}',
            f"{self.entry}({', '.join([*self.arguments, *fixed])}) {{",
            "  const Program program{space, input, labels,",
            f"                        {'mask' if self.mask else 'nullptr'}, {'nullptr' if forward else 'gradients'},",
            "                        {logit_scale, softcap}, ignored, count, label_stride, status, site,",
            f"                        {results}}};",
            *([] if lanes else [f"  const {group};"]),
            f"  {call};",
            "}",
        ]
        return "\n".join(lines) + "\n"
