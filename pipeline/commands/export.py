"""Writes a checkpoint of a run as a plain Hugging Face folder with a model card."""

import argparse
from pathlib import Path

from pipeline.config.cli import Parser
from pipeline.errors import UserError
from pipeline.export.checkpoint import open_checkpoint
from pipeline.export.folder import base_of, export, is_portable, upload_exported
from pipeline.files.console import command
from pipeline.files.hub import check_upload


def main(argv: list[str]) -> int:
    """Run `export RUN OUT`; raises UserError for a mistake of the user."""
    options = _parser().parse_args(argv)
    checkpoint = open_checkpoint(options.run, options.checkpoint)
    repo_id = options.push_to_hub
    if repo_id is not None:
        check_upload(repo_id)
        if not options.merge and not is_portable(checkpoint):
            why = f"the adapters' base model is only here, in {base_of(checkpoint)}"
            raise UserError(f"--push-to-hub: {why}; add --merge")
    export(checkpoint, options.out, options.merge, repo_id)
    files = [path for path in options.out.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"{options.out}: {checkpoint}, {len(files)} files, {size:.1f} MB")
    if not checkpoint.is_adapter and options.merge:
        print("note: the checkpoint has no LoRA adapters, so --merge changes nothing")
    elif checkpoint.is_adapter and not options.merge and not is_portable(checkpoint):
        base = base_of(checkpoint)
        print(f"note: the adapters need their base model, {base}; --merge writes a whole model")
    print("README.md there is the model card", flush=True)
    if repo_id is not None:
        address = upload_exported(checkpoint, options.out, repo_id, options.private)
        print(f"uploaded: {address}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=command("export"), description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("out", type=Path, metavar="OUT", help="new or empty folder")
    parser.add_argument("--merge", action="store_true", help="merge LoRA adapters into the model")
    about = "name of a checkpoint, latest, or best (of --keep-best) [latest]"
    parser.add_argument("--checkpoint", default="latest", metavar="NAME", help=about)
    about = "also upload OUT; needs a token (HF_TOKEN)"
    parser.add_argument("--push-to-hub", metavar="REPO_ID", help=about)
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    return parser
