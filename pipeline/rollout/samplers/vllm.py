"""vLLM's engine in the rank's own process as a `Sampler`; it needs `pip install vllm`.

Token ids go in and come out, never text. Each message is a request whose seed depends on the
conversation's key and on the number of tokens that the conversation has drawn. Tokens therefore
depend neither on the batch nor on the number of ranks, apart from rounding. vLLM's prefix cache
carries a conversation from message to message.

As with the other samplers, log-probabilities are of all tokens at the sampling temperature,
whatever `top_k` and `top_p` leave. vLLM has none of this kind: its raw ones ignore the temperature,
and its processed ones are of the tokens that are left. vLLM's model therefore divides its own
logits by the temperature, and its sampler gets the temperature 1.

Weights travel inside the process. A plain model gives every parameter; a model with LoRA gives its
base once, when the engine starts, and then its adapters, which vLLM multiplies beside the base.
"""

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from operator import index
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from pipeline.common.errors import EngineError, RunError, UserError
from pipeline.common.untrusted import reason_of, shown
from pipeline.config.settings import RolloutSettings
from pipeline.data.rng import stream_key
from pipeline.models.lora import base_model
from pipeline.models.rank_memory import give_memory_back, is_out_of_memory, memory_of_rank
from pipeline.models.sampling_copy import Weights, complete, has_adapters, trained_weights
from pipeline.rollout.trajectory import Sampled

VERSIONS = ((0, 32), (0, 33))  # the first version that serves, and the first that was not tried
LOAD_FORMAT = "in_process"  # the name under which vLLM knows the loader of a rank's own weights
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # largest ranks that vLLM makes room for
HEAD = "lm_head.weight"
PREFILL_TOKENS = 8192  # tokens of prompts that a pass on a CPU computes at least
SHORTEST_TOKENS = 64  # an engine's shortest conversation; the probe of weights needs some tokens
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the rank's threads stay as they are
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(kw_only=True, eq=False)
class VLLMConversation:
    """One conversation of a VLLMSampler."""

    key: int  # 64-bit key that selects the conversation's random numbers
    ids: list[int]
    num_sampled: int = 0  # number of tokens that the conversation has drawn
    request: str = ""  # vLLM's name of the message that is being sampled; empty: none is
    room: int = 0  # maximum number of tokens of that message
    message: Sampled | None = None  # complete, and not yet returned


