"""Peers' functions that docs/migration.md calls: their signatures, without what they do.

Read from the wheels of these versions. After a new release of a peer, compare again:

    pip download --no-deps -d wheels ring-flash-attn yunchang deepspeed megatron-core
    (unpack them into a folder)  python tests/support/peers.py FOLDER

MagiAttention is not published as a wheel; its signatures are those of its main branch.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

VERSIONS = {
    "ring-flash-attention": "0.1.8",
    "yunchang (long-context-attention)": "0.6.4",
    "DeepSpeed Ulysses": "0.19.8",
    "Megatron-LM": "0.16.1",
}
# By the module that people import from.
STUBS = {
    "ring_flash_attn": """
def zigzag_ring_flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), alibi_slopes=None, deterministic=False, return_attn_probs=False,
    group=None): pass
def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, world_size):
    return cu_seqlens, cu_seqlens, 1, 1, slice(0, 1)
def llama3_flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    heads_k_stride, local_k_slice, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), alibi_slopes=None, deterministic=False, return_attn_probs=False,
    group=None): pass
""",
    "yunchang": """
def set_seq_parallel_pg(sp_ulysses_degree, sp_ring_degree, rank, world_size,
    use_ulysses_low=True): pass
class LongContextAttention:
    def __init__(self, scatter_idx=2, gather_idx=1, ring_impl_type='basic', use_pack_qkv=False,
        use_sync=False, attn_type=None, attn_processor=None): pass
    def forward(self, query, key, value, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, *args): pass
    __call__ = forward
""",
    "deepspeed.sequence.layer": """
class DistributedAttention:
    def __init__(self, local_attention, sequence_process_group, scatter_idx=2, gather_idx=0,
        sp_stream=None, num_kv_heads=None): pass
    def forward(self, query, key, value, batch_dim_idx, rotary_pos_emb=None, *args,
        **kwargs): pass
    __call__ = forward
""",
    "megatron.core.utils": """
def get_batch_on_this_cp_rank(batch, cp_group=None): return batch
""",
    "megatron.core.models.gpt.gpt_model": """
class GPTModel:
    def forward(self, input_ids, position_ids, attention_mask, decoder_input=None, labels=None,
        inference_context=None, packed_seq_params=None, extra_block_kwargs=None,
        runtime_gather_output=None, *, inference_params=None, loss_mask=None,
        padding_mask=None): return labels
    __call__ = forward
""",
    "magi_attention.api": """
def magi_attn_flex_key(q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k,
    num_heads_q, num_heads_kv, head_dim, pad_size, cp_group_or_mesh, dist_attn_config=None,
    is_same_source=True, is_q_permutable=True, is_k_permutable=True, chunk_size=None,
    head_dim_v=None): pass
def dispatch(x, key, pad_value=0.0): pass
def undispatch(x, key, is_partial_grad=False): pass
def calc_attn(q, k, v, key, sink=None, softmax_scale=None, softcap=0.0,
    return_max_logits=False): return None, None
""",
}


def stub_modules() -> dict[str, ModuleType]:
    """Modules to put into `sys.modules`: calls with other arguments raise, as the real ones do."""
    modules: dict[str, ModuleType] = {}
    for name, text in STUBS.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1]))
        exec(text, vars(modules[name]))
    return modules


def signatures(tree: ast.AST) -> dict[str, list[tuple[str, bool]]]:
    """Arguments of functions and methods by name, each with whether it has a default."""
    table: dict[str, list[tuple[str, bool]]] = {}
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.Module | ast.ClassDef):
            continue
        for node in scope.body:
            if isinstance(node, ast.FunctionDef):
                name = f"{scope.name}.{node.name}" if isinstance(scope, ast.ClassDef) else node.name
                args = node.args
                required = len(args.args) - len(args.defaults)
                positional = [(arg.arg, at >= required) for at, arg in enumerate(args.args)]
                pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
                table[name] = positional + [(arg.arg, value is not None) for arg, value in pairs]
    return table


def main(folder: Path) -> int:
    """Says which signatures differ from those of the packages in a folder."""
    different = 0
    for module, text in STUBS.items():
        package = module.partition(".")[0]
        if package == "magi_attention":  # its wheel is empty
            continue
        files = [file for root in folder.rglob(package) for file in root.rglob("*.py")]
        real = [signatures(ast.parse(file.read_text())) for file in files]
        for name, arguments in signatures(ast.parse(text)).items():
            seen = [table[name] for table in real if name in table]
            if arguments not in seen:
                different += 1
                print(f"{module}.{name}: {arguments}, there {seen or 'no such function'}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
