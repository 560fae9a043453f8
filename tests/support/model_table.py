"""The table of models, from what a sweep came to: as data of the package, and as on a page."""

from __future__ import annotations

from typing import Any

Groups = dict[str, list[str]]
Table = dict[str, Groups]

# What errors say, and what the table says of it.
_REASONS = {
    "mixes tokens outside of attention": "mix tokens outside of attention",
    "does not use AttentionInterface": "do not use `AttentionInterface`",
    "needs to know its batch": "do not pass `documents` on to their layers",
    "reads its mask as a tensor": "read their mask as a tensor",
    "attention_mask": "make a mask of their own",
    "has a head": "have an encoder too, or another head",
}
_POSITIONS = "count positions from `pad_token_id + 1` on, and batches from 0"
_DIFFERENT = {
    **dict.fromkeys(("camembert", "data2vec-text", "esm", "roberta"), _POSITIONS),
    **dict.fromkeys(("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"), _POSITIONS),
}


def table(types: dict[str, Any]) -> Table:
    """Types that could not be made tiny are in none of its parts."""
    made: Table = {"exact": {}, "heads": {}, "refused": {}, "different": {}}
    for name, of_type in sorted(types.items(), key=lambda item: item[0].partition(":")):
        base, _, head = name.partition(":")
        result = of_type["result"]
        if head:
            if result == "exact":
                made["heads"].setdefault(head, []).append(base)
        elif result == "exact":
            made["exact"].setdefault(", ".join(of_type["features"]) or "causal", []).append(name)
        elif result == "refused":
            reason = next(text for words, text in _REASONS.items() if words in of_type["why"])
            made["refused"].setdefault(reason, []).append(name)
        elif result == "differs":
            made["different"].setdefault(_DIFFERENT[name], []).append(name)
    return {part: dict(sorted(groups.items())) for part, groups in made.items()}


def as_toml(made: Table) -> str:
    lines = ["# Made by tests/huggingface/model_sweep.py --write: types of transformers models."]
    for part, groups in made.items():
        lines += ["", f"[{part}]"]
        for text, names in groups.items():
            lines += [f'"{text}" = [', *_wrapped([f'"{name}",' for name in names]), "]"]
    return "\n".join(lines) + "\n"


def _wrapped(words: list[str]) -> list[str]:
    rows = [""]
    for word in words:
        if len(rows[-1]) + len(word) > 96:
            rows.append("")
        rows[-1] += f" {word}"
    return [f"   {row}" for row in rows]


BEGIN, END = "<!-- models: begin -->\n", "<!-- models: end -->\n"


def as_page(made: Table) -> str:
    """A row for each kind of layers that models have, and of what is refused."""

    def rows(groups: Groups) -> list[str]:
        return [
            f"| {text} | {', '.join(f'`{name}`' for name in names)} |"
            for text, names in groups.items()
        ]

    number = sum(len(names) for names in made["exact"].values())
    heads = {
        "`...ForSequenceClassification`": made["heads"].get("sequence", []),
        "`output_router_logits`": made["heads"].get("router", []),
    }
    return "\n".join(
        [
            f"| exact: {number} types | `model_type` |",
            "|---|---|",
            *rows(made["exact"]),
            *rows({f"with {head}": names for head, names in heads.items()}),
            "",
            "| refused, since they | `model_type` |",
            "|---|---|",
            *rows(made["refused"] | made["different"]),
            "",
        ]
    )