class VLLMSampler:
    """A `Sampler` with vLLM's engine. Raises UserError if the engine cannot serve the model.

    All ranks must make one at the same time. A message ends at one of the token ids `stops`.
    """

    def __init__(
        self, model: Any, settings: RolloutSettings, dtype: torch.dtype, stops: Sequence[int]
    ) -> None:
        self.num_tokens = 0
        self.num_padded_tokens = 0
        self._settings = settings
        self._temperature = settings.temperature  # of the logits
        self._stops = list(stops)
        # By the name of the request; None asks for log-probabilities.
        self._asking: dict[str, VLLMConversation | None] = {}
        self._num_requests = 0
        self._adapter_config = model.peft_config["default"] if has_adapters(model) else None
        self._adapter: Any = None  # vLLM's request for the present adapters
        self._num_adapters = 0
        self._shapes = {name: weight.shape for name, weight in trained_weights(model)}
        plain = base_model(model)
        self._is_on_cpu = next(plain.parameters()).device.type == "cpu"
        embedding = plain.get_input_embeddings().weight
        self._embedding = next(n for n, weight in plain.named_parameters() if weight is embedding)
        self._vocab_size = len(embedding)
        self._is_tied = plain.get_output_embeddings().weight is embedding
        self._plain = plain
        fused = [n for n, shape in self._shapes.items() if ".experts." in n and len(shape) == 3]
        if self._is_on_cpu and fused:
            raise UserError(
                "sampler: got vllm, which on CPUs keeps the first weights of experts; set own"
            )
        self._vllm = _library()
        self._engine: Any = self._started(plain, dtype)

    # The engine

    def _started(self, model: Any, dtype: torch.dtype) -> Any:
        architecture = type(model).__name__
        if architecture not in self._vllm.ModelRegistry.get_supported_archs():
            raise UserError(f"sampler: got vllm, which does not know {architecture}; set own")
        _register_loader(model)
        with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
            config = copy(model.config)
            config.architectures = [architecture]
            config.to_json_file(Path(folder) / "config.json", use_diff=False)
            arguments = self._vllm.EngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                load_format=LOAD_FORMAT,
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=max(self._settings.max_tokens, SHORTEST_TOKENS),
                max_num_seqs=self._settings.max_concurrent_episodes,
                # An engine beside other ranks' joins their process group and computes alone.
                distributed_executor_backend="external_launcher" if "RANK" in os.environ else "uni",
                enable_prefix_caching=True,
                logprobs_mode="raw_logprobs",
                generation_config="vllm",  # none of the model's own sampling settings
                disable_log_stats=True,
                **self._of_device(),
                **self._of_adapters(),
            )
            try:
                engine = self._vllm.LLMEngine.from_engine_args(arguments)
                engine.apply_model(self._divide_logits)
                return engine
            except Exception as error:
                remedy = "set sampler own, or change what it names"
                if is_out_of_memory(error) or "memory" in str(error).lower():
                    remedy = f"change vllm_memory, now {self._settings.vllm_memory:g}"
                raise UserError(
                    f"sampler: vLLM does not start with {architecture} ({reason_of(error)}); "
                    f"{remedy}"
                ) from None

    def _divide_logits(self, model: Any) -> None:
        """Let vLLM's model divide its logits by `self._temperature`."""
        compute = model.compute_logits

        def compute_logits(*arguments: Any, **named: Any) -> torch.Tensor:
            logits: torch.Tensor = compute(*arguments, **named)
            return logits if self._temperature == 1 else logits.float() / self._temperature

        model.compute_logits = compute_logits

    def _of_device(self) -> dict[str, Any]:
        if not self._is_on_cpu:
            return {"gpu_memory_utilization": self._settings.vllm_memory, "enable_sleep_mode": True}
        # Seeded requests fail there where a prompt is computed in parts.
        longest = max(self._settings.max_tokens, PREFILL_TOKENS)
        return {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": longest,
            "kv_cache_memory_bytes": int(self._settings.vllm_memory * memory_of_rank()),
        }

    def _of_adapters(self) -> dict[str, Any]:
        if self._adapter_config is None:
            return {}
        rank = self._adapter_config.r
        if rank > LORA_RANKS[-1]:
            raise UserError(f"lora_r: got {rank}, and vLLM takes {LORA_RANKS[-1]}; lower it")
        room = next(most for most in LORA_RANKS if most >= rank)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}

    def rest(self) -> None:
        """See `Sampler.rest`. On a CPU, the engine keeps its memory."""
        with _engine_errors():
            if not self._is_on_cpu and not self._engine.is_sleeping():
                # Level 2 forgets the weights, and adapters alone would not bring the base back.
                self._engine.sleep(level=2 if self._adapter_config is None else 1)

    def end(self) -> None:
        """See `Sampler.end`. An engine that outlives the process group fails as it ends."""
        with _engine_errors():
            self._engine.engine_core.shutdown()
        self._engine = None
        give_memory_back()

    # Weights

    def load_weights(self, weights: Weights) -> None:
        """See `Sampler.load_weights`. The engine gets copies, for vLLM scales adapters in place."""
        weights = complete(weights, self._shapes)
        if self._adapter_config is None:
            weights = as_in_files(self._plain, self._with_head(weights))
        given = dict(weights)
        with _engine_errors():
            is_asleep = not self._is_on_cpu and self._engine.is_sleeping()
            if is_asleep:
                self._engine.wake_up(["weights"])
            if self._adapter_config is None:
                self._engine.collective_rpc(
                    "reload_weights", kwargs={"weights_iterator": iter(given.items())}
                )
            else:
                self._load_adapters(given)
            if is_asleep:
                self._engine.wake_up(["kv_cache"])
            self._engine.reset_prefix_cache()

    def _with_head(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights, those of a tied output layer twice.

        vLLM may have a copy of the output layer's weights, which would keep its old values.
        """
        for name, tensor in weights:
            yield name, tensor
            if self._is_tied and name == self._embedding:
                yield HEAD, tensor

    def _load_adapters(self, adapters: dict[str, torch.Tensor]) -> None:
        assert self._adapter_config is not None
        if self._adapter is not None:
            self._engine.remove_lora(self._adapter.lora_int_id)
        self._num_adapters += 1
        number = self._num_adapters
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="adapters-", dir=in_memory) as folder:
            copies = {name: tensor.contiguous().cpu() for name, tensor in adapters.items()}
            save_file(copies, Path(folder) / "adapter_model.safetensors")
            self._adapter_config.save_pretrained(folder)
            make = import_module("vllm.lora.request").LoRARequest
            self._adapter = make(f"update-{number}", number, folder)
            self._engine.add_lora(self._adapter)

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """See `Sampler.logprobs`. No message may be half sampled."""
        assert not self._asking, "a message would go on at temperature 1"
        wanted = self._vllm.SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=0.0
        )
        before = self.num_tokens, self.num_padded_tokens
        self._temperature = 1.0
        self._asking[self._ask(ids, wanted)] = None
        found = list[Any]()
        while not found:
            found = self._step()
        self._temperature = self._settings.temperature
        self.num_tokens, self.num_padded_tokens = before
        with _engine_errors(is_reply=True):
            (output,) = found
            return torch.tensor(_logprobs_of(ids[1:], output.prompt_logprobs[1:]))

    # Conversations

    def open(
        self, prompts: Sequence[list[int]], keys: Sequence[int], num_drawn: Sequence[int] = ()
    ) -> list[VLLMConversation]:
        lines = zip(prompts, keys, num_drawn or [0] * len(keys), strict=True)
        return [VLLMConversation(key=key, ids=list(ids), num_sampled=n) for ids, key, n in lines]

    def extend(self, conversation: VLLMConversation, ids: list[int]) -> None:
        conversation.ids += ids

    def close(self, conversation: VLLMConversation) -> None:
        if conversation.request:
            with _engine_errors():
                self._engine.abort_request([conversation.request])
            self._asking.pop(conversation.request, None)  # after a wrong reply, it is gone
            conversation.request = ""

    def sample(
        self,
        conversations: Sequence[VLLMConversation],
        max_tokens: Sequence[int],
        greedy: bool = False,
        until: int | None = None,
    ) -> list[Sampled | None]:
        """See `Sampler.sample`. Raises EngineError if the engine fails."""
        for conversation, room in zip(conversations, max_tokens, strict=True):
            if not conversation.request and conversation.message is None:
                conversation.room = room
                wanted = self._wanted(conversation, room, greedy)
                conversation.request = self._ask(conversation.ids, wanted)
                self._asking[conversation.request] = conversation
        needed = len(conversations) if until is None else min(until, len(conversations))
        while sum(c.message is not None for c in conversations) < needed:
            self._step()
        messages = [conversation.message for conversation in conversations]
        for conversation, message in zip(conversations, messages, strict=True):
            if message is not None:
                conversation.message = None
                conversation.ids += message.ids
                conversation.num_sampled += len(message.ids)
        return messages

    def _wanted(self, conversation: VLLMConversation, room: int, greedy: bool) -> Any:
        settings = self._settings
        seed = stream_key("vllm", conversation.key, conversation.num_sampled) >> 1
        return self._vllm.SamplingParams(
            temperature=0.0 if greedy else 1.0,  # the model divides its logits
            top_k=0 if greedy else settings.top_k,
            top_p=1.0 if greedy else settings.top_p,
            seed=None if greedy else seed,
            max_tokens=room,
            logprobs=0,
            stop_token_ids=self._stops,
            ignore_eos=True,  # `stops` are all
            detokenize=False,
            output_kind=import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY,
        )

    def _ask(self, ids: list[int], wanted: Any) -> str:
        self._num_requests += 1
        name = str(self._num_requests)
        prompt = {"prompt_token_ids": list(ids)}
        with _engine_errors():
            self._engine.add_request(name, prompt, wanted, lora_request=self._adapter)
        return name

    def _step(self) -> list[Any]:
        """Let the engine compute one pass; return what is complete and no conversation's."""
        with _engine_errors():
            outputs = [output for output in self._engine.step() if output.finished]
        with _engine_errors(is_reply=True):
            return [output for output in outputs if not self._take(output)]

    def _take(self, output: Any) -> bool:
        """Return True if a conversation has asked for the output, and give it to it."""
        (completion,) = output.outputs
        ids = [index(token) for token in completion.token_ids]
        computed = len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
        self.num_tokens += computed + len(ids) - 1
        self.num_padded_tokens += computed + len(ids) - 1
        conversation = self._asking.pop(output.request_id)
        if conversation is None:
            return False
        if completion.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended a message with {shown(completion.finish_reason)}")
        if not 0 < len(ids) <= conversation.room:
            raise EngineError(
                f"vLLM's engine sampled {len(ids)} tokens, and 1 to {conversation.room} were asked"
            )
        if wrong := [token for token in ids if not 0 <= token < self._vocab_size]:
            raise EngineError(
                f"vLLM sampled the token {wrong[0]}, and the vocabulary ends at {self._vocab_size}"
            )
        conversation.request = ""
        conversation.message = Sampled(
            ids=ids,
            logprobs=_logprobs_of(ids, completion.logprobs),
            finished=ids[-1] in self._stops,
        )
        return True


def _logprobs_of(ids: Sequence[int], found: Sequence[Any]) -> list[float]:
    """Return the log-probability of each token, of vLLM's table for each position."""
    return [float(of_token[token].logprob) for token, of_token in zip(ids, found, strict=True)]


@contextmanager
def _engine_errors(*, is_reply: bool = False) -> Iterator[None]:
    """Turn exceptions of the engine, or those that its reply causes, into EngineError."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        what = f"replied in another form: {type(error).__name__}" if is_reply else "failed"
        raise EngineError(f"vLLM's engine {what}: {reason_of(error)}") from error


def _library() -> Any:
    """Import vLLM; raise UserError if it fails, or has another version."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # also while vLLM is imported
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    try:
        library = import_module("vllm")
        found = tuple(int(part) for part in library.__version__.split(".")[:2])
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"sampler: got vllm, which cannot be imported ({reason_of(error)}); install "
            "it anew, or set own"
        ) from None
    if not VERSIONS[0] <= found < VERSIONS[1]:
        first, next_one = (".".join(map(str, version)) for version in VERSIONS)
        raise UserError(
            f"sampler: got vLLM {library.__version__}; install {first} or later, below {next_one}"
        )
    # An engine that ends would also destroy the process group, which is the ranks' own.
    core: Any = import_module("vllm.v1.engine.core")
    core.cleanup_dist_env_and_memory = lambda: None
    return library


def _register_loader(model: Any) -> None:
    """Let an engine that starts take the weights of `model`, without adapters and without files."""
    loading = import_module("vllm.model_executor.model_loader")
    base = import_module("vllm.model_executor.model_loader.base_loader")

    class InProcess(base.BaseModelLoader):  # type: ignore[name-defined]
        def download_model(self, model_config: Any) -> None:
            """Do nothing: the weights are in this process."""

        def load_weights(self, engines: Any, model_config: Any) -> None:
            weights = (
                (name.replace(".base_layer", ""), parameter.detach())
                for name, parameter in model.named_parameters()
                if ".lora_" not in name
            )
            engines.load_weights(as_in_files(model, weights))

    loading.register_model_loader(LOAD_FORMAT)(InProcess)


def as_in_files(model: Any, weights: Weights) -> Weights:
    """Return the weights as a model's files have them: experts apart, and with their old names."""
    return iter(revert_weight_conversion(model, dict(weights)).items())
