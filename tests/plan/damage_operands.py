"""Damage inside one operation: its pieces, its moves, its calls, its rule."""

from __future__ import annotations

import re
from random import Random

from damage import (
    CALL,
    PIECE,
    PIECE_FIELD,
    Lines,
    Mutation,
    any_match,
    buffers_of,
    operations,
    other_interval,
    program_of,
    put,
    put_for_a_match,
    replaced,
)

__all__ = ["OPERANDS"]


def buffer_of_a_piece(rng: Random, lines: Lines) -> Lines | None:
    place_and_match = any_match(rng, lines, PIECE)
    if place_and_match is None:
        return None
    at, piece = place_and_match
    known = buffers_of(lines, at)
    kind = next((words[2] for words in known if words[1] == piece[1]), "")
    alike = [words[1] for words in known if words[2] == kind]
    name = rng.choice(alike if rng.random() < 0.6 and alike else [words[1] for words in known])
    line = lines[at]
    return put(rng, lines, at, line[: piece.start(1)] + name + line[piece.end(1) :])


def rows_of_a_piece(rng: Random, lines: Lines) -> Lines | None:
    def other_rows(piece: re.Match[str]) -> str:
        a, b = other_interval(rng, int(piece[2]), int(piece[3]))
        return f"{piece[1]}[{a}:{b}]{piece[0].partition(']')[2]}"

    return put_for_a_match(rng, lines, PIECE, other_rows)


def heads_of_a_piece(rng: Random, lines: Lines) -> Lines | None:
    def other_heads(piece: re.Match[str]) -> str:
        a, b = sorted((rng.randint(0, 4), rng.randint(0, 4)))
        heads = "" if rng.random() < 0.2 else f"{{{a}:{b}}}"
        return f"{piece[1]}[{piece[2]}:{piece[3]}]{heads}"

    return put_for_a_match(rng, lines, PIECE, other_heads)


def heads_of_all_pieces_of_one_side(rng: Random, lines: Lines) -> Lines | None:
    """Query and key heads cut apart: each side alone is in order."""
    places = operations(lines, "attend")
    if not places:
        return None
    at = rng.choice(places)
    fields = rng.choice((("k", "v", "grad_k", "grad_v"), ("q", "out", "lse", "grad_out", "grad_q")))
    a, b = sorted(rng.sample(range(5), 2))

    def cut(match: re.Match[str]) -> str:
        piece = match[2].partition("{")[0]
        return f"{match[1]}={piece}{{{a}:{b}}}" if match[1] in fields else match[0]

    return put(rng, lines, at, PIECE_FIELD.sub(cut, lines[at]))


def two_pieces_swapped(rng: Random, lines: Lines) -> Lines | None:
    places = [i for i in operations(lines) if len(PIECE.findall(lines[i])) > 1]
    if not places:
        return None
    at = rng.choice(places)
    piece, other = sorted(rng.sample(list(PIECE.finditer(lines[at])), 2), key=lambda m: m.start())
    line = replaced(lines[at], other, piece[0])
    return put(rng, lines, at, replaced(line, piece, other[0]))


def a_piece_for_another(rng: Random, lines: Lines) -> Lines | None:
    places = [i for i in operations(lines) if len(PIECE.findall(lines[i])) > 1]
    if not places:
        return None
    at = rng.choice(places)
    piece, other = rng.sample(list(PIECE.finditer(lines[at])), 2)
    return put(rng, lines, at, replaced(lines[at], piece, other[0]))


def a_list_of_pieces(rng: Random, lines: Lines) -> Lines | None:
    """A piece, a pair or a move dropped, doubled or moved in its list."""

    def other_list(match: re.Match[str]) -> str:
        separator = "|" if "|" in match[2] and rng.random() < 0.5 else "+"
        items = match[2].split(separator)
        i, j = rng.randrange(len(items)), rng.randrange(len(items))
        how = rng.randrange(4)
        if how == 0:
            del items[i]
        elif how == 1:
            items.insert(j, items[i])
        elif how == 2:
            items[i], items[j] = items[j], items[i]
        else:
            items.insert(j, items.pop(i))
        return f"{match[1]}={separator.join(items) or '-'}"

    field = re.compile(r"(moves|inputs|outputs|sends|receives)=(\S+)")
    return put_for_a_match(rng, lines, field, other_list)


