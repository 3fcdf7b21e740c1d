"""The seeded defects that ``tests/test_mutations.py`` puts into the library, each with the checks that must notice it.

Each stands for a class of mistakes. The checks are names in the test's battery. Some defects are not in the list
because no test on the CPU can tell them from the correct program:

- a missing ``__syncwarp`` before shuffles, which wait for the lanes that they name, here as on GPUs since 7.0;
- a 32-bit element index, which needs 2^31 elements to be wrong: ``tests/test_large.py`` has them, on a GPU;
- ``__ldg`` where ``__ldcg`` is needed: the host has no cache that could be stale.
"""

from tools.mutations import Mutant

POINTWISE = "kernels/pointwise/pointwise.cuh"
BROADCAST = "kernels/pointwise/sum_over.cuh"
REDUCE = "kernels/core/reduce.cuh"
LAYOUT = "kernels/core/layout.cuh"
SPECULATIVE_GRAD = "kernels/core/speculative_grad.cuh"
ROWS = "kernels/softmax/rows.cuh"
ROW_GROUPS = "kernels/softmax/row_groups.cuh"
ROW_VECTORS = "kernels/softmax/row_vectors.cuh"
RESIDENT_ROWS = "kernels/softmax/resident_rows.cuh"
LABEL_ONLY_ROWS = "kernels/softmax/label_only_rows.cuh"
COUNT_ROWS = "kernels/softmax/count_rows.cuh"
DENSE_ROWS = "kernels/softmax/dense_rows.cuh"
CHUNKS = "kernels/linear_softmax/chunks.cuh"
LOG_PROBS = "kernels/log_probs/log_probs.cuh"
MARGIN = "kernels/row_margin/row_margin.cuh"
STATISTICS = "kernels/row_statistics/row_statistics.cuh"
VOXELS = "kernels/regions/voxels.cuh"
REGION_SUMS = "kernels/regions/sums.cuh"
GROUPS = "kernels/regions/groups.cuh"
REGIONS = "kernels/regions/regions.cuh"
SEQUENCES = "kernels/sequence/sequences.cuh"
RECURSION = "kernels/sequence/recursion.cuh"
FRAMES = "kernels/sequence/frames.cuh"
ALIGNMENT = "kernels/sequence/alignment.cuh"
LAYOUT_RULES = "cupylosses/engines/pointwise/layout.py"
STRIDES = "cupylosses/engines/strides.py"
PLAN = "cupylosses/engines/pointwise/plan.py"
DEVICE = "cupylosses/engines/device.py"

BARRIER = r"__syncthreads\(\);"

