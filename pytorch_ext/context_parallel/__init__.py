"""Context parallelism for a model that is written for a whole sequence: ranks share the sequence inside of the model.

Inside of the model a tensor along the sequence is a SharedSequence: it has the shape of the whole, and this rank's part
of the data. A function that treats every position alone computes on the part. Attention goes over the ranks, and sums
over the sequence are summed over the ranks. Any other function gets the whole, gathered.

So the result is always the unsplit model's, and `weft.explain` names the places where a gather costs more than
necessary.

    shared_sequence.py  the tensor, and the gather for a function without a rule
    function_rules.py   the rule of each function
    attention.py        scaled_dot_product_attention, MultiheadAttention
    transformers_attention.py  the attention interface of transformers
    region.py           the model's edge: whole tensors become shared, shared tensors become whole
    uncompiled.py       what torch.compile leaves out of its graphs
    notes.py            records of the run, for weft.explain

Gradients: a tensor that every rank has whole has a whole gradient, the same on every rank, inside of the model and
outside. If it meets a shared tensor, its gradient is summed over the ranks (ops/mappings.py).
"""
