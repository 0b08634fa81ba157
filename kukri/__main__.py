"""`python -m kukri` is the `kukri` command."""

from kukri.cli import main

if __name__ == "__main__":
    main()