def parts_or_wholes_of_two_moves(rng: Random, lines: Lines) -> Lines | None:
    """The parts, or the wholes, of two tensors of one collective change places."""
    places = [i for i in operations(lines, " moves=") if "+" in lines[i]]
    if not places:
        return None
    at = rng.choice(places)
    head, moves = lines[at].rsplit("=", 1)
    items = [re.split("[</]", move) for move in moves.split("+")]
    i, j = rng.sample(range(len(items)), 2)
    field = rng.randrange(3)
    items[i][field], items[j][field] = items[j][field], items[i][field]
    return put(rng, lines, at, f"{head}={'+'.join(f'{p}<{w}/{c}' for p, w, c in items)}")


def cuts_of_a_move(rng: Random, lines: Lines) -> Lines | None:
    def other_cuts(match: re.Match[str]) -> str:
        last = int(match[1].rsplit(",", 1)[-1])
        most = min(2, last - 1)
        inner = sorted(rng.sample(range(1, last), rng.randint(0, most))) if last > 1 else []
        return "/" + ",".join(map(str, (0, *inner, last)))

    return put_for_a_match(rng, lines, re.compile(r"/([\d,]+)"), other_cuts)


def a_merge_rule(rng: Random, lines: Lines) -> Lines | None:
    rules = ("softmax", "lse", "rescale", "sum", "delta")
    return put_for_a_match(
        rng, lines, re.compile(r"rule=(\w+)"), lambda _: f"rule={rng.choice(rules)}"
    )


def a_merge_into_one_of_its_inputs(rng: Random, lines: Lines) -> Lines | None:
    """The output becomes an input, here and in all that the program does with it afterwards."""
    places = [i for i in operations(lines, ": merge ") if "inputs=-" not in lines[i]]
    if not places:
        return None
    at = rng.choice(places)
    head, _, outputs = lines[at].rpartition(" outputs=")
    inputs = [piece[0] for piece in PIECE.finditer(head)]
    out = [piece[0] for piece in PIECE.finditer(f"={outputs}")]
    if not inputs or not out:
        return None
    old, new = rng.choice(out), rng.choice(inputs)
    stop = program_of(lines, at).stop
    if rng.random() < 0.5:
        stop = at + 1
    lines[at] = f"{head} outputs={outputs.replace(old, new)}"
    return [line.replace(old, new) if at < i < stop else line for i, line in enumerate(lines)]


def rows_of_a_call(rng: Random, lines: Lines) -> Lines | None:
    def other_rows(call: re.Match[str]) -> str:
        numbers = [int(call[i]) for i in range(2, 6)]
        side = rng.choice((0, 2))
        numbers[side : side + 2] = other_interval(rng, *numbers[side : side + 2])
        q0, q1, k0, k1 = numbers
        return f"{call[1]}({q0}:{q1},{k0}:{k1})"

    return put_for_a_match(rng, lines, CALL, other_rows)


def kind_of_a_call(rng: Random, lines: Lines) -> Lines | None:
    kinds = ("full", "causal", "range")
    return put_for_a_match(
        rng, lines, CALL, lambda call: f"{rng.choice(kinds)}({call[0].partition('(')[2]}"
    )


def the_calls(rng: Random, lines: Lines) -> Lines | None:
    """One dropped or doubled, two in another order, or all as one row range."""
    place_and_match = any_match(rng, lines, re.compile(r"calls=(\S+)"))
    if place_and_match is None:
        return None
    at, match = place_and_match
    calls = match[1].split("+")
    i, j = rng.randrange(len(calls)), rng.randrange(len(calls))
    how = rng.randrange(4)
    if how == 0:
        del calls[i]
    elif how == 1:
        calls.append(calls[i])
    elif how == 2:
        calls[i], calls[j] = calls[j], calls[i]
    else:
        q, k = (re.search(rf" {side}=[^\[]+\[(\d+):(\d+)\]", lines[at]) for side in "qk")
        if q is None or k is None:
            return None
        calls = [f"range(0:{int(q[2]) - int(q[1])},0:{int(k[2]) - int(k[1])})"]
    return put(rng, lines, at, replaced(lines[at], match, f"calls={'+'.join(calls) or '-'}"))


