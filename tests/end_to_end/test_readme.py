"""The README's commands are real: the files exist and the command line takes the flags."""

import re
import shlex

import pytest

from pipeline.commands.main import COMMANDS as CONSOLE
from pipeline.config.cli import parse
from pipeline.config.settings import DEFAULT_DOMAINS
from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
COMMANDS = [line.split("#")[0].strip() for line in BLOCKS.splitlines() if line.strip()]


def test_the_readme_shows_the_commands_that_this_file_checks():
    assert len(COMMANDS) == 13
    assert COMMANDS[:2] == ["bash scripts/run_ddp.sh", "bash scripts/test.sh"]
    assert "accelerate launch pipeline/run.py --num-gpus 8" in COMMANDS
    assert not re.search(r"@@|\b(CHAOS|FAULTS|SAVING)\b", README)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_a_file_and_flags_that_exist(command, capsys):
    words = shlex.split(command)
    if words[0] == "three-domain-grpo":
        assert words[1] in CONSOLE
        return
    place = next(i for i, word in enumerate(words) if word.endswith((".py", ".sh")))
    assert (ROOT / words[place]).is_file()
    if words[place] == "pipeline/run.py" and words[-1] == "--help":
        with pytest.raises(SystemExit):
            parse(words[place + 1 :])
    elif words[place] == "pipeline/run.py":
        domains = ["telecom", "airline"] if "--domains" in words else DEFAULT_DOMAINS
        assert parse(words[place + 1 :]).data.domains == list(domains)


def test_links_and_pictures_lead_to_files():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).is_file(), target
