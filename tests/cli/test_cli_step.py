"""`advise --step`: a table of splits, a verdict, lines to paste; and sizes such as 128k."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mesh_attention.cli.main import main
from mesh_attention.cli.values import UsageError, size, starts, window

SMALL = ["advise", "--step", "--cluster", "hgx-h100", "--ranks", "2", "--tokens", "256k"]


def test_it_answers_with_splits_a_verdict_and_lines_to_paste(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--model", "qwen3-0.6b", "--memory", "17GB", "--largest"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "2 ranks of hgx-h100 (H100 SXM), 1 node of 8"
    assert lines[1] == "qwen3-0.6b, 0.60 billion parameters, sequences of 262144 tokens, causal"
    assert lines[2].split()[:4] == ["data", "x", "context", "sequences"]
    assert lines[3].startswith("1 x 2 ")
    assert "Largest context on 2 ranks: " in out
    assert "each GPU lacks " in out
    assert 'cp = ContextParallel(mesh["cp"], seq_len=262144, num_heads=16, num_kv_heads=8' in out
    assert "block.mlp.forward = cp.tiled(block.mlp.forward, tokens=8192)" in lines
    assert "keep = cp.keep_attention(offload=True)" in lines
    assert "x = checkpoint(block, x, use_reentrant=False, context_fn=keep)" in lines
    assert "cp.linear_cross_entropy(hidden, head.weight, batch.labels, reduce=" in out
    assert "16 bytes a parameter" in out


def test_json_has_every_policy_with_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--model", "qwen3-0.6b", "--memory", "20GB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["steps"]) == 2 * 4 * 2
    assert answer["gpu_bytes"] == 20 * 10**9
    assert answer["model"]["parameters"] > 5e8
    best = answer["steps"][0]
    counted = [x for n, x in best["time_seconds"].items() if n not in ("parameters", "offload")]
    assert sum(counted) == pytest.approx(best["seconds"])
    assert best["memory_bytes"]["peak"] <= answer["gpu_bytes"]
    assert best["fits"]
    assert best["keeps"] == "inputs, out on host"
    assert answer["python"][-1].startswith("cp.linear_cross_entropy(")
    assert answer["largest"] is None
    assert answer["assumptions"][0].startswith("Assumed: ")


def test_what_does_not_fit_is_told_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--model", "qwen3-0.6b", "--memory", "14GB"]) == 0
    out = capsys.readouterr().out
    assert "It does not fit: " in out
    assert "!" in out.splitlines()[3]
    assert "Largest context on 2 ranks: " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--step", "--step needs --model NAME"),
        ("--step --model qwen", "'qwen' is not a model"),
        ("--step --model /no/such/config.json", "No such file"),
        ("--step --model gpt-oss-120b", "has experts"),
        ("--step --model qwen3-8b --ulysses 2", "leave --ulysses out"),
        ("--step --model qwen3-8b --method ring", "leave --method out"),
        ("--step --model qwen3-8b --output plan.json", "leave --output out"),
        ("--step --model qwen3-8b --ranks 5000 --cluster hgx-h100", "has 4096 ranks"),
        ("--model qwen3-8b --host-memory 1TB", "--host-memory is for a whole step: add --step"),
        ("--model qwen3-8b --tokens 1.5", "is not a whole number such as 8, 128k or 1M"),
        ("--model qwen3-8b --tokens 0.3k", "is not a whole number: it is 307.2"),
    ],
)
def test_what_a_step_cannot_take_is_refused_in_a_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_heads_of_a_config_serve_attention_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    more = {"num_hidden_layers": 2, "intermediate_size": 1024, "vocab_size": 1000}
    file.write_text(json.dumps({"model_type": "llama", **sizes, **more}))
    line = f"advise --model {file} --ranks 2 --tokens 4k --pass forward"
    assert main(line.split()) == 0
    assert "4096 tokens, 8 heads of 64 (2 KV heads)" in capsys.readouterr().out


def test_sizes_are_written_as_lengths_of_contexts_are() -> None:
    assert [size(text) for text in ("8", "128k", "128K", "1M", "1.5m", "1g")] == [
        8, 131072, 131072, 1048576, 1572864, 1 << 30,
    ]  # fmt: skip
    assert window("4k:1M") == (4096, 1 << 20)
    assert starts("0,4k,1M") == (0, 4096, 1 << 20)
    for text in ("k", "1kk", "1e5", "1.5", "1 k", "٣k"):
        with pytest.raises(UsageError):
            size(text)
