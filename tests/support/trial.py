"""The comparison of sampler and training that a run does first, without the rest of the run."""

import torch
from accelerate import Accelerator

from pipeline.config.cli import parse
from pipeline.distributed.ranks import Ranks
from pipeline.models import lora
from pipeline.models.layers import fix_rotary
from pipeline.rollout.samplers.choice import make_sampler
from pipeline.training.agreement import refuse_disagreement
from pipeline.training.token_logprobs import TokenLogprobs
from tests.support.helpers import chat


def trial(model, *flags: str, max_tokens: int = 64) -> None:
    """Raise UserError if a run with the `flags` would refuse the model."""
    config = parse(["--max-tokens", str(max_tokens), *flags])
    fix_rotary(model, config.rollout.max_tokens)
    if config.model.use_peft:
        model = lora.attach(model, config.model, "", config.run.seed)
    sampler = make_sampler(model, chat(), config.rollout, torch.float32, is_main=False)
    module = TokenLogprobs(model, config.rollout.temperature, max_tokens=max_tokens).eval()
    prompt = [1 + 7 * n % 15 for n in range(40)]
    refuse_disagreement(sampler, module, Accelerator(), Ranks(0, 1, 5), config, prompt)
