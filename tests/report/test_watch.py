"""The page of a run that goes on, in a real browser, and the lines of `status`."""

import gzip
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from pipeline.commands.main import main as command
from pipeline.common import console
from pipeline.common.errors import UserError
from pipeline.common.layout import METRICS, RANKS, WARNINGS
from pipeline.report import server as pages
from pipeline.report import status, watch
from pipeline.report.plots import pictures
from pipeline.report.run_files import load_run
from pipeline.report.server import server_of
from pipeline.report.watch import LivePage, page_beside
from tests.support import http
from tests.support.browser import Page
from tests.support.messages import refusal, says
from tests.support.report_runs import (  # noqa: F401
    THREE,
    episode,
    make_run,
    matplotlib_home,
    write_step,
)

pytestmark = pytest.mark.whole_run

EVIL = "</script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>"


def post_ranks(folder, phases=("sample airline step 2",), age_s=0.0, **more):
    """Where the ranks are, as rank 0 of a run writes it."""
    ranks = [
        {"rank": rank, "host": EVIL, "phase": phase, "waits_for": "", "idle_s": 1.0}
        for rank, phase in enumerate(phases)
    ]
    posted = {"time": time.time() - age_s, "is_over": False, "why": "", "ranks": ranks}
    (folder / RANKS).write_text(json.dumps({**posted, **more}))


def write_episodes(folder, step):
    both = [episode("airline", f"task-{step}", trial, float(trial)) for trial in range(2)]
    both[0]["messages"][3]["content"] = EVIL
    write_step(folder, "airline", step, both)


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    wanted = {"learning_curves": pictures.learning_curves}  # to draw all takes seconds
    monkeypatch.setattr(pictures, "OF_RUN", wanted)
    folder = make_run(tmp_path / "a <b>run", THREE)
    write_episodes(folder, 1)
    post_ranks(folder)
    return folder


@contextmanager
def served(folder, host="127.0.0.1"):
    """The address of a page."""
    page = LivePage(folder)
    is_over = threading.Event()

    def renew():
        while not is_over.is_set():
            page.renew()

    with pytest.MonkeyPatch.context() as patch, http.running(server_of(page, host, 0)) as server:
        patch.setattr(status, "STALE_S", 600.0)  # a browser may take a while to start
        renewing = threading.Thread(target=renew)
        renewing.start()
        try:
            yield server.address
        finally:
            is_over.set()
            renewing.join()


def at(address, path):
    """The address of another path of the same page, with its token."""
    return address.replace("/?", f"/{path}?")


def answer(address, **headers):
    try:
        with urlopen(Request(address, headers=headers), timeout=30) as found:
            return found.status, found.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_follows_a_run_that_goes_on_and_then_is_gone(run_folder, browser):
    with served(run_folder) as address:
        page = Page(browser, address)
        assert page.shows("airline", 1, "airline", "task-1")
        assert "running: telecom, step 30 of 30" in page.texts("#now")[0]
        assert EVIL in page.texts("#now")[0]
        page.wait(lambda: page.script("return !!document.querySelector('#curves svg')"))

        write_episodes(run_folder, 2)
        post_ranks(run_folder, ["update airline step 2", "wait"])
        with (run_folder / METRICS).open("a") as file:
            file.write('{"kind": "train", "stage": "telecom", "step": 31, "reward/airline": 0.5}\n')
        assert page.shows("airline", 2, "airline", "task-2"), "the newest, unasked"
        page.wait(lambda: "update airline step 2" in page.texts("#now")[0])

        page.choose(step="1")
        assert page.shows("airline", 1, "airline", "task-1")
        write_episodes(run_folder, 3)
        with (run_folder / METRICS).open("a") as file:
            file.write('{"kind": "train", "stage": "telecom", "step": 32, "reward/airline": 0.5}\n')
        page.wait(lambda: "3" in page.offered("step"))
        assert page.shows("airline", 1, "airline", "task-1"), "what was chosen stays"

        def version():
            return json.loads(answer(at(address, "now"))[1])["version"]

        before = version()
        post_ranks(run_folder, age_s=status.STALE_S + 1)
        page.wait(lambda: "finished: telecom" in page.texts("#now")[0])
        page.wait(lambda: version() > before)
        run_folder.rename(run_folder.with_name("gone"))
        page.wait(lambda: "not renewed now" in page.texts("#now")[0])
        assert page.shows("airline", 1, "airline", "task-1")
        assert page.script("return window.stolen") is None
        assert page.complaints() == []
    page.wait(lambda: "does not answer" in page.texts("#live")[0])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "::"])
