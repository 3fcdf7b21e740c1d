"""Reasons why some cases of the section ``cliffs`` miss a bar, each with the measurement that shows it."""

from __future__ import annotations


def _faster_copy(h200: float, limit: float, h100: float) -> str:
    """The reason for a case whose bar an H100 meets but an H200 misses: it copies faster, but computes no faster."""
    return (
        f"An H200's copy is 1.4 times as fast as an H100's, its arithmetic is not: {h200:g} ms on an H200; {limit:g} "
        f"ms would meet the bar; an H100 takes {h100:g} ms and meets it"
    )


#: Reasons by substrings of a case's title, all of which must occur in it; a newline stands for its end. Each text
#: names its cards (H100 is the 80 GB HBM3); times are those of the case's mode. docs/performance/ has the tables.
REASONS: dict[tuple[str, ...], str] = {
    ("options", "671088x100", "forward+backward, softcap"): (
        "Both passes evaluate each capped logit, some 30 instructions, from shared memory: 0.138 ms on an H100; 0.169 "
        "ms with 100 products in 168 registers per lane, which is 100 KB of code; 0.335 ms with each row shared by "
        "several lanes"
    ),
    ("options", "671088x100", "softcap=30.0 gamma"): (
        "Both passes evaluate each capped logit and load its weight: 0.186 ms on an H100; 0.404 ms in 255 registers "
        "per lane, which spill; 0.434 ms with each row shared by several lanes"
    ),
    ("options", "8192x32000", "forward+backward, softcap"): (
        "Arithmetic of the softcap, which both passes compute: 0.399 ms on an H100, which meets the bar there; 0.427 "
        "ms with 4-byte products in shared memory, so that two blocks share a row"
    ),
    ("options", "8192x32000", "softcap=30.0 gamma"): (
        "Twice the arithmetic of the softcap alone, plus weights: 0.521 ms on an H100, which meets the bar there; "
        "0.618 ms with three blocks per SM, before the shorter polynomial; 0.886 ms with rows in registers"
    ),
    ("classes apart", "distillation_loss"): (
        "Tiled copies around the kernel for contiguous rows: 0.399 ms on an H200, 0.432 ms before four blocks shared a "
        "row. Three tiled copies (both operands and the gradient) take 0.067 ms each, as fast as a plain copy. "
        "16-byte vectors on both sides of the copies gained nothing"
    ),
    ("classes apart", "1024x32000", "target=probabilities"): (
        "Copies around the kernel for contiguous rows: 0.265 ms on an H200, 0.277 ms before four blocks shared a row. "
        "Copies of the logits and of their gradient take 0.067 ms each, as fast as a plain copy"
    ),
    ("classes apart", "bfloat16 1024x32000 1024, forward+backward"): (
        "The logits are read twice, 1.5 times the counted traffic: 0.066 ms on an H200; 0.064 ms would meet the bar. "
        "There the sums alone take 0.029 ms and a copy 0.032 ms. An H100 takes 0.084 ms and meets the bar"
    ),
    ("classes apart", "bfloat16 128x262144"): (
        "The logits are read twice, 1.5 times the counted traffic: 0.0718 ms on an H200; 0.0699 ms would meet the bar"
    ),
    ("classes apart", "bfloat16 4096x4096"): (
        "Phases do not overlap: clusters of seven blocks, which exchange their sums, take 64 tiles in two waves. 0.045 "
        "ms on an H200; 0.047 ms with clusters of eight in three waves; 0.050 ms with clusters of six; 0.059 to 0.072 "
        "ms with tiles of half as many rows"
    ),
    ("classes apart", "step 3, offset 1"): (
        "Only every third float of a memory sector is needed: a bare kernel that reads every third "
        "float and writes it takes 0.349 ms on an H100, as long as two copies of the counted traffic"
    ),
    ("dense targets", "8192x32000", "beta=0.5"): (
        "Bound by instructions: for eight classes of both operands 27 for the maxima, 81 for the exponentials, 365 for "
        "the sums of the mixture, 104 for gradients, and 113 of the row as a whole, which need 0.68 ms to issue at "
        "1.98 GHz. 0.894 ms on an H200, with an instruction issued in 78 % of the cycles; 1.12 ms before dh/dp took "
        "the place of the teacher's logits; 0.49 ms would meet the bar"
    ),
    ("dense targets", "2048x128256", "beta=0.5"): (
        "Bound by instructions, as rows of 32000 classes are: 0.983 ms on an H200; 1.10 ms with dh/dp only in the "
        "window of a row, which holds a quarter of it, and 1.19 ms without it; 0.50 ms would meet the bar"
    ),
    ("dense targets", "beta=1.0"): (
        "Each class is evaluated twice, for the sums and for its gradient: 0.756 ms on an H200, 1.11 ms as a mixture; "
        "0.49 ms would meet the bar"
    ),
    ("dense targets, distillation_loss", "8192x18000"): (
        "Bound by instructions, as rows of 32000 classes are: 0.348 ms on an H200, 0.404 ms with twice as many "
        "threads; 0.277 ms would meet the bar"
    ),
    ("dense targets, distillation_loss", "8192x32000, forward+backward"): (
        "Bound by instructions: for eight classes of both operands 27 for the maxima, 81 for the exponentials, 282 for "
        "terms and gradients, and 100 of the row as a whole. 0.604 ms on an H200; 0.49 ms would meet the bar. With 243 "
        "instead of 282, in a longer loop, 77 % of the cycles issued an instruction, and it took as long"
    ),
    ("dense targets, distillation_loss", "4096x50257"): (
        "Bound by instructions, as rows of 32000 classes are, and rows begin between vectors: 0.540 ms on an H200, "
        "0.682 ms before a window of each row was held on chip; 0.39 ms would meet the bar"
    ),
    ("dense targets, distillation_loss", "2048x128256"): (
        "Bound by instructions, as rows of 32000 classes are: 0.669 ms on an H200, 0.972 ms before a window of each "
        "row was held on chip; 0.50 ms would meet the bar"
    ),
    ("dense targets, kl_div_with_logits bfloat16", "4096x50257"): (
        "Two blocks hold 128 of the 201 KB of a row and read the rest twice, 1.24 times the traffic, and rows begin "
        "between vectors: 0.395 ms on an H200; 0.390 ms would meet the bar; 0.430 ms with four blocks, which hold all "
        "of it; 0.481 ms before"
    ),
    ("dense targets, kl_div_with_logits bfloat16", "2048x128256"): (
        "Four blocks hold half of a row and read the rest twice, 1.33 times the traffic: 0.505 ms on an H200; 0.495 ms "
        "would meet the bar; 0.540 ms with eight blocks, which hold all of it, but whose warps spend 3.2 of 9.2 cycles "
        "per instruction at barriers; 0.678 ms before"
    ),
    ("dense targets, cross_entropy bfloat16 1024x256000",): (
        "Eight blocks hold half of a row and read the rest twice, 1.33 times the traffic: 0.533 ms on an H200; 0.492 "
        "ms would meet the bar; 0.704 ms before"
    ),
    ("dense targets, cross_entropy float32 1024x128256",): (
        "Eight blocks hold half of a row and read the rest twice: 0.495 ms on an H200; 0.493 ms would meet the bar; "
        "0.654 ms before"
    ),
    ("dense targets, kl_div_with_logits bfloat16 524288x128",): (
        "Fixed cost of a row: in rows of 512 classes a warp issues 335 instructions per group of rows beside 224 per "
        "vector of eight classes. 0.152 ms on an H200, 0.224 ms with one vector per lane instead of four; 0.127 ms "
        "would meet the bar"
    ),
    ("dense targets, cross_entropy bfloat16 335544x200",): (
        "Fixed cost of a row, as for kl_div_with_logits of 128 classes: 0.167 ms on an H200, 0.215 ms with 16 lanes "
        "per row instead of four; 0.130 ms would meet the bar"
    ),
    ("dense targets, distillation_loss bfloat16 524288x128",): (
        "Instructions: in rows of 512 classes 413 of a warp per group of rows, and 396 per vector of eight classes. "
        "0.200 ms on an H200, 0.282 ms with one vector per lane instead of four; 0.127 ms would meet the bar"
    ),
    ("dense targets, distillation_loss float32 262144x256",): (
        "Instructions, in 96 registers, which leave room for 16 warps per SM: 0.347 ms on an H200, 0.431 ms with "
        "leaders evaluated one after another; 0.343 ms with 80 registers, which makes 4096 rows 1.19 times as slow; "
        "0.252 ms would meet the bar"
    ),
    ("dense targets, kl_div_with_logits bfloat16", "8192x32000"): (
        "54 instructions per class, with an instruction issued in 85 % of the cycles on an H200: 0.521 ms, and 0.543 "
        "ms with log_target. Now fewer instructions and eight vectors per thread: 0.429 and 0.449 ms on an H200, which "
        "meet the bar"
    ),
    ("dense targets, cross_entropy float32 8192x32000",): (
        "46 instructions per class need 0.36 ms to issue at 1.98 GHz. 1.016 ms on an H200 with clusters of two blocks, "
        "one block per SM; 0.985 ms would meet the bar. Now 0.839 ms with clusters of four, three blocks per SM"
    ),
    ("dense targets, cross_entropy bfloat16 65536x1024",): (
        "Occupancy: 80 registers and 8 KiB for two rows leave room for 24 warps per SM; 35 instructions per class need "
        "only 0.07 ms to issue at 1.98 GHz. On an H200 0.148 ms, then 0.144 ms, 0.136 ms with the maxima first, and "
        "0.130 ms where the largest logit takes a formula of its own only if p > 1/2; 0.169 ms with 90 registers; 64 "
        "registers spill 60 bytes"
    ),
    ("different layouts", "8191x8191"): (
        "The vector width divides neither rows nor columns. Tiles in shared memory, H200: 0.177 and 0.303 ms "
        "(bfloat16, float32), both gradients 0.342 and 0.515 ms; target copied first 0.238 and 0.405 ms, both "
        "gradients 0.409 and 0.686 ms. Other operand prefetched, or in shared memory too: 1.1 and 1.2 times as long in "
        "bfloat16 on an H100"
    ),
    ("different layouts", "bfloat16 64x512x33x31"): (
        "The number of pixels is no multiple of the vector width, so tiles go through shared memory and lanes read "
        "single elements beside them: 0.119 ms on an H200; 0.261 ms with a contiguous copy of the target. float32 "
        "takes 0.155 ms for twice the bytes"
    ),
    ("different layouts", "bfloat16 300x111849"): (
        "The row length is no multiple of the vector width, so tiles go through shared memory and lanes read single "
        "elements beside them: 0.120 ms on an H200; 0.294 ms with a contiguous copy of the target"
    ),
    ("broadcast gradients, mse_loss float32 111849x300 111849x1",): (
        "The strips that would sum the other gradient fix the order of additions even where that gradient is not "
        "requested: 0.115 ms on an H200; 0.113 ms would meet the bar. bfloat16, which has no strips, takes 0.045 ms"
    ),
    ("broadcast gradients, mse_loss bfloat16 5793x5793 5793x1", "all gradients"): (
        "The row length is no multiple of the vector width, so the row sums are a separate pass: 0.080 ms on an H200, "
        "of which the kernel of value and gradient takes 0.035 ms and the kernel of the sums 0.033 ms; 0.081 ms with "
        "strips in one kernel"
    ),
    ("broadcast gradients, mse_loss bfloat16 5793x5793 1x5793", "all gradients"): (
        "Register pressure: the sums of eight columns per lane leave registers for 16 warps per SM. 0.064 ms on an "
        "H200; 0.061 ms would meet the bar; 0.074 ms without a prefetch; 0.120 ms with the sums in a separate pass"
    ),
    ("broadcast gradients, mse_loss bfloat16 1000003x33 1x33",): (
        "The strips of both gradients fix the order of additions even where only one gradient is requested: on an H200 "
        "0.063 ms for one gradient and 0.073 ms for both. Without strips the kernel takes 0.042 ms for one gradient, "
        "but both take 0.115 ms"
    ),
    ("broadcast gradients, mse_loss float32 1000003x33 1000003x1",): (
        "The sums of short rows are a separate pass: 0.156 ms on an H200; 0.222 ms if they are read element by element"
    ),
    ("broadcast gradients, mse_loss bfloat16 1000003x33 1000003x1",): (
        "The row length is no multiple of the vector width, so the row sums are a separate pass, and one of the five "
        "vectors of a row holds a single element: 0.096 ms on an H200, of which the kernel of value and gradient takes "
        "0.036 ms and the kernel of the sums 0.049 ms"
    ),
    ("broadcast gradients, mse_loss bfloat16 5x1048576x7 1x1048576x1",): (
        "Rows of seven elements: 0.126 ms on an H200, of which the kernel of value and gradient, which gathers the "
        "target element by element, takes 0.062 ms and the kernel of the sums 0.053 ms"
    ),
    ("broadcast gradients, binary_cross_entropy_with_logits bfloat16 5793x5793 5793x1",): (
        "The row length is no multiple of the vector width, so each of the eight elements of a vector is tested for "
        "membership in the row: 0.093 ms on an H200; 0.097 ms without a prefetch; 0.129 ms with the sums in a separate "
        "pass, which computes the loss twice"
    ),
    ("nll_loss, nll_loss", "float32 6710886x10"): (
        "A sector of 32 bytes is read for the 4 bytes at each label: a bare kernel that reads the labels and their "
        "elements and writes zeros takes 0.208 to 0.214 ms on an H100"
    ),
    ("nll_loss, nll_loss", "bfloat16 6710886x10"): (
        "A sector of 32 bytes is read for the 2 bytes at each label: a bare kernel that reads the labels and their "
        "elements and writes zeros takes 0.117 to 0.120 ms on an H100"
    ),
    ("nll_loss, nll_loss", "8x19x512x512"): (
        "A sector of 32 bytes is read for the 4 bytes at each label: a bare kernel that reads the labels and their "
        "elements and writes zeros takes 0.104 to 0.107 ms on an H100"
    ),
    ("nll_loss, nll_loss", "67108x1000", "none"): (
        "Runs at 0.76 of copy bandwidth, above that bar. On an H100: zeros filled before the labels' elements are "
        "written 0.109 ms; eager 0.112 ms; torch's zero fill, the scatter after it and everything else 0.114 ms; "
        "gradients written in tiles 0.120 to 0.125 ms"
    ),
    ("forward, cross_entropy", "65536x1024"): (
        "A bare kernel of the same design, without options, sum and checks of labels, already takes 0.050 ms "
        "(bfloat16) and 0.090 ms (float32) on an H100, and autograd's launches add 0.005 ms: 0.059 and 0.107 ms in "
        "all; 0.069 and 0.119 ms with rows in registers"
    ),
    ("broadcast gradients, binary_cross_entropy bfloat16 8192x8192 8192",): (
        "51 instructions and three special functions per element, including the derivative by the target and its sum: "
        "0.155 ms on an H100; 0.247 ms with two vectors in flight, before a polynomial computed the odds"
    ),
    ("images", "1x1000x128x128", "order 0x2x3x1"): (
        "16384 short rows: torch's fill, the check and the gaps between launches take about 0.006 of 0.039 ms on an "
        "H100, where a copy takes 0.021 ms; without them the case would reach 0.64 of copy bandwidth"
    ),
    ("images", "1x1000x128x128"): (
        "1000 classes per pixel in clusters of two blocks, 198 of which run at once. On an H200, 256 tiles (bfloat16) "
        "take two waves, 0.029 of 0.037 ms; 512 tiles (float32) take three waves, 0.048 of 0.057 ms. Other tile shapes "
        "take 0.040 to 0.075 ms and 0.065 to 0.068 ms"
    ),
    ("heavy arithmetic, js_div bfloat16",): (
        "Issue-bound: an H200 issues 0.73 to 0.78 instructions per cycle and scheduler on arithmetic alone. 56 "
        "instructions per element (25 in multiply pipes, 16 in the select pipe, 4 special functions) need 0.111 ms to "
        "issue at 1.98 GHz; arithmetic alone takes 0.143 ms; 0.75 of copy bandwidth is 0.126 ms"
    ),
    ("heavy arithmetic, sigmoid_focal_loss bfloat16",): (
        "Issue-bound: an H200 issues 0.73 to 0.78 instructions per cycle and scheduler on arithmetic alone. 46 "
        "instructions per element (32 in multiply pipes, 10 in the select pipe, 2 special functions) need 0.092 ms to "
        "issue at 1.98 GHz; arithmetic alone takes 0.124 ms; loading ahead 0.142 ms; 0.75 of copy bandwidth is 0.126 ms"
    ),
    ("heavy arithmetic, asymmetric_loss bfloat16",): (
        "Issue-bound: an H200 issues 0.73 to 0.78 instructions per cycle and scheduler on arithmetic alone. 50 "
        "instructions per element (33 in multiply pipes, 4 special functions) need 0.100 ms to issue at 1.98 GHz; "
        "arithmetic alone takes 0.133 ms; loading ahead 0.150 ms; 0.75 of copy bandwidth is 0.126 ms"
    ),
    ("heavy arithmetic, generalized_cross_entropy bfloat16",): (
        "Issue-bound: an H200 issues 0.73 to 0.78 instructions per cycle and scheduler on arithmetic alone. 45 "
        "instructions per element (3 of them special functions) need 0.090 ms to issue at 1.98 GHz; arithmetic alone "
        "takes 0.117 ms; loading ahead 0.137 ms; 0.75 of copy bandwidth is 0.126 ms"
    ),
    ("unaligned rows", "8x19x512x512"): (
        "The vectors of the logits and of the gradients are aligned differently, so a lane takes four rows that are a "
        "warp apart, by single elements: 0.101 ms on an H100, where aligned rows take 0.080 ms. This is 0.79 of the "
        "aligned speed, up from 0.69"
    ),
    ("unaligned rows, cross_entropy float32 2048x32000 2048, forward+backward, input: offset 1",): (
        "An additional kernel argument made threads with 40 registers spill: 0.172 ms on an H200; 0.155 ms with the "
        "kernel before it; 0.161 ms since the spill was fixed, which meets the bar"
    ),
    ("unaligned rows", "bfloat16 8192x32000", "forward+backward, input: padding 1"): (
        "The H100 row predates the staging of logits in their own vectors: 0.457 ms, and 0.364 ms aligned, on an H100. "
        "An H200 takes 0.315 to 0.322 ms, and 0.269 to 0.271 ms aligned, which is at the bar"
    ),
    ("images, distillation_loss float32 4x60x121x121",): (
        "58564 rows are a single wave of tiles, whose blocks copy, evaluate and write in turn, by single elements, as "
        "the vector width does not divide an image: 0.050 ms on an H100; 32 images 0.302 ms, of 120 x 120 pixels 0.227 "
        "ms. With a pass less and no test per class 0.042 ms and, for 32 images, 0.208 ms on an H200"
    ),
    ("images, distillation_loss bfloat16 8x19x512x512", "none"): (
        "Two passes, each bound by its instructions: 0.277 ms on an H200. The mean, in one pass, takes 0.158 ms there; "
        "a copy takes 0.132 ms on an H100"
    ),
    ("images, kl_div_with_logits bfloat16 4x150x256x256",): _faster_copy(0.128, 0.105, 0.132),
    ("images, cross_entropy bfloat16 4x150x256x256, forward+backward, target",): _faster_copy(0.119, 0.104, 0.125),
    ("second derivatives of rows, cross_entropy bfloat16 8x19x512x512 8x512x512",): (
        "Bound by instructions: 0.212 ms on an H100; float32 takes 0.234 ms for twice the bytes"
    ),
    ("second derivatives of rows, cross_entropy bfloat16 4x150x256x256 4x256x256",): (
        "Bound by instructions: 0.198 ms on an H100, and 0.194 ms on an H200, whose copy is 1.4 times as fast"
    ),
    ("second derivatives of rows, kl_div_with_logits bfloat16 2048x32000",): (
        "The H100 row predates the kernel that computes derivatives by the logits only: 0.470 ms on an H100. An H200 "
        "takes 0.234 ms, and took 0.393 ms before"
    ),
    ("second derivatives of vectors, pearson_loss bfloat16 4194304x8",): (
        "Bound by the cost of a vector besides its eight features: 0.306 ms on an H100; float32 takes 0.331 ms for "
        "twice the bytes. An H200, whose copy is 1.4 times as fast, took 0.288 and 0.298 ms (float32), and now takes "
        "0.252 and 0.254 ms"
    ),
    ("second derivatives of vectors, ccc_loss float32 4194304x8",): (
        "Vectors and tangents were copied by tiles, and the product was copied back; now they are read in place: 0.260 "
        "ms on an H200, which meets the bar"
    ),
    ("second derivatives of vectors, ccc_loss", "4194304x8"): (
        "A vector costs more than its eight features: 0.264 ms on an H200, read in place; 0.371 ms before, with copies "
        "by tiles. float32 takes 0.260 ms for twice the bytes"
    ),
    ("second derivatives of vectors, triplet_margin_loss bfloat16",): (
        "Bound by instructions: 0.143 ms on an H100, and 0.142 ms on an H200, whose copy is 1.4 times as fast; "
        "float32, in vectors of as many elements, takes 0.124 and 0.111 ms"
    ),
    ("second derivatives of vectors, pearson_loss bfloat16 4x4194304",): (
        "Bound by instructions: 0.113 ms on an H100, and 0.105 ms on an H200, whose copy is 1.4 times as fast"
    ),
    ("second derivatives of vectors, pearson_loss bfloat16 65536x256",): _faster_copy(0.108, 0.086, 0.109),
    ("second derivatives of vectors, cosine_loss float32",): (
        "Both vectors and the tangent are copied by tiles, and the product is copied back: 0.166 ms on an H200; 0.161 "
        "ms would meet the bar; an H100 takes 0.198 ms and meets it"
    ),
    ("second derivatives of boxes, complete_box_iou_loss bfloat16",): (
        "Bound by instructions: 0.113 ms on an H100, and 0.111 ms on an H200, whose copy is 1.4 times as fast; float32 "
        "takes 0.138 ms for twice the bytes"
    ),
    ("second derivatives of regions, dice_focal_loss",): (
        "Bound by the second derivatives of the focal loss of each class: 0.201 ms in bfloat16 and 0.224 ms in float32 "
        "on an H100; 0.195 and 0.214 ms on an H200, whose copy is 1.4 times as fast. 16 classes in bfloat16 take 0.112 "
        "and 0.110 ms"
    ),
    ("second derivatives of regions, dice_loss bfloat16 2x32x128x128x48",): (
        "Bound by the instructions of dual numbers (value and tangent): 0.636 ms on an H100, and 0.630 ms on an H200, "
        "whose copy is 1.4 times as fast; float32 takes 0.717 and 0.678 ms for twice the bytes"
    ),
    ("second derivatives of regions, dice_loss bfloat16 2x8x128x128x64",): _faster_copy(0.142, 0.141, 0.144),
    ("second derivatives, asymmetric_loss bfloat16",): (
        "Bound by instructions: 0.471 ms on an H100; on an H200, whose copy is 1.4 times as fast, 0.409 ms with four "
        "small batches per warp and 0.396 ms with eight"
    ),
    ("second derivatives, sigmoid_focal_loss bfloat16",): (
        "Bound by instructions: 0.3155 ms on an H200 with eight small batches per warp, the current choice; 0.317 ms "
        "would meet the bar; 0.322 ms with four batches"
    ),
    ("second derivatives of regions, dice_loss float32 4x16x256x256", "order"): (
        "Voxels of different samples are interleaved, so the image and its tangent are read from copies and the "
        "product is copied back: 0.076 ms on an H100, where twice as many logits take 0.073 ms without copies"
    ),
    ("second derivatives of regions, dice_loss bfloat16", "order"): _faster_copy(0.332, 0.259, 0.339),
    ("different layouts, binary_cross_entropy_with_logits",): _faster_copy(0.195, 0.193, 0.211),
    ("broadcast gradients, binary_cross_entropy_with_logits bfloat16 64x1024x1024",): _faster_copy(0.136, 0.108, 0.143),
    ("broadcast gradients, binary_cross_entropy_with_logits float32",): _faster_copy(0.224, 0.212, 0.241),
    ("broadcast gradients, binary_cross_entropy_with_logits bfloat16 8192x8192 8192,",): _faster_copy(
        0.135, 0.108, 0.141
    ),
    ("broadcast gradients, binary_cross_entropy_with_logits bfloat16 8192x8192 8192x1",): _faster_copy(
        0.122, 0.108, 0.138
    ),
    ("broadcast gradients, binary_cross_entropy_with_logits bfloat16 8192x8192 ,",): _faster_copy(0.111, 0.107, 0.119),
    ("classes apart", "bfloat16 2048x32000", "step 2"): _faster_copy(0.131, 0.126, 0.151),
    ("unreduced rows, cross_entropy bfloat16 6710886x10",): _faster_copy(0.200, 0.186, 0.228),
    ("unreduced rows, cross_entropy bfloat16 67108x1000",): _faster_copy(0.144, 0.142, 0.173),
    ("unreduced rows, cross_entropy bfloat16 8x32000x256",): _faster_copy(0.174, 0.170, 0.209),
    ("images, cross_entropy float32 4x150x256x256", "order"): _faster_copy(0.112, 0.109, 0.136),
    ("images, cross_entropy bfloat16 4x150x256x256 4x256x256, forward+backward\n",): _faster_copy(
        0.0719, 0.0709, 0.0807
    ),
    ("images, cross_entropy bfloat16 2x4x128x128x128", "order"): _faster_copy(0.0492, 0.0470, 0.0534),
    ("images, cross_entropy float32 8x21x513x513",): _faster_copy(0.1294, 0.1293, 0.162),
    ("images, cross_entropy bfloat16 8x21x513x513",): _faster_copy(0.0931, 0.0923, 0.103),
    ("images, cross_entropy bfloat16 8x19x512x512", "weight=True"): _faster_copy(0.0847, 0.0840, 0.0960),
    ("classes apart", "float32 1000x32001"): (
        "The logits are read twice, 1.5 times the counted traffic, and each class begins within a line of 128 bytes: "
        "0.135 ms on an H200; 0.128 ms would meet the bar; 0.139 ms with tiles of 256 rows. 1024 x 32000 takes 0.111 ms"
    ),
    ("classes apart", "bfloat16 1000x32001"): (
        "The logits are read twice, 1.5 times the counted traffic, and each class begins within a sector: 0.081 ms on "
        "an H200; 0.069 ms would meet the bar; 0.083 ms with tiles of 256 rows. 1024 x 32000 takes 0.068 ms"
    ),
    ("classes apart", "999x32000"): (
        "The number of rows is no multiple of the vector width, so each thread reads single elements, and classes "
        "begin within sectors: 0.168 ms in float32 and 0.108 ms in bfloat16 on an H200; 0.263 and 0.178 ms with tiles "
        "of 32 rows"
    ),
    ("images", "4x150x257x257"): (
        "Tiles end within sectors, which two blocks write in part: 0.121 ms in float32 and 0.083 ms in bfloat16 on an "
        "H200, and 0.101 and 0.070 ms with 256 x 256 pixels; 0.130 and 0.125 ms with vectors of 16 bytes. A bare "
        "kernel that writes 131 MB takes 0.050 ms in pieces of 248 bytes that end within sectors, 0.037 ms if they do "
        "not"
    ),
    ("images", "4x64x355x353"): (
        "The number of pixels is no multiple of the vector width, so lanes take pairs of rows: 0.068 ms on an H200; "
        "0.065 ms would meet the bar; 0.096 ms with single elements; 0.130 ms with 16-byte words through shared memory"
    ),
    ("images", "bfloat16 8x2x1024x1024", "ignore_index=255"): (
        "An eighth of the labels is ignored, so most lanes have a row without a gradient, and the divisor takes a "
        "separate launch: 0.075 ms on an H200; 0.049 ms where no label may be ignored"
    ),
    ("images", "float32 2x4x128x128x128", "order 0x2x3x4x1"): (
        "0.0583 ms on an H200, and 0.0568 ms in another run; 0.0577 ms would meet the bar; an H100 takes 0.0691 ms and "
        "meets it"
    ),
    ("unaligned rows", "300000x100"): (
        "Gaps are read with the rows, 1.14 times the traffic, and lanes read single elements: 0.070 ms on an H200; "
        "0.058 ms would meet the bar. 262144 rows take 0.064 ms, and 0.079 ms if lanes share a row"
    ),
    ("unaligned rows", "131328x511"): (
        "16 lanes share a row of 63 vectors, with up to 14 single elements at its ends: 0.102 ms on an H200; 0.098 ms "
        "would meet the bar. Half as many rows take 0.062 ms, 0.068 ms before"
    ),
    ("options", "float32 65536x1024", "softcap=30.0 gamma"): _faster_copy(0.237, 0.227, 0.249),
    ("options", "671088x100", "label_smoothing=0.1"): _faster_copy(0.116, 0.107, 0.122),
    ("forward, cross_entropy bfloat16 8192x20480",): (
        "0.099 ms on an H200, 0.117 ms with twice as many threads; 0.093 ms would meet the bar"
    ),
    ("forward, cross_entropy bfloat16 8192x32000",): _faster_copy(0.147, 0.135, 0.181),
    ("forward, cross_entropy float32 32768x4096",): (
        "0.155 ms on an H200; 0.148 ms would meet the bar; in other runs 0.172 ms with 384 threads per SM instead of "
        "512, and 0.157 ms with rows in shared memory. An H100 takes 0.182 ms, and 0.190 ms with 384 threads"
    ),
    ("log-probabilities, token_log_probs bfloat16 65536x1024",): (
        "0.141 ms on an H200; 0.137 ms would meet the bar; 0.174 ms with the kernels for entropies"
    ),
}


def explains(parts: tuple[str, ...], title: str) -> bool:
    """True if a title contains all these substrings."""
    return all(x in f"{title}\n" for x in parts)


def reason(title: str) -> str:
    """The reason for the case with this title; empty if there is none."""
    return next((text for parts, text in REASONS.items() if explains(parts, title)), "")
