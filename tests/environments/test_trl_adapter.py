"""The embedded domains in TRL's GRPOTrainer: the same tools, prompts and rewards as here."""

from importlib import import_module

import pytest
import torch
from datasets import Dataset
from transformers import Qwen3ForCausalLM

from pipeline.config.domain_names import EMBEDDED_DOMAINS
from pipeline.environments.discovery import tool_schemas
from pipeline.environments.experts import run_expert
from pipeline.models.tiny import tiny_model
from scripts.bench.trl_adapter import factories, outcome_reward, rows_without_user
from tests.support.helpers import chat, embedded, environments_of, say, tokenizer

CLASSES = environments_of(embedded(*EMBEDDED_DOMAINS))
MODULES = {
    domain: import_module(f"pipeline.environments.embedded.{domain}") for domain in EMBEDDED_DOMAINS
}
END = chat().end_of_turn_id


def make_tasks(domain, count=150, difficulty="medium"):
    return MODULES[domain].generate_tasks(0, count, "train", difficulty)


def alone(domain, count=150):
    """Tasks without a user, and their rows."""
    tasks = make_tasks(domain, count)
    rows = rows_without_user(tasks, CLASSES)
    kept = {row["id"] for row in rows}
    return [task for task in tasks if task.id in kept], rows


def reward(environment, completion, last_id=END):
    (earned,) = outcome_reward(END)(
        prompts=[[]],
        completions=[completion],
        completion_ids=[[1, 2, last_id]],
        environments=[environment],
        trainer_state=None,
    )
    return earned


# In the trainer


class Actor(Qwen3ForCausalLM):
    """The tiny model, with `generate` from scripts: for each prompt the first sibling plays the
    expert, the others say "Done.".
    """

    scripts: dict[str, list[int]]
    contexts: list[list[int]]

    def generate(self, input_ids, attention_mask, **_):
        seen = set()
        said = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            context = ids[mask.bool()].tolist()
            self.contexts.append(context)
            said.append(self._next(context, first=str(context) not in seen))
            seen.add(str(context))
        longest = max(map(len, said))
        pad = [ids + [self.config.pad_token_id] * (longest - len(ids)) for ids in said]
        return torch.cat([input_ids, torch.tensor(pad)], dim=1)

    def _next(self, context, first):
        if not first:
            return chat().message_ids(say("Done."))
        (script,) = (s for s in self.scripts if s[: len(context)] == context)
        rest = script[len(context) :]
        return rest[: rest.index(END) + 1]


def script_of(task):
    """The tokens of the expert's whole episode, as our rollouts would put them together."""
    messages, _ = run_expert(CLASSES[task.domain](), MODULES[task.domain].expert, task)
    ids = chat().prompt_ids(messages[:2], tool_schemas(CLASSES[task.domain]))
    if messages[-1]["role"] == "tool":
        messages.append(say("Goodbye."))
    for message in messages[2:]:
        said = message["role"] == "assistant"
        ids += chat().message_ids(message) if said else chat().reply_ids([message])
    return ids


def train(model, rows, folder, max_tokens=160):
    from trl import GRPOConfig, GRPOTrainer  # in 2 s, which other files need not wait for

    settings = {
        "output_dir": str(folder),
        "max_steps": 1,
        "num_generations": 2,
        "per_device_train_batch_size": len(rows) * 2,
        "max_completion_length": max_tokens,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "temperature": 1.0,
        "dataloader_pin_memory": False,
        "seed": 1,
    }
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=outcome_reward(END),
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        environment_factory=factories(CLASSES),
    )
    trainer.train()
    return trainer.state.log_history[0]


@pytest.mark.filterwarnings("ignore")
def test_a_step_of_grpo_with_the_expert_among_the_siblings(tmp_path):
    """TRL's prompts, results and rewards are ours: the scripts are found token for token."""
    tasks = [task for domain in EMBEDDED_DOMAINS for task in alone(domain, 12)[0]]
    model = Actor(tiny_model(tokenizer(), 0).config)
    model.scripts, model.contexts = [script_of(task) for task in tasks], []
    before = [parameter.detach().clone() for parameter in model.parameters()]
    log = train(model, rows_without_user(tasks, CLASSES), tmp_path)
    assert len(tasks) == 24
    assert log["rewards/outcome/mean"] == 0.5
    assert log["reward"] == 0.5
    assert log["tools/failure_frequency"] == 0
    assert log["tools/call_frequency"] > 0.5
    assert log["grad_norm"] > 0
    changed = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
    assert any(changed)
