"""Kernels of recurrent layers, whose state goes from token to token of a sequence.

A tile has some channels or heads of all or one of the step's sequences and takes tokens in order, each by the
same operations whatever else is in the step: so no bit depends on how a prompt is cut into steps. States lie
in slots (`ForwardBatch.state_slots`), in an order of their numbers that each kernel states.
"""

from __future__ import annotations

from kukri.kernels.cpu.compile.intrinsics import (
    device,
    f32_of_bits,
    load_f32,
    load_i32,
    load_i64,
    stack_bytes,
    store_f32,
)
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.simd import (
    exponential,
    first_lane,
    fma,
    load_f32x16,
    maximum,
    minimum,
    softplus,
    splat,
    store_f32x16,
)
from kukri.kernels.cpu.run.abi import CONTEXT_LEN, N_SEQUENCES, QUERY_START, STATE_SAVES, STATE_SLOTS

_CONV_BYTES = 256  # bytes of a row, in one tile
_BLOCK_TOKENS = 64  # whose gates are computed together, and that pass over a piece of a state together
_GATE_BYTES = 4 * _BLOCK_TOKENS
_PART_VALUES = 64  # values of a head, in one tile


@device
def _first_token(batch, sequence):
    """The first token of a sequence in the step; of the number after the last, the number of tokens."""
    return load_i32(load_i64(batch + QUERY_START) + 4 * sequence)


@device
def _seen_stop(batch, sequence):
    """One past the last token of a sequence that others see."""
    n_seen = load_i32(load_i64(batch + CONTEXT_LEN) + 4 * sequence)
    return min(_first_token(batch, sequence) + n_seen, _first_token(batch, sequence + 1))


@device
def _begins(batch, sequence):
    """True if a sequence's first token in the step is its first at all."""
    n_tokens = _first_token(batch, sequence + 1) - _first_token(batch, sequence)
    return load_i32(load_i64(batch + CONTEXT_LEN) + 4 * sequence) == n_tokens


@device
def _input(place, x, x_stride, start, state, row, n_before, begins):
    """Return the 16 inputs of token `place`; inputs before `start` are in the state, or zeros."""
    if place >= start:
        return load_f32x16(x + place * x_stride)
    if begins:
        return splat(0.0)
    return load_f32x16(state + (place - start + n_before) * row)


def conv(tile, batch, x, x_stride, n, taps, bias, n_taps, is_activated, state, slot_bytes, y, y_stride):
    """y = the sum over taps of tap * input, of n channels each; `bias` is 0 for none. n % 16 == 0.

    State: rows of the last n_taps - 1 inputs, the oldest first.
    """
    row = 4 * n
    n_parts = (row + _CONV_BYTES - 1) // _CONV_BYTES
    if tile < 0:
        return n_parts
    n_before = n_taps - 1
    saves = load_i64(batch + STATE_SAVES)
    for sequence in range(load_i64(batch + N_SEQUENCES)):
        start = _first_token(batch, sequence)
        stop = _first_token(batch, sequence + 1)
        begins = _begins(batch, sequence)
        slot = load_i32(load_i64(batch + STATE_SLOTS) + 4 * sequence)
        for i in range(tile * _CONV_BYTES, min((tile + 1) * _CONV_BYTES, row), 64):
            own = state + slot * slot_bytes + i
            for t in range(start, stop):
                total = load_f32x16(bias + i) if bias != 0 else splat(0.0)
                for k in range(n_taps):
                    value = _input(t - n_before + k, x + i, x_stride, start, own, row, n_before, begins)
                    total = fma(load_f32x16(taps + k * row + i), value, total)
                if is_activated != 0:
                    total = total / (splat(1.0) + exponential(splat(0.0) - total))
                store_f32x16(y + t * y_stride + i, total)
                save = load_i32(saves + 4 * t)
                if save >= 0:
                    for k in range(n_before):
                        value = _input(
                            t - n_before + 1 + k, x + i, x_stride, start, own, row, n_before, begins
                        )
                        store_f32x16(state + save * slot_bytes + i + k * row, value)
            for k in range(n_before):  # what a row becomes stands in a later one
                value = _input(stop - n_before + k, x + i, x_stride, start, own, row, n_before, begins)
                store_f32x16(own + k * row, value)
    return 0


