"""The policy: loading it, and the log-probabilities that training needs.

Legend: B sequences, T tokens, N selected tokens, U distinct predictions of them, V vocabulary.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from accelerate.utils import parse_flag_from_env
from huggingface_hub.constants import ENDPOINT
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from pipeline.config.settings import DEFAULT_DOMAINS, ModelSettings, UserError
from pipeline.files.untrusted import printable, reason_of, shown
from pipeline.grpo.prefix_tree import NO_MASK, follow_prefixes
from pipeline.models import lora
from pipeline.models.files import missing_weights, problem_of_name, weights_in
from pipeline.models.tiny import tiny_model, tiny_tokenizer
from pipeline.rollout.trajectory import MicroBatch

LOGITS_PER_CHUNK = 1 << 24  # logits held at once when log-probabilities are computed


def load_tokenizer(settings: ModelSettings, domains: Sequence[str] = DEFAULT_DOMAINS) -> Any:
    """The tokenizer of a model, for these domains where it is made here.

    UserError where there is none.
    """
    if settings.model == "tiny":
        return tiny_tokenizer(domains)
    return from_files(
        settings.model,
        "tokenizer",
        lambda: AutoTokenizer.from_pretrained(
            settings.model,
            trust_remote_code=settings.trust_remote_code,
            local_files_only=not hub_reachable(),
        ),
    )


def load_model(settings: ModelSettings, tokenizer: Any, seed: int) -> Any:
    """A causal language model with fp32 parameters; UserError where it cannot be loaded."""
    if settings.model == "tiny":
        return tiny_model(tokenizer, seed)
    return load_folder(settings.model, settings)


def load_folder(folder: str | Path, settings: ModelSettings) -> Any:
    """A causal language model with fp32 parameters from a folder or a hub id.

    The adapters of a LoRA checkpoint come merged into their base model. UserError where its files
    hold no safetensors, or not all weights of the model.
    """
    if lora.is_adapter(folder):
        return lora.load_merged(load_folder(lora.base_of(folder), settings), folder)
    if not problem_of_name(str(folder)) and os.path.isdir(folder):
        weights_in(folder)
    model, told = from_files(
        str(folder),
        "model",
        lambda: AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=settings.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            local_files_only=not hub_reachable(),
            output_loading_info=True,
        ),
    )
    if missing := sorted(told["missing_keys"]):  # which transformers would draw at random
        raise missing_weights(folder, missing)
    if unused := sorted(told["unexpected_keys"]):
        warnings.warn(
            f"{folder} holds {len(unused)} weights that the model does not use, such as "
            f"{printable(unused[0])}",
            stacklevel=2,
        )
    return model


def on_gpu() -> bool:
    """Whether this process computes on a GPU; ACCELERATE_USE_CPU forbids it, as in Accelerate."""
    return torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")


def uses_bf16(settings: ModelSettings) -> bool:
    """Whether forward passes run under bf16 autocast here."""
    if settings.mixed_precision == "auto":
        return on_gpu()
    return settings.mixed_precision == "bf16"


@cache
def hub_reachable() -> bool:
    """Whether the hub's name resolves.

    Without it, transformers would retry for half a minute per file.
    """
    if any(
        os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    ):
        return True  # a proxy resolves the name itself
    try:
        socket.getaddrinfo(urlparse(ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def from_files(name: str, what: str, load: Callable[[], Any]) -> Any:
    """What `load` makes of the files of a model; UserError where it cannot."""
    remedy = "give a folder made by save_pretrained"
    reason = problem_of_name(name)
    if not reason:
        try:
            with _quiet():
                return load()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever libraries say of files that are not what they expect
            reason = reason_of(error)
            if "attention implementation" in str(error):
                remedy = "set attn_implementation eager, or use another model"
            if "custom code" in str(error) or "trust_remote_code" in str(error):
                remedy = "read its code, then set trust_remote_code, which runs it"
    raise UserError(
        f"model: got {shown(name)}, but its {what} cannot be loaded ({reason}); {remedy}"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers logs beside the reason that it raises."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@torch.no_grad()
def refuse_changed_logits(model: Any) -> None:
    """UserError where logits are not the output layer's alone, which is what training computes."""
    was_training = model.training
    model.eval()  # dropout would change them, too
    ids = torch.arange(1, 8, device=next(model.parameters()).device)[None]
    ids = ids % model.get_input_embeddings().num_embeddings
    try:
        whole = model(ids, use_cache=False).logits
        hidden = getattr(model.get_decoder()(ids, use_cache=False), "last_hidden_state", None)
        plain = None if hidden is None else model.get_output_embeddings()(hidden)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code of transformers, or of the model's author
        raise UserError(
            f"model: got {type(model).__name__}, which does not compute ({reason_of(error)}); use "
            "another"
        ) from None
    model.train(was_training)
    if plain is None or not torch.allclose(plain, whole, rtol=0, atol=1e-3 * float(whole.std())):
        raise UserError(
            f"model: got {type(model).__name__}, whose logits are not those of its decoder and its "
            "output layer, which is not supported; use another"
        )


