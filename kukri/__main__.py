"""The `kukri` command, and `python -m kukri`."""

import gc

_GC_THRESHOLD = 50_000  # objects between collections: with Python's 700, a start finds nothing in 40 ms


def main() -> None:
    """Run the command line of this process, with few collections of garbage from its first import on."""
    gc.set_threshold(_GC_THRESHOLD)
    from kukri.cli import main as run

    run()


if __name__ == "__main__":
    main()