MUTANTS: tuple[Mutant, ...] = (
    # The visited elements.
    Mutant("tail off by one", POINTWISE, "visit_partial", "i < present", "i + 1 < present", ("truth",)),
    Mutant("a warp takes one chunk only", POINTWISE, "sweep", r"chunk \+= warps", "chunk += chunks", ("any order",)),
    Mutant("row not carried", LAYOUT, "advance", r"\+\+cursor\.row;", "", ("truth, strided",)),
    Mutant(
        "last slice lost",
        LAYOUT_RULES,
        "_shared_sums",
        r"slices=-\(-x\.length // length\)",
        "slices=x.length // length",
        ("truth, row, elements",),
    ),
    Mutant("last partial sum lost", POINTWISE, "combine_sums", r"step < how\.terms", r"\g<0> - 1", ("truth, row",)),
    Mutant(
        "row added by half of the lanes", POINTWISE, "end_row", "int offset = 1", "int offset = 2", ("truth, column",)
    ),
    Mutant("micro-tile transposed", POINTWISE, "TileVectors", r"i / kA : kAlong", "i % kA : kAlong", ("truth, mixed",)),
    # Their addresses.
    Mutant("inner stride ignored", LAYOUT, "offset", r"element \* inner_stride\[\w+\]", "element", ("truth, strided",)),
    Mutant(
        "outer strides swapped",
        LAYOUT,
        "offsets",
        r"coordinate \* stride\[s\]\[d\]",
        "coordinate * stride[s][rank - 1 - d]",
        ("truth, eight dimensions",),
    ),
    Mutant(
        "row offset of 32 bits",
        LAYOUT,
        "offsets",
        r"index \* stride\[s\]\[0\]",
        r"static_cast<int>(\g<0>)",
        ("beyond 32 bits",),
    ),
    Mutant(
        "broadcast axis swapped",
        STRIDES,
        "broadcast_strides",
        r"return \(0,\) \* lead \+ (.*)",
        r"return \1 + (0,) * lead",
        ("truth, row",),
    ),
    Mutant(
        "vectors at any address",
        LAYOUT_RULES,
        "_aligned",
        r"stream\.misalignment % word == 0",
        "True",
        ("truth, misaligned",),
    ),
    Mutant(
        "halves in the wrong order",
        "kernels/core/types.cuh",
        "narrow_in_pairs",
        r"x\[i\](.*?)x\[i \+ 1\]",
        r"x[i + 1]\1x[i]",
        ("truth, bfloat16",),
    ),
    # Sums, and threads that must wait for one another.
    Mutant("half a warp's lanes not added", REDUCE, "warp_sum", "offset = 16", "offset = 8", ("truth",)),
    Mutant("no barrier between warps' sums", REDUCE, "block_sum", BARRIER, "", ("truth",)),
    Mutant(
        "no fence around the ticket",
        REDUCE,
        "arrive_last",
        "increment_and_synchronize",
        "atomicInc",
        ("truth",),
        races=True,
    ),
    Mutant(
        "ticket not 0 again",
        REDUCE,
        "arrive_last",
        r"(increment_and_synchronize\(ticket), [^)]*\)",
        r"\1, 0xffffffffu)",
        ("repeats",),
    ),
    # Gradients
    Mutant(
        "the first operand's gradient for all",
        POINTWISE,
        "set_gradient",
        r"tangent_or_zero\(y, slot\)",
        "tangent_or_zero(y, 0)",
        ("truth",),
    ),
    Mutant("NaN rule dropped", POINTWISE, "set_gradient", r"&& y\.value != y\.value;", "&& false;", ("NaN",)),
    Mutant("gradient of a mean not divided", DEVICE, "Divisor", "1.0 / number", "1.0", ("truth",)),
    Mutant(
        "grad_output of each element ignored",
        BROADCAST,
        "evaluate",
        r"if constexpr \(kScaledPerElement\) return [^;]*;",
        "",
        ("truth, row, elements",),
    ),
    # Weights and masks
    Mutant(
        "weight of 0 multiplied, not selected",
        "kernels/primitives/math.cuh",
        "weighted",
        r"y\.value = unused \? T\(0\) :",
        "y.value =",
        ("shield",),
    ),
    Mutant(
        "mask not counted",
        "cupylosses/engines/pointwise/reduction.py",
        "resolve",
        "counts=masked",
        "counts=False",
        ("weights and masks, by count",),
    ),
    Mutant(
        "second term of the quotient rule lost",
        "cupylosses/engines/pointwise/engine.py",
        "below",
        r"else values\[1\]",
        r"\g<0>.detach()",
        ("weights and masks",),
    ),
    # One pass
    Mutant(
        "stale gradient accepted",
        SPECULATIVE_GRAD,
        "grad_scale_is_stale",
        "return stale",
        "return false",
        ("one pass or two",),
    ),
    Mutant(
        "grad_output recorded in another warp's slot",
        SPECULATIVE_GRAD,
        "factor",
        r"used_grad_output\[global_warp\(\)\] =",
        "used_grad_output[threadIdx.x / 32] =",
        ("truth",),
        races=True,
    ),
    Mutant(
        "promise kept twice",
        "cupylosses/backends/torch/autograd.py",
        "_speculative",
        r"speculations\.pop\(\)",
        "speculations[-1]",
        ("one pass or two",),
    ),
    # Rows of logits
    Mutant(
        "last class of a row skipped",
        ROW_VECTORS,
        "edge_class",
        r"thread < head \+ tail",
        "thread + 1 < head + tail",
        ("rows, subwarp",),
    ),
    Mutant(
        "every row taken for aligned",
        ROW_VECTORS,
        "RowVectors",
        "head = misaligned == 0 [^;]*;",
        "head = 0;",
        ("rows, subwarp",),
    ),
    Mutant("no barrier behind the parts of a block", ROW_GROUPS, "all_gather", BARRIER, "", ("rows, block",)),
    Mutant(
        "parts of a cluster kept in their block",
        ROW_GROUPS,
        "all_gather",
        r"(store_dsmem\(slot[^,]*), lane,",
        r"\1, block_rank(),",
        ("rows, cluster",),
    ),
    Mutant(
        "a chunk claimed by one worker, and taken by two",
        ROW_GROUPS,
        "claim",
        r"claimed = atomicAdd\(counter, 1u\)",
        "claimed = *counter, *counter = claimed + 1",
        ("rows, claimed",),
        races=True,
    ),
    Mutant(
        "sum not moved to a new largest logit",
        "kernels/softmax/online_softmax.cuh",
        "rescaled",
        r"return part\.exp_sum \* factor;",
        "return part.exp_sum;",
        ("rows, two_pass",),
    ),
    Mutant(
        "vector staged where nobody reads it",
        RESIDENT_ROWS,
        "visit",
        r"cp_async\(slot,",
        "cp_async(slot + blockDim.x,",
        ("rows, cluster",),
    ),
    Mutant(
        "label's logit counted among the others where warps share a row",
        "kernels/softmax/pipelined_rows.cuh",
        "is_here",
        r"kParts == 1 \|\| [^;]*;",
        "kParts == 1);",
        ("rows, pipelined",),
    ),
    Mutant(
        "sums of a chunk read before all warps have them",
        "kernels/softmax/pipelined_rows.cuh",
        "finish",
        r"__syncthreads\(\);",
        "",
        ("rows, pipelined",),
        races=True,
    ),
    Mutant(
        "rows counted without their weights", ROWS, "divisor_term", r"return t\.weight", "return 1", ("rows, weighted",)
    ),
    Mutant(
        "kernels that count labels count ignored ones",
        COUNT_ROWS,
        "self_count",
        r" && program\.is_active\(label_load\[k\]\)",
        "",
        ("rows, thread_per_row_packed",),
    ),
    Mutant(
        "number of classes taken for a class",
        ROWS,
        "validate_label",
        r"< static_cast<unsigned long long>\(space",
        "<= static_cast<unsigned long long>(space",
        ("rows, labels",),
    ),
    Mutant(
        "last class left without a gradient",
        LABEL_ONLY_ROWS,
        "store_columns",
        r"c < classes",
        r"\g<0> - 1",
        ("rows, label_only apart",),
    ),
    Mutant(
        "row cut by a tile taken for one that begins there",
        "kernels/softmax/label_only_tiles.cuh",
        "visit_tile",
        r"k == 0 \? -skipped",
        "k < 0 ? -skipped",
        ("rows, cut by tiles",),
    ),
    Mutant(
        "rows without a loss counted among the others",
        "kernels/softmax/rows.cuh",
        "store",
        r"if \(!t\.active\) \+\+inactive_rows;",
        "",
        ("rows, tallied",),
    ),
    Mutant(
        "sums of warps added as if their largest logits were equal",
        "kernels/softmax/column_tiles.cuh",
        "combined",
        r"rescale\(softmax[^;]*;",
        "",
        ("rows, column_tiles",),
    ),
    Mutant(
        "elements behind the last whole word left out",
        "kernels/softmax/packed_rows.cuh",
        "each",
        r"i < elements",
        "i < words",
        ("rows, packed",),
    ),
    Mutant(
        "rows of a tile as far apart as those of a square",
        "kernels/core/relayout.cuh",
        "relayout",
        r"unit / kAcross \* kPitch",
        "unit / kAcross * (kB + 1)",
        ("copies",),
    ),
    Mutant(
        "tangent read where the logit lies",
        "kernels/softmax/second_derivatives.cuh",
        "logits",
        r"offset\[kTangents\]",
        "offset[kLogits]",
        ("rows, second",),
    ),
    # Rows with dense targets.
    Mutant(
        "largest logit among the others",
        DENSE_ROWS,
        "add_exponentials",
        r"leads \? Compute\(0\) : e\[i\]",
        "e[i]",
        ("dense, block",),
    ),
    Mutant(
        "gradient without the penalty's",
        DENSE_ROWS,
        "SoftmaxVjp",
        r"shared\(\(sum - slope\)",
        "shared(sum",
        ("dense, everything",),
    ),
    Mutant(
        "targets of the row before",
        "kernels/softmax/resident_dense_rows.cuh",
        "refill",
        r"cp_async\(at\.t,",
        r"if (v == 0) \g<0>",
        ("dense, block",),
    ),
    # Linear layers, whose rows are computed in chunks.
    Mutant(
        "value of the last chunk alone",
        CHUNKS,
        "finish_value",
        r"total \+= shares",
        "total = shares",
        ("layers, chunks",),
    ),
    Mutant(
        "bias of the last chunk alone",
        CHUNKS,
        "add_to_bias",
        r"first != 0 \? 0\.0 : sums\[column\]",
        "0.0",
        ("layers, chunks",),
    ),
    Mutant("rescaled the other way", CHUNKS, "rescale", r"given / before", "before / given", ("layers, chunks",)),
    Mutant(
        "gradient of the logits left out of second derivatives",
        "cupylosses/engines/linear_softmax/second.py",
        "run_hvp",
        r"wanted\[1\] and 0 in self\._tangents",
        "False",
        ("layers, second",),
    ),
    Mutant(
        "tangents of the last chunk alone",
        "cupylosses/engines/linear_softmax/second.py",
        "_multiply",
        r"total if i else None",
        "None",
        ("layers, second",),
    ),
    Mutant(
        "weights without their mean",
        "kernels/linear_softmax/row_weights.cuh",
        "weigh_rows",
        r"\* scale\);",
        ");",
        ("layers, weighted",),
    ),
    # Margins of labels.
    Mutant("own class counted", MARGIN, "linear_value", r" - \(static_cast[^;]*;", ";", ("margins",)),
    Mutant("boundary active", MARGIN, "smallest_active", r": next_above\(nearest\)", ": nearest", ("margins",)),
    Mutant(
        "last label forgotten",
        MARGIN,
        "take_vectors",
        r"first \+ field >= length",
        "first + field >= length - 1",
        ("margins of lists",),
    ),
    Mutant(
        "label that is listed twice counted once",
        MARGIN,
        "list_sorted",
        r"\[k \+ 1\] \* times",
        "[k + 1]",
        ("margins of long lists",),
    ),
    # Statistics of rows.
    Mutant(
        "warps of a row but the first left out",
        STATISTICS,
        "finish",
        r"warp < kTeamWarps",
        "warp < 1",
        ("statistics",),
    ),
    Mutant(
        "no barrier before the first warp adds",
        STATISTICS,
        "finish",
        r"(\} else \{\s+)__syncthreads\(\);",
        r"\1",
        ("statistics",),
    ),
    Mutant(
        "parts of a row but the first left out",
        STATISTICS,
        "finish",
        r"offset < kParts",
        "offset < 1",
        ("statistics, parts",),
    ),
    Mutant(
        "powers not moved to a new largest component",
        STATISTICS,
        "merge",
        r"number\[1\] \* power\(number\[0\] / x\.number\[0\], exponent\)",
        "number[1]",
        ("statistics, norms",),
    ),
    Mutant(
        "equal largest components counted once",
        STATISTICS,
        "shared_part",
        r"slope / number\[1\]",
        "slope",
        ("statistics, maxima",),
    ),
    Mutant(
        "vector kept where the neighbour's is",
        STATISTICS,
        "take_one",
        r"kept_word\(vector, slot, i\)",
        "kept_word(0, slot, i)",
        ("statistics, held",),
    ),
    # Losses of regions.
    Mutant(
        "ignored voxel counted",
        VOXELS,
        "voxel_target",
        r"counts && label != program\.ignored",
        "counts || label == program.ignored",
        ("regions, ignored",),
    ),
    Mutant(
        "false positives weighed as false negatives",
        GROUPS,
        "evaluate_group",
        r"number\.alpha \* sum\[1\] \+ number\.beta \* sum\[2\]",
        "number.alpha * sum[2] + number.beta * sum[1]",
        ("regions",),
    ),
    Mutant(
        "pool forgets its last class",
        GROUPS,
        "cells",
        r"Rules::kPoolsClasses \? regions\(\) : 1",
        "Rules::kPoolsClasses ? regions() - 1 : 1",
        ("regions, pooled",),
    ),
    Mutant(
        "absent group counted",
        GROUPS,
        "evaluate_groups",
        r"Rules::kAbsent != kSkipAbsent \|\| present \|\| unknown",
        "true",
        ("regions, absent",),
    ),
    Mutant(
        "1 - p of the label as a difference",
        REGION_SUMS,
        "add_voxel",
        r"softmax\.others \* factor",
        "Compute(1) - softmax.label_e * factor",
        ("regions, confident",),
    ),
    Mutant(
        "softmax without its mean",
        REGIONS,
        "label_gradient",
        r"-\(at_label \+ mean\)",
        "-(at_label)",
        ("regions",),
    ),
    Mutant(
        "last warp left out",
        REGION_SUMS,
        "sum_in_registers",
        r"w < kSumWarps; \+\+w",
        "w < kSumWarps - 1; ++w",
        ("regions",),
    ),
    Mutant(
        "tile read before it is whole",
        REGION_SUMS,
        "sum_in_tiles",
        r"tile\[v\] = kept; \} __syncthreads\(\);",
        "tile[v] = kept; }",
        ("regions, tiles",),
    ),
    # Sequences.
    Mutant(
        "alignments that skip the blank between equal labels",
        RECURSION,
        "walk_of",
        r"walk\.skips = j > 0 && labels\[backward \? size - 1 - j : j - 1\] != label;",
        "walk.skips = j > 0;",
        ("sequences",),
    ),
    Mutant(
        "alignments that enter a blank at the meeting not counted",
        RECURSION,
        "meeting_terms",
        r"found\.of\[0\] = sum\(b, before\);",
        "found.of[0] = b;",
        ("sequences",),
    ),
    Mutant(
        "no barrier between rounds of warps",
        RECURSION,
        "take_turns",
        r"block_barrier\(\);",
        "",
        ("sequences",),
    ),
    Mutant(
        "a block behind all others that takes the first walk again",
        SEQUENCES,
        "claimed_task",
        r"if \(other >= others\) walk = atomicAdd\(claims, 1u\);",
        "if (other >= others) walk = 0;",
        ("sequences",),
    ),
    Mutant(
        "posteriors of a repeated label not added up",
        FRAMES,
        "write_short_frames",
        r"found\[i\]\[k\] \+= ",
        "found[i][k] = ",
        ("sequences",),
    ),
    Mutant(
        "posteriors of a repeated label not added up, of many classes",
        FRAMES,
        "write_long_frames",
        r"of_label \+= ",
        "of_label = ",
        ("sequences, logits",),
    ),
    Mutant(
        "posteriors that stay where classes lie otherwise in the next frame",
        FRAMES,
        "write_long_frames",
        r"moves && t > first",
        "false",
        ("sequences, logits",),
    ),
    Mutant(
        "no barrier between posteriors and what reads them",
        FRAMES,
        "write_long_frames",
        r"(all\.blank \* share\); )__syncthreads\(\);",
        r"\1",
        ("sequences, logits",),
    ),
    Mutant(
        "largest logit of all counted among the others",
        FRAMES,
        "read_frame",
        r"if \(lane != winner\) ",
        "",
        ("sequences, logits",),
    ),
    Mutant(
        "sum that keeps its scale behind a larger logit",
        FRAMES,
        "add",
        r"others \*= power\(Compute\(0\), needed - shift\);",
        "",
        ("sequences, logits",),
    ),
    Mutant("last label of a target lost", RECURSION, "walk_of", r"j < size - 1;", "j < size - 2;", ("sequences",)),
    Mutant(
        "second half that begins a frame late",
        RECURSION,
        "walk_half",
        r"sample\.frames / 2",
        "(sample.frames + kPhase - 1) / 2",
        ("sequences",),
    ),
    Mutant(
        "exponent of the wrong chunk of the other direction",
        RECURSION,
        "shared_of",
        r"f <= ",
        "f < ",
        ("sequences",),
    ),
    Mutant(
        "alignment that leaves a state at a tie",
        ALIGNMENT,
        "is_better",
        r"x > best",
        "x >= best",
        ("alignments",),
    ),
    Mutant(
        "ballots of the positions before not looked up",
        ALIGNMENT,
        "walk_back",
        r"words\[k - sample\.words\(\)\]",
        "words[k]",
        ("alignments",),
    ),
    # Log-probabilities.
    Mutant(
        "mean distance to a maximum that has moved",
        LOG_PROBS,
        "rescaled_gap",
        r" - d \* \(exp_sum \+ held\)",
        "",
        ("log-probabilities",),
    ),
    Mutant(
        "class that is left out and forgotten",
        LOG_PROBS,
        "add_exponentials",
        r"part\.held = Compute\(1\);",
        "",
        ("log-probabilities",),
    ),
    Mutant(
        "label looked for in the vector before",
        LOG_PROBS,
        "row_upstream",
        r"own >> log_threads & 63",
        "(own >> log_threads) - 1 & 63",
        ("log-probabilities",),
    ),
    Mutant(
        "label counted among the others",
        LOG_PROBS,
        "store_log_prob_gradient",
        r"rest -= of_label\[i\];",
        "",
        ("log-probabilities",),
    ),
)

#: Out-of-bounds accesses, which only a build with AddressSanitizer notices for certain.
OUTSIDE: tuple[Mutant, ...] = (
    Mutant(
        "last vector taken for a whole one",
        LAYOUT,
        "whole_batch",
        r"\(vector \+ 1\) \* kVecSize <= elements",
        "vector * kVecSize <= elements",
        ("truth",),
    ),
    Mutant(
        "room for the records of all warps but one",
        PLAN,
        "ElementLaunch",
        r"self\.warps = .*",
        r"\g<0> - 1",
        ("truth",),
    ),
)
