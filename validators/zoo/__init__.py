"""The zoo: small steps with one fault each, and their clean twins.

It answers two questions about the validator: which faults does it find under the right name, and
how often does it accuse a step that is right. `registry` holds what each mutant shows, `run` runs
them, `rates` counts.
"""
