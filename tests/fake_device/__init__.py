"""An accelerator of eight devices for machines without one, so that tests run on a device: `fake:0` to `fake:7`.

    tests -> the fixture `fake` -> accelerator.py: torch.fake, counts, stacks
                                        |
                                   library.py: built once per checkout from accelerator.cpp and memory.h

The host has no right to touch the devices' memory. Kernels are those of the CPU, so bits and strides are the CPU's.
What would stop the host on an accelerator is counted.
"""
