"""Passes over recorded ops: each takes a list of ops and returns the one that runs in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from kukri.kernels.cpu.plan.ops import (
    Add,
    Attend,
    AttentionWork,
    Buffer,
    Op,
    Producer,
    Quantize,
    RMSNorm,
    RopeStore,
    Scale,
    Value,
    cut_of,
)


def run_passes(ops: Sequence[Op], result: Value) -> list[Op]:
    """All passes, in their order. `result` is the value read after the last op."""
    fused = quantize_in_producer(fuse_add(fuse_rope_store(ops)))
    return add_attention_work(drop_unread(fused, result))


def fuse_rope_store(ops: Sequence[Op]) -> list[Op]:
    """Fuses the op that rotates q and k with the next, if that writes keys and values."""
    fused: list[Op] = []
    for op in ops:
        last = fused[-1] if fused else None
        if isinstance(op, RopeStore) and isinstance(last, RopeStore) and _joins(last, op):
            fused[-1] = replace(op, rope=last.rope)
        else:
            fused.append(op)
    return fused


def _joins(rotation: RopeStore, store: RopeStore) -> bool:
    return (
        (rotation.q, rotation.k) == (store.q, store.k)
        and (rotation.stores, rotation.rope is None) == (False, False)
        and (store.stores, store.rope is None) == (True, True)
    )


def fuse_add(ops: Sequence[Op]) -> list[Op]:
    """Makes one op of an addition and the norm or factor before it, whose result nothing else reads."""
    n_reads = Counter(buffer for op in ops for buffer in op.read_buffers())
    fused: list[Op] = []
    for op in ops:
        last = fused[-1] if fused else None
        if isinstance(op, Add) and n_reads[op.x.buffer] == 1 and op.residual is not op.x:
            if isinstance(last, RMSNorm) and last.y is op.x:
                fused[-1] = replace(last, y=op.y, residual=op.residual)
                continue
            if isinstance(last, Scale) and last.y is op.x:
                fused[-1] = Add(op.y, last.x, op.residual, last.factor)
                continue
        fused.append(op)
    return fused


def quantize_in_producer(ops: Sequence[Op]) -> list[Op]:
    """Makes an op write its result's int8 panels itself, in place of an op that quantizes the result.

    Not if the result is edited between the two, as by a listener at a tap.
    """
    kept: list[Op] = []
    producers: dict[Value, int] = {}  # by results that are as they were left: the number of their op
    for op in ops:
        if isinstance(op, Quantize) and op.kind == "q8" and op.x in producers:
            i = producers[op.x]
            kept[i] = replace(cast("Producer", kept[i]), panels=op.y)
            continue
        if edited := op.edited():
            producers = {value: i for value, i in producers.items() if value.buffer not in edited}
        if isinstance(op, Producer) and op.y is not None:
            producers[op.y] = len(kept)
        kept.append(op)
    return kept


def drop_unread(ops: Sequence[Op], result: Value) -> list[Op]:
    """Drops float results that nothing reads from ops that write panels."""
    read: set[Buffer] = {result.buffer}.union(*(op.read_buffers() for op in ops))
    return [
        replace(op, y=None)
        if isinstance(op, Producer) and op.panels and op.y and op.y.buffer not in read
        else op
        for op in ops
    ]


def add_attention_work(ops: Sequence[Op]) -> list[Op]:
    """Adds the ops that cut a step's attention into work entries, one for each kind of layer.

    They come first, so that no layer waits for them.
    """
    specs = {cut_of(op.spec): op.spec for op in ops if isinstance(op, Attend)}
    return [*(AttentionWork(spec) for spec in specs.values()), *ops]
