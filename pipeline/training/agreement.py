"""A comparison of the sampler's log-probabilities with training's, before anything is trained.

GRPO is correct only if both are equal. In some architectures, caches, masks, positions or routers
make them differ. `refuse_disagreement` compares both on conversations that the run's own sampler
has sampled with the run's own weights.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pipeline.common.errors import RunError, UserError
from pipeline.common.untrusted import reason_of
from pipeline.config.settings import Config
from pipeline.data.rng import stream_key
from pipeline.distributed.devices import dtype_of
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.sharding import computed, fill
from pipeline.models.lora import base_model
from pipeline.models.sampling_copy import has_adapters, trained_weights
from pipeline.rollout.samplers.choice import Sampler
from pipeline.rollout.samplers.drawing import logprobs_of
from pipeline.rollout.samplers.generate import GenerateSampler
from pipeline.rollout.trajectory import Trajectory
from pipeline.training.micro_batches import make_micro_batches
from pipeline.training.token_logprobs import TokenLogprobs

# Largest mean or median difference of log-probabilities, in nats. Measured on models of 3 to 36
# layers: 0 in float32 and with LoRA, and up to 0.02 in bf16, where the trainer adds layers up in
# float32.
BOUNDS = {torch.float32: 5e-4, torch.bfloat16: 0.1}
BOUND_OF_GENERATE = 0.05  # the least bound if transformers' `generate` samples
# In bf16, a model may round more than that (Gemma 3 270M: up to 0.2). The same text tells how much:
# the sampler's difference was up to 2.0 times that between training with and without autocast.
ROUNDINGS = 4
PROMPT = 64
TURNS = 2
MESSAGE = 6
REPLY = 5  # tokens of a prompt; turns; tokens of both messages


@torch.no_grad()
def refuse_disagreement(
    sampler: Sampler,
    module: TokenLogprobs,
    accelerator: Any,
    ranks: Ranks,
    config: Config,
    prompt: list[int],
) -> None:
    """Raise UserError if `sampler` and `module` disagree beyond rounding; all ranks must call this.

    `prompt` is the prompt of a task. The tokens are computed as in an update: with padding, joined,
    or as a prefix tree. No random state and no weight changes.
    """
    settings = {
        "share_prefixes": config.grpo.share_prefixes,
        "padding_free": config.grpo.padding_free,
        "use_peft": config.model.use_peft,
    }
    remedies = [f"set {name} false" for name, is_on in settings.items() if is_on]
    remedies += ["set sampler own"] if not config.rollout.sampler_facts.is_exact else []
    remedy = " or ".join([*remedies, "use another model"])
    name = f"model: got {type(base_model(module.model)).__name__}"
    try:
        with _active_adapters(module.model, sampler, config):
            found = _differences(sampler, module, accelerator, config, prompt)
        unused = _unused_adapters(module, prompt)
    except (UserError, RunError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # The code of a model may raise any exception.
        raise UserError(
            f"{name}, which fails in a trial of sampling and training ({reason_of(error)}); "
            f"{remedy}"
        ) from None
    if unused:
        raise UserError(
            f"{name}, which reads the weight of {unused[0]} past its adapter; name other layers in "
            "lora_target_modules, or set use_peft false"
        )
    changed, gap, largest, rounding = (
        ranks.max(math.inf if math.isnan(value) else value) for value in found
    )
    dtype = dtype_of(config.model)
    least = BOUND_OF_GENERATE if isinstance(sampler, GenerateSampler) else 0.0
    bound = max(BOUNDS[dtype], least, ROUNDINGS * rounding)
    if changed > BOUNDS[torch.float32]:
        raise UserError(
            f"{name}, whose logits are not those of its decoder and its output layer "
            f"(log-probabilities differ by {changed:.2g} nats); use another model"
        )
    if gap > bound:
        raise UserError(
            f"{name}, for which log-probabilities of sampled tokens and of training differ by "
            f"{gap:.2g} nats in the mean of a conversation (largest: {largest:.2g}; at most "
            f"{bound:.2g} is rounding); {remedy}"
        )


def _differences(
    sampler: Sampler, module: TokenLogprobs, accelerator: Any, config: Config, prompt: list[int]
) -> list[float]:
    """Return four differences of log-probabilities, in nats.

    The first is between the model's logits and those of its decoder and output layer. The second is
    between sampler and training: the mean of the conversation with the largest mean. The third is
    the largest difference of a token. The fourth is the mean change by autocast, if needed.
    """
    rows = _converse(sampler, prompt, config.rollout.max_tokens)
    items = [(row, 0.0, float(number)) for number, row in enumerate(rows)]
    joins = config.grpo.padding_free
    shares = config.grpo.share_prefixes and not joins and module.shares_prefixes
    (batch,) = make_micro_batches(items, 1 << 20, 0, joins, shares)
    batch = batch.to(accelerator.device)
    with accelerator.autocast():
        trained_N = module(batch)[0]
    gaps_N = (trained_N - batch.old_logprobs).abs()
    means = [gaps_N[batch.weights == number].mean() for number in range(len(rows))]
    largest_mean = torch.stack(means).max()
    rounding = torch.zeros(())
    if not largest_mean <= BOUNDS[dtype_of(config.model)]:
        rounding = (trained_N - module(batch)[0]).abs().mean()
    changed = _change_of_logits(module, batch.input_ids[:1])
    return [float(x) for x in (changed, largest_mean, gaps_N.max(), rounding)]


def _change_of_logits(module: TokenLogprobs, ids_BT: torch.Tensor) -> torch.Tensor:
    """Return how much a model changes the logits of its output layer, which training does not."""
    model = module.model

    def change() -> torch.Tensor:
        hidden_BT = model.get_decoder()(ids_BT, use_cache=False).last_hidden_state
        ours = model.get_output_embeddings()(hidden_BT)
        own = model(ids_BT, use_cache=False).logits
        return (logprobs_of(ours, 1.0) - logprobs_of(own, 1.0)).abs().mean()

    return computed(module.sharded, change)


def _converse(sampler: Sampler, prompt: list[int], max_tokens: int) -> list[Trajectory]:
    """Sample four short conversations side by side; two of them have equal prompts."""
    room = max_tokens - TURNS * MESSAGE - (TURNS - 1) * (REPLY + 3)
    ids = prompt[: max(2, min(PROMPT, room))]
    prompts = [ids, ids, ids[: -(-len(ids) // 2)], ids[len(ids) // 2 :]]
    keys = [stream_key("agreement", number) for number in range(len(prompts))]
    episodes = sampler.open(prompts, keys)
    rows = [Trajectory(domain="", task_id="", prompt_ids=of) for of in prompts]
    for turn in range(TURNS):
        for number, episode in enumerate(episodes if turn else ()):
            reply = (ids * (REPLY + number))[: REPLY + number]
            sampler.extend(episode, reply)
            rows[number].append(reply)
        messages = sampler.sample(episodes, [MESSAGE] * len(episodes))
        for row, message in zip(rows, messages, strict=True):
            assert message is not None
            row.append(message.ids, message.logprobs)
    for episode in episodes:
        sampler.close(episode)
    return rows


def _unused_adapters(module: TokenLogprobs, ids: list[int]) -> list[str]:
    """Return the layers whose weights a model reads past their adapters.

    Such adapters would change the model only when they are merged into the weights.
    """
    model = module.model
    if not has_adapters(model):
        return []
    from peft.tuners.lora import LoraLayer

    # Of experts, only some compute.
    named = ((n, x) for n, x in model.named_modules() if "expert" not in n)
    layers: dict[Any, str] = {layer: name for name, layer in named if isinstance(layer, LoraLayer)}
    used = set[Any]()
    hooks = [layer.register_forward_pre_hook(lambda x, _: used.add(x)) for layer in layers]
    ids_1T = torch.tensor([ids], device=next(model.parameters()).device)
    computed(module.sharded, lambda: model(ids_1T, use_cache=False))
    for hook in hooks:
        hook.remove()
    return [name for layer, name in layers.items() if layer not in used]


@contextmanager
def _active_adapters(model: Any, sampler: Sampler, config: Config) -> Iterator[None]:
    """Inside this context, LoRA adapters change outputs, also before any training."""
    named = model.named_parameters() if has_adapters(model) else ()
    adapters = [parameter for name, parameter in named if ".lora_B." in name]
    before = [parameter.clone() for parameter in adapters]
    # Adapter outputs get about 3 % of the scale of layer outputs. With a third, Gemma 3 270M rounds
    # by 0.12 nats in bf16.
    std = math.sqrt(config.model.lora_r) / (20 * config.model.lora_alpha)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapters:
        fill(parameter, std * torch.randn(parameter.shape, generator=generator))
    try:
        sampler.load_weights(trained_weights(model))
        yield
    finally:
        for parameter, values in zip(adapters, before, strict=True):
            parameter.copy_(values)
    sampler.load_weights(trained_weights(model))
