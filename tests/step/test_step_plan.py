"""A planned step: memory and time by hand, the numbers of Qwen3-8B, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_attention.errors import MeshAttentionError
from mesh_attention.machine.load import load_cluster
from mesh_attention.step import costs
from mesh_attention.step.costs import (
    Keeps,
    LayerAttention,
    Policy,
    policies,
    step_memory,
    step_time,
)
from mesh_attention.step.model_shapes import MODELS, ModelShape, model_shape
from mesh_attention.step.splits import PlannedStep, StepPlan, largest_context, plan_step
from mesh_attention.train import chunked_logits

H100 = load_cluster("hgx-h100")
TINY = ModelShape("tiny", 4, 2, 8, layers=3, hidden=32, intermediate=64, vocabulary=100)
# 16 local tokens; seconds and bytes that can be told from all others.
LAYER = LayerAttention(None, 16, 1e6, 2.0, 5.0, 6000, 9000, 700)  # type: ignore[arg-type]
CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "sliding_window": None,
}


@pytest.fixture(scope="module")
def million() -> StepPlan:
    return plan_step("qwen3-8b", 1 << 20, 8, cluster=H100)


def step_of(plan: StepPlan, context: int, keeps: Keeps, *, tiled: bool) -> PlannedStep:
    (step,) = (
        step
        for step in plan.steps
        if step.context == context
        and step.policy.keeps is keeps
        and bool(step.policy.tile_tokens) == tiled
    )
    return step


def test_memory_of_a_small_model_is_that_by_hand() -> None:
    assert (TINY.block_parameters, TINY.parameters) == (9216, 34048)
    hidden, q, kv, out = 1024, 1024, 512, 1024 + 256
    in_flight = 6 * 9216 + 2 * 3200
    memory = step_memory(TINY, LAYER, Policy(Keeps.ATTENTION, 0), 2)
    assert memory._asdict() == {
        "weights": 4 * 17024,
        "gradients": 4 * 17024,
        "optimizer": 8 * 17024,
        "gathered_weights": 2 * (6400 + 2 * 9216),
        "reserved": 2 << 30,
        "block_inputs": 3 * hidden,
        "kept_attention": 3 * out,
        "other_activations": 0,
        # q, k and v are the attention's; the norm before it and the gradient of the residual.
        "at_attention": in_flight + 9000 - out + 2 * hidden,
        "at_mlp": in_flight + 5 * hidden + q + 2 * kv + 7 * 2 * 16 * 64,
        "at_loss": 3 * hidden + 4 * 3200 + 2 * 4 * 16 * 100,
        "at_end": hidden + 6 * 6400,
        "host": 0,
    }
    fixed = 16 * 17024 + memory.gathered_weights + (2 << 30)
    assert memory.peak == ("at_mlp", fixed + 3 * (hidden + out) + memory.at_mlp)


def test_each_policy_holds_what_it_says() -> None:
    inputs, out = 3 * 1024, 3 * 1280
    tiled = Policy(Keeps.HOST, 8)
    host = step_memory(TINY, LAYER, tiled, 2)
    assert (host.host, host.block_inputs, host.kept_attention) == (inputs + out, 2 * 1024, 2 * 1280)
    whole = step_memory(TINY, LAYER, tiled._replace(tile_tokens=0), 2)
    assert whole.at_mlp - host.at_mlp == 7 * 2 * (16 - 8) * 64
    again = step_memory(TINY, LAYER, Policy(Keeps.INPUTS, 0), 2)
    assert (again.block_inputs, again.kept_attention) == (inputs, 0)
    assert again.at_attention - whole.at_attention == 1280
    everything = step_memory(TINY, LAYER, Policy(Keeps.EVERYTHING, 0), 2)
    assert everything.kept_attention == 3 * 6000
    # Two norms and the residual between; gate, up, activation and product.
    assert everything.other_activations == 3 * (3 * 1024 + 4 * 2048)
    normed = step_memory(replace(TINY, qk_norm=True), LAYER, Policy(Keeps.INPUTS, 0), 2)
    assert normed.at_mlp - again.at_mlp == 1024 + 512


def test_time_of_a_small_model_is_that_by_hand() -> None:
    times = {
        keeps: step_time(TINY, LAYER, Policy(keeps, 0), H100, 8, sequences=2) for keeps in Keeps
    }
    products = 2 * 16 * 9216 / 680e12
    kept = times[Keeps.ATTENTION]
    assert kept.attention_forward == 2 * 3 * 2.0
    assert kept.attention_backward == 2 * 3 * 5.0
    assert kept.linear_layers == pytest.approx(2 * 3 * 4 * products)
    assert times[Keeps.EVERYTHING].linear_layers == pytest.approx(2 * 3 * 3 * products)
    assert kept.loss == pytest.approx(2 * 3 * 2 * 16 * 3200 / 680e12)
    assert [times[keeps].attention_again for keeps in Keeps] == [0, 12.0, 0, 0]
    tiled = step_time(TINY, LAYER, Policy(Keeps.ATTENTION, 8), H100, 8, sequences=2)
    mlp = 2 * 16 * TINY.mlp_parameters / 680e12
    assert tiled.linear_layers - kept.linear_layers == pytest.approx(2 * 3 * mlp)
    assert kept.total == pytest.approx(sum(kept) - kept.parameters)


def test_only_what_no_computation_hides_is_exposed() -> None:
    assert H100.step is not None
    slow = replace(H100, step=replace(H100.step, host_gb_per_second=1e-8))  # ten bytes a second
    policy = Policy(Keeps.HOST, 0)
    time = step_time(TINY, LAYER, policy, slow, 8, sequences=1)
    copy = (1024 + 1280) / 10
    assert time.offload == pytest.approx(2 * 3 * copy)
    assert time.exposed_offload == pytest.approx(3 * (2 * copy - 7.0), rel=1e-6)
    hidden = step_time(TINY, LAYER, policy, H100, 8, sequences=1)
    assert hidden.exposed_offload == 0
    assert 0 < hidden.exposed_parameters < hidden.parameters
    idle = LAYER._replace(forward_seconds=0.0, backward_seconds=0.0)
    open_ = step_time(TINY, idle, policy, H100, 8, sequences=1)
    assert hidden.exposed_parameters < open_.exposed_parameters < open_.parameters


def test_a_million_tokens_of_qwen3_8b_are_as_reckoned_by_hand(million: StepPlan) -> None:
    step = step_of(million, 8, Keeps.ATTENTION, tiled=True)
    memory, near = step.memory, 0.02
    assert memory.block_inputs == pytest.approx(38.7e9, rel=near)
    assert memory.kept_attention == pytest.approx(39.3e9, rel=near)
    assert sum(memory[:3]) == pytest.approx(16.4e9, rel=near)
    assert not step.fits
    forward = 36 * step.attention.flops
    assert forward == pytest.approx(3.24e17, rel=near)
    # Between the rates of first calls and those that last, in TFLOP/s of a GPU.
    assert 682 < forward / 8e12 / step.time.attention_forward < 743
    assert 575 < 2.5 * forward / 8e12 / step.time.attention_backward < 647
    best = million.best
    assert (best.data, best.context, best.policy.keeps) == (1, 8, Keeps.HOST)
    assert best.fits
    assert best.memory.host == pytest.approx((38.7 + 39.3) * 1e9, rel=near)
    assert best.time.exposed_offload == 0
    assert best.seconds < 265
    tiled = step_of(million, 8, Keeps.HOST, tiled=True)
    assert tiled.seconds > best.seconds
    assert tiled.memory.peak[1] < min(best.memory.peak[1], 60e9)


def test_splits_come_best_first_each_with_its_best_policy(million: StepPlan) -> None:
    assert [step.order for step in million.steps] == sorted(step.order for step in million.steps)
    assert {step.data * step.context for step in million.splits} == {8}
    assert len(million.splits) == 4
    rates = [step.tokens_per_second_per_gpu for step in million.splits if step.fits]
    assert rates == sorted(rates, reverse=True)
    for step in million.splits:
        assert 0 < step.mfu_percent < 75
        assert step.sequences == step.data


def test_a_batch_is_shared_out_over_the_groups() -> None:
    plan = plan_step("qwen3-0.6b", 1 << 18, 4, cluster=H100, batch=6)
    assert {(step.data, step.context) for step in plan.steps} == {(1, 4), (2, 2)}
    assert {step.sequences for step in plan.steps} == {6}
    single = plan_step("qwen3-0.6b", 1 << 18, 4, cluster=H100)
    many, few = (step_of(x, 4, Keeps.EVERYTHING, tiled=False).time for x in (plan, single))
    assert many.linear_layers == pytest.approx(6 * few.linear_layers)
    assert many.optimizer == few.optimizer


def test_memory_and_time_grow_with_the_tokens() -> None:
    plans = [
        plan_step("llama-3.2-1b", tokens, 2, cluster=H100) for tokens in (1 << 18, 400_000, 1 << 19)
    ]
    for rows in zip(
        *(sorted(x.steps, key=lambda s: (s.context, s.policy)) for x in plans), strict=True
    ):
        peaks = [step.memory.peak[1] for step in rows]
        seconds = [step.seconds for step in rows]
        assert peaks == sorted(peaks)
        assert seconds == sorted(seconds)


def test_the_largest_context_fits_and_the_next_does_not() -> None:
    plan = plan_step("qwen3-0.6b", 1 << 18, 2, cluster=H100)
    by_gpu = replace(plan.asked, memory_bytes=30 * 10**9)
    for asked in (by_gpu, replace(plan.asked, host_bytes=10**11)):
        fitting, beyond = largest_context(asked)
        assert fitting is not None
        assert beyond is not None
        assert fitting.fits
        assert not beyond.fits
        assert fitting.tokens < beyond.tokens < 1.05 * fitting.tokens
    nothing = plan_step("qwen3-8b", 1 << 18, 2, cluster=H100, memory_bytes=10**9)
    assert not nothing.best.fits
    assert largest_context(nothing.asked)[0] is None


def test_a_policy_has_tiles_where_they_save_memory_and_the_loss_its_own_chunks() -> None:
    assert costs._LOGITS_BYTES == chunked_logits._CHUNK_BYTES
    large, small = policies(131072), policies(4096)
    assert {policy.tile_tokens for policy in small} == {0}
    assert len(large) == 2 * len(small) == 8


def test_a_config_of_hugging_face_is_read_as_the_table_has_it(tmp_path: Path) -> None:
    file = tmp_path / "Qwen3-8B" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(CONFIG))
    assert model_shape(str(file)) == replace(MODELS["qwen3-8b"], name="Qwen3-8B")
    less = {name: x for name, x in CONFIG.items() if name not in ("head_dim", "sliding_window")}
    file.write_text(json.dumps(less | {"num_key_value_heads": None, "model_type": "llama"}))
    other = model_shape(str(file))
    assert (other.num_kv_heads, other.head_dim, other.qk_norm) == (32, 128, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not known, but llama, mistral"),
        ({"vocab_size": None}, "has no 'vocab_size'"),
        ({"hidden_size": "4096"}, "hidden_size='4096': must be a whole number"),
        ({"tie_word_embeddings": 1}, "must be True or False"),
        ({"sliding_window": 4096}, "layers with windows"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers with windows"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG | change))
    with pytest.raises(MeshAttentionError, match=message):
        model_shape(str(file))


def test_models_and_clusters_of_which_too_little_is_known_are_refused() -> None:
    with pytest.raises(MeshAttentionError, match=r"did you mean qwen3-8b\?\); known: llama-2-7b"):
        plan_step("qwen3-8", 4096, 2)
    with pytest.raises(MeshAttentionError, match="mixtral-8x22b has experts; steps are planned"):
        plan_step("mixtral-8x22b", 4096, 2)
    with pytest.raises(MeshAttentionError, match=r"hgx-h100 has no \[step\] table"):
        plan_step("qwen3-0.6b", 4096, 2, cluster=replace(H100, step=None))
    with pytest.raises(MeshAttentionError, match="batch=0: must be a whole number"):
        plan_step("qwen3-0.6b", 4096, 2, batch=0)
    assert model_shape("llama-70b") is MODELS["llama-3.1-70b"]
