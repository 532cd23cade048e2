"""Bounded dynamism: graphs with symbolic extents, compiled once for an upper bound and run at any size below it.

A value of extent ``s`` lives in a buffer padded to the bound; the true size is an argument of the executable. What lies in
the padding is undefined, so an op that mixes elements along a padded dimension sees it masked with what leaves its result
alone. Which mask that is, and how the dimension goes on, is a rule of the op; an op without a rule is refused by name.

``extents``    padded and true extents of dimensions, and the bounds of symbols;
``writer``     the static graph that is written: ops, sizes, masks;
``rules``      the table from ops to rules, and what a rule is given; ``rules_*`` the rules by family;
``translate``  turns a symbolic graph into a static one;
``symbols``    sizes that vary: where they are found, and their bounds;
``buckets``    which padded sizes there are;
``transfer``   copies between true and padded sizes;
``program``    the callable: pads inputs, launches, gives outputs of their true size;
``eager``      marks of single tensors (TorchTPU's ``torch_tpu._internal.dynamism``).
"""
