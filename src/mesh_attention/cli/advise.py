"""The best of all methods: `advise` says which to use, how fast it is and how much memory it needs;
`report` shows the same as one HTML page, to look at and to send.
"""

from __future__ import annotations

import os
from pathlib import Path

from mesh_attention.choose.auto import PlanChoice
from mesh_attention.choose.explain import TIE_TEXT, about, behind, seconds_of
from mesh_attention.choose.plan_file import python_line, write_choice
from mesh_attention.choose.ranking import RankedMethod, Ranking, name_of, ranked
from mesh_attention.choose.scored import gpu_bytes
from mesh_attention.cli import output
from mesh_attention.cli.advise_step import FLAGS as STEP_FLAGS
from mesh_attention.cli.advise_step import check_flags, model_step_text, run_step
from mesh_attention.cli.command import Args, Command
from mesh_attention.cli.options import FLAGS_OF_ALL, asked_of_all, cluster_of, plan_flags
from mesh_attention.cli.values import UsageError
from mesh_attention.cost.planning import collector_paused
from mesh_attention.files import check_writable
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.problem import Problem, problem_text
from mesh_attention.plan.read.count import least_bytes
from mesh_attention.report.estimates import RANKS
from mesh_attention.report.facts import report_facts
from mesh_attention.report.page import plotly_js, write_page
from mesh_attention.step.model_shapes import model_shape

PAGE = Path("report.html")


@collector_paused()
def run_advise(args: Args) -> int:
    check_flags(args)
    if args.step:
        return run_step(args, *cluster_of(args))
    asked = asked_of_all(args, "advise")
    problem, ranks, cluster = asked.problem, asked.ranks, asked.cluster
    if args.output is not None:
        check_writable(args.output)
    with output.progress("searching") as tell:
        ranking = ranked(asked.search(tell))
    choice, chosen = ranking.choice, ranking.chosen
    if args.output is not None:
        write_choice(args.output, choice.question)
    least = {d: least_bytes(problem, ranks, d) for d in asked.directions}
    verdict = _verdict(ranking, asked.batch, args.model)
    python, auto = python_line(choice, args.output), _default_note(chosen, ranking.default)
    return output.show(
        args,
        lambda: {
            "cluster": cluster.name,
            "cluster_found": asked.found_by,
            "ranks": ranks,
            "verdict": verdict,
            "reason": ranking.reason,
            "python": python,
            "default": ranking.default and ranking.default.to_json() | {"text": auto},
            "least_received_bytes": {d.value: size for d, size in least.items()},
            "chosen": chosen.to_json(),
            "batch": asked.batch,
            "gpu_bytes": gpu_bytes(cluster) * asked.batch,
            "place": choice.place,
            "methods": [row.to_json() | {"tie": ranking.is_tie(row)} for row in ranking.rows],
            "refused": ranking.refused,
            "settings_tried": choice.tried,
            "kernels_not_installed": output.missing_kernels(choice.timelines),
        },
        lambda: [
            *verdict,
            "",
            f"{output.ranks_text(ranks)} of {cluster.name} ({cluster.gpu.name}), "
            f"{output.nodes_text(ranks, cluster.node.ranks)}\n{problem_text(problem)}",
            _table(ranking, least),
            *_table_notes(ranking, cluster, problem),
            *(f"{name}: {reason}" for name, reason in ranking.refused.items()),
            "",
            *([auto] if auto else []),
            "",
            python,
            *([] if args.output is None else [f"The plan is in {args.output}."]),
            "",
            *_moved_note(choice),
            f"Cluster: {asked.found_by}.",
            f"Best of {choice.tried} settings. Modelled, not measured; the table is about one "
            "layer and one sequence.",
            *output.missing_kernels_note(choice.timelines),
        ],
    )


def _verdict(ranking: Ranking, batch: int, model: str | None) -> list[str]:
    """What to use and whether it fits, in sentences. The cluster of a ranking has the memory of one
    sequence, so sizes are multiplied by `batch`."""
    chosen, asked = ranking.chosen, ranking.choice.asked
    lines = chosen.too_large(batch)
    if not lines:
        needs, limit = (
            bytes_text(x * batch) for x in (chosen.peak_bytes, gpu_bytes(asked.cluster))
        )
        use = f"Use {chosen.name}." if asked.num_ranks > 1 else _ONE_RANK
        lines = [f"{use} It fits: attention needs {needs} of the {limit} of a GPU."]
    if asked.num_ranks > 1:
        lines.append(ranking.reason)
    lines += output.batch_note(batch, chosen.seconds)
    if model is not None and len(chosen.passes) > 1:
        lines.append(model_step_text(ranking, batch, model_shape(model)))
    return lines


_ONE_RANK = (
    "One rank needs no context parallelism: use scaled_dot_product_attention. All methods are "
    "plain attention there, and move nothing."
)
_TOO_MUCH, _TIE = "!", "="  # marks what needs more memory than a GPU has, and what is as fast


