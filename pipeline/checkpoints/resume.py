"""Starts or resumes a run: opens the run folder, and loads the state and the weights."""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from pipeline.checkpoints import run_folder
from pipeline.checkpoints.checkpoint import Checkpointer, SavedState
from pipeline.checkpoints.manifest import problem
from pipeline.checkpoints.run_folder import Opened, open_folder, read_state
from pipeline.config.recipe import SETTINGS
from pipeline.config.settings import Config, ModelSettings
from pipeline.data.curriculum import BEFORE_GRPO, Stage
from pipeline.data.tasks import HELD_OUT, MODULE
from pipeline.distributed.ranks import Ranks, parameter_hash
from pipeline.errors import UserError
from pipeline.files.layout import run_of_checkpoint
from pipeline.models import lora
from pipeline.models.loading import dtype_of, load_folder, load_model

PACKAGE = Path(__file__).parents[1]
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


def share_folder(config: Config, ranks: Ranks) -> Config:
    """Return the settings with rank 0's run folder as `output_dir`.

    Raises UserError if a rank has other settings than rank 0, or does not see the run folder.
    """
    folder = Path()
    if ranks.is_main:
        folder = run_folder.folder_of(config)
        run_folder.check_folder(_in_folder(config, folder))
    host = platform.node()
    settings = _in_folder(config, None).model_dump()
    gathered = ranks.all_gather_objects((host, folder, folder.absolute(), settings), "settings")
    host_0, relative, absolute, settings_0 = gathered[0]
    for rank, (other, _, _, found) in enumerate(gathered):
        for section, name in SETTINGS:
            if found[section][name] != settings_0[section][name]:
                given = f"rank {rank} on {other} has {found[section][name]!r}"
                why = f"{given}, rank 0 on {host_0} has {settings_0[section][name]!r}"
                raise UserError(f"{name}: {why}; start all ranks with the same command")
    try:
        sees = sees_folder_of_rank_0(absolute, ranks)[1]
    except OSError as error:
        where = f"{Path(error.filename or '').parent} takes no file ({error.strerror})"
        raise UserError(f"output_dir: {where}; make room, or name another folder") from None
    for rank, (other, is_seen) in enumerate(ranks.all_gather_objects((host, sees), "run folder")):
        if not is_seen:
            why = f"rank {rank} on {other} cannot see {absolute} of rank 0 on {host_0}"
            raise UserError(f"output_dir: {why}; name a folder that all machines share")
    return _in_folder(config, relative if ranks.is_main else absolute)


def _in_folder(config: Config, folder: Path | None) -> Config:
    run = config.run.model_copy(update={"output_dir": folder})
    return config.model_copy(update={"run": run})


