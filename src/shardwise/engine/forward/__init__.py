"""One forward: on which module and microbatch, what stands around it, and what it reads, writes and draws."""
