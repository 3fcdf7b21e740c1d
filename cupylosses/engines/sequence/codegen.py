"""Kernels of sequence losses (``kernels/sequence/``), each a translation unit with one entry point."""

from __future__ import annotations

from dataclasses import dataclass

from cupylosses.definition.base import Definition
from cupylosses.jit.glue import STORAGE
from cupylosses.jit.kernel import Kernel

#: Maximum number of positions per block of the recursion. Longer targets need several blocks.
BAND = 64
#: Maximum number of threads per position (``kRoles``), by half of the recursion.
ROLES = {"first": 3, "second": 4}
#: Maximum number of threads per block.
THREADS = {"prepare": 256, "finish": 128, "gradient": 128} | {kind: count * BAND for kind, count in ROLES.items()}
#: Bytes of shared memory per 32 positions of a block of the recursion (``Group``), by arithmetic.
GROUP_BYTES = {
    "first": {"float32": 14592, "float64": 14848},
    "second": {"float32": 19200, "float64": 19456},
}
#: Maximum number of second-half blocks per multiprocessor for which two warps of each group store posteriors.
MOST_SPLIT = 3
#: Frames per chunk, by arithmetic (``kChunkFrames``).
CHUNK = {"float32": 8, "float64": 4}
#: Number of blocks that a multiprocessor is to hold, in float32 and float64 arithmetic. Most GPUs hold fewer of those
#: that write gradients of many classes (``kLongBlocks``, ``kFindingBlocks``).
BLOCKS = {"first": (4, 2), "second": (4, 2), "gradient": (6, 3),
          "gradient of many": (6, 3), "gradient in parts": (5, 2)}  # fmt: skip

#: Kinds of gradient, by the term that is added to the negated posteriors: ``GradientKind`` of ``frames.cuh``.
PLAIN, OF_LOGITS, SOFTMAX = "kPlain", "kOfLogits", "kSoftmax"

#: Arrays of a call besides its first operand, as kernels pass them on.
GIVEN = "GivenArrays{targets, input_lengths, target_lengths, weights, mask}"