def a_fresh_flag(rng: Random, lines: Lines) -> Lines | None:
    other = {"yes": "no", "no": "yes"}
    pattern = re.compile(r"(fresh\w*)=(yes|no)")
    return put_for_a_match(rng, lines, pattern, lambda match: f"{match[1]}={other[match[2]]}")


def out_or_delta(rng: Random, lines: Lines) -> Lines | None:
    place_and_match = any_match(rng, lines, re.compile(r" (out|delta)=(\S+)"), "attend-backward")
    if place_and_match is None:
        return None
    at, match = place_and_match
    rows = re.search(r" q=[^\[]+(\[\d+:\d+\])", lines[at])
    names = [words[1] for words in buffers_of(lines, at) if words[2] == match[1]]
    new = rng.choice(["none", *(name + (rows[1] if rows else "[0:2]") for name in names)])
    return put(rng, lines, at, replaced(lines[at], match, f" {match[1]}={new}"))


def an_operand_through_a_copy(rng: Random, lines: Lines) -> Lines | None:
    """Of any precision, role and rows; freed afterwards, mostly."""
    place_and_match = any_match(rng, lines, PIECE)
    if place_and_match is None:
        return None
    at, piece = place_and_match
    declared = next(
        i for i in program_of(lines, at) if lines[i].startswith(f"  buffer {piece[1]} ")
    )
    words = lines[declared].split()
    words[1], words[3] = "copied", rng.choice(("element", "accumulate"))
    words[4] = rng.choice(("workspace", "workspace", "workspace", "output"))
    there = f"[{piece[2]}:{piece[3]}]"
    copy = f"  copy: merge rule=sum inputs={piece[1]}{there} outputs=copied{there}"
    used = replaced(lines[at], piece, piece[0].replace(piece[1], "copied", 1))
    end = ["  free: free buffers=copied"] if rng.random() < 0.8 else []
    copies = [copy, used] if rng.random() < 0.7 else [used, copy]
    lines[at : at + 1] = [*copies, *end]
    lines.insert(declared + 1, "  " + " ".join(words))
    return lines


def an_attention_in_two(rng: Random, lines: Lines) -> Lines | None:
    """Some heads by one operation, the rest by another; which key heads go with them is drawn."""
    places = operations(lines, "attend")
    if not places:
        return None
    at = rng.choice(places)
    words = {words[1]: words for words in buffers_of(lines, at)}
    pieces = {match[1]: match[2] for match in PIECE_FIELD.finditer(lines[at])}
    sizes = []
    for side in ("q", "k"):
        name = pieces[side].partition("[")[0]
        if name not in words or "{" in pieces[side]:
            return None
        first, stop = map(int, words[name][6].split(":"))
        sizes.append(stop - first)
    if sizes[0] < 2:
        return None
    queries, keys = sizes
    cut = rng.randrange(1, queries)
    per_key = max(queries // keys, 1)
    middle = cut // per_key
    key_cuts = rng.choice(((middle, middle), (middle, middle + 1), (middle + 1, middle)))
    parts = (((0, cut), (0, key_cuts[0])), ((cut, queries), (key_cuts[1], keys)))
    if rng.random() < 0.1:
        parts = parts[::-1]

    def of(part: tuple[tuple[int, int], tuple[int, int]]) -> str:
        def cut_piece(match: re.Match[str]) -> str:
            low, high = part[match[1] in ("k", "v", "grad_k", "grad_v")]
            return f"{match[1]}={match[2]}{{{low}:{high}}}"

        return PIECE_FIELD.sub(cut_piece, lines[at])

    lines[at : at + 1] = [of(part) for part in parts]
    return lines


OPERANDS: tuple[Mutation, ...] = (
    buffer_of_a_piece,
    rows_of_a_piece,
    heads_of_a_piece,
    heads_of_all_pieces_of_one_side,
    two_pieces_swapped,
    a_piece_for_another,
    a_list_of_pieces,
    parts_or_wholes_of_two_moves,
    cuts_of_a_move,
    a_merge_rule,
    a_merge_into_one_of_its_inputs,
    rows_of_a_call,
    kind_of_a_call,
    the_calls,
    a_fresh_flag,
    out_or_delta,
    an_operand_through_a_copy,
    an_attention_in_two,
)
