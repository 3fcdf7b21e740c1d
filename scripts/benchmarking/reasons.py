"""Why some cases of the section ``cliffs`` miss a bar, each with the measurement that shows it."""

from __future__ import annotations

#: Reasons by parts of a title, all of which it has. Times are milliseconds on one H100 (80 GB HBM3) of forward and
#: backward, if nothing else is said; docs/performance.md has the tables.
REASONS: dict[tuple[str, ...], str] = {
    ("options", "671088x100", "forward+backward, softcap"): (
        "a lane keeps 100 products in 255 registers, so that eight warps run where plain rows have twelve: 0.166; with "
        "168 registers, which spill, 0.185; a row shared by lanes 0.335"
    ),
    ("options", "671088x100", "softcap=30.0 gamma"): (
        "both passes evaluate each capped logit, in 13,000 instructions and 255 registers: 0.364; with 168 registers "
        "0.894; a row shared by lanes 0.434"
    ),
    ("options", "8192x32000", "forward+backward, softcap"): (
        "200 instructions for a vector of eight logits, and products of 4 bytes in shared memory, so that two blocks "
        "share a row: 0.449; with three blocks per multiprocessor, which spill, 0.503"
    ),
    ("options", "8192x32000", "softcap=30.0 gamma"): (
        "as with the cap alone, and weights: 0.589; with three blocks per multiprocessor 0.618; rows in registers 0.886"
    ),
    ("classes apart", "distillation_loss"): (
        "the loss of contiguous rows takes 0.225; three copies by tiles, of both operands and the gradient, take the "
        "rest, 0.14 each, where a copy of as many bytes takes 0.09 and torch's of a transposed matrix 0.275"
    ),
    ("classes apart", "1024x32000", "target=probabilities"): (
        "the loss of contiguous rows takes 0.157; three copies of operands and gradient take the rest, 0.095 each, as "
        "fast as a copy"
    ),
    ("classes apart", "128x262144"): (
        "128 rows are too few to be read where they lie: the loss of contiguous rows takes 0.066, and two copies by "
        "tiles the rest, 0.067 each, where a copy takes 0.048 and torch's of a transposed matrix 0.38"
    ),
    ("classes apart", "bfloat16 1024x32000 1024, forward"): (
        "rows are read twice by 128 blocks, one per multiprocessor, as a cluster has eight at most: 0.105; other "
        "shapes of tiles 0.109 to 0.133"
    ),
    ("classes apart", "bfloat16 4096x4096"): (
        "tiles of clusters of eight blocks, which exchange their sums: 0.051; with the next tile copied ahead 0.060"
    ),
    ("classes apart", "step 3, offset 1"): (
        "sectors of memory hold three classes, of which one is wanted: a bare kernel that reads every third float and "
        "writes it takes 0.349, two copies of what counts"
    ),
    ("second derivatives of rows", "6710886x10"): (
        "a thread reads a row of 40 bytes and its tangents twice and writes the result by itself, 40 bytes from the "
        "next lane's: 1.77; rows shared by eight lanes 2.88"
    ),
    ("second derivatives of rows", "8x19x512x512"): (
        "logits and tangents are read twice, 1.7 times the traffic that counts: of 0.34 of a copy's speed that is 0.57"
    ),
    ("second derivatives, mse_loss", "target: order 1x0"): (
        "faster than the bar relative to a copy; the time of contiguous operands excludes their copy, made in forward"
    ),
    ("dense targets", "beta=0.5"): (
        "bound by instructions: 99 for a class with both softmaxes, the mixture and the gradient, where 0.75 of a "
        "copy's speed has time to issue 60; one vector per iteration 1.189, two 1.243, with 16 vectors per thread 1.416"
    ),
    ("dense targets, distillation_loss", "8192x32000, forward+backward"): (
        "at the bar: between 0.74 and 0.77 of a copy in four runs; bound by 49 instructions and four special functions "
        "for a class"
    ),
    ("different layouts", "8191x8191"): (
        "no vector divides rows or columns, so tiles are read by single elements: 0.37 and 0.65; with other orders of "
        "tiles 0.43 to 0.88; a copy to contiguous memory first takes 1.3 to 1.8 times as long"
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
        "all else, this 0.120"
    ),
    ("few classes", "33554432x2", "target=probabilities"): (
        "some 350 instructions for a row of two classes, whose issue alone takes 0.35 at 1.98 GHz: lanes evaluate one "
        "row at a time, where those of labels evaluate four side by side"
    ),
    ("unreduced rows", "8x32000x256"): (
        "both passes read classes that lie apart twice, in clusters of eight blocks: 0.265; other shapes of tiles were "
        "slower for 1024 x 32000, 0.109 to 0.133 where this one takes 0.105"
    ),
    ("forward, cross_entropy", "65536x1024"): (
        "a bare kernel of the same design, without options, sum and labels that may be wrong, takes 0.050 in bfloat16 "
        "and 0.090 in float32, and autograd launches 0.005 besides: 0.059 and 0.107; rows in registers 0.069 and 0.119"
    ),
    ("broadcast gradients, binary_cross_entropy_with_logits bfloat16 8192x8192 , all",): (
        "33 instructions per element with the derivative by the target and its sum: 0.112 on an H200, 0.593 of a copy, "
        "where two blocks per multiprocessor, in two rounds of which one was half empty, took 0.157"
    ),
    ("broadcast gradients, binary_cross_entropy bfloat16 8192x8192 8192",): (
        "51 instructions and three special functions per element with the derivative by the target and its sum: 0.155; "
        "with two vectors in flight, before its odds were a polynomial, 0.247"
    ),
    ("images", "1x1000x128x128"): (
        "1000 classes of a pixel in clusters of two blocks: 0.067 in float32 and 0.041 in bfloat16; other shapes of "
        "tiles 0.069 to 0.072 and 0.043 to 0.054"
    ),
    ("images", "8x19x512x512", "target=probabilities"): (
        "65 instructions for a class of two operands: 0.143, 0.54 of a copy where the bar is 0.55"
    ),
    ("heavy arithmetic, js_div bfloat16",): (
        "on an H200, which issues 0.73 to 0.78 instructions per cycle and scheduler whatever they are: 56 per element, "
        "25 in the pipes of products, 16 in that of selects, 4 special functions, whose issue takes 0.111 at 1.98 GHz; "
        "arithmetic alone 0.143, where 0.75 of a copy is 0.126"
    ),
    ("heavy arithmetic, sigmoid_focal_loss bfloat16",): (
        "on an H200, which issues 0.73 to 0.78 instructions per cycle and scheduler whatever they are: 46 per element, "
        "32 in the pipes of products, 10 in that of selects, 2 special functions, whose issue takes 0.092 at 1.98 GHz; "
        "arithmetic alone 0.124, loaded ahead 0.142, where 0.75 of a copy is 0.126"
    ),
    ("heavy arithmetic, asymmetric_loss bfloat16",): (
        "on an H200, which issues 0.73 to 0.78 instructions per cycle and scheduler whatever they are: 50 per element, "
        "33 in the pipes of products, 4 special functions, whose issue takes 0.100 at 1.98 GHz; arithmetic alone "
        "0.133, loaded ahead 0.150, where 0.75 of a copy is 0.126"
    ),
    ("heavy arithmetic, generalized_cross_entropy bfloat16",): (
        "on an H200, which issues 0.73 to 0.78 instructions per cycle and scheduler whatever they are: 45 per element, "
        "3 of them special functions, whose issue takes 0.090 at 1.98 GHz; arithmetic alone 0.117, loaded ahead 0.137, "
        "where 0.75 of a copy is 0.126"
    ),
    ("unaligned rows", "8x19x512x512"): (
        "no vector of logits lies as one of gradients does, so a lane takes four rows that are a warp apart, by single "
        "elements: 0.101 where aligned ones take 0.080, before 0.69 of their speed and now 0.79"
    ),
    ("unaligned rows", "bfloat16 8192x32000", "padding 1"): (
        "each vector is cut out of two, by 15 instructions: 0.457 where aligned rows take 0.364; four vectors at a "
        "time instead of two are slower, 0.163 instead of 0.133 for 65536 x 1000"
    ),
    ("unaligned rows", "65536x1000", "padding 1"): (
        "each vector is cut out of two, by 15 instructions: 0.137; four vectors at a time 0.163 instead of 0.133"
    ),
    ("unaligned rows", "6710886x10", "offset 1"): (
        "rows behind an odd address are read by words of 2 bytes: 0.172 where aligned ones take 0.143, before 0.78 of "
        "their speed and now 0.83"
    ),
}


def reason(title: str) -> str:
    """The reason of a case by its title; empty if there is none."""
    found = [text for parts, text in REASONS.items() if all(x in title for x in parts)]
    return found[0] if found else ""