def conv_both_ways(tile, batch, x, x_stride, n, taps, bias, n_taps, n_after, n_lines, y, y_stride):
    """The same without a state; the last n_after inputs of a token follow it. Hidden tokens have 0.

    Of `n_lines` lines of taps the middle one is for a token's sequence, others for those around it.
    """
    row = 4 * n
    n_parts = (row + _CONV_BYTES - 1) // _CONV_BYTES
    if tile < 0:
        return n_parts
    n_before = n_taps - 1 - n_after
    n_sequences = load_i64(batch + N_SEQUENCES)
    for sequence in range(n_sequences):
        start = _first_token(batch, sequence)
        stop = _first_token(batch, sequence + 1)
        seen = _seen_stop(batch, sequence)
        for i in range(tile * _CONV_BYTES, min((tile + 1) * _CONV_BYTES, row), 64):
            for t in range(start, stop):
                total = load_f32x16(bias + i) if bias != 0 and t < seen else splat(0.0)
                for line in range(n_lines):
                    other = sequence + line - n_lines // 2
                    if other >= 0 and other < n_sequences and t < seen:
                        first = _first_token(batch, other)
                        last = _seen_stop(batch, other)
                        for k in range(n_taps):
                            place = first + t - start - n_before + k
                            if first <= place and place < last:
                                total = fma(
                                    load_f32x16(taps + (line * n_taps + k) * row + i),
                                    load_f32x16(x + place * x_stride + i),
                                    total,
                                )
                store_f32x16(y + t * y_stride + i, total)
    return 0


@device
def _block_stop(batch, t, stop):
    """One past the last token from `t` on that is computed before the state is kept, or for long enough."""
    saves = load_i64(batch + STATE_SAVES)
    last = min(t + _BLOCK_TOKENS, stop)
    while t < last:
        if load_i32(saves + 4 * t) >= 0:
            return t + 1
        t += 1
    return last


@device
def _zero(address, n_bytes):
    for i in range(0, n_bytes, 64):
        store_f32x16(address + i, splat(0.0))


@device
def _keep(batch, t, state, slot, slot_bytes, offset, n_bytes):
    """Copies a piece of the state after token t to the slot that it is to be kept in, if there is one."""
    save = load_i32(load_i64(batch + STATE_SAVES) + 4 * t)
    if save >= 0:
        for i in range(offset, offset + n_bytes, 64):
            store_f32x16(state + save * slot_bytes + i, load_f32x16(state + slot * slot_bytes + i))


