"""What a run has besides its updates, in any loop: in `shardwise train`, in the Trainers of others, in your own."""
