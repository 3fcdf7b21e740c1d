"""The seeded defects that ``tests/test_mutations.py`` puts into the library, each with the checks that must notice.

Of the checks, only the names stand here; they are those of the test's battery. What no test on the CPU can tell from
the right program is not in the list:

- a missing ``__syncwarp`` before shuffles, which wait for the lanes that they name, here as on GPUs since 7.0;
- 32 bits for the number of an element, which takes 2^31 elements to be wrong: ``tests/test_large.py`` has them, on a
  GPU;
- ``__ldg`` where ``__ldcg`` is needed: the host has no cache that could be stale.
"""

from cupylosses.testing.mutations import Mutant

POINTWISE = "kernels/pointwise.cuh"
BROADCAST = "kernels/sum_over.cuh"
REDUCE = "kernels/reduce.cuh"
LAYOUT = "kernels/layout.cuh"
EXPECTATION = "kernels/expectation.cuh"
TYPES = "kernels/types.cuh"
MATH = "kernels/math.cuh"
LAUNCH = "cupylosses/launch.py"
CALL = "cupylosses/call.py"
CODEGEN = "cupylosses/codegen.py"
REDUCTION = "cupylosses/reduction.py"
ENGINE = "cupylosses/engine.py"
AUTOGRAD = "cupylosses/autograd.py"
ROWS = "kernels/rows.cuh"
ROW_UNITS = "kernels/row_units.cuh"
ROW_VIEW = "kernels/row_view.cuh"
ROW_COUNT = "kernels/row_count.cuh"
COLUMNS = "kernels/columns.cuh"
ROW_GATHER = "kernels/row_gather.cuh"
ROW_TERMS = "kernels/row_terms.cuh"
RESIDENT_TERMS = "kernels/resident_terms.cuh"
LONG_TERMS = "kernels/long_terms.cuh"
TERM_COLUMNS = "kernels/term_columns.cuh"
SOFTMAX = "kernels/softmax.cuh"
RESIDENT_ROWS = "kernels/resident_rows.cuh"
STREAMED_ROWS = "kernels/streamed_rows.cuh"
SHORT_ROWS = "kernels/short_rows.cuh"
ROW_SECOND = "kernels/row_second.cuh"
TERM_SECOND = "kernels/term_second.cuh"

