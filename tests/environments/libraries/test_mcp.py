"""Servers of tools: one for each episode or a shared one, as commands and over HTTP."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

pytest.importorskip("mcp")

from pipeline.environments.calls import environment_loop
from pipeline.environments.libraries import mcp as module
from pipeline.environments.libraries.mcp import mcp
from tests.rollout.test_own_loop import LIMITS
from tests.support import ROOT
from tests.support.helpers import call, played, say
from tests.support.messages import refusal, says

pytestmark = pytest.mark.usefixtures("no_stray_processes")

COMMAND = f"{sys.executable} -S -P {ROOT / 'tests' / 'support' / 'tool_server.py'}"
# A server of the official package, whose tools say in which session they are called.
OFFICIAL = """
import sys
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("desk")

@server.tool()
def double(number: int) -> int:
    return 2 * number

@server.tool()
def session(context: Context) -> str:
    return context.headers["mcp-session-id"]

server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if sys.argv[2:] else {}))
"""


def play(domain, *scripts, **limits):
    """Trajectories of episodes, all at once, and the contents of their tools' messages."""
    room = {"max_tool_result_tokens": 600, "max_tokens": 4096}
    limits = LIMITS.model_copy(update=room | limits)
    episodes, _ = played([[*script, say("bye")] for script in scripts], {"desk": domain}, limits)
    return episodes, [[m["content"] for m in e.messages if m["role"] == "tool"] for e in episodes]


@pytest.fixture(scope="module")
def desk():
    return mcp(COMMAND)


def test_each_episode_has_a_server_of_its_own(desk):
    assert desk.is_process
    notes = [call("note", text="a"), call("note", text="b")]
    episodes, said = play(desk, notes, notes, [say("hello")])
    lines = [[text.split("\n") for text in texts] for texts in said]
    assert [[line[0] for line in texts] for texts in lines] == [["1: a", "2: b"]] * 2 + [[]]
    processes = [{line[1] for line in texts} for texts in lines[:2]]
    assert [len(ids) for ids in processes] == [1, 1] and processes[0] != processes[1]
    assert [(e.error, e.tools) for e in episodes[:2]] == [("", {"note": [2, 0]})] * 2


def test_a_shared_server_serves_all_episodes_and_begins_again_after_its_end():
    domain = mcp(COMMAND, shared=True)
    assert not domain.is_process
    try:
        _, said = play(domain, *[[call("note", text="a")]] * 3)
        assert sorted(texts[0][0] for texts in said) == ["1", "2", "3"]
        (dead,), _ = play(domain, [call("die")])
        assert dead.left_out == "outage"
        _, ((again,),) = play(domain, [call("note", text="b")])
        assert again.startswith("1: b\n")
    finally:
        end(domain)


def end(domain):
    """End the session of a shared server, which otherwise ends with this process."""
    session = domain.environment.session
    module.asyncio.run_coroutine_threadsafe(session.end(), session.begun.get_loop()).result(10)


def test_a_model_sees_the_errors_of_tools_and_what_is_no_text(desk):
    calls = [call("fail"), call("refuse"), call("fly"), call("draw", text=7)]
    (episode,), (said,) = play(desk, calls)
    wrong = ['{"error": "no such item"}', '{"error": "unknown tool fly"}']
    assert said == ["fail", *wrong, "draw\n[image, which is not shown]"]
    assert (episode.error, episode.left_out, episode.num_tool_errors) == ("", "", 0)
    assert episode.tools["fail"] == [1, 1]


def test_schemas_reach_the_model_whole_and_in_the_order_of_their_names(desk):
    functions = [schema["function"] for schema in desk.tools]
    names = "chat die draw fail note pay refuse sleep"
    assert " ".join(f["name"] for f in functions) == names
    assert functions[4]["description"] == "note!"
    assert functions[4]["parameters"]["properties"]["item"]["anyOf"][0] == {"$ref": "#/$defs/Item"}
    assert functions[4]["parameters"]["$defs"]["Item"]["properties"] == {"name": {"type": "string"}}


def test_a_server_that_dies_leaves_its_episode_out_and_says_why(desk):
    (dead, alive), _ = play(desk, [call("die"), call("note")], [call("note", text="x")])
    assert (dead.left_out, alive.left_out) == ("outage", "")
    says(dead.error, "Outage: ", "tool_server.py", "Connection closed", "the till burns")


def test_a_chatty_server_is_served_and_what_it_said_takes_no_room():
    domain = mcp(COMMAND, shared=True)
    try:
        play(domain, [call("chat"), call("chat"), call("note")])
        file = domain.environment.session.errors.fileno()
        assert os.fstat(file).st_blocks * 512 < 1 << 20
    finally:
        end(domain)


