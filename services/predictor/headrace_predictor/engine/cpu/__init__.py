"""CPU kernels: compiled by numba, or private operators of torch. Test them at every torch upgrade."""
