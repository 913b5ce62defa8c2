"""A small model of the recipe's architecture, to compare sampling with training before a run.

Training is right only if the sampler's log-probabilities equal those of the training forward.
Caches, masks, positions, routers, dropout and adapters may break this in some architectures. A
model with the same kinds of layers, but few, narrow and random layers, samples short conversations
under the recipe's settings, and an update's forward pass computes them again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from pipeline.config.settings import Config
from pipeline.data.rng import stream_key
from pipeline.errors import UserError
from pipeline.files.untrusted import reason_of
from pipeline.grpo.micro_batches import make_micro_batches
from pipeline.grpo.token_logprobs import TokenLogprobs, refuse_mixed_up_sequences
from pipeline.models import lora
from pipeline.models.capabilities import refuse_changed_logits, unserved
from pipeline.models.layers import recompute_layers
from pipeline.models.rotary import fix_rotary
from pipeline.models.weights import trained_weights
from pipeline.rollout.generate_sampler import GenerateSampler
from pipeline.rollout.row_sampler import RowSampler
from pipeline.rollout.sampler import Sampler
from pipeline.rollout.trajectory import Trajectory

# Largest differences of a log-probability, in nats, at float32. Rounding stays below the first.
# transformers' own `generate` differs by more for some layers, and is refused above the second.
MOST_NATS, MOST_NATS_OF_GENERATE = 5e-4, 0.05
MOST_PARAMETERS = 300_000_000  # of a stand-in; a larger one is not made
TURNS, REPLY, MESSAGE = 3, 5, 6  # of a conversation; tokens of a reply and of a message
SMALLER = {  # sizes of layers, by the names of settings; windows are shorter than a conversation
    1: ("n_group", "topk_group", "first_k_dense_replace"),
    2: ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "linear_num_heads"),
    8: (
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        *("sliding_window", "window_size", "attention_chunk_size"),
    ),
    16: ("mamba_chunk_size", "chunk_size", "mamba_d_state", "ssm_state_size"),
    256: (
        *("intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "n_inner"),
        *("shared_expert_intermediate_size", "block_ff_dim"),
        *("vocab_size", "vocab_size_per_layer_input"),
    ),
}


def try_architecture(config: Config, empty: Any) -> list[str]:
    """Notes about a model of this kind under this recipe; `empty` has no weights.

    Raises UserError if sampling and training fail or differ.
    """
    try:
        model = stand_in(empty)
    except Exception as error:
        return [f"not tried: a small model of this architecture ({reason_of(error)})"]
    notes = [fix_rotary(model, config.rollout.max_tokens), _positions(config, model)]
    settings = {"share_prefixes": config.grpo.share_prefixes, "use_peft": config.model.use_peft}
    remedies = [f"set {name} false" for name, is_on in settings.items() if is_on]
    name, remedy = type(model).__name__, " or ".join([*remedies, "use another model"])
    try:
        refuse_changed_logits(model)
        gap = gap_of(config, model)
    except UserError:
        raise
    except Exception as error:  # code of transformers, or of the model's author
        raise UserError(
            f"model: got {name}, which fails in a trial of sampling and training "
            f"({reason_of(error)}); {remedy}"
        ) from None
    is_served = unserved(model.config.get_text_config()) is None
    if gap > (MOST_NATS if is_served else MOST_NATS_OF_GENERATE):
        raise UserError(
            f"model: got {name}, for which log-probabilities of sampled tokens and of training "
            f"differ by {gap:.2g} nats in a trial (at most {MOST_NATS:g} is rounding); {remedy}"
        )
    if gap > MOST_NATS:
        notes.append(
            f"sampled and trained log-probabilities differ by up to {gap:.2g} nats in a trial "
            f"(rounding is below {MOST_NATS:g}): transformers' generate computes this model so"
        )
    return [note for note in notes if note]


def gap_of(config: Config, model: Any) -> float:
    """The largest difference between sampled and recomputed log-probabilities, in nats.

    The model gets the recipe's adapters, with random weights, and its gradient checkpointing. If
    the recipe trains, a backward pass must work.
    """
    grpo, rollout = config.grpo, config.rollout
    model = copy.deepcopy(model)
    if config.model.use_peft:
        model = lora.attach(model, config.model, "", config.run.seed)
    is_served = unserved(model.config.get_text_config()) is None
    kind = RowSampler if is_served else GenerateSampler
    sampler: Sampler = kind(model, 0, rollout.temperature, torch.float32)
    if config.model.use_peft:
        lora.disturb(model, 1)
    if grpo.gradient_checkpointing:
        recompute_layers(model)
    sampler.load_weights(trained_weights(model))
    trajectories = _converse(sampler, model.get_input_embeddings().num_embeddings)
    module = TokenLogprobs(model, rollout.temperature).eval()
    if grpo.padding_free:
        refuse_mixed_up_sequences(module)
    shares = grpo.share_prefixes and not grpo.padding_free and module.shares_prefixes
    items = [(trajectory, 1.0, 1.0) for trajectory in trajectories]
    gaps = []
    for batch in make_micro_batches(items, 10_000, 0, grpo.padding_free, shares):
        logprobs, _ = module(batch)
        gaps.append(float((logprobs.detach() - batch.old_logprobs).abs().max()))
        if grpo.use_grpo:
            logprobs.sum().backward()
    return max(math.inf if math.isnan(gap) else gap for gap in gaps)


def _converse(sampler: Sampler, vocabulary: int) -> list[Trajectory]:
    """Conversations of several turns: two with the same prompt, and one with a shorter prompt."""
    prompts = [_ids(0, 12, vocabulary), _ids(0, 12, vocabulary), _ids(1, 7, vocabulary)]
    episodes = sampler.open(prompts, [stream_key("stand-in", n) for n in range(len(prompts))])
    blank = partial(Trajectory, domain="", task_id="")
    rows = [blank(prompt_ids=prompt) for prompt in prompts]
    for turn in range(TURNS):
        for number, episode in enumerate(episodes if turn else ()):
            reply = _ids(number * turn, REPLY + number, vocabulary)
            sampler.extend(episode, reply)
            rows[number].append(reply)
        messages = sampler.sample(episodes, [MESSAGE] * len(episodes))
        for row, message in zip(rows, messages, strict=True):
            assert message is not None
            row.append(message.ids, message.logprobs)
    for episode in episodes:
        sampler.close(episode)
    return rows


def _ids(number: int, count: int, vocabulary: int) -> list[int]:
    return [1 + (7 * number + 5 * i) % (vocabulary - 1) for i in range(count)]


@torch.no_grad()
def _positions(config: Config, model: Any) -> str:
    """A note on rotary positions; UserError if learned positions do not reach `max_tokens`."""
    limit, ids = config.rollout.max_tokens, torch.ones((1, 1), dtype=torch.int64)
    trained = getattr(_text(model.config), "max_position_embeddings", None)
    for position in (0, limit - 1):
        try:
            model.get_decoder()(ids, position_ids=position * ids, use_cache=False)
        except Exception:  # libraries raise different errors
            if position == 0:  # the model takes no positions
                break
            raise UserError(
                f"max_tokens: got {limit}, but the model has positions for "
                f"{trained or 'fewer'} tokens; lower max_tokens, or use another model"
            ) from None
    note = f"max_tokens is {limit}, and the model was made for {trained} tokens "
    note += "(max_position_embeddings): what it says beyond may be poor"
    return note if isinstance(trained, int) and limit > trained else ""


def stand_in(empty: Any) -> Any:
    """A model like `empty`, with few small layers and random weights.

    Raises any exception of the model's code if it cannot be made so small, or does not compute.
    """
    if empty.num_parameters() < 10_000_000:
        return _made(empty, copy.deepcopy(empty.config))
    try:
        return _made(empty, _narrowed(_shrunk(empty.config)))
    except Exception:  # heads and width cannot be chosen freely in every architecture
        return _made(empty, _shrunk(empty.config))


def _made(empty: Any, shape: Any) -> Any:
    shape.tie_word_embeddings = False  # else a token's own logit would outweigh all others
    with torch.device("meta"):
        size = type(empty)._from_config(copy.deepcopy(shape)).num_parameters()
    if size > MOST_PARAMETERS:
        raise ValueError(f"it would have {size / 1e6:.0f} M parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attention = empty.config._attn_implementation
        model = (
            type(empty)
            ._from_config(shape, attn_implementation=attention, dtype=torch.float32)
            .eval()
        )
    _fill(model.parameters(), 0)
    for seed, layer in enumerate((model.get_input_embeddings(), model.get_output_embeddings())):
        _fill([layer.weight], seed + 2, 3 / math.sqrt(layer.weight.shape[-1]))  # no peaks in logits
    with torch.no_grad():
        model(torch.tensor([_ids(0, 5, layer.weight.shape[0])]), use_cache=False)
    return model


def _narrowed(config: Any) -> Any:
    """Fewer heads of the same size, and a smaller width."""
    text = _text(config)
    heads, width = text.num_attention_heads, text.hidden_size
    per_key = heads // (getattr(text, "num_key_value_heads", None) or heads)  # heads that share it
    few = min(heads, 2 * per_key)
    is_free = vars(text).get("head_dim") is not None or hasattr(text, "kv_lora_rank")
    text.num_attention_heads = few
    # In some architectures the width follows from the heads.
    text.hidden_size = min(width, 256) if is_free else width // heads * few
    if vars(text).get("num_key_value_heads"):
        text.num_key_value_heads = few // per_key
    return config


def _shrunk(config: Any) -> Any:
    """Fewer layers, but at least one of each kind; fewer tokens, experts and features."""
    config = copy.deepcopy(config)
    text = _text(config)
    count = text.num_hidden_layers
    by_layer = {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, list | tuple | str) and len(value) == count and name != "architectures"
    }
    derived = (getattr(text, name, None) or () for name in ("layer_types", "layers_block_type"))
    every = map(list, (*by_layer.values(), *derived))
    few = max([2, *(1 + kinds.index(kind) for kinds in every for kind in kinds)])  # has each kind
    for name, value in by_layer.items():
        setattr(text, name, value[:few])
    text.num_hidden_layers = min(few, count)
    for most, names in SMALLER.items():
        for name in names:
            size = getattr(text, name, None)
            if isinstance(size, int) and size > most:
                setattr(text, name, most)
    if keys := getattr(text, "linear_num_key_heads", 0):  # several values share each key
        text.linear_num_value_heads = 2 * text.linear_num_value_heads // keys
        text.linear_num_key_heads = 2
    for owner in (config, text):
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(owner, name, 0)
    return config


def _text(config: Any) -> Any:
    return config.get_text_config(decoder=True)


@torch.no_grad()
def _fill(parameters: Iterable[torch.Tensor], seed: int, std: float | None = None) -> None:
    """Draw weights so large that a wrong term shows. Vectors, such as those of norms, stay."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        if parameter.dim() > 1:
            scale = std or 1 / math.sqrt(parameter.shape[-1])
            parameter.normal_(0.0, scale, generator=generator)