def test_the_server_reads_alone_and_answers_only_who_has_the_token(run_folder, capsys, host):
    if ":" in host:
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    is_here = host not in ("0.0.0.0", "::")
    before = {path: path.stat().st_mtime_ns for path in run_folder.rglob("*")}
    with served(run_folder, host) as address:
        name = {"0.0.0.0": platform.node(), "::": platform.node(), "::1": "[::1]"}.get(host, host)
        assert re.fullmatch(rf"http://{re.escape(name)}:\d+/\?token=[\w-]{{43}}", address)
        if not is_here:
            address = address.replace(f"//{name}:", "//127.0.0.1:")
        code, page = answer(address)
        assert code == 200
        assert "connect-src &#39;self&#39;" in page or "connect-src 'self'" in page
        found = json.loads(answer(at(address, "now"))[1])
        assert found["version"] >= 1
        assert "<section" in found["html"]
        token = address.rpartition("=")[2]
        assert token not in page
        for wrong in ("", token[:-1], f"{token}%C3%A9", token.swapcase()):
            for path in ("", "now", "config.yaml"):
                plain = at(address, path).replace(token, wrong)
                assert answer(plain)[0] == answer(plain.partition("?")[0])[0] == 403
        assert answer(at(address, "config.yaml"))[0] == 404
        assert answer(at(address, "../config.yaml"))[0] == 404
        assert answer(address, Host="another.example")[0] == (403 if is_here else 200)
        assert answer(address, Host="localhost:1")[0] == 200, "an SSH tunnel"
    assert {path: path.stat().st_mtime_ns for path in run_folder.rglob("*")} == before
    assert capsys.readouterr().err == ""


def test_a_page_that_cannot_be_served_is_one_line(run_folder):
    with served(run_folder) as address:
        port = urlsplit(address).port
        wanted = [("127.0.0.1", port), ("127.0.0.1", 70_000), ("no.invalid", 0), ("a..b", 0)]
        for host, number in wanted:
            with pytest.raises(UserError, match=rf"^watch: got {host}, port {number} \(.+\); give"):
                server_of(LivePage(run_folder), host, number)
    says(refusal(LivePage, run_folder.parent), "holds no run, or the run has not begun")


@pytest.mark.parametrize(("mode", "is_private"), [(0o600, True), (0o640, False), (0o604, False)])
def test_a_token_never_stands_in_a_file_that_others_may_read(tmp_path, mode, is_private):
    log = tmp_path / "slurm-1.out"
    whole = "http://127.0.0.1:8765/?token=abc"
    before = os.dup(1)
    with log.open("w") as stdout:
        log.chmod(mode)
        os.dup2(stdout.fileno(), 1)
        try:
            words = pages.address_in_words(whole, tmp_path)
        finally:
            os.dup2(before, 1)
            os.close(before)
    if is_private:
        assert words == whole
        return
    kept = tmp_path / ".page-address"
    assert words == f"http://127.0.0.1:8765/ (whole, with its token, in {kept})"
    assert kept.read_text() == f"{whole}\n"
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_run_serves_its_page_as_long_as_it_lasts(run_folder, capfd):
    with page_beside(run_folder):
        said = ""
        while not (found := re.search(r"in a browser: (\S+) \(as long as the run lasts", said)):
            said += capfd.readouterr().out
            time.sleep(0.05)
        assert answer(found[1])[0] == 200
    with pytest.raises(OSError, match="refused"):
        answer(found[1])