def scan(
    tile, batch, x, x_stride, b, b_stride, c, c_stride, dt, dt_stride, n_heads, n_groups, d_state, d_head, a,
    d, dt_bias, least, most, state, slot_bytes, y, y_stride,
):  # fmt: skip
    """S = exp(a dt) S + dt b xT, y = cT S + d x of each head, by `reference.scan`.

    State: of each head, of each 16 of its values, d_state rows of them. d_head % 16 == 0, d_state % 8 == 0.
    A tile is some values of a head of a sequence. Eight rows stay in registers while a block of tokens
    passes; each token's sum grows by eight rows at a time, in their order.
    """
    n_parts = (d_head + _PART_VALUES - 1) // _PART_VALUES
    if tile < 0:
        return load_i64(batch + N_SEQUENCES) * n_heads * n_parts
    part = tile % n_parts
    head = tile // n_parts % n_heads
    sequence = tile // n_parts // n_heads
    group = head // (n_heads // n_groups)
    start = _first_token(batch, sequence)
    stop = _first_token(batch, sequence + 1)
    slot = load_i32(load_i64(batch + STATE_SLOTS) + 4 * sequence)
    first = part * _PART_VALUES
    n_values = min(d_head - first, _PART_VALUES)
    offset = 4 * (head * d_head + first) * d_state
    n_bytes = 4 * n_values * d_state
    own = state + slot * slot_bytes + offset
    if _begins(batch, sequence):
        _zero(own, n_bytes)
    kept = stack_bytes(_GATE_BYTES)
    steps = stack_bytes(_GATE_BYTES)
    rate = load_f32(a + 4 * head)
    direct = splat(load_f32(d + 4 * head))
    column = 4 * (head * d_head + first)
    inputs = 4 * group * d_state
    t0 = start
    while t0 < stop:
        t1 = _block_stop(batch, t0, stop)
        for t in range(t0, t1):
            size = softplus(splat(load_f32(dt + t * dt_stride + 4 * head) + load_f32(dt_bias + 4 * head)))
            size = maximum(minimum(size, splat(f32_of_bits(most))), splat(f32_of_bits(least)))
            store_f32(steps + 4 * (t - t0), first_lane(size))
            store_f32(kept + 4 * (t - t0), first_lane(exponential(size * splat(rate))))
        for i in range(0, 4 * n_values, 64):
            rows = own + i * d_state
            for t in range(t0, t1):
                store_f32x16(
                    y + t * y_stride + column + i, direct * load_f32x16(x + t * x_stride + column + i)
                )
            for n in range(0, d_state, 8):
                s0 = load_f32x16(rows + 64 * n)
                s1 = load_f32x16(rows + 64 * n + 64)
                s2 = load_f32x16(rows + 64 * n + 128)
                s3 = load_f32x16(rows + 64 * n + 192)
                s4 = load_f32x16(rows + 64 * n + 256)
                s5 = load_f32x16(rows + 64 * n + 320)
                s6 = load_f32x16(rows + 64 * n + 384)
                s7 = load_f32x16(rows + 64 * n + 448)
                for t in range(t0, t1):
                    left = splat(load_f32(kept + 4 * (t - t0)))
                    value = load_f32x16(x + t * x_stride + column + i) * splat(load_f32(steps + 4 * (t - t0)))
                    bt = b + t * b_stride + inputs + 4 * n
                    ct = c + t * c_stride + inputs + 4 * n
                    s0 = fma(splat(load_f32(bt)), value, s0 * left)
                    s1 = fma(splat(load_f32(bt + 4)), value, s1 * left)
                    s2 = fma(splat(load_f32(bt + 8)), value, s2 * left)
                    s3 = fma(splat(load_f32(bt + 12)), value, s3 * left)
                    s4 = fma(splat(load_f32(bt + 16)), value, s4 * left)
                    s5 = fma(splat(load_f32(bt + 20)), value, s5 * left)
                    s6 = fma(splat(load_f32(bt + 24)), value, s6 * left)
                    s7 = fma(splat(load_f32(bt + 28)), value, s7 * left)
                    even = fma(splat(load_f32(ct)), s0, load_f32x16(y + t * y_stride + column + i))
                    odd = splat(load_f32(ct + 4)) * s1
                    even = fma(splat(load_f32(ct + 8)), s2, even)
                    odd = fma(splat(load_f32(ct + 12)), s3, odd)
                    even = fma(splat(load_f32(ct + 16)), s4, even)
                    odd = fma(splat(load_f32(ct + 20)), s5, odd)
                    even = fma(splat(load_f32(ct + 24)), s6, even)
                    odd = fma(splat(load_f32(ct + 28)), s7, odd)
                    store_f32x16(y + t * y_stride + column + i, even + odd)
                store_f32x16(rows + 64 * n, s0)
                store_f32x16(rows + 64 * n + 64, s1)
                store_f32x16(rows + 64 * n + 128, s2)
                store_f32x16(rows + 64 * n + 192, s3)
                store_f32x16(rows + 64 * n + 256, s4)
                store_f32x16(rows + 64 * n + 320, s5)
                store_f32x16(rows + 64 * n + 384, s6)
                store_f32x16(rows + 64 * n + 448, s7)
        _keep(batch, t1 - 1, state, slot, slot_bytes, offset, n_bytes)
        t0 = t1
    return 0


