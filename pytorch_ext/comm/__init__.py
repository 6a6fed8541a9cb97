"""Communication between ranks: the "weft" backend of torch.distributed, and the layer that the ops call."""
