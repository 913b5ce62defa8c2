"""Starts or resumes a run: opens the run folder, and loads the state and the weights."""

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from pipeline.checkpoints import run_folder
from pipeline.checkpoints.checkpoint import Checkpointer, SavedState
from pipeline.checkpoints.run_folder import Opened, hash_of, open_folder, problem, read_state
from pipeline.common.errors import UserError
from pipeline.common.layout import run_of_checkpoint
from pipeline.common.untrusted import shown
from pipeline.config.recipe import SETTINGS
from pipeline.config.settings import Config, ModelSettings
from pipeline.data.curriculum import BEFORE_GRPO, Stage
from pipeline.data.tasks import HELD_OUT, MODULE
from pipeline.distributed.devices import dtype_of
from pipeline.distributed.ranks import Ranks, parameter_hash
from pipeline.distributed.sharding import fill, is_sharded, whole
from pipeline.models import lora
from pipeline.models.capabilities import other_stops
from pipeline.models.chat.template import Chat
from pipeline.models.loading import load_folder, load_model
from pipeline.models.merging import merged

PACKAGE = Path(__file__).parents[1]
CONFIGURATION = "configuration of the base model"
# Of config.json; the ends of a message have a hash of their own.
NOT_COMPUTED = ("_name_or_path", "architectures", "dtype", "eos_token_id", "transformers_version")
# The file that a process was started by, which differs with the number of ranks.
STARTED = ("__main__", "__mp_main__")
START = "start"  # checkpoint of the model before GRPO, where no supervised training comes before
LATE_S = 2.0  # network file systems show a new file a little late


def sees_folder_of_rank_0(folder: Path, ranks: Ranks) -> tuple[str, bool]:
    """Return a folder of rank 0, and whether this rank sees a file that rank 0 makes there.

    It is rank 0's `folder`, or the next folder above that exists, as an absolute path. Raises
    OSError, on rank 0, if no file can be made there.
    """
    with ExitStack() as stack:
        name = ""
        if ranks.is_main:
            path = folder.absolute()
            above = next(at for at in (path, *path.parents) if at.exists())
            name = stack.enter_context(NamedTemporaryFile(dir=above, prefix=".seen-")).name
        name = ranks.all_gather_objects(name, "run folder")[0]
        until = time.monotonic() + LATE_S
        while not (sees := os.path.exists(name)) and time.monotonic() < until:
            time.sleep(0.1)
        ranks.barrier("run folder")
    return os.path.dirname(name), sees


def refuse_differences(ranks: Ranks, facts: Mapping[str, Any], remedy: str) -> None:
    """Raise UserError, on all ranks, if a rank has another value of a fact than rank 0."""
    gathered = ranks.all_gather_objects((platform.node(), dict(facts)), "facts")
    host_0, facts_0 = gathered[0]
    for rank, (host, own) in enumerate(gathered):
        for name, value in own.items():
            if value != facts_0.get(name):
                raise UserError(
                    f"{name}: rank {rank} on {host} has {shown(value)}, rank 0 on {host_0} has "
                    f"{shown(facts_0.get(name))}; {remedy}"
                )


def share_folder(config: Config, ranks: Ranks) -> Path:
    """Return rank 0's run folder, as this rank sees it.

    Raises UserError if a rank has other settings than rank 0, or does not see the run folder.
    """
    folder = Path()
    if ranks.is_main:
        folder = run_folder.folder_of(config)
        run_folder.check_folder(config, folder)
    values = config.model_dump(exclude={"run": {"output_dir"}})
    settings = {f"{section}.{name}": values[section].get(name) for section, name in SETTINGS}
    refuse_differences(ranks, settings, "start all ranks with the same command")
    relative, absolute = ranks.all_gather_objects((folder, folder.absolute()), "run folder")[0]
    sees = sees_folder_of_rank_0(absolute, ranks)[1]
    shared = str(absolute) if sees else "no such folder"
    refuse_differences(ranks, {"output_dir": shared}, "name a folder that all nodes share")
    return relative if ranks.is_main else absolute


