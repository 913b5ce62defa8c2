"""A stand-in for vLLM: the names that VLLMSampler uses, with a small engine in plain PyTorch.

As vLLM on a CPU, the engine keeps a copy of a tied output layer, which only `lm_head.weight` makes
new; it scales adapters in place, while it loads them; and it keeps a generator for each request.
Its raw log-probabilities are of the model's logits, and its processed ones, at the temperature of
the request, of the tokens that top-k and top-p leave.
"""

import json
import os
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm.model_executor import model_loader
from vllm.v1.engine import core

__version__ = "0.32.0"
Logprob = namedtuple("Logprob", ["logprob"])
FAULTS: list[str] = []  # what the next engine, or its next pass, does wrong
REPLIES: list[Any] = []  # functions that change what the engine replies
ENGINES: list["LLMEngine"] = []  # those that have started, with their arguments


class ModelRegistry:
    @staticmethod
    def get_supported_archs() -> set[str]:
        return {"Qwen3ForCausalLM", "LlamaForCausalLM"}


class EngineArgs(SimpleNamespace):
    """Arguments of an engine."""


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    detokenize: bool = True
    output_kind: Any = None


class _Weights:
    """The engine's model, with an output layer of its own."""

    def __init__(self, folder: str) -> None:
        config = AutoConfig.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.named = dict(self.model.named_parameters())
        self.head = self.model.get_output_embeddings().weight.detach().clone()
        self.is_tied = "lm_head.weight" not in self.named

    @torch.no_grad()
    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            if name == "lm_head.weight":
                self.head = tensor.detach().float().clone()
            if name in self.named:
                self.named[name].copy_(tensor)

    def tie(self) -> None:
        if self.is_tied:
            self.head = self.model.get_input_embeddings().weight.detach().clone()

    @torch.no_grad()
    def hidden(self, ids: list[int], adapters: dict[str, Any]) -> torch.Tensor:
        hooks = [
            self.model.get_submodule(name).register_forward_hook(
                lambda _, x, out, a=a, b=b: out + x[0] @ a.T @ b.T
            )
            for name, (a, b) in adapters.items()
        ]
        hidden: torch.Tensor = self.model.get_decoder()(torch.tensor([ids]), use_cache=False)[0][0]
        for hook in hooks:
            hook.remove()
        return hidden

    @torch.no_grad()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T


