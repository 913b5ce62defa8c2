"""A stand-in for CUDA graphs on a CPU, which freezes what a capture freezes.

A capture records the operations of a step, and a replay does the same operations on the same
tensors: numbers of the host, addresses and the choice of operations are frozen. A capture raises an
exception if the host reads data, or if data of the host enters.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ATEN = torch.ops.aten
READS = {  # operations whose results need data
    ATEN._local_scalar_dense.default,
    ATEN.nonzero.default,
    ATEN.masked_select.default,
    ATEN.unique_consecutive.default,
    ATEN.equal.default,
}
ENTERS = {ATEN.lift_fresh.default, ATEN.lift_fresh_copy.default}


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


class Recorder(TorchDispatchMode):
    """Records operations that compute something; a view shows what others compute."""

    def __init__(self):
        super().__init__()
        self.num_operations = 0
        self.made = set()  # storages that the recorded operations have made
        self.inputs = {}  # by storage: a tensor that was there before
        self.lines = []  # (operation, its arguments, its result or None if it changes a tensor)

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if call in READS or call in ENTERS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {call}")
        result = call(*args, **kwargs)
        self.num_operations += 1
        given = {storage(x): x for x in tensors((args, kwargs))}
        self.inputs |= {key: x for key, x in given.items() if key not in self.made}
        self.made |= {storage(x) for x in tensors(result)} - given.keys()
        changes = call._schema.is_mutable
        if changes or not all(storage(x) in given for x in tensors(result)):
            self.lines.append((call, args, kwargs, None if changes else result))
        return result


class RecordedGraphs:
    """Has the methods of `Graphs`. A replay raises if a tensor of `fixed` has moved."""

    def __init__(self):
        self.fixed = list  # returns the sampler's tensors
        self.num_captures = self.num_replays = 0
        self.num_operations = 0  # of the last step captured
        self.inputs = []  # tensors that the last step reads or changes

    def warm_up(self, function):
        function()

    def forget(self):
        pass

    def capture(self, function):
        with Recorder() as recorder:
            function()
        self.num_captures += 1
        self.num_operations = recorder.num_operations
        self.inputs = [*recorder.inputs.values()]
        addresses = [x.data_ptr() for x in self.fixed()]

        def replay():
            self.num_replays += 1
            if [x.data_ptr() for x in self.fixed()] != addresses:
                raise RuntimeError("a tensor of the graph has moved")
            for call, args, kwargs, result in recorder.lines:
                again = call(*args, **kwargs)
                for frozen, new in zip(tensors(result), tensors(again), strict=False):
                    frozen.copy_(new)

        return replay
