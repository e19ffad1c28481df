"""What steps cost in time and memory, on each rank."""
