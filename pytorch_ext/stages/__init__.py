"""What Pipeline and LayerSplit share: a model's forward as a chain of layers, cut where the cost says."""
