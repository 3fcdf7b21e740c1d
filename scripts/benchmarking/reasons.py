"""Reasons why some cases of the section ``cliffs`` miss a bar, each with the measurement that shows it."""

from __future__ import annotations


def _faster_copy(h200: float, limit: float, h100: float) -> str:
    """The reason for a case whose bar an H100 meets but an H200 misses: it copies faster, but computes no faster."""
    return (
        f"an H200 takes {h200:g}, and {limit:g} would meet the bar: its copy is 1.4 times as fast as an H100's, its "
        f"arithmetic is not; an H100 takes {h100:g} and meets the bar"
    )


#: Reasons by substrings of a case's title, all of which must occur in it; a newline stands for its end. Unless stated
#: otherwise, times are milliseconds of forward and backward on one H100 (80 GB HBM3); docs/performance/ has the tables.
REASONS: dict[tuple[str, ...], str] = {
    ("options", "671088x100", "forward+backward, softcap"): (
        "both passes evaluate each capped logit, some 30 instructions, from shared memory: 0.138; with 100 products in "
        "the 168 registers of a lane, and 100 KB of code, 0.169; a row shared by lanes 0.335"
    ),
    ("options", "671088x100", "softcap=30.0 gamma"): (
        "both passes evaluate each capped logit and load its weight: 0.186; in 255 registers of a lane, which spill, "
        "0.404; a row shared by lanes 0.434"
    ),
    ("options", "8192x32000", "forward+backward, softcap"): (
        "arithmetic of the caps, which both passes compute: 0.399, which meets the bar on an H100; with products of 4 "
        "bytes in shared memory, so that two blocks share a row, 0.427"
    ),
    ("options", "8192x32000", "softcap=30.0 gamma"): (
        "as with the cap alone, twice, and weights: 0.521, which meets the bar on an H100; with three blocks per "
        "multiprocessor, before the shorter polynomial, 0.618; rows in registers 0.886"
    ),
    ("classes apart", "distillation_loss"): (
        "kernels of an H200: the loss of contiguous rows 0.213, three copies by tiles, of both operands and the "
        "gradient, 0.067 each, as fast as a copy; vectors of 16 bytes on both sides gained nothing"
    ),
    ("classes apart", "1024x32000", "target=probabilities"): (
        "kernels of an H200: the loss of contiguous rows 0.146, copies of the logits and their gradient 0.067 each, as "
        "fast as a copy"
    ),
    ("classes apart", "bfloat16 1024x32000 1024, forward+backward"): (
        "read twice, 1.5 times the traffic that counts: an H200 takes 0.066, and 0.064 would meet the bar; the sums "
        "alone take 0.029, a copy 0.032; an H100 takes 0.084 and meets it"
    ),
    ("classes apart", "bfloat16 128x262144"): (
        "read twice, 1.5 times the traffic that counts: an H200 takes 0.0718, where 0.0699 would meet the bar"
    ),
    ("classes apart", "bfloat16 4096x4096"): (
        "clusters of seven blocks, which exchange their sums, take 64 tiles in two turns, one phase after another: "
        "an H200 takes 0.045, with clusters of eight in three turns 0.047, of six 0.050; tiles of half as many rows "
        "0.059 to 0.072"
    ),
    ("classes apart", "step 3, offset 1"): (
        "sectors of memory hold three classes, of which one is wanted: a bare kernel that reads every third float and "
        "writes it takes 0.349, two copies of what counts"
    ),
    ("dense targets", "beta=0.5"): (
        "bound by instructions: of a class 4 for the maxima, 15 for the exponentials, 49 for the sums of the mixture "
        "and 35 for its gradient, which take 0.81 to issue at 1.98 GHz; an H200 takes 1.12, 0.49 would meet the bar"
    ),
    ("dense targets, distillation_loss", "8192x32000, forward+backward"): (
        "of a class 4 instructions for maxima, 15 for the exponentials, 29 for the sums and 7 for the gradient, and "
        "four special functions: 0.43 to issue at 1.98 GHz; an H200 took 0.658, and 0.618 since the sums write the "
        "gradient, where 0.49 would meet the bar"
    ),
    ("dense targets, kl_div_with_logits bfloat16", "8192x32000"): (
        "54 instructions for a class, of which an H200 issued one in 85 % of the cycles: 0.521, and 0.543 with "
        "log_target; since then fewer, and eight vectors of a thread: 0.429 and 0.449, which meet the bar"
    ),
    ("dense targets, cross_entropy float32 8192x32000",): (
        "46 instructions for a class take 0.36 to issue at 1.98 GHz, the bar leaves 0.985: an H200 takes 1.016 with "
        "clusters of two blocks, one per multiprocessor, 1.023 with four; half as many rows 0.517, since then 0.491"
    ),
    ("dense targets, cross_entropy bfloat16 65536x1024",): (
        "35 instructions for a class take 0.07 to issue at 1.98 GHz, but 80 registers and 8 KiB for two rows leave "
        "room for 24 warps per multiprocessor: 0.148 on an H200, and 0.169 with 90 registers; 64 spill 60 bytes; since "
        "then 0.144, and 0.136 with maxima first"
    ),
    ("different layouts", "8191x8191"): (
        "no vector divides rows or columns: tiles through shared memory take 0.177 in bfloat16 and 0.303 in float32 on "
        "an H200, with both gradients 0.342 and 0.515, where a target that is copied first took 0.238 and 0.405, "
        "0.409 and 0.686; with the other operand prefetched, or in shared memory too, bfloat16 takes 1.1 and 1.2 times "
        "as long on an H100"
    ),
    ("different layouts", "bfloat16 64x512x33x31"): (
        "no vector divides the pixels, so tiles go through shared memory and lanes read single elements beside them: "
        "an H200 takes 0.119, and 0.261 with a contiguous copy of the target; float32 takes 0.155 for twice the bytes"
    ),
    ("different layouts", "bfloat16 300x111849"): (
        "no vector divides the rows, so tiles go through shared memory and lanes read single elements beside them: an "
        "H200 takes 0.120, and 0.294 with a contiguous copy of the target"
    ),
    ("broadcast gradients, mse_loss float32 111849x300 111849x1",): (
        "an H200 takes 0.115, and 0.113 would meet the bar: the strips that would add up the other gradient fix the "
        "order of additions, whether it is wanted or not; in bfloat16, without strips, it takes 0.045"
    ),
    ("broadcast gradients, mse_loss bfloat16 5793x5793 5793x1", "all gradients"): (
        "no vector divides the rows, so their sums are a pass of their own: an H200 takes 0.080, of which the kernel "
        "of value and gradient takes 0.035 and that of the sums 0.033; strips, with one kernel, 0.081"
    ),
    ("broadcast gradients, mse_loss bfloat16 5793x5793 1x5793", "all gradients"): (
        "sums of eight columns of a lane leave registers for 16 warps per multiprocessor: an H200 takes 0.064, where "
        "0.061 would meet the bar, and without a prefetch 0.074; with sums apart 0.120"
    ),
    ("broadcast gradients, mse_loss bfloat16 1000003x33 1x33",): (
        "the strips of both gradients fix the order of additions, whether both are wanted or not: an H200 takes 0.063 "
        "for one and 0.073 for both; without strips the kernel takes 0.042 for one, and both gradients 0.115"
    ),
    ("broadcast gradients, mse_loss float32 1000003x33 1000003x1",): (
        "sums of short rows are a pass of their own: an H200 takes 0.156, and 0.222 where they are read element by "
        "element"
    ),
    ("broadcast gradients, mse_loss bfloat16 1000003x33 1000003x1",): (
        "no vector divides the rows, so their sums are a pass of their own, and a vector of five in a row has one "
        "element: an H200 takes 0.096, of which the kernel of value and gradient takes 0.036 and that of the sums 0.049"
    ),
    ("broadcast gradients, mse_loss bfloat16 5x1048576x7 1x1048576x1",): (
        "rows of seven elements: an H200 takes 0.126, of which the kernel of value and gradient, which gathers the "
        "target element by element, takes 0.062 and that of the sums 0.053"
    ),
    ("broadcast gradients, binary_cross_entropy_with_logits bfloat16 5793x5793 5793x1",): (
        "no vector divides the rows, so each of the eight elements of a vector is asked whether it is in its row: an "
        "H200 takes 0.093, without a prefetch 0.097, and 0.129 with sums apart, for which the loss is computed twice"
    ),
    ("nll_loss, nll_loss", "float32 6710886x10"): (
        "a sector of 32 bytes is read for each label's 4: a bare kernel that reads labels and their elements and "
        "writes zeros takes 0.208 to 0.214"
    ),
    ("nll_loss, nll_loss", "bfloat16 6710886x10"): (
        "a sector of 32 bytes is read for each label's 2: a bare kernel that reads labels and their elements and "
        "writes zeros takes 0.117 to 0.120"
    ),
    ("nll_loss, nll_loss", "8x19x512x512"): (
        "a sector of 32 bytes is read for each label's 4: a bare kernel that reads labels and their elements and "
        "writes zeros takes 0.104 to 0.107"
    ),
    ("nll_loss, nll_loss", "67108x1000", "none"): (
        "at 0.76 of a copy's speed, above that bar; torch's fill of zeros, and its scatter behind it, take 0.114 with "
        "all else, tiles of gradients 0.120 to 0.125; zeros filled before labels are written 0.109, where eager takes "
        "0.112"
    ),
    ("forward, cross_entropy", "65536x1024"): (
        "a bare kernel of the same design, without options, sum and labels that may be wrong, takes 0.050 in bfloat16 "
        "and 0.090 in float32, and autograd launches 0.005 besides: 0.059 and 0.107; rows in registers 0.069 and 0.119"
    ),
    ("broadcast gradients, binary_cross_entropy bfloat16 8192x8192 8192",): (
        "51 instructions and three special functions per element with the derivative by the target and its sum: 0.155; "
        "with two vectors in flight, before its odds were a polynomial, 0.247"
    ),
    ("images", "1x1000x128x128", "order 0x2x3x1"): (
        "16384 short rows: torch's fill, the check and the gaps between launches are about 0.006 of 0.039, where a "
        "copy takes 0.021; without them this would be 0.64 of its speed"
    ),
    ("images", "1x1000x128x128"): (
        "1000 classes of a pixel in clusters of two blocks, of which 198 run at once: an H200 takes 256 tiles in "
        "bfloat16 in two turns and 512 in float32 in three, 0.029 and 0.048 of 0.037 and 0.057; other shapes of "
        "tiles 0.040 to 0.075 and 0.065 to 0.068"
    ),
    ("heavy arithmetic, js_div bfloat16",): (
        "with arithmetic alone an H200 issues 0.73 to 0.78 of an instruction per cycle and scheduler: 56 per element, "
        "25 in the pipes of products, 16 in that of selects, 4 special functions, whose issue takes 0.111 at 1.98 GHz; "
        "arithmetic alone 0.143, where 0.75 of a copy is 0.126"
    ),
    ("heavy arithmetic, sigmoid_focal_loss bfloat16",): (
        "with arithmetic alone an H200 issues 0.73 to 0.78 of an instruction per cycle and scheduler: 46 per element, "
        "32 in the pipes of products, 10 in that of selects, 2 special functions, whose issue takes 0.092 at 1.98 GHz; "
        "arithmetic alone 0.124, loaded ahead 0.142, where 0.75 of a copy is 0.126"
    ),
    ("heavy arithmetic, asymmetric_loss bfloat16",): (
        "with arithmetic alone an H200 issues 0.73 to 0.78 of an instruction per cycle and scheduler: 50 per element, "
        "33 in the pipes of products, 4 special functions, whose issue takes 0.100 at 1.98 GHz; arithmetic alone "
        "0.133, loaded ahead 0.150, where 0.75 of a copy is 0.126"
    ),
    ("heavy arithmetic, generalized_cross_entropy bfloat16",): (
        "with arithmetic alone an H200 issues 0.73 to 0.78 of an instruction per cycle and scheduler: 45 per element, "
        "3 of them special functions, whose issue takes 0.090 at 1.98 GHz; arithmetic alone 0.117, loaded ahead 0.137, "
        "where 0.75 of a copy is 0.126"
    ),
    ("unaligned rows", "8x19x512x512"): (
        "no vector of logits lies as one of gradients does, so a lane takes four rows that are a warp apart, by single "
        "elements: 0.101 where aligned ones take 0.080, before 0.69 of their speed and now 0.79"
    ),
    ("unaligned rows, cross_entropy float32 2048x32000 2048, forward+backward, input: offset 1",): (
        "an argument more spilled registers of threads that have 40: an H200 takes 0.172, the kernel before it 0.155, "
        "and 0.161 since that is mended, which meets the bar"
    ),
    ("unaligned rows", "bfloat16 8192x32000", "forward+backward, input: padding 1"): (
        "an H100, whose row is older than logits that are staged in their own vectors, takes 0.457 and 0.364 aligned; "
        "an H200 takes 0.315 to 0.322 and 0.269 to 0.271, at the bar"
    ),
    ("images, distillation_loss float32 4x60x121x121",): (
        "58564 rows are one turn of tiles, whose blocks copy, evaluate and write one phase after another, by single "
        "elements, as no vector divides an image: 0.050; 32 images took 0.302, and 0.227 with 120 x 120 pixels; since "
        "a pass less, and without a question for each class, 0.042 and 0.208"
    ),
    ("images, distillation_loss bfloat16 8x19x512x512", "none"): (
        "two passes, each bound by its instructions: 0.277, of which a copy would take 0.132; the mean, in one pass, "
        "takes 0.158"
    ),
    ("images, kl_div_with_logits bfloat16 4x150x256x256",): _faster_copy(0.128, 0.105, 0.132),
    ("images, cross_entropy bfloat16 4x150x256x256, forward+backward, target",): _faster_copy(0.119, 0.104, 0.125),
    ("second derivatives of rows, cross_entropy bfloat16 8x19x512x512 8x512x512",): (
        "bound by instructions: 0.212, where float32 takes 0.234 for twice the bytes"
    ),
    ("second derivatives of rows, cross_entropy bfloat16 4x150x256x256 4x256x256",): (
        "bound by instructions: 0.198, and 0.194 on an H200, whose copy is 1.4 times as fast"
    ),
    ("second derivatives of rows, kl_div_with_logits bfloat16",): (
        "bound by instructions: 0.470, and on an H200, whose copy is 1.4 times as fast, 0.442, since then 0.416"
    ),
    ("second derivatives of rows, distillation_loss bfloat16",): _faster_copy(0.330, 0.314, 0.349),
    ("second derivatives of vectors, pearson_loss bfloat16 4194304x8",): (
        "bound by what a vector costs besides its eight features: 0.306, where float32 takes 0.331 for twice the "
        "bytes; 0.288 and 0.298 on an H200, whose copy is 1.4 times as fast, and since then 0.252 and 0.254"
    ),
    ("second derivatives of vectors, ccc_loss float32 4194304x8",): (
        "vectors and tangents were copied by tiles, and the product back; an H200 takes 0.260 since they are read "
        "where they lie, which meets the bar"
    ),
    ("second derivatives of vectors, ccc_loss", "4194304x8"): (
        "a vector costs more than its eight features: an H200 takes 0.264 where they lie, before 0.371 with copies by "
        "tiles, and float32 takes 0.260 for twice the bytes"
    ),
    ("second derivatives of vectors, triplet_margin_loss bfloat16",): (
        "bound by instructions: 0.143, and 0.142 on an H200, whose copy is 1.4 times as fast; float32, in vectors of "
        "as many elements, 0.124 and 0.111"
    ),
    ("second derivatives of vectors, pearson_loss bfloat16 4x4194304",): (
        "bound by instructions: 0.113, and 0.105 on an H200, whose copy is 1.4 times as fast"
    ),
    ("second derivatives of vectors, pearson_loss bfloat16 65536x256",): _faster_copy(0.108, 0.086, 0.109),
    ("second derivatives of vectors, cosine_loss float32",): (
        "both vectors and the tangent are copied by tiles, and the product back: an H200 takes 0.166, and 0.161 would "
        "meet the bar; an H100 takes 0.198 and meets it"
    ),
    ("second derivatives of boxes, complete_box_iou_loss bfloat16",): (
        "bound by instructions: 0.113, and 0.111 on an H200, whose copy is 1.4 times as fast; float32 takes 0.138 for "
        "twice the bytes"
    ),
    ("second derivatives of regions, dice_focal_loss",): (
        "bound by the second derivatives of the focal loss of each class: 0.201 in bfloat16 and 0.224 in float32, and "
        "0.195 and 0.214 on an H200, whose copy is 1.4 times as fast; 16 classes of bfloat16 0.112, and 0.110"
    ),
    ("second derivatives of regions, dice_loss bfloat16 2x32x128x128x48",): (
        "bound by the instructions of numbers with a tangent: 0.636, and 0.630 on an H200, whose copy is 1.4 times as "
        "fast; float32 takes 0.717 and 0.678 for twice the bytes"
    ),
    ("second derivatives of regions, dice_loss bfloat16 2x8x128x128x64",): _faster_copy(0.142, 0.141, 0.144),
    ("second derivatives, asymmetric_loss bfloat16",): (
        "bound by instructions: 0.471, and on an H200, whose copy is 1.4 times as fast, 0.409 with four small batches "
        "of a warp and 0.396 with eight"
    ),
    ("second derivatives, sigmoid_focal_loss bfloat16",): (
        "bound by instructions: an H200 takes 0.322 with four small batches of a warp and 0.3155 with eight, as now, "
        "where 0.317 would meet the bar"
    ),
    ("second derivatives of regions, dice_loss float32 4x16x256x256", "order"): (
        "samples lie between each other's voxels, so the image and its tangent are read from copies and the product is "
        "copied back: 0.076, where twice as many logits take 0.073 without copies"
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
        "read twice, 1.5 times the traffic that counts, and each class begins within a sector: an H200 takes 0.135, "
        "0.139 with tiles of 256 rows, and 0.128 would meet the bar; 1024 x 32000 takes 0.111"
    ),
    ("classes apart", "bfloat16 1000x32001"): (
        "read twice, 1.5 times the traffic that counts, and each class begins within a sector: an H200 takes 0.081, "
        "0.083 with tiles of 256 rows, and 0.069 would meet the bar; 1024 x 32000 takes 0.068"
    ),
    ("classes apart", "999x32000"): (
        "no vector divides the rows, so each thread reads single elements, and classes begin within sectors: an H200 "
        "takes 0.168 in float32 and 0.108 in bfloat16, with tiles of 32 rows 0.263 and 0.178"
    ),
    ("images", "4x150x257x257"): (
        "no vector divides an image: an H200 takes 0.114 in bfloat16, in pairs of two rows of a lane, and 0.152 in "
        "float32, where lanes move single elements; warps that move both in words of 16 bytes took 0.177 and 0.271"
    ),
    ("images", "4x3x1667x1665"): (
        "no vector divides an image, so a lane takes one row, element by element: an H200 takes 0.113 in bfloat16 and "
        "0.150 in float32, and 0.080 and 0.102 with 1664 x 1664 pixels"
    ),
    ("images", "4x64x355x353"): (
        "no vector divides an image, so lanes take pairs of rows: an H200 takes 0.068, where 0.065 would meet the bar; "
        "with single elements 0.096, and with words of 16 bytes, by way of shared memory, 0.130"
    ),
    ("images", "bfloat16 8x2x1024x1024", "ignore_index=255"): (
        "an eighth of the labels is ignored, so most lanes have a row without a gradient, and the divisor takes a "
        "launch of its own: an H200 takes 0.075, and 0.049 where none may be ignored"
    ),
    ("images", "float32 2x4x128x128x128", "order 0x2x3x4x1"): (
        "an H200 takes 0.0583, and 0.0577 would meet the bar, in another run 0.0568; an H100 takes 0.0691 and meets it"
    ),
    ("unaligned rows", "300000x100"): (
        "gaps are read with the rows, 1.14 times the traffic, and lanes read single elements: an H200 takes 0.070, and "
        "0.058 would meet the bar; of 262144 rows 0.064, shared by lanes 0.079"
    ),
    ("unaligned rows", "131328x511"): (
        "16 lanes share a row of 63 vectors, with up to 14 elements at its ends: an H200 takes "
        "0.102, and 0.098 would meet the bar; half as many rows 0.062, before 0.068"
    ),
    ("options", "float32 65536x1024", "softcap=30.0 gamma"): _faster_copy(0.237, 0.227, 0.249),
    ("options", "671088x100", "label_smoothing=0.1"): _faster_copy(0.116, 0.107, 0.122),
    ("forward, cross_entropy bfloat16 8192x32000",): _faster_copy(0.147, 0.135, 0.181),
    ("forward, cross_entropy float32 32768x4096",): (
        "an H200 takes 0.155, in other runs 0.172 with 384 threads per multiprocessor in place of 512 and 0.157 with "
        "rows in shared memory, and 0.148 would meet the bar; an H100 takes 0.182, and 0.190 with 384 threads"
    ),
}


def explains(parts: tuple[str, ...], title: str) -> bool:
    """True if a title contains all these substrings."""
    return all(x in f"{title}\n" for x in parts)


def reason(title: str) -> str:
    """The reason for the case with this title; empty if there is none."""
    return next((text for parts, text in REASONS.items() if explains(parts, title)), "")
