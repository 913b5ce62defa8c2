"""Makes a tiny model and its tokenizer, with tokens for the words of demonstrations.

DEMONSTRATIONS is a JSON Lines file of conversations, as the setting `demonstrations` takes it.
OUT is a folder for the setting `model`. The weights are random.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.cli import Parser, seed_of
from pipeline.environments.demonstrations import (
    Demonstration,
    fields_of,
    names_of,
    read_demonstrations,
    words_of,
)
from pipeline.environments.domains import Domain
from pipeline.environments.single_turn import SingleTurnEnvironment
from pipeline.errors import UserError
from pipeline.export.folder import written_whole
from pipeline.files.console import command
from pipeline.files.imports import importing
from pipeline.files.untrusted import printable, shown


def main(argv: list[str]) -> int:
    """Run `make-tiny DEMONSTRATIONS OUT`; raises UserError for a mistake of the user."""
    options = _parser().parse_args(argv)
    demonstrations = read_demonstrations(options.demonstrations)
    tools = _tools(demonstrations)
    words = words_of(demonstrations, names_of(tools))
    if options.fields:
        words = [*names_of(tools), *fields_of(demonstrations)]
    with importing():
        from pipeline.chat.template import Chat
        from pipeline.models.lora import quiet
        from pipeline.models.tiny import tiny_model, tiny_tokenizer
        from pipeline.sft import encode

    domain = Domain(
        name="demonstrations", environment=SingleTurnEnvironment, words=partial(list, words)
    )
    tokenizer = tiny_tokenizer([domain])
    model = tiny_model(tokenizer, options.seed)
    chat = Chat(tokenizer)
    lengths = [len(encode(chat, d.messages, d.tools or [])["input_ids"]) for d in demonstrations]
    if max(lengths) > (most := model.config.max_position_embeddings):
        where = demonstrations[lengths.index(max(lengths))].where
        raise UserError(f"{where}: has {max(lengths)} tokens, the tiny model {most}; shorten it")
    with written_whole(options.out) as writing, quiet():
        model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)
    print(f"{options.out}: {model.num_parameters() / 1e6:.2f} M random parameters")
    told = ", ".join(tool["function"]["name"] for tool in tools) or "none"
    texts = [word for word in words if word not in names_of(tools)]
    some = f", such as {', '.join(map(shown, texts[:4]))}" if texts else ""
    print(printable(f"tools: {told}; {len(texts)} frequent texts are tokens{some}"))
    size = f"{sorted(lengths)[len(lengths) // 2]} tokens in the median, {max(lengths)} at most"
    print(f"{len(demonstrations)} demonstrations have {size} (max_tokens counts them)")
    model_name = "./tiny" if str(options.out) == "tiny" else options.out  # tiny is another model
    taken = f"--model {model_name} --demonstrations '{{DOMAIN: {options.demonstrations}}}'"
    print(f"train it: {command('train')} --domains DOMAIN {taken}")
    return 0


def _tools(demonstrations: list[Demonstration]) -> list[dict[str, Any]]:
    """Return {"function": {"name": ...}} for each tool that demonstrations list or call."""
    listed = [tool.get("function") for d in demonstrations for tool in d.tools or ()]
    calls = [c for d in demonstrations for m in d.messages for c in m.get("tool_calls") or ()]
    functions = [f for f in listed if isinstance(f, dict)] + [call["function"] for call in calls]
    names = dict.fromkeys(f["name"] for f in functions if isinstance(f.get("name"), str))
    return [{"function": {"name": name}} for name in names]


def _parser() -> argparse.ArgumentParser:
    about, _, rest = str(__doc__).partition("\n\n")
    parser = Parser(prog=command("make-tiny"), description=about, epilog=rest, allow_abbrev=False)
    parser.add_argument("demonstrations", type=Path, metavar="DEMONSTRATIONS", help="a file")
    about = "a token for each frequent piece up to ', ', ' | ' or a line break, digits included"
    parser.add_argument("--fields", action="store_true", help=about)
    parser.add_argument("out", type=Path, metavar="OUT", help="new or empty folder")
    about = "seed of the random weights [1]"
    parser.add_argument("--seed", type=seed_of, default=1, metavar="N", help=about)
    return parser
