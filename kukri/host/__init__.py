"""The machine and its operating system: hardware, system calls, private and memory-mapped files."""
