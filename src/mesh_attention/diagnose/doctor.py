"""`doctor`: is training on ranks that of one process, and if not, why?

    report = doctor(step, whole_batch, model, cp)
    print(report)

`step(model, whole_batch)` is training code up to its loss: it cuts the batch, runs the model and
returns the loss. It runs on ranks and once more on one process, and what both compute is compared:
losses, gradients as the framework has reduced them, and a few numbers of every module's output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from mesh_attention.api.context_parallel import ContextParallel
from mesh_attention.diagnose import causes, compare
from mesh_attention.diagnose.compare import ComparedGradients, gathered, largest_error
from mesh_attention.diagnose.record import LOW_PRECISION, Recorder
from mesh_attention.diagnose.report import Cause, Diagnosis, Limits
from mesh_attention.diagnose.runs import Step, StepRun, inner, nothing_changed, on_one_rank, run
from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.agreement.verdict import error_text

_CLOSE = 1 / 30  # of the tolerance: up to here losses and gradients show no mistake at all
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_TIMES_ROUNDING = 4  # as much as rounding changes on one process counts as rounding on ranks


def doctor(
    step: Step,
    whole_batch: Any,
    model: nn.Module,
    cp: ContextParallel | Sequence[ContextParallel],
    *,
    plain: Step | None = None,
    reduce_gradients: Callable[[Any], None] | None = None,
    tolerance: float | None = None,
) -> Diagnosis:
    """What is wrong with training on ranks, if anything, in words; all processes call it and get
    the same answer. Experimental. Parameters, gradients, buffers and random numbers stay the same.

    step              step(model, whole_batch) is training code up to the loss, which it returns as
                      a tensor or as `cross_entropy` of the object does; doctor calls backward
    whole_batch       tensors by name, as a data loader gives them to the ranks of the group
    model             as `step` wants it: plain, or wrapped by DDP or FSDP2
    cp                the object whose attention the model calls, or a list of all of them
    plain             plain(model, whole_batch): the loss as code without ranks has it. Without it
                      `step` itself runs with the objects on one rank, which does not show mistakes
                      that are wrong on one rank too, such as labels that are shifted twice; a
                      `ModelContextParallel` has one of its own
    reduce_gradients  reduce_gradients(model), called after backward on ranks, where no framework
                      reduces them
    tolerance         up to which numbers count as equal, as a part of the largest. Without it, by
                      the lowest precision that is computed in; for bfloat16 and float16 it is four
                      times what differs on one process whose modules round up and down by chance

    Every process computes the whole batch once (twice in low precision), in the memory that this
    takes, and holds three sets of gradients meanwhile (four): a few thousand tokens say as much as
    many. With data-parallel ranks the batch is that of the first.
    """
    objects = [cp] if isinstance(cp, ContextParallel) else [*cp]
    of_model = getattr(objects[0], "plain_step", None)  # of a ModelContextParallel
    plain = plain if of_model is None else plain or of_model()
    differing = _first(gathered(None, _differing_batches(objects[0], whole_batch)))
    if differing is not None:
        return Diagnosis(Cause("batches", differing))
    box: list[Any] = [tree_map_only(Tensor, lambda x: x.detach().cpu(), {**whole_batch})]
    dist.broadcast_object_list(box)
    for name, x in box[0].items():
        if isinstance(x, Tensor) and isinstance(whole_batch.get(name), Tensor):
            box[0][name] = x.to(whole_batch[name].device)
    return diagnose(step, box[0], model, objects, None, plain, reduce_gradients, tolerance)


def diagnose(
    step: Step,
    batch: Mapping[str, Any],
    model: nn.Module,
    objects: Sequence[ContextParallel],
    everyone: dist.ProcessGroup | None,
    plain: Step | None,
    reduce_gradients: Callable[[Any], None] | None = None,
    tolerance: float | None = None,
) -> Diagnosis:
    """`doctor` among the processes of `everyone`, who all have this batch.

    The step runs on one process (`whole`; in low precision once more as `rough`, with numbers that
    are rounded by chance), then on ranks (`ours`). If losses or gradients differ, it runs on ranks
    with another seed (`again`), and `causes.py` looks for a cause in the numbers of these runs.
    """
    first, own, sizes = objects[0], inner(model), _sizes(batch)
    group = first._calls.session.groups.parent
    notes = [] if plain else ["one process ran the step itself on one rank; plain= shows more"]
    how: dict[str, Any] = {"cp": first, "reduce_gradients": reduce_gradients}
    parameters = _first(gathered(everyone, _differing_parameters(model, group)))
    trained = gathered(everyone, [n for n, p in own.named_parameters() if p.requires_grad])
    if parameters is not None and any(x != trained[0] for x in trained):
        return Diagnosis(parameters)  # gradients cannot be compared
    with nothing_changed(model) as dropouts:
        record, rough = Recorder(sizes), None
        with on_one_rank(objects):
            whole, failed = _tried(everyone, plain or step, model, batch, record)
            dtypes = set().union(*gathered(everyone, record.dtypes))
            if whole is not None and tolerance is None and dtypes & {*LOW_PRECISION}:
                perturbing = Recorder(sizes, perturbs=True)
                rough, failed = _tried(everyone, plain or step, model, batch, perturbing)
        if whole is None:
            return Diagnosis(Cause("error", f"on one process: {failed}"))
        ours, failed = _tried(everyone, step, model, batch, Recorder(None, record), **how)
        if ours is None:
            failure = Cause("error", failed or "")
            return _same_everywhere(everyone, Diagnosis(failure, whole_loss=whole.value))
        left_out = dict.fromkeys([*dropouts, *ours.record.dropouts])
        if left_out:
            notes.append(f"dropout was left out, of {', '.join(left_out)}")
        dtypes |= {p.dtype for p in own.parameters() if p.is_floating_point()}
        least = tolerance or max(_TOLERANCES.get(x, 1e-2) for x in dtypes)
        limits = Limits(least, _rounding(everyone, whole, rough))
        real, mask = torch.ones(sizes, dtype=torch.bool), batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == real.shape:
            real = mask.bool().cpu()
        of_ranks = gathered(group, ours.record.seen)
        seen = compare.Activations(record.seen, of_ranks, ours.shards, real, limits)
        grads = ComparedGradients.of(everyone, ours.grads, whole.grads, limits)
        loss = compare.loss_of(group, ours, whole.value)
        errors = {"loss": compare.loss_error(loss, whole.value), **grads.errors}
        if not any(x is not None and bool(x.any()) for x in whole.grads.values()):
            notes.append("all gradients of one process are 0: this batch says little")
        cause = None
        # A mistake may change losses by little. What changes nothing at all is none.
        if any(gathered(everyone, bool(limits.exceeded(errors, _CLOSE)))):
            where = ours.record.heads_first or record.heads_first
            apart = {} if own is not model else compare.added_up(own, group, ours, whole, limits)
            factors = None
            if apart and ours.apart:  # the caller reduces gradients
                factors = compare.factors_of_ranks(group, ours, limits.exceeded(grads.errors))
            of_targets = gathered(group, causes.sums_of_labels(ours.record.outputs, ours.targets))
            of_labels = causes.sums_of_labels(record.outputs, batch.get("labels"))
            again, _ = _tried(everyone, step, model, batch, Recorder(None, record), **how, seed=1)
            cause = (
                (None if again is None else _of_seeds(everyone, ours, again, limits))
                or causes.of_heads(where)
                or parameters
                or causes.of_activations(seen, own, ours.record.of_pytorch)
                or causes.of_gradients(grads, apart, limits, len(of_ranks), factors)
            )
            # Losses are means, and more exact than what they are made of.
            close = limits["loss"] * (1 if limits.rounding else _CLOSE)
            limit = limits["loss"] if cause is None else close
            if errors["loss"] > limit and (cause is None or cause.kind == "gradients"):
                cause = causes.of_loss(loss, of_targets, of_labels, close)
        else:
            if seen.first is not None:
                notes.append(f"{seen.first} differs, and neither the loss nor any gradient does")
            notes += [] if parameters is None else [parameters.words]
    activations = {name: float(x.max()) for name, x in seen.errors.items()}
    cause = cause or Cause("nothing", "ranks compute what one process does")
    numbers = loss, whole.value, grads.errors, activations, limits
    return _same_everywhere(everyone, Diagnosis(cause, *numbers, tuple(notes)))


def _rounding(everyone: Any, whole: StepRun, rough: StepRun | None) -> dict[str, float]:
    """By name, the error up to which rounding may be the reason: a multiple of what differs between
    two runs on one process, of which `rough` perturbed its numbers."""
    if rough is None:
        return {}
    errors = ComparedGradients.of(everyone, rough.grads, whole.grads, Limits(0.0, {})).errors
    errors["loss"] = compare.loss_error(rough.value, whole.value)
    for name, x in whole.record.seen.items():
        errors[name] = largest_error(rough.record.seen.get(name, x), x)
    return {name: _TIMES_ROUNDING * error for name, error in errors.items()}


def _of_seeds(everyone: Any, ours: StepRun, again: StepRun, limits: Limits) -> Cause | None:
    """The cause if two runs on ranks with different seeds differ; None if they are equal."""
    errors = ComparedGradients.of(everyone, again.grads, ours.grads, limits).errors
    seen, other = ours.record.seen, again.record.seen
    differ = [n for n in seen if n in other and largest_error(other[n], seen[n]) > limits[n]]
    where = [name.partition(": ")[0] for name in differ] or ["the step"]
    return causes.of_randomness(where[0]) if differ or limits.exceeded(errors) else None


def _differing(group: Any, held: dict[str, Any]) -> tuple[list[int], list[str]]:
    """Ranks of the group that hold something else than its first rank, and what."""
    first, *others = gathered(group, held)
    names = [[n for n in first | x if x.get(n) != first.get(n)] for x in others]
    ranks = [rank for rank, of_rank in enumerate(names, 1) if of_rank]
    return ranks, [*dict.fromkeys(name for of_rank in names for name in of_rank)]


def _differing_parameters(model: nn.Module, group: Any) -> Cause | None:
    """The cause if ranks that should hold the same parameters (those of DDP, otherwise those of the
    context-parallel group) do not. Values of FSDP2, where ranks hold parts, are not compared."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        group = model.process_group
    own, held = inner(model), {}
    for name, p in own.named_parameters():
        held[name] = f"requires_grad={p.requires_grad}"
        if not isinstance(p, DTensor):
            held[name] += f" {p.dtype} {_digest(p)}"
    held |= {f"{name or type(m).__name__}.training": m.training for name, m in own.named_modules()}
    ranks, names = _differing(group, held)
    if not ranks:
        return None
    return causes.of_parameters(names, [dist.get_global_rank(group, x) for x in ranks])