def test_a_call_that_takes_too_long_ends_the_server_with_its_episode(desk):
    (late,), _ = play(desk, [call("sleep")], call_timeout=1.0)
    assert late.error == "CallTimeout: sleep took more than 1 s"


def test_a_stubborn_server_and_its_children_end_with_the_episode_and_with_a_killed_rank():
    domain = mcp(f"{COMMAND} stubborn")
    play(domain, [call("note")])  # `no_stray_processes` holds it to that
    rank = f"""
import os
from pipeline.environments.calls import environment_loop
from pipeline.environments.libraries.mcp import mcp
server = mcp({f"{COMMAND} stubborn"!r}, shared=True).environment()
print(environment_loop.run(server.call("note", {{}})).result()[0], flush=True)
os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", rank], cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    gone = [p for p in psutil.Process().children() if p.pid == int(killed.stdout.split()[-1])]
    assert not psutil.wait_procs(gone, timeout=10)[1]  # this process inherits orphans


def test_a_server_ends_with_its_environment_though_nothing_closes_it(desk):
    environment = desk.make()
    environment_loop.run(environment.call("note", {})).result(60)
    del environment
    gc.collect()  # `no_stray_processes` holds it to that


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("nosuch server.py", ["there is no program 'nosuch'", "mcp:python server.py"]),
        ("python nosuch.py", ["there is no file 'nosuch.py'"]),
        ("python '", ["No closing quotation"]),
        ("false", ["does not list its tools", "Connection closed", "mend the command"]),
        (f"{COMMAND} broken", ["KeyError: 'no till'"]),
        (f"{COMMAND} silent", ["within 1 s", "TimeoutError"]),
        (f"{COMMAND} empty", ["the server has no tools"]),
        ("http://127.0.0.1:9/mcp", ["ConnectError", "start it, or mend its URL"]),
    ],
)
def test_a_server_without_tools_is_refused_in_one_line(server, words, monkeypatch):
    monkeypatch.setattr(module, "START_S", 1.0 if "silent" in server else 60.0)
    says(refusal(mcp, server), *words)


def test_without_the_package_the_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert refusal(mcp, "x").endswith("pip install 'three-domain-grpo[mcp]'")


def test_other_tools_than_before_the_run_are_no_tools_of_an_episode(tmp_path):
    file = tmp_path / "open"
    file.touch()
    domain = mcp(f"{COMMAND} good {file}")
    file.unlink()
    (episode,), _ = play(domain, [call("note")])
    assert episode.left_out == "outage"
    says(episode.error, "its tools are others than before the run")


def test_facts_name_the_server_and_change_with_its_tools_and_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "tests" / "support" / "tool_server.py").read_text()
    digests = []
    for version in (text, text, text + "# mended\n", text.replace("{n}!", "{n}?")):
        (tmp_path / "server.py").write_text(version)
        facts = mcp(f"{sys.executable} -S server.py").about()
        digests.append(facts.pop("tools"))
        assert facts == {"environment": f"mcp:{sys.executable} -S server.py", "server": "desk 3"}
    assert digests[0] == digests[1]
    assert len({*digests}) == 3


@pytest.fixture
def official(tmp_path):
    """Start the official server over HTTP; returns a function that starts it and returns it."""
    file = tmp_path / "server.py"
    file.write_text(OFFICIAL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []

    def start():
        command = [sys.executable, str(file), "streamable-http", str(port)]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, **silent))
        until = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < until and started[-1].poll() is None
            time.sleep(0.05)
        return started[-1]

    yield start, f"http://127.0.0.1:{port}/mcp"
    for process in started:
        process.kill()
        process.wait()


def test_each_episode_has_a_session_of_its_own_over_http(official):
    start, url = official
    server = start()
    domain = mcp(url)
    assert not domain.is_process
    calls = [call("session"), call("double", number=4), call("session"), call("double", number="x")]
    _, said = play(domain, calls, calls)
    assert {texts[1] for texts in said} == {"8"}
    assert said[0][0] == said[0][2] != said[1][0] == said[1][2]
    assert "valid integer" in said[0][3]  # the model's mistake is no outage
    common = mcp(url, shared=True)
    _, said = play(common, [call("session")], [call("session")])
    assert said[0] == said[1]

    server.kill()
    server.wait()
    for one in (domain, common):
        (episode,), _ = play(one, [call("double", number=1)])
        assert episode.left_out == "outage"
    start()
    for one in (domain, common):
        _, said = play(one, [call("double", number=1)])
        assert said == [["2"]]


def test_the_official_server_serves_as_a_command(tmp_path):
    (tmp_path / "server.py").write_text(OFFICIAL)
    domain = mcp(f"{sys.executable} {tmp_path / 'server.py'}")
    (episode,), (said,) = play(domain, [call("double", number=4), call("double")])
    assert said[0] == "8" and "required" in said[1]
    assert (episode.error, episode.num_tool_errors) == ("", 0)
