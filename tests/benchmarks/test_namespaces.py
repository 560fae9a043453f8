"""The network of `benchmarks/namespaces.py` as commands: nothing here needs root or makes any."""

from __future__ import annotations

import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from namespaces import (
    PREFIX,
    SETTINGS,
    TCP,
    Links,
    Namespaces,
    address,
    check_machine,
    commands,
    in_namespace,
    leftovers,
    namespaces,
)
from rank_processes import LaunchError

FLAT, NODES = Links(8, between=50), Links(4, 4, between=100, inside=400)


@pytest.mark.parametrize("links", [FLAT, NODES, Links(1, 2)], ids=lambda links: links.words)
def test_all_that_is_made_is_in_a_namespace_that_is_removed(links: Links) -> None:
    """Nothing is made in the network of the machine itself."""
    removed = namespaces(links, "p")
    assert len(set(removed)) == len(removed)
    made = [c[3] for c in commands(links, "p") if c[:3] == ("ip", "netns", "add")]
    assert made == removed
    for command in commands(links, "p"):
        if command[1] == "-n":
            assert command[2] in removed
        elif command[:3] == ("ip", "link", "add"):
            ends = [after for word, after in pairwise(command) if word == "netns"]
            assert len(ends) == 2
            assert set(ends) <= set(removed)
        else:
            assert command[:3] == ("ip", "netns", "add")


@pytest.mark.parametrize("links", [FLAT, NODES], ids=lambda links: links.words)
def test_both_ends_of_every_link_are_shaped(links: Links) -> None:
    made = list(commands(links, "p"))
    ends = set()
    for command in made:
        if "veth" in command:
            peer = command.index("peer")
            ends |= {(command[5], command[3]), (command[peer + 4], command[peer + 2])}
    rated = [c for c in made if c[0] == "tc" and "rate" in c]
    whole = [c for c in rated if "root" in c or ("parent", "1:") in pairwise(c)]
    shaped = {(c[2], c[6]): c[c.index("rate") + 1] for c in whole}
    # A share of a link may use all of it while the others are silent, and no more.
    for c in rated:
        assert c in whole or c[c.index("ceil") + 1] == shaped[c[2], c[6]]
    assert set(shaped) == ends
    of_ranks = {rate for (name, _), rate in shaped.items() if "-rank" in name}
    of_core = {rate for (name, _), rate in shaped.items() if name == "p-core"}
    assert of_ranks == ({"50000000bit"} if links is FLAT else {"400000000bit"})
    assert of_core == ({"50000000bit"} if links is FLAT else {"100000000bit"})
    assert len(ends) == 2 * (links.num_ranks + (links.num_nodes if links is NODES else 0))


def test_names_fit_the_kernel_and_addresses_differ() -> None:
    links = Links(250, 4)
    for command in commands(links, f"{PREFIX}-4194304"):
        names = [after for word, after in pairwise(command) if word in ("dev", "name", "set")]
        assert all(len(name) <= 15 for name in names)
    assert len({address(rank) for rank in range(1000)}) == 1000
    with pytest.raises(LaunchError, match="1 to 1000 ranks"):
        Links(251, 4)
    with pytest.raises(LaunchError, match="positive"):
        Links(2, between=0)


def test_leftovers_are_ours_and_of_nobody_alive() -> None:
    listing = (
        f"{PREFIX}-12-core (id: 3)\n{PREFIX}-12-rank0\n{PREFIX}-13-core\nother-12-core\n"
        f"my-{PREFIX}-12-core\n{PREFIX}-x-core\n"
    )
    assert leftovers(listing, lambda maker: maker == 13) == [
        f"{PREFIX}-12-core",
        f"{PREFIX}-12-rank0",
    ]


def test_ranks_find_each_other_as_under_torchrun() -> None:
    _, environment = Namespaces(NODES)._started(6, ["true"])
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("6", "16")
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("2", "4")
    assert environment["MASTER_ADDR"] == address(0)


def test_a_rank_runs_with_all_settings_of_tcp_or_not_at_all(tmp_path: Path) -> None:
    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        *_, shell, flag, script, name, word = in_namespace("rank", ["true"])
        script = script.replace(SETTINGS, str(folder))
        return subprocess.run(
            [shell, flag, script, name, "echo", word], capture_output=True, text=True
        )

    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (0, "true\n")
    assert {file.name: file.read_text().strip() for file in tmp_path.iterdir()} == TCP
    refused = run(tmp_path / "missing")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "refuses tcp_congestion_control=reno" in refused.stderr


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LaunchError, match="sudo"):
        check_machine()
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(LaunchError, match="iproute2; missing: tc"):
        check_machine()