def _table_notes(ranking: Ranking, cluster: Cluster, problem: Problem) -> list[str]:
    """Explains the marks that the table has."""
    rows = ranking.rows
    notes = []
    if any(map(ranking.is_tie, rows[1:])):
        notes.append(f"{_TIE} as fast as the choice: {TIE_TEXT}.")
    if not all(row.is_simulated for row in rows):
        notes.append(
            "about: timed on one rank alone, which is too short where ranks wait for each other."
        )
    if not all(row.fits_gpu for row in rows):
        limit = bytes_text(gpu_bytes(cluster))
        notes.append(f"{_TOO_MUCH} needs more than the {limit} that a sequence has of a GPU.")
    if not problem.mask.is_full:
        notes.append(
            "least possible: a lower bound by the visible area, which plans come close to under a "
            "full mask only (docs/theory.md)."
        )
    return notes


def _default_note(chosen: RankedMethod, default: RankedMethod | None) -> str:
    """How far `method="auto"` is behind the choice; empty where it was not searched."""
    if default is None:
        return ""
    what = 'The default, method="auto",'
    keys = [[scored.key for scored in row.passes.values()] for row in (default, chosen)]
    if keys[0] == keys[1]:
        return f"{what} makes the same plan."
    late = behind(default.seconds, chosen.seconds)
    return f"{what} is {default.name}: {about(default.passes)}, {late}."


def _moved_note(choice: PlanChoice) -> list[str]:
    """Says where the best plan has tokens on other ranks than objects have them by default."""
    if not choice.place:
        return []
    options = ", ".join(f"{name}={value!r}" for name, value in choice.place.items())
    late = behind(seconds_of(choice.unmoved), choice.seconds)
    return [
        f"Tokens lie otherwise than by default: all objects that share them say {options}. The "
        f"best without is {name_of(choice.unmoved)}: {about(choice.unmoved)}, {late}.",
        "",
    ]


def _table(ranking: Ranking, least: dict[Direction, float]) -> str:
    """A row for each method, and under them the fewest bytes that a rank can receive."""
    times = ["both"] if len(least) > 1 else []
    heads = ["method", *map(str, least), *times, "MFU", *(f"received {d}" for d in least)]
    heads += ["other nodes", "memory", *(f"setting {d}" for d in least)]
    lines = [heads]
    for row in ranking.rows:
        tie = row is not ranking.chosen and ranking.is_tie(row)
        cells = [f"{row.name}{f' {_TIE}' if tie else ''}"]
        cells += [_time(scored.seconds, scored.is_simulated) for scored in row.passes.values()]
        if times:
            cells.append(_time(row.seconds, row.is_simulated))
        cells.append(f"{row.mfu_percent:.1f} %")
        cells += [bytes_text(row.received[d][0]) for d in least]
        cells.append(bytes_text(sum(between for _, between in row.received.values())))
        cells.append(f"{'' if row.fits_gpu else _TOO_MUCH}{bytes_text(row.peak_bytes)}")
        cells += [row.setting(d) for d in least]
        lines.append(cells)
    bound = ["least possible", *[""] * (len(least) + len(times) + 1)]
    bound += map(bytes_text, least.values())
    lines.append(bound + [""] * (len(heads) - len(bound)))
    return output.table(lines)


def _time(seconds: float, is_simulated: bool) -> str:
    return f"{'' if is_simulated else 'about '}{seconds * 1e3:.2f} ms"


def run_report(args: Args) -> int:
    asked = asked_of_all(args, "report")
    path: Path | None = args.output or (None if args.json else PAGE)
    library = ""
    if path is not None:  # fail before the search, not after it
        library = plotly_js()
        _refuse_unwritable(path)
    with output.progress("searching") as tell:
        choice = asked.search(tell)
    with output.progress("simulating and drawing") as tell:
        facts = report_facts(
            choice,
            cluster_found=asked.found_by,
            most_ranks=args.scaling_ranks or min(RANKS[-1], max(64, 8 * asked.ranks)),
            command=args.command_line,
            notes=[
                *output.batch_note(asked.batch, choice.seconds),
                *output.missing_kernels_note(choice.timelines),
            ],
            batch=asked.batch,
            progress=tell,
        )
    if path is not None:
        write_page(facts, path, library)
    lines = [facts.reason, *facts.warnings, f"The page is in {path}."]
    return output.show(args, facts.to_json, lambda: lines)


def _refuse_unwritable(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; --output names the page, such as {path / PAGE}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{path} may not be written")


ADVISE = Command(
    run_advise,
    f"""\
which method to use, why, how fast and how much memory: all of them, ranked

examples:
  mesh-attention advise --ranks 32 --model llama-70b --tokens 128k
  mesh-attention advise --ranks 64 --heads 64 --kv-heads 8 --tokens 512k --causal --json
  mesh-attention advise --ranks 32 --model llama-70b --output plan.json
  mesh-attention advise --ranks 8 --model qwen3-8b --tokens 1M --step --largest

{FLAGS_OF_ALL}
--batch N            sequences at a time (default 1); with --step: of a whole step
--output FILE.json   write the plan for ContextParallel(plan=...)
{STEP_FLAGS}
""",
    plan_flags,
)
REPORT = Command(
    run_report,
    f"""\
one page to look at: the choice, who computes what and when, all methods, scaling

examples:
  mesh-attention report --ranks 32 --model llama-70b --tokens 128k
  mesh-attention report --ranks 8 --heads 32 --tokens 64k --causal --output page.html

{FLAGS_OF_ALL}
{output.BATCH_FLAG}
--output FILE        the page (default {PAGE}; with --json none, unless it is given)
--scaling-ranks N    the most ranks of the scaling picture (default: 8 x --ranks, 64 to {RANKS[-1]})
""",
    plan_flags,
)
