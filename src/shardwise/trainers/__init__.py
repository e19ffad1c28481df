"""What the Trainers of other libraries ask of ranks: `data_ranks`, `rank_calls`; and of models: `config_samples`."""
