"""What becomes of the tensors that forwards save for backward: run again, kept on the host, chosen for a budget."""
