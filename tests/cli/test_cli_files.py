"""Files on the command line: whatever one is, it is read whole or refused in one line; what is
written takes the place of the old file when it is complete, or never."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from mesh_attention.cli import demo, plan, simulate
from mesh_attention.cli.main import main
from mesh_attention.errors import MeshAttentionError, PlanTextError
from mesh_attention.files import FileError, read_text, replacing
from mesh_attention.machine.load import ClusterError, load_cluster
from mesh_attention.plan.language.text import HEADER, parse_plan

SMALL = ("--ranks", "2", "--tokens", "8", "--chunks", "1x1")
SECONDS = 5.0


def folder(path: Path) -> None:
    path.mkdir()


def gigantic(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # holes only: it takes no space


def unreadable(path: Path) -> None:
    path.write_text("anything")
    path.chmod(0)


def not_utf_8(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


HOSTILE: dict[str, Callable[[Path], None]] = {
    "folder": folder,
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "gigantic": gigantic,
    "not UTF-8": not_utf_8,
    "loop": lambda path: path.symlink_to(path),
    "empty": lambda path: path.touch(),
}
if os.geteuid() != 0:  # root reads everything
    HOSTILE["unreadable"] = unreadable
READERS = (("verify", "--text"), ("simulate", *SMALL, "--cluster"))


@pytest.mark.parametrize("command", READERS, ids=lambda words: words[0])
@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_a_file_is_it_is_refused_at_once_and_not_as_a_wrong_plan(
    kind: str, command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "given"
    HOSTILE[kind](path)
    begin = time.monotonic()
    assert main([*command, str(path)]) == 2
    assert time.monotonic() - begin < SECONDS
    assert_one_line(capsys)


def assert_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("mesh-attention ")
    assert len(err) < 1000


def plan_lines(head: str, setting: str = "{}") -> str:
    return f"{HEADER}\n{head}\npass forward {setting}\n"


def good_head(**other: Any) -> str:
    layout = {"kind": "contiguous", "num_tokens": 8, "num_ranks": 1, "block": 1}
    head = {
        "method": "m",
        "problem": {"q_tokens": 8, "num_heads": 1, "head_dim": 1, "mask": {}},
        "q_layout": layout,
        "kv_layout": layout,
        "ranks_per_node": None,
        "devices": [0],
    }
    return json.dumps(head | other)


DEEP = "[" * 100_000
LONG = "9" * 100_000
PLANS = {
    "deep head": plan_lines(DEEP),
    "deep object": plan_lines('{"a":' * 100_000),
    "deep setting": plan_lines(good_head(), DEEP),
    "deep mask": plan_lines(good_head(problem={"mask": [[]]})),
    "long number": plan_lines(LONG),
    "number as problem": plan_lines(good_head(problem=7)),
    "huge tokens": plan_lines(good_head(problem={"q_tokens": 10**30})),
    "text as devices": plan_lines(good_head(devices="01")),
    "numbers of another kind": plan_lines(good_head(devices=[0.0])),
    "a layout of halves": plan_lines(good_head(q_layout={"kind": "zigzag", "num_tokens": 8.5})),
    "a node of text": plan_lines(good_head(ranks_per_node="8")),
    "a method of numbers": plan_lines(good_head(method=3)),
    "a setting of lists": plan_lines(good_head(), "[]"),
    "a setting of numbers": plan_lines(good_head(), '{"tile": 3}'),
    "a long first line": "x" * 1_000_000,
    "a long operation": plan_lines(good_head()) + "rank 0\n  " + "x" * 1_000_000 + "\n",
    "a long piece": plan_lines(good_head())
    + f"rank 0\n  a: merge rule=sum inputs={LONG} outputs=-",
    "a long row": plan_lines(good_head())
    + f"rank 0\n  a: merge rule=sum inputs=x[0:{LONG}] outputs=-",
    "a long rank": plan_lines(good_head()) + f"rank {LONG}\n",
    "a long buffer": plan_lines(good_head()) + f"rank 0\n  buffer {LONG}\n",
    "null bytes": "\0" * 100_000,
}


@pytest.mark.parametrize("kind", PLANS)
def test_a_hostile_plan_is_refused_in_one_line_from_python_and_from_the_command(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PlanTextError) as refused:
        parse_plan(PLANS[kind])
    assert len(str(refused.value)) < 800
    path = tmp_path / "plan.txt"
    path.write_text(PLANS[kind])
    assert main(["verify", "--text", str(path)]) == 2
    assert_one_line(capsys)


CLUSTERS = {
    "long dotted key": ".".join(["a"] * 60_000) + " = 1",
    "deep table": "name" + ".a" * 400 + " = 1",
    "deep array": "name = " + "[" * 900,
    "many deep arrays": "name = [\n" + "[\n" * 30_000,
    "huge integer": "name = " + "9" * 900,
    "huge hexadecimal integer": "name = 0x" + "f" * 50_000,
    "infinite": "nodes = inf",
    "gigantic": "# nothing\n" * 100_000,
    "long line": "# " + "x" * 5000,
}


@pytest.mark.parametrize("kind", CLUSTERS)
def test_a_hostile_cluster_is_refused_in_one_line_and_at_once(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTERS[kind])
    begin = time.monotonic()
    with pytest.raises(ClusterError):
        load_cluster(path)
    assert time.monotonic() - begin < SECONDS
    assert main(["simulate", *SMALL, "--cluster", str(path)]) == 2
    assert_one_line(capsys)


def test_a_standard_input_without_an_end_is_not_read_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/zero", encoding="utf-8") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        assert main(["verify", "--text", "-"]) == 2
    assert_one_line(capsys)


def test_a_plan_on_standard_input_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *SMALL, "--text", "-"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(capsys.readouterr().out))
    assert main(["verify", "--text", "-"]) == 0


def test_the_name_of_a_file_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(FileError, match="not the name of a file"):
        read_text("a\0b", most_bytes=10)
    with pytest.raises(MeshAttentionError):
        load_cluster("a\0b")


def test_a_mistake_of_the_library_is_told_as_that_and_not_as_a_wrong_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object) -> None:
        raise KeyError("something inside")

    monkeypatch.setattr(plan, "draw_summary", broken)
    assert main(["plan", *SMALL]) == 3
    assert "please report it" in capsys.readouterr().err
    monkeypatch.setattr(plan, "draw_summary", lambda _: [][0 : 1 << 70] or b"x" * (1 << 60))
    assert main(["plan", *SMALL]) == 2
    assert "not enough memory" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_plan_that_is_not_written_to_its_end_leaves_the_old_file(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(_: object) -> Iterator[str]:
        yield "half a plan"
        raise error

    path = tmp_path / "plan.txt"
    path.write_text("the old one")
    monkeypatch.setattr(plan, "plan_lines", lines)
    assert main(["plan", *SMALL, "--text", str(path)]) in (2, 130)
    assert path.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_that_is_not_written_to_its_end_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("the old one")
    monkeypatch.setattr(simulate, "trace_of", lambda *_: {"half": [1], "of": object()})
    assert main(["simulate", *SMALL, "--trace", str(path)]) == 3
    assert path.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_chart_that_is_not_written_to_its_end_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(self: object, path: Path, **_: object) -> None:
        path.write_text("half a picture")
        raise KeyboardInterrupt

    path = tmp_path / "chart.svg"
    assert main(["simulate", *SMALL, "--gantt", str(path)]) == 0
    drawn = path.read_bytes()
    assert b"<svg" in drawn
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    assert main(["simulate", *SMALL, "--gantt", str(path)]) == 130
    assert path.read_bytes() == drawn
    assert list(tmp_path.iterdir()) == [path]


def test_pictures_of_the_demonstration_are_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half(self: object, path: Path, **_: object) -> None:
        path.write_text("half a picture")
        raise OSError(28, "No space left on device", str(path))

    path = tmp_path / "assignment.png"
    path.write_text("the old one")
    monkeypatch.setattr(demo, "local_ranks", lambda *_: nullcontext())  # seconds, and none draws
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    assert main(["demo", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"mesh-attention demo: {path}: No space left on device\n"
    assert path.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_usual_rights_and_a_link_stays_one(tmp_path: Path) -> None:
    usual, link, new = tmp_path / "usual", tmp_path / "link", tmp_path / "new"
    usual.write_text("old")
    link.symlink_to(usual)
    for path in (link, new):
        with replacing(path) as part:
            part.write_text("new")
    assert (link.is_symlink(), usual.read_text()) == (True, "new")
    assert new.stat().st_mode == usual.stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"usual", "link", "new"}


def test_devices_and_pipes_are_written_to_and_folders_are_not(tmp_path: Path) -> None:
    with replacing("/dev/null") as part:
        part.write_text("gone")
    assert not Path("/dev/null").is_file()
    with pytest.raises(OSError, match="directory") as refused, replacing(tmp_path) as part:
        part.write_text("nothing")
    assert refused.value.filename == str(tmp_path)
    missing = tmp_path / "no" / "such"
    with pytest.raises(FileNotFoundError) as lost, replacing(missing) as part:
        part.write_text("nothing")
    assert lost.value.filename == str(missing)


def test_a_pipe_is_written_to_where_somebody_reads_it_and_refused_otherwise(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileError, match="nobody reads it"), replacing(pipe) as part:
        part.write_text("nothing")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with replacing(pipe) as part:
        part.write_text("all")
    assert os.read(reader, 10) == b"all"
    os.close(reader)


RANK_OF_A_PARENT = """
import multiprocessing as mp, os, time
from concurrent.futures import ProcessPoolExecutor
from mesh_attention.cli.selftest import _end_with_parent
if __name__ == "__main__":
    ranks = ProcessPoolExecutor(1, mp.get_context("forkserver"), _end_with_parent)
    print(ranks.submit(os.getpid).result(), flush=True)
    time.sleep(60)
"""


def test_a_rank_of_the_demonstration_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(RANK_OF_A_PARENT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    rank = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    begun = time.monotonic()
    while is_alive(rank) and time.monotonic() - begun < 4 * SECONDS:
        time.sleep(0.01)
    assert not is_alive(rank)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def standard_output(descriptor: int) -> Iterator[None]:
    """The descriptor is that of standard output, as a shell hands it over."""
    kept, stdout = os.dup(1), sys.stdout
    os.dup2(descriptor, 1)
    try:
        with open(1, "w", encoding="utf-8", closefd=False) as sys.stdout:
            yield
    finally:
        sys.stdout = stdout
        os.dup2(kept, 1)
        os.close(kept)


def test_a_plan_is_written_to_standard_output_whatever_that_is(tmp_path: Path) -> None:
    words = ["plan", *SMALL, "--text", "/dev/stdout"]
    reading, writing = os.pipe()
    with standard_output(writing):
        assert main(words) == 0
    os.close(writing)
    with open(reading, "rb") as piped:
        assert piped.read().startswith(HEADER.encode())
    path = tmp_path / "out.txt"
    with path.open("wb") as file, standard_output(file.fileno()):
        assert main(words) == 0
    assert b"forward steps" in path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]
