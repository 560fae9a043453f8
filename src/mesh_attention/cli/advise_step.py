"""`mesh-attention advise --step`: a whole training step, its splits and what to switch on."""

from __future__ import annotations

from dataclasses import asdict

from mesh_attention.choose.explain import time_text
from mesh_attention.choose.plan_file import default_line
from mesh_attention.choose.ranking import Ranking, name_of
from mesh_attention.choose.scored import gpu_bytes
from mesh_attention.cli.command import Args, flags, flags_beside
from mesh_attention.cli.options import problem_of, ranks_of
from mesh_attention.cli.output import nodes_text, progress, ranks_text, show, table
from mesh_attention.cli.values import UsageError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.step.costs import Keeps
from mesh_attention.step.model_shapes import ModelShape
from mesh_attention.step.splits import PlannedStep, StepPlan, largest_context, plan_step

FLAGS = """\
--step               plan a whole training step of --model: memory, time, what to enable
--host-memory SIZE   of a node, for --step (default: the cluster's)
--largest            also find the largest context that fits, and what limits it"""
_OF_STEP = [flag.names[0] for flag in flags(FLAGS)]
_OF_QUESTION = ("--tokens", "--ranks", "--causal", "--no-causal", "--window", "--prefix")
_TAKEN = ("--model", "--cluster", "--memory", "--batch", *_OF_QUESTION, *_OF_STEP)


def check_flags(args: Args) -> None:
    """Refuses flags of a step without --step, and with --step flags that it does not take."""
    if not args.step:
        for flag in (flag for flag in args.written if flag in _OF_STEP):
            raise UsageError(f"{flag} is for a whole step: add --step")
        return
    if args.model is None:
        raise UsageError("--step needs --model NAME, or --model path/config.json")
    for flag in flags_beside(args, *_TAKEN):
        raise UsageError(f"--step plans the default attention of ContextParallel; leave {flag} out")


def run_step(args: Args, cluster: Cluster, found_by: str) -> int:
    """Plans the step, prints it, and returns the exit code."""
    args.causal = True if args.causal is None else args.causal
    problem = problem_of(args)
    with progress("planning") as tell:
        plan = plan_step(
            args.model,
            problem.q_tokens,
            ranks_of(args),
            cluster=cluster,
            batch=args.batch,
            host_bytes=args.host_memory,
            mask=problem.mask,
            progress=tell,
        )
        # If nothing fits, the largest context that does is the next question.
        wants_largest = args.largest or not plan.best.fits
        largest = largest_context(plan.asked, tell) if wants_largest else None
    asked, best, model = plan.asked, plan.best, plan.asked.model
    return show(
        args,
        lambda: {
            "model": asdict(model) | {"parameters": model.parameters},
            "cluster": cluster.name,
            "cluster_found": found_by,
            "ranks": asked.num_ranks,
            "gpu_bytes": asked.memory_bytes,
            "host_bytes": asked.host_bytes,
            "steps": [step.to_json() for step in plan.steps],
            "refused": plan.refused,
            "python": _python(best),
            "assumptions": _assumptions(cluster),
            "largest": largest and [step and step.to_json() for step in largest],
        },
        lambda: [
            f"{ranks_text(asked.num_ranks)} of {cluster.name} ({cluster.gpu.name}), "
            f"{nodes_text(asked.num_ranks, cluster.node.ranks)}\n{model.name}, "
            f"{model.parameters / 1e9:.2f} billion parameters, sequences of {asked.tokens} "
            f"tokens, {asked.mask.describe()}",
            _table(plan),
            f"A GPU has {_gb_text(asked.memory_bytes)}, a host {_gb_text(asked.host_bytes)}; "
            "! is more.",
            *(f"{split}: {reason}" for split, reason in plan.refused.items()),
            "",
            *_verdict(best),
            *([] if largest is None else [_largest_text(*largest, asked.num_ranks)]),
            "",
            *_python(best),
            "",
            *_assumptions(cluster),
            f"Cluster: {found_by}. Modelled, not measured.",
        ],
    )


