"""The model card: what the model is, its results with intervals, its limits, and how it was made.

All numbers come from the files of the run, through the functions that write the run's report.
"""

import json
import platform
import shlex
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, hf_hub_download

from pipeline.checkpoints.run_folder import HARMLESS
from pipeline.config.cli import flag
from pipeline.config.recipe import SETTINGS, SHIPPED, in_words, load_recipe
from pipeline.config.settings import SINGLE_TURN, Config
from pipeline.evaluation.transfer import summary
from pipeline.export.checkpoint import RunCheckpoint
from pipeline.export.example import example_of
from pipeline.files.hub import hub_reachable
from pipeline.files.untrusted import masked, printable
from pipeline.models.files import HUB_ID
from pipeline.report.page import TEMPLATES, table
from pipeline.report.tables import (
    METRICS,
    about_table,
    baseline_table,
    ends_in_words,
    metric,
    success_tables,
)
from pipeline.tracking.run_files import RunData, after_name, load_run

LICENCE = ("license", "license_name", "license_link")  # keys of a card's metadata
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")
# Settings that say where a run writes and what follows training.
ELSEWHERE = {"output_dir", "resume_from_checkpoint", "override", "check", "doctor"}
ELSEWHERE |= {"push_to_hub", "hub_model_id", "hub_private_repo"}

CARD = TEMPLATES / "model_card.md.jinja"
TINY = "random weights (a Qwen3 of half a million parameters, `tiny`)"
WARM_START = "{} supervised steps on demonstrations (warm start) and "
RFT = "{} round{} of rejection fine-tuning on its own successes and "
TOOLS = ", and the JSON schemas of its tools. The model saw the tools of its domains alone"
UNKNOWN = (
    "The licence of the base model {} is not known here. Look it up before you share this model."
)


def model_card(
    checkpoint: RunCheckpoint, base_of_adapters: str | None = None, repo_id: str | None = None
) -> ModelCard:
    """Return the card of an exported checkpoint.

    `base_of_adapters` is the base model if the folder holds LoRA adapters, and `repo_id` the place
    on the hub. Raises UserError if the run's files cannot be read.
    """
    run, config = load_run(checkpoint.run), without_places(checkpoint.config)
    example, model = example_of(run), checkpoint.config.model.model
    # Without results, a domain that is not of one message counts as one with tools.
    may_have = (config.data.factories[n].factory != SINGLE_TURN for n in config.data.domains)
    has_tools = any(run.results.get("tools", {"": any(may_have)}).values())
    kwargs = [f"{name}={value!r}, " for name, value in config.model.chat_template_kwargs.items()]
    base = hub_id_of(base_of_adapters or model)
    licence = {"license": "apache-2.0"} if model == "tiny" else licence_of(model)
    unknown = [] if licence else [UNKNOWN.format(f"`{config.model.model}`")]
    card: ModelCard = ModelCard.from_template(
        ModelCardData(
            base_model=base,
            **licence,
            library_name="peft" if base_of_adapters else "transformers",
            pipeline_tag="text-generation",
            tags=["grpo", "reinforcement-learning", *["tool-use"] * has_tools],
        ),
        template_path=str(CARD),
        title=(repo_id or checkpoint.run.resolve().name).rpartition("/")[2],
        kind="LoRA adapters (PEFT)" if base_of_adapters else "A language model",
        base=TINY if config.model.model == "tiny" else f"`{config.model.model}`",
        warm_start=_before_grpo(config, len(checkpoint.state.get("rft", []))),
        step=checkpoint.step,
        domains=", ".join(config.data.domains),
        results=_results(run, checkpoint),
        repo_id=repo_id,
        options="".join(['tools=example["tools"], ' * bool(example["tools"]), *kwargs]),
        tools=TOOLS * bool(example["tools"]),
        config=config,
        limits=config.rollout,
        warnings="\n".join([_limits(config), *(f"- {line}" for line in unknown)]),
        command=command_of(config),
        recipe=in_words(config.model_dump(mode="json")),
        made=_made(run),
        differing=_differing(config),
    )
    card.content = printable(card.content)
    return card


def _before_grpo(config: Config, rounds: int) -> str:
    text = WARM_START.format(steps) if (steps := config.warm_start.steps) else ""
    return text + (RFT.format(rounds, "s" * (rounds > 1)) if rounds else "")


def without_places(config: Config) -> Config:
    """Return the settings with the last part of each absolute path alone, and without secrets."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, str):
            return masked(Path(value).name if value.startswith("/") else value)
        return value

    return Config.model_validate(plain(config.model_dump(mode="json")))


def changes_of(config: Config) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Return {(section, setting): (value in the recipe, value in the run)} for other values.

    A recipe of the user's is compared with the default recipe. Trackers and places do not count.
    """
    old, new = (of.model_dump(mode="json") for of in (load_recipe(recipe_of(config)), config))
    return {
        (section, name): (old[section][name], new[section][name])
        for section, name in SETTINGS
        if section != "tracking" and name not in ELSEWHERE
        if old[section][name] != new[section][name]
    }


def recipe_of(config: Config) -> str:
    """Return the name of the shipped recipe that a run's settings are compared with."""
    is_shipped = (SHIPPED / f"{config.recipe}.yaml").is_file()
    return config.recipe if is_shipped else "three_domain_tiny"


