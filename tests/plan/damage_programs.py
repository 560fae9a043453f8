"""Damage to what a program is made of: operations and their order, groups, buffers, the problem."""

from __future__ import annotations

import json
import re
from random import Random

from damage import (
    Lines,
    Mutation,
    any_match,
    buffers_of,
    is_operation,
    operations,
    other_interval,
    program_of,
    put,
    put_for_a_match,
)

__all__ = ["PROGRAMS"]


def a_member(rng: Random, lines: Lines) -> Lines | None:
    pattern = re.compile(r"(to|from)_member=(\d+)")
    return put_for_a_match(rng, lines, pattern, lambda m: f"{m[1]}_member={rng.randrange(6)}")


def both_members_swapped(rng: Random, lines: Lines) -> Lines | None:
    """A ring the other way round, sometimes for all."""
    pattern = re.compile(r"to_member=(\d+) (sends=\S+) from_member=(\d+)")
    place_and_match = any_match(rng, lines, pattern)
    if place_and_match is None:
        return None
    at, _ = place_and_match
    new = r"to_member=\3 \2 from_member=\1"
    if rng.random() < 0.5:
        return [pattern.sub(new, line) for line in lines]
    return put(rng, lines, at, pattern.sub(new, lines[at]))


def the_group_of_an_operation(rng: Random, lines: Lines) -> Lines | None:
    names = [line.split()[1] for line in lines if line.startswith("group ")]
    return put_for_a_match(
        rng, lines, re.compile(r"group=(\S+)"), lambda _: f"group={rng.choice(names)}"
    )


def members_of_a_group(rng: Random, lines: Lines) -> Lines | None:
    places = [i for i, line in enumerate(lines) if line.startswith("group ")]
    if not places:
        return None
    at = rng.choice(places)
    word, name, ranks = lines[at].split()
    members = ranks.split(",")
    how = rng.randrange(3)
    if how == 0:
        rng.shuffle(members)
    elif how == 1 and len(members) > 1:
        members.pop(rng.randrange(len(members)))
    else:
        members[rng.randrange(len(members))] = str(rng.randrange(6))
    lines[at] = f"{word} {name} {','.join(members)}"
    return lines


def two_operations_swapped(rng: Random, lines: Lines) -> Lines | None:
    at = rng.choice(operations(lines))
    places = [i for i in program_of(lines, at) if is_operation(lines[i])]
    here = places.index(at)
    near = places[max(0, here - 2) : here + 3]
    other = rng.choice(near if rng.random() < 0.7 else places)
    lines[at], lines[other] = lines[other], lines[at]
    return lines


def an_operation_moved(rng: Random, lines: Lines) -> Lines | None:
    at = rng.choice(operations(lines))
    places = [i for i in program_of(lines, at) if is_operation(lines[i])]
    lines.insert(rng.choice(places), lines.pop(at))
    return lines


def an_operation_dropped(rng: Random, lines: Lines) -> Lines | None:
    at = rng.choice(operations(lines))
    if rng.random() < 0.35:
        return [line for line in lines if line != lines[at]]
    return [*lines[:at], *lines[at + 1 :]]


def an_operation_doubled(rng: Random, lines: Lines) -> Lines | None:
    at = rng.choice(operations(lines))
    places = [i for i in program_of(lines, at) if is_operation(lines[i])]
    lines.insert(rng.choice((at, rng.choice(places))), lines[at])
    return lines


def an_operation_of_another_rank(rng: Random, lines: Lines) -> Lines | None:
    at = rng.choice(operations(lines))
    name = lines[at].split()[0]
    lines[at] = lines[rng.choice([i for i in operations(lines) if lines[i].split()[0] == name])]
    return lines


def what_is_freed(rng: Random, lines: Lines) -> Lines | None:
    places = operations(lines, "free: free ")
    if not places:
        return None
    at = rng.choice(places)
    head, _, names = lines[at].partition("buffers=")
    items = names.split("+")
    how = rng.randrange(3)
    if how == 0:
        del items[rng.randrange(len(items))]
    elif how == 1:
        items.append(rng.choice([words[1] for words in buffers_of(lines, at)]))
    else:
        items[rng.randrange(len(items))] = rng.choice([w[1] for w in buffers_of(lines, at)])
    return put(rng, lines, at, f"{head}buffers={'+'.join(items) or '-'}")


