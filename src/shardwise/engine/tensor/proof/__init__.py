"""The proof of tensor parallelism: `Proof` of `region_proof` compares each region cut and whole, when it first runs."""
