"""Execution of kernels on the host: it behaves as CUDA documents, and reports undefined behaviour."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from devices import GPU
from grids import FEWEST, short_or_full
from numpy.typing import NDArray
from tools import host_properties as host_properties

import cupylosses.functional as F
from cupylosses.engines.pointwise.codegen import PointwiseKernel
from cupylosses.testing import host, samples
from cupylosses.testing.check import by_position, run
from cupylosses.testing.host import build
from cupylosses.testing.host.launch import load
from cupylosses.testing.host.settings import Settings

pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(sys.platform != "linux" or host.find_compiler() is None, reason="no C++ compiler on Linux"),
    pytest.mark.filterwarnings("ignore:.*broadcast"),
]

#: Seeds of thread orders; one order that interrupts threads is enough, since any order exposes a fault.
SEEDS = short_or_full((1,), (0, 1, 2))
LANES = numpy.arange(32)

#: CUDA names of numpy's types.
KINDS = {
    "f4": "float", "f8": "double", "i4": "int", "u4": "unsigned", "u2": "unsigned short", "i8": "long long",
    "u8": "unsigned long long",
}  # fmt: skip


def execute(
    body: str, *arrays: NDArray[Any], grid: Any = 1, block: Any = 32, before: str = "", **settings: Any
) -> None:
    """Runs the body of a kernel with the arrays as its arguments a, b, ..., which have their types."""
    names = [f"{KINDS[x.dtype.str[1:]]}* {name}" for x, name in zip(arrays, "abcdef")]
    source = f'{before}\n#line 1 "probe"\nextern "C" __global__ void probe({", ".join(names)}) {{\n{body}\n}}\n'
    host.run_source("probe", source, [x.ctypes.data for x in arrays], grid, block, **settings)


def fault(body: str, *arrays: NDArray[Any], **settings: Any) -> str:
    """Runs a kernel that must fail, and returns the message."""
    with pytest.raises(host.KernelFault) as caught:
        execute(body, *arrays, **settings)
    return str(caught.value)


# ----------------------------------------------------------------------------------------------------------------------
# Faults that end a launch


@pytest.mark.parametrize("seed", SEEDS)
def test_barrier_that_part_of_a_block_reaches(seed: int) -> None:
    message = fault("if (threadIdx.x < 32) __syncthreads();", block=64, seed=seed)
    assert "probe: block 0: a barrier is reached by some threads only" in message
    assert "wait in __syncthreads() at probe:2" in message
    assert "ended" in message


@pytest.mark.parametrize("seed", SEEDS)
def test_two_barriers_that_are_one_to_the_hardware(seed: int) -> None:
    message = fault("if (threadIdx.x < 32)\n __syncthreads();\n else\n __syncthreads();", block=64, seed=seed)
    assert "threads meet in different barriers" in message
    assert "threads 0 to 31: wait in __syncthreads() at probe:3" in message
    assert "threads 32 to 63: wait in __syncthreads() at probe:5" in message


@pytest.mark.parametrize("seed", SEEDS)
def test_deadlock(seed: int) -> None:
    message = fault("if (threadIdx.x == 3)\n __syncwarp();\n else\n __syncthreads();", block=64, seed=seed)
    assert "deadlock" in message
    assert "thread 3: wait in __syncwarp() at probe:3" in message
    assert "threads 4 to 63: wait in __syncthreads() at probe:5" in message


DIVERGENT = {
    "some lanes end": "if (threadIdx.x % 2) {call};",
    "elsewhere": "if (threadIdx.x % 2)\n {call};\n else\n {call};",
    "other masks": "const unsigned mask = threadIdx.x % 2 ? 0xffffffffu : 0xfffffffeu; if (threadIdx.x) {masked};",
    "not in its own mask": "const unsigned mask = 0xffff0000u; {masked};",
}


@pytest.mark.parametrize("call", ["__shfl_xor_sync({}, 1, 1)", "__ballot_sync({}, 1)", "__syncwarp({})"])
@pytest.mark.parametrize("divergence", DIVERGENT)
def test_warp_primitive_without_all_its_lanes(call: str, divergence: str) -> None:
    body = DIVERGENT[divergence].format(call=call.format("0xffffffffu"), masked=call.format("mask"))
    for seed in SEEDS:
        assert "lanes 0x" in fault(body, seed=seed)


def test_warp_primitive_that_names_lanes_beyond_the_block() -> None:
    assert "lanes that do not exist" in fault("__syncwarp();", block=48)


def test_shuffle_from_a_lane_outside_of_the_mask() -> None:
    message = fault("if (threadIdx.x < 16) __shfl_sync(0xffffu, 1, 20);")
    assert "reads lane 20 at probe:2, which is not in the mask 0x0000ffff" in message


REVERSED = "__shared__ double s[64];\n s[threadIdx.x] = 1;\n{}\n a[threadIdx.x] = s[{} - threadIdx.x];"

RACES = {
    "no barrier": (REVERSED.format("", 63), {"block": 64}),
    "a barrier of the warp alone": (REVERSED.format("__syncwarp();", 63), {"block": 64}),
    "nothing in a warp": (REVERSED.format("", 31), {}),
    "a shuffle, which orders no memory": (REVERSED.format("__shfl_sync(~0u, 1, 0);", 31), {}),
    "a barrier of other lanes": (
        REVERSED.format("__syncwarp(threadIdx.x < 16 ? 0xffffu : 0xffff0000u);", 31), {}),
    "written while others still read": (
        "__shared__ int s;\n if (threadIdx.x == 0) s = 1;\n __syncthreads();\n a[threadIdx.x] = s;\n"
        "if (threadIdx.x == 0) s = 2;", {"block": 64}),
    "two blocks": ("a[threadIdx.x] = blockIdx.x;", {"grid": 2}),
    "bytes of one word": ("reinterpret_cast<char*>(a)[(threadIdx.x + 1) / 2] = 1;", {}),
    "a vector over a number": (
        "if (threadIdx.x == 0) __stcs(reinterpret_cast<double2*>(a), double2{1, 2}); else\n a[threadIdx.x] = 1;", {}),
    "an atomic and a plain access": (
        "unsigned* n = reinterpret_cast<unsigned*>(a);\n if (threadIdx.x)\n atomicAdd(n, 1u); else\n *n = 3;", {}),
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", RACES)
def test_race(what: str, seed: int) -> None:
    body, geometry = RACES[what]
    message = fault(body, numpy.zeros(64), seed=seed, **geometry)
    assert message.startswith("probe: race: block")
    assert message.count("at probe:") == 2, "both lines are named"
    assert message.count(", thread ") == 2


NO_RACES = {
    "a barrier": (REVERSED.format("__syncthreads();", 63), {"block": 64}),
    "a barrier of the warp": (REVERSED.format("__syncwarp();", 31), {}),
    "barriers of half warps": (
        "__shared__ double s[32]; s[threadIdx.x] = 1; const unsigned half = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;"
        "__syncwarp(half); a[threadIdx.x] = s[threadIdx.x ^ 15];", {}),
    "one after the other": (
        REVERSED.format("__syncwarp(); if (threadIdx.x == 0) s[1] = 5; __syncwarp();", 31), {}),
    "own bytes": ("reinterpret_cast<char*>(a)[threadIdx.x] = 1;", {}),
    "all read": ("a[blockIdx.x * 32 + threadIdx.x + 1] = a[0];", {"grid": 2}),
    "shared memory of another block": (
        "__shared__ double s[32]; s[threadIdx.x] = blockIdx.x; a[blockIdx.x * 8] = 1;", {"grid": 4}),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_RACES)
def test_no_race(what: str) -> None:
    body, geometry = NO_RACES[what]
    if what == "shared memory of another block":
        body = body.replace("a[blockIdx.x * 8] = 1;", "if (threadIdx.x == 0) a[blockIdx.x] = s[0];")
    for seed in SEEDS:
        execute(body, numpy.zeros(128), seed=seed, **geometry)


#: Every block writes a number, and the last one to take a ticket adds them; `before` and `behind` hold the fences.
LAST_BLOCK = """
a[blockIdx.x * 32 + threadIdx.x] = 1 + blockIdx.x;
{before}
__shared__ bool last;
if (threadIdx.x == 0) last = {ticket}(reinterpret_cast<unsigned*>(b), gridDim.x - 1) == gridDim.x - 1;
__syncthreads();
{behind}
if (last && threadIdx.x == 0) {{
  double sum = 0;
  for (int i = 0; i < gridDim.x; ++i) sum += __ldcg(a + 32 * i + 31);
  b[1] = sum;
}}
"""

TICKETS = {
    ("__syncthreads();", "increment_and_synchronize", ""): True,
    ("__syncthreads(); __threadfence();", "atomicInc", "__threadfence();"): True,
    ("__syncthreads(); __threadfence();", "atomicInc", ""): False,
    ("__syncthreads();", "atomicInc", "__threadfence();"): False,
    ("__syncthreads();", "atomicInc", ""): False,
    ("", "increment_and_synchronize", ""): False,
    # A fence publishes its own thread's writes and those ordered before them, not those of other threads.
    ("__threadfence();", "atomicInc", "__threadfence();"): False,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("protocol", TICKETS)
def test_what_crosses_blocks_needs_fences(protocol: tuple[str, str, str], seed: int) -> None:
    before, ticket, behind = protocol
    body = LAST_BLOCK.format(before=before, ticket=ticket, behind=behind)
    memory, result = numpy.zeros(32 * 9), numpy.zeros(2)
    if TICKETS[protocol]:
        execute(body, memory, result, grid=9, seed=seed)
        assert result[1] == sum(range(1, 10))
    else:
        assert "race: block" in fault(body, memory, result, grid=9, seed=seed)


def test_races_need_not_be_looked_for() -> None:
    execute("a[threadIdx.x] = blockIdx.x;", numpy.zeros(32), grid=2, check_races=False)


UNDEFINED = {
    "a[0] = a[0] + (2147483647 + n);": "a signed sum overflows",
    "a[0] = 1 << (n + 31);": "a shift by more than there are bits",
    "a[0] = 5 / (n - 1);": "an integer is divided by zero",
    "double x[4] = {1, 2, 3, 4}; a[0] = x[n + 3];": "an index beyond its array",
    "a[0] = *(static_cast<double*>(nullptr) + n - 1);": "a null pointer",
    "a[0] = __ldg(reinterpret_cast<double2*>(a + n)).x;": "an address that is not aligned",
    "__shared__ bool unwritten; if (n > 1) unwritten = true; a[0] = unwritten;": "a value that its type does not have",
}


@pytest.mark.parametrize("body", UNDEFINED)
def test_undefined_behaviour(body: str) -> None:
    memory = numpy.zeros(16)
    memory = memory[(memory.ctypes.data // 8) % 2 :]  # Aligned to 16 bytes.
    program = f"const int n = b[0];\n{body}"
    message = fault(program, memory, numpy.ones(1, numpy.int32), block=1, sanitize=("thread", "undefined"))
    assert UNDEFINED[body] in message
    assert message.endswith("at probe:3")


@pytest.mark.parametrize("intrinsic", ["__ldg", "__ldcs", "__ldcg", "__ldca", "__stcs", "__stcg", "__stwb"])
def test_vector_accesses_are_aligned_by_default(intrinsic: str) -> None:
    """Under any compiler option, the shim checks the alignment of accesses that x86 would allow."""
    memory = numpy.zeros(16)
    memory = memory[(memory.ctypes.data // 8) % 2 :]  # Aligned to 16 bytes.
    value = ", double2{1.0, 2.0}" if intrinsic.startswith("__st") else ""
    program = f"const int n = b[0];\n{intrinsic}(reinterpret_cast<double2*>(a + n){value});"
    execute(program, memory, numpy.array([2], numpy.int32), block=1, sanitize=())
    message = fault(program, memory, numpy.array([1], numpy.int32), block=1, sanitize=())
    assert "an address that is not aligned" in message and message.endswith("at probe:3")


def test_undefined_behaviour_need_not_be_looked_for() -> None:
    body = next(iter(UNDEFINED))
    execute(f"const int n = b[0];\n{body}", numpy.zeros(1), numpy.ones(1, numpy.int32), block=1, sanitize=("thread",))
    execute("a[threadIdx.x] = 1;", numpy.zeros(32), sanitize=())
    assert "race" in fault("a[0] = threadIdx.x;", numpy.zeros(1), sanitize=("thread",))


def test_kernel_that_does_not_end() -> None:
    forever = "while (*static_cast<volatile double*>(a) == 0) {}"
    assert "thread 0 still runs after 1 s" in fault(forever, numpy.zeros(1), timeout=1)


def test_launch_after_a_fault() -> None:
    """An aborted launch leaves nothing behind."""
    fault("if (threadIdx.x < 32) __syncthreads();", block=64)
    result = numpy.zeros(64)
    execute("__syncthreads(); a[threadIdx.x] = threadIdx.x;", result, block=64)
    assert (result == numpy.arange(64)).all()


def test_kernel_that_does_not_compile() -> None:
    with pytest.raises(host.HostCompileError, match="probe:2"):
        execute("a = nothing;", numpy.zeros(1))


SANITIZED = """
import runpy, sys
sys.argv = ["host", "--sanitize", "address,undefined", "--", "-c", {program!r}]
runpy.run_module("cupylosses.testing.host", run_name="__main__")
"""

#: A whole call; then an access inside an allocation, and the same access one element further.
OUTSIDE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, cupylosses.functional as F
from cupylosses.testing import host
x, y = torch.rand(67, 129, requires_grad=True), torch.rand(129, requires_grad=True)
F.mse_loss(x, y).backward()
print(host.counters.launches > 1, file=sys.stderr)
memory = torch.zeros(16, dtype=torch.float64)
source = 'extern "C" __global__ void probe(double* a, long long n) {{ {body} }}'
for n in (0, 1):
    host.run_source("probe", source, [memory.data_ptr(), n], 1, 16)
    print("ended", n, file=sys.stderr, flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "body", ["a[threadIdx.x + n] = 1;", "__shared__ double s[16]; double* p = s; p[threadIdx.x + n] = 1; a[0] = p[0];"]
)
def test_access_outside_of_an_allocation(body: str, python: Callable[..., str]) -> None:
    """AddressSanitizer knows the fibers' stacks; a loss stays inside its allocations, a probe does not.

    In every run ``test_mutations.py`` has a process with AddressSanitizer that shows the same.
    """
    with pytest.raises(AssertionError) as caught:
        python(SANITIZED.format(program=OUTSIDE.format(body=body)))
    text = str(caught.value)
    assert "True\n" in text and "ended 0" in text and "ended 1" not in text
    assert re.search("AddressSanitizer: heap-buffer-overflow|an object that is too small", text)


# ----------------------------------------------------------------------------------------------------------------------
# Indices, intrinsics, memory and arithmetic


@pytest.mark.parametrize("seed", SEEDS)
def test_indices(seed: int) -> None:
    """Every thread of every block runs once, in three dimensions, in any order."""
    grid, block = (3, 2, 2), (8, 4, 2)
    found = numpy.zeros((12, 64), numpy.int32)
    execute(
        "const int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);"
        "const int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);"
        "a[b * 64 + t] += 1 + b * 64 + t;",
        found, grid=grid, block=block, seed=seed,
    )  # fmt: skip
    assert (found.ravel() == 1 + numpy.arange(12 * 64)).all()


def test_seeds_choose_the_order() -> None:
    """Seed 0 runs in order; others do not, differ from one another, and repeat themselves."""

    def order(seed: int) -> list[int]:
        found, count = numpy.zeros(128, numpy.uint32), numpy.zeros(1, numpy.uint32)
        body = "a[atomicAdd(b, 1u)] = blockIdx.x * 32 + threadIdx.x;"
        execute(body, found, count, grid=4, seed=seed)
        assert sorted(found) == list(range(128))
        return found.tolist()

    assert order(0) == list(range(128))
    orders = [order(seed) for seed in range(6)]
    assert len({tuple(x) for x in orders}) == 6
    assert [order(seed) for seed in range(6)] == orders
    blocks = [x // 32 for x in orders[1]]
    assert sum(x != y for x, y in pairwise(blocks)) > 4, "blocks run at once"


SHUFFLES = {
    "__shfl_sync(~0u, x, {n}, {width})": lambda n, w: (LANES & ~(w - 1)) | (n & (w - 1)),
    "__shfl_up_sync(~0u, x, {n}, {width})": lambda n, w: numpy.where(LANES % w >= n, LANES - n, LANES),
    "__shfl_down_sync(~0u, x, {n}, {width})": lambda n, w: numpy.where(LANES % w + n < w, LANES + n, LANES),
    "__shfl_xor_sync(~0u, x, {n}, {width})": lambda n, w: numpy.where(
        (LANES ^ n) < (LANES & ~(w - 1)) + w, LANES ^ n, LANES
    ),
}


@pytest.mark.parametrize("kind", ["f4", "f8", "i4", "u4", "i8", "u8"])
def test_shuffles(kind: str) -> None:
    """One kernel executes all shuffles."""
    settings = [(call, n, width) for call in SHUFFLES for n, width in ((1, 32), (31, 32), (3, 8), (16, 16))]
    value = (LANES * 3 - 7).astype(kind)
    found = numpy.zeros((len(settings), 32), kind)
    calls = [call.format(n=n, width=width) for call, n, width in settings]
    lines = "\n".join(f"b[{32 * i} + threadIdx.x] = {x};" for i, x in enumerate(calls))
    for seed in SEEDS:
        execute(f"const auto x = a[threadIdx.x];\n{lines}", value, found, seed=seed)
        for row, (call, n, width) in zip(found, settings, strict=True):
            assert (row == value[SHUFFLES[call](n, width)]).all(), (call, n, width)


def test_shuffles_among_some_lanes() -> None:
    found = numpy.zeros(32, numpy.int32)
    body = "if (threadIdx.x % 2) a[threadIdx.x] = __shfl_xor_sync(0xaaaaaaaau, int(threadIdx.x), 2);"
    for seed in SEEDS:
        execute(body, found, seed=seed)
        assert (found == numpy.where(LANES % 2, LANES ^ 2, 0)).all()


def test_votes() -> None:
    found = numpy.zeros((8, 64), numpy.uint32)
    body = """
