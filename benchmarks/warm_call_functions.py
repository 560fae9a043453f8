"""How much of the library a reader meets in one warm call: its distinct functions and files.

    python benchmarks/warm_call_functions.py --json results.json

Four processes over gloo run the mesh of 2x2 ranks, whose forward program has five operations (two
gathers, attention, an exchange of partial results, a merge). After some calls one more is made
under `sys.setprofile`, and every Python function of the library that rank 0 enters is written down
once; the JSON names them. What PyTorch does inside is not counted. With `--backward` the call is
forward and backward; with `--cold` it is the first one on a new batch of documents, after calls on
other batches.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from script import provenance, save, script_parser
from torch.multiprocessing.spawn import spawn

import mesh_attention
from mesh_attention import ContextParallel
from mesh_attention.plan.language.program import Free
from mesh_attention.runtime.session.documents import Documents

RANKS = 4
WARM_CALLS = 3


def run(rank: int, folder: str, backward: bool, cold: bool) -> None:
    torch.set_num_threads(1)
    where = Path(folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{where / 'meeting'}", rank=rank, world_size=RANKS
    )
    cp = ContextParallel(
        None,
        seq_len=256,
        num_heads=4,
        head_dim=16,
        causal=False,
        method="mesh",
        tile=(2, 2),
        dtype=torch.float32,
    )
    q, k, v = (torch.randn(1, 256 // RANKS, 4, 16, requires_grad=backward) for _ in range(3))

    starts = iter(range(16, 256, 16))

    def batch() -> Documents | None:
        return cp.documents([0, next(starts), 256]) if cold else None

    documents = batch()

    def call() -> None:
        out = cp.attention(q, k, v, documents=documents)
        assert isinstance(out, torch.Tensor)
        if backward:
            torch.autograd.backward(out.sum())

    for _ in range(WARM_CALLS):
        call()
        documents = batch()
    functions = functions_entered(call)
    if rank == 0:
        operations = cp.plan.forward.programs[0].operations
        names = [op.name for op in operations if not isinstance(op, Free)]
        seen = {"operations": names, "functions": functions}
        (where / "seen.json").write_text(json.dumps(seen))
    cp.close()
    dist.destroy_process_group()


def functions_entered(call: Any) -> list[str]:
    """`file:function` of the library, each once, in the order in which they are first entered."""
    package = str(Path(mesh_attention.__file__).parent)
    codes: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            codes.setdefault(frame.f_code)

    everywhere = getattr(threading, "setprofile_all_threads", sys.setprofile)
    everywhere(note)
    try:
        call()
    finally:
        everywhere(None)
    return [
        f"{Path(code.co_filename).relative_to(package)}:{code.co_qualname}"
        for code in codes
        if not code.co_name.startswith("<")  # comprehensions belong to their function
    ]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--cold", action="store_true", help="the first call on a new batch")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (folder, args.backward, args.cold), nprocs=RANKS)  # type: ignore[no-untyped-call]
        seen = json.loads((Path(folder) / "seen.json").read_text())
    functions: list[str] = seen["functions"]
    files = Counter(name.split(":")[0] for name in functions)
    for file, count in files.most_common():
        print(f"{count:4} {file}")
    what = "forward and backward" if args.backward else "forward"
    what += ", first on a new batch" if args.cold else ""
    total = f"{len(functions)} functions in {len(files)} files"
    print(f"{what}, {len(seen['operations'])} operations forward: {total}")
    result = provenance() | {
        "pass": what,
        "operations": seen["operations"],
        "num_functions": len(functions),
        "num_files": len(files),
        "functions": functions,
    }
    save(args.json, result)


if __name__ == "__main__":
    main()