def open_together(
    config: Config,
    folder: Path,
    ranks: Ranks,
    tokenizer: Any,
    about: Mapping[str, Any],
    made_of: Mapping[str, str],
) -> tuple[Opened | None, Path | None]:
    """Open the run folder `folder` on rank 0, and return the checkpoint to resume.

    On ranks above 0, the result has None for Opened. Raises UserError if the ranks have different
    versions or code, a `tokenizer` with different tokens, different facts `about` the domains, or
    are `made_of` different things.
    """
    versions = f"python {platform.python_version()}, torch {torch.__version__}, code {code_hash()}"
    # The tiny model's tokens are also words of the conversations of domains without WORDS.
    tokens = sha256(str(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
    refuse_differences(
        ranks,
        {"versions": versions, "about": about, **made_of, "tokens": tokens},
        "give all the same files; generate_tasks may depend on its arguments alone (not on a set's "
        "order), and so may experts",
    )
    opened = open_folder(config, folder) if ranks.is_main else None
    own = "" if opened is None or opened.checkpoint is None else opened.checkpoint.name
    name = ranks.all_gather_objects(own, "run folder")[0]
    checkpoint = folder / "checkpoints" / name
    return opened, checkpoint if name else None


def agree_on_model(
    config: Config, model: Any, chat: Chat, late: Sequence[str], ranks: Ranks, *, is_new: bool
) -> dict[str, str]:
    """Compare what `open_together` could not compare yet; return hashes of it, by a name for each.

    These are the modules that the run has imported `late`, the ends of messages, and what the run
    needs again of its model: with LoRA, and for the reference of a new run. Raises UserError, on
    all ranks, if a rank has another one, or has loaded another model than rank 0.
    """
    hashes = hashes_of_late_modules(late)
    hashes["ends of message"] = hash_of_stops(model, chat)
    configuration = {CONFIGURATION: hash_of_configuration(model)}
    facts = {**configuration, **hashes}
    hosts = ranks.all_gather_objects(platform.node(), "model")
    if len(set(hosts)) > 1:
        facts["model"] = parameter_hash(model.named_parameters())
    refuse_differences(ranks, facts, "give all the same files")
    needs_reference = config.grpo.beta > 0 or config.grpo.movement_coef > 0
    if config.model.use_peft or (is_new and needs_reference):
        hashes |= weights_of(model, ranks)  # read again when the run is resumed
    return hashes | configuration if config.model.use_peft else hashes


def hashes_of_late_modules(names: Sequence[str]) -> dict[str, str]:
    """Return the hashes of the user's modules that a run first imported in an episode."""
    hashes = dict[str, str]()
    for name in (name for name in names if name.removeprefix(MODULE) not in STARTED):
        with suppress(Exception):  # whatever a user's package raises, as its import will
            spec = find_spec(name.removeprefix(MODULE))
            if spec is not None and spec.origin is not None and os.path.isfile(spec.origin):
                hashes[name] = hash_of(Path(spec.origin))
    return hashes


def hash_of_configuration(model: Any) -> str:
    """Return the SHA-256 of what a model's config.json says about its computation."""
    settings = model.config.to_diff_dict()
    computing = {name: value for name, value in settings.items() if name not in NOT_COMPUTED}
    return sha256(json.dumps(computing, sort_keys=True, default=str).encode()).hexdigest()


def hash_of_stops(model: Any, chat: Chat) -> str:
    """Return the SHA-256 of the ids that end a message."""
    return sha256(str([chat.end_of_turn_id, *other_stops(model, chat)]).encode()).hexdigest()


def code_hash() -> str:
    """Return the start of the SHA-256 of this package's source files."""
    files = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    return sha256(b"".join((PACKAGE / file).read_bytes() for file in files)).hexdigest()[:8]


def load_start(
    config: Config, tokenizer: Any, path: Path | None, device: torch.device
) -> tuple[SavedState, Any]:
    """Return a checkpoint's state and model. If `path` is None, return {} and a new model.

    On a GPU, a model's weights are read to `device`.
    With LoRA, the frozen model has the type in which it computes, and no adapters yet.
    """
    dtype = dtype_of(config.model) if config.model.use_peft else torch.float32
    at = str(device) if device.type == "cuda" else None
    if path is None:
        return {}, load_model(config.model, tokenizer, config.run.seed, dtype, at)
    state = read_state(path)
    is_adapter = lora.is_adapter(path)
    if state.get("step") and is_adapter != config.model.use_peft:
        held = "LoRA adapters" if is_adapter else "a whole model"
        raise UserError(
            f"use_peft: got {str(config.model.use_peft).lower()}, but {path.name} holds {held}; "
            "resume with its value"
        )
    folder: str | Path = path
    if is_adapter and config.model.use_peft:  # else a warm start's adapters are merged
        lora.check_settings(path, config.model)
        # The path in the adapters may be of a folder from which the project was moved.
        folder = config.model.model if has_own_base(config.model) else lora.base_named_in(path)
    return state, load_folder(folder, config.model, at, dtype)


def has_own_base(settings: ModelSettings) -> bool:
    """Return whether the setting `model` itself is the base model of LoRA adapters."""
    return settings.model != "tiny" and not lora.is_adapter(settings.model)


def weights_of(model: Any, ranks: Ranks) -> dict[str, str]:
    """Return the SHA-256 of a base model's weights on rank 0, by a name for them and their type."""
    own = ""
    if ranks.is_main or is_sharded(model):
        own = parameter_hash((name, whole(p)) for name, p in model.named_parameters())
    kind = str(next(model.parameters()).dtype).removeprefix("torch.")
    of_ranks = ranks.all_gather_objects(own, "weights of the base model")
    return {f"weights of the base model ({kind})": of_ranks[0]}


def refuse_other_origin(
    state: Mapping[str, Any],
    made_of: Mapping[str, str],
    name: str,
    override: bool,
    about: Mapping[str, Any] | None = None,
) -> list[str]:
    """Raise UserError if a run is not made of what its checkpoint `name` was made of.

    The facts `about` the domains count, too. With `override`, return a note instead. What the
    checkpoint does not name may be anything.
    """
    saved = {**_by_domain(state.get("about")), **state.get("made_of", {})}
    now = {**_by_domain(about), **made_of}
    changed = [what for what, value in now.items() if saved.get(what, value) != value]
    if not changed:
        return []
    if override:
        return [f"warning: overridden: {name} was made with other {', '.join(changed)}"]
    raise UserError(
        f"made_of: {name} was made with other {', '.join(changed)}; put back what was there, or "
        "start a new run; --override goes on all the same"
    )


def _by_domain(about: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return the facts about domains, such as {"commit of airline": "3f2a"}."""
    return {
        f"{fact} of {domain}": value
        for domain, facts in (about or {}).items()
        for fact, value in facts.items()
    }


def refuse_other_stages(
    evaluations: Sequence[Mapping[str, Any]], stages: Sequence[Stage], folder: Path
) -> None:
    """Raise UserError if a stage that has ended would have another length now, or is gone."""
    ended = {entry["after"]: entry["step"] for entry in evaluations}
    names = [stage.name for stage in stages]
    if gone := [name for name in ended if name not in (*BEFORE_GRPO, *names)]:
        raise UserError(
            f"curriculum: stage {gone[0]} has ended, but the stages now are {', '.join(names)}; "
            f"resume with the run's own settings, or train on in a new run with --model {folder}"
        )
    for stage in stages:
        if (step := ended.get(stage.name, stage.last_step)) != stage.last_step:
            raise UserError(
                f"max_steps: stage {stage.name} has ended at step {step}, and would now end at "
                f"step {stage.last_step}; a stage that has ended takes no more steps: resume with "
                f"the run's own settings, or train on in a new run with --model {folder}"
            )


def origin_of_model(config: Config) -> SavedState:
    """Return the state of the checkpoint that is evaluated with its run's settings of data, or {}.

    An evaluation trains nothing, so of what the run was made of only its held-out tasks and its
    code count.
    """
    if config.grpo.use_grpo or run_of_checkpoint(config.model.model) is None:
        return {}
    try:
        state = read_state(Path(config.model.model))
    except (OSError, ValueError, AttributeError):  # a model folder of someone else
        return {}
    now = config.model_dump(mode="json")
    is_same = all(
        state["config"].get(section, {}).get(name) == now[section][name]
        for section, name in SETTINGS
        if section == "data"
    )
    made_of = state.get("made_of", {}).items()
    used = {name: value for name, value in made_of if name.startswith((HELD_OUT, MODULE))}
    return {"made_of": used} if is_same else {}


def base_of_adapters(
    model: Any, settings: ModelSettings, checkpointer: Checkpointer, further: SavedState
) -> str:
    """Return the folder or hub id of the base model of LoRA adapters.

    A base model that has no folder and no hub id is first saved in a folder, as a checkpoint with
    `further` state.
    """
    folder = checkpointer.folder
    name = settings.model
    ranks = checkpointer.ranks
    if has_own_base(settings):
        return str(Path(name).resolve()) if Path(name).is_dir() else name
    if ranks.is_main and not (folder / "base").is_dir():
        checkpointer.write("base", model, further)
    ranks.barrier("base model")
    return str((folder / "base").resolve())


def folder_of_reference(
    checkpointer: Checkpointer, stages: Sequence[Stage], per_stage: bool
) -> Path | None:
    """Return the checkpoint of the reference model; None if the original model is the reference.

    With `per_stage` it is the one that the stage goes on from, else the start of GRPO.
    """
    finished = [stage for stage in stages if checkpointer.state.evaluated(stage.name)]
    is_anew = any(stage.anew for stage in stages[len(finished) :][:1])
    if per_stage and finished and not is_anew:
        return end_of(finished[-1], checkpointer)
    return start_of_grpo(checkpointer)


def start_of_grpo(checkpointer: Checkpointer) -> Path | None:
    """Return the checkpoint of the model before the first stage; None if it is the original one.

    The curriculum `separate` always has it, because its stages begin with it.
    """
    paths = [checkpointer.folder / name for name in ("rft", "warm-start", START)]
    return next((_undamaged(path) for path in paths if path.is_dir()), None)


def end_of(stage: Stage, checkpointer: Checkpointer) -> Path:
    """Return the checkpoint of the end of a stage."""
    return _undamaged(checkpointer.folder / f"stage-{stage.index + 1}-{stage.name}")


def experts_of(checkpointer: Checkpointer, stages: Sequence[Stage]) -> dict[str, Path]:
    """Return the checkpoint of the end of each domain's last stage, before the last stage of all.

    With the curriculum `separate`, these are the experts. Raises UserError if one is damaged.
    """
    last = {stage.own[0]: stage for stage in stages[:-1]}
    return {domain: end_of(stage, checkpointer) for domain, stage in last.items()}


def _undamaged(path: Path) -> Path:
    """Return a checkpoint that a run needs beside its last one; raises UserError if damaged."""
    if why := problem(path):
        raise UserError(
            f"resume_from_checkpoint: {path.name}, which the run needs, is damaged ({why}); "
            "restore it, or start anew"
        )
    return path


@torch.no_grad()
def set_weights(model: Any, config: Config, tokenizer: Any, folder: Path | None) -> None:
    """Load weights or LoRA adapters from `folder` into `model`; None means the initial weights."""
    if config.model.use_peft:
        if folder is not None and lora.is_adapter(folder):
            lora.load(model, folder)
        return  # New LoRA adapters do not change the output of a model.
    loaded = load_start(config, tokenizer, folder, torch.device("cpu"))[1]
    for parameter, value in zip(model.parameters(), loaded.parameters(), strict=True):
        fill(parameter, value)


@torch.no_grad()
def set_merged(
    model: Any, config: Config, tokenizer: Any, folders: Sequence[Path], ranks: Ranks
) -> None:
    """Load the merged weights of experts into `model`; `folders` are of the start and the experts.

    Rank 0 reads all of them at once and merges in float32; the other ranks get its bits.
    """
    settings = config.curriculum
    values: Iterator[torch.Tensor] | None = None
    if ranks.is_main:
        cpu = torch.device("cpu")
        models = [load_start(config, tokenizer, folder, cpu)[1] for folder in folders]
        start, *experts = [[*of.parameters()] for of in models]
        values = merged(
            start, experts, settings.merge_method, settings.merge_weight, settings.merge_density
        )
    for parameter in model.parameters():
        value = torch.empty(parameter.shape) if values is None else next(values)
        ranks.copy_of_main(value)
        fill(parameter, value)