def a_buffer(rng: Random, lines: Lines) -> Lines | None:
    """Another kind, precision, role, interval of heads or rows; or another name, everywhere."""
    places = [i for i, line in enumerate(lines) if line.startswith("  buffer ")]
    at = rng.choice(places)
    words = lines[at].split()
    others = [lines[i].split() for i in places]
    field = rng.choice((1, 2, 3, 4, 6, 8, 8))
    if field == 8 and rng.random() < 0.5:
        spans = [span.split(":") for span in words[8].split(",")]
        i = rng.randrange(len(spans))
        spans[i] = list(map(str, other_interval(rng, *map(int, spans[i]))))
        rng.shuffle(spans) if rng.random() < 0.3 else None
        words[8] = ",".join(":".join(span) for span in spans)
    elif field == 6 and rng.random() < 0.5:
        words[6] = ":".join(map(str, sorted((rng.randint(0, 5), rng.randint(0, 5)))))
    else:
        words[field] = rng.choice(others)[field]
    return put(rng, lines, at, "  " + " ".join(words))


def two_names_of_buffers(rng: Random, lines: Lines) -> Lines | None:
    """Two buffers of one program change names, there and in all operations: only who is called
    what can tell."""
    at = rng.choice(operations(lines))
    program = program_of(lines, at)
    names = [words[1] for words in buffers_of(lines, at)]
    if len(names) < 2:
        return None
    buffer_name, other = rng.sample(names, 2)
    swap = {buffer_name: other, other: buffer_name}
    word = re.compile(r"(?<![\w.-])([\w.-]+)(?=\[|\+|$| )")

    def swapped(line: str) -> str:
        if line.startswith("  buffer "):
            words = line.split()
            words[1] = swap.get(words[1], words[1])
            return "  " + " ".join(words)
        head, _, rest = line.partition(": ")
        verb, _, rest = rest.partition(" ")
        fields = []
        for field in rest.split(" "):
            name, _, text = field.partition("=")
            if name not in ("group", "rule"):
                text = word.sub(lambda match: swap.get(match[1], match[1]), text)
            fields.append(f"{name}={text}")
        return f"{head}: {verb} {' '.join(fields)}"

    return [swapped(line) if i in program else line for i, line in enumerate(lines)]


def a_line_dropped_or_doubled(rng: Random, lines: Lines) -> Lines | None:
    at = rng.randrange(2, len(lines))
    return [*lines[:at], *([lines[at]] * rng.choice((0, 2))), *lines[at + 1 :]]


def programs_of_two_ranks(rng: Random, lines: Lines) -> Lines | None:
    """Two ranks do each other's operations, or call themselves each other."""
    heads = [i for i, line in enumerate(lines) if line.startswith("rank ")]
    head, other = sorted(rng.sample(heads, 2))
    if rng.random() < 0.3:
        lines[head], lines[other] = lines[other], lines[head]
        return lines
    first, second = program_of(lines, head + 1), program_of(lines, other + 1)
    a, b = ([lines[i] for i in span if is_operation(lines[i])] for span in (first, second))
    declared_a, declared_b = (
        [lines[i] for i in span if not is_operation(lines[i])] for span in (first, second)
    )
    between = lines[first.stop : second.start]
    return [
        *lines[: first.start],
        *(*declared_a, *b, *between, *declared_b, *a),
        *lines[second.stop :],
    ]


def the_schedule(rng: Random, lines: Lines) -> Lines | None:
    places = [i for i, line in enumerate(lines) if line.startswith("step ")]
    place, other = rng.choice(places), rng.choice(places)
    bodies = [line.split(" ", 2) for line in (lines[place], lines[other])]
    lines[place] = f"step {bodies[0][1]} {bodies[1][2]}"
    lines[other] = f"step {bodies[1][1]} {bodies[0][2]}"
    return lines


def the_problem(rng: Random, lines: Lines) -> Lines | None:
    """A field of the first line: sizes, mask, layouts, devices."""
    head = json.loads(lines[1])
    table = rng.choice((head, head["problem"], head["problem"]["mask"], head["q_layout"]))
    name = rng.choice([key for key, value in table.items() if not isinstance(value, dict)])
    value = table[name]
    if isinstance(value, bool):
        table[name] = not value
    elif isinstance(value, int):
        table[name] = max(0, value + rng.choice((-1, 1, value, -(value // 2))))
    elif isinstance(value, list):
        rng.shuffle(value)
    elif name == "kind":
        table[name] = rng.choice(("contiguous", "zigzag", "striped"))
    elif value is None:
        table[name] = rng.choice((2, [0, 2], [1, 0], "2", True))
    lines[1] = json.dumps(head)
    return lines


PROGRAMS: tuple[Mutation, ...] = (
    a_member,
    both_members_swapped,
    the_group_of_an_operation,
    members_of_a_group,
    two_operations_swapped,
    an_operation_moved,
    an_operation_dropped,
    an_operation_doubled,
    an_operation_of_another_rank,
    what_is_freed,
    a_buffer,
    two_names_of_buffers,
    a_line_dropped_or_doubled,
    programs_of_two_ranks,
    the_schedule,
    the_problem,
)