def _digest(p: Tensor) -> int:
    """A sum of the bytes of each row, times the number of the row: rows in another order differ."""
    rows = len(p) if p.dim() and p.numel() else 1
    content = p.detach().contiguous().flatten().view(torch.uint8).view(rows, -1)
    number = torch.arange(1, rows + 1, device=p.device)
    return int((content.sum(1, dtype=torch.int64) * number).sum())


def _tried(
    everyone: Any, step: Step, model: nn.Module, batch: Any, record: Recorder, **how: Any
) -> tuple[StepRun | None, str | None]:
    """The run of the step; or None and the first error, if the step failed on any rank."""
    done, failed = None, None
    try:
        done = run(step, model, batch, record, **how)
    except Exception as error:
        failed = error_text(error)
    failed = _first(gathered(everyone, failed))
    return (done, None) if failed is None else (None, failed)


def _same_everywhere(everyone: Any, diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis of the first rank on which something is wrong."""
    of_all: list[Diagnosis] = gathered(everyone, diagnosis)
    return next((x for x in of_all if not x.is_right), of_all[0])


def _first(values: list[Any]) -> Any:
    """The first value of all ranks that is not None: what one rank knows all ranks act on."""
    return next((x for x in values if x is not None), None)


def _differing_batches(cp: ContextParallel, batch: Any) -> str | None:
    """In words, which ranks of the group have another batch than the first one; None if none."""
    if not isinstance(batch, Mapping):
        raise MeshAttentionError(f"whole_batch is a {type(batch).__name__}: give tensors by name")

    def digest(x: Any) -> str:
        if not isinstance(x, Tensor):
            return repr(x)
        held = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{x.shape} {blake2b(held).hexdigest()}"

    group = cp._calls.session.groups.parent
    ranks, names = _differing(group, {name: digest(x) for name, x in batch.items()})
    if not ranks:
        return None
    return (
        f"batches of ranks {ranks} of the group are not that of rank 0: {', '.join(names)} differ. "
        "All ranks of a context-parallel group draw the same batch; samplers count data-parallel "
        "ranks alone (docs/training.md)"
    )


def _sizes(batch: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, tokens) of a batch."""
    for name in ("input_ids", "inputs_embeds", "labels", *batch):
        tensor = batch.get(name)
        if isinstance(tensor, Tensor) and tensor.ndim >= 2:
            return tensor.shape[0], tensor.shape[1]
    raise MeshAttentionError("whole_batch: give tensors of (batch, tokens), input_ids say")