def command_of(config: Config) -> str:
    """Return a command that makes a run with the settings of `config`."""
    words = ["three-domain-grpo", "train", "--config", recipe_of(config)]
    for (section, name), (_, value) in changes_of(config).items():
        option = flag(section, name)
        if isinstance(value, bool):
            plain = option.removeprefix("--").removeprefix("use-")
            words.append(option if value else f"--no-{plain}")
        else:
            is_list, is_text = isinstance(value, list), isinstance(value, str)
            text = ",".join(map(str, value)) or "none" if is_list else value
            words += [option, text if is_list or is_text else json.dumps(text, ensure_ascii=False)]
    return shlex.join(words)


def hub_id_of(model: str) -> str | None:
    """Return the hub id of a model, also of one in a folder of the hub's cache, or None."""
    if Path(model).exists():
        cached = [part for part in Path(model).resolve().parts if part.startswith("models--")]
        return cached[-1].removeprefix("models--").replace("--", "/") if cached else None
    return model if "/" in model and HUB_ID.fullmatch(model) else None


def licence_of(model: str) -> dict[str, Any]:
    """Return the licence in the card of a model, in a folder or on the hub; {} if there is none."""
    path = Path(model) / "README.md"
    try:
        if not Path(model).is_dir():
            is_offline = not hub_reachable()
            path = Path(hf_hub_download(model, "README.md", local_files_only=is_offline))
        data = ModelCard.load(path).data.to_dict()
    except Exception:  # no such file, a broken one, or any error of the hub's library
        return {}
    return {name: data[name] for name in LICENCE if data.get(name)}


def _results(run: RunData, checkpoint: RunCheckpoint) -> str:
    """Return the report's tables of success and of transfer, up to the checkpoint's step."""
    step = checkpoint.step
    parts = {
        name: [of for of in run.results.get(name, []) if of["step"] <= step]
        for name in ("evaluations", "validations")
    }
    evaluations = parts["evaluations"]
    if not evaluations:
        return "The run has no evaluation up to this checkpoint."
    is_whole = len(evaluations) == len(run.evaluations)
    transfer = run.transfer if is_whole else summary([{**run.results, **parts}])
    last, of = evaluations[-1], next(iter(evaluations[-1]["success"].values()))
    trials, temperature = of.get("num_trials", 1), run.config["rollout"]["temperature"]
    blocks = [
        f"Success on {of['num_tasks']} held-out tasks of each domain, {after_name(last['after'])} "
        f"(step {last['step']}). Sampled: {trials} trial(s) of each task at temperature "
        f"{temperature:g}. Greedy: one trial of each, always the likeliest token. In brackets: "
        f"95 % intervals, paired bootstrap over tasks. Columns: {ends_in_words(evaluations)}.",
        *map(table, success_tables({**run.results, **parts, "transfer": transfer})),
    ]
    if last["step"] != step:
        blocks.insert(0, f"**This checkpoint is of step {step} and has no evaluation of its own.**")
    best = checkpoint.state.get("best") or {}
    if best.get("step") == step:
        mean = f"{best['success']:.3f} on {run.config['evaluation']['validation_tasks']} tasks"
        blocks.insert(0, f"The best checkpoint by validation: mean success {mean} of each domain.")
    numbers = transfer.get("metrics", {})
    rows = [[METRICS[name], metric(numbers[name], name)] for name in METRICS if numbers.get(name)]
    if len(transfer.get("points", [])) > 2:
        blocks.append(table([["transfer number", "value"], *rows]))
    if rows := baseline_table(run.results):
        blocks += ["Mean reward of fixed policies that make no decision:", table(rows)]
    if rows := about_table(run.results):
        blocks += ["Where the tasks come from:", table(rows)]
    return "\n\n".join(blocks)


def _limits(config: Config) -> str:
    own = [name for name in config.data.domains if name in config.data.own_domains]
    lines = []
    if shipped := [name for name in config.data.domains if name not in own]:
        what = "synthetic: made from templates, with small databases and scripted customers"
        if config.data.tau2 is not None:
            what = "those of τ²-bench, with a ticket in place of a customer who talks"
        why = "Success there says little about real customers."
        lines.append(f"The tasks of {', '.join(shipped)} are {what}. {why}")
    if own:
        lines.append(f"The tasks of {', '.join(own)} are those of the run's author.")
    if config.model.model == "tiny":
        lines.append(
            "The model is tiny and made to try the pipeline. It can use the words and the tools of "
            "its demonstrations alone, and is of no use for anything else."
        )
    if config.grpo.permute_rewards:
        lines.append("A control experiment: rewards were permuted within each step.")
    lines += [
        "Measured is success on held-out tasks of the same kind as the training tasks, with one "
        f"seed ({config.run.seed}). The intervals do not cover other seeds.",
        "Not measured: other domains and languages, safety, bias, and what the base model could do "
        "before and cannot do any more.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _made(run: RunData) -> str:
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    ranks = run.results.get("num_ranks")
    facts = [f"{ranks} rank{'s' * (ranks != 1)}"] if ranks else []
    if "wall_s" in run.results:
        facts.append(f"{run.results['wall_s'] / 60:.0f} minutes")
    return ", ".join([*facts, f"Python {platform.python_version()}, {libraries}"])


def _differing(config: Config) -> str:
    recipe = recipe_of(config)
    shown = [
        [f"`{section}.{name}`", f"`{json.dumps(old)}`", f"`{json.dumps(new)}`"]
        for (section, name), (old, new) in changes_of(config).items()
        if name not in HARMLESS
    ]
    if not shown:
        return ""
    header = ["setting", f"recipe {recipe}", "this run"]
    return f" Settings that differ from `{recipe}`:\n\n{table([header, *shown])}"
