"""Need 6 for models of transformers: what they are given is used or refused by name, never ignored,
and what only one rank is given is told to all of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

from support.pool import WorkerPool


def refusal(action: Callable[[], Any]) -> str:
    from mesh_attention import MeshAttentionError

    try:
        action()
    except MeshAttentionError as error:
        return str(error)
    return "nothing"


def wrong_calls(rank: int, world_size: int) -> dict[str, str]:
    import torch
    from transformers import DynamicCache

    from mesh_attention.huggingface import ModelContextParallel
    from support.tiny_models import PLAIN, make_model

    model = make_model("llama")
    messages = {}
    with ModelContextParallel(model) as cp:
        part = cp.shard_batch(**PLAIN.whole)
        inputs = part.model_inputs()
        local = torch.ones_like(part.position_ids)
        wrong: dict[str, dict[str, Any]] = {
            "labels": {"labels": part.labels},
            "attention_mask": {"attention_mask": local},
            "attention_mask 4-D": {"attention_mask": local[:, None, None].bool()},
            "past_key_values": {"past_key_values": DynamicCache(config=model.config)},
            "output_attentions": {"output_attentions": True},
            "logits_to_keep": {"logits_to_keep": 1},
            "position_ids": {"position_ids": None},
            "other positions": {"position_ids": torch.arange(local.shape[1])[None]},
            "documents": {"documents": None},
            "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 19])},
            "head_mask": {"head_mask": local},
            "of one rank": {"head_mask": local} if rank == 1 else {},
        }
        for name, more in wrong.items():
            messages[name] = refusal(lambda: model(**inputs | more))  # noqa: B023
        messages["whole batch"] = refusal(lambda: model(**part))
        ids, documents = part.input_ids, part.documents
        other = cp.shard_batch(**PLAIN.whole)  # the same tokens again, another batch
        messages["other documents"] = refusal(
            lambda: model(**inputs | {"documents": other.documents})
        )
        messages["positional"] = refusal(lambda: model(ids, local, documents=documents))
        messages["inside"] = refusal(lambda: model.model(**inputs))
        messages["twice"] = refusal(lambda: ModelContextParallel(model))
        model.set_attn_implementation("sdpa")
        messages["set meanwhile"] = refusal(lambda: model(**inputs))
        model.set_attn_implementation("mesh_attention")
        messages["pickled"] = refusal(lambda: pickle.dumps(model))
        moved = {"position_ids": part.position_ids.clone()}  # by the caller, who lost the mark
        messages["fine"] = refusal(lambda: copy.deepcopy(model)(**inputs | moved))
    model.set_attn_implementation("mesh_attention")
    messages["closed"] = refusal(lambda: model(PLAIN.whole["input_ids"]))
    model.set_attn_implementation("eager")
    messages["after"] = refusal(lambda: model.generate(PLAIN.whole["input_ids"], max_new_tokens=2))
    return messages


def test_wrong_calls_are_refused_by_name(model_pool: WorkerPool) -> None:
    """Needs 6 and 27."""
    wanted = {
        "labels": "targets already",
        "attention_mask": "shard_batch reads it",
        "attention_mask 4-D": "shard_batch reads it",
        "past_key_values": "caches",
        "output_attentions": "attention weights are never made",
        "logits_to_keep": "not the last of the sequence",
        "position_ids": "batch.model_inputs()",
        "other positions": "position_ids are ",
        "documents": "batch.model_inputs()",
        "cu_seq_lens_q": "give cu_seqlens to shard_batch",
        "head_mask": "head_mask is not supported",
        "of one rank": "head_mask is not supported",
        "whole batch": "labels was given",
        "other documents": "documents are those of another batch than position_ids",
        "positional": "attention_mask was given",
        "inside": "batch.model_inputs()",
        "twice": "already; close() it",
        "set meanwhile": "was set to 'sdpa'",
        "pickled": "cannot be pickled",
        "fine": "nothing",
        "closed": "call it in `with cp.own_attention():`",
        "after": "nothing",
    }
    for rank, messages in enumerate(model_pool.run(wrong_calls, 2)):
        assert messages.keys() == wanted.keys()
        for name, words in wanted.items():
            assert words in messages[name], f"rank {rank}, {name}: {messages[name]}"


def wrong_models(rank: int, world_size: int) -> dict[str, str]:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from transformers import (
        DogeConfig,
        DogeForCausalLM,
        GPT2Config,
        GPT2ForSequenceClassification,
        GPTJConfig,
        GPTJForCausalLM,
        LlamaForSequenceClassification,
        RobertaConfig,
        RobertaForMaskedLM,
    )

    from mesh_attention.huggingface import ModelContextParallel
    from support.tiny_models import PLAIN, make_model

    def called(name: str, **changes: Any) -> Any:
        model = make_model(name, **changes).eval()
        with ModelContextParallel(model) as cp:
            model(**cp.shard_batch(**PLAIN.whole).model_inputs())

    def trained(name: str, **changes: Any) -> Any:
        model = make_model(name, **changes).train()
        with ModelContextParallel(model) as cp:
            model(**cp.shard_batch(**PLAIN.whole).model_inputs())

    def called_untested(model: Any) -> Any:
        with ModelContextParallel(model, untested=True) as cp:
            model(**cp.shard_batch(**PLAIN.whole).model_inputs())

    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    gpt2 = GPT2ForSequenceClassification(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=61))
    roberta = RobertaForMaskedLM(
        RobertaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            vocab_size=61,
        )
    )  # fmt: skip
    gptj = GPTJForCausalLM(GPTJConfig(n_embd=8, n_layer=1, n_head=2, rotary_dim=4, vocab_size=61))
    config = DogeConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=61,
    )  # fmt: skip
    doge = DogeForCausalLM(config)
    llama = make_model("llama")
    head = LlamaForSequenceClassification(llama.config)
    mean: Any = "mean"
    actions: dict[str, Callable[[], Any]] = {
        "shown to be wrong": lambda: ModelContextParallel(roberta, untested=True),
        "untested": lambda: ModelContextParallel(gptj),
        "gptj": lambda: ModelContextParallel(gptj, untested=True),
        "doge": lambda: called_untested(doge),
        "head": lambda: ModelContextParallel(gpt2),
        "not reduced": lambda: ModelContextParallel(head),
        "reduced somehow": lambda: ModelContextParallel(head, reduce=mean),
        "no head": lambda: ModelContextParallel(head.model).close(),
        "no model": lambda: ModelContextParallel(nn.Linear(2, 2)),
        "wrapped": lambda: ModelContextParallel(DistributedDataParallel(llama)),
        "causal": lambda: ModelContextParallel(llama, causal=True),
        "option": lambda: ModelContextParallel(llama, tiles=3),
        "dropout": lambda: trained("llama", attention_dropout=0.1),
        "dropout, evaluated": lambda: called("llama", attention_dropout=0.1),
        "bidirectional": lambda: called("gemma3_text", use_bidirectional_attention=True),
        "both directions": lambda: called("llama", is_causal=False),
        "rope": lambda: called("qwen3", rope_parameters=dynamic),
        "router": lambda: called("gpt_oss", output_router_logits=True),
    }
    return {name: refusal(action) for name, action in actions.items()}


def test_models_that_would_be_wrong_are_refused_by_name(model_pool: WorkerPool) -> None:
    """Need 6: masks, dropout and losses that are not those of this library."""
    wanted = {
        "shown to be wrong": "'roberta' are refused: they count positions",
        "untested": "exact: they do not use `AttentionInterface`. The ",
        "gptj": "does not use AttentionInterface",
        "doge": "reads its mask as a tensor (mask.dtype)",
        "head": "GPT2ForSequenceClassification has a head",
        "not reduced": "reduce='ddp'",
        "reduced somehow": "reduce='mean': must be one of",
        "no head": "nothing",
        "no model": "Linear, which is no model of transformers",
        "wrapped": "before it is wrapped",
        "causal": "causal: the model says this",
        "option": "'tiles'",
        "dropout": "attention_dropout=0.1",
        "dropout, evaluated": "nothing",
        "bidirectional": "causal",
        "both directions": "nothing",
        "rope": "rope_type='dynamic'",
        "router": "output_router_logits",
    }
    for messages in model_pool.run(wrong_models, 2):
        assert messages.keys() == wanted.keys()
        for name, words in wanted.items():
            assert words in messages[name], f"{name}: {messages[name]}"


def masks(rank: int, world_size: int) -> list[Any]:
    import torch
    from transformers import masking_utils as made

    from mesh_attention.huggingface.attention import layer_mask

    window = made.sliding_window_causal_mask_function(4)
    packed = made.packed_sequence_mask_function(torch.zeros(1, 3))
    causal = made.causal_mask_function

    def own(batch: int, head: int, query: int, key: int) -> bool:
        return query == key

    both = made.bidirectional_mask_function
    results = [
        layer_mask(mask_function=function)
        for function in (
            causal,
            window,
            made.and_masks(window, packed),
            made.chunked_causal_mask_function(4, torch.zeros(1)),
            both,
            made.sliding_window_bidirectional_mask_function(4),
            made.and_masks(causal, own),
            made.or_masks(causal, packed),
            made.and_masks(causal, both),
            made.and_masks(window, made.sliding_window_overlay(3)),
            made.and_masks(both, made.sliding_window_overlay(3)),
            packed,
        )
    ]
    return [
        *results,
        layer_mask(),
        layer_mask(mask_function=causal, attention_mask=torch.ones(1, 3)),
    ]


def test_masks_are_read_from_their_functions_and_others_refused(model_pool: WorkerPool) -> None:
    """Need 6: a window that is left out in silence trains another model."""
    [results] = model_pool.run(masks, 1)
    assert [(mask.causal, mask.window, mask.chunk) for mask in results[:6]] == [
        (True, None, None),
        (True, (3, 0), None),
        (True, (3, 0), None),
        (True, None, 4),
        (False, None, None),
        (False, (4, 4), None),
    ]
    assert all(mask.refused is None for mask in results[:6])
    assert all(mask.refused for mask in results[6:])


def wrong_trainers(rank: int, world_size: int, folder: str) -> dict[str, str]:
    from accelerate import ParallelismConfig
    from transformers import TrainingArguments

    from mesh_attention.huggingface import ContextParallelTrainer
    from support.tiny_models import make_model
    from support.tiny_trainer import Texts, launched

    def made(cp_size: int | None = None, experts: bool = False, **arguments: Any) -> Any:
        inputs = {name: arguments.pop(name) for name in ("data_collator",) if name in arguments}
        model = make_model("gpt_oss", output_router_logits=True) if experts else make_model("llama")
        args = TrainingArguments(folder, use_cpu=True, report_to=[], **arguments)
        own = {"compute_loss": lambda *_: None}
        kind = type("Own", (ContextParallelTrainer,), own) if experts else ContextParallelTrainer
        return kind(
            *(model, args),
            train_dataset=Texts(2),
            cp_size=cp_size,
            **inputs,
        )

    actions: dict[str, Callable[[], Any]] = {
        name: lambda tensors=inputs: made(**tensors)  # type: ignore[misc]
        for name, inputs in {
            "parallelism_config": {"parallelism_config": ParallelismConfig(cp_size=1)},
            "use_liger_kernel": {"use_liger_kernel": True},
            "loss of Liger": {
                "use_liger_kernel": True,
                "liger_kernel_config": {"fused_linear_cross_entropy": False, "cross_entropy": True},
            },
            "output_router_logits": {"experts": True},
            "FSDP1": {"fsdp": True, "fsdp_config": {"version": 1}},
            "cp_size": {"cp_size": 3},
            "cp_size as text": {"cp_size": "2"},
            "average_tokens_across_devices": {"average_tokens_across_devices": False},
            "auto_find_batch_size": {"auto_find_batch_size": True},
            "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
            "even_batches": {"cp_size": 1, "accelerator_config": {"even_batches": False}},
        }.items()
    }
    actions["data_collator"] = lambda: made(data_collator=lambda rows: rows).train()
    actions["no labels"] = lambda: made(
        data_collator=lambda rows: {"input_ids": rows[0]["input_ids"][None]}
    ).train()
    messages = {}
    for name, action in actions.items():
        with launched(rank, world_size):
            messages[name] = refusal(action)
    with launched(0, 0):
        messages["one process"] = refusal(made)
    return messages


def test_a_trainer_refuses_what_it_would_do_wrong(model_pool: WorkerPool, tmp_path: Any) -> None:
    """Need 6."""
    wanted = {
        "parallelism_config": "cp_size says all",
        "use_liger_kernel": "'fused_linear_cross_entropy': False",
        "loss of Liger": "it would make the loss, too",
        "output_router_logits": "would leave out the loss that balances experts",
        "FSDP1": "fsdp_config={'version': 2}",
        "cp_size": "cp_size=3 does not divide 2 processes",
        "cp_size as text": "cp_size='2'",
        "average_tokens_across_devices": "targets of all ranks",
        "auto_find_batch_size": "auto_find_batch_size",
        "dispatch_batches": "dispatch_batches",
        "even_batches": "a rank with fewer batches would be waited for",
        "data_collator": "tensors by name",
        "no labels": "no labels",
        "one process": "torchrun",
    }
    for messages in model_pool.run(wrong_trainers, 2, str(tmp_path)):
        for name, words in wanted.items():
            assert words in messages[name], f"{name}: {messages[name]}"
