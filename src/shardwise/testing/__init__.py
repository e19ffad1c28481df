"""What tests of others use: a double of devices and of NCCL, and the suites of formats, stores and channels.

`formats`, `stores` and `channels` have the claims that each implementation must fulfil: docs/guides/extending.md. For
tests of devices where there are none, an accelerator of eight fake devices and a strict double of NCCL:

    a test -> accelerator.py: torch.fake, counts, delays      strict.py: the backend "strict" of torch.distributed
                    |                                             |
              library.py: built once from accelerator.cpp, backend.cpp and communicator.cpp

The host has no right to touch the devices' memory. Kernels are those of the CPU, so bits and strides are the CPU's.
What would stop the host on an accelerator is counted. Nothing else in this package imports this, and nothing here needs
the rest of it. Needs a C++ compiler (`library.compiler`). docs/guides/testing.md shows how to use it.
"""