const int t = threadIdx.x, lane = t % 32;
a[t] = __ballot_sync(0xffffffffu, lane % 3 == 0);
a[64 + t] = __any_sync(0xffffffffu, t == 40);
a[128 + t] = __all_sync(0xffffffffu, t < 32);
a[192 + t] = lane < 8 ? __all_sync(0xffu, lane < 8) : 7;
a[256 + t] = __activemask() >> lane & 1;
a[320 + t] = __syncthreads_or(t == 40);
a[384 + t] = __syncthreads_or(0);
a[448 + t] = __syncthreads_or(t == 7);
"""
    for seed in SEEDS:
        execute(body, found, block=64, seed=seed)
        assert (found[0] == sum(1 << i for i in range(0, 32, 3))).all()
        assert (found[1] == numpy.repeat([0, 1], 32)).all()
        assert (found[2] == numpy.repeat([1, 0], 32)).all()
        assert (found[3] == numpy.where(numpy.arange(64) % 32 < 8, 1, 7)).all()
        assert (found[4] == 1).all()
        assert [set(x) for x in found[5:] != 0] == [{True}, {False}, {True}]


ATOMICS: dict[str, Callable[[int], int]] = {
    "atomicAdd({a}, {T}(3))": lambda old: old + 3,
    "atomicExch({a}, {T}(3))": lambda old: 3,
    "atomicMax({a}, {T}(7))": lambda old: max(old, 7),
    "atomicMin({a}, {T}(7))": lambda old: min(old, 7),
    "atomicOr({a}, {T}(6))": lambda old: old | 6,
    "atomicAnd({a}, {T}(6))": lambda old: old & 6,
    "atomicXor({a}, {T}(6))": lambda old: old ^ 6,
    "atomicCAS({a}, {T}(5), {T}(9))": lambda old: 9 if old == 5 else old,
}


@pytest.mark.parametrize(("kind", "spelled"), [("i4", "int"), ("u4", "unsigned"), ("u8", "(unsigned long long)")])
def test_atomics(kind: str, spelled: str) -> None:
    """One kernel executes all atomics, each on a number of its own."""
    body = "\n".join(f"b[{i}] = {call.format(a=f'a + {i}', T=spelled)};" for i, call in enumerate(ATOMICS))
    for old in (0, 5, 100):
        memory, returned = numpy.full(len(ATOMICS), old, kind), numpy.zeros(len(ATOMICS), kind)
        execute(body, memory, returned, block=1)
        for call, new, before in zip(ATOMICS, memory, returned, strict=True):
            assert (new, before) == (ATOMICS[call](old), old), call


@pytest.mark.parametrize("call", ["atomicInc", "increment_and_synchronize"])
def test_increment_wraps_at_the_limit(call: str) -> None:
    memory, returned = numpy.zeros(1, numpy.uint32), numpy.zeros(64, numpy.uint32)
    body = f"const unsigned old = {call}(a, 4u); atomicAdd(b + old, 1u);"
    execute(body, memory, returned, block=32, grid=2, seed=1)
    assert returned[:5].tolist() == [13, 13, 13, 13, 12]
    assert memory[0] == 64 % 5
    for old, new in ((9, 0), (4, 0), (3, 4)):
        memory[0] = old
        execute(f"{call}(a, 4u);", memory, block=1)
        assert memory[0] == new


def test_sum_of_many_threads() -> None:
    """No update is lost."""
    for seed in SEEDS:
        total = numpy.zeros(1, numpy.uint64)
        execute("atomicAdd(a, 1ull + threadIdx.x);", total, block=256, grid=7, seed=seed)
        assert total[0] == 7 * 256 * 257 // 2


@pytest.mark.parametrize("seed", SEEDS)
def test_dynamic_shared_memory(seed: int) -> None:
    """Each block has its own dynamic shared memory, even while several blocks take turns."""
    found = numpy.zeros((7, 64))
    body = (
        "extern __shared__ double memory[];\n memory[threadIdx.x] = blockIdx.x * 64 + threadIdx.x; __syncthreads();"
        "a[blockIdx.x * 64 + threadIdx.x] = memory[63 - threadIdx.x];"
    )
    execute(body, found, grid=7, block=64, shared=64 * 8, seed=seed)
    assert (found == numpy.arange(7 * 64).reshape(7, 64)[:, ::-1]).all()


def test_dynamic_shared_memory_that_was_not_asked_for() -> None:
    """Past the requested size, a GPU may have nothing, or the memory of another block."""
    body = "extern __shared__ double memory[];\n memory[threadIdx.x] = 1;"
    found = numpy.zeros(1)
    execute(body, found, block=64, shared=64 * 8)
    assert "beyond what the launch asked for" in fault(body, found, block=64, shared=63 * 8)


def test_conversion_of_every_half() -> None:
    bits = numpy.arange(1 << 16, dtype=numpy.uint16)
    found = numpy.zeros(1 << 16, numpy.float32)
    body = "for (int i = threadIdx.x; i < 65536; i += blockDim.x) b[i] = half_bits_to_float(a[i]);"
    execute(body, bits, found, block=256, check_races=False)
    wide = bits.view(numpy.float16).astype(numpy.float32)
    assert numpy.array_equal(found, wide, equal_nan=True)
    assert (numpy.signbit(found) == numpy.signbit(wide)).all()


@pytest.mark.parametrize("flush", [False, True])
def test_rounding_to_half(flush: bool) -> None:
    """Rounds to nearest even: at every number, at and beside every tie, for infinities, and for NaN as on the GPU."""
    halves = numpy.arange(0x7C00, dtype=numpy.uint16).view(numpy.float16).astype(numpy.float64)
    ties = ((halves + numpy.append(halves[1:], 65536.0)) / 2).astype(numpy.float32)
    near = [halves.astype(numpy.float32), ties, numpy.nextafter(ties, numpy.float32(0)), numpy.nextafter(ties, 1e9)]
    special = numpy.array([numpy.inf, 65504, 65519.996, 65520, 1e30, 2.0**-25, 1e-40, 1e-10], numpy.float32)
    values = numpy.concatenate([*near, special]).astype(numpy.float32)
    values = numpy.concatenate([values, -values, [numpy.nan]]).astype(numpy.float32)
    found = numpy.zeros(2 * values.size, numpy.uint16)
    body = f"""