MUTANTS: tuple[Mutant, ...] = (
    # Which elements are visited
    Mutant("tail off by one", POINTWISE, "i < kLanes && i < present;", "i < kLanes && i + 1 < present;", ("truth",)),
    Mutant(
        "last vector counted again by the lanes behind it",
        POINTWISE,
        "program.layout.at(first + lane)",
        "program.layout.at(min(first + lane, vectors - 1))",
        ("truth",),
    ),
    Mutant(
        "a warp takes one group only",
        POINTWISE,
        "group < groups; group += warps",
        "group < groups; group += groups",
        ("any order",),
    ),
    Mutant("a group takes one run only", POINTWISE, "while (first < vectors)", "if (first < vectors)", ("truth",)),
    Mutant("row not carried", LAYOUT, "      ++cursor.row;\n", "", ("truth, strided",)),
    # Where they lie
    Mutant(
        "inner stride ignored",
        LAYOUT,
        "element * inner_stride[kStream]",
        "element",
        ("truth, strided",),
    ),
    Mutant(
        "outer stride of the last stream",
        LAYOUT,
        "offset[s] = index * stride[s][0]",
        "offset[s] = index * stride[kStreams - 1][0]",
        ("truth, sliced", "truth, mixed"),
    ),
    Mutant(
        "outer strides swapped",
        LAYOUT,
        "coordinate * stride[s][d]",
        "coordinate * stride[s][rank - 1 - d]",
        ("truth, eight dimensions",),
    ),
    Mutant(
        "row offset of 32 bits",
        LAYOUT,
        "offset[s] = index * stride[s][0]",
        "offset[s] = static_cast<int>(index * stride[s][0])",
        ("beyond 32 bits",),
    ),
    Mutant(
        "offset of a sum's term of 32 bits",
        LAYOUT,
        "offset[s] += coordinate * stride[s][d]",
        "offset[s] += static_cast<int>(coordinate * stride[s][d])",
        ("beyond 32 bits",),
    ),
    Mutant(
        "broadcast axis swapped",
        LAUNCH,
        "return (0,) * lead + tuple(0 if shape[d] == 1 != to[lead + d] else strides[d] for d in range(len(shape)))",
        "return tuple(0 if shape[d] == 1 != to[lead + d] else strides[d] for d in range(len(shape))) + (0,) * lead",
        ("truth, row",),
    ),
    Mutant(
        "vectors at any address",
        LAUNCH,
        "fits and stream.misalignment % word == 0 and all(",
        "fits and all(",
        ("truth, misaligned",),
    ),
    Mutant(
        "halves in the wrong order",
        TYPES,
        "narrow_pair(as_float(x[i]), as_float(x[i + 1]), Storage{})",
        "narrow_pair(as_float(x[i + 1]), as_float(x[i]), Storage{})",
        ("truth, bfloat16",),
    ),
    # Sums
    Mutant(
        "half a warp's lanes not added", REDUCE, "int offset = 16; offset > 0", "int offset = 8; offset > 0", ("truth",)
    ),
    Mutant("last partial sum lost", REDUCE, "term[j] = i < count ?", "term[j] = i + 1 < count ?", ("truth",)),
    Mutant(
        "last partial sum of one block lost",
        POINTWISE,
        "threadIdx.x < groups ? partials",
        "threadIdx.x + 1 < groups ? partials",
        ("truth",),
    ),
    Mutant(
        "last slice lost",
        LAUNCH,
        "slices=-(-x.length // length)",
        "slices=x.length // length",
        ("truth, row",),
    ),
    Mutant(
        "terms behind the end of a slice added",
        BROADCAST,
        "if (r + i * kStride >= end) continue;",
        "",
        ("truth, row", "truth, column"),
    ),
    Mutant(
        "slices stored in another order than they are read",
        BROADCAST,
        "partials[slice * outputs + output + v]",
        "partials[(output + v) * slices + slice]",
        ("truth, row",),
    ),
    Mutant("a warp sums one output only", BROADCAST, "task += warps", "task += bundles * slices", ("truth, column",)),
    # Threads that must wait for one another
    Mutant(
        "no barrier between warps' sums",
        REDUCE,
        "warp_totals[threadIdx.x / 32] = x;\n  __syncthreads();",
        "warp_totals[threadIdx.x / 32] = x;",
        ("truth",),
    ),
    Mutant(
        "no barrier before the ticket",
        REDUCE,
        "__shared__ bool last;\n  __syncthreads();",
        "__shared__ bool last;",
        ("truth",),
    ),
    Mutant(
        "no barrier behind the ticket",
        REDUCE,
        "== gridDim.x - 1;\n  __syncthreads();",
        "== gridDim.x - 1;",
        ("truth",),
    ),
    Mutant(
        "no barrier in one block",
        POINTWISE,
        "if (alone) {\n    __syncthreads();",
        "if (alone) {",
        ("truth",),
    ),
    Mutant(
        "no fence around the ticket",
        REDUCE,
        "increment_and_synchronize(ticket, gridDim.x - 1) ==",
        "atomicInc(ticket, gridDim.x - 1) ==",
        ("truth",),
    ),
    Mutant(
        "ticket not 0 again",
        REDUCE,
        "increment_and_synchronize(ticket, gridDim.x - 1) ==",
        "increment_and_synchronize(ticket, 0xffffffffu) ==",
        ("truth", "repeats"),
    ),
    # Gradients
    Mutant(
        "the first operand's gradient for all",
        POINTWISE,
        "tangent_or_zero(y, kSlot) * factor",
        "tangent_or_zero(y, 0) * factor",
        ("truth", "truth, elements"),
    ),
    Mutant(
        "gradients in each other's memory",
        POINTWISE,
        "store<kWidth>(get<kSlot>(sinks), x.sink_offset[kSlot], gradient[kSlot])",
        "store<kWidth>(get<kSlot>(sinks), x.sink_offset[kSlot], gradient[kOperands - 1 - kSlot])",
        ("truth", "alone and together"),
    ),
    Mutant(
        "NaN rule dropped",
        POINTWISE,
        "y.value != y.value ? y.value : tangent_or_zero(y, kSlot) * factor",
        "tangent_or_zero(y, kSlot) * factor",
        ("NaN",),
    ),
    Mutant(
        "NaN rule of broadcast operands dropped",
        BROADCAST,
        "y.value != y.value ? y.value : tangent_or_zero(y, kSlot_)",
        "tangent_or_zero(y, kSlot_)",
        ("NaN",),
    ),
    Mutant("gradient of a mean not divided", ENGINE, "1.0 / number if number else 0.0", "1.0", ("truth",)),
    Mutant(
        "broadcast gradient of a mean not divided",
        BROADCAST,
        "scale * widen<double>(*grad_output)",
        "widen<double>(*grad_output)",
        ("truth, row",),
    ),
    Mutant(
        "grad_output of each element ignored",
        BROADCAST,
        "if constexpr (kScaledPerElement) return d * terms.grad_output.template lane<Compute>(lane);",
        "",
        ("truth, row, elements",),
    ),
    # Weights, masks and what a mean divides by
    Mutant(
        "weight of 0 multiplied, not selected",
        MATH,
        "y.value = unused ? T(0) : weight.value * x.value;",
        "y.value = weight.value * x.value;",
        ("shield",),
    ),
    Mutant(
        "gradient of an element of weight 0 multiplied, not selected",
        MATH,
        "const T by_x = unused ? T(0) : weight.value * x.tangent[k];",
        "const T by_x = weight.value * x.tangent[k];",
        ("shield",),
    ),
    Mutant(
        "no weight learned from 0",
        MATH,
        "const T partial = unused && !(scalar_abs(x.value) <= scalar_largest(T())) ? T(0) : x.value;",
        "const T partial = unused ? T(0) : x.value;",
        ("weights and masks", "weights and masks, by count"),
    ),
    Mutant(
        "masked element multiplied, not selected",
        CODEGEN,
        "f'::where(mask != 0, {result}, 0)'",
        "f'mask * {result}'",
        ("shield",),
    ),
    Mutant(
        "mask not counted",
        REDUCTION,
        'Resolved(dims, kept, 1 if masked else size, weight == "number", counts=masked, masked=masked)',
        'Resolved(dims, kept, size, weight == "number")',
        ("weights and masks, by count",),
    ),
    Mutant("weights not counted", REDUCTION, 'if weight == "array":', "if False:", ("weights and masks",)),
    Mutant(
        "normalizer of a number ignored",
        ENGINE,
        "Divisor(resolved.divisor * normalizer)",
        "Divisor(resolved.divisor)",
        ("normalizer",),
    ),
    Mutant(
        "broadcast mask counted once",
        ENGINE,
        "divisor * (plan.elements / counting.elements)",
        "divisor",
        ("truth, column of a mask",),
    ),
    Mutant(
        "broadcast mask counted once, along a dimension",
        CALL,
        "prod([shape[d] for d in dims if sizes[d] == 1])",
        "1.0",
        ("truth, column of a mask along a dimension",),
    ),
    Mutant(
        "mean of nothing has a gradient",
        CODEGEN,
        "divisor == 0.0 ? 0.0 : 1.0 / divisor",
        "1.0 / divisor",
        ("shield, by count",),
    ),
    Mutant(
        "value along a dimension not divided",
        CODEGEN,
        '"divisor, 1.0" if of_values',
        '"1.0, 1.0" if of_values',
        ("truth, along a dimension",),
    ),
    Mutant(
        "gradient along a dimension not divided",
        CODEGEN,
        '"elements_gradient": ("Element{grad_output}", f"map_elements{unroll}(program, groups, scale)")',
        '"elements_gradient": ("Element{grad_output}", f"map_elements{unroll}(program, groups, 1.0)")',
        ("truth, along a dimension",),
    ),
    Mutant(
        "kept dimensions in the place of reduced ones",
        ENGINE,
        "tuple(0 if d in dims else next(rest) for d in range(len(self.shape)))",
        "tuple(next(rest, 0) for d in range(len(self.shape)))",
        ("truth, along a dimension",),
    ),
    Mutant(
        "second term of the quotient rule lost",
        AUTOGRAD,
        "else evaluate(divisor)\n    return",
        "else evaluate(divisor).detach()\n    return",
        ("weights and masks",),
    ),
    # One pass
    Mutant("recomputed without grad_output", POINTWISE, "(g * scale)}", "(scale)}", ("truth", "one pass or two")),
    Mutant("stale gradient accepted", EXPECTATION, "  return stale;", "  return false;", ("truth", "one pass or two")),
    Mutant("nothing learned from a surprise", EXPECTATION, "*expected = true_grad_output;", ";", ("notes",)),
    Mutant(
        "notes compared as numbers",
        EXPECTATION,
        "__double_as_longlong(used[global_warp()]) != __double_as_longlong(true_grad_output)",
        "used[global_warp()] != true_grad_output",
        ("one pass or two",),
    ),
    Mutant(
        "note written to another warp's place",
        EXPECTATION,
        "used[global_warp()] = ",
        "used[threadIdx.x / 32] = ",
        ("truth",),
    ),
    Mutant(
        "note of another warp read",
        EXPECTATION,
        "__double_as_longlong(used[global_warp()])",
        "__double_as_longlong(used[0])",
        ("notes",),
    ),
    Mutant(
        "notes shared by two graphs",
        ENGINE,
        "found.spare[stream].pop()",
        "found.spare[stream][-1]",
        ("one pass or two",),
    ),
    Mutant("promise kept twice", AUTOGRAD, "ctx.promises.pop()", "ctx.promises[-1]", ("one pass or two",)),
    # Rows of logits
    Mutant(
        "rest of a row with its label",
        ROWS,
        "if (i == target) e[i] = Compute(0);",
        "if (i == target) e[i] += Compute(0);",
        ("rows, smoothed",),
    ),
    Mutant(
        "rest of a column with its label",
        COLUMNS,
        "if constexpr (kPlain) column.drop(labels[i], i);",
        "",
        ("rows, columns",),
    ),
    Mutant(
        "last class of a row skipped",
        ROW_VIEW,
        "thread < head + tail ?",
        "thread + 1 < head + tail ?",
        ("rows, lanes",),
    ),
    Mutant(
        "every row taken for aligned",
        ROW_VIEW,
        "head = beyond == 0 ? 0 : kLanes - beyond;",
        "head = 0;",
        ("rows, lanes",),
    ),
    Mutant(
        "no barrier behind the parts of a block",
        ROW_UNITS,
        "tell(turn);\n      __syncthreads();",
        "tell(turn);",
        ("rows, block",),
    ),
    Mutant(
        "sum not moved to a new largest logit",
        SOFTMAX,
        "part.sums.rest *= factor;",
        "",
        ("rows, block", "rows, long"),
    ),
    Mutant(
        "rest of a row on chip with its label",
        RESIDENT_ROWS,
        "[target_lane] = lowest;",
        "[target_lane] = logit;",
        ("rows, lanes", "rows, block"),
    ),
    Mutant(
        "target's gradient left as it is",
        RESIDENT_ROWS,
        "if ((kPlain || (kOnce && in_vector)) && has_target && !none) {",
        "if (false) {",
        ("rows, lanes", "rows, cluster"),
    ),
    Mutant(
        "vector brought to where it is not looked for",
        RESIDENT_ROWS,
        "stage_pack(place, from + i);",
        "stage_pack(place + blockDim.x, from + i);",
        ("rows, cluster",),
    ),
    Mutant(
        "halves of a product in one place",
        RESIDENT_ROWS,
        "place[i * half] = whole",
        "place[0] = whole",
        ("rows, capped",),
    ),
    Mutant(
        "product relative to a part of the row",
        RESIDENT_ROWS,
        "if constexpr (kOnce) part.largest = largest_of_warps(unit, part.largest, turn);",
        "",
        ("rows, capped",),
    ),
    Mutant(
        "exponentials taken for logits",
        RESIDENT_ROWS,
        "store_gradient<kExponentials>(",
        "store_gradient<false>(",
        ("rows, lanes",),
    ),
    Mutant(
        "what is wanted of each row left out",
        ROWS,
        "if (per_row == 0) return;",
        "return;",
        ("rows, lanes",),
    ),
    Mutant(
        "part of a row that stands for another",
        STREAMED_ROWS,
        "i * kWarp + threadIdx.x % kWarp, count",
        "warp * kWarp + threadIdx.x % kWarp, count",
        ("rows, streamed",),
    ),
    Mutant(
        "groups drawn by the launch before left as they are",
        ROWS,
        "if (threadIdx.x == 0) *work.drawn = 0;",
        "",
        ("rows, drawn",),
    ),
    Mutant(
        "a group drawn by one team, and taken by two",
        ROW_UNITS,
        "if (counter != nullptr && unit.leads()) drawn = atomicAdd(counter, 1u);",
        "if (counter != nullptr && unit.leads()) drawn = *counter, *counter = drawn + 1;",
        ("rows, drawn",),
    ),
    Mutant(
        "rows that follow one another cut a class too late",
        SHORT_ROWS,
        "65536u / classes + 1",
        "65536u / classes",
        ("rows, short",),
    ),
    Mutant(
        "gradients of a warp's rows stored before all are there",
        SHORT_ROWS,
        "  __device__ __forceinline__ void close() const {\n    __syncwarp();\n",
        "  __device__ __forceinline__ void close() const {\n",
        ("rows, short",),
    ),
    Mutant(
        "no barrier behind the parts of a cluster",
        ROW_UNITS,
        "      arrive_in_cluster();\n      wait_for_cluster();\n    }\n",
        "    }\n",
        ("rows, cluster",),
    ),
    Mutant(
        "parts of a cluster kept in their block",
        ROW_UNITS,
        "store_in_cluster(place + i, lane,",
        "store_in_cluster(place + i, rank(),",
        ("rows, cluster",),
    ),
    Mutant(
        "label looked for among neighbours",
        ROWS,
        "c * space.class_stride[kLogits]",
        "c",
        ("rows, gathered apart",),
    ),
    Mutant(
        "last class left without a gradient",
        ROW_GATHER,
        "c < program.space.classes;",
        "c < program.space.classes - 1;",
        ("rows, gathered", "rows, gathered apart"),
    ),
    Mutant(
        "gathered gradient of a mean not scaled",
        ROW_GATHER,
        "y.slopes.target * row_factor(scale, t.offset)",
        "y.slopes.target",
        ("rows, gathered",),
    ),
    Mutant(
        "gathered gradient without the grad_output of its row",
        ROW_GATHER,
        "static_cast<Compute>(g * scale)",
        "static_cast<Compute>(scale)",
        ("rows, gathered",),
    ),
    Mutant(
        "gradient of labels in gathered rows that do not count",
        ROW_GATHER,
        "t.counts && c == t.label ? slope",
        "c == t.label ? slope",
        ("rows, gathered and left out",),
    ),
    Mutant(
        "direction looked for where the logit lies",
        ROW_SECOND,
        "directions + offset[kDirections], stride",
        "directions + offset[kLogits], stride",
        ("rows, second", "rows, second, apart"),
    ),
    Mutant(
        "directions taken for neighbours",
        ROW_SECOND,
        "directions + classes * direction_step",
        "directions + classes",
        ("rows, second",),
    ),
    Mutant(
        "leaders among equal logits that differ from lane to lane",
        ROW_SECOND,
        "  if (x.value == y.value) return {value, larger(x.along, y.along)};\n",
        "",
        ("rows, second, equal",),
    ),
    Mutant(
        "label among equal logits that does not move",
        SOFTMAX,
        "leads ? e - Compute(1) : e",
        "leads ? Compute(0) : e",
        ("rows, second, equal",),
    ),
    Mutant(
        "target that moves as the logits do",
        TERM_SECOND,
        "Base::target_step(), target_directions,",
        "Base::target_step(), directions,",
        ("terms, second",),
    ),
    Mutant(
        "leader among equal logits that moves otherwise",
        ROW_TERMS,
        "leader = same(z[i], largest) ? i : leader;",
        "leader = z[i] == largest ? i : leader;",
        ("terms, second, equal",),
    ),
    Mutant(
        "complement of another one of equal logits",
        ROW_TERMS,
        "return same(z, largest) ? rest",
        "return z == largest ? rest",
        ("terms, second, equal",),
    ),
    Mutant(
        "rows counted without their weights",
        ROWS,
        "return t.weight;",
        "return t.counts ? Compute(1) : Compute(0);",
        ("rows, weighted",),
    ),
    Mutant(
        "number of classes taken for a class",
        ROWS,
        "t.label >= space.classes",
        "t.label > space.classes",
        ("rows, labels",),
    ),
    Mutant(
        "rows that do not count scaled",
        ROWS,
        "if (slopes.none()) return;",
        "",
        ("rows, left out",),
    ),
    # Rows with a target per class
    Mutant(
        "largest logit among the others",
        ROW_TERMS,
        "leader = same(z[i], largest) ? i : leader;",
        "leader = -1;",
        ("terms, lanes",),
    ),
    Mutant(
        "largest logit lost where another one leads",
        ROW_TERMS,
        "(part.rest + Compute(1)) * fraction(",
        "part.rest * fraction(",
        ("terms, lanes", "terms, long"),
    ),
    Mutant(
        "every lane with the largest logit leads",
        ROW_TERMS,
        "leads ? part.rest : absorbed",
        "part.largest == largest ? part.rest : absorbed",
        ("terms, equal",),
    ),
    Mutant(
        "what the largest probability falls short of 1 by, by subtraction",
        ROW_TERMS,
        "return same(z, largest) ? rest : Compute(1) - p;",
        "return Compute(1) - p;",
        ("terms, sure",),
    ),
    Mutant(
        "teacher's gradient without what the others have of it",
        ROW_TERMS,
        "row.sums.by_q, Compute(0))",
        "of_t, Compute(0))",
        ("terms, lanes",),
    ),
    Mutant(
        "gradient without the penalty's",
        ROW_TERMS,
        "((sum - by_log) - slope)",
        "(sum - by_log)",
        ("terms, everything",),
    ),
    Mutant(
        "targets of the row before",
        RESIDENT_TERMS,
        "    stage_pack(at.t, next_t + v);\n",
        "    if (v == 0) stage_pack(at.t, next_t + v);\n",
        ("terms, block", "terms, cluster"),
    ),
    Mutant(
        "long rows without their targets",
        LONG_TERMS,
        "if constexpr (F::kReadsTargets) of_t[k]",
        "if (!F::kReadsTargets) of_t[k]",
        ("terms, long",),
    ),
    Mutant(
        "targets of a column where its logits are",
        TERM_COLUMNS,
        "return whole(staged_t(c));",
        "return whole(staged_t(0));",
        ("terms, columns",),
    ),
    Mutant(
        "stale gradient of rows accepted",
        ROW_UNITS,
        "__double_as_longlong(note) != __double_as_longlong(true_grad_output)",
        "false",
        ("rows, lanes", "rows, one pass or two"),
    ),
)

#: Accesses outside of what was allocated, which only a build with AddressSanitizer notices for certain.
OUTSIDE: tuple[Mutant, ...] = (
    Mutant(
        "last vector taken for a whole one",
        LAYOUT,
        "(vector + 1) * kLanes <= elements",
        "vector * kLanes <= elements",
        ("truth",),
    ),
    Mutant(
        "room for the notes of all warps but one",
        ENGINE,
        "self.warps = self.blocks * self.threads // launch.WARP",
        "self.warps = self.blocks * self.threads // launch.WARP - 1",
        ("truth",),
    ),
)
