"""What the Trainers of other libraries ask of a plan's ranks, under any of the adapters: `data_ranks`, `rank_calls`."""
