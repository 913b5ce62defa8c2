"""A GPU without hardware: tensors on `cuda:0` have shapes but no data, and their use is counted.

PyTorch's fake tensors refuse operations between two devices. The host reads made-up numbers of
them: whole numbers are `token` when they come as lists, and `end` when they come as arrays.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import run
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import numpy as np
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.config.settings import Config
from pipeline.models import lora
from pipeline.models.loading import SHAPES
from pipeline.rollout.samplers import own
from pipeline.rollout.samplers.own import RowSampler
from pipeline.training import prefix_tree

# Autograd asks each device's guard for streams. PyTorch for CPUs has no guard for CUDA.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace guards = c10::impl;
constexpr auto CUDA = c10::DeviceType::CUDA;
static guards::DeviceGuardImplRegistrar registrar(CUDA, new guards::NoOpDeviceGuardImpl<CUDA>());
"""
DEVICE = torch.device("cuda:0")
COPY = torch.ops.aten.copy_.default


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
        self.all_operations = 0  # with views, and with operations of the host
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
        is_asked = kwargs.get("non_blocking") or (call == COPY and args[2:] == (True,))
        host = next((x for x in given if not _on_gpu(x)), None)
        pinned = is_asked and getattr(host, "is_fake_pinned", False)
        if len(kinds) == 2 and not pinned:  # a copy, or indices of the host for a tensor of the GPU
            self.wait()
        for x in on_gpu:
            self._keep(x.untyped_storage())
        self.operations += bool(on_gpu) and not call.is_view
        self.all_operations += not str(call).startswith("prim.")
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
        if call is torch.zeros and kwargs.pop("pin_memory", False):
            made = call(*args, **kwargs)
            made.is_fake_pinned = True
            return made
        if call is torch.nn.functional.rms_norm:
            return args[0] * 1.0  # PyTorch for CUDA has it as one operation
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


class FakeGraphs:
    """Has the methods of `Graphs`: a capture counts what it does, and raises if the host waits."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu
        self.num_captures = self.num_operations = 0  # operations of the last step, with views

    def warm_up(self, function: Callable[[], None]) -> None:
        function()

    def forget(self) -> None:
        pass

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        waits, operations = Counter(self.gpu.waits), self.gpu.all_operations
        function()
        if new := self.gpu.waits - waits:
            raise RuntimeError(f"operation not permitted when stream is capturing: {dict(new)}")
        self.num_captures += 1
        self.num_operations = self.gpu.all_operations - operations
        return lambda: None


class FakeEvent:
    """The host waits for an event while the GPU has another block to do."""

    def record(self) -> None:
        pass

    synchronize = record


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
    FakeTensor.data_ptr = lambda self: self.untyped_storage()._cdata
    own.Graphs = lambda device: FakeGraphs(gpu)
    torch.cuda.Event = FakeEvent
    torch.nn.Module.to = lambda self, *_, **__: self  # cannot move fake tensors
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    prefix_tree.causal_lower_right = lambda *_: None
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    # Experts are multiplied together on an H100, whose compute capability is 9.0.
    properties = SimpleNamespace(total_memory=80 << 30, major=9, minor=0)
    torch.cuda.get_device_properties = lambda *_: properties
    with FakeTensorMode(allow_non_fake_inputs=True), gpu, _Host(gpu):
        yield gpu


# The operations of a token

SHAPE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
SMOLLM2 = {**SHAPE, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
SMOLLM2 |= {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
QWEN3 = {**SHAPE, **SHAPES["Qwen/Qwen3-0.6B"]}
WINDOW = {"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "SmolLM2-135M": ("Llama", SMOLLM2),
    "Qwen3-0.6B": ("Qwen3", QWEN3),
    "Mistral": ("Mistral", {**SHAPE, "sliding_window": None}),
    "Qwen2": ("Qwen2", SHAPE),
    "Phi3": ("Phi3", SHAPE),
    "SmolLM3": ("SmolLM3", SHAPE),
    "Granite": ("Granite", SHAPE),
    "GPT-2": ("GPT2", SHAPE),
    "Gemma3": ("Gemma3Text", {**SHAPE, **WINDOW, "head_dim": 16}),
    "Falcon": ("Falcon", SHAPE),
    "Qwen3-MoE": ("Qwen3Moe", {**SHAPE, **EXPERTS}),
    "Mixtral": ("Mixtral", SHAPE),
    "Laguna": ("Laguna", {**SHAPE, **EXPERTS}),
}


def operations_of(
    guard: str, family: str, use_peft: bool = False, options: Any = None
) -> dict[str, Any]:
    """Return the operations of a decoded token: in the step that a graph replays, and outside."""
    kind, shape = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**shape)
    config._attn_implementation = "sdpa"
    model_class = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
    with fake_gpu(guard, token=1, end=2) as gpu:
        with DEVICE:
            name = model_class.get(kind, f"{kind}ForCausalLM")
            # As in training: LoRA's base is bf16 and shared, other weights are the sampler's own.
            dtype = torch.bfloat16 if use_peft else torch.float32
            model = getattr(transformers, name)._from_config(config, dtype=dtype)
            model = (
                lora.attach(model, Config().model, "base", 0, torch.bfloat16) if use_peft else model
            )
        sampler = RowSampler(model, 600, 1.0, torch.bfloat16, max_tokens=1024, **(options or {}))
        graphs = sampler._blocks._graphs
        episodes = sampler.open([[4] * 20 + [5 + n] * 10 for n in range(32)], range(32))
        found = []
        for length in (25, 9, 25):  # the first captures
            sampler.sample(episodes, [length] * 32)
            for episode in episodes:
                sampler.extend(episode, [6, 7])
            found.append((Counter(gpu.waits), gpu.all_operations))
            gpu.waits, gpu.all_operations = Counter(), 0
        (_, _), (waits, operations), (more_waits, more_operations) = found
        return {
            "graphs": graphs.num_captures,
            "inside": graphs.num_operations,
            "outside": (more_operations - operations) / 16,
            "waits": (more_waits - waits).total(),
            "given_up": sampler._blocks._graphs is None,
        }
