"""Formats of checkpoints: what other programs write, read as `Contents`, and what is written for them.

a store -> registry: which format -> its `read` -> Contents     outputs -> its target -> the files of a folder

format                             what each is: recognise, read, write
huggingface dcp deepspeed megatron torch_save gguf     one file or folder each, which can be taken away
torch_files                        files of `torch.save`: archives and pickles, whose code never runs
state_dicts optimizer_states       the model's names for what such a file holds
found_tensors optimizer_settings   the same for flat vectors and groups of other programs
strided model_shards saved_boxes    what several formats share
unread                             what is none, in words
"""
