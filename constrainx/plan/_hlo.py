"""Reads the text of a compiled program: which instructions run, how often, and what they move."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

# What moves no data by itself.
FREE = (
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "iota", "broadcast", "async-start",
    "async-update", "opt-barrier", "add-dependency",
)  # fmt: skip
BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executed:
    """An instruction that runs, outside of fusions.

    Attributes:
        instruction: what.
        computation: the computation that it is in.
        times: how often a step runs it, or an iteration.
        is_iterated: whether it is in a loop whose length depends on the data.
    """

    instruction: Instruction
    computation: str
    times: int
    is_iterated: bool


class Module:
    """The computations of a compiled program, by name."""

    def __init__(self, text: str):
        """Reads what `jax.stages.Compiled.as_text` returns."""
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        inside: dict[str, Instruction] | None = None
        for line in text.splitlines():
            if inside is None:
                if header := re.match(r"(ENTRY )?%?([^\s(]+) \(.*\{$", line):
                    inside = self.computations.setdefault(header[2], {})
                    self.entry = header[2] if header[1] else self.entry
            elif line.startswith("}"):
                inside = None
            elif found := _read_instruction(line):
                inside[found.name] = found

    def walk(self) -> Iterator[Executed]:
        """Every instruction that runs; all branches of a condition count."""
        yield from self._walk(self.entry, times=1, is_iterated=False)

    def _walk(self, name: str, *, times: int, is_iterated: bool) -> Iterator[Executed]:
        for found in self.computations.get(name, {}).values():
            yield Executed(
                instruction=found, computation=name, times=times, is_iterated=is_iterated
            )
            if found.opcode == "while":
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', found.attributes)
                body = re.search(r"body=%?([^\s,]+)", found.attributes)
                if body:
                    inner = times * int(trips[1]) if trips else times
                    yield from self._walk(
                        body[1], times=inner, is_iterated=is_iterated or trips is None
                    )
            elif found.opcode in ("call", "conditional", "async-start"):
                for called in _find_called(found.attributes):
                    yield from self._walk(called, times=times, is_iterated=is_iterated)

    def count_fusion(
        self, fusion: Instruction, written: int, read: list[int]
    ) -> tuple[int, list[int]]:
        """What a fusion writes and reads, if it takes slices of its operands or changes one."""
        called = _find_called(fusion.attributes)
        inside = list(self.computations.get(called[0], {}).values()) if called else []
        numbers = {
            one.name: int(digits[1])
            for one in inside
            if one.opcode == "parameter" and (digits := re.match(r"\((\d+)", one.arguments))
        }
        read = list(read)
        for name, number in numbers.items():
            users = [one for one in inside if name in one.operands]
            first = [one for one in users if one.operands[0] == name]
            slices = [one for one in first if one.opcode in ("dynamic-slice", "gather", "slice")]
            changes = [one for one in first if one.opcode == "dynamic-update-slice"]
            if number >= len(read) or not users:
                continue
            if len(slices) == len(users):
                read[number] = sum(count_bytes(one.shape.split("{")[0]) for one in slices)
            elif len(changes) == len(users) and read[number] == written:
                # In place: only what is put there is written.
                shapes = {one.name: one.shape for one in inside}
                update = shapes.get(changes[0].operands[1], "")
                written, read[number] = count_bytes(update.split("{")[0]), 0
        return written, read

    def operand_shapes(self, executed: Executed) -> list[str]:
        """The shapes of an instruction's operands, tuples taken apart."""
        around = self.computations[executed.computation]
        return [
            shape
            for name in executed.instruction.operands
            if name in around
            for shape in find_arrays(around[name].shape)
        ]


def count_moved_bytes(text: str) -> tuple[int, int]:
    """Bytes that a device reads and writes, once in a step and in each iteration of its loops.

    Each instruction reads its operands and writes its results. A fusion is one instruction.
    """
    module = Module(text)
    sums = {False: 0, True: 0}
    for executed in module.walk():
        opcode = executed.instruction.opcode
        if opcode in FREE or opcode.endswith("-done"):
            continue
        # A collective reads and writes, too, besides what it sends.
        written = sum(map(count_bytes, find_arrays(executed.instruction.shape)))
        read = [count_bytes(shape) for shape in module.operand_shapes(executed)]
        if opcode in ("dynamic-slice", "gather", "slice"):
            read = [written]
        elif opcode == "dynamic-update-slice":
            written, read = read[1], read[1:2]
        elif opcode == "fusion":
            written, read = module.count_fusion(executed.instruction, written, read)
        sums[executed.is_iterated] += executed.times * (written + sum(read))
    return sums[False], sums[True]


def count_bytes(shape: str) -> int:
    """The size of an array.

    >>> count_bytes("bf16[3,4]")
    24
    """
    kind, _, dimensions = shape.rstrip("]").partition("[")
    bits = BITS.get(kind)
    if bits is None:
        digits = re.match(r"[a-z]+(\d+)", kind)
        bits = int(digits[1]) if digits else 8
    return math.ceil(math.prod(int(n) for n in dimensions.split(",") if n) * bits / 8)


def _find_called(attributes: str) -> list[str]:
    """The computations that a call, a condition or an asynchronous start runs."""
    names = re.findall(
        r"(?:to_apply|calls|true_computation|false_computation)=%?([^\s,}]+)", attributes
    )
    branches = re.search(r"branch_computations=\{(.*?)\}", attributes)
    return names + (re.findall(r"%?([^\s,%]+)", branches[1]) if branches else [])


def find_arrays(shape: str) -> list[str]:
    """The arrays of a shape, which may be a tuple."""
    return re.findall(r"\b[a-z]\w*\[[\d,]*\]", shape)


def _read_instruction(line: str) -> Instruction | None:
    head = re.match(r"\s+(?:ROOT )?%?([^\s=]+) = ", line)
    if not head:
        return None
    rest = line[head.end() :]
    end = _find_end(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, bracket, _ = rest.partition("(")
    if not bracket:
        return None
    close = _find_end(rest[len(opcode) :]) + len(opcode)
    names = re.findall(r"%([^\s,()]+)", rest[len(opcode) : close])
    return Instruction(
        name=head[1],
        opcode=opcode,
        shape=shape,
        operands=tuple(names),
        arguments=rest[len(opcode) : close],
        attributes=rest[close:],
    )


def _find_end(text: str) -> int:
    """Where the bracket that a text starts with is closed."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return index + 1
    return len(text)
