"""The model card: what the model is, its results with intervals, its limits, and how it was made.

The card's snippet uses an example of what the model was trained on.

All numbers come from the files of the run, through the functions that write the run's report.
"""

import platform
import shlex
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, hf_hub_download

from pipeline.checkpoints.trained import RunCheckpoint
from pipeline.common.hub import hub_reachable
from pipeline.common.untrusted import in_texts, masked, printable
from pipeline.config.cli import flags_of
from pipeline.config.domain_names import SINGLE_TURN, domains_of_user, known_domains
from pipeline.config.recipe import SETTINGS, SHIPPED, full_name, load_recipe, recipe_in_words
from pipeline.config.settings import Config
from pipeline.evaluation.transfer import summary
from pipeline.models.model_files import HUB_ID
from pipeline.report.run_files import RunData, after_name, episodes_in
from pipeline.report.tables import (
    METRIC_NAMES,
    about_table,
    baseline_table,
    ends_in_words,
    metric,
    success_tables,
)
from pipeline.report.write import TEMPLATES, table

LICENCE = ("license", "license_name", "license_link")  # keys of a card's metadata
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")
# Settings that say where a run writes and what follows training.
ELSEWHERE = {"output_dir", "resume_from_checkpoint", "override", "check", "doctor"}
ELSEWHERE |= {"push_to_hub", "hub_model_id", "hub_private_repo"}

Example = dict[str, Any]


def example_prompt(run: RunData) -> Example:
    """Return the first messages of a held-out episode, and the JSON schemas of its tools.

    Without transcripts, the example is one word without tools.
    """
    for path in sorted(run.folder.glob("trajectories/evaluation-*/step-*.jsonl.gz")):
        episode = next(episodes_in(path), {})
        if messages := episode.get("messages"):
            asked = takewhile(lambda message: message["role"] != "assistant", messages)
            tools = run.results.get("tools", {}).get(episode["domain"], [])
            return {"messages": [*asked], "tools": tools}
    return {"messages": [{"role": "user", "content": "Hello"}], "tools": []}


def model_card(
    checkpoint: RunCheckpoint,
    run: RunData,
    example: Example,
    base_of_adapters: str | None = None,
    repo_id: str | None = None,
) -> ModelCard:
    """Return the card of an exported checkpoint of `run`.

    `base_of_adapters` is the base model if the folder holds LoRA adapters, and `repo_id` the place
    on the hub.
    """
    config = without_places(checkpoint.config)
    model = checkpoint.config.model.model
    # Without results, a domain that is not of one message counts as one with tools.
    may_have = (known_domains(config)[n].factory != SINGLE_TURN for n in config.data.domains)
    has_tools = any(run.results.get("tools", {"": any(may_have)}).values())
    kwargs = [f"{name}={value!r}, " for name, value in config.model.chat_template_kwargs.items()]
    base = hub_id_of(base_of_adapters or model)
    licence: dict[str, Any] = {"license": "apache-2.0"} if model == "tiny" else licence_of(model)
    card: ModelCard = ModelCard.from_template(
        ModelCardData(
            base_model=base,
            **licence,
            library_name="peft" if base_of_adapters else "transformers",
            pipeline_tag="text-generation",
            tags=["grpo", "reinforcement-learning", *["tool-use"] * has_tools],
        ),
        template_path=str(TEMPLATES / "model_card.md.jinja"),
        title=(repo_id or checkpoint.run.resolve().name).rpartition("/")[2],
        kind="LoRA adapters (PEFT)" if base_of_adapters else "A language model",
        num_rounds=len(checkpoint.state.get("rft", [])),
        step=checkpoint.step,
        own=[name for name in config.data.domains if name in domains_of_user(config.data)],
        measured=_measured(run, checkpoint),
        results=run.results,
        libraries=[f"{name} {version(name)}" for name in LIBRARIES],
        python=platform.python_version(),
        repo_id=repo_id,
        options="".join(['tools=example["tools"], ' * bool(example["tools"]), *kwargs]),
        tools=example["tools"],
        config=config,
        limits=config.rollout,
        licence=licence,
        command=command_of(config),
        recipe=recipe_in_words(config.model_dump(mode="json")),
    )
    card.content = printable(card.content)
    return card


def without_places(config: Config) -> Config:
    """Return the settings with the last part of each absolute path alone, and without secrets."""

    def without_place(text: str) -> str:
        return masked(Path(text).name if text.startswith("/") else text)

    return Config.model_validate(in_texts(without_place, config.model_dump(mode="json")))


def command_of(config: Config) -> str:
    """Return a command that makes a run with the settings of `config`.

    A user's recipe is compared with the default recipe. Trackers and places do not count.
    """
    is_shipped = (SHIPPED / f"{config.recipe}.yaml").is_file()
    recipe = config.recipe if is_shipped else "three_domain_tiny"
    old, new = (of.model_dump(mode="json") for of in (load_recipe(recipe), config))
    changed = {
        full_name(section, name): new[section][name]
        for section, name in SETTINGS
        if section != "tracking" and name not in ELSEWHERE
        if new[section][name] != old[section][name]
    }
    return shlex.join(["three-domain-grpo", "train", "--config", recipe, *flags_of(changed)])


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
            path = Path(hf_hub_download(model, "README.md", local_files_only=not hub_reachable()))
        data = ModelCard.load(path).data.to_dict()
    except Exception:  # no such file, a broken one, or any error of the hub's library
        return {}
    return {name: data[name] for name in LICENCE if data.get(name)}


def _measured(run: RunData, checkpoint: RunCheckpoint) -> dict[str, Any]:
    """Return the report's tables of success and of transfer, up to the checkpoint's step."""
    parts = {
        name: [of for of in run.results.get(name, []) if of["step"] <= checkpoint.step]
        for name in ("evaluations", "validations")
    }
    evaluations = parts["evaluations"]
    if not evaluations:
        return {}
    transfer = summary([{**run.results, **parts}])
    best = checkpoint.state.get("best") or {}
    numbers = transfer.get("metrics", {})
    rows = [
        [METRIC_NAMES[name], metric(numbers[name], name)]
        for name in METRIC_NAMES
        if numbers.get(name)
    ]
    is_curve = len(transfer.get("points", [])) > 2
    tables = {
        "transfer": [["transfer number", "value"], *rows] if is_curve else [],
        "baselines": baseline_table(run.results),
        "about": about_table(run.results),
    }
    return {
        "last": evaluations[-1],
        "of": next(iter(evaluations[-1]["success"].values())),
        "after": after_name(evaluations[-1]["after"]),
        "temperature": run.config["rollout"]["temperature"],
        "columns": ends_in_words(evaluations),
        "success": map(table, success_tables({**run.results, **parts, "transfer": transfer})),
        "best": best if best.get("step") == checkpoint.step else None,
        **{name: table(found) if found else "" for name, found in tables.items()},
    }
