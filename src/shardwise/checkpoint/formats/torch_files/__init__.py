"""Files of `torch.save`, and archives as it writes them: zip files of a pickle and of elements. Nothing is run."""