@device
def _delta_token(rows, d_state, q, k, value, left, rate):
    """Update 16 values of a head for one token: move k's value in the state to `value`, and read by q."""
    m0 = splat(0.0)
    m1 = splat(0.0)
    m2 = splat(0.0)
    m3 = splat(0.0)
    for j in range(0, d_state, 4):
        m0 = fma(splat(load_f32(k + 4 * j)), load_f32x16(rows + 64 * j), m0)
        m1 = fma(splat(load_f32(k + 4 * j + 4)), load_f32x16(rows + 64 * j + 64), m1)
        m2 = fma(splat(load_f32(k + 4 * j + 8)), load_f32x16(rows + 64 * j + 128), m2)
        m3 = fma(splat(load_f32(k + 4 * j + 12)), load_f32x16(rows + 64 * j + 192), m3)
    change = (value - left * ((m0 + m1) + (m2 + m3))) * rate
    m0 = splat(0.0)
    m1 = splat(0.0)
    m2 = splat(0.0)
    m3 = splat(0.0)
    for j in range(0, d_state, 4):
        s0 = fma(splat(load_f32(k + 4 * j)), change, left * load_f32x16(rows + 64 * j))
        s1 = fma(splat(load_f32(k + 4 * j + 4)), change, left * load_f32x16(rows + 64 * j + 64))
        s2 = fma(splat(load_f32(k + 4 * j + 8)), change, left * load_f32x16(rows + 64 * j + 128))
        s3 = fma(splat(load_f32(k + 4 * j + 12)), change, left * load_f32x16(rows + 64 * j + 192))
        store_f32x16(rows + 64 * j, s0)
        store_f32x16(rows + 64 * j + 64, s1)
        store_f32x16(rows + 64 * j + 128, s2)
        store_f32x16(rows + 64 * j + 192, s3)
        m0 = fma(splat(load_f32(q + 4 * j)), s0, m0)
        m1 = fma(splat(load_f32(q + 4 * j + 4)), s1, m1)
        m2 = fma(splat(load_f32(q + 4 * j + 8)), s2, m2)
        m3 = fma(splat(load_f32(q + 4 * j + 12)), s3, m3)
    return (m0 + m1) + (m2 + m3)


def delta_rule(
    tile, batch, q, q_stride, k, k_stride, v, v_stride, decay, decay_stride, beta, beta_stride, n_heads,
    n_groups, are_tiled, d_state, d_head, a, dt_bias, state, slot_bytes, y, y_stride,
):  # fmt: skip
    """S = exp(a dt) S; S += k (beta (v - kT S)); y = qT S of each head, by `reference.delta_rule`.

    State: of each head, of each 16 of its values, d_state rows of them. d_head % 16 == 0, d_state % 4 == 0.
    A tile is some values of a head of a sequence.
    """
    n_parts = (d_head + _PART_VALUES - 1) // _PART_VALUES
    if tile < 0:
        return load_i64(batch + N_SEQUENCES) * n_heads * n_parts
    part = tile % n_parts
    head = tile // n_parts % n_heads
    sequence = tile // n_parts // n_heads
    group = head % n_groups if are_tiled != 0 else head // (n_heads // n_groups)
    start = _first_token(batch, sequence)
    stop = _first_token(batch, sequence + 1)
    slot = load_i32(load_i64(batch + STATE_SLOTS) + 4 * sequence)
    first = part * _PART_VALUES
    n_values = min(d_head - first, _PART_VALUES)
    offset = 4 * (head * d_head + first) * d_state
    n_bytes = 4 * n_values * d_state
    own = state + slot * slot_bytes + offset
    if _begins(batch, sequence):
        _zero(own, n_bytes)
    kept = stack_bytes(_GATE_BYTES)
    rates = stack_bytes(_GATE_BYTES)
    column = 4 * (head * d_head + first)
    keys = 4 * group * d_state
    t0 = start
    while t0 < stop:
        t1 = _block_stop(batch, t0, stop)
        for t in range(t0, t1):
            size = softplus(
                splat(load_f32(decay + t * decay_stride + 4 * head) + load_f32(dt_bias + 4 * head))
            )
            left = exponential(size * splat(load_f32(a + 4 * head)))
            rate = splat(0.0) - splat(load_f32(beta + t * beta_stride + 4 * head))
            store_f32(kept + 4 * (t - t0), first_lane(left))
            store_f32(rates + 4 * (t - t0), first_lane(splat(1.0) / (splat(1.0) + exponential(rate))))
        for i in range(0, 4 * n_values, 64):
            for t in range(t0, t1):
                read = _delta_token(
                    own + i * d_state,
                    d_state,
                    q + t * q_stride + keys,
                    k + t * k_stride + keys,
                    load_f32x16(v + t * v_stride + column + i),
                    splat(load_f32(kept + 4 * (t - t0))),
                    splat(load_f32(rates + 4 * (t - t0))),
                )
                store_f32x16(y + t * y_stride + column + i, read)
        _keep(batch, t1 - 1, state, slot, slot_bytes, offset, n_bytes)
        t0 = t1
    return 0


KERNELS = {
    kernel.__name__: KernelSource(kernel.__name__, kernel)
    for kernel in (conv, conv_both_ways, scan, delta_rule)
}
