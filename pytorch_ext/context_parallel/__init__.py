"""A model whose sequence is shared by ranks, and does not know.

Inside of the model a tensor along the sequence is a SharedSequence: it has the whole's shape, and this rank's part of
the data. Functions that treat every position alone compute on the part; attention goes over the ranks; sums over the
sequence are summed over the ranks; and whatever else the model calls gets the whole, gathered. So the result is the
unsplit model's whatever the model does, and `weft.explain` says where it costs more than it need.

    shared_sequence.py  the tensor, and what happens to a function that has no rule
    function_rules.py   what functions do to it
    attention.py       scaled_dot_product_attention, MultiheadAttention
    hugging_face.py    the attention interface of transformers
    region.py          the model's edge: whole tensors become shared ones and shared ones whole
    notes.py           what happened where, for weft.explain

Gradients: a tensor that every rank has whole has a whole gradient, the same on every rank, inside of the model as
outside. Where it meets a shared one its gradient is summed over the ranks (ops/mappings.py).
"""