def open_together(
    config: Config,
    ranks: Ranks,
    tokenizer: Any,
    about: Mapping[str, Any],
    made_of: Mapping[str, str],
) -> tuple[Opened | None, Path | None]:
    """Open the run folder on rank 0, and return the checkpoint to resume.

    A UserError on rank 0 is raised on every rank. On ranks above 0, the result has None for Opened.
    Raises UserError if the ranks have a `tokenizer` with different tokens, different facts `about`
    the domains, or are `made_of` different things.
    """
    digest = sha256(str(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
    versions = f"python {platform.python_version()}, torch {torch.__version__}, code {code_hash()}"
    own_facts = {"about": json.dumps(about, sort_keys=True), **made_of}
    own = platform.node(), versions, own_facts, digest
    hosts, all_versions, facts, digests = zip(*ranks.all_gather_objects(own, "tokens"), strict=True)
    if rank := _other(all_versions):
        where = f"rank {rank} on {hosts[rank]} has {all_versions[rank]}, rank 0 on {hosts[0]}"
        raise UserError(f"versions: {where} has {all_versions[0]}; install the same on both")
    if rank := _other(facts):
        name = next(name for name, fact in facts[0].items() if facts[rank].get(name) != fact)
        why = f"rank {rank} on {hosts[rank]} has others than rank 0 on {hosts[0]}"
        remedy = "give all the same files; generate_tasks may depend on its arguments alone"
        raise UserError(f"{name}: {why}; {remedy} (not on a set's order)")
    if _other(digests):
        why = "the expert of a domain without WORDS gave the ranks different conversations"
        raise UserError(f"demonstrations: {why}; give the domain's module WORDS, or a file")
    opened: Opened | None = None
    result: Any = None
    try:
        if ranks.is_main:
            opened = open_folder(config)
            result = opened.checkpoint and opened.checkpoint.name
    except UserError as error:
        result = error
    result = ranks.all_gather_objects(result, "run folder")[0]
    if isinstance(result, UserError):
        raise result
    return opened, result and run_folder.folder_of(config) / "checkpoints" / result


def refuse_other_weights(model: Any, ranks: Ranks) -> None:
    """Raise UserError, on all ranks, if a machine has loaded another model than rank 0."""
    hosts = ranks.all_gather_objects(platform.node(), "model")
    if len(set(hosts)) == 1:
        return
    found = ranks.all_gather_objects(parameter_hash(model.named_parameters()), "model")
    if rank := _other(found):
        where = f"rank {rank} on {hosts[rank]} has other weights than rank 0 on {hosts[0]}"
        raise UserError(f"model: {where}; give all the same files")


def code_hash() -> str:
    """Return the start of the SHA-256 of this package's source files."""
    files = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    return sha256(b"".join((PACKAGE / file).read_bytes() for file in files)).hexdigest()[:8]


def _other(values: Sequence[Any]) -> int:
    """Return the first rank whose value is not that of rank 0; 0 if there is none."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), 0)


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
        got = str(config.model.use_peft).lower()
        raise UserError(f"use_peft: got {got}, but {path.name} holds {held}; resume with its value")
    goes_on = is_adapter and config.model.use_peft  # else a warm start's adapters are merged
    if goes_on:
        lora.check_settings(path, config.model)
    return state, load_folder(lora.base_of(path) if goes_on else path, config.model, at, dtype)


def refuse_other_facts(state: SavedState, about: Mapping[str, Any], override: bool) -> None:
    """Raise UserError if the facts about a domain are not those of the checkpoint."""
    saved: Mapping[str, Any] = state.get("about", about)
    for name in {**saved, **about} if not override else ():
        was = saved.get(name, {})
        now = about.get(name, {})
        if changed := [key for key in {**was, **now} if was.get(key) != now.get(key)]:
            given = f"{changed[0]} was {was.get(changed[0])} and is {now.get(changed[0])}"
            raise UserError(f"about: {name}: {given}; restore the data, or give --override")


def weights_of(model: Any, ranks: Ranks) -> dict[str, str]:
    """Return the SHA-256 of a base model's weights on rank 0, by a name for them and their type."""
    own = parameter_hash(model.named_parameters()) if ranks.is_main else ""
    kind = str(next(model.parameters()).dtype).removeprefix("torch.")
    found = ranks.all_gather_objects(own, "weights of the base model")
    return {f"weights of the base model ({kind})": found[0]}


def refuse_other_origin(
    state: Mapping[str, Any], made_of: Mapping[str, str], name: str, override: bool
) -> list[str]:
    """Raise UserError if a run is not made of what its checkpoint `name` was made of.

    With `override`, return a note instead. What the checkpoint does not name may be anything.
    """
    saved = state.get("made_of", {})
    changed = [what for what, found in made_of.items() if saved.get(what, found) != found]
    if not changed:
        return []
    if override:
        return [f"warning: overridden: {name} was made with other {', '.join(changed)}"]
    remedy = "put back what was there, or start a new run; --override goes on all the same"
    raise UserError(f"made_of: {name} was made with other {', '.join(changed)}; {remedy}")


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
    path = Path(config.model.model)
    now = config.model_dump(mode="json")
    if config.grpo.use_grpo or run_of_checkpoint(config.model.model) is None:
        return {}
    try:
        state = read_state(path)
    except (OSError, ValueError, AttributeError):  # a model folder of someone else
        return {}
    is_same = all(
        state["config"].get(section, {}).get(name) == now[section][name]
        for section, name in SETTINGS
        if section == "data"
    )
    saved = state.get("made_of", {})
    used = {k: v for k, v in saved.items() if k.startswith((HELD_OUT, MODULE))}
    return {"made_of": used} if is_same else {}


def base_of_adapters(model: Any, settings: ModelSettings, checkpointer: Checkpointer) -> str:
    """Return the folder or hub id of the base model of LoRA adapters.

    A base model that has no folder and no hub id is first saved in a folder.
    """
    folder = checkpointer.folder
    name = settings.model
    ranks = checkpointer.ranks
    if name != "tiny" and not lora.is_adapter(name):
        return str(Path(name).resolve()) if Path(name).is_dir() else name
    if ranks.is_main and not (folder / "base").is_dir():
        checkpointer.write("base", model)
    ranks.barrier("base model")
    return str((folder / "base").resolve())


def folder_of_reference(
    checkpointer: Checkpointer, stages: Sequence[Stage], per_stage: bool
) -> Path | None:
    """Return the checkpoint of the reference model; None if the original model is the reference."""
    finished = [stage for stage in stages if checkpointer.state.evaluated(stage.name)]
    if per_stage and finished:
        name = f"stage-{len(finished)}-{finished[-1].name}"
        return _whole(checkpointer.folder / name)
    return _supervised(checkpointer)


def _supervised(checkpointer: Checkpointer) -> Path | None:
    """Return the checkpoint of the last supervised training before GRPO, or None without one."""
    paths = [checkpointer.folder / name for name in ("rft", "warm-start")]
    return next((_whole(path) for path in paths if path.is_dir()), None)


def _whole(path: Path) -> Path:
    if why := problem(path):
        needed = f"{path.name}, which the run needs, is damaged ({why})"
        raise UserError(f"resume_from_checkpoint: {needed}; restore it, or start anew")
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
        parameter.copy_(value)
