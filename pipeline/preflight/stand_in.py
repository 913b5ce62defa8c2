"""A trial before a run: sampling and training a small model of the recipe's architecture.

Training is correct only if sampler and training compute equal log-probabilities. In some
architectures, caches, masks, positions, routers, dropout or adapters make log-probabilities differ.
The small model has the same kinds of layers, but few and narrow layers with random weights. The
trial samples short conversations under the recipe's settings. A training forward pass computes the
log-probabilities of the conversations again.
"""

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch

from pipeline.config.settings import Config
from pipeline.data.rng import stream_key
from pipeline.errors import UserError
from pipeline.files.untrusted import reason_of
from pipeline.grpo.micro_batches import make_micro_batches
from pipeline.grpo.token_logprobs import TokenLogprobs
from pipeline.models import lora
from pipeline.models.capabilities import (
    recompute_layers,
    refuse_changed_logits,
    refuse_mixed_up_sequences,
    unserved,
)
from pipeline.models.rotary import fix_rotary
from pipeline.models.weights import trained_weights
from pipeline.rollout.generate_sampler import GenerateSampler
from pipeline.rollout.row_sampler import RowSampler
from pipeline.rollout.sampler import Sampler
from pipeline.rollout.trajectory import Trajectory

MOST_NATS = 5e-4  # largest log-probability change that float32 rounding explains
MOST_NATS_OF_GENERATE = 0.05  # the same bound if transformers' `generate` samples
MOST_PARAMETERS = 300_000_000  # maximum number of parameters of the small model
LONGEST = 64  # no conversation of the trial has more tokens
TURNS, REPLY, MESSAGE = 3, 5, 6  # turns; tokens of a user's reply; tokens of the model's message
SMALLER = (  # maximum size for each setting; an attention window is shorter than a conversation
    (1, "n_group topk_group first_k_dense_replace"),
    (2, "num_experts_per_tok moe_topk moe_k top_k_experts linear_num_heads"),
    (8, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (8, "sliding_window window_size attention_chunk_size"),
    (16, "mamba_chunk_size chunk_size mamba_d_state ssm_state_size"),
    (256, "intermediate_size moe_intermediate_size shared_expert_intermediate_size"),
    (256, "ffn_hidden_size n_inner block_ff_dim vocab_size vocab_size_per_layer_input"),
)


def try_architecture(config: Config, empty: Any) -> list[str]:
    """Try a small model like `empty` under a recipe's settings, and return notes about the model.

    `empty` has no weights. Raises UserError if sampling or training fails, or if sampled and
    recomputed log-probabilities differ by more than rounding explains.
    """
    try:
        model = stand_in(empty, config.rollout.max_tokens)
    except Exception as error:
        return [f"not tried: a small model of this architecture ({reason_of(error)})"]
    notes = [fix_rotary(model, config.rollout.max_tokens), _check_positions(config, model)]
    settings = {"share_prefixes": config.grpo.share_prefixes, "use_peft": config.model.use_peft}
    remedies = [f"set {name} false" for name, is_on in settings.items() if is_on]
    name, remedy = type(model).__name__, " or ".join([*remedies, "use another model"])
    try:
        refuse_changed_logits(model)
        gap = gap_of(config, model)
    except UserError:
        raise
    except Exception as error:  # The code of a model may raise any exception.
        raise UserError(
            f"model: got {name}, which fails in a trial of sampling and training "
            f"({reason_of(error)}); {remedy}"
        ) from None
    said = (
        f"log-probabilities of sampled tokens and of training differ by {gap:.2g} nats in a trial "
        f"(at most {MOST_NATS:g} is rounding)"
    )
    is_served = unserved(model.config.get_text_config(), config.rollout.max_tokens) is None
    if gap > (MOST_NATS if is_served else MOST_NATS_OF_GENERATE):
        raise UserError(f"model: got {name}, for which {said}; {remedy}")
    if gap > MOST_NATS:
        notes.append(f"{said}; the cause is transformers' generate")
    return [note for note in notes if note]


def gap_of(config: Config, model: Any) -> float:
    """Return the largest difference between sampled and recomputed log-probabilities, in nats."""
    grpo, rollout = config.grpo, config.rollout
    is_served = unserved(model.config.get_text_config(), rollout.max_tokens) is None
    model, sampling = copy.deepcopy(model), RowSampler if is_served else GenerateSampler
    if config.model.use_peft:
        model = lora.attach(model, config.model, "", config.run.seed)
    sampler: Sampler = sampling(model, 0, rollout.temperature, torch.float32)
    if config.model.use_peft:  # Adapter outputs get about a third of the scale of layer outputs.
        std = math.sqrt(config.model.lora_r) / (2 * config.model.lora_alpha)
        _fill((p for name, p in model.named_parameters() if ".lora_B." in name), 1, std)
    if grpo.gradient_checkpointing:
        recompute_layers(model)
    sampler.load_weights(trained_weights(model))
    items = [(t, 1.0, 1.0) for t in _converse(sampler, model.get_input_embeddings().num_embeddings)]
    longest = rollout.max_tokens
    module = TokenLogprobs(model, rollout.temperature, max_tokens=longest).eval()
    others = []
    if config.model.use_peft:  # Export merges the adapters into the weights.
        merged = copy.deepcopy(model).merge_and_unload()
        others.append(TokenLogprobs(merged, rollout.temperature, max_tokens=longest).eval())
    if grpo.padding_free:
        refuse_mixed_up_sequences(model)
    shares = grpo.share_prefixes and not grpo.padding_free and module.shares_prefixes
    gaps = []
    for batch in make_micro_batches(items, 10_000, 0, grpo.padding_free, shares):
        logprobs, _ = module(batch)
        found = [logprobs.detach(), *(other(batch)[0].detach() for other in others)]
        gaps += [float((other - batch.old_logprobs).abs().max()) for other in found]
        if grpo.use_grpo:
            logprobs.sum().backward()
    return max(math.inf if math.isnan(gap) else gap for gap in gaps)


def _converse(sampler: Sampler, vocabulary: int) -> list[Trajectory]:
    prompts = [_ids(0, 12, vocabulary), _ids(0, 12, vocabulary), _ids(1, 7, vocabulary)]
    episodes = sampler.open(prompts, [stream_key("stand-in", n) for n in range(len(prompts))])
    rows = [Trajectory(domain="", task_id="", prompt_ids=prompt) for prompt in prompts]
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
def _check_positions(config: Config, model: Any) -> str:
    limit, ids = config.rollout.max_tokens, torch.ones((1, 1), dtype=torch.int64)
    shape = model.config.get_text_config(decoder=True)
    trained = getattr(shape, "max_position_embeddings", None)
    for position in (0, limit - 1):
        try:
            model.get_decoder()(ids, position_ids=position * ids, use_cache=False)
        except Exception:  # The type of the exception depends on the model.
            if position == 0:  # The model has no argument `position_ids`.
                break
            raise UserError(
                f"max_tokens: got {limit}, but the model has positions for "
                f"{trained or 'fewer'} tokens; lower max_tokens, or use another model"
            ) from None
    note = f"max_tokens is {limit}, and the model was made for {trained} tokens "
    note += "(max_position_embeddings): longer texts may be poor"
    return note if isinstance(trained, int) and limit > trained else ""


def stand_in(empty: Any, max_tokens: int = 0) -> Any:
    """Return a model like `empty`, but with few and small layers and random weights.

    A window that no episode of `max_tokens` tokens exceeds is not exceeded in the trial, either.
    Raises the exception of the model's code if a small model cannot be made or cannot run.
    """
    if empty.num_parameters() < 10_000_000:
        return _made(empty, _widened(empty, copy.deepcopy(empty.config), max_tokens))
    try:
        return _made(empty, _widened(empty, _narrowed(_shrunk(empty.config)), max_tokens))
    except Exception:  # Some architectures fix the number of heads or the width.
        return _made(empty, _widened(empty, _shrunk(empty.config), max_tokens))


def _made(empty: Any, config: Any) -> Any:
    config.tie_word_embeddings = False  # With tied embeddings, each token would predict itself.
    with torch.device("meta"):
        size = type(empty)._from_config(copy.deepcopy(config)).num_parameters()
    if size > MOST_PARAMETERS:
        raise ValueError(f"it would have {size / 1e6:.0f} M parameters")
    options = {"attn_implementation": empty.config._attn_implementation, "dtype": torch.float32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = type(empty)._from_config(config, **options).eval()
    _fill(model.parameters(), 0)
    for seed, layer in enumerate((model.get_input_embeddings(), model.get_output_embeddings())):
        _fill([layer.weight], seed + 2, 3 / math.sqrt(layer.weight.shape[-1]))
    with torch.no_grad():
        model(torch.tensor([_ids(0, 5, layer.weight.shape[0])]), use_cache=False)
    return model


def _widened(empty: Any, config: Any, max_tokens: int) -> Any:
    """Give `config` a window for LONGEST tokens if no episode exceeds the window of `empty`."""
    text = empty.config.get_text_config()
    if (window := getattr(text, "sliding_window", None)) and unserved(text, max_tokens) is None:
        config.get_text_config().sliding_window = max(window, LONGEST)
    return config


def _narrowed(config: Any) -> Any:
    text = config.get_text_config(decoder=True)
    heads, width = text.num_attention_heads, text.hidden_size
    queries = heads // (getattr(text, "num_key_value_heads", None) or heads)
    few = min(heads, 2 * queries)  # two key-value heads remain
    is_free = vars(text).get("head_dim") is not None or hasattr(text, "kv_lora_rank")
    text.num_attention_heads = few
    # In some architectures the width is the number of heads times the size of a head.
    text.hidden_size = min(width, 256) if is_free else width // heads * few
    if vars(text).get("num_key_value_heads"):
        text.num_key_value_heads = few // queries
    return config


def _shrunk(config: Any) -> Any:
    """Return a copy of `config` for a smaller model; at least one layer of each kind stays."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    count = text.num_hidden_layers
    by_layer = {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, list | tuple | str) and len(value) == count and name != "architectures"
    }
    derived = (getattr(text, name, None) or () for name in ("layer_types", "layers_block_type"))
    lists = map(list, (*by_layer.values(), *derived))
    few = max([2, *(1 + kinds.index(kind) for kinds in lists for kind in kinds)])
    for name, value in by_layer.items():
        setattr(text, name, value[:few])
    text.num_hidden_layers = min(few, count)
    for most, names in SMALLER:
        for name in names.split():
            if isinstance(size := getattr(text, name, None), int) and size > most:
                setattr(text, name, most)
    if keys := getattr(text, "linear_num_key_heads", 0):  # Several value heads share each key head.
        text.linear_num_value_heads = 2 * text.linear_num_value_heads // keys
        text.linear_num_key_heads = 2
    for owner in (config, text):
        owner.update(dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0))
    return config


@torch.no_grad()
def _fill(parameters: Iterable[torch.Tensor], seed: int, std: float | None = None) -> None:
    """Set matrices to random values; vectors, such as the weights of norms, do not change."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        if parameter.dim() > 1:
            scale = std or 1 / math.sqrt(parameter.shape[-1])
            parameter.normal_(0.0, scale, generator=generator)
