"""The network of `benchmarks/namespaces.py` as commands: nothing here needs root or makes any."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from document_ways import CHOSEN, Sizes
from documents_over_links import RING, make_rows, of_all_ranks, ratio, raw, table
from links import (
    PREFIX,
    SETTINGS,
    TCP,
    Links,
    NamespaceError,
    address,
    commands,
    environment,
    in_namespace,
    leftovers,
    namespaces,
)
from namespaces import check_machine

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
    found = list(commands(links, "p"))
    ends = set()
    for command in found:
        if "veth" in command:
            peer = command.index("peer")
            ends |= {(command[5], command[3]), (command[peer + 4], command[peer + 2])}
    rated = [c for c in found if c[0] == "tc" and "rate" in c]
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
    with pytest.raises(NamespaceError, match="1 to 1000 ranks"):
        Links(251, 4)
    with pytest.raises(NamespaceError, match="positive"):
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
    found = environment(NODES, 6)
    assert found["RANK"] == "6"
    assert found["WORLD_SIZE"] == "16"
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("2", "4")
    assert found["MASTER_ADDR"] == address(0)


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
    with pytest.raises(NamespaceError, match="sudo"):
        check_machine()
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(NamespaceError, match="iproute2; missing: tc"):
        check_machine()


def test_every_step_has_other_documents_with_all_tokens() -> None:
    sizes = Sizes(tokens=4096, documents=16, heads=8, kv_heads=4, dim=64, seed=0)
    packs = [sizes.starts(number) for number in range(20)]
    assert len(set(packs)) == 20
    for pack in packs:
        assert (pack[0], pack[-1], len(pack)) == (0, 4096, 17)
        assert all(a <= b for a, b in pairwise(pack))


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    def step(way: str, seconds: float, sent: int) -> dict[str, object]:
        nothing = {"plan": 0.001, "plan_cpu": 0.0, "cpu": 0.5}
        wire = {"wire_received": 2 * sent, "wire_sent": sent}
        return {"way": way, "batch": 0, "seconds": seconds, "sent": sent, **nothing, **wire}

    mib = 2**20
    reports = [
        {"steps": [step(CHOSEN, 0.1, mib), step(CHOSEN, 0.4, mib), step(RING, 1.0, 9 * mib)]},
        {"steps": [step(CHOSEN, 0.2, 3 * mib), step(CHOSEN, 0.2, mib), step(RING, 1.2, 9 * mib)]},
    ]
    steps = of_all_ranks(reports)
    assert json.loads(raw(steps)[1])["seconds"] == [0.4, 0.2]
    chosen, ring = make_rows(steps, Links(2, between=8))
    assert (chosen.least_ms, chosen.ms, chosen.most_ms) == pytest.approx((200, 300, 400))
    assert (chosen.sent_mib, chosen.most_sent_mib, chosen.cpu_ms) == (1.5, 3.0, 1000)
    assert ring.link_ms == pytest.approx(18 * mib / 1e3)  # 8 Mbit/s is a megabyte a second
    assert ratio([chosen, ring]) == "ring / chosen: 1200 / 300 ms = 4.00"
    assert len(table([chosen, ring])) == 4
