"""Parameters, gradients and moments spread over the ranks.

`shard_model` uses torch's `fully_shard` (FSDP2; ZeRO stage 3, Rajbhandari et al. 2020, arXiv
1910.02054, section 5.3): a rank keeps a part of each parameter, and gathers the parameters of one
layer when it computes the layer. Each pass through the model is then a collective, so all ranks
need the same number of passes. Or all parameters are gathered once for many passes (`held`), which
then need no other rank. `ShardedAdamW` spreads the moments alone (ZeRO stage 1, section 5.1).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pipeline.common.errors import UserError

Result = TypeVar("Result")
ROW = 64


class Sharded:
    """A model whose parameters are spread over the ranks; `shard_model` makes it.

    `root` is a module whose call computes with the gathered parameters outside the layers:
    embedding, last norm, output layer.
    """

    def __init__(self, model: nn.Module, reshards: bool) -> None:
        self.root: Any = _Root(model)
        self.reshards = reshards
        self.is_held = False
        self.num_exchanges = 0  # since the pass began
        self.num_left_out = 0  # of the next exchanges, those that this rank has done before

    def modules(self) -> list[Any]:
        from torch.distributed.fsdp import FSDPModule

        return [module for module in self.root.modules() if isinstance(module, FSDPModule)]

    def set_held(self, is_held: bool) -> None:
        self.is_held = is_held
        self.root.set_requires_gradient_sync(not is_held)
        self.root.set_reshard_after_backward(not is_held)

    def free_gathered(self) -> None:
        """Free gathered parameters; the next pass gathers them anew."""
        for module in self.modules():
            module.reshard()


class _Root(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Result]) -> Result:
        return compute()


class _Exchange:
    """torch's `AllGather` and `ReduceScatter` of `fully_shard`; counts, and can leave some out."""

    def __init__(self, sharded: Sharded, exchange: Callable[..., Any]) -> None:
        self.sharded = sharded
        self.exchange = exchange

    def allocate(self, size: Sequence[int], **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any
    ) -> Any:
        if self.sharded.num_left_out:
            self.sharded.num_left_out -= 1
            return None
        self.sharded.num_exchanges += 1
        return self.exchange(output_tensor, input_tensor, **options)