class LLMEngine:
    def __init__(self, arguments: EngineArgs) -> None:
        if "memory" in FAULTS:
            raise ValueError("Available memory (1.0/2.0 GiB) is less than requested memory for kv")
        self.arguments = arguments
        self.weights = _Weights(arguments.model)
        loader = model_loader.LOADERS[arguments.load_format]()
        loader.load_weights(self.weights, None)
        self.weights.tie()
        self.requests: dict[str, Any] = {}
        self.adapters: dict[int, dict[str, Any]] = {}
        self.asleep: set[str] = set()
        self.num_syncs = 0
        self.engine_core = SimpleNamespace(shutdown=self._shut_down)
        ENGINES.append(self)

    def _shut_down(self) -> None:
        ENGINES.remove(self)
        core.cleanup_dist_env_and_memory()

    from_engine_args = classmethod(lambda cls, arguments: cls(arguments))

    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def sleep(self, level: int) -> None:
        """As on a GPU: level 2 forgets the weights, level 1 keeps them in main memory."""
        assert not self.requests
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            zeros = {name: torch.zeros_like(tensor) for name, tensor in self.weights.named.items()}
            self.weights.load_weights(zeros.items())
            self.weights.tie()

    def wake_up(self, tags: list[str]) -> None:
        self.asleep -= set(tags)

    def collective_rpc(self, name: str, kwargs: dict[str, Any]) -> None:
        assert name == "reload_weights" and not self.requests and "weights" not in self.asleep
        self.num_syncs += 1
        self.weights.load_weights(kwargs["weights_iterator"])

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.weights)]

    def reset_prefix_cache(self) -> None:
        assert not self.requests

    def add_lora(self, request: Any) -> None:
        self.num_syncs += 1
        assert self.arguments.enable_lora and not self.adapters
        config = json.loads((Path(request.path) / "adapter_config.json").read_text())
        assert config["r"] <= self.arguments.max_lora_rank
        found = load_file(Path(request.path) / "adapter_model.safetensors")
        self.adapters[request.lora_int_id] = {
            name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): (
                a,
                found[name.replace("lora_A", "lora_B")].mul_(config["lora_alpha"] / config["r"]),
            )
            for name, a in found.items()
            if name.endswith(".lora_A.weight")
        }

    def remove_lora(self, number: int) -> None:
        del self.adapters[number]

    def add_request(self, name: str, prompt: Any, params: SamplingParams, lora_request: Any) -> str:
        ids = prompt["prompt_token_ids"]
        assert (
            not self.asleep
            and name not in self.requests
            and len(ids) < self.arguments.max_model_len
        )
        generator = None if params.seed is None else torch.Generator().manual_seed(params.seed)
        adapters = {} if lora_request is None else self.adapters[lora_request.lora_int_id]
        self.requests[name] = SimpleNamespace(
            prompt=ids, ids=[], logprobs=[], params=params, generator=generator, adapters=adapters
        )
        return f"{name}-internal"

    def _fails(self) -> bool:
        """On rank 1, in the episodes of step 2, where the folder has a file `trouble`."""
        is_rank = os.environ.get("RANK") == "1" and Path("trouble").is_file()
        samples = any(request.params.logprobs is not None for request in self.requests.values())
        return is_rank and self.num_syncs == 5 and samples

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.requests[name]

    def step(self) -> list[Any]:
        if "step" in FAULTS or self._fails():
            raise RuntimeError("EngineDeadError: the engine is gone")
        replies = [self._next(name, request) for name, request in [*self.requests.items()]]
        for change in REPLIES:
            for reply in replies:
                change(reply)
        return replies

    def _next(self, name: str, request: Any) -> Any:
        params = request.params
        hidden = self.weights.hidden(request.prompt + request.ids, request.adapters)
        logits = self.weights.compute_logits(hidden)
        of_prompt = None
        if params.prompt_logprobs is not None:
            rows = logits.log_softmax(-1).tolist()
            pairs = zip(rows, request.prompt[1:], strict=False)
            of_prompt = [None, *({token: Logprob(row[token])} for row, token in pairs)]
        raw = logits[-1].log_softmax(-1)
        last = logits[-1] / (params.temperature or 1.0)
        if params.top_k:
            last = last.masked_fill(last < last.topk(params.top_k).values[-1], -torch.inf)
        if params.top_p < 1:
            likely, order = last.softmax(-1).sort(descending=True)
            last[order[likely.cumsum(-1) - likely >= params.top_p]] = -torch.inf
        logprobs = last.log_softmax(-1)
        is_raw = self.arguments.logprobs_mode == "raw_logprobs"
        token = int(logprobs.argmax())
        if request.generator is not None:
            noise = torch.empty_like(logprobs).exponential_(generator=request.generator)
            token = int((logprobs.exp() / noise).argmax())
        request.ids.append(token)
        request.logprobs.append({token: Logprob(float((raw if is_raw else logprobs)[token]))})
        ends = token in params.stop_token_ids
        finished = ends or len(request.ids) == params.max_tokens
        if finished:
            del self.requests[name]
        reason = (
            ("abort" if "abort" in FAULTS else "stop" if ends else "length") if finished else ""
        )
        completion = SimpleNamespace(
            token_ids=request.ids, logprobs=request.logprobs, finish_reason=reason
        )
        return SimpleNamespace(
            request_id=name,
            finished=finished,
            outputs=[completion],
            prompt_token_ids=request.prompt,
            num_cached_tokens=0,
            prompt_logprobs=of_prompt,
        )
