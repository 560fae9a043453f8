"""A small problem on two nodes of two ranks, for tests of the page. The name of its cluster is what
someone could write into a file to run code of his own in the browsers of others."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from mesh_attention.choose.auto import find_best
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.report.facts import ReportFacts, report_facts

HOSTILE = '</script><script>alert(1)</script><img src=http://x.example/i onerror=alert(2)>&"'
PROBLEM = Problem(4096, 4, 128, mask=Mask(causal=True))
RANKS = 4


def write_cluster(path: Path) -> Path:
    known = (files("mesh_attention.machine") / "clusters" / "hgx-h100.toml").read_text()
    text = known.replace('name = "hgx-h100"', f"name = '''{HOSTILE}'''")
    text = text.replace('name = "H100 SXM"', f"name = '''{HOSTILE}'''")
    text = text.replace("ranks = 8 ", "ranks = 2 ").replace("nics = 8 ", "nics = 2 ")
    path.write_text(text)
    return path


def facts_of_a_small_problem(cluster: Path) -> ReportFacts:
    found_cluster = load_cluster(cluster)
    result = find_best(PROBLEM, RANKS, found_cluster)
    return report_facts(result, cluster_found="as given", most_ranks=8)
