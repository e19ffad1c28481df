"""Rules of tensor parallelism that one forward shows: `infer_plan` of `rule_inference` finds them.

rule_inference                                 rules from one traced forward, tried until a rehearsal passes
forward_recording, operation_rules, atoms      the trace
rehearsal                                      the model as each rank would run it, in one process
"""
