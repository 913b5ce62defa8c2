"""Uploads of exported folders to the Hugging Face hub."""

from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi

from pipeline.config.settings import Config
from pipeline.errors import RunError
from pipeline.export.checkpoint import RunCheckpoint, open_checkpoint
from pipeline.export.folder import export, is_portable
from pipeline.files.console import command, may_fail
from pipeline.files.untrusted import reason_of

# Files of an earlier upload that would change what a folder means.
OUTDATED = ["adapter_*", "*.safetensors", "*.safetensors.index.json"]


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
    """Upload a folder of the user's; raises RunError, with the command that tries again."""
    try:
        return upload(checkpoint, folder, repo_id, private)
    except Exception as error:  # the hub's library and the network raise all kinds of errors
        why = f"{folder} is whole, but the upload failed ({reason_of(error)})"
        raise RunError(f"push_to_hub: {why}; `hf upload {repo_id} {folder}` tries again") from None


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
