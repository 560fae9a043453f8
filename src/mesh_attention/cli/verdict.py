"""The first lines of `advise`: what to use, whether it fits, how fast; and the whole model."""

from __future__ import annotations

from mesh_attention.choose.explain import time_text
from mesh_attention.choose.ranking import Ranking
from mesh_attention.choose.scored import gpu_bytes
from mesh_attention.cli.advise_step import gb_text, lacking_text
from mesh_attention.cli.output import batch_note
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.step.model_shapes import ModelShape, model_shape
from mesh_attention.step.splits import plan_step


def verdict_of(ranking: Ranking, batch: int, model: str | None) -> list[str]:
    """In sentences. The cluster of the ranking has the memory that one sequence of a batch has."""
    chosen, asked = ranking.chosen, ranking.choice.asked
    lines = chosen.too_large(batch)
    if not lines:
        needs, limit = (
            bytes_text(x * batch) for x in (chosen.peak_bytes, gpu_bytes(asked.cluster))
        )
        lines = [f"Use {chosen.name}. It fits: attention needs {needs} of the {limit} of a GPU."]
    lines.append(ranking.reason)
    lines += batch_note(batch, chosen.seconds)
    if model is not None and len(chosen.passes) > 1:
        lines.append(_of_model(ranking, batch, model_shape(model)))
    return lines


def _of_model(ranking: Ranking, batch: int, model: ModelShape) -> str:
    """What a training step of the whole model does if all ranks share each sequence."""
    asked = ranking.choice.asked
    problem, ranks, cluster = asked.problem, asked.num_ranks, asked.cluster
    if not model.layers or cluster.step is None:
        why = f"{cluster.name} has no rates for it" if model.layers else "it has experts"
        return f"Tokens per second of all of {model.name} are not modelled: {why}."
    if problem != Problem(problem.q_tokens, mask=problem.mask, **model.heads):
        return f"Tokens per second of {model.name} are not modelled: these are not its sizes."
    step = plan_step(
        model,
        problem.q_tokens,
        ranks,
        cluster=cluster,
        memory_bytes=gpu_bytes(cluster) * batch,
        mask=problem.mask,
        batch=batch,
        context=ranks,
    ).best
    if not step.fits:
        return (
            f"To train all of {model.name}, {ranks} ranks are too few: {lacking_text(step)}. "
            "--step compares every split; --step --largest finds the longest context that fits."
        )
    speed = step.tokens_per_second_per_gpu
    return (
        f"All of {model.name} trains at {speed * ranks:,.0f} tokens a second ({speed:,.0f} a GPU), "
        f"{time_text(step.seconds)} a step, and fits: {gb_text(step.memory.peak[1])} of a GPU "
        f"({step.policy.text})."
    )
