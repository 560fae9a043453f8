"""Need 27: models of transformers attend over ranks by `AttentionInterface`, and their losses,
logits and gradients are those of one process with its own eager attention.

Needs 11 and 20 too: positions under any layout, and logits that are put together in order.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from model_sweep import main, merged

from support.pool import WorkerPool

EXACT = 1e-5
ROOT = Path(__file__).parents[2]


def errors(rank: int, world_size: int, names: list[str] | None, in_turn: bool) -> dict[str, float]:
    """Relative, of everything, for batches of all kinds, or for two kinds in turn; None: of all."""
    from mesh_attention.huggingface import ModelContextParallel
    from support.tiny_models import ALL, CONFIGS, make_model, on_one_process, on_ranks

    result: dict[str, float] = {}
    for turn, name in enumerate(CONFIGS if names is None else names):
        model = make_model(name)
        batches = [ALL[turn % 4], ALL[(turn + 2) % 4]] if in_turn else ALL
        wanted = [results(model, *on_one_process(model, batch)) for batch in batches]
        with ModelContextParallel(model) as cp:
            for number, batch in enumerate(batches):
                mean, logits = on_ranks(cp, model, batch)
                parts = results(model, mean.loss, logits)
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                parts["loss"] = mean.value
                for what, true in wanted[number].items():
                    a, b = parts[what], true
                    if what == "logits":
                        a, b = a[batch.real], b[batch.real]
                    worst = (a - b).abs().max() / b.abs().max()
                    result[f"{name}, batch {number}, {what}"] = worst.item()
    return result


def results(model: Any, loss: Any, logits: Any) -> dict[str, Any]:
    model.zero_grad()
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), "logits": logits.detach(), **grads}


def check(results: list[dict[str, float]]) -> None:
    for of_rank in results:
        assert of_rank
        assert {what: worst for what, worst in of_rank.items() if not worst < EXACT} == {}


def test_models_have_losses_logits_and_gradients_of_one_process(model_pool: WorkerPool) -> None:
    """In float32, each with two of four kinds of batch: plain and padded left, or right and
    packed."""
    check(model_pool.run(errors, 2, ["gemma3_text", "mistral"], True))


def examined(rank: int, world_size: int, name: str, head: str) -> dict[str, Any]:
    from support.swept_models import examine

    return examine(rank, world_size, name, head, (world_size,))


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("llama4_text", "causal"),  # chunks, and queries scaled by position
        ("deepseek_v3", "causal"),  # values of another width than keys
        ("gemma3n_text", "causal"),  # layers that share keys
        ("modernbert", "masked"),  # both directions, with windows
        ("gemma2", "sequence"),  # softcap, and a token of each row for all ranks
        ("gpt_oss", "router"),  # sinks, experts, and the loss that balances them
    ],
)
def test_layers_and_heads_of_all_kinds_are_those_of_one_process(
    model_pool: WorkerPool, name: str, head: str
) -> None:
    """Padded and packed, on ranks of which some have little. Older versions of transformers may not
    have what a type needs, and then it is refused."""
    result = merged(model_pool.run(examined, 3, name, head))
    is_newest = version("transformers") == version_of_table()
    assert result["result"] in (("exact",) if is_newest else ("exact", "refused")), result


def version_of_table() -> str:
    text = json.loads((ROOT / "benchmarks/results/2026-11-18-models.json").read_text())["machine"]
    return str(text).rpartition(" ")[2]


@pytest.mark.slow
def test_every_type_in_the_table_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    """Half an hour."""
    assert main([]) == 0
    assert "no longer exact: none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(4, "gemma3_text", marks=pytest.mark.slow),
        pytest.param(6, "gpt_oss", marks=pytest.mark.slow),
    ],
)
def test_more_ranks_change_nothing(model_pool: WorkerPool, ranks: int, name: str) -> None:
    """More than there are key heads, or documents, or windows' worth of tokens."""
    check(model_pool.run(errors, ranks, [name], False))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_every_model_on_every_number_of_ranks(model_pool: WorkerPool, ranks: int) -> None:
    check(model_pool.run(errors, ranks, None, False, seconds=300))


