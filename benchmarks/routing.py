"""Routing by prefix against round robin, simulated: the table of docs/scale/operations.md.

`python -m benchmarks.routing`. With --costs A,B,C: the milliseconds of a step itself, of each sequence and of
each prompt token.
"""

from __future__ import annotations

import argparse

from benchmarks.simulation import Engine, Load, Routing, StepCosts, simulate

_RATE = 4.0  # requests a second and replica
_ROUTINGS: tuple[Routing, ...] = ("prefix", "round-robin")


def main() -> None:
    """Simulates 1 to 1,000 replicas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs", default="2,0.4,0.25")
    parser.add_argument("--replicas", default="1,2,8,32,128,1000")
    arguments = parser.parse_args()
    costs = StepCosts(*(float(number) / 1e3 for number in arguments.costs.split(",")))
    engine = Engine(costs, n_pages=4096)
    print("| replicas | routing | cache hits | first token, median | 99% | busiest / mean |")
    print("| --- | --- | --- | --- | --- | --- |")
    for n in map(int, arguments.replicas.split(",")):
        load = Load(rate=_RATE * n, n_requests=min(max(400 * n, 2000), 30_000), n_prefixes=8 * n)
        for routing in _ROUTINGS:
            one = simulate(engine, load, n, routing)
            times = f"{1e3 * one.first_token_p50_s:,.0f} ms | {1e3 * one.first_token_p99_s:,.0f} ms"
            print(f"| {n:,} | {routing} | {one.hit_rate:.0%} | {times} | {one.imbalance:.2f} |", flush=True)


if __name__ == "__main__":
    main()
