"""Steps on accelerators against a plain loop, DDP and FSDP2 with the same settings; on CPU processes as a dry run."""
