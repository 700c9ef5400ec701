"""CPU kernels: compiled by numba, or private operators of torch. Check them at every torch upgrade."""