def _gb_text(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _table(plan: StepPlan) -> str:
    heads = "data x context", "sequences", "seconds", "tokens/s/GPU", "MFU", "GPU", "host of a node"
    rows = [[*heads, "kept between passes", "attention"]]
    for step in plan.splits:
        gpu, host = ("!" if lacking else "" for lacking in step.lacking_bytes)
        rows.append([f"{step.data} x {step.context}", str(step.sequences), f"{step.seconds:.2f}"])
        rows[-1] += [f"{step.tokens_per_second_per_gpu:.0f}", f"{step.mfu_percent:.1f} %"]
        rows[-1] += [gpu + _gb_text(step.memory.peak[1]), host + _gb_text(step.node_host_bytes)]
        attention = name_of(step.attention.choice.chosen) if step.context > 1 else "on one rank"
        rows[-1] += [step.policy.text, attention]
    return table(rows)


def _verdict(step: PlannedStep) -> list[str]:
    times, parts = step.time._asdict(), step.memory._asdict()
    moment, peak = step.memory.peak
    names = [n for n in parts if n == moment or not n.startswith(("at_", "host"))]
    words = [
        f"Best: {step.data} x {step.context}. Seconds: "
        + ", ".join(f"{name.replace('_', ' ')} {x:.4g}" for name, x in times.items() if x)
        + ". Of parameters and offload only what is exposed counts.",
        f"A GPU holds {_gb_text(peak)}: "
        + ", ".join(f"{n.replace('_', ' ')} {_gb_text(parts[n])}" for n in names if parts[n])
        + f". Attention's workspace is {_gb_text(step.attention.workspace_bytes)}; on the host "
        f"{_gb_text(step.memory.host)}.",
    ]
    if not step.fits:
        words.append(
            f"It does not fit: {_lacking_text(step)}, and no policy lacks less; take more ranks, "
            "fewer tokens or more memory."
        )
    return words


def _largest_text(fitting: PlannedStep | None, beyond: PlannedStep | None, num_ranks: int) -> str:
    if fitting is None:
        return f"No context fits on {ranks_text(num_ranks)}: the model itself is too large."
    ends = "" if beyond is None else f" With {beyond.tokens} {_lacking_text(beyond)}."
    return (
        f"Largest context on {ranks_text(num_ranks)}: {fitting.tokens} tokens, "
        f"{fitting.seconds:.0f} s a step ({fitting.policy.text}).{ends}"
    )


def _lacking_text(step: PlannedStep) -> str:
    places = zip(step.lacking_bytes, ("GPU", "host"), strict=True)
    lacking = [
        f"each {place} lacks {_gb_text(num_bytes)}" for num_bytes, place in places if num_bytes
    ]
    return " and ".join(lacking)


def model_step_text(ranking: Ranking, batch: int, model: ModelShape) -> str:
    """The speed of training the whole model if all ranks share each sequence, in words."""
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
            f"To train all of {model.name}, {ranks_text(ranks)} {'is' if ranks == 1 else 'are'} "
            f"too few: {_lacking_text(step)}. "
            "--step compares every split; --step --largest finds the longest context that fits."
        )
    speed = step.tokens_per_second_per_gpu
    return (
        f"All of {model.name} trains at {speed * ranks:,.0f} tokens a second ({speed:,.0f} a GPU), "
        f"{time_text(step.seconds)} a step, and fits: {_gb_text(step.memory.peak[1])} of a GPU "
        f"({step.policy.text})."
    )


def _python(step: PlannedStep) -> list[str]:
    """The settings to type."""
    keeps, tile_tokens = step.policy
    lines = [
        f'mesh = init_device_mesh("cuda", ({step.data}, {step.context}), '
        'mesh_dim_names=("dp", "cp"))',
        default_line(step.attention.choice, 'mesh["cp"]'),
    ]
    if tile_tokens:
        lines.append(f"block.mlp.forward = cp.tiled(block.mlp.forward, tokens={tile_tokens})")
    if step.policy.keeps_attention:
        lines.append(f"keep = cp.keep_attention(offload={keeps is Keeps.HOST})")
    if keeps is not Keeps.EVERYTHING:
        kept = ", context_fn=keep" if step.policy.keeps_attention else ""
        lines.append(f"x = checkpoint(block, x, use_reentrant=False{kept})")
    means = 'reduce="fsdp", data_parallel=mesh["dp"]'
    return [*lines, f"cp.linear_cross_entropy(hidden, head.weight, batch.labels, {means})"]


def _assumptions(cluster: Cluster) -> list[str]:
    rates = cluster.step
    assert rates is not None  # a step was planned
    return [
        "Assumed: FSDP2 over all ranks; fp32 weights, gradients and fused AdamW, 16 bytes a "
        "parameter; bf16 compute. A block's weights are gathered twice and its gradients reduced "
        "once, in fp32; two blocks, embedding and head are held gathered. Blocks are RMSNorm, "
        "attention, RMSNorm and SwiGLU in eager PyTorch, norms fused; one that is checkpointed is "
        "computed once more, a tiled MLP another time.",
        f"Matrix products run at {rates.matmul_tflops:g} TFLOP/s, elementwise work at "
        f"{cluster.gpu.memory_gb_per_second:g} GB/s, copies to the host at "
        f"{rates.host_gb_per_second:g} GB/s each way; what is hidden costs nothing. Attention is "
        "simulated as ContextParallel chooses it by default; MFU counts it 3.5 times forward. "
        "`reserved` is for CUDA, NCCL and the allocator.",
    ]
