"""Whatever is asked wrongly gets one line on standard error, with the way out, and exit code 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from mesh_attention.cli.main import main
from mesh_attention.plan.methods import table
from mesh_attention.plan.methods.parts.setting import Setting, option

PLANNING = ("plan", "volume", "verify", "simulate", "draw")
IMPOSSIBLE = [
    ("volume --tile 3x4 --ranks 9", "tiles that fit: 1x9, 3x3, 9x1"),
    ("volume --tile 3", "--tile: '3' is not a pair such as 2x2 (AxB)"),
    ("volume --tile 0x4", "at least 1"),
    ("volume --tile=-3x3", "is not a pair"),
    ("volume --tile", "--tile: needs a value"),
    ("volume --ranks 0", "--ranks: 0 is not possible; give a whole number of at least 1"),
    ("volume --ranks -3", "--ranks: -3 is not possible; give a whole number of at least 1"),
    ("volume --ranks nine", "'nine' is not a whole number"),
    ("volume --ranks ٣", "'٣' is not a whole number"),
    ("volume --tile ٣x٣", "is not a pair such as 2x2 (AxB)"),
    ("volume --max-memory-bytes ٣GiB", "is not a size such as 512MiB"),
    ("volume --window ٣", "is not a window such as"),
    ("volume --documents 0,٣", "is not a list of document starts"),
    ("volume --ranks 1000000", "at most 65536"),
    ("volume --heads 7 --kv-heads 2", "KV heads that fit: 1, 7"),
    ("volume --alpha 3", "alpha that fits: 2, 4"),
    ("volume --alpha 3 --method mesh", "--ranks-per-node"),
    ("volume --alpha 3 --ranks-per-node 8", "alpha that fits: 2, 4"),
    ("volume --alpha 9 --ranks-per-node 999999999999999999", "leave --alpha out"),
    ("volume --compare --units-per-node 2 --ranks-per-node 2", "leave --units-per-node out"),
    ("volume --compare --units-per-node 5", "leave --units-per-node out"),
    ("volume --compare --alpha 2", "leave --alpha out"),
    ("volume --compare --pass forward", "leave --pass out"),
    ("volume --compare --layers 4", "add that, or leave it out"),
    ("plan --alpha 2 --ranks 8", "--alpha places ranks on nodes: add --ranks-per-node N"),
    ("volume --units-per-node 2", "--units-per-node places ranks on nodes: add --ranks-per-node N"),
    ("plan --ranks 4 --pass forward --backward-chunks 2x2", "leave it or --pass forward out"),
    ("simulate --ranks 4 --pass forward --gather-out", "leave it or --pass forward out"),
    ("plan --ranks 4 --target h200 --rank 1 --json", "leave it or --json out"),
    ("plan --ranks 4 --target h200 --rank 1 --text -", "leave it or --text - out"),
    ("simulate --clusters --ranks=8 --best", "leave out --ranks, --best"),
    ("volume --chunks 9x9", "at most 16"),
    ("volume --backward-chunks 5x4", "at most 16"),
    ("volume --backward-tile 3x3", "tiles that fit"),
    ("volume --tokens 0", "at least 1"),
    ("volume --tokens 9999999999999", "at most 1073741824"),
    ("volume --tokens 99999999999999999999", "a number of 20 digits is too large"),
    ("volume --heads 999999999999999999", "at most 65536"),
    ("volume --kv-tokens 9999999999999", "at most 1073741824"),
    ("volume --tokens 1e5", "is not a whole number"),
    ("volume --element-bytes 3", "must be 2, 4 or 8"),
    ("volume --layout foo", "known: contiguous, zigzag, striped"),
    ("volume --layout zigzg", "did you mean zigzag?"),
    ("volume --stripe-block 4", "striped"),
    ("volume --combine sum", "known: auto, exchange, reduce-scatter"),
    ("volume --pass sideways", "known: forward, backward, both"),
    ("volume --method rng", "known methods: mesh"),
    ("volume --window x", "is not a window such as"),
    ("volume --documents 5", "is not a list of document starts"),
    ("volume --documents 0,5", "end at 5 but there are 65536 tokens"),
    ("volume --documents 0,9,3,65536", "cumulative starts"),
    ("volume --prefix 5", "--causal"),
    ("volume --max-memory-bytes 1KiB", "the smallest cap that fits is"),
    ("volume --max-memory-bytes 5XB", "is not a size such as 512MiB"),
    ("volume --max-memory-bytes 0", "at least one byte"),
    ("volume --max-memory-bytes -5MiB", "-5MiB is not possible; give at least one byte"),
    ("volume --max-memory-bytes=-5MiB", "-5MiB is not possible; give at least one byte"),
    ("volume --causal=yes", "--causal/--no-causal: is given or not, without a value: 'yes'"),
    ("volume --prefix 5 --no-causal", "needs --causal and a length"),
    ("volume --rank 9", "unknown option --rank (did you mean --ranks?)"),
    ("volume nine", "unknown argument nine"),
    ("volume --json=yes", "--json"),
    ("volume --help=all", "-h/--help: is given or not, without a value: 'all'"),
    ("volume --ranks --json", "--ranks: needs a value"),
    ("draw --first 0", "at least 1"),
    ("plan --text - --json", "give --text a file"),
    ("plan --text /no/such/folder/plan.txt", "No such file"),
    ("verify --text /no/such/plan.txt", "No such file"),
    ("verify --text plan.txt --ranks 9 --causal", "leave out --ranks, --causal"),
    ("simulate --cluster hgx-h10", "did you mean hgx-h100?"),
    ("simulate --cluster /no/such/file.toml", "neither a file nor one of"),
    ("simulate --ranks-per-node 4", "a node of hgx-h100 has 8 ranks"),
    ("simulate --cluster paper --ranks 512", "paper has 256 ranks"),
    ("simulate --overlap some", "known: none, strict, events"),
    ("simulate --method ring --tile 2x2", "method ring has no option --tile"),
    ("simulate --method ring --tile 2x2 --best", "its options: --layout, --stripe-block"),
    ("simulate --tile 3x3 --ranks 8 --best", "tiles that fit"),
    ("simulate --ranks 4 --tokens 64 --gantt chart.pdf", "written as .png or .svg"),
    ("simulate --ranks 4 --tokens 64 --trace /no/such/folder/trace.json", "No such file"),
    ("simulate --trace-ranks 0", "at least 1"),
    ("pln", "unknown command pln (did you mean plan?)"),
    ("\x1b[31m", "unknown command '\\x1b[31m'; commands: "),
    ("verify --ranks 4 --slices \x1b[31m", "--slices: \\x1b[31m: No such file"),
    ("vol", "commands: plan, volume, verify, simulate, advise, draw"),
    ("--colour", "unknown option --colour"),
]


@pytest.mark.parametrize(("line", "way_out"), IMPOSSIBLE, ids=[line for line, _ in IMPOSSIBLE])
def test_the_impossible_is_refused_in_one_line_with_the_way_out(
    line: str, way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mesh-attention")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert way_out in err


@pytest.mark.parametrize("name", PLANNING)
def test_every_command_refuses_a_bad_tile(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--tile", "3x4", "--ranks", "9"]) == 2
    assert capsys.readouterr().err.startswith(f"mesh-attention {name}: tile 3x4 has 12 cells")


@dataclass(frozen=True)
class BareSetting(Setting):
    tile: tuple[int, int] | None = option(None, "a x b", "AxB")


def test_an_option_that_the_method_lacks_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = table.METHODS["mesh"]
    bare = table.Method("bare", "no options", BareSetting, mesh.build, mesh.candidates)
    monkeypatch.setitem(cast("dict[str, table.Method]", table.METHODS), "bare", bare)
    assert main(["volume", "--method", "bare", "--no-rotation"]) == 2
    assert "method bare has no option --rotation" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "something else\n",
        "mesh-attention plan 1\n{}\n",
        "mesh-attention plan 1\nnull\n",
        "mesh-attention plan 1\nnot json\n",
    ],
)
def test_a_text_that_is_no_plan_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.txt"
    file.write_text(text)
    assert main(["verify", "--text", str(file)]) == 2
    err = capsys.readouterr().err
    assert "is not the text form of a plan" in err
    assert err.count("\n") == 1


def test_a_file_that_is_not_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.txt"
    file.write_bytes(b"\xff\xfe\x00")
    assert main(["verify", "--text", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
