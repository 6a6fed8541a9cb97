"""Communication between ranks: the "weft" backend of torch.distributed, and what the ops call underneath it."""
