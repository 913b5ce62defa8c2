"""How a rank joins the others: an Accelerator, the process group, and `deterministic`."""

import os
import warnings
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin
from transformers.utils import logging as transformers_logging

from pipeline.common.errors import UserError
from pipeline.config import environment_variables
from pipeline.config.settings import Config, SamplerFacts
from pipeline.distributed.devices import on_gpu, uses_bf16
from pipeline.distributed.launch import CONFIGS
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.rendezvous import rendezvous, rendezvous_again
from pipeline.distributed.watchdog import GRACE_S

BATCH_INVARIANT = (8, 0)  # the least compute capability with which vLLM is batch-invariant


def connect(config: Config) -> tuple[Accelerator, Ranks]:
    """Join the process group; raise UserError for an unsuitable launch configuration."""
    with rendezvous(config.run.timeout + GRACE_S):
        return _connected(config)


def _connected(config: Config) -> tuple[Accelerator, Ranks]:
    transformers_logging.disable_progress_bar()
    # Accelerate passes `broadcast_buffers` under an old name, and torch 2.13 warns about the name.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
    rendezvous_again(config.run.timeout + GRACE_S, "cuda" if on_gpu() else "cpu")
    mixed_precision = "bf16" if uses_bf16(config.model) else "no"
    environment_variables.pin(mixed_precision)
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        # The plugin overrides the environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[
            # The watchdog has GRACE_S seconds to report a hang before NCCL or gloo times out.
            InitProcessGroupKwargs(timeout=timedelta(seconds=config.run.timeout + GRACE_S)),
            # Gradients are summed after the last backward pass, so a small first bucket, which DDP
            # has by default, would only be one more exchange.
            DistributedDataParallelKwargs(
                broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=26
            ),
        ],
    )
    if accelerator.distributed_type.value not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise UserError(
            f"accelerate launch: its configuration asks for {accelerator.distributed_type.value}; "
            f"use --config_file {CONFIGS}/multi_gpu.yaml"
        )
    num_ranks = accelerator.num_processes
    assert num_ranks == int(os.environ.get("WORLD_SIZE", "1")), "ranks do not know each other"
    if config.run.deterministic:
        be_deterministic(config.rollout.sampler_facts, accelerator.device)
    return accelerator, Ranks(accelerator.process_index, num_ranks, config.run.timeout)


def be_deterministic(sampler: SamplerFacts, device: torch.device) -> None:
    """Make sums independent of the batch: all of them on CPUs, and the sampler's on GPUs."""
    if device.type == "cpu":
        torch.set_num_threads(1)
        return
    if not sampler.invariant_by:
        raise UserError(
            "deterministic: works on CPU ranks, or with sampler vllm; set ACCELERATE_USE_CPU=true, "
            "or leave it"
        )
    if torch.cuda.get_device_capability(device) < BATCH_INVARIANT:
        raise UserError(
            f"deterministic: vLLM needs GPUs of compute capability 8.0 or more; got "
            f"{torch.cuda.get_device_name(device)}; leave it"
        )
    os.environ[sampler.invariant_by] = "1"
