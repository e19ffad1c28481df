"""Tensor parallelism: parameters cut over the ranks along `tp`, and what is exchanged between them.

decide   tensor_decision    the plan: rules given, carried by the model, or inferred; then each rank's portions
         cut_outline        what a plan has to know of a model: which modules compute linear maps
         rule_inference     rules from one traced forward, tried until a rehearsal passes
             forward_recording, operation_rules, atoms      the trace
             rehearsal                                      the model as each rank would run it, in one process
run      styles             wrappers around the forwards of cut modules
         tp_collectives     collectives with their gradients
         vocabulary         the cross-entropy over cut logits
         summed_gradients   gradients that each rank has in part
check    region_proof       each region compared cut and whole, when it first runs
         isolated_runs      a module run without a trace in the training
"""
