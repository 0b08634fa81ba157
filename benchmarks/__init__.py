"""The experiments behind kukri's figures. Run each from a checkout: `python -m benchmarks.peers --help`.

Each compares sides in turns, shows medians of the ratios of rounds, and prints one JSON line last.
"""
