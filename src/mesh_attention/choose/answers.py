"""Answers that were searched, kept in files: `auto` uses them from then on.

One file an answer, named by a digest of what was asked: problem, number of ranks, cluster, options.
A file is written whole or not at all, and says its version; one that is damaged, of another version
or about something else is told in a warning and taken for missing. Nothing here is needed: without
a file the first answer is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mesh_attention.choose.auto import BestOfAll, find_best_of_all
from mesh_attention.choose.one_pass import Standing
from mesh_attention.choose.search import Progress
from mesh_attention.cost.machine.cluster import Cluster
from mesh_attention.cost.machine.load import a_cluster
from mesh_attention.cost.planning import ask_on
from mesh_attention.errors import MeshAttentionError
from mesh_attention.files import read_text, replacing
from mesh_attention.plan.methods.table import AUTO, METHODS
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import Question, joined

VERSION = 1
VARIABLE = "MESH_ATTENTION_CACHE"
_MOST_BYTES = 1 << 16

Chosen = dict[str, dict[str, Any]]  # by pass: method and options, and seconds


def answers_folder() -> Path:
    """`MESH_ATTENTION_CACHE`, or where caches usually are."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    usual = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(usual) / "mesh_attention"


def _is_folder() -> bool:
    try:
        return answers_folder().is_dir() and os.access(answers_folder(), os.R_OK | os.X_OK)
    except (OSError, RuntimeError):  # processes without a home have no kept answers
        return False


def what_is_asked(
    problem: Problem, num_ranks: int, cluster: Cluster, options: Mapping[str, Any]
) -> dict[str, Any] | None:
    """In JSON; None where an option has no such form, and no answer is kept."""
    asked = {
        "problem": asdict(problem),
        "ranks": num_ranks,
        "cluster": asdict(cluster),
        "options": {name: value for name, value in options.items() if value is not None},
    }
    try:
        found: dict[str, Any] = json.loads(json.dumps(asked, sort_keys=True))
    except (TypeError, ValueError):
        return None
    return found


def _file(asked: Mapping[str, Any]) -> Path:
    text = json.dumps(asked, sort_keys=True)
    return answers_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def keep_answer(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    found: BestOfAll,
    options: Mapping[str, Any] | None = None,
) -> Path | None:
    """Where it is kept; None, with a warning, where it cannot be. One that was measured stays.
    Without a word about layouts it is the best with tokens where they are by default; a better one,
    if there is any, is for who says where it has them (`found.place`)."""
    if len(found.chosen) != len(Direction):
        return None
    given = dict(options or {})
    if found.place:
        _keep(problem, num_ranks, cluster, found.chosen, found.reason, given | found.place)
    return _keep(problem, num_ranks, cluster, found.unmoved, found.reason, given)


def _keep(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    found: Mapping[Direction, Standing],
    reason: str,
    options: Mapping[str, Any],
) -> Path | None:
    chosen = {
        direction.value: {"method": one.name, "options": one.options, "seconds": one.seconds}
        for direction, one in found.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a damaged one is replaced
        if is_measured(kept_answer(problem, num_ranks, cluster, options)):
            return None
    return keep_chosen(problem, num_ranks, cluster, chosen, reason, options)


def is_measured(chosen: Chosen | None) -> bool:
    """Whether an answer comes of measurements (`mesh-attention tune`), not of the model."""
    return chosen is not None and all(one.get("measured") is True for one in chosen.values())


def keep_chosen(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    chosen: Chosen,
    reason: str,
    options: Mapping[str, Any] | None = None,
) -> Path | None:
    """The same for what was chosen elsewhere."""
    asked = what_is_asked(problem, num_ranks, a_cluster(cluster), options or {})
    if asked is None:
        return None
    answer = {"version": VERSION, "asked": asked, "chosen": chosen, "reason": reason}
    try:
        file = _file(asked)
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as part:
            part.write_text(json.dumps(answer), encoding="utf-8")
    except (OSError, TypeError, RuntimeError) as error:
        warnings.warn(f"the answer could not be kept: {error}", stacklevel=2)
        return None
    return file


def kept_answer(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    options: Mapping[str, Any] | None = None,
) -> Chosen | None:
    """What was chosen when this was searched, if it was."""
    if not _is_folder():  # by far the most frequent
        return None
    asked = what_is_asked(problem, num_ranks, a_cluster(cluster), options or {})
    if asked is None:
        return None
    file = _file(asked)
    try:
        if not file.exists():
            return None
        answer = json.loads(read_text(file, most_bytes=_MOST_BYTES))
        if answer["version"] != VERSION:
            raise ValueError(f"it is of version {answer['version']}, not {VERSION}")
        if answer["asked"] != asked:
            raise ValueError("it answers something else")
        chosen: Chosen = answer["chosen"]
        _check(chosen, asked["options"])
        question_of_answer(problem, num_ranks, a_cluster(cluster), chosen).plan()
    except (MeshAttentionError, *_DAMAGE) as error:
        told = f"no {error}" if isinstance(error, KeyError) else str(error)
        warnings.warn(
            f"{file} is damaged or outdated and is ignored: {told}; remove it", stacklevel=2
        )
        return None
    return chosen


_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _check(chosen: Chosen, options: Mapping[str, Any]) -> None:
    """Files are changed by hand too: an answer says how to run, not what callers have."""
    for direction in Direction:
        one = chosen[direction.value]
        if one["method"] not in METHODS:
            raise ValueError(f"{one['method']} is no method")
        if one["options"].get("relayout") != options.get("relayout"):
            raise ValueError("it says relayout otherwise than what was asked for")


def question_of_answer(
    problem: Problem, num_ranks: int, cluster: Cluster | str | Path, chosen: Chosen
) -> Question:
    """What makes the plan of a kept answer."""
    questions = [
        ask_on(
            *(cluster, problem, num_ranks),
            **{
                "method": chosen[direction.value]["method"],
                "directions": (direction,),
                **chosen[direction.value]["options"],
            },
        )
        for direction in Direction
    ]
    return joined(*questions)


def ask_auto(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    options: Mapping[str, Any] | None = None,
) -> Question:
    """What `auto` plans with: a kept answer, or the first one."""
    cluster = a_cluster(cluster)
    chosen = kept_answer(problem, num_ranks, cluster, options)
    if chosen is not None:
        return question_of_answer(problem, num_ranks, cluster, chosen)
    return ask_on(cluster, problem, num_ranks, method=AUTO, **dict(options or {}))


def search_and_keep(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    options: Mapping[str, Any] | None = None,
    *,
    progress: Progress | None = None,
) -> BestOfAll:
    """`find_best_of_all`, which `auto` then uses."""
    found = find_best_of_all(problem, num_ranks, cluster, options=options, progress=progress)
    keep_answer(problem, num_ranks, cluster, found, options)
    return found