@pytest.mark.parametrize(
    ("age_s", "more", "is_whole", "expected"),
    [
        (0, {}, False, "running: telecom, step 30 of 40, about 20 s left in GRPO's steps"),
        (60, {}, False, "silent: telecom, step 30 of 40"),
        (60, {"is_over": True}, True, "finished: telecom, step 30 of 40"),
        (60, {"is_over": True}, False, "finished: telecom, step 30 of 40"),
        (0, {"is_over": True, "why": "OSError: x"}, False, "ended (OSError: x): telecom, step 30"),
    ],
)
def test_status_says_where_a_run_is(run_folder, capsys, age_s, more, is_whole, expected):
    settings = run_folder / "config.yaml"
    settings.write_text(settings.read_text().replace("max_steps: 30", "max_steps: 40"))
    post_ranks(run_folder, ["sample", "wait"], age_s, **more)
    if not is_whole:
        (run_folder / "results.json").unlink()
    assert status.main([str(run_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"a <b>run: {expected}")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert any("sample" in line for line in lines) == expected.startswith("running")


def test_a_run_is_stopped_killed_or_silent_as_its_process_is(run_folder):
    process = subprocess.Popen(["sleep", "600"])
    ranks = [{"rank": 0, "host": platform.node(), "pid": process.pid, "phase": "sample"}]
    ranks[0] |= {"waits_for": "", "idle_s": 1.0}
    (run_folder / "results.json").unlink()

    def state(age_s=3600.0):
        posted = {"time": time.time() - age_s, "is_over": False, "why": "", "ranks": ranks}
        (run_folder / RANKS).write_text(json.dumps(posted))
        return status.status_of(load_run(run_folder))["state"]

    try:
        assert state() == "killed", "a process that is younger than the file is another one"
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert state(-3600.0) == "stopped"
        process.send_signal(signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        assert state(-3600.0) == "silent"
    finally:
        process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert state(-3600.0) == "killed", "its parent has not yet read how it ended"
    process.wait()
    assert state(-3600.0) == "killed"
    ranks[0]["host"] = "another"
    assert state() == "silent"


def test_status_of_several_runs_and_as_json(run_folder, capsys):
    other = shutil.copytree(run_folder, run_folder.with_name("other"))
    folders = [str(run_folder), str(other)]
    assert status.main(folders) == 0
    header, line, again = capsys.readouterr().out.splitlines()
    assert line.split()[2:] == again.split()[1:]
    assert header.split() == ["run", "state", "step", "reward", "success"]
    assert len(line) <= 80
    assert "30/30" in line
    assert status.main([*folders, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [of.pop("name") for of in found] == ["a <b>run", "other"]
    assert [of.pop("folder") for of in found] == folders
    assert found[0] == found[1]
    assert (found[0]["state"], found[0]["step"]) == ("running", 30)
    assert found[0]["ranks"][0]["phase"] == "sample airline step 2"


def test_warnings_of_a_run_are_kept_and_shown_the_newest_first(run_folder, browser, capsys):
    console.say("warning: before the folder is there")
    with console.kept_warnings(run_folder / WARNINGS):
        console.say(f"warning: step 3: {EVIL}\x1b[2J of two\nlines")
        console.say("note: no warning")
        for number in range(status.MOST_WARNINGS - 1):
            console.say(f"warning: of rank {number}")
    with console.kept_warnings(run_folder / "gone" / WARNINGS):
        console.say("warning: of a folder that is gone")
    said = capsys.readouterr().err.splitlines()
    kept = (run_folder / WARNINGS).read_text().splitlines()
    times, texts = zip(*((line[:19], line[20:]) for line in kept), strict=True)
    assert [time.strptime(of, "%Y-%m-%d %H:%M:%S") for of in times]
    assert texts[-6:-4] == ("before the folder is there", f"step 3: {EVIL}\\x1b[2J of two lines")
    assert texts[-1] == "of rank 3"
    assert [line for line in said if line.startswith("note")] == ["note: no warning"]
    shown = status.status_of(load_run(run_folder))["warnings"]
    assert shown[0].endswith("of rank 3")
    assert shown[-1].endswith("of two lines")
    with served(run_folder) as address:
        page = Page(browser, address)
        assert EVIL in page.texts("#now")[0]
        assert page.script("return window.stolen") is None


def test_status_wraps_long_lines_and_refuses_what_no_run_has_written(run_folder, capsys, tmp_path):
    why = "CollectiveError: update: [/a/path/of/gloo/transport.cc:534] Read error; rank 1 is gone"
    post_ranks(run_folder, is_over=True, why=why)
    assert status.main([str(run_folder.parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert why in " ".join(line.strip() for line in lines)
    for text in ("", "[1]", "a: b", "{"):
        (run_folder / "config.yaml").write_text(text)
        says(
            refusal(status.main, [str(run_folder)]),
            "config.yaml is not what a run writes; restore it",
        )
    says(refusal(status.main, [str(tmp_path / "nowhere")]), "no folder")
    (tmp_path / "empty").mkdir()
    says(refusal(status.main, [str(tmp_path / "empty")]), "holds no run")


BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghijklmnop", "bcdefghijklmnopq", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefghijklmnop", "bcdefghijklmnopq", strict=True)
)
TRANSCRIPT = "trajectories/airline/step-000001.rank-0.jsonl.gz"
WHOLE = '{"domain": "a", "task_id": "t", "family": "", "branch": "", "trial": 0, "reward": 1.0, '
WHOLE += '"stop_reason": "completed", "messages": '


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "recipe: x\ndata: *a\n"),
        ("config.yaml", f"{BOMB}recipe: *q\ndata: {{}}\ngrpo: {{}}\nrun: {{}}\n"),
        ("config.yaml", f"{MERGES}recipe: x\ndata: {{}}\ngrpo: {{}}\nrun: {{<<: *q}}\n"),
        ("config.yaml", "recipe: x\ndata: 3\ngrpo: []\nrun:\n"),
        ("config.yaml", "[" * 1_200),
        ("config.yaml", "\x00\x01"),
        ("metrics.jsonl", '{"step": 1, "stage": "airline"}\n'),
        ("metrics.jsonl", '{"kind": "train", "stage": "airline"}\n'),
        ("metrics.jsonl", '{"kind": "train", "step": "1", "stage": "airline"}\n'),
        ("metrics.jsonl", '{"kind": "train", "step": 1, "stage": ["airline"]}\n'),
        ("metrics.jsonl", '{"kind": "train", "step": 1}\n'),
        (
            "metrics.jsonl",
            '{"kind": "train", "step": 1, "stage": "airline", "reward/airline": []}\n',
        ),
        ("metrics.jsonl", f'{{"kind": {"[" * 9_999}\n\n'),
        ("timings.jsonl", '{"kind": "train", "step": 1, "stage": "airline", "perf/step_s": "x"}\n'),
        ("curriculum.json", '{"stages": [{}], "replay": 0, "preview": 0}'),
        ("curriculum.json", '{"stages": 3, "replay": 0, "preview": 0}'),
        ("curriculum.json", "[1]"),
        ("results.json", '{"evaluations": [{}]}'),
        ("results.json", '{"evaluations": 3}'),
        ("results.json", '{"evaluations": [{"after": "start", "step": 0, "success": {"a": {}}}]}'),
        ("results.json", "[" * 99_999),
        *((TRANSCRIPT, text) for text in ("[]", "3", "{}", "[" * 9_999)),
        *((TRANSCRIPT, WHOLE + text) for text in ('3, "ids": []}', "[3]}", '[{"x": 1')),
    ],
    ids=lambda text: text[:40],
)
def test_files_that_no_run_has_written_are_one_line(run_folder, capsys, name, text):
    with served(run_folder) as address:
        data = gzip.compress(f"{text}\n".encode()) if name == TRANSCRIPT else text.encode()
        (run_folder / name).write_bytes(data)
        for arguments in (["status"], ["report"], ["watch", "--port", "0"])[name == TRANSCRIPT :]:
            assert command([*arguments, str(run_folder)]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert err.startswith("error: ")
            assert err.count("\n") == 1
            assert str(run_folder) in err
            assert "restore it" in err or "restore the file" in err
        said = ""
        while "The page is not renewed now: " not in said:
            said = json.loads(answer(at(address, "now"))[1])["html"]
        assert answer(address)[0] == 200
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "text",
    [
        *("", "[1]", "{", "3", "[" * 99_999, '{"time": "x"}', '{"ranks": null}', '{"ranks": [{}]}'),
        '{"ranks": [[]], "time": 1e999}',
        '{"time": 1e300, "is_over": [], "why": {}}',
    ],
    ids=lambda text: text[:40],
)
def test_a_foreign_ranks_file_is_as_none(run_folder, capsys, text):
    (run_folder / "results.json").unlink()
    (run_folder / RANKS).write_text(text)
    assert status.main([str(run_folder)]) == 0
    assert capsys.readouterr().out.startswith("a <b>run: killed: telecom, step 30 of 30")
    with served(run_folder) as address:
        assert "killed: telecom" in json.loads(answer(at(address, "now"))[1])["html"]


@pytest.mark.parametrize("where", ["pictures", "texts"])
def test_a_page_keeps_what_it_showed_when_its_run_goes_away_meanwhile(
    run_folder, monkeypatch, where
):
    def after_a_move(call):
        def moved(*arguments):
            run_folder.rename(run_folder.with_name("gone"))
            return call(*arguments)

        return moved

    page = LivePage(run_folder)
    shown, version = page.html, page.version
    assert "task-1" in shown
    if where == "pictures":
        monkeypatch.setattr(pictures, "OF_RUN", {"one": after_a_move(pictures.learning_curves)})
        page._try(page._draw)
    else:
        write_episodes(run_folder, 2)
        post_ranks(run_folder, is_over=True)
        monkeypatch.setattr(watch, "transcripts_in", after_a_move(watch.transcripts_in))
        page._try(page._write)
    assert (page.html, page.version) == (shown, version)
    assert "The page is not renewed now" in json.loads(page.get("/now", {})[2])["html"]
    assert page.get("/", {})[2] == shown


def test_the_page_of_a_run_offers_its_newest_steps_and_when_it_has_ended_all(run_folder):
    for step in range(2, 8):
        write_episodes(run_folder, step)
    page = LivePage(run_folder)
    assert "8 of 8 episodes, from 4 of 7 steps and evaluations: whole groups" in page.html
    post_ranks(run_folder, is_over=True)
    assert "<p>14 of 14 episodes. The trials" in page.get("/", {})[2], "no other file has changed"
