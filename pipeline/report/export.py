"""Writes a checkpoint as a plain Hugging Face folder (model, tokenizer, card), and uploads it."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi

from pipeline.checkpoints.run_folder import read_manifest
from pipeline.checkpoints.trained import RunCheckpoint, open_checkpoint
from pipeline.common.console import command, may_fail
from pipeline.common.durable import sync, write_text
from pipeline.common.errors import RunError, UserError
from pipeline.common.layout import ADAPTER_CONFIG
from pipeline.common.untrusted import reason_of
from pipeline.config.settings import Config
from pipeline.models.model_files import HUB_ID, read_json, write_for_transformers_4
from pipeline.report.card import example_prompt, model_card
from pipeline.report.run_files import load_run

OF_THE_RUN = ("optimizer.pt", "moments/", "state.json")  # what is no part of a model
# Files of an earlier upload that would change what a folder means.
OUTDATED = ["adapter_*", "*.safetensors", "*.safetensors.index.json"]


def export(
    checkpoint: RunCheckpoint, out: Path, merge: bool = False, repo_id: str | None = None
) -> None:
    """Write a checkpoint into the new or empty folder `out`.

    The folder has the weights as they were trained, in fp32, the tokenizer with its chat template,
    the configuration for generation, and a model card. A checkpoint of LoRA adapters becomes PEFT's
    folder of adapters, or with `merge` a whole model. `out` appears only when it is complete. The
    card names the place on the hub, `repo_id`. Raises UserError if `out` cannot be written to.
    """
    with written_whole(out) as folder:
        manifest = read_manifest(checkpoint.path)
        assert manifest is not None, "an undamaged checkpoint has a manifest"
        names = [name for name in manifest["files"] if not name.startswith(OF_THE_RUN)]
        base = adapter_base(checkpoint) if checkpoint.is_adapter and not merge else None
        if checkpoint.is_adapter and merge:
            from transformers.utils import GENERATION_CONFIG_NAME

            from pipeline.models.loading import load_folder

            merged = load_folder(checkpoint.path, checkpoint.config.model)
            if GENERATION_CONFIG_NAME in names:  # older checkpoints of adapters have none
                ends = read_json(checkpoint.path / GENERATION_CONFIG_NAME).get("eos_token_id")
                merged.config.eos_token_id = ends
            merged.save_pretrained(folder)
            names = [name for name in names if not name.startswith("adapter_")]
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.path / name, folder / name)
        write_for_transformers_4(folder)  # of old checkpoints and merged models
        # The checkpoint's entry may be the place from which the run was moved.
        if base is not None:
            path = folder / ADAPTER_CONFIG
            content = {**json.loads(path.read_text()), "base_model_name_or_path": base}
            path.write_text(json.dumps(content, indent=2, sort_keys=True))
        run = load_run(checkpoint.run)
        example = example_prompt(run)
        model_card(checkpoint, run, example, base, repo_id).save(folder / "README.md")
        write_text(folder / "example.json", json.dumps(example, ensure_ascii=False, indent=1))


@contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """Yield a folder to write to, which becomes the new or empty folder `out` if all goes well.

    Raises UserError if `out` is not empty or cannot be written to.
    """
    is_empty = out.is_dir() and not any(out.iterdir())
    if not is_empty and (out.is_symlink() or out.exists()):
        what = "a folder that is not empty" if out.is_dir() else "no folder"
        raise UserError(f"got {str(out)!r}, which is {what}; give a new or empty folder")
    writing = out.parent / f".{out.name}.writing"
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir(parents=True)
        yield writing
        for path in (*writing.rglob("*"), writing):
            sync(path)
        writing.replace(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({reason_of(error)}); name another one") from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def is_portable(checkpoint: RunCheckpoint) -> bool:
    """Return False for LoRA adapters whose base model lies in a folder of this machine."""
    if not checkpoint.is_adapter:
        return True
    base = adapter_base(checkpoint)
    return HUB_ID.fullmatch(base) is not None and not Path(base).exists()


def adapter_base(checkpoint: RunCheckpoint) -> str:
    """Return the folder or hub id of the base model of LoRA adapters."""
    from pipeline.models import lora  # imports torch

    return lora.base_named_in(checkpoint.path)


# The hub


def upload(checkpoint: RunCheckpoint, folder: Path, repo_id: str, private: bool = False) -> str:
    """Upload an exported folder in one commit, and return the address of the commit.

    A repository that does not exist is made first; `private` counts for a new repository alone.
    """
    api = HfApi()
    repository = api.create_repo(repo_id, private=private or None, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repository.repo_id,
        folder_path=folder,
        commit_message=f"{checkpoint.run.resolve().name}, {checkpoint.path.name}",
        delete_patterns=OUTDATED,
    )
    return str(commit.commit_url)


def upload_exported(
    checkpoint: RunCheckpoint, folder: Path, repo_id: str, private: bool = False
) -> str:
    """Upload a user's folder; raises RunError, with the command that tries again."""
    try:
        return upload(checkpoint, folder, repo_id, private)
    except Exception as error:  # the hub's library and the network raise all kinds of errors
        raise RunError(
            f"push_to_hub: {folder} is whole, but the upload failed ({reason_of(error)}); "
            f"`hf upload {repo_id} {folder}` tries again"
        ) from None


def push_after_training(run: Path, config: Config) -> None:
    """Upload the run's best checkpoint with `keep_best`, else the latest; say so in one line.

    Adapters whose base model is a folder of this machine are merged. A failure is one line.
    """
    repo_id = str(config.run.hub_model_id)
    name = "best" if config.run.keep_best else "latest"
    words = f"{command('export')} {run} OUT --checkpoint {name} --push-to-hub {repo_id}"
    words += " --merge" * config.model.use_peft + " --private" * config.run.hub_private_repo
    with may_fail("push_to_hub", f"{words} tries again"), TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(run, name)
        out = Path(folder) / "model"
        export(checkpoint, out, merge=not is_portable(checkpoint), repo_id=repo_id)
        address = upload(checkpoint, out, repo_id, config.run.hub_private_repo)
        print(f"uploaded {checkpoint.path.name}: {address}", flush=True)
