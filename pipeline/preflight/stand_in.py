"""A small model of the recipe's architecture, on which sampling and training are compared.

A run trains what it says only if the log-probabilities of its sampler are those of its training
forward. Architectures differ in what may break that: caches, masks, positions, routers, dropout,
adapters. So before a run samples a short conversation from a model with the same layers, only
fewer and narrower ones, random weights and the recipe's own flags, and recomputes it as an update
does. Nothing of the model's own weights is loaded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
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

# Largest difference of a log-probability, in nats, at float32. Beyond the first, one is named;
# transformers' own `generate` is off by more for some layers, so there the second refuses.
MOST_NATS, MOST_NATS_OF_GENERATE = 5e-4, 0.05
MOST_PARAMETERS = 300_000_000  # of a stand-in; a larger one is not made
VOCABULARY = 256
TURNS, REPLY, MESSAGE = 3, 5, 6  # of a conversation; tokens of a reply and of a message
# Sizes that the way in which layers are computed does not depend on, and what they shrink to;
# windows become shorter than the conversation.
SMALLER = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_hidden_size"), 256),
    **dict.fromkeys(("shared_expert_intermediate_size", "block_ff_dim", "n_inner"), 256),
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),  # so that there are several
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 16),
    "linear_num_heads": 2,
    "first_k_dense_replace": 1,
    "vocab_size_per_layer_input": VOCABULARY,
}


def try_architecture(config: Config, empty: Any) -> list[str]:
    """Lines to print about a model of this kind under this recipe; `empty` has no weights.

    Raises UserError where what is sampled is not what would be trained, or either fails.
    """
    try:
        model = stand_in(empty)
    except Exception as error:
        return [f"not tried: a small model of this architecture ({reason_of(error)})"]
    notes = [fix_rotary(model, config.rollout.max_tokens), *_positions(config, model)]
    gap, generates = _try(config, model), unserved(model.config.get_text_config()) is not None
    if gap > (MOST_NATS_OF_GENERATE if generates else MOST_NATS):
        raise UserError(
            f"model: got {type(model).__name__}, for which log-probabilities of sampled tokens "
            f"and of training differ by {gap:.2g} nats in a trial (at most {MOST_NATS:g} is "
            f"rounding){_without(config, model)}"
        )
    if gap > MOST_NATS:
        notes.append(
            f"sampled and trained log-probabilities differ by up to {gap:.2g} nats in a trial "
            f"(rounding is below {MOST_NATS:g}): transformers' generate computes this model so"
        )
    return [note for note in notes if note]


def _try(config: Config, model: Any) -> float:
    """The largest difference in nats; UserError where sampling or training fails."""
    try:
        refuse_changed_logits(model)
        return gap_of(config, model)
    except UserError:
        raise
    except Exception as error:  # code of transformers, or of the model's author
        raise UserError(
            f"model: got {type(model).__name__}, which fails in a trial of sampling and training "
            f"({reason_of(error)}){_without(config, model)}"
        ) from None


def _without(config: Config, model: Any) -> str:
    """The remedy: the first of these settings without which the trial goes well."""
    for section, name in (("grpo", "share_prefixes"), ("model", "use_peft")):
        settings = getattr(config, section)
        if not getattr(settings, name):
            continue
        update = {section: settings.model_copy(update={name: False})}
        try:
            if gap_of(config.model_copy(update=update), model) <= MOST_NATS:
                return f"; set {name} false"
        except Exception:
            continue
    return "; use another model"


def gap_of(config: Config, model: Any) -> float:
    """The largest difference between sampled and recomputed log-probabilities, in nats.

    The model gets the recipe's adapters, with weights that matter, and its recomputation; one
    backward pass goes through it.
    """
    grpo, rollout = config.grpo, config.rollout
    generates = unserved(model.config.get_text_config()) is not None
    model = copy.deepcopy(model)
    if config.model.use_peft:
        model = lora.attach(model, config.model, "", config.run.seed)
    kind = GenerateSampler if generates else RowSampler
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
    """Conversations of several turns: two that begin alike, and a shorter one beside them."""
    prompts = [_ids(0, 12, vocabulary), _ids(0, 12, vocabulary), _ids(1, 7, vocabulary)]
    episodes = sampler.open(prompts, [stream_key("stand-in", n) for n in range(len(prompts))])
    found: list[tuple[list[int], list[bool], list[float]]] = [([], [], []) for _ in prompts]
    for turn in range(TURNS):
        for number, (episode, (ids, mask, logprobs)) in enumerate(
            zip(episodes, found, strict=True)
        ):
            if turn:
                reply = _ids(number * turn, REPLY + number, vocabulary)
                sampler.extend(episode, reply)
                ids += reply
                mask += [False] * len(reply)
                logprobs += [0.0] * len(reply)
        messages = sampler.sample(episodes, [MESSAGE] * len(episodes))
        for message, (ids, mask, logprobs) in zip(messages, found, strict=True):
            assert message is not None
            ids += message.ids
            mask += [True] * len(message.ids)
            logprobs += message.logprobs
    for episode in episodes:
        sampler.close(episode)
    rows: list[dict[str, Any]] = [
        {"prompt_ids": prompt, "completion_ids": ids, "loss_mask": mask, "logprobs": values}
        for prompt, (ids, mask, values) in zip(prompts, found, strict=True)
    ]
    return [Trajectory(domain="", task_id="", **row) for row in rows]


def _ids(number: int, count: int, vocabulary: int) -> list[int]:
    return [1 + (7 * number + 5 * i) % (vocabulary - 1) for i in range(count)]


@torch.no_grad()
def _positions(config: Config, model: Any) -> list[str]:
    """UserError where learned positions do not reach `max_tokens`; a note on rotary ones."""
    limit, known = config.rollout.max_tokens, _text(model.config)
    known = getattr(known, "max_position_embeddings", None)
    if _computes(model, 0) and not _computes(model, limit - 1):
        raise UserError(
            f"max_tokens: got {limit}, but the model has positions for "
            f"{known or 'fewer'} tokens; lower max_tokens, or use another model"
        )
    if isinstance(known, int) and limit > known:
        return [
            f"max_tokens is {limit}, and the model was made for {known} tokens "
            "(max_position_embeddings): what it says beyond may be poor"
        ]
    return []


def _computes(model: Any, position: int) -> bool:
    """Whether a token can stand there; libraries differ in what they raise where it cannot."""
    ids = torch.ones((1, 1), dtype=torch.int64)
    try:
        model.get_decoder()(ids, position_ids=torch.full_like(ids, position), use_cache=False)
    except Exception:
        return False
    return True


def stand_in(empty: Any) -> Any:
    """A model like `empty`, with few small layers and weights that matter.

    Raises whatever its code says where it cannot be made so small, or does not compute.
    """
    small = empty.num_parameters() < 10_000_000
    for is_last, shrink in enumerate((_keep,) if small else (_narrow, _shrink)):
        shape = copy.deepcopy(empty.config)
        shape.tie_word_embeddings = False  # or a token's own logit would outweigh all others
        try:
            shrink(shape)
            return _made(empty, shape)
        except Exception:
            if is_last or small:
                raise
    raise AssertionError


def _made(empty: Any, shape: Any) -> Any:
    with torch.device("meta"):
        size = type(empty)._from_config(copy.deepcopy(shape)).num_parameters()
    if size > MOST_PARAMETERS:
        raise ValueError(f"it would have {size / 1e6:.0f} M parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = type(empty)._from_config(
            shape, attn_implementation=empty.config._attn_implementation, dtype=torch.float32
        )
    model.eval()
    _fill(model.parameters(), 0)
    for seed, layer in enumerate((model.get_input_embeddings(), model.get_output_embeddings())):
        # So that logits are spread, without peaks.
        _fill([layer.weight], seed + 2, 3 / math.sqrt(layer.weight.shape[-1]))
    with torch.no_grad():
        model(torch.tensor([_ids(0, 5, layer.weight.shape[0])]), use_cache=False)
    return model


def _keep(config: Any) -> None:
    """A model that is small already."""


def _narrow(config: Any) -> None:
    """Fewer layers, with fewer heads of the same size."""
    _shrink(config)
    text = _text(config)
    heads, width = text.num_attention_heads, text.hidden_size
    alike = heads // (getattr(text, "num_key_value_heads", None) or heads)  # share their keys
    few = min(heads, 2 * alike)
    is_free = vars(text).get("head_dim") is not None or hasattr(text, "kv_lora_rank")
    text.num_attention_heads = few
    text.hidden_size = min(width, 256) if is_free else width // heads * few
    if vars(text).get("num_key_value_heads"):
        text.num_key_value_heads = few // alike


def _shrink(config: Any) -> None:
    """Fewer layers, but each kind of them; fewer tokens, experts and intermediate features."""
    text = _text(config)
    count = text.num_hidden_layers
    kinds = {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, list | tuple | str) and len(value) == count and name != "architectures"
    }
    derived = [getattr(text, name, None) or [0] for name in ("layer_types", "layers_block_type")]
    few = max([2, *(_first_with_all(value) for value in [*kinds.values(), *derived])])
    for name, value in kinds.items():
        setattr(text, name, value[:few])
    text.num_hidden_layers = min(few, count)
    for name, most in SMALLER.items():
        size = getattr(text, name, 0)
        if (size is None and name == "n_inner") or (isinstance(size, int) and size > most):
            setattr(text, name, most)
    if keys := getattr(text, "linear_num_key_heads", 0):  # which several values share
        text.linear_num_value_heads = 2 * text.linear_num_value_heads // keys
        text.linear_num_key_heads = 2
    text.vocab_size = min(text.vocab_size, VOCABULARY)
    for owner in {id(config): config, id(text): text}.values():
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(owner, name, 0)


def _first_with_all(kinds: Sequence[Any]) -> int:
    """How many layers from the first on hold each kind."""
    return 1 + max(list(kinds).index(kind) for kind in kinds)


def _text(config: Any) -> Any:
    return config.get_text_config(decoder=True)


@torch.no_grad()
def _fill(parameters: Iterable[torch.Tensor], seed: int, std: float | None = None) -> None:
    """Weights large enough that a wrong term shows; vectors, such as norms', stay."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        if parameter.dim() > 1:
            scale = std or 1 / math.sqrt(parameter.shape[-1])
            parameter.normal_(0.0, scale, generator=generator)
