"""Tensor parallelism: parameters cut over the ranks along `tp`, and what is exchanged between them.

decide   tensor_decision    the plan: rules given, carried by the model, or inferred; then each rank's portions
         cut_outline        what a plan has to know of a model: which modules compute linear maps
         auto               an edge: rules from one traced forward
run      styles             wrappers around the forwards of cut modules
         tp_collectives     collectives with their gradients
         vocabulary         the cross-entropy over cut logits
         summed_gradients   gradients that each rank has in part
check    proof              an edge: each region compared cut and whole, when it first runs
"""
