"""A GPU without hardware: tensors on `cuda:0` have shapes but no data, and their use is counted.

PyTorch's fake tensors refuse operations between two devices. The host reads made-up numbers of
them: whole numbers are `token` when they come as lists, and `end` when they come as arrays.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import run
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.training import prefix_tree

# Autograd asks each device's guard for streams. PyTorch for CPUs has no guard for CUDA.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace guards = c10::impl;
constexpr auto CUDA = c10::DeviceType::CUDA;
static guards::DeviceGuardImplRegistrar registrar(CUDA, new guards::NoOpDeviceGuardImpl<CUDA>());
"""
DEVICE = torch.device("cuda:0")


def build_guard(folder: Path) -> Path:
    """Compile the guard, and return the library."""
    source, library, home = folder / "guard.cpp", folder / "guard.so", Path(torch.__file__).parent
    source.write_text(GUARD, encoding="utf-8")
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{home}/include", f"-L{home}/lib", "-lc10"]
    run(["g++", str(source), "-o", str(library), *flags], check=True)
    return library


class FakeGPU(TorchDispatchMode):
    """Counts what operations do on the fake GPU."""

    def __init__(self, token: int, end: int) -> None:
        super().__init__()
        self.token, self.end = token, end  # what the host reads in lists, and in arrays
        self._known, self.allocated = set[int](), 0  # storages, and their bytes
        self.forget()

    def forget(self) -> None:
        """Count from 0; what is in memory stays there."""
        self.operations = 0  # operations that make or change a tensor on the GPU
        self.waits = Counter[str]()  # {function: number of times that the host waits in it}
        self.largest, self.peak = 0, self.allocated  # bytes of a tensor, and of all tensors

    def wait(self) -> None:
        """Count that the host waits for the GPU, in the pipeline's innermost function."""
        frame: Any = sys._getframe()
        while frame.f_back is not None and "/pipeline/" not in frame.f_code.co_filename:
            frame = frame.f_back
        self.waits[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if call is torch.ops.aten._local_scalar_dense.default:
            if _on_gpu(given[0]):
                self.wait()
            return 0
        result = call(*args, **kwargs)
        made = _tensors(result)
        on_gpu = [x for x in made if _on_gpu(x)]
        kinds = {_on_gpu(x) for x in given + made if x.dim() or _on_gpu(x)}
        pinned = kwargs.get("non_blocking") and getattr(given[0], "is_fake_pinned", False)
        if len(kinds) == 2 and not pinned:  # a copy, or indices of the host for a tensor of the GPU
            self.wait()
        for x in on_gpu:
            self._keep(x.untyped_storage())
        self.operations += bool(on_gpu) and not call.is_view
        return result

    def _keep(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            finalize(storage, self._free, storage._cdata, size := storage.nbytes())
            self._known.add(storage._cdata)
            self.allocated += size
            self.largest, self.peak = max(self.largest, size), max(self.peak, self.allocated)

    def _free(self, storage: int, size: int) -> None:
        self._known.remove(storage)
        self.allocated -= size


def _on_gpu(x: torch.Tensor) -> bool:
    return isinstance(x, FakeTensor) and x.fake_device.type == "cuda"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class _Host(TorchFunctionMode):
    """What needs a real GPU, or data: pinned memory, attention, arrays, and sizes that data set."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if call is torch.Tensor.pin_memory:
            args[0].is_fake_pinned = True
            return args[0]
        if call is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args[:3])
        if not (args and isinstance(args[0], FakeTensor)):
            return call(*args, **kwargs)
        if call is torch.Tensor.numpy:
            assert not args[0].is_cuda
            return np.full(args[0].shape, self.gpu.end)
        if call in (torch.equal, torch.allclose):
            return True
        if call is torch.unique_consecutive:  # as if all were different
            self.gpu.wait()
            return args[0].clone(), torch.arange(len(args[0]), device=args[0].device)
        if call is torch.Tensor.tensor_split and isinstance(args[1], torch.Tensor):
            return args[0].tensor_split(len(args[1]) + 1)
        return call(*args, **kwargs)


def _attention(*states: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled("cuda"):  # a GPU's autocast covers attention
        states = tuple(x.to(torch.get_autocast_dtype("cuda")) for x in states)
    assert len({(x.device, x.dtype) for x in states}) == 1, states
    query, _, value = states
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)


@contextmanager
def fake_gpu(guard: str, token: int = 0, end: int = 0) -> Iterator[FakeGPU]:
    """Make a fake GPU in this process, which must end after it: nothing is restored."""
    torch.ops.load_library(guard)
    gpu = FakeGPU(token, end)

    def tolist(self: FakeTensor) -> Any:
        if self.is_cuda:
            gpu.wait()
        return np.full(self.shape, gpu.token).tolist()

    FakeTensor.tolist = tolist
    torch.nn.Module.to = lambda self, *_, **__: self  # cannot move fake tensors
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    prefix_tree.causal_lower_right = lambda *_: None
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    with FakeTensorMode(allow_non_fake_inputs=True), gpu, _Host(gpu):
        yield gpu
