"""Private symbols of torch, each named once, with fallbacks for versions that lack them.

Only code that needs torch imports this module. It is below the backends, because reference formulas query transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
#: Returns True while a transform of torch.func is active.
transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
function_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at
#: Returns the graph that torch.jit.trace records into, or None.
tracing_state: Callable[[], Any] = torch._C._get_tracing_state
#: Returns True while torch.jit.trace records.
is_scripted: Callable[[], bool] = torch._C._is_tracing
is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)
will_engine_execute_node: Callable[[Any], bool] = torch._C._will_engine_execute_node
without_torch_function: Any = torch._C.DisableTorchFunction
#: Context in which the dispatcher skips autograd: a matrix product into a given tensor, of 2 x 2 elements on a CPU,
#: takes 1.3 µs in place of 2.2. Tensors that require a gradient must not be passed to operations within it.
below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", nullcontext)
#: Returns True for a tensor wrapped by autograd's own vmap, which is older than torch.func's; None if torch lacks it.
is_legacy_batched: Callable[[Any], bool] | None = getattr(torch._C._functorch, "is_legacy_batchedtensor", None)


def assume_constant_result(function: Any) -> None:
    """Does what torch's own function does, which takes seconds: it imports all of Dynamo to set this attribute."""
    function._dynamo_marked_constant = True


if hasattr(torch.amp, "is_autocast_available"):  # 2.4 added the argument and deprecated the older function

    def is_autocast_cpu_enabled() -> bool:
        return torch.is_autocast_enabled("cpu")

    # The older functions, one for each type of device, cannot be traced.
    autocast_dtype = torch.get_autocast_dtype
else:
    is_autocast_cpu_enabled = torch.is_autocast_cpu_enabled

    def autocast_dtype(device_type: str) -> torch.dtype:
        return torch.get_autocast_gpu_dtype() if device_type == "cuda" else torch.get_autocast_cpu_dtype()


def _dispatched_empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


#: Allocates a tensor on the current GPU. Where torch has it, this is the function that Inductor's generated code calls:
#: it bypasses the dispatcher and takes half the time.
empty_strided: Any = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", _dispatched_empty_strided
)


def _increment_version(x: torch.Tensor) -> None:
    x.as_strided((0,), (1,)).zero_()


#: Tells autograd that a kernel has written to a tensor without gradient, as torch's own operations do. A tensor shares
#: its version counter with the tensor that it was detached from.
increment_version: Any = getattr(torch.autograd.graph, "increment_version", _increment_version)  # 2.1


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Builds torch's guard of a compiled graph for these tensors, or returns None in a torch that lacks it.

    The guard takes other tensors and returns True if they have the same types, dtypes, shapes, strides, device and
    requires_grad, under the same autocast.
    """
    try:
        sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
        guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return guards.check
    except (AttributeError, TypeError, SystemError):
        return None


@contextmanager
def differentiating() -> Iterator[None]:
    """Enables autograd, even inside an operator that the dispatcher has called below autograd."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradCPU, keys.AutogradCUDA, keys.AutogradOther, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


class _AddingTo(torch.autograd.Function):
    """Casts a weight to the dtype of a buffer; backward adds the gradient to the buffer.

    The buffer is not a saved tensor, because it exists to be added to between forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.buffer = buffer
        return weight.view_as(weight) if weight.dtype == buffer.dtype else weight.to(buffer.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        if torch.is_grad_enabled():
            raise NotImplementedError("`main_grad` is not for create_graph=True, under which gradients are variables.")
        ctx.buffer.add_(gradient)
        return None, None


def adding_to(weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Casts a weight to the dtype of ``buffer``. Its gradient is added to ``buffer``; the weight itself gets none."""
    cast: torch.Tensor = _AddingTo.apply(weight, buffer)
    return cast


#: Classes of tensors that are not sharded.
_UNSHARDED = torch.Tensor, torch.nn.Parameter


def _gathered(x: Any) -> torch.Tensor:
    """Gathers a DTensor. Its gradient is the mean of the processes' gradients, each perhaps of other rows.

    That is FSDP2's rule. By itself, torch would assume that the gradients are equal, and take each shard from a process
    of its own.
    """
    try:
        from torch.distributed.tensor import Partial
    except ImportError:  # before 2.5
        from torch.distributed._tensor.placement_types import _Partial as Partial

    mesh = x.device_mesh
    gathered: torch.Tensor = x.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if gathered.requires_grad:
        gathered.register_hook(lambda gradient: gradient / mesh.size())
    return gathered


def operands_of_linear(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Operands as ``torch.nn.functional.linear`` sees them: gathered if sharded, and in autocast's dtype if it is on.

    With FSDP2, the weight of a module is a sharded DTensor while the module itself does not run.
    """
    # Looking for an attribute that a class lacks takes longer than the rest.
    operands = [_gathered(x) if type(x) not in _UNSHARDED and hasattr(x, "full_tensor") else x for x in tensors]
    first = operands[0]
    on = torch.is_autocast_enabled() if first.is_cuda else first.device.type == "cpu" and is_autocast_cpu_enabled()
    if not on:
        return operands
    dtype = autocast_dtype(first.device.type)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in operands]
