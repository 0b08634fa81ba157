"""How kernels are defined and become machine code, and where it is kept."""
