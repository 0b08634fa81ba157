"""Sampling on the device that has the logits: tokens cross to the host, not rows.

It takes the common stages in their usual order: bias, allowed and forbidden tokens; penalties and DRY; then
top-k, top-p, min-p and temperature. Rows with other stages, or in another order, are brought to the host.

Tokens and probabilities are bit-identical to `reference_sampling`'s, whatever the batch: a token's weight is
a whole number, and sums of those are exact in any order (see `sampling_record`). So is the sum of exp for
log-probabilities, of units of 2^-42, which is the definition's within 10^-7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kukri.errors import UnsupportedError
from kukri.kernels.arrays import DoubleArray
from kukri.kernels.backend import Logits, SamplingBackend
from kukri.kernels.host_step import HostLogits
from kukri.kernels.pytorch.step import TensorLogits
from kukri.kernels.sampling_record import (
    CHOSEN,
    LOG2_E,
    MAX_SCALE,
    MAX_VOCAB,
    MIN_DEPTH,
    MIN_SCALE,
    NONE_ALLOWED,
    NOT_FINITE,
    POWER_TERMS,
    WEIGHT_BITS,
    SamplingRecords,
)
from kukri.kernels.sampling_stages import DRY, EDITS, END, MIN_P, PENALTIES, TEMPERATURE, TOP_K, TOP_P

_EXP_UNITS = 2.0**42  # units of a sum of exp: MAX_VOCAB of them fit into int64
_FLOAT32_MAX = 3.4028234663852886e38


class TorchSampling:
    """See `backend.SamplingBackend`. Needs a device with float64; other logits than tensors go to `host`."""

    def __init__(self, host: Callable[[], SamplingBackend]) -> None:
        """`host` gives the sampling for rows that are brought there, when one is."""
        self._host = host

    def choose(self, records: SamplingRecords, logits: Logits) -> None:
        """See SamplingBackend.choose. Raises UnsupportedError on a vocabulary that is too large."""
        if not isinstance(logits, TensorLogits):
            self._host().choose(records, logits)
            return
        n_vocab = logits.shape[1]
        if n_vocab > MAX_VOCAB:
            raise UnsupportedError(f"sampling from more than {MAX_VOCAB} tokens is not supported: {n_vocab}")
        groups: dict[tuple[bool, bool, tuple[int, ...]] | None, list[int]] = {}
        for i in range(len(records.fields)):
            groups.setdefault(_kind(records, i), []).append(i)
        for kind, chosen in groups.items():
            if kind is None:
                self._on_host(records, chosen, logits)
            else:
                _Group(records, chosen, logits).choose(*kind)

    def _on_host(self, records: SamplingRecords, chosen: list[int], logits: TensorLogits) -> None:
        """Brings the rows of these records to the host, and has their tokens chosen there."""
        rows = records.fields["row"][chosen]
        part = records.part(chosen)
        self._host().choose(part, HostLogits(logits.take(rows.tolist()).numpy()))
        part.fields["row"] = rows
        for place, i in enumerate(chosen):
            records.fields[i] = part.fields[place]


def _kind(records: SamplingRecords, i: int) -> tuple[bool, bool, tuple[int, ...]] | None:
    """(is given, is greedy, stages) of a record; None for stages that the device does not take."""
    fields = records.fields
    if fields["is_given"][i]:
        return True, False, ()
    stages = fields["stages"][i].tolist()
    stages = stages[: stages.index(END)] if END in stages else stages
    if fields["is_greedy"][i]:
        stages = [stage for stage in stages if stage in EDITS]
        return (False, True, tuple(stages)) if _RUN.keys() >= set(stages) else None
    has_filtered = False
    for stage in stages:
        has_filtered |= stage not in (*EDITS, TEMPERATURE)
        if stage not in _RUN or (stage in EDITS and has_filtered):
            return None
    if TEMPERATURE in stages and fields["temperature_range"][i] > 0:
        return None
    return False, False, tuple(stages)


class _Group:
    """Records with the same stages, and their rows: `x` float32 [R, n], -inf for tokens that are out.

    `ids` int64 [R, n], ascending, are the tokens of the columns; None if all are there.
    """

    def __init__(self, records: SamplingRecords, chosen: list[int], logits: TensorLogits) -> None:
        self._records, self._chosen = records, chosen
        self._logits = logits.take(self._numbers("row").tolist()).tensor
        self._device = self._logits.device
        self._is_copied = False
        self.x = self._logits
        self.ids: Tensor | None = None
        self._scale = np.ones(len(chosen))

    def choose(self, is_given: bool, is_greedy: bool, stages: Sequence[int]) -> None:
        """Chooses a token for each record, and fills in its results."""
        peak, likeliest = self._logits.max(1)  # the lowest id of equals
        peak = peak.double()
        results = {"peak": peak}
        if not is_given:
            self._edit_rows()
            for stage in stages:
                _RUN[stage](self)
            if self.x is not self._logits:
                last_peak, likeliest = self.x.max(1)
                results["last_peak"] = last_peak.double()
            if is_greedy:
                results["token"] = likeliest.double()
            else:
                results["token"], results["probability"] = self._draw()
        has_logprobs = self._numbers("has_logprobs").any()
        if has_logprobs:
            units = torch.exp(self._logits.double() - peak[:, None]) * _EXP_UNITS
            results["sum_exp"] = units.round().long().sum(1).double() / _EXP_UNITS
        on_host = torch.stack(list(results.values())).cpu().numpy()
        self._fill_in(dict(zip(results, on_host, strict=True)))
        if has_logprobs:
            self._report_top()

    def _fill_in(self, results: dict[str, DoubleArray]) -> None:
        """Writes numbers [R] to the records' results; of rows that are unusable the peak and a status."""
        fields, peak = self._records.fields, results["peak"]
        last_peak = results.pop("last_peak", peak)
        results["peak"] = np.where(np.isfinite(peak), np.where(np.isfinite(last_peak), peak, last_peak), peak)
        is_chosen = np.isfinite(results["peak"])
        failed = np.where(results["peak"] == -np.inf, NONE_ALLOWED, NOT_FINITE)
        fields["status"][self._chosen] = np.where(is_chosen, CHOSEN, failed)
        fields["peak"][self._chosen] = results.pop("peak")
        good = np.array(self._chosen)[is_chosen]
        for name, numbers in results.items():
            fields[name][good] = numbers[is_chosen]

    def _numbers(self, name: str) -> npt.NDArray[Any]:
        """A field of the records [R]."""
        numbers: npt.NDArray[Any] = self._records.fields[name][self._chosen]
        return numbers

    def _upload(self, *arrays: npt.NDArray[Any]) -> Tensor:
        """Arrays of one length as float64 [arrays, n], by one copy."""
        return torch.from_numpy(np.array(arrays, np.float64)).to(self._device)

    def _edit_rows(self) -> None:
        """Adds the bias, and forbids tokens."""
        self._add("bias", 1.0)
        if self._numbers("n_allowed").any():
            words = np.full((len(self._chosen), -(-self.x.shape[1] // 32)), -1, np.int32)
            for place, i in enumerate(self._chosen):
                (allowed,) = self._records.table(i, "allowed")
                words[place, : len(allowed)] = allowed[: words.shape[1]]
            numbers = torch.arange(self.x.shape[1], device=self._device)
            bits = torch.from_numpy(words).to(self._device)[:, numbers >> 5] >> (numbers & 31).int()
            self.x, self._is_copied = self.x.masked_fill((bits & 1) == 0, -torch.inf), True
        entries, (ids,) = self._tables("forbidden")
        if len(ids):
            places = self._upload(entries * self.x.shape[1] + ids)[0].long()
            self._own().view(-1)[places] = -torch.inf

    def _tables(self, name: str) -> tuple[npt.NDArray[Any], list[npt.NDArray[Any]]]:
        """(row of each entry, the arrays) of all records' tables of a name, one after another."""
        tables = [self._records.table(i, name) for i in self._chosen]
        rows = np.repeat(np.arange(len(tables)), [len(table[0]) for table in tables])
        return rows, [np.concatenate(arrays) for arrays in zip(*tables, strict=True)]

    def _own(self) -> Tensor:
        """`x` as a contiguous copy, which may be written."""
        if not self._is_copied:
            self.x, self._is_copied = self.x.clone(memory_format=torch.contiguous_format), True
        return self.x

    def _change(self, places: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces the logits at places of all rows, in float64."""
        flat, at = self._own().view(-1), places.long()
        flat[at] = change(flat[at].double()).float()

    def _add(self, name: str, sign: float) -> None:
        """Adds the values of a table, in units of the logits as they are now."""
        rows, (values, ids) = self._tables(name)
        if len(ids):
            numbers = self._upload(rows * self.x.shape[1] + ids, values * sign / self._scale[rows])
            self._change(numbers[0], lambda logits: logits + numbers[1])

    def dry(self) -> None:
        """Take DRY's penalties."""
        self._add("dry", -1.0)

    def temperature(self) -> None:
        """Divide the logits."""
        value = np.maximum(self._numbers("temperature"), 1e-9)
        self._scale = np.clip(self._scale / value, MIN_SCALE, MAX_SCALE)

    def penalties(self) -> None:
        """Take the penalties of repetition, presence and frequency."""
        rows, (ids, counts, generated) = self._tables("seen")
        if not len(ids):
            return
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        repetition, presence, frequency = (self._numbers(name)[rows] for name in names)
        places, scale, repeats, by_repetition, subtracted, by_frequency = self._upload(
            rows * self.x.shape[1] + ids,
            self._scale[rows],
            counts,
            repetition,
            np.where(generated > 0, presence, 0.0),
            frequency * generated,
        )

        def change(logits: Tensor) -> Tensor:
            x = logits * scale
            repeated = torch.where(x > 0, x / by_repetition, x * by_repetition)
            x = torch.where(repeats > 0, repeated, x) - subtracted
            changed: Tensor = (x - by_frequency) / scale
            return changed

        self._change(places, change)

    def top_k(self) -> None:
        """Keep the k largest logits."""
        n = self.x.shape[1]
        k = np.clip(self._numbers("top_k"), 1, n)
        if (k == n).all():
            return
        places = _keys(self.x).topk(int(k.max()), dim=1).indices
        is_kept = torch.arange(places.shape[1], device=self._device) < self._upload(k).long().T
        x = self.x.gather(1, places).masked_fill(~is_kept, -torch.inf)
        places, order = places.sort(1)
        self.x, self._is_copied = x.gather(1, order), True
        self.ids = places if self.ids is None else self.ids.gather(1, places)

    def top_p(self) -> None:
        """Keep the fewest, likeliest tokens that have a share p of the probability."""
        weights = self._weights()
        target = (self._upload(self._numbers("top_p"))[0] * weights.sum(1)).clamp(min=1.0)
        order = torch.sort(self.x + 0.0, dim=1, descending=True, stable=True).indices
        n_before = (weights.gather(1, order).cumsum(1) < target[:, None]).sum(1, keepdim=True)
        is_out = torch.arange(self.x.shape[1], device=self._device) > n_before
        self.x = self.x.masked_fill(torch.zeros_like(is_out).scatter(1, order, is_out), -torch.inf)
        self._is_copied = True

    def min_p(self) -> None:
        """Keep the tokens at least p times as likely as the likeliest."""
        below = self._upload(self._numbers("min_p_depth") / self._scale)[0]
        least = (self.x.amax(1).double() + below).clamp(-_FLOAT32_MAX, _FLOAT32_MAX).float()
        self.x, self._is_copied = self.x.masked_fill(self.x < least[:, None], -torch.inf), True

    def _weights(self) -> Tensor:
        """float64 [R, n], whole numbers: see `reference_sampling.weights_of`."""
        # each product and sum is an operation of its own, so that none is fused
        factor = self._upload((self._scale * LOG2_E).astype(np.float32))[0].float()
        depths = (self.x - self.x.amax(1, keepdim=True)) * factor[:, None]
        t = depths.clamp(min=MIN_DEPTH)
        n = t.round()
        f = t - n
        p = torch.full_like(f, POWER_TERMS[0])
        for term in (*POWER_TERMS[1:], 1.0):
            p = p * f
            p = p + term
        power = ((n.int() + (WEIGHT_BITS + 127)) << 23).view(torch.float32)
        weights: Tensor = (p * power).round().double()
        return weights

    def _draw(self) -> tuple[Tensor, Tensor]:
        """The tokens at the points u of the weights' sums, in order of id, and their probabilities."""
        weights = self._weights()
        running = weights.cumsum(1)
        total = running[:, -1]
        point = torch.minimum((self._upload(self._numbers("u"))[0] * total).floor(), total - 1.0)
        place = (running <= point[:, None]).sum(1, keepdim=True).clamp(max=self.x.shape[1] - 1)
        token = place if self.ids is None else self.ids.gather(1, place)
        return token[:, 0].double(), weights.gather(1, place)[:, 0] / total

    def _report_top(self) -> None:
        """Fills in the tables of the likeliest tokens, in order of id."""
        fields, n_top = self._records.fields, self._numbers("n_top") * self._numbers("has_logprobs")
        width = min(int(n_top.max()), self._logits.shape[1])
        places = _keys(self._logits).topk(width, dim=1).indices
        found = torch.stack([places.double(), self._logits.gather(1, places).double()]).cpu().numpy()
        for place, i in enumerate(self._chosen):
            best, logits = found[:, place, : n_top[place]]
            order = np.argsort(best)
            order = order[logits[order] > -np.inf]
            if n_top[place]:
                ids, values = self._records.table(i, "top")
                ids[: len(order)], values[: len(order)] = best[order], logits[order]
            fields["n_top_found"][i] = len(order)


# The stages that the device takes
_RUN: dict[int, Callable[[_Group], None]] = {
    PENALTIES: _Group.penalties,
    DRY: _Group.dry,
    TOP_K: _Group.top_k,
    TOP_P: _Group.top_p,
    MIN_P: _Group.min_p,
    TEMPERATURE: _Group.temperature,
}


def _keys(x: Tensor) -> Tensor:
    """int64 [R, n]: larger for larger numbers, of equals for those first in their row."""
    bits = (x + 0.0).view(torch.int32)  # no negative zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) - torch.arange(x.shape[1], device=x.device)
