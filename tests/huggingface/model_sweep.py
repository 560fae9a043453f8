"""Which types of transformers are exact on ranks: a tiny model of each, on 1, 2, 3 and 4 ranks,
padded and packed, beside one process.

    python tests/huggingface/model_sweep.py --json FILE     # all types; goes on where it ended
    python tests/huggingface/model_sweep.py llama llama:sequence mixtral:router     # some

`--again` examines types anew that FILE has. `--write` makes `huggingface/models.toml` and the table
of `docs/models.md` of FILE. Exit status 1 where a type that the table calls exact is not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]

from support.model_table import BEGIN, END, Table, as_page, as_toml, table
from support.pool import WorkerError, WorkerPool

RANKS = 4
EXACT = 1e-5
LEFT_OUT = ("blt", "phi4_multimodal", "git", "moshi", "whisper")  # huge, or of speech


def all_types() -> dict[str, str]:
    """By type the head that is tried: that of masked language modelling where there is one."""
    from transformers.models.auto import modeling_auto as auto

    masked = dict.fromkeys(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "masked")
    causal = dict.fromkeys(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "causal")
    both = causal | masked
    types = {name: both[name] for name in sorted(both) if name not in LEFT_OUT}
    classify = [
        name for name in types if name in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    ]
    more = {f"{name}:sequence": "sequence" for name in classify}
    return types | more | {f"{name}:router": "router" for name in types if types[name] == "causal"}


def is_worth_it(name: str, kept: dict[str, Any]) -> bool:
    """Heads for sequences, and losses that balance experts, where the model itself is exact."""
    base, _, head = name.partition(":")
    of_type = kept.get(base, {})
    is_exact = of_type.get("result") == "exact"
    return not head or (is_exact and (head == "sequence" or "experts" in of_type["features"]))


def examined(types: dict[str, str], kept: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A type that hangs or ends a rank costs its processes."""
    pool = None
    for name, head in types.items():
        if not is_worth_it(name, kept):
            continue
        if pool is None:
            environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
            pool = WorkerPool(environment, modules=("support.swept_models",), seconds=60.0)
        from support.swept_models import examine

        began = monotonic()
        try:
            result = merged(pool.run(examine, RANKS, name.partition(":")[0], head))
        except WorkerError as error:
            result = {"result": "failed", "why": str(error)[-300:]}
            pool.close()
            pool = None
        yield name, result | {"head": head, "seconds": round(monotonic() - began, 1)}
    if pool is not None:
        pool.close()


def merged(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of all ranks; one that compares nothing stands for all."""
    for of_rank in of_ranks:
        if of_rank["result"] != "compared":
            return of_rank
    error, what = max(
        (error, f"{what}, {batch} ranks")
        for of_rank in of_ranks
        for batch, (error, what) in of_rank["errors"].items()
    )
    result = "exact" if error < EXACT else "differs"
    return {"result": result, "worst": error, "of": what, "features": of_ranks[0]["features"]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="llama, llama:sequence, ...")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    types = all_types()
    if options.types:
        types = {name: types[name] for name in options.types}
    kept: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        kept = json.loads(options.json.read_text())["types"]
    left = {n: head for n, head in types.items() if options.again or n not in kept}
    for number, (name, result) in enumerate(examined(left, kept), 1):
        kept[name] = result
        about = result.get("why") or f"{result['worst']:.1e} {', '.join(result['features'])}"
        print(f"{number}/{len(left)} {name}: {result['result']}, {about}", flush=True)
        if options.json is not None:
            options.json.write_text(report(kept))
    if options.write:
        write(table(kept))
    # Here, as it imports transformers, and tests import this file wherever they are collected.
    from mesh_attention.huggingface.model_checks import SHOWN

    wrong = [name for name in SHOWN if kept.get(name, {}).get("result", "exact") != "exact"]
    print(f"{len(kept)} results; no longer exact: {', '.join(wrong) or 'none'}")
    return len(wrong) > 0


def report(kept: dict[str, Any]) -> str:
    """A line for each type."""
    about = [f" {json.dumps(name)}: {json.dumps(text)}," for name, text in machine().items()]
    types = [f"  {json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept)]
    return "\n".join(["{", *about, ' "types": {', ",\n".join(types), " }", "}", ""])


def machine() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    cores = f"{os.cpu_count()} cores, {platform.machine()}"
    return {
        "date": f"{datetime.now():%Y-%m-%d}",
        "commit": commit,
        "machine": f"{cores}, torch {version('torch')}, transformers {version('transformers')}",
        "command": "python tests/huggingface/model_sweep.py --json FILE",
    }


def write(made: Table) -> None:
    root = Path(__file__).parents[2]
    (root / "src/mesh_attention/huggingface/models.toml").write_text(as_toml(made))
    page = root / "docs/models.md"
    text = page.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    page.write_text(text[:begin] + as_page(made) + text[end:])


if __name__ == "__main__":
    sys.exit(main())