def shard_model(
    model: nn.Module, layers: Sequence[nn.Module], compute: torch.dtype | None, *, reshards: bool
) -> Sharded:
    """Shard a model's parameters over the ranks in place; all ranks must call this function.

    What computes with the model needs the result. Raises UserError before torch 2.13, which cannot
    leave a pass half done.
    The parameters become DTensors in float32 (frozen ones keep their types). Layers compute with
    `compute`, or with the parameters' own types. Gradients are summed over the ranks, in float32 or
    more. If `reshards`, a layer's parameters are freed after its forward and its backward pass;
    otherwise `held` gathers all layers, and `sum_held_gradients` adds up their gradients.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if not hasattr(FSDPModule, "reset_iter_state"):
        raise UserError(f"shard: got full with torch {torch.__version__}; install torch>=2.13")
    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    reduced = None if compute is None else torch.float32
    policy = MixedPrecisionPolicy(compute, reduced, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy)
    sharded = Sharded(model, reshards)
    fully_shard(sharded.root, mesh=mesh, mp_policy=policy)
    for module in sharded.modules():
        # A sum, not a mean. These settings are of each module alone.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        module.set_custom_all_gather(_Exchange(sharded, dist.all_gather_single))
        module.set_custom_reduce_scatter(_Exchange(sharded, dist.reduce_scatter_single))
    return sharded


def is_sharded(model: Any) -> bool:
    return hasattr(next(model.parameters()), "full_tensor")


def computed(sharded: Sharded | None, compute: Callable[[], Result]) -> Result:
    """Return `compute()`, which calls layers of a model that may be sharded."""
    if sharded is None:
        return compute()
    result: Result = sharded.root(compute)
    if not torch.is_grad_enabled() and not sharded.is_held:  # else a backward pass frees it
        sharded.free_gathered()
    return result


def passes_together(sharded: Sharded | None) -> bool:
    """Return True if a pass through the model now is a collective."""
    return sharded is not None and not sharded.is_held


@contextmanager
def held(sharded: Sharded | None) -> Iterator[None]:
    """Gather all parameters of a model whose layers do not reshard, and keep them in the context.

    Passes in the context then use no other rank. At the end, `sum_held_gradients` adds up their
    gradients.
    """
    if sharded is None or sharded.reshards:
        yield
        return
    sharded.set_held(True)
    for module in sharded.modules():
        module.unshard()
    try:
        yield
    finally:
        sharded.set_held(False)
        sharded.free_gathered()


def sum_held_gradients(sharded: Sharded | None, compute: Callable[[], object]) -> None:
    """Sum the gradients of all passes of the context `held` over the ranks, at its end.

    `compute` is another pass with a backward pass, of gradients that are zero. In other contexts,
    each pass has done this.
    """
    if sharded is not None and sharded.is_held:
        sharded.set_held(False)
        compute()


def leave_pass(sharded: Sharded | None, compute: Callable[[], object]) -> None:
    """Leave a pass that an exception has ended; the gradients on all ranks are then useless.

    Where other ranks wait inside the pass, go through the rest of it with `compute`, a small pass:
    it leaves out the exchanges that the failed pass has done. See `start_over`.
    """
    if sharded is None:
        return
    sharded.root.reset_iter_state()
    if not sharded.is_held:
        sharded.num_left_out = sharded.num_exchanges
        compute()


def start_over(sharded: Sharded | None, compute: Callable[[], object]) -> None:
    """Flush what failed passes have left in a sharded model; all ranks must call this function.

    `compute` is a pass with a backward pass. The caller then zeroes the gradients.
    """
    if sharded is not None:
        sharded.root.reset_iter_state()
        compute()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, gathered from all ranks if it is sharded; all ranks must then call this."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which shares its memory; of a plain tensor, itself."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, which every rank has, sharded as `like` is."""
    if not hasattr(like, "full_tensor") or hasattr(value, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    here = value.to(local(like))
    return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def fill(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole tensor, which every rank has, into a parameter that may be sharded."""
    local(parameter).copy_(local(placed(value, parameter)))


def write_parts(
    folder: Path, tensors: dict[str, torch.Tensor], files: dict[str, int], *, joins: bool
) -> None:
    """Write tensors as safetensors, each rank its own parts; all ranks must call this function.

    `files` has the number of each tensor's file. If `joins`, the parts are in the subfolder
    `sharded`, and the main rank joins them, tensor by tensor. Raises on all ranks the error of the
    first rank that fails.
    """
    import torch.distributed.checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(
        str(folder), files, save_distributed=True, enable_consolidation=joins
    )
    try:
        dcp.save(tensors, storage_writer=writer)
    except dcp.CheckpointException as error:  # no Exception, so nothing would catch it
        fault, _ = next(iter(error.failures.values()))
        raise fault from None


def read_parts(folder: Path, tensors: dict[str, torch.Tensor]) -> bool:
    """Read into the tensors what `write_parts` has written on any number of ranks.

    Returns whether this rank has found all that it needs.
    """
    import torch.distributed.checkpoint as dcp

    for tensor in tensors.values():
        local(tensor).fill_(torch.nan)  # a lost file may leave holes
    try:
        # Each rank reads what it needs, without the others.
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    except dcp.CheckpointException:
        return False
    return not any(local(tensor).isnan().any() for tensor in tensors.values())


@contextmanager
def exchanged(
    sharded: Sharded | None, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[None]:
    """Let a model compute with the second tensor of each pair in place of the first."""
    _exchange(sharded, pairs)
    try:
        yield
    finally:
        _exchange(sharded, pairs)


@torch.no_grad()
def _exchange(sharded: Sharded | None, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if sharded is not None:
        sharded.free_gathered()
    for first, second in pairs:
        kept = local(first).clone()
        local(first).copy_(local(second))
        local(second).copy_(kept)


class ShardedAdamW(torch.optim.AdamW):
    """AdamW with moments sharded over the ranks; each bit of a step is that of AdamW.

    A rank updates a part of each parameter, and then gets the parts of the other ranks.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any) -> None:
        rank = dist.get_rank()
        self._whole: list[list[torch.Tensor]] = []
        parts = []
        for group in groups:
            self._whole.append([*group["params"]])
            cut = [nn.Parameter(_part(p.data, rank)) for p in group["params"]]
            parts.append({**group, "params": cut})
        super().__init__(parts, **settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rank = dist.get_rank()
        for group, parameters in zip(self.param_groups, self._whole, strict=True):
            for part, parameter in zip(group["params"], parameters, strict=True):
                part.grad = None if parameter.grad is None else _part(parameter.grad, rank)
        super().step(closure)
        for group, parameters in zip(self.param_groups, self._whole, strict=True):
            for part, parameter in zip(group["params"], parameters, strict=True):
                parameter.view(-1).copy_(_gathered(part.data, parameter))

    @property
    def whole_parameters(self) -> list[torch.Tensor]:
        return [parameter for parameters in self._whole for parameter in parameters]

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor of a parameter's shape."""
        return _part(tensor, dist.get_rank())

    def whole_state_dict(self, is_main: bool) -> dict[str, Any] | None:
        """Return the state of an AdamW on the main rank, else None; all ranks must call this."""
        own_state = super().state_dict()
        states = dict[int, dict[str, torch.Tensor]]()
        for number, parameter in enumerate(self.whole_parameters):
            own = own_state["state"].get(number)
            if own is None:  # no step has been done
                continue
            moments = {
                n: _gathered(own[n], parameter).view_as(parameter) for n in own if n != "step"
            }
            if is_main:
                states[number] = {"step": own["step"], **moments}
        return {**own_state, "state": states} if is_main else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.whole_parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def _size(parameter: torch.Tensor) -> int:
    """Return the most elements of a parameter that a rank updates, a multiple of ROW.

    The fused kernel rounds otherwise where a row of its vector registers is not full.
    """
    return -(-parameter.numel() // (ROW * dist.get_world_size())) * ROW


def _part(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.view(-1)[rank * _size(tensor) : (rank + 1) * _size(tensor)]


def _gathered(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the parts of all ranks in one row, as long as `like` has elements."""
    size = _size(like)
    padded = part.new_zeros(size)
    padded[: len(part)] = part
    row = part.new_empty(size * dist.get_world_size())
    dist.all_gather([*row.split(size)], padded)
    return row[: like.numel()]
