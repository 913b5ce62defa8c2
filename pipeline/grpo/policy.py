"""The policy: a model, its rollouts, and its updater."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.chat.template import Chat
from pipeline.checkpoints.checkpoint import Checkpointer, TrainState, load_optimizer
from pipeline.checkpoints.resume import base_of_adapters, folder_of_reference, set_weights
from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage
from pipeline.distributed.ranks import Ranks
from pipeline.environments.faults import FaultLog
from pipeline.grpo.token_logprobs import TokenLogprobs, refuse_mixed_up_sequences
from pipeline.grpo.updater import Reference, Updater
from pipeline.models import lora
from pipeline.models.capabilities import recompute_layers
from pipeline.models.loading import dtype_of
from pipeline.models.rotary import fix_rotary
from pipeline.rollout.rewards import load_reward_functions
from pipeline.rollout.rollout import Rollout
from pipeline.rollout.sampler import Sampler


class Policy:
    """A model, the `rollout` that samples from the model, and the `updater` that trains the model.

    `updater` is None until GRPO begins. `make_sampler` has the signature of
    `pipeline.rollout.sampler.make_sampler`.
    """

    def __init__(
        self,
        model: Any,
        chat: Chat,
        environments: dict[str, type[Any]],
        config: Config,
        accelerator: Any,
        ranks: Ranks,
        make_sampler: Callable[..., Sampler],
    ) -> None:
        self.accelerator, self._ranks, self._config = accelerator, ranks, config
        self.updater: Updater | None = None
        self.model, self._make_sampler = self._placed(model), make_sampler
        sampler, deterministic = self._sampler(chat, ranks.is_main), config.run.deterministic
        arguments = sampler, chat, environments, config.rollout, deterministic
        rewards = load_reward_functions(config, ranks.progress)
        faults = FaultLog(lambda: str(ranks.current), ranks.is_first)
        progress = ranks.progress
        self.rollout = Rollout(*arguments, rewards=rewards, on_progress=progress, faults=faults)

    def _placed(self, model: Any) -> Any:
        fix_rotary(model, self._config.rollout.max_tokens)
        return model.to(self.accelerator.device)

    def _sampler(self, chat: Chat, is_main: bool) -> Sampler:
        dtype = dtype_of(self._config.model)
        return self._make_sampler(self.model, chat, self._config.rollout, dtype, is_main)

    def replace(self, model: Any) -> None:
        """Replace the policy's model by another model whose parameters have equal shapes."""
        self.model = self._placed(model)
        self.rollout.load_weights(self.model)

    def make_updater(
        self,
        checkpointer: Checkpointer,
        state: TrainState,
        saved: Mapping[str, Any],
        stages: Sequence[Stage],
    ) -> Updater:
        """Make the Updater for GRPO from the current model, or from a resumed checkpoint."""
        config, resumed, chat = self._config, checkpointer.resumed, self.rollout.chat
        if config.model.use_peft:
            base = base_of_adapters(self.model, config.model, self._ranks, checkpointer)
            del self.rollout.sampler  # frees memory for the new sampler with LoRA adapters
            arguments = config.model, base, config.run.seed, dtype_of(config.model)
            self.model = lora.attach(self.model, *arguments).to(self.accelerator.device)
            self.rollout.sampler = self._sampler(chat, is_main=False)  # prints no second warning
        if config.grpo.gradient_checkpointing:
            recompute_layers(self.model)
        module = TokenLogprobs(self.model, config.rollout.temperature).eval()  # without dropout
        if config.grpo.padding_free:
            refuse_mixed_up_sequences(module)

        def load(folder: Path | None) -> None:
            set_weights(self.model, folder, config, chat.tokenizer)

        reference = None
        if config.grpo.beta > 0:
            if resumed is not None:
                sync = config.grpo.reference_per_stage
                load(folder_of_reference(checkpointer.folder, state, stages, sync))
            reference = Reference(module)
        if resumed is not None and (reference or config.model.use_peft):
            load(resumed)
        pad_id = chat.tokenizer.pad_token_id or 0
        updater = Updater(self.accelerator, module, self._ranks, config, pad_id, reference)
        updater.faults_folder = checkpointer.run_folder / "faults"
        if resumed is not None:
            load_optimizer(resumed, updater.optimizer)
            updater.load_state_dict(saved)
        self.rollout.load_weights(self.model)
        self.updater = updater
        return updater