@torch.no_grad()
def refuse_mixed_up_sequences(module: TokenLogprobs) -> None:
    """UserError where the model's attention sees across sequences that are joined in one row."""
    device = next(module.parameters()).device
    sequences = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]], device=device)
    positions = torch.arange(4, device=device).repeat(2)[None]
    apart = module.model(sequences, use_cache=False).logits.flatten(0, 1)
    joined = module.model(sequences.view(1, -1), position_ids=positions, use_cache=False).logits[0]
    if not torch.allclose(apart, joined, rtol=1e-3, atol=1e-3):
        raise UserError(
            "padding_free: this model's attention mixes joined sequences up; set it false"
        )


class TokenLogprobs(nn.Module):
    """The policy as the update sees it: log-probabilities and entropies of selected tokens.

    Only the selected positions meet the vocabulary, each once, in chunks that are recomputed in
    the backward pass, so that logits never cost B x T x V floats. Sequences are padded on the
    right, where causal attention cannot see, or share their beginnings (`prefixes.py`).
    """

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.shares_prefixes = follow_prefixes(model)

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log-probabilities of `batch.targets` and entropies in nats.

        Each is [N], at least float32.
        """
        along: dict[str, Any] = {}
        if batch.tree is not None:
            assert self.shares_prefixes, "this model's attention does not follow prefix trees"
            along = {"tree": batch.tree, "attention_mask": NO_MASK.to(batch.input_ids.device)}
        hidden_BT = self.model.get_decoder()(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **along
        ).last_hidden_state
        places_N = batch.rows * batch.input_ids.shape[1] + batch.columns
        places_U, which_N = torch.unique_consecutive(places_N, return_inverse=True)
        hidden_U = hidden_BT.flatten(0, 1)[places_U]
        head = self.model.get_output_embeddings()
        size = max(1, LOGITS_PER_CHUNK // head.weight.shape[0])
        if len(hidden_U) <= size:
            return self._head(head, hidden_U, which_N, batch.targets)
        firsts = torch.arange(0, len(hidden_U), size)
        ends = torch.searchsorted(which_N, firsts[1:].to(which_N.device)).cpu()
        chunks = (
            hidden_U.split(size),
            which_N.tensor_split(ends),
            batch.targets.tensor_split(ends),
        )
        pieces = [
            checkpoint(self._head, head, hidden, which - first, targets, use_reentrant=False)
            for first, hidden, which, targets in zip(firsts.tolist(), *chunks, strict=True)
        ]
        return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])

    def _head(
        self,
        head: nn.Module,
        hidden_U: torch.Tensor,
        which_N: torch.Tensor,
        targets_N: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of N tokens, of which several may have one prediction among the U distinct ones."""
        logits_UV = head(hidden_U)
        at_least_fp32 = torch.promote_types(logits_UV.dtype, torch.float32)
        logprobs_UV = (logits_UV.to(at_least_fp32) / self.temperature).log_softmax(-1)
        entropy_U = -(logprobs_UV.exp() * logprobs_UV).sum(-1)
        return logprobs_UV[which_N, targets_N], entropy_U[which_N]