@dataclass(frozen=True)
class SequenceKernel(Kernel):
    """A kernel of one ``kind``: "prepare", "first" and "second" half of the recursion, "finish" or "gradient".

    ``dtype`` is that of the first operand, ``result`` that of the value. ``added`` is the kind of a gradient. In
    "finish", it tells if frames have a log-sum-exp, and in the halves, if they compute any. ``stores`` is True if the
    first half stores its products, ``prepares`` if it also does the work of "prepare", and ``keeps`` if it keeps
    elements for the second half. ``roles`` is the number of threads per position of the recursion. ``many`` is True for
    gradients of many classes or labels. With ``in_parts``, log-sum-exps are added up in the order of the block that
    writes a frame's gradient; "gradient" computes them, and "finish" then writes what depends on all frames.
    """

    loss: Definition
    kind: str
    dtype: str = "float32"
    result: str = "float32"
    added: str = PLAIN
    stores: bool = False
    roles: int = ROLES["first"]
    many: bool = False
    prepares: bool = False
    keeps: bool = False
    in_parts: bool = False

    compute = property(lambda self: "float64" if self.dtype == "float64" else "float32")
    storage = property(lambda self: (self.dtype,))
    vec_size = 1
    counted = False
    narrow = False

    @property
    def files(self) -> tuple[str, ...]:
        """File that has the kernel's function."""
        if self.kind == "prepare":
            return ("sequence/sequences.cuh",)
        walks_alone = self.kind in ("first", "second") and self.added != SOFTMAX
        return ("sequence/recursion.cuh" if walks_alone else "sequence/frames.cuh",)

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        parts = [self.loss.name, self.kind, *[STORAGE[self.compute][1]] * (self.kind == "prepare")]
        if self.kind != "prepare":
            parts += [STORAGE[self.dtype][1], STORAGE[self.result][1]]
        if self.kind not in ("prepare", "second") or self.added == SOFTMAX:
            parts.append(self.added[1:].lower())
        if self.kind == "first":
            parts.append("stores" if self.stores else "value")
        parts += ["prepares"] * self.prepares + ["keeps"] * self.keeps + ["in_parts"] * self.in_parts
        if self.many:
            parts.append("many")
        if self.kind == "second":
            parts.append({3: "three_roles", 4: "four_roles"}[self.roles])
        return "_".join(parts)

    @property
    def resident(self) -> int:
        """Number of blocks that a multiprocessor is to hold."""
        suffix = "" if not self.many else " in parts" if self.in_parts else " of many"
        return BLOCKS[self.kind + suffix][self.compute == "float64"]

    @property
    def entry(self) -> str:
        """Name of the kernel function."""
        return self.title

    @property
    def arguments(self) -> list[str]:
        dtype, result, compute = STORAGE[self.dtype][0], STORAGE[self.result][0], STORAGE[self.compute][0]
        memory, lattice = "char* memory", f"{compute}* lattice"
        divisor = ["double multiple", "const double* count"]
        x, grad_output = f"const {dtype}* x", f"const {result}* grad_output"
        prepare_inputs = [f"const void* {name}" for name in ("targets", "input_lengths", "target_lengths", "weights")]
        prepare_inputs += ["const bool* mask", "const double* expected", "SequenceStatus* status"]
        return {
            "prepare": [*prepare_inputs, memory],
            "first": [*(prepare_inputs if self.prepares else []), x, memory, lattice, "int* exponents"],
            "second": [x, memory, lattice, "int* exponents"],
            "finish": [memory, *[f"{dtype}* g"] * self.in_parts, f"{result}* values", f"{result}* value", *divisor],
            "gradient": [x, f"{dtype}* g", memory, f"const {lattice}", grad_output, "int64 per_sample",
                         "double* expected", f"{result}* value", *divisor],
        }[self.kind]  # fmt: skip

    def glue(self) -> str:
        more = {
            "prepare": ["int64 words"],
            "first": ["int64 walks", "int64 most", "int64 share"],
            "second": ["int64 walks", "int64 links", "int64 share"],
            "gradient": ["int64 finishes", "int64 frames", "int64 again"],
            "finish": ["int64 blocks"] * self.in_parts,
        }
        fixed = ["const Sequences shape", *more.get(self.kind, [])]
        signature = ", ".join([*self.arguments, *fixed])
        bounds = str(self.roles * BAND if self.kind == "second" else THREADS[self.kind])
        if self.kind in BLOCKS:
            blocks = min(self.resident, MOST_SPLIT) if self.roles == ROLES["second"] else self.resident
            of_many = "kFindingBlocks" if self.in_parts else "kLongBlocks"
            bounds += f", {of_many if self.many and self.compute == 'float32' else blocks}"
        body = "\n".join(f"  {line}" for line in self._body())
        return (
            f"using Compute = {STORAGE[self.compute][0]};\n"
            f'extern "C" __global__ void __launch_bounds__({bounds}) {self.entry}({signature}) {{\n'
            f"  const Buffers<Compute> at(memory, shape);\n{body}\n}}\n"
        )

    def _body(self) -> list[str]:
        if self.kind == "prepare":
            return ["if (blockIdx.x >= shape.samples) empty_columns(shape, "
                    "reinterpret_cast<unsigned long long*>(at.columns), words);",
                    f"else prepare_sample(shape, {GIVEN}, expected, at.used, at.samples, at.labels, at.broken, "
                    "at.ticket, at.started, status);"]  # fmt: skip
        if self.kind in ("first", "second"):
            return self._half()
        logits = str(self.added == SOFTMAX).lower()
        finish = (
            f"finish_sample<{logits}, {8 if self.kind == 'finish' else 4}, Compute, {STORAGE[self.result][0]}>(shape, "
            "blockIdx.x, at.samples, at.labels, at.meeting, at.sums, at.broken, at.losses, {values}, value, multiple, "
            "count, at.ticket);"
        )
        if self.kind == "finish" and self.in_parts:
            return ["const int64 n = blockIdx.x % shape.samples, block = blockIdx.x / shape.samples;",
                    "write_nan<Compute>(shape, g, at.samples, at.broken, n, block, blocks);",
                    f"if (block == 0) {finish.format(values='values')}"]  # fmt: skip
        if self.kind == "finish":
            return [finish.format(values="values")]
        written = (
            f"write_gradients<{self.added}, {str(self.many).lower()}, {str(self.in_parts).lower()}>(shape, x, g, "
            "at.samples, at.labels, at.links, lattice, at.sums, at.broken, grad_output, at.used, per_sample, multiple, "
            "count, static_cast<int>(frames), again != 0, blockIdx.x - finishes, gridDim.x - finishes);"
        )
        return [
            f"using Result = {STORAGE[self.result][0]};",
            "if (expected != nullptr) {",
            "  if (is_fresh(grad_output, at.used)) return;",
            "  if (blockIdx.x == 0 && threadIdx.x == 0) *expected = widen<double>(*grad_output);",
            "}",
            *[f"if (blockIdx.x < finishes) {finish.format(values='static_cast<Result*>(nullptr)')}", "else"]
            * (not self.in_parts),
            written,
        ]

    def _half(self) -> list[str]:
        """Returns the body of a half: walks, then blocks that link labels, then blocks that compute log-sum-exps."""
        second = self.kind == "second"
        half, keeps, stores = int(second), str(self.keeps).lower(), str(second or self.stores).lower()
        # With a single band, walks wait for no other walk and need no start number.
        order = f"shape.bands > 1 ? start_number(at.started + {half}, all) : blockIdx.x"
        task = "blockIdx.x"
        if not second and not self.prepares:
            order = f"most == 0 ? {order} : task"
            task = (
                "most == 0 ? blockIdx.x : claimed_task(at.started + 2, static_cast<unsigned>(most), all, "
                "gridDim.x - all)"
            )
        x = "static_cast<const Compute*>(nullptr)" if self.keeps and second else "x"
        walk = (
            f"walk_prepared<{half + 1}, {stores}, {self.roles}, {keeps}>(shape, {x}, at, lattice, exponents, {order});"
        )
        if self.prepares:
            walk = (
                f"walk_given<{stores}, {self.roles}, {keeps}>(shape, {GIVEN}, expected, status, x, at, lattice, "
                "exponents, task);"
            )
        behind = "static_cast<unsigned>(walks + links)" if second else "all"
        lines = [
            "const unsigned all = static_cast<unsigned>(walks);",
            f"const unsigned task = {task};",
            f"if (task < all) {walk}",
        ]
        if second:
            lines.append(f"else if (task < {behind}) link_labels(at.samples[task - all], at.labels, at.links);")
        if self.added == SOFTMAX:
            lines.append(
                f"else read_frames<{str(not second).lower()}, {str(self.in_parts).lower()}, Compute>(shape, x, "
                "at.samples, at.sums, at.broken, "
                f"static_cast<unsigned>(share), task - {behind}, gridDim.x - {behind});"
            )
        return lines
