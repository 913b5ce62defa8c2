"""The learner: a model, its rollouts, its updater, and a probe of the weights that sample."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import record_function

from pipeline.common.errors import RunError, UserError
from pipeline.config.settings import Config
from pipeline.distributed.devices import dtype_of, uses_bf16
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.sharding import Sharded, shard_model
from pipeline.environments.domains import Domain
from pipeline.environments.faults import FaultLog
from pipeline.models import lora
from pipeline.models.chat.template import Chat
from pipeline.models.layers import align, fix_rotary, outer_layers, recompute_layers
from pipeline.models.sampling_copy import trained_weights
from pipeline.rollout.rollout import Rollout, SamplerPolicy
from pipeline.rollout.samplers.choice import Sampler
from pipeline.rollout.trajectory import Trajectory
from pipeline.training.agreement import BOUNDS, ROUNDINGS, refuse_disagreement
from pipeline.training.micro_batches import micro_batch
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Updater

PROBE = "The customer asks for a refund of the order, which was paid by card; the agent looks."


class WeightProbe:
    """Compares the sampler's log-probabilities of a text with training's after new weights.

    The median over the text's tokens counts, because rounding may change single tokens by more,
    where a router chooses other experts. In bf16, the bound is wide, and as wide as the model's own
    rounding demands. A sampler whose values stay the same bit by bit while training's change is
    therefore a fault, too.
    """

    def __init__(self, chat: Chat, dtype: torch.dtype) -> None:
        self._bound = BOUNDS[dtype]
        self._ids = chat.tokenizer(PROBE)["input_ids"][:16]
        text = Trajectory(domain="", task_id="", prompt_ids=self._ids[:1])
        text.append(self._ids[1:], [0.0] * (len(self._ids) - 1))
        self._batch = micro_batch([(text, 0.0, 0.0)], 0)
        self._moved: tuple[torch.Tensor, torch.Tensor] | None = None  # when the sampler's changed

    @torch.no_grad()
    def check(self, sampler: Sampler, module: Any, accelerator: Any, when: str) -> None:
        """Raise RunError if the sampler has other weights than `module`, a TokenLogprobs."""
        sampled = sampler.logprobs(self._ids)
        batch = self._batch.to(accelerator.device)
        with accelerator.autocast():
            trained = module(batch)[0].cpu()
        gap = float((sampled - trained).abs().median())
        bound = self._bound
        why = ""
        if not gap <= bound:
            rounding = float((trained - module(batch)[0].cpu()).abs().median())
            bound = max(bound, ROUNDINGS * rounding)
        if not gap <= bound:
            why = f"differ from training's by {gap:.2g} nats in the median, at most {bound:.2g}"
        if self._moved is None or not torch.equal(sampled, self._moved[0]):
            self._moved = sampled, trained
        elif (change := float((trained - self._moved[1]).abs().median())) > self._bound / 100:
            why = why or f"have not changed, but training's have by {change:.2g} nats"
        if why:
            raise RunError(
                f"weights of the sampler, {when}: its log-probabilities of a fixed text {why}, so "
                "it did not get all weights; resume from the last checkpoint, and if this comes "
                "again, mend load_weights of the sampler, or set mixed_precision no"
            )


class Learner:
    """A model, the `rollout` that samples from the model, and the `updater` that trains the model.

    `updater` is None until GRPO begins. `make_sampler` has the signature of
    `pipeline.rollout.samplers.choice.make_sampler`. `hooks` are further arguments of Rollout.
    """

    def __init__(
        self,
        model: Any,
        chat: Chat,
        domains: Mapping[str, Domain],
        config: Config,
        accelerator: Any,
        ranks: Ranks,
        *,
        make_sampler: Callable[..., Sampler],
        **hooks: Any,
    ) -> None:
        self.accelerator = accelerator
        self._ranks = ranks
        self._config = config
        self.updater: Updater | None = None
        self._prompt = list[int]()  # of `check_agreement`
        self.note = fix_rotary(model, config.rollout.max_tokens)  # for the user, or empty
        self.model = model.to(accelerator.device)  # of one rank without a copy, of several with one
        if config.run.deterministic:
            align(self.model)
        self.sharded: Sharded | None = None  # the model, once it is spread over the ranks
        self._make_sampler = make_sampler
        self._probe = WeightProbe(chat, dtype_of(config.model))
        self.sampling = SamplerPolicy(self._sampler(chat, ranks.is_main), chat, config.rollout)
        if not config.model.use_peft:
            self._shard()
        self.rollout = Rollout(
            self.sampling,
            chat,
            domains,
            config.rollout,
            config.run.deterministic,
            on_progress=ranks.progress,
            faults=FaultLog(lambda: str(ranks.current), ranks.is_first),
            **hooks,
        )

    def _sampler(self, chat: Chat, is_main: bool) -> Sampler:
        dtype = dtype_of(self._config.model)
        return self._make_sampler(self.model, chat, self._config.rollout, dtype, is_main)

    def _shard(self) -> None:
        """Spread the model over the ranks if the setting asks for it; the sampler stays whole."""
        config = self._config
        if config.grpo.shard != "full" or self._ranks.num_ranks == 1 or not config.grpo.use_grpo:
            return
        # LoRA's frozen weights have the type in which the model computes, its adapters keep fp32.
        is_bf16 = uses_bf16(config.model) and not config.model.use_peft
        if not (layers := outer_layers(self.model)):
            raise UserError(
                f"shard: got full, but {type(self.model).__name__} has no layers to shard; set it "
                "to optimizer"
            )
        self.sharded = shard_model(
            self.model,
            layers,
            torch.bfloat16 if is_bf16 else None,
            reshards=config.grpo.reshard_after_forward,
        )

    def attach(self, base: str) -> None:
        """Add LoRA adapters to the model `base`, and end its sampler; see `renew_sampler`."""
        config = self._config
        self.close()
        del self.sampling.sampler  # frees its memory
        dtype = dtype_of(config.model)
        adapted = lora.attach(self.model, config.model, base, config.run.seed, dtype)
        self.model = adapted.to(self.accelerator.device)

    def renew_sampler(self) -> None:
        """Make the sampler of the model with adapters, once these have their weights."""
        self.sampling.sampler = self._sampler(self.rollout.chat, is_main=False)
        self._shard()
        self.check_agreement(self._prompt)

    def close(self) -> None:
        """End episodes and the sampler; there is none if the making of another one has failed."""
        self.rollout.close()
        if hasattr(self.sampling, "sampler"):
            self.sampling.sampler.end()

    def check_agreement(self, prompt: list[int]) -> None:
        """Raise UserError on all ranks if sampler and training compute other log-probabilities.

        `prompt` is the prompt of a task, and also that of later checks of adapters.
        """
        self._prompt = prompt
        refuse_disagreement(
            self.sampling.sampler,
            self._module(self._config.rollout.temperature),
            self.accelerator,
            self._ranks,
            self._config,
            prompt,
        )

    def sync_weights(self) -> None:
        """Give the sampler the model's weights; raises RunError if it then has other weights."""
        with record_function("load weights"):  # a named range in the traces of --profile
            self.sampling.sampler.load_weights(trained_weights(self.model))
        self._probe.check(
            self.sampling.sampler, self._module(1.0), self.accelerator, str(self._ranks.current)
        )

    def module_to_train(self) -> TokenLogprobs:
        """Return the module that an Updater trains."""
        grpo = self._config.grpo
        if grpo.gradient_checkpointing:
            recompute_layers(self.model)
        return self._module(self._config.rollout.temperature, grpo.entropy_coef > 0)

    def _module(self, temperature: float, trains_entropy: bool = False) -> TokenLogprobs:
        max_tokens = self._config.rollout.max_tokens
        return TokenLogprobs(
            self.model, temperature, trains_entropy, max_tokens, sharded=self.sharded
        ).eval()  # without dropout