def wrapped(rank: int, world_size: int, way: str) -> dict[str, float]:
    """Errors of a step where the model is wrapped or compiled, and checkpointed."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from mesh_attention.huggingface import ModelContextParallel
    from support.tiny_models import PACKED, make_model, on_one_process

    plain = make_model("gemma3_text")
    wanted = results(plain, *on_one_process(plain, PACKED))
    plain.zero_grad()
    with ModelContextParallel(plain) as cp:
        model: Any = plain
        if way == "fsdp":
            for layer in plain.model.layers:
                fully_shard(layer)
            fully_shard(plain)
        else:
            model = DistributedDataParallel(plain)
            how = {"context_fn": cp.keep_attention(offload=True)} if way == "ddp" else {}
            plain.gradient_checkpointing_enable({"use_reentrant": False, **how})
        if way == "ddp":
            for layer in plain.model.layers:
                layer.mlp.forward = cp.tiled(layer.mlp.forward, tokens=3)
        if way == "compile":
            model = torch.compile(model, backend="eager")
        part = cp.shard_batch(**PACKED.whole)
        logits = model(**part.model_inputs()).logits
        # Another batch is in flight meanwhile: checkpoints find their own again.
        plain(**cp.shard_batch(input_ids=PACKED.whole["input_ids"][:, :11]).model_inputs())
        reduce: Any = "fsdp" if way == "fsdp" else "ddp"
        mean = cp.cross_entropy(logits, part.labels, reduce=reduce)
        mean.loss.backward()  # type: ignore[no-untyped-call]
    result = {"loss": (mean.value - wanted["loss"]).abs() / wanted["loss"]}
    for name, parameter in plain.named_parameters():
        grad = parameter.grad.full_tensor() if way == "fsdp" else parameter.grad
        result[name] = (grad - wanted[name]).abs().max() / wanted[name].abs().max()
    return {name: worst.item() for name, worst in result.items()}


@pytest.mark.parametrize("way", ["ddp", "fsdp", pytest.param("compile", marks=pytest.mark.slow)])
def test_models_may_be_wrapped_checkpointed_and_compiled(model_pool: WorkerPool, way: str) -> None:
    """Needs 9 and 22."""
    check(model_pool.run(wrapped, 2, way))


def averaged(rank: int, world_size: int) -> dict[str, Any]:
    """What heads for sequences and losses of routers come to; and what is refused."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from mesh_attention.huggingface import ModelContextParallel
    from support.swept_models import (
        PACKED,
        PADDED,
        by_itself,
        loss_of_rows,
        swept_model,
        worst,
    )

    whole, packed = PADDED.whole(), PACKED.whole()
    labels = whole.pop("labels")
    del packed["labels"]
    results: dict[str, Any] = {}
    ways: list[tuple[str, str, Any]] = [
        *(("llama", "sequence", "ddp"), ("llama", "sequence", "fsdp"), ("mixtral", "router", "ddp"))
    ]
    for name, head, reduce in ways:
        model = swept_model(name, head)
        true = by_itself(model, PADDED, head)
        model.zero_grad()
        with ModelContextParallel(model, reduce=reduce) as cp:
            inputs = cp.shard_batch(**whole).model_inputs()
            wrapped: Any = model
            if reduce == "fsdp":
                fully_shard(model)
            else:
                wrapped = DistributedDataParallel(model, find_unused_parameters=True)
            if head == "router":
                logits = loss = wrapped(**inputs, output_router_logits=True).aux_loss
            else:
                logits = wrapped(**inputs, return_dict=reduce == "fsdp")[0]
                loss = loss_of_rows(logits)
            loss.backward()
            if (head, reduce) == ("sequence", "ddp"):
                results["labels"] = refusal(lambda: cp.shard_batch(**whole, labels=labels))
                inputs = cp.shard_batch(**packed).model_inputs()
                results["packed"] = refusal(lambda: model(**inputs))  # noqa: B023
        parts = {"loss": loss.detach(), "logits": logits.detach()}
        for parameter_name, parameter in model.named_parameters():
            grad = parameter.grad
            if grad is None:
                grad = torch.zeros_like(parameter)
            parts[parameter_name] = grad.full_tensor() if reduce == "fsdp" else grad
        results[f"{head}, {reduce}"] = worst(parts, true)
    return results


def refusal(action: Any) -> str:
    from mesh_attention import MeshAttentionError

    try:
        action()
    except MeshAttentionError as error:
        return str(error)
    return "nothing"


def test_what_a_model_makes_of_all_tokens_is_averaged_to_that_of_one_process(
    model_pool: WorkerPool,
) -> None:
    for results in model_pool.run(averaged, 2):
        for way in ("sequence, ddp", "sequence, fsdp", "router, ddp"):
            assert results[way][0] < EXACT, results
        assert "labels are those of rows" in results["labels"]
        assert "row 0 of the batch has 3 documents" in results["packed"]


def in_one_graph(rank: int, world_size: int) -> tuple[int, bool, dict[str, float]]:
    import torch

    from mesh_attention.huggingface import ModelContextParallel
    from mesh_attention.huggingface.masks import guesses_are_right
    from support.tiny_models import PACKED, make_model, on_one_process

    kinds = ["sliding_attention", "full_attention"]
    model = make_model("gemma3_text", num_hidden_layers=2, layer_types=kinds)
    wanted = results(model, *on_one_process(model, PACKED))
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    with ModelContextParallel(model) as cp:
        part = cp.shard_batch(**PACKED.whole)
        compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
        logits = compiled(**part.model_inputs()).logits
        mean = cp.cross_entropy(logits, part.labels, reduce="sum")
        model.zero_grad()
        mean.loss.backward()  # type: ignore[no-untyped-call]
        errors = {"loss": ((mean.value - wanted["loss"]).abs() / wanted["loss"]).item()}
        for name, parameter in model.named_parameters():
            dist.all_reduce(parameter.grad)
            worst = (parameter.grad - wanted[name]).abs().max() / wanted[name].abs().max()
            errors[name] = worst.item()
    return len(graphs), guesses_are_right(), errors


def test_a_model_compiles_as_one_graph(model_pool: WorkerPool) -> None:
    """Windows and none: masks are not looked into, but guessed, and all guesses were tried."""
    [(graphs, right, errors_of_rank)] = model_pool.run(in_one_graph, 1)
    assert (graphs, right) == (1, True)
    check([errors_of_rank])


def shifting(rank: int, world_size: int) -> list[bool]:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForTokenClassification,
    )

    from mesh_attention.huggingface.model_checks import shifts_labels

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 7}
    llama = LlamaConfig(**sizes, num_attention_heads=2)
    gpt2 = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=7)
    bert = BertConfig(**sizes, num_attention_heads=2)
    causal = [LlamaForCausalLM(llama), GPT2LMHeadModel(gpt2)]
    others = [LlamaForTokenClassification(llama), BertForMaskedLM(bert)]
    return [shifts_labels(model) for model in (*causal, *others)]


def test_labels_are_shifted_for_models_that_learn_the_next_token_alone(
    model_pool: WorkerPool,
) -> None:
    assert model_pool.run(shifting, 1) == [[True, True, False, False]]