for (int i = threadIdx.x; i < {values.size}; i += blockDim.x)
  reinterpret_cast<unsigned*>(b)[i] = floats_to_half_pair(a[i], -a[i]);
"""
    execute(body, values, found, block=256, check_races=False, flush=flush)
    with numpy.errstate(over="ignore"):
        expected = values.astype(numpy.float16), (-values).astype(numpy.float16)
    for part, wanted in zip((found[::2], found[1::2]), expected):
        number = ~numpy.isnan(values)
        assert (part[number] == wanted.view(numpy.uint16)[number]).all()
        assert (part[~number] == 0x7FFF).all()


def test_truncation_to_float() -> None:
    values = numpy.random.default_rng(0).standard_normal(1000) * 10.0 ** numpy.arange(-30, 30).repeat(17)[:1000]
    values = numpy.concatenate([values, [0.0, 1.0, 1 + 2.0**-24, -1 - 2.0**-24, 1e300, numpy.inf]])
    found = numpy.zeros(values.size, numpy.float32)
    execute(f"for (int i = 0; i < {values.size}; ++i) b[i] = __double2float_rz(a[i]);", values, found, block=1)
    assert (numpy.abs(found.astype(float)) <= numpy.abs(values)).all()
    below = numpy.abs(found) < numpy.finfo(numpy.float32).max
    above = numpy.nextafter(numpy.abs(found[below]), numpy.float32(numpy.inf)).astype(float)
    assert (above > numpy.abs(values[below])).all()
    assert found[-2:].tolist() == [numpy.finfo(numpy.float32).max, numpy.inf]


#: The effect of -ftz=true on subnormal float32 operands and results; x is half the smallest normal number.
FLUSHED = {
    "2.0f * x": "0", "x + x": "0", "x * 1e30f": "0", "2.0f * x - 1.0f": "-1", "a[1] * 0.5f": "0", "-a[1] * 0.5f": "-0",
    "logf(x)": "-inf", "log1pf(x)": "0", "expf(x)": "1", "expf(-88.0f)": "0", "fabsf(x)": "0", "a[1] - x": "a[1]",
}  # fmt: skip


def test_flushing() -> None:
    tiny = numpy.finfo(numpy.float32).tiny
    memory, found = numpy.array([tiny / 2, tiny], numpy.float32), numpy.zeros(len(FLUSHED), numpy.float32)
    lines = "\n".join(f"b[{i}] = 1.0f * ({x});" for i, x in enumerate(FLUSHED))
    execute(f"const float x = a[0];\n{lines}", memory, found, block=1, flush=True)
    for (expression, text), result in zip(FLUSHED.items(), found, strict=True):
        wanted = tiny if text == "a[1]" else numpy.float32(text)
        assert result == wanted and numpy.signbit(result) == numpy.signbit(wanted), expression
    assert numpy.float32(tiny) / numpy.float32(2) > 0, "Python's own arithmetic is as before"


def test_doubles_keep_subnormal_numbers() -> None:
    memory = numpy.array([5e-324, 0.0])
    execute("a[1] = a[0] * 3.0;", memory, block=1)
    assert memory[1] == 1.5e-323


def test_no_contraction() -> None:
    """A product and a sum round twice, as with -fmad=false."""
    x = numpy.array([1 + 2.0**-30, -1 - 2.0**-29, 0.0])
    execute("a[2] = a[0] * a[0] + a[1];", x, block=1)
    assert x[2] == 0


# ----------------------------------------------------------------------------------------------------------------------
# The cache


def test_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYLOSSES_HOST_CACHE", str(tmp_path))
    runtime = build.runtime()
    source = 'extern "C" __global__ void probe(int* a) { *a = 1; }'
    before = host.counters.compiled
    with ThreadPoolExecutor(2) as pool:
        found = set(pool.map(lambda _: build.of_source("probe", source), range(4)))
    assert len(found) == 1
    done = host.counters.compiled
    assert 1 <= done - before <= 2
    assert build.of_source("probe", source) in found
    assert host.counters.compiled == done
    assert build.of_source("probe", source.replace("1", "2")) not in found
    assert host.counters.compiled == done + 1
    left = {x for x in tmp_path.iterdir() if x != runtime}
    assert len(left) == 2, "no temporary files"
    assert all(x.suffix == ".so" for x in left)


def test_files_of_many_kernels_are_precompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared files are precompiled once a few kernels have used them; a damaged header does not break a compilation."""
    if "clang" in Path(build.compiler()[0]).resolve().name:
        pytest.skip("Clang has other options for it")
    monkeypatch.setenv("CUPYLOSSES_HOST_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)

    def result(i: int) -> float:
        text = "__device__ double twice(double x) {\n  return 2 * x;\n}\n"
        text += f'#line 1 "<kernel {i}>"\nextern "C" __global__ void shared{i}(double* a) {{ *a = twice({i}); }}'
        memory = numpy.zeros(1)
        host.run_source(f"shared{i}", text, [memory.ctypes.data], block=1)
        return memory[0]

    assert [result(i) for i in range(4)] == [0, 2, 4, 6]
    assert not [*tmp_path.glob("*.gch")]
    assert [result(i) for i in range(4, 8)] == [8, 10, 12, 14]
    (header,) = tmp_path.glob("*.gch")
    header.write_bytes(header.read_bytes()[:5000])
    assert result(8) == 16


def test_kernels_of_one_program() -> None:
    """Each has its own types, under names that the other also uses, and the shared memory that both declare."""
    files = "template <class T>\n__device__ double sum(T x) {\n  extern __shared__ double staged[];\n"
    files += "  staged[threadIdx.x] = x.a + threadIdx.x;\n  __syncthreads();\n  return staged[0] + staged[1];\n}\n"
    glue = '#line 1 "<{0}>"\nstruct Number {{ double a = {1}; }};\n'
    glue += 'extern "C" __global__ void {0}(double* a) {{ *a = sum(Number()); }}'
    pair = tuple([(name, files + glue.format(name, number)) for name, number in (("first", 1), ("second", 2))])
    for name, expected in (("second", 5.0), ("first", 3.0)):
        memory = numpy.zeros(1)
        address = ctypes.c_void_p(memory.ctypes.data)
        table = (ctypes.c_void_p * 1)(ctypes.addressof(address))
        kernel = load(name, pair, False, ())
        kernel.launch((1, 1, 1), (2, 1, 1), ctypes.addressof(table), Settings(check_races=False), shared=16)
        assert memory[0] == expected
    with pytest.raises(ValueError, match="first, second begin with different files"):
        build.program((pair[0], ("second", "int x;\n" + pair[1][1])))


def test_kernels_built_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording compiles and launches nothing, and the calls run exactly the recorded kernels, so nothing is left to
    compile.
    """
    monkeypatch.setenv("CUPYLOSSES_HOST_CACHE", str(tmp_path))
    build.runtime()
    loss = FEWEST
    count = len(loss.operands)
    operands = samples.operands(loss, loss.values(), ("float32",) * count, [(3, 8), *[(8,)] * (count - 1)])

    def calls() -> None:
        for reduction in ("none", "mean"):
            run(partial(by_position(loss), reduction=reduction), operands, (True,) * count, 2.0)

    before = host.counters.compiled, host.counters.launches
    with host.recording() as kernels:
        calls()
        with host.execution(seed=1):
            calls()
    assert (host.counters.compiled, host.counters.launches) == before and not host.active()
    seen: list[int] = []
    host.build_ahead(kernels, lambda: seen.append(host.counters.compiled))
    programs = len({x.together for x in kernels})
    assert len(kernels) > len(seen) == programs > 3 and host.counters.compiled == before[0] + programs
    with host.execution():
        calls()
    assert host.counters.compiled == before[0] + programs and host.counters.launches > before[1]


def test_a_kernel_that_does_not_compile_is_left_to_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PointwiseKernel, "source", lambda self: "no CUDA")
    with host.recording() as kernels:
        F.mse_loss(torch.rand(3), torch.rand(3))
    seen: list[None] = []
    host.build_ahead(kernels, lambda: seen.append(None))
    assert len(seen) == 1


def test_what_keeps_kernels_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.obstacle() is None
    with monkeypatch.context() as patch:
        patch.setattr(build, "find_compiler", lambda: None)
        assert host.obstacle() == "there is no C++ compiler"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        assert "needs Linux" in host.obstacle()
    with monkeypatch.context() as patch:
        patch.setattr(build, "_OPTIONS", ("--no-such-option",))
        assert "the C++ compiler does not do" in host.obstacle() and "no-such-option" in host.obstacle()


def test_the_environment_chooses_the_sanitizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYLOSSES_HOST_SANITIZE", raising=False)
    assert build.sanitizers() == ("thread",) and build.sanitizers(("thread", "undefined")) == ("thread", "undefined")
    monkeypatch.setenv("CUPYLOSSES_HOST_SANITIZE", "address,undefined")
    assert build.sanitizers() == build.sanitizers(("thread",)) == ("address", "undefined")


def test_the_environment_chooses_the_sanitizers_of_loaded_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is loaded without sanitizers is compiled again if the environment no longer excludes them."""
    monkeypatch.setenv("CUPYLOSSES_HOST_SANITIZE", "")
    execute("a[0] = threadIdx.x;", numpy.zeros(1))
    monkeypatch.delenv("CUPYLOSSES_HOST_SANITIZE")
    assert "race" in fault("a[0] = threadIdx.x;", numpy.zeros(1), sanitize=("thread",))


@pytest.mark.kernels
@pytest.mark.skipif(GPU, reason="kernels run on the GPU")
def test_thorough_runs_look_for_undefined_behaviour(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.settings.settings().sanitize == short_or_full(("thread",), ("thread", "undefined"))


def test_sanitizers_that_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYLOSSES_HOST_SANITIZE", "thread,address")
    with pytest.raises(ValueError, match="thread and address"):
        build.sanitizers()
